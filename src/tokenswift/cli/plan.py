"""``tokenswift plan``: memory and time of a run, before it is begun."""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from tokenswift.cli import many, options, prompting
from tokenswift.cli.bench import pass_times
from tokenswift.cli.declare import add_options, option
from tokenswift.cli.generate import add_call_options, call_from, settings_from, with_model
from tokenswift.cli.output import add_json_option, check_record, give
from tokenswift.cli.terminal import duration, table
from tokenswift.config import shown as shown_value
from tokenswift.loader.prompts import is_chat
from tokenswift.types import InputError
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.memory import Memory

logger = logging.getLogger("tokenswift")
GIGA = 1e9
TABLES = 500  # bytes a token takes in lists, text and the n-gram table
PROBE, REACH = 256, 8192  # tokens of text that passes are timed behind
REPEATS, CHUNK = 3, 512  # of each pass; rows of one of the prompt's
SHORT, WARM, NEAR = 96, 4, 1024  # tokens of the short run; steps of it that are not timed; of its prompt
DRIFT = 0.2  # what a busy machine changes, at least
#: options of methods whose cache rows are in the full cache, and whose logits are those of a step
IN_FULL = ("tree", "ngrams", "gamma", "inner_gamma")


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
    at_once: Any = option("auto", "N", shown="--max-num-seqs", type=many.at_once)


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
    if args.prompts is None:
        for name, usual in (("nodes", 1), ("at_once", "auto")):
            if getattr(args, name) != usual:
                raise InputError(f"{name} is given without --prompts; valid: both")
        prompt, call = call_from(args)
        prompts = []
    else:
        many.check_alone(args)
        prompting.check_chat_options(args)
        call = settings_from(args)
        prompts = many.read(args)
    record = check_record(args.json, options.inputs_of(args))
    llm = options.load_model(args)

    from tokenswift.engine.sequence import Sequence

    if args.prompts is None:
        found = plan(Sequence(llm, with_model(args, llm, prompt, call)), not args.no_measure)
    else:
        sampling = options.model_sampling(args, call["sampling"], llm)
        requests = [many.request_of(args, llm, one, call, sampling, None) for one in prompts]
        found = plan_many(llm, requests, args.nodes, args.at_once, not args.no_measure)
    give(record, asdict(found), text_of(found, args.prompts is not None))
    return 0


# ---- memory: reckoned, what the process holds now and what the run adds ------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the memory: its name and bytes."""

    name: str
    nbytes: int


def memory_parts(run: Any) -> list[Part]:
    """The parts of a run's memory, what the process holds first."""
    from tokenswift.memory import needs_of

    target, strategy, prompt, new = run.model, run.strategy, len(run.prompt), run.max_new_tokens
    weights, eagle = target.weight_bytes + target.copied_bytes, run.llm.resources.eagle
    drafter = [] if eagle is None else [Part("weights of the EAGLE-3 drafter", eagle.held_bytes)]
    rest = target.backend.held() - weights - sum(part.nbytes for part in drafter)
    parts = [
        Part("weights", weights),
        *drafter,
        Part("program, libraries, work space", max(0, rest)),
        Part("full cache", (prompt + new + strategy.max_nodes) * target.kv_bytes),
    ]
    for need in needs_of(target, strategy, prompt, new)[2:]:
        if need.name == "eagle":
            parts.append(Part("cache of the EAGLE-3 drafter", need.nbytes))
        elif need.sure and need.name not in IN_FULL:
            parts.append(Part(f"partial cache ({need.name} {shown_value(need.value)})", need.nbytes))
    parts.append(Part("logits of a step", 3 * strategy.max_nodes * target.vocab_size * 4))
    parts.append(Part("lists and n-grams", (prompt + new) * TABLES))
    return parts


