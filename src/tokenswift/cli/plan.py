"""``tokenswift plan``: what memory and time a run will take."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated, Any

from tokenswift.checks import counted
from tokenswift.cli import options
from tokenswift.cli.call import call_from, with_model
from tokenswift.cli.results import check_record, give
from tokenswift.cli.terminal import table
from tokenswift.config.fields import SHOWN

SHORT, NEAR = (
    96,
    1024,
)  # tokens of a plan's short run, and of the end of the prompt that it continues
GIGA = 1e9


@dataclass(frozen=True)
class Plan(options.Record):
    """What is planned.

    Attributes:
        no_measure: no measurement, memory only
    """

    no_measure: Annotated[bool, SHOWN] = False


def plan(args: argparse.Namespace) -> int:
    """Estimate what generate would take with these options: memory by part, compared with what is
    free, and time, from a short run. A run that cannot fit is refused, with the greatest length
    that would fit."""
    prompt, call = call_from(args)
    record = check_record(args.json)
    llm = options.load_model(args)

    from tokenswift.engine.sequence import Sequence

    made = expected(
        Sequence(llm.resources, with_model(args, llm, prompt, call)), not args.no_measure
    )
    give(record, made, text_of(made))
    return 0


def expected(run: Any, measured: bool) -> dict[str, Any]:
    """What a run will take: its parts of memory in bytes, their sum, what is free and the most new
    tokens that fit it (None where the system does not tell), and seconds (None where nothing is
    measured).

    Args:
        run: the run, made but not begun (so it is known to fit what is free).
        measured: whether a short run is timed.
    """
    from tokenswift.engine.sequence import Sequence
    from tokenswift.engine.stream import Stream
    from tokenswift.memory import largest, needs_of

    target, prompt, new, request = run.model, len(run.prompt), run.max_new_tokens, run.request
    memory, limit = target.backend.memory(), target.rotary.limit
    parts = {"weights": target.weight_bytes + target.copied_bytes}
    parts["the rest of the program"] = max(0, target.backend.memory_used() - parts["weights"])
    parts |= {
        f"{n.name} {n.value}": n.nbytes
        for n in needs_of(target, run.strategy, prompt, new)
        if n.sure
    }
    made = {"prompt": prompt, "new": new, "parts": parts, "peak": sum(parts.values())}
    made["int16_keys"] = target.wide_layers
    made |= dict.fromkeys(("free", "most", "seconds", "tokens_per_second"))
    if memory is not None:
        most = largest(target, run.strategy, prompt, memory.free)
        made |= {"free": memory.free, "most": most if limit is None else min(most, limit - prompt)}
    if measured:
        few = replace(request, max_new_tokens=min(SHORT, new), prompt=run.prompt[-NEAR:], stop=())
        few = replace(few, ignore_eos=request.sampling.grammar is None)
        found = Stream(Sequence(run.resources, few)).finish().metrics
        prefill = prompt * found.prefill_seconds / min(prompt, NEAR)
        made["tokens_per_second"] = found.tokens_per_second
        made["seconds"] = prefill + new / found.tokens_per_second
    return made


def text_of(made: dict[str, Any]) -> str:
    """A plan as text."""
    parts = made["parts"] | {"expected peak": made["peak"]}
    sizes = [(name, f"{size / GIGA:.3f}") for name, size in parts.items()]
    head = f"{counted(made['prompt'], 'token')} of prompt, {counted(made['new'], 'new token')}"
    lines = [head, "", table(("memory", "GB"), sizes, right=(1,)), ""]
    if made["int16_keys"]:
        lines.append(f"keys are of 16 bits in layers {', '.join(map(str, made['int16_keys']))}")
    if made["free"] is not None:
        fits = counted(made["most"], "new token fits", "new tokens fit")
        lines.append(f"{made['free'] / GIGA:.1f} GB more is available now; up to {fits}")
    if made["seconds"] is not None:
        rate = (
            f"{made['tokens_per_second']:.1f} tokens/s in a short run; far into a long text a "
            f"token takes"
        )
        lines.append(
            f"expected time about {timedelta(seconds=round(made['seconds']))} ({rate} longer)"
        )
    return "\n".join(lines)
