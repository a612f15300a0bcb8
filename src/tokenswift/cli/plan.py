"""``tokenswift plan``: memory and time of a run, before it is begun."""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict, replace
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options
from tokenswift.cli.generate import add_call_options, call_from, with_model
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.cli.progress import duration
from tokenswift.cli.tables import table

logger = logging.getLogger("tokenswift")
GIGA = 1e9


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="memory and time of a run",
        description="Say what a run of generate with these options would take: memory by part against what "
        "is free, and time from a short measurement, with a range. What cannot fit is refused, with the "
        "largest length that would.",
        epilog="Exit codes: 0 it fits, 2 it does not, or bad input.",
    )
    add_call_options(parser)
    group = parser.add_argument_group("results")
    group.add_argument(
        "--no-measure",
        action="store_true",
        help="no short run: memory, and the least time of plain decoding (see tokenswift roofline)",
    )
    add_json_option(group)
    add_options(group, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Check everything as generate does; measure; print."""
    prompt, call = call_from(args)
    record = check_record(args.json, options.inputs_of(args))
    llm = options.load_model(args, args.rope_scaling)
    logger.info("%s, %s on %s, %s", llm.name, llm.dtype, llm.device, args.strategy)
    request = with_model(args, llm, prompt, call)

    from tokenswift.engine.run import Run
    from tokenswift.roofline.machine import machine_at
    from tokenswift.runs.plan import plan

    made = Run(llm, request)

    def again(new: int) -> Run:
        few = min(new, request.max_new_tokens)
        prompt = made.prompt[-1024:]
        return Run(llm, replace(request, prompt=prompt, max_new_tokens=few, ignore_eos=True, stop=()))

    found = plan(made, None, machine_at(llm.device)) if args.no_measure else plan(made, again)
    if record is not None:
        write_json(record, asdict(found))
    if record != STDOUT:
        print(text_of(found, len(made.prompt), made.max_new_tokens), flush=True)
    return 0


def text_of(found: Any, prompt: int, new: int) -> str:
    """A plan as text."""
    sizes = [*((part.name, part.nbytes) for part in found.parts), ("expected peak", found.peak)]
    rows = [(name, f"{nbytes / GIGA:.3f}") for name, nbytes in sizes]
    lines = [
        f"{prompt:,} tokens of prompt, {new:,} new tokens",
        "",
        table(rows, ("memory", "GB"), right=(1,)),
    ]
    if found.memory is not None:
        free = f"{found.memory.free / GIGA:.1f} GB"
        lines.append(f"{free} more can be had now; up to {found.most:,} new tokens fit")
    if found.seconds is not None:
        low, high = found.range
        lines += [
            "",
            f"expected time {duration(found.seconds)} ({duration(low)} to {duration(high)}), "
            f"{new / found.seconds:.1f} tokens/s",
            f"a step takes {1000 * found.speed.step:.1f} ms at {found.speed.at:,} tokens, "
            f"{1e6 * found.speed.slope:.2f} ms more per 1,000 tokens, and writes {found.speed.rate:.2f} "
            "tokens",
        ]
    if found.floor is not None:
        lines += [
            "",
            f"plain decoding takes at least {duration(found.floor)}, {new / found.floor:.1f} tokens/s, by "
            "this machine's bandwidth and arithmetic (see tokenswift roofline)",
        ]
    return "\n".join(lines)
