"""The journal of a run: what decides its tokens, how far they are, and what was kept of it before; and going
on with a run from its folder alone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tokenswift.chat.tools import Tools
from tokenswift.checks import named_arguments
from tokenswift.config import settings_of, shown
from tokenswift.engine.request import Request
from tokenswift.loader.identity import digest_of, versions
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.runs.folder import has_run, load
from tokenswift.runs.state import RunState, Session
from tokenswift.runs.writer import RunWriter, open_run
from tokenswift.types import Generation, InputError, OnProgress, Step
from tokenswift.words import OnLoop, counted

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM

logger = logging.getLogger("tokenswift")
PLAIN = str | int | float | tuple | list | None  # options that a journal can hold: no model objects


def asked_of(
    prompt: Prompt, tools: Tools | None = None, options: Mapping[str, Any] | None = None
) -> str | None:
    """What stands for a conversation, its tools and its template's options in `Request.asked`; None: the
    prompt is none."""
    asked = [prompt, tools and tools.forms, *([options] if options else [])]
    return digest_of(asked, default=str) if is_chat(prompt) else None


def _asked(request: Request) -> str | None:
    return request.asked or asked_of(request.prompt, None, request.template_options)


def kept_prompt(request: Request) -> list[int] | None:
    """The prompt's ids in a run's folder whose run was asked for by the very messages: templates may write
    today's date. None: there is no such run."""
    with suppress(InputError):  # taking the folder says what is wrong with it
        asked, folder = _asked(request), Path(request.run_dir or "")
        if asked is not None and has_run(folder):
            header = load(folder)[1].header
            return header.prompt if header.asked == asked else None
    return None


def open_journal(sequence: Any) -> RunWriter:
    """Take the folder of a text's run; the text goes on with the run that is there already.

    Raises:
        InputError: the folder cannot be written, holds another run, or one that is longer.
    """
    request, llm = sequence.request, sequence.llm
    identity: dict[str, Any] = {
        **llm.resources.identity(),
        "sampling": settings_of(request.sampling),
        "eos": sorted(sequence.eos),
        "stop": [text if isinstance(text, str) else list(text) for text in request.stop],
        "acceptance": sequence.strategy.acceptance,
    }
    header = {"kind": "header", "made": time.time(), "name": llm.name, "model": llm.loading}
    header |= {"identity": identity, "prompt": sequence.prompt, "asked": _asked(request)}
    session = _session(sequence)
    writer = open_run(Path(request.run_dir), header, session, request.drop_damaged)
    if writer.state is not None:
        try:
            _go_on(sequence, writer.state)
        except BaseException:
            writer.close()
            raise
        writer.was_over = sequence.finish_reason is not None
        if not writer.was_over:
            _warn(writer.state.session, session, identity["acceptance"])
    return writer


