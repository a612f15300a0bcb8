"""``tokenswift.resume``: go on with a run from its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from tokenswift.checks import named_arguments
from tokenswift.config import LoopOptions, shown
from tokenswift.engine.llm import LLM
from tokenswift.engine.request import Request, check_callback
from tokenswift.runs import folder as folders
from tokenswift.runs.state import RunState
from tokenswift.types import Generation, InputError, OnProgress, Step
from tokenswift.words import OnLoop

__all__ = ["reload", "request_of", "resume"]


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
    _, state = folders.load(Path(run_dir).expanduser())
    request = request_of(state, run_dir, max_new_tokens, on_loop, drop_damaged)
    check_callback("on_step", on_step)
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
        prompt=state.prompt,
        max_new_tokens=session.max_new_tokens if max_new_tokens is None else max_new_tokens,
        strategy=session.strategy,
        strategy_options=options,
        sampling=identity.params,
        ignore_eos=session.ignore_eos,
        stop=tuple(identity.stop),
        on_loop=on_loop or session.on_loop,
        loop=LoopOptions(**session.loop),
        run_dir=run_dir,
        drop_damaged=drop_damaged,
    )


def reload(
    state: RunState,
    on_progress: OnProgress | None = None,
    device_map: str | Mapping[str, str | int] | None = None,
) -> LLM:
    """The ``LLM`` of a run, loaded as it was.

    Args:
        on_progress: as of ``LLM``.
        device_map: as of ``LLM``; None as before.
    Raises:
        InputError: it was made from a model object, or cannot be loaded any more.
    """
    if state.header.model is None:
        raise InputError(
            f"llm is not given, and the run's model {state.header.name} came from a program; valid: "
            f"resume(run_dir, llm=LLM.from_model(…))"
        )
    loading = msgspec.to_builtins(state.header.model)
    if device_map is not None:
        loading |= {"device_map": device_map, "device": "auto"}
    given = loading["heads"] not in (None, "auto", "none")
    if given or loading["eagle"] is not None:
        with suppress(InputError):  # drafts never change the tokens: without them it is slower, that is all
            return LLM(**loading, on_progress=on_progress)
        loading |= {"heads": "auto" if given else loading["heads"], "eagle": None}
    return LLM(**loading, on_progress=on_progress)
