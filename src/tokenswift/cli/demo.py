"""``tokenswift demo``: the same text by plain decoding and with drafts, and transformers beside them."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tokenswift.benchmark.peer import generate_rate
from tokenswift.cli import options
from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.generate import stream
from tokenswift.cli.output import TextSink, check_writable, write_json
from tokenswift.cli.progress import Progress
from tokenswift.cli.tables import table
from tokenswift.config import SamplingParams
from tokenswift.engine.records import record_of
from tokenswift.types import Generation, InputError, RunError

STRATEGIES = ("autoregressive", "auto")
PEER_TOKENS = 128  # that transformers writes: enough to tell its speed
logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Demo(options.Shown):
    """What is compared.

    Attributes:
        out: folder for autoregressive.json and auto.json
        max_new_tokens: tokens to write, at least 1
        seed: 0 or more
        peer: transformers or none: also time transformers' generate
    """

    out: str = option("demo", "DIR")
    max_new_tokens: int = option(512, earlier="--tokens", least=1)
    seed: int = option(0)
    peer: str = option("transformers", choices=("transformers", "none"))


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="compare plain decoding and TokenSwift on one text",
        description="Continue the shipped story twice, by plain decoding and with drafts, with the same "
        "seed; print both, a table, and whether every token is the same (exit code 1 if not). The table's "
        "last row is transformers' own generate with the same sampling (its texts are others).",
    )
    add_options(parser, Demo)
    options.add_model_options(parser, dtype="float32")


def run(args: argparse.Namespace) -> int:
    """Generate twice, compare, keep both records."""
    check_options(args, Demo)
    sampling = SamplingParams(seed=args.seed)
    options.check_model_options(args)
    folder = Path(args.out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"out is {args.out!r}: it cannot be made ({reason}); valid: a folder") from error
    files = {name: check_writable("--out", str(folder / f"{name}.json")) for name in STRATEGIES}
    prompt = (
        resources.files("tokenswift").joinpath("data/demo_prompt.txt").read_text(encoding="utf-8").strip()
    )
    llm = options.load_model(args)
    from tokenswift.engine.request import Request

    logger.info("%s, %s on %s", llm.name, llm.dtype, llm.device)

    results: dict[str, Generation] = {}
    for name in STRATEGIES:
        print(f"\n--- {name}: …{prompt[-60:].partition(' ')[2]}", flush=True)
        results[name] = stream(
            llm,
            Request(prompt, args.max_new_tokens, name, sampling=sampling, ignore_eos=True),
            TextSink(None, raw=args.raw_output),
            Progress(args.max_new_tokens, args.quiet, label=name, verbose=args.verbose),
        )
        path = files[name]
        if path is not None:
            write_json(path, record_of(llm, results[name], name, {}, sampling))
    same = results["autoregressive"].token_ids == results["auto"].token_ids
    peer = None
    if args.peer != "none" and args.max_new_tokens > 1:
        logger.info("transformers' generate, %d tokens", min(args.max_new_tokens, PEER_TOKENS))
        peer = generate_rate(llm, llm.encode(prompt), min(args.max_new_tokens, PEER_TOKENS), sampling)
    print("\n" + shown(results, peer))
    drafting = results["auto"].drafting
    if drafting is not None:
        print(f"drafting: {drafting['summary']}")
    print(f"identical: {'yes' if same else 'no'}")
    print(f"records: {', '.join(str(path) for path in files.values())}")
    sys.stdout.flush()
    if not same:
        pairs = zip(*(results[name].token_ids for name in STRATEGIES), strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        raise RunError(
            f"the two texts differ from new token {place} on; both records were kept in {folder}"
            + ("" if llm.dtype == "float32" else f" (near-ties flip in {llm.dtype}; compare in float32)")
        )
    return 0


def shown(results: dict[str, Generation], peer: float | None = None) -> str:
    """Figures of the runs, a row each; the speed-up is against the first. ``peer``: transformers' tokens a
    second."""
    head = ("strategy", "tokens/s", "speed-up", "α", "mean acceptance length", "passes")
    base = next(iter(results.values())).metrics.tokens_per_second

    def cells(name: str, rate: float, *more: str) -> tuple[str, ...]:
        return (name, f"{rate:.1f}", f"{rate / base:.2f}" if base else "–", *more)

    rows = []
    for name, result in results.items():
        m = result.metrics
        alpha = f"{m.acceptance_rate:.2f}" if name != "autoregressive" else "–"
        more = (alpha, f"{m.mean_acceptance_length:.2f}", str(m.steps))
        rows.append(cells(name, m.tokens_per_second, *more))
    if peer is not None:
        rows.append(cells("transformers generate", peer, "–", "1.00", "–"))
    return table(rows, head, right=range(1, 6))