def _session(sequence: Any) -> dict[str, Any]:
    """What may change from one session to the next without changing the tokens."""
    request = sequence.request
    return {
        "kind": "session",
        "time": time.time(),
        "pid": os.getpid(),
        "max_new_tokens": request.max_new_tokens,
        "strategy": request.strategy,
        "options": {k: v for k, v in request.given.items() if k != "explain" and isinstance(v, PLAIN)},
        "on_loop": request.on_loop,
        "ignore_eos": request.ignore_eos,
        "numerics": sequence.llm.numerics(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def _go_on(sequence: Any, state: RunState) -> None:
    """Take up the run where its journal ends."""
    request, vocabulary = sequence.request, sequence.model.vocab_size
    if request.max_new_tokens < len(state.tokens):
        raise InputError(
            f"max_new_tokens is {request.max_new_tokens}; the run has "
            f"{counted(len(state.tokens), 'token')} already; valid: at least as many"
        )
    if max(state.tokens, default=0) >= vocabulary:
        raise InputError(
            f"run_dir {request.run_dir} holds the token id {max(state.tokens)}; valid: ids of the "
            f"model's vocabulary, 0 to {vocabulary - 1}"
        )
    sequence.restore(state)


def _warn(then: Session, now: dict[str, Any], acceptance: str) -> None:
    """Say in one line why the text may differ from the uninterrupted run's."""
    old = {**then.numerics, **{key: then.versions.get(key) for key in ("tokenswift", "torch")}}
    new = {**now["numerics"], **now["versions"]}
    keys = ("device", "processor", "how", "compiler", "tokenswift", "torch")
    changed = [f"{key} is {new.get(key)}, was {old.get(key)}" for key in keys if old.get(key) != new.get(key)]
    if acceptance != "exact":
        reason = "the published rule draws by what was drafted"
    elif changed:
        reason = "; ".join(changed)
    elif not new["equal_bits"]:
        reason = f"prefill and decoding may round differently ({new['how']}, {new['device']})"
    else:
        return
    logger.warning("%s: the text may differ from the uninterrupted run's", reason)


# ---- going on -------------------------------------------------------------------------------------


@named_arguments()
def resume(
    run_dir: str | Path,
    max_new_tokens: int | None = None,
    llm: LLM | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_loop: OnLoop | str | None = None,
    drop_damaged: bool = False,
) -> Generation:
    """Go on with a run; a finished one is returned as it is, unless it may become longer.

    Args:
        run_dir: its folder, from ``LLM.generate(run_dir=…)`` or ``tokenswift generate --run-dir``.
        max_new_tokens: of the whole run, counted from its prompt; None as before.
        llm: the model, needed where the run's was given to ``LLM.from_model``; None loads it anew.
        on_step: called with each new step.
        on_loop: "report" or "stop"; None as before.
        drop_damaged: go on from the last good record of a damaged journal; the rest is kept aside.
    Raises:
        InputError: no run, a damaged one, another process writes it, or something that decides the tokens
            is not what it was; the line names it.
    """
    _, state = load(Path(run_dir).expanduser())
    request = request_of(state, run_dir, max_new_tokens, on_loop, drop_damaged)
    if llm is not None:
        return llm.start(request).finish(on_step)
    with reload(state) as loaded:
        return loaded.start(request).finish(on_step)


def request_of(
    state: RunState,
    run_dir: str | Path,
    max_new_tokens: int | None = None,
    on_loop: str | None = None,
    drop_damaged: bool = False,
) -> Request:
    """The request that continues a run; no file is explained into again. The arguments are those of
    :func:`resume`.

    Raises:
        InputError: options that its strategy does not have, or another argument that is wrong.
    """
    identity, session = state.header.identity, state.session
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in session.options.items()
        if name != "explain" and value is not None
    }
    if not isinstance(options.get("draft_model"), str | None):
        raise InputError(f"the run's draft_model is {shown(options['draft_model'])}; valid: a name")
    return Request(
        prompt=state.header.prompt,
        max_new_tokens=session.max_new_tokens if max_new_tokens is None else max_new_tokens,
        strategy=session.strategy,
        strategy_options=options,
        sampling=identity.params,
        ignore_eos=session.ignore_eos,
        stop=tuple(identity.stop),
        on_loop=on_loop or session.on_loop,
        run_dir=run_dir,
        drop_damaged=drop_damaged,
    )


def reload(state: RunState, on_progress: OnProgress | None = None) -> LLM:
    """The ``LLM`` of a run, loaded as it was.

    Args:
        on_progress: as of ``LLM``.
    Raises:
        InputError: it was made from a model object, or cannot be loaded any more.
    """
    from tokenswift.engine.llm import LLM

    if state.header.model is None:
        raise InputError(
            f"llm is not given, and the run's model {state.header.name} came from a program; valid: "
            f"resume(run_dir, llm=LLM.from_model(…))"
        )
    loading = msgspec.to_builtins(state.header.model)
    if loading["heads"] not in (None, "auto", "none") or loading["eagle"] is not None:
        with suppress(InputError):  # drafts never change the tokens: without them it is slower, that is all
            return LLM(**loading, on_progress=on_progress)
        loading |= {"heads": "auto", "eagle": None}
    return LLM(**loading, on_progress=on_progress)
