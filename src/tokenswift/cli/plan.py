"""``tokenswift plan``: memory and time of a run, before it is begun."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, command
from tokenswift.cli.generate import add_call_options, call_from, with_model
from tokenswift.cli.output import check_record, give
from tokenswift.cli.terminal import duration, table
from tokenswift.config import shown
from tokenswift.types import Metrics
from tokenswift.words import counted

GIGA = 1e9
TABLES = 500  # bytes a token takes in lists, text and the n-gram table
SHORT, NEAR = 96, 1024  # tokens of the short run, and of the end of the prompt that it continues
#: options of methods whose cache rows are in the full cache, and whose logits are those of a step
IN_FULL = ("tree", "ngrams", "gamma", "inner_gamma")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "plan", run, "estimate memory and time of a run")
    add_call_options(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--no-measure", action="store_true", help="no measurement: memory only")
    add_options(group, options.Record)


def run(args: argparse.Namespace) -> int:
    """Estimate what generate would take with these options: memory by part, compared with what is free, and
    time, from a short run. A run that cannot fit is refused, with the greatest length that would fit."""
    prompt, call = call_from(args)
    record = check_record(args.json, options.inputs_of(args))
    llm = options.load_model(args)

    from tokenswift.engine.sequence import Sequence

    made = plan(Sequence(llm, with_model(args, llm, prompt, call)), not args.no_measure)
    give(record, made, text_of(made))
    return 0


def plan(run: Any, measured: bool) -> dict[str, Any]:
    """What a run will take: its parts of memory in bytes, their sum, what is free and the most new tokens
    that fit it (None where the system does not tell), and seconds (None where nothing is measured).

    Args:
        run: the run, made but not begun (so it is known to fit what is free).
        measured: whether a short run is timed.
    """
    from tokenswift.memory import largest

    target, prompt, new = run.model, len(run.prompt), run.max_new_tokens
    parts, memory, limit = memory_parts(run), target.backend.memory(), target.rotary.limit
    most = None if memory is None else largest(target, run.strategy, prompt, memory.free)
    if limit is not None and most is not None:
        most = min(most, limit - prompt)
    made = {"prompt": prompt, "new": new, "parts": parts, "peak": sum(parts.values()), "most": most}
    made |= {"free": None if memory is None else memory.free, "seconds": None, "tokens_per_second": None}
    if measured:
        short = few_of(run)
        rate = short.tokens_per_second
        prefill = prompt * short.prefill_seconds / min(prompt, NEAR)
        made |= {"seconds": prefill + new / rate, "tokens_per_second": rate}
    return made


def memory_parts(run: Any) -> dict[str, int]:
    """Bytes of a run's memory by part, what the process holds first."""
    from tokenswift.memory import needs_of

    target, strategy, prompt, new = run.model, run.strategy, len(run.prompt), run.max_new_tokens
    parts, eagle = {"weights": target.weight_bytes + target.copied_bytes}, run.llm.resources.eagle
    if eagle is not None:
        parts["weights of the EAGLE-3 drafter"] = eagle.held_bytes
    parts["program, libraries, work space"] = max(0, target.backend.held() - sum(parts.values()))
    parts["full cache"] = (prompt + new + strategy.max_nodes) * target.kv_bytes
    for need in needs_of(target, strategy, prompt, new)[2:]:
        if need.name == "eagle":
            parts["cache of the EAGLE-3 drafter"] = need.nbytes
        elif need.sure and need.name not in IN_FULL:
            parts[f"partial cache ({need.name} {shown(need.value)})"] = need.nbytes
    parts["logits of a step"] = 3 * strategy.max_nodes * target.vocab_size * 4
    return {**parts, "lists and n-grams": (prompt + new) * TABLES}


def few_of(run: Any) -> Metrics:
    """The figures of a short run of the same kind, after the end of the prompt."""
    few = min(SHORT, run.max_new_tokens)
    request = replace(run.request, prompt=run.prompt[-NEAR:], max_new_tokens=few, ignore_eos=True, stop=())
    return run.llm.start(request).finish().metrics


def text_of(made: dict[str, Any]) -> str:
    """A plan as text."""
    sizes = [
        (name, f"{size / GIGA:.3f}")
        for name, size in {**made["parts"], "expected peak": made["peak"]}.items()
    ]
    head = f"{counted(made['prompt'], 'token')} of prompt, {counted(made['new'], 'new token')}"
    lines = [head, "", table(sizes, ("memory", "GB"), right=(1,))]
    if made["free"] is not None:
        fits = counted(made["most"], "new token fits", "new tokens fit")
        lines.append(f"{made['free'] / GIGA:.1f} GB more is available now; up to {fits}")
    if made["seconds"] is not None:
        rate = f"{made['tokens_per_second']:.1f} tokens/s in a short run; far into a long text a token takes"
        lines += ["", f"expected time about {duration(made['seconds'])} ({rate} longer)"]
    return "\n".join(lines)
