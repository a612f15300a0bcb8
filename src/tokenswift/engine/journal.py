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

from tokenswift.chat import Tools
from tokenswift.checks import check_tokens
from tokenswift.config import settings_of
from tokenswift.engine.request import Request
from tokenswift.loader.identity import digest_of, versions
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.runs.folder import load
from tokenswift.runs.state import Header, Identity, Loading, RunState, Session
from tokenswift.runs.writer import RunWriter
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
    asked = _asked(request)
    if asked is not None and request.run_dir is not None:
        with suppress(InputError):  # no run; or taking the folder says what is wrong with it
            header = load(Path(request.run_dir).expanduser())[1].header
            return header.prompt if header.asked == asked else None
    return None


def open_journal(sequence: Any) -> RunWriter:
    """Take the folder of a text's run; the text goes on with the run that is there already.

    Raises:
        InputError: the folder cannot be written, holds another run, or one that is longer.
    """
    request, llm = sequence.request, sequence.llm
    identity = Identity(
        **llm.resources.identity(),
        sampling=settings_of(request.sampling),
        eos=sorted(sequence.eos),
        stop=[text if isinstance(text, str) else list(text) for text in request.stop],
        acceptance=sequence.strategy.acceptance,
    )
    loading = None if llm.loading is None else Loading(**llm.loading)
    header = Header(time.time(), llm.name, loading, identity, sequence.prompt, _asked(request))
    options: dict[str, Any] = {
        name: value for name, value in request.given.items() if isinstance(value, PLAIN)
    }
    session = Session(
        time=time.time(),
        pid=os.getpid(),
        max_new_tokens=request.max_new_tokens,
        strategy=request.strategy,
        options=options,
        on_loop=request.on_loop,
        ignore_eos=request.ignore_eos,
        numerics=llm.numerics(),
        threads=torch.get_num_threads(),
        versions=versions(),
    )
    writer = RunWriter(Path(request.run_dir), header, session)
    if writer.state is not None:
        try:
            _go_on(sequence, writer.state)
        except BaseException:
            writer.close()
            raise
        if sequence.finish_reason is None:
            _warn(writer.state.session, session, identity.acceptance)
    return writer


def _go_on(sequence: Any, state: RunState) -> None:
    """Take up the run where its journal ends."""
    most, made = sequence.max_new_tokens, len(state.tokens)
    if most < made:
        had = f"the run has {counted(made, 'token')} already"
        raise InputError(f"max_new_tokens is {most}; {had}; valid: at least as many")
    check_tokens(state.tokens, sequence.model.vocab_size)
    sequence.restore(state)


def _warn(then: Session, now: Session, acceptance: str) -> None:
    """Say in one line why the text may differ from the uninterrupted run's."""
    old, new = ({**one.versions, **one.numerics} for one in (then, now))
    keys = ("device", "processor", "how", "compiler", "tokenswift", "torch")
    why = [f"{key} is {new.get(key)}, was {old.get(key)}" for key in keys if old.get(key) != new.get(key)]
    if acceptance != "exact":
        why = ["the published rule draws by what was drafted"]
    elif not why and not new["equal_bits"]:
        why = [f"prefill and decoding may round differently ({new['how']}, {new['device']})"]
    if why:
        logger.warning("%s: the text may differ from the uninterrupted run's", "; ".join(why))


# ---- going on -------------------------------------------------------------------------------------


def resume(
    run_dir: str | Path,
    max_new_tokens: int | None = None,
    llm: LLM | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_loop: OnLoop | str | None = None,
) -> Generation:
    """Go on with a run; a finished one is returned as it is, unless it may become longer.

    Args:
        run_dir: its folder, from ``LLM.generate(run_dir=…)`` or ``tokenswift generate --run-dir``.
        max_new_tokens: of the whole run, counted from its prompt; None as before.
        llm: the model, needed where the run's was given to ``LLM.from_model``; None loads it anew.
        on_step: called with each new step.
        on_loop: "report" or "stop"; None as before.
    Raises:
        InputError: no run, a damaged one, another process writes it, or something that decides the tokens
            is not what it was; the line names it.
    """
    _, state = load(Path(run_dir).expanduser())
    request = request_of(state, run_dir, max_new_tokens, on_loop)
    if llm is not None:
        return llm.start(request).finish(on_step)
    with reload(state) as loaded:
        return loaded.start(request).finish(on_step)


def request_of(
    state: RunState, run_dir: str | Path, max_new_tokens: int | None = None, on_loop: str | None = None
) -> Request:
    """The request that continues a run. The arguments are those of
    :func:`resume`.

    Raises:
        InputError: options that its strategy does not have, or another argument that is wrong.
    """
    identity, session = state.header.identity, state.session
    return Request(
        prompt=state.header.prompt,
        max_new_tokens=session.max_new_tokens if max_new_tokens is None else max_new_tokens,
        strategy=session.strategy,
        strategy_options=session.options,
        sampling=identity.params,
        ignore_eos=session.ignore_eos,
        stop=tuple(identity.stop),
        on_loop=on_loop or session.on_loop,
        run_dir=run_dir,
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
    loading = msgspec.structs.asdict(state.header.model)
    with suppress(InputError):
        return LLM(**loading, on_progress=on_progress)
    # what drafted may be gone: that makes it slower, and other faults are told again
    return LLM(**{**loading, "heads": "auto", "eagle": "auto"}, on_progress=on_progress)
