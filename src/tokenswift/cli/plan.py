"""``tokenswift plan``: memory and time of a run, before it is begun."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenswift.cli import many, options, prompting
from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.generate import add_call_options, call_from, settings_from, with_model
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.cli.terminal import duration, table
from tokenswift.loader.prompts import is_chat
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
GIGA = 1e9
SHORT = 96  # tokens that each of the concurrent texts writes to be timed


@dataclass(frozen=True)
class Several:
    """Many prompts instead of one.

    Attributes:
        prompts: JSON Lines file of prompts, as generate --prompts takes it
        nodes: machines like this one that share them
        at_once: sequences that each machine writes concurrently, or auto, as in generate --ray
    """

    prompts: str | None = option(None, "FILE")
    nodes: int = option(1, least=1)
    at_once: str = option("auto", "N", shown="--max-num-seqs")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="estimate memory and time of a run",
        description="Estimate what generate would take with these options: memory by part, compared with "
        "what is free, and time, with a range, from a short measurement. A run that cannot fit is refused, "
        "with the greatest length that would fit.",
        epilog="Exit codes: 0 it fits, 2 it does not, or bad input.",
    )
    add_call_options(parser)
    add_options(parser.add_argument_group("many prompts"), Several)
    group = parser.add_argument_group("results")
    group.add_argument(
        "--no-measure",
        action="store_true",
        help="no measurement: memory only",
    )
    add_json_option(group)
    add_options(group, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Check everything as generate does; measure; print."""
    check_options(args, Several)
    if args.prompts is not None:
        return _run_many(args)
    for name, usual in (("nodes", 1), ("at_once", "auto")):
        if getattr(args, name) != usual:
            raise InputError(f"{name} is given without --prompts; valid: both")
    prompt, call = call_from(args)
    record = check_record(args.json, options.inputs_of(args))
    llm = options.load_model(args, args.rope_scaling)
    logger.info("%s, %s on %s, %s", llm.name, llm.dtype, llm.device, args.strategy)
    request = with_model(args, llm, prompt, call)

    from tokenswift.engine.run import Run

    made = Run(llm, request)
    found = _plan_of(args, llm, made)
    if record is not None:
        write_json(record, asdict(found))
    if record != STDOUT:
        print(text_of(found, len(made.prompt), made.max_new_tokens), flush=True)
    return 0


def _plan_of(args: argparse.Namespace, llm: Any, made: Any) -> Any:
    """The plan of a run that was made."""
    from tokenswift.cli.forecast import plan
    from tokenswift.engine.run import Run

    def again(new: int) -> Run:
        return Run(llm, short(made, new))

    return plan(made, None if args.no_measure else again)


def short(made: Any, new: int) -> Any:
    """The request of a run like one that was made, with ``new`` tokens at most and the end of its prompt."""
    few = min(new, made.max_new_tokens)
    return replace(made.request, prompt=made.prompt[-1024:], max_new_tokens=few, ignore_eos=True, stop=())


