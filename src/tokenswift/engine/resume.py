"""A run that was kept, gone on with: its model loaded again, and the request of its journal."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from tokenswift.checks import shown
from tokenswift.config.loading import LoadArguments
from tokenswift.config.strategies import OnLoop
from tokenswift.engine.llm import LLM
from tokenswift.engine.request import Request
from tokenswift.runs.folder import load
from tokenswift.runs.records import RunState
from tokenswift.types import Generation, InputError, OnProgress, Step


def resume(
    run_dir: str | Path,
    max_new_tokens: int | None = None,
    llm: LLM | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_loop: OnLoop | None = None,
    min_tokens: int | None = None,
) -> Generation:
    """Go on with a run; a finished one is returned as it is, unless it may become longer.

    Args:
        run_dir: its folder, from ``LLM.generate(run_dir=…)`` or ``tokenswift generate --run-dir``.
        max_new_tokens: of the whole run, counted from its prompt; None as before.
        llm: the model, needed where the run's was given to ``LLM.from_model``; None loads it anew.
        on_step: called with each new step.
        on_loop: "report", "stop" or "copies"; None as before.
        min_tokens: new tokens of the whole run before it may end, at least as many as before: a run
            that the model ended goes on in place of its end mark. None as before; a run that could
            not end before its last token, made longer, still cannot.
    Raises:
        InputError: no run, a damaged one, another process writes it, or something that decides the
            tokens is not what it was; the line names it.
    """
    if not isinstance(run_dir, str | os.PathLike):
        raise InputError(
            f"run_dir is {shown(run_dir)}; valid: the path of a run's folder", "run_dir"
        )
    _, state = load(Path(run_dir).expanduser())
    request = request_of(state, run_dir, max_new_tokens, on_loop, min_tokens)
    if llm is not None:
        return llm.start(request).finish(on_step)
    with reload(state) as loaded:
        return loaded.start(request).finish(on_step)


def request_of(
    state: RunState,
    run_dir: str | Path,
    max_new_tokens: int | None = None,
    on_loop: OnLoop | None = None,
    min_tokens: int | None = None,
) -> Request:
    """The request that continues a run. The arguments are those of :func:`resume`.

    Raises:
        InputError: options that its strategy does not have, or another argument that is wrong.
    """
    identity = state.header.identity
    session = state.session
    length = session.max_new_tokens if max_new_tokens is None else max_new_tokens
    ended_for_good = state.end is not None and state.end.reason == "stop"
    if min_tokens is None or ended_for_good:
        min_tokens = state.min_tokens if ended_for_good else min_tokens_of(state, length)
    elif not state.min_tokens <= min_tokens <= length:
        valid = f"from {state.min_tokens}, the run's, to {length}, its max_new_tokens"
        raise InputError(f"min_tokens is {min_tokens}; valid: {valid}", "min_tokens")
    return Request(
        prompt=state.header.prompt,
        max_new_tokens=length,
        strategy=session.strategy,
        strategy_options=session.options,
        sampling=replace(identity.params, min_tokens=min_tokens),
        ignore_eos=session.ignore_eos,
        stop=tuple(identity.stop),
        on_loop=on_loop or session.on_loop,
        run_dir=run_dir,
        new_turn=state.header.asked is not None,
    )


def min_tokens_of(state: RunState, max_new_tokens: int) -> int:
    """New tokens before a run may end that goes on to a length: as before, or all of them where
    the run was asked for by its length, so that its end had to come with the last token."""
    if state.session.max_new_tokens == state.min_tokens:
        return max(state.min_tokens, max_new_tokens)
    return state.min_tokens


def reload(state: RunState, on_progress: OnProgress | None = None) -> LLM:
    """The ``LLM`` of a run, loaded as it was.

    Args:
        on_progress: as of ``LLM``.
    Raises:
        InputError: it was made from a model object, or cannot be loaded any more.
    """
    if state.header.model is None:
        raise InputError(
            f"llm is not given, and the run's model {state.header.name} came from a program; "
            "valid: resume(run_dir, llm=LLM.from_model(…))"
        )
    loading = LoadArguments(**msgspec.structs.asdict(state.header.model))
    with suppress(InputError):
        return LLM(**loading, on_progress=on_progress)
    # the drafters' files may be gone, which only costs speed; other errors are raised again
    loading["heads"] = "auto"
    loading["eagle"] = "auto"
    return LLM(**loading, on_progress=on_progress)
