"""``tokenswift roofline``: whether drafting will pay with a model on a machine, before a download."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tokenswift.cli import inputs, options
from tokenswift.cli.declare import KEY, add_option, add_options, check_options, option
from tokenswift.cli.generate import Length
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.cli.tables import table
from tokenswift.load_config import LoadConfig
from tokenswift.loader.rope import parse_rope_scaling
from tokenswift.method_options import AutoOptions, build_options
from tokenswift.roofline.cards import card_named
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
LENGTHS = tuple(1 << bits for bits in range(10, 18))  # 1K to 128K
ACCEPTED = (2.0, 3.0, 4.0)
PASSES = ("plain", "verify", "draft")
GIGA = 1e9
RUNS = 11  # of a pass that is measured


def numbers(text: str) -> list[float]:
    """An argparse type: numbers with commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: numbers such as 2,3.5") from None


@dataclass(frozen=True)
class Reckoned:
    """What is reckoned.

    Attributes:
        gpu: take this GPU's published figures instead of measuring this machine: h100, h200, a100, 4090 or
            l40s
        length: tokens of text, several with commas; default: 1K to 128K as far as the model allows
        rows: tokens that a step verifies, the newest of the text included
        accepted: tokens per step on average, several with commas; default: 2,3,4
        measure: load the model and time its passes too
    """

    gpu: str | None = option(None, "CARD")
    length: list[int] | None = option(None, "N,N,…", type=inputs.token_ids)
    rows: int = option(5, least=1)
    accepted: list[float] | None = option(None, "X,X,…", type=numbers)
    measure: bool = option(False)


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "roofline",
        help="compute the least time of a step, and whether drafting pays",
        description="Compute the least time of a model's steps, from the bytes they read and the operations "
        "they do, and the speed-up of drafting. It needs the model's config.json or the header of its GGUF "
        "file; no weights of the model are downloaded. With --eagle drafts are those of the drafter, whose "
        "files are fetched as generate does.",
        epilog="Exit codes: 0 done, 2 bad input.",
    )
    model = ("model", "dtype", "eagle", "weights", "activations", "kv_cache_dtype", "device", "threads")
    group = parser.add_argument_group("model")
    add_options(group, options.Model, only=model)
    add_options(group, Length, only=("rope_scaling",))
    group = parser.add_argument_group("steps")
    add_options(group, Reckoned)
    for name in ("budget", "draft_weights"):
        field = options.STRATEGY[name]["auto"]
        add_option(group, field, field.metadata["help"], level=KEY)
    group = parser.add_argument_group("results")
    add_json_option(group)
    add_options(group, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Check; take the model's sizes and the machine's figures; reckon; print."""
    given = {name: getattr(args, name) for name in ("budget", "draft_weights")}
    chosen = build_options(AutoOptions, "auto", {k: v for k, v in given.items() if v is not None})
    scaling = parse_rope_scaling(args.rope_scaling)
    check(args, given)
    record = check_record(args.json)
    logger.info("reading %s", args.model)
    import torch

    from tokenswift.loader.load import check_place
    from tokenswift.roofline.eagle import eagle_sizes
    from tokenswift.roofline.machine import machine_at
    from tokenswift.roofline.passes import steps
    from tokenswift.roofline.sizes import config_at, sizes_of
    from tokenswift.roofline.timer import median, pass_times
    from tokenswift.spec.methods.auto import BUDGET

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = check_place(LoadConfig(args.dtype, args.device if args.gpu is None else "cpu"))
    machine = machine_at(device) if args.gpu is None else card_named(args.gpu)
    whole = args.activations == "int8"
    sizes = sizes_of(args.model, args.dtype, args.weights, whole, scaling, machine, args.kv_cache_dtype)
    contexts = lengths(args.length, sizes.limit)
    form = "q8_0" if chosen.draft_weights == "auto" else chosen.draft_weights
    low = not sizes.whole and form != "none" and machine.keeps(form, sizes.dtype)
    drafts, budget, first = sizes.in_few_bits(form) if low else sizes, chosen.budget or BUDGET, None
    eagle = None
    if args.eagle is not None:
        eagle = eagle_sizes(args.eagle, config_at(args.model), sizes, machine)
        drafts, budget, first = eagle.level, eagle.window, eagle.first
    accepted = args.accepted or [a for a in ACCEPTED if a <= args.rows] or [float(args.rows)]
    made = {
        "model": args.model,
        "sizes": asdict(sizes),
        "drafts": asdict(drafts),
        "rows": args.rows,
        "budget": budget,
        **({} if eagle is None else {"eagle": {"name": args.eagle, **asdict(eagle)}}),
        "machine": {
            "name": machine.name,
            "source": machine.source,
            "bandwidth": machine.bandwidth,
            "arithmetic": rates(sizes, drafts, machine, args.rows),
        },
        "steps": [
            record_of(steps(sizes, drafts, machine, context, args.rows, budget, accepted, first))
            for context in contexts
        ],
    }
    if args.gpu is not None:
        made["cuda"] = cuda_passes(sizes, card_named(args.gpu), args.gpu)
    if args.measure:
        with options.load_model(args, args.rope_scaling) as llm:
            for line in made["steps"]:
                timed = partial(pass_times, llm.target, line["context"])
                line["measured"] = {n: median(timed(rows, RUNS)) / 1e3 for n, rows in measured(args.rows)}
    if record is not None:
        write_json(record, made)
    if record != STDOUT:
        print(text_of(made, sizes, drafts), flush=True)
    return 0


def check(args: argparse.Namespace, drafts: Mapping[str, Any]) -> None:
    """What can be checked without a model; ``drafts``: options of passes that the model drafts with."""
    for name, value in drafts.items():
        if args.eagle is not None and value is not None:
            other = f"and {name} {value} is for drafts of the model itself"
            raise InputError(f"eagle is {args.eagle!r}, {other}; valid: one of them")
    args.heads, args.backend, args.cuda_graphs = "none", "auto", "auto"
    options.check_model_options(args)
    check_options(args, Reckoned)
    if args.gpu is not None:
        card_named(args.gpu)
        if args.device != "auto" or args.measure:
            other = (
                f"device is {args.device!r}" if args.device != "auto" else "and measure is for this machine"
            )
            raise InputError(f"gpu is {args.gpu!r}, {other}; valid: one of them")
    for value in args.accepted or ():
        if not 1 <= value <= args.rows:
            raise InputError(f"accepted is {value:g}; valid: 1 to {args.rows}, the rows of a step")
    if args.length is not None and min(args.length, default=0) < 1:
        raise InputError(f"length is {min(args.length, default='empty')}; valid: integers of at least 1")


def lengths(given: list[int] | None, limit: int | None) -> list[int]:
    """Tokens of text that are reckoned with.

    Raises:
        InputError: one is more than the model's positions allow.
    """
    if given is None:
        return [n for n in LENGTHS if limit is None or n <= limit] or [limit or LENGTHS[0]]
    for length in given:
        if limit is not None and length > limit:
            raise InputError(f"length is {length}; valid: up to {limit} positions, or rope_scaling yarn")
    return given


def record_of(line: Any) -> dict[str, Any]:
    """What ``--json`` says of steps behind a text of a length."""
    passes = {
        name: asdict(found) | {"seconds": found.seconds} for name in PASSES for found in [getattr(line, name)]
    }
    speedups = [
        {"accepted": accepted, "drafts_by_passes": least, "drafts_for_nothing": most}
        for accepted, (least, most) in line.speedups.items()
    ]
    return {"context": line.context, **passes, "speedups": speedups}


def cuda_passes(sizes: Any, card: Any, name: str) -> list[dict[str, Any]]:
    """Passes of the CUDA backend on a card by weights, length and rows: their floor, what they are reckoned
    to take, and the seconds that were measured (None: nothing was)."""
    from tokenswift.roofline import reckoned
    from tokenswift.roofline.passes import floor

    taken, made = reckoned.measured(reckoned.RESULTS / name), []
    contexts = [n for n in reckoned.CONTEXTS if sizes.limit is None or n <= sizes.limit]
    for stored, own in reckoned.low_bits(sizes).items():
        for context, rows in ((context, rows) for context in contexts for rows in reckoned.ROWS):
            found = reckoned.reckoned(own, card, rows, context)
            line = {"weights": stored, "context": context, "rows": rows}
            line["floor"] = floor(own, card, rows, context).seconds
            line["reckoned"] = None if found is None else asdict(found)
            line["measured"] = taken.get((own.weight_bytes, own.token_bytes, context, rows))
            made.append(line)
    return made


def cuda_text(lines: list[dict[str, Any]]) -> list[str]:
    """`cuda_passes` as text; nothing where nothing is reckoned."""
    if not lines or lines[0]["reckoned"] is None:
        return []
    plain, cells = 0.0, []
    for line in lines:
        found, taken = line["reckoned"], line["measured"]
        plain = found["seconds"] if line["rows"] == 1 else plain
        cells.append(
            [
                line["weights"],
                f"{line['context']:,}",
                str(line["rows"]),
                milliseconds(line["floor"]),
                f"{milliseconds(found['seconds'])} ({found['seconds'] / plain:.2f})",
                *(milliseconds(found[part]) for part in ("starts", "products", "attention")),
                f"{found['launches']:,}",
                f"{found['programs']:,}",
                f"{found['in_flight'] / 1e6:.1f}",
                "not measured" if taken is None else milliseconds(taken),
            ]
        )
    heads = ("weights", "context", "rows", "floor", "reckoned (of 1 row)", "starts", "products", "attention")
    return [
        "",
        "Passes of the CUDA backend in ms: the least, what they are reckoned to take by counts of its",
        "kernels (starts, products, attention; the rest is norms, gates, positions), and what was measured;",
        "kernels of a pass, programs of a layer's attention, and MB that these have on their way at once.",
        "",
        table(
            cells,
            (*heads, "kernels", "programs", "MB on their way", "measured"),
            right=range(1, len(cells[0])),
        ),
    ]


def rates(sizes: Any, drafts: Any, machine: Any, rows: int) -> list[dict[str, Any]]:
    """Operations in a second of each part of a plain, a verify and a draft pass (None: it has no such)."""
    passes = (("plain", sizes, 1), ("verify", sizes, rows), ("draft", drafts, 1))

    def of(kind: str) -> dict[str, Any]:
        found = {n: machine.products(s, kind, r) if kind in s.weights else None for n, s, r in passes}
        return {"part": "products", "stored": kind, **found}

    products = [of(kind) for kind in {**sizes.weights, **drafts.weights}]
    return [*products, {"part": "attention", **{n: machine.attention(s, r) for n, s, r in passes}}]


def measured(rows: int) -> list[tuple[str, int]]:
    """The passes that are timed, and their rows."""
    return [("plain", 1), ("verify", rows)]


def eagle_text(said: dict[str, Any] | None, drafts: Any) -> list[str]:
    """A line on the drafter, where there is one."""
    if said is None:
        return []
    return [
        f"{said['name']}: a pass of it reads {drafts.weight_bytes / GIGA:.3f} GB of weights "
        f"({', '.join(drafts.weights)}), and a text holds {said['cache_bytes'] / 1e6:.1f} MB for it"
    ]


def milliseconds(seconds: float) -> str:
    """A time, with three digits or more."""
    value = 1000 * seconds
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def text_of(made: dict[str, Any], sizes: Any, drafts: Any) -> str:
    """A record as text."""
    machine, rows, of = made["machine"], made["rows"], f"{made['rows']} rows"
    stored = ", ".join(sizes.weights)
    speeds = [
        [
            r.get("stored", "attention"),
            *(("" if r[n] is None else f"{r[n] / GIGA:,.0f}") for n in PASSES),
        ]
        for r in machine["arithmetic"]
    ]
    names = [name for name, _ in measured(rows)] if "measured" in made["steps"][0] else []
    lines = [
        [
            f"{line['context']:,}",
            *(milliseconds(line[name]["seconds"]) for name in PASSES),
            *(
                f"{milliseconds(found)} ({found / line[name]['seconds']:.2f})"
                for name in names
                for found in [line["measured"][name]]
            ),
            f"{1 / line['plain']['seconds']:,.1f}",
            *(f"{s['drafts_by_passes']:.2f} to {s['drafts_for_nothing']:.2f}" for s in line["speedups"]),
        ]
        for line in made["steps"]
    ]
    heads = [f"{one} measured (over floor)" for one in ("1 row", of)] if names else []
    accepted = [f"{s['accepted']:g} tokens" for s in made["steps"][0]["speedups"]]
    return "\n".join(
        [
            f"{made['model']}: a pass reads {sizes.weight_bytes / GIGA:.3f} GB of weights ({stored}), and "
            f"{sizes.token_bytes / 1e3:.1f} KB of keys and values a token; products in {sizes.dtype}",
            f"{machine['name']}, {machine['source']}: {machine['bandwidth'] / GIGA:,.1f} GB/s of memory, and",
            *eagle_text(made.get("eagle"), drafts),
            "",
            table(speeds, ("GFLOP/s", "1 row", of, "draft"), right=range(1, 4)),
            "",
            "The least that passes take in ms, tokens/s of plain decoding, and how many times as fast steps",
            f"are that yield so many tokens: from drafts by {rows - 1} passes over {made['budget']:,} tokens "
            "to drafts that cost nothing.",
            "",
            table(
                lines, ("context", "1 row", of, "draft", *heads, "tokens/s", *accepted), right=range(0, 99)
            ),
            *cuda_text(made.get("cuda", [])),
        ]
    )
