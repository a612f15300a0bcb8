"""`tokenswift eval-heads`: how well heads draft, on held-out text and on the model's own."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from tokenswift.cli.options import DEFAULT_MODEL, add_sampling_options, integer, sampling_from

logger = logging.getLogger("tokenswift")
COLUMNS = ("top1", "top3", "match", "match3")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "eval-heads",
        help="measure how well heads draft",
        description="Per head: top-1 and top-3 accuracy, and the coupled match rate, "
        "on the data and on the model's own continuations; then the mean acceptance length by source.",
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="alias, folder or hub id of the base model")
    add("--heads", default="auto", help="heads file, or auto")
    add("--data", required=True, help="held-out text: a file, JSONL or a folder")
    add("--positions", type=integer, default=500, help="places to look at per text sort (default 500)")
    add("--context", type=integer, default=512, help="tokens of a text that is looked at (default 512)")
    add("--prompts", type=integer, default=4, help="prompts to generate from; 0 skips it (default 4)")
    add("--prompt", type=integer, default=1500, help="tokens of a prompt (default 1500)")
    add("--max-new-tokens", type=integer, default=200, help="new tokens per prompt (default 200)")
    add("--budget", type=integer, default=512, help="budget of the partial cache (default 512)")
    add("--tree", default="1,3,3,3", help="tree of the generation (default 1,3,3,3)")
    add("--ngrams", type=integer, default=20, help="n-gram branches (default 20)")
    add("--dtype", default="auto", help="auto, bfloat16 or float32")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--json", type=Path, help="write the figures to a file")
    add("--quiet", action="store_true", help="no progress lines")
    add_sampling_options(parser, "sampling (of both laws, the model's text and the noise)")


def run(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    from tokenswift.cli.options import widths
    from tokenswift.config import check_integer
    from tokenswift.heads.checkpoint import base_of
    from tokenswift.llm import LLM
    from tokenswift.train.data import check_source, passages, prefix_of
    from tokenswift.train.evaluate import head_rates, own_text
    from tokenswift.train.selftext import Backbone
    from tokenswift.types import InputError

    for name in ("positions", "context", "prompt", "max_new_tokens"):
        check_integer(name, getattr(args, name), 16)
    check_integer("prompts", args.prompts, 0)
    sampling = sampling_from(args)
    try:
        tree = widths(args.tree)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"tree {error}") from None
    check_source(args.data)
    llm = LLM(args.model, dtype=args.dtype, device=args.device, heads=args.heads)
    if llm.heads is None:
        raise InputError(f"heads is {args.heads!r}; no heads fit {base_of(llm.model).name}; name a file")
    prefix = prefix_of(llm.tokenizer)

    def taken(count: int, length: int, seed: int) -> list[list[int]]:
        return passages(args.data, llm.tokenizer, [length] * count, prefix, seed)

    given = taken(8, args.context, args.seed)
    backbone = Backbone(llm.model)
    logger.info("measuring on the text")
    result: dict[str, Any] = {"heads": llm.heads.count, "kind": llm.heads.kind}
    result["text"] = head_rates(backbone, llm.heads, given, sampling, 32, args.positions)
    logger.info("measuring on the model's own text")
    half = [passage[: len(passage) // 2] for passage in given]
    texts, start = own_text(backbone, half, len(half[0]), sampling, args.seed)
    result["own"] = head_rates(backbone, llm.heads, texts, sampling, start, args.positions)
    result["acceptance"] = {}
    if args.prompts:
        prompts = taken(args.prompts, args.prompt, args.seed + 1)
        for draft in ("partial", "hidden"):
            logger.info("generating, draft from %s", draft)
            options = {"tree": tree, "ngrams": args.ngrams, "budget": args.budget, "draft": draft}
            runs = [
                llm.generate(p, args.max_new_tokens, "tokenswift", options, sampling, ignore_eos=True).metrics
                for p in prompts
            ]
            result["acceptance"][draft] = {
                "mean_acceptance_length": sum(m.mean_acceptance_length for m in runs) / len(runs),
                "acceptance_rate": sum(m.acceptance_rate for m in runs) / len(runs),
                "ngram_acceptance_rate": sum(m.ngram_acceptance_rate for m in runs) / len(runs),
                "tokens_per_second": sum(m.tokens_per_second for m in runs) / len(runs),
            }
    print(table(result), flush=True)
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"json {args.json} cannot be written: {error.strerror}") from error
    return 0


def table(result: dict[str, Any]) -> str:
    """The figures as plain text."""
    lines = [f"{'text':<6} {'head':>4}  " + "  ".join(f"{c:>6}" for c in COLUMNS)]
    for source in ("text", "own"):
        for i, row in enumerate(result[source], 1):
            lines.append(f"{source:<6} {i:>4}  " + "  ".join(f"{row[c]:>6.3f}" for c in COLUMNS))
    for draft, row in result["acceptance"].items():
        lines.append(
            f"draft {draft}: mean acceptance length {row['mean_acceptance_length']:.2f}, "
            f"α {row['acceptance_rate']:.3f}, n-grams β {row['ngram_acceptance_rate']:.3f}, "
            f"{row['tokens_per_second']:.1f} tokens/s"
        )
    return "\n".join(lines)