# ---- time: a short run, and how passes grow with the text --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Speed:
    """What a short run and a few passes showed.

    Attributes:
        step: seconds of a step behind ``at`` tokens of text.
        rate: tokens a step.
        slope: seconds that a step takes more for each token of text.
        prefill: seconds a token of the prompt, and
        prefill_slope: how they grow with each token before it.
        spread: relative difference of the halves of the short run.
    """

    at: int
    step: float
    rate: float
    slope: float
    prefill: float
    prefill_slope: float
    spread: float

    def expected(self, prompt: int, new: int) -> float:
        """Seconds of prefill and decoding."""
        prefill = prompt * (self.prefill + self.prefill_slope * prompt / 2)
        middle = prompt + new / 2 - self.at
        return prefill + new / self.rate * max(self.step / 2, self.step + self.slope * middle)

    def around(self, seconds: float) -> tuple[float, float]:
        """The least and the most that seconds may become."""
        off = 1 + max(DRIFT, self.spread)
        return seconds / off, seconds * off


def measure(short: Any, total: int) -> Speed:
    """Time a short run, and passes at two lengths. What only shows later (a draft that changes with length)
    is not in it.

    Args:
        short: a run of few new tokens, not begun; it has the end of the prompt.
        total: tokens of prompt and output of the run that is planned.
    """
    steps = list(short)
    steps = steps[min(WARM, len(steps) // 4) :]  # the first ones make what later ones find
    taken, tokens = [step.seconds for step in steps], [len(step.token_ids) for step in steps]
    half, whole = len(steps) // 2, sum(taken) / sum(tokens)
    spread = abs(sum(taken[:half]) / max(1, sum(tokens[:half])) / whole - 1) if half else 0.0
    far, size = max(PROBE, min(REACH, total)), len(short.prompt)
    rows = 1 + round(sum(step.drafted for step in steps) / len(steps))

    def growth(rows: int) -> float:
        """Seconds that a pass takes more for each token of text."""
        near, there = (median(pass_times(short.model, at, rows, REPEATS)) for at in (PROBE, far))
        return max(0.0, there - near) / 1e3 / max(1, far - PROBE)

    return Speed(
        at=size,
        step=sum(taken) / len(taken),
        rate=sum(tokens) / len(tokens),
        slope=growth(rows),
        prefill=short.meter.seconds["prefill"] / max(1, size - 1),
        prefill_slope=growth(CHUNK) / CHUNK if size > CHUNK else 0.0,
        spread=spread,
    )


def short_of(run: Any) -> Any:
    """The request of a short run of the same kind, with the end of the prompt."""
    few = min(SHORT, run.max_new_tokens)
    return replace(run.request, prompt=run.prompt[-NEAR:], max_new_tokens=few, ignore_eos=True, stop=())


# ---- plans -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take, or the texts of many prompts on some nodes like this machine.

    Attributes:
        prompt, new: tokens of prompt and at most of output, of all texts.
        parts, peak: memory (of a node, as if all texts were as long as the longest), and its sum.
        memory: of the device, None where the system does not tell.
        most: the most new tokens that fit, None likewise.
        speed: what a measurement has shown of one text alone; None: nothing was measured.
        seconds, range: prefill and decoding, expected, least and most; None likewise.
        rate: tokens a second (of a node); None likewise.
        texts, nodes, at_once: how many texts, machines, and concurrent texts on each.
    """

    prompt: int
    new: int
    parts: list[Part]
    peak: int
    memory: Memory | None
    most: int | None = None
    speed: Speed | None = None
    seconds: float | None = None
    range: tuple[float, float] | None = None
    rate: float | None = None
    texts: int = 1
    nodes: int = 1
    at_once: int = 1


def plan(run: Any, measured: bool) -> Plan:
    """What a run will take.

    Args:
        run: the run, made but not begun (so it is known to fit what is free).
        measured: whether a short run is timed.
    """
    from tokenswift.engine.sequence import Sequence
    from tokenswift.memory import largest

    target, prompt, new = run.model, len(run.prompt), run.max_new_tokens
    speed = measure(Sequence(run.llm, short_of(run)), prompt + new) if measured else None
    parts, memory, limit = memory_parts(run), target.backend.memory(), target.rotary.limit
    most = None if memory is None else largest(target, run.strategy, prompt, memory.free)
    if limit is not None and most is not None:
        most = min(most, limit - prompt)
    made = Plan(prompt, new, parts, sum(part.nbytes for part in parts), memory, most)
    if speed is None:
        return made
    seconds = speed.expected(prompt, new)
    return replace(made, speed=speed, seconds=seconds, range=speed.around(seconds), rate=new / seconds)


def plan_many(llm: Any, requests: list[Any], nodes: int, at_once: Any, measured: bool) -> Plan:
    """What many texts will take. A node's speed with concurrent texts is taken for constant but for how a
    step grows with the text, and the last texts are taken to end together, unless one alone takes longer.

    Args:
        nodes, at_once: see `Plan`; "auto": as many as fit.
    """
    from tokenswift.engine.scheduler import MOST
    from tokenswift.engine.sequence import Sequence
    from tokenswift.memory import default_length

    sizes = []
    for one in requests:
        size, new = len(llm.encode(one.prompt)), one.max_new_tokens
        sizes.append((size, default_length(llm.target, is_chat(one.prompt), size) if new is None else new))
    run = Sequence(llm, requests[max(range(len(sizes)), key=lambda i: sum(sizes[i]))])
    longest = plan(run, measured)
    if not isinstance(at_once, int):
        fit = MOST if longest.memory is None else longest.memory.free // max(1, run.nbytes)
        at_once = max(1, min(MOST, fit, -(-len(sizes) // nodes)))
    more = Part(f"caches of {at_once - 1} more texts", (at_once - 1) * run.nbytes)
    parts = [*longest.parts, *([more] if at_once > 1 else [])]
    prompts, news = (sum(size[i] for size in sizes) for i in (0, 1))
    peak, counts = longest.peak + more.nbytes, {"texts": len(sizes), "nodes": nodes, "at_once": at_once}
    made = replace(longest, prompt=prompts, new=news, parts=parts, peak=peak, most=None, **counts)
    if (speed := longest.speed) is None:
        return made
    few = short_of(run)
    how = (few.max_new_tokens, few.strategy, few.strategy_options, few.sampling)
    beside = llm.generate_many([few.prompt] * at_once, *how, at_once=at_once, ignore_eos=True)
    gain = sum(one.metrics.tokens_per_second for one in beside) * speed.step / speed.rate  # over one alone
    each = [speed.expected(prompt, new) for prompt, new in sizes]
    seconds = max(sum(each) / gain / nodes, max(each) * max(1.0, at_once / gain))
    return replace(made, rate=news / (sum(each) / gain), seconds=seconds, range=speed.around(seconds))


def text_of(found: Plan, several: bool) -> str:
    """A plan as text, of one run or of the texts of several prompts."""
    words, new = counted(found.prompt, "token"), counted(found.new, "new token")
    peak, free, fits = "expected peak", "more is available now", ""
    if several:
        nodes, each = counted(found.nodes, "node"), counted(found.at_once, "concurrent sequence")
        head = f"{counted(found.texts, 'text')}, {words} of prompts, {new}; {nodes}, {each} on each"
        peak, free = f"{peak} of a node", f"{free} on this machine"
    else:
        head = f"{words} of prompt, {new}"
        if found.most is not None:
            fits = f"; up to {counted(found.most, 'new token fits', 'new tokens fit')}"
    sizes = [(part.name, f"{part.nbytes / GIGA:.3f}") for part in [*found.parts, Part(peak, found.peak)]]
    lines = [head, "", table(sizes, ("memory", "GB"), right=(1,))]
    if found.memory is not None:
        lines.append(f"{found.memory.free / GIGA:.1f} GB {free}{fits}")
    if found.seconds is None or found.range is None or (speed := found.speed) is None:
        return "\n".join(lines)
    time, low, high = map(duration, (found.seconds, *found.range))
    lines += ["", f"expected time {time} ({low} to {high}), "]
    if several:
        hours = found.nodes * found.seconds / 3600
        lines[-1] += f"{hours:,.2f} node hours; a node writes {found.rate:,.1f} tokens/s"
    else:
        lines[-1] += f"{found.rate:.1f} tokens/s"
        lines.append(
            f"a step takes {1000 * speed.step:.1f} ms at {speed.at:,} tokens, {1e6 * speed.slope:.2f} ms "
            f"more per 1,000 tokens, and writes {speed.rate:.2f} tokens"
        )
    return "\n".join(lines)