def _run_many(args: argparse.Namespace) -> int:
    many.check_alone(args)
    prompting.check_chat_options(args)
    call = settings_from(args)
    at_once, prompts = many.at_once(args.at_once), [many.shaped(args, one) for one in many.read(args.prompts)]
    record = check_record(args.json, options.inputs_of(args))
    llm = options.load_model(args, args.rope_scaling)
    logger.info("%s, %s on %s, %s", llm.name, llm.dtype, llm.device, args.strategy)
    sampling = options.model_sampling(args, call["sampling"], llm)
    requests = [many.request_of(args, llm, one, call, sampling, None) for one in prompts]

    from tokenswift.cli.forecast import plan_many
    from tokenswift.engine.run import Run
    from tokenswift.engine.scheduler import MOST
    from tokenswift.memory import default_length

    sizes = []
    for one in requests:
        size, new = len(llm.encode(one.prompt)), one.max_new_tokens
        sizes.append((size, default_length(llm.target, is_chat(one.prompt), size) if new is None else new))
    longest = Run(llm, requests[max(range(len(sizes)), key=lambda i: sum(sizes[i]))])
    found = _plan_of(args, llm, longest)
    if not isinstance(at_once, int):
        at_once = min(MOST, -(-len(sizes) // args.nodes))
        if found.memory is not None:
            at_once = max(1, min(at_once, found.memory.free // max(1, longest.nbytes)))
    rate = None if args.no_measure else beside_rate(llm, short(longest, SHORT), at_once)
    planned = plan_many(found, sizes, args.nodes, at_once, longest.nbytes, rate)
    if record is not None:
        write_json(record, asdict(planned))
    if record != STDOUT:
        print(text_of_many(planned), flush=True)
    return 0


def beside_rate(llm: Any, request: Any, at_once: int) -> float:
    """Tokens a second of so many copies of a request, while all of them are written."""
    from tokenswift.engine.scheduler import Scheduler, run_all

    steps: list[tuple[float, int, int]] = []  # when, of which text, tokens

    def on_step(number: int, step: Any) -> None:
        steps.append((time.perf_counter(), number, len(step.token_ids)))

    with Scheduler(llm, at_once) as scheduler:
        for _, result in run_all(scheduler, [request] * at_once, on_step):
            if isinstance(result, Exception):
                raise result
    first = max(next(when for when, number, _ in steps if number == i) for i in range(at_once))
    last = min(max(when for when, number, _ in steps if number == i) for i in range(at_once))
    inside = [tokens for when, _, tokens in steps if first < when <= last]
    if last <= first or not inside:  # too short to be concurrent
        return sum(tokens for *_, tokens in steps) / max(steps[-1][0] - steps[0][0], 1e-9)
    return sum(inside) / (last - first)


def _memory(found: Any, peak: str) -> str:
    """A table of a plan's parts and their sum, under its name."""
    sizes = [*((part.name, part.nbytes) for part in found.parts), (peak, found.peak)]
    return table([(name, f"{size / GIGA:.3f}") for name, size in sizes], ("memory", "GB"), right=(1,))


def _expected(found: Any) -> str:
    low, high = found.range
    return f"expected time {duration(found.seconds)} ({duration(low)} to {duration(high)})"


def text_of_many(found: Any) -> str:
    """A plan of many texts as text."""
    lines = [
        f"{counted(found.texts, 'text')}, {counted(found.prompt, 'token')} of prompts, "
        f"{counted(found.new, 'new token')}; "
        f"{counted(found.nodes, 'node')}, {counted(found.at_once, 'concurrent sequence')} on each",
        "",
        _memory(found, "expected peak of a node"),
    ]
    if found.memory is not None:
        lines.append(f"{found.memory.free / GIGA:.1f} GB more is available now on this machine")
    if found.seconds is not None:
        lines += [
            "",
            f"{_expected(found)}, "
            f"{found.nodes * found.seconds / 3600:,.2f} node hours; a node writes {found.rate:,.1f} tokens/s",
        ]
    return "\n".join(lines)


def text_of(found: Any, prompt: int, new: int) -> str:
    """A plan as text."""
    lines = [
        f"{counted(prompt, 'token')} of prompt, {counted(new, 'new token')}",
        "",
        _memory(found, "expected peak"),
    ]
    if found.memory is not None:
        free = f"{found.memory.free / GIGA:.1f} GB"
        most = counted(found.most, "new token fits", "new tokens fit")
        lines.append(f"{free} more is available now; up to {most}")
    if found.seconds is not None:
        lines += [
            "",
            f"{_expected(found)}, {new / found.seconds:.1f} tokens/s",
            f"a step takes {1000 * found.speed.step:.1f} ms at {found.speed.at:,} tokens, "
            f"{1e6 * found.speed.slope:.2f} ms more per 1,000 tokens, and writes {found.speed.rate:.2f} "
            "tokens",
        ]
    if found.level is not None:
        lines.append(f"a draft level of the EAGLE-3 drafter takes {1000 * found.level:.2f} ms")
    return "\n".join(lines)
