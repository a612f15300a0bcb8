"""``tokenswift demo``: the same text by plain decoding and with drafts, and transformers beside them."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from tokenswift.benchmark.peer import generate_rate
from tokenswift.cli import options
from tokenswift.cli.escapes import add_raw_output_option
from tokenswift.cli.generate import stream
from tokenswift.cli.output import TextSink, check_writable, record_of, write_json
from tokenswift.cli.progress import Progress, add_verbose_option
from tokenswift.config import SamplingParams, check_integer
from tokenswift.types import Generation, InputError, RunError

STRATEGIES = ("autoregressive", "auto")
PEER_TOKENS = 128  # that transformers writes: enough to tell its speed
logger = logging.getLogger("tokenswift")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="compare plain decoding and TokenSwift on one text",
        description="Continue the shipped story twice, by plain decoding and with drafts, with the same "
        "seed; print both, a table, and whether every token is the same (exit code 1 if not). The table's "
        "last row is transformers' own generate with the same sampling (its texts are others).",
    )
    parser.add_argument(
        "--out",
        default="demo",
        metavar="DIR",
        help="folder for autoregressive.json and auto.json; default: %(default)s",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=options.integer,
        default=512,
        metavar="N",
        help="tokens to write, at least 1; default: %(default)s",
    )
    parser.add_argument("--tokens", type=options.integer, dest="max_new_tokens", help=argparse.SUPPRESS)
    parser.add_argument(
        "--seed", type=options.integer, default=0, metavar="N", help="0 or more; default: %(default)s"
    )
    parser.add_argument(
        "--peer",
        default="transformers",
        choices=("transformers", "none"),
        help="also time transformers' generate; default: %(default)s",
    )
    add_raw_output_option(parser)
    add_verbose_option(parser)
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error except errors")
    options.add_model_options(parser, dtype="float32")


def run(args: argparse.Namespace) -> int:
    """Generate twice, compare, keep both records."""
    check_integer("max_new_tokens", args.max_new_tokens, 1)
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
    logger.info("%s, %s on %s", llm.name, llm.dtype, llm.device)

    results: dict[str, Generation] = {}
    for name in STRATEGIES:
        print(f"\n--- {name}: …{prompt[-60:].partition(' ')[2]}", flush=True)
        results[name] = stream(
            llm,
            prompt,
            TextSink(None, raw=args.raw_output),
            Progress(args.max_new_tokens, args.quiet, label=name, verbose=args.verbose),
            max_new_tokens=args.max_new_tokens,
            strategy=name,
            sampling=sampling,
            ignore_eos=True,
        )
        path = files[name]
        if path is not None:
            write_json(path, record_of(llm, results[name], name, {}, sampling))
    same = results["autoregressive"].token_ids == results["auto"].token_ids
    peer = None
    if args.peer != "none" and args.max_new_tokens > 1:
        logger.info("transformers' generate, %d tokens", min(args.max_new_tokens, PEER_TOKENS))
        peer = generate_rate(llm, llm.encode(prompt), min(args.max_new_tokens, PEER_TOKENS), sampling)
    print("\n" + table(results, peer))
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


def table(results: dict[str, Generation], peer: float | None = None) -> str:
    """Figures of the runs, a row each; the speed-up is against the first. ``peer``: transformers' tokens a
    second."""
    head = ("strategy", "tokens/s", "speed-up", "α", "mean acceptance length", "passes")
    base = next(iter(results.values())).metrics.tokens_per_second
    rows: list[tuple[str, ...]] = [head]
    for name, result in results.items():
        m = result.metrics
        speed_up = f"{m.tokens_per_second / base:.2f}" if base else "–"
        alpha = f"{m.acceptance_rate:.2f}" if name != "autoregressive" else "–"
        rows.append(
            (
                name,
                f"{m.tokens_per_second:.1f}",
                speed_up,
                alpha,
                f"{m.mean_acceptance_length:.2f}",
                str(m.steps),
            )
        )
    if peer is not None:
        speed_up = f"{peer / base:.2f}" if base else "–"
        rows.append(("transformers generate", f"{peer:.1f}", speed_up, "–", "1.00", "–"))
    size = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(size[0])] + [c.rjust(w) for c, w in zip(row[1:], size[1:], strict=True)])
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
