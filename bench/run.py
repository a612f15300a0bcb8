"""Benchmarks of one model on this machine. Every ratio comes from runs in turn within one process.

    python bench/run.py acceptance   mean acceptance length, coupled / by probability / published
    python bench/run.py trees        speed-up over plain decoding, tree by tree (the CPU default's source)
    python bench/run.py all          all of them

Rows are printed and appended to ``--results`` as JSON lines.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from common import PROMPTS, ROOT, median, prompts, row, run, save
from tokenswift import LLM, SamplingParams

PAPER_TREE = {"tree": (1, 3, 3, 3), "ngrams": 20, "budget": 512}


def acceptance(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Mean acceptance length at T = 1, min-p 0.1, θ 1.2 (issue figures), by way of drafting."""
    variants: dict[str, dict[str, Any]] = {
        "exact, coupled candidates": PAPER_TREE | {"draft": "partial"},
        "exact, coupled candidates, hidden state": PAPER_TREE | {"draft": "hidden"},
        "exact, candidates by probability": PAPER_TREE | {"draft": "partial", "candidates": "probability"},
        "published rule (not lossless)": PAPER_TREE | {"draft": "partial", "acceptance": "published"},
    }
    texts = prompts(llm, args.prompts, args.prompt_tokens, args.texts)
    rows = []
    for name, options in variants.items():
        if args.only and args.only not in name:
            continue
        lengths, alpha, beta = [], [], []
        for _, ids in texts:
            for seed in range(args.seeds):
                got = run(llm, ids, args.new_tokens, "tokenswift", options, SamplingParams(seed=seed)).metrics
                lengths.append(got.mean_acceptance_length)
                alpha.append(got.acceptance_rate)
                beta.append(got.ngram_acceptance_rate)
        figures = {
            "variant": name,
            "options": options,
            "heads": llm.heads.kind if llm.heads else None,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "texts": [text for text, _ in texts],
            "seeds": args.seeds,
            "dtype": llm.dtype,
            "mean_acceptance_length": round(statistics.mean(lengths), 3),
            "least": round(min(lengths), 3),
            "most": round(max(lengths), 3),
            "acceptance_rate": round(statistics.mean(alpha), 3),
            "ngram_acceptance_rate": round(statistics.mean(beta), 3),
        }
        rows.append(row("acceptance", **figures))
        save(rows[-1:], args.results)
    return rows


TREES: list[dict[str, Any]] = [
    {},
    {"tree": (1,), "ngrams": 0, "draft": "hidden"},
    {"tree": (1, 1), "ngrams": 0, "draft": "hidden"},
    {"tree": (1, 1, 1), "ngrams": 0, "draft": "hidden"},
    {"tree": (3, 1, 1), "ngrams": 0, "draft": "hidden"},
    {"tree": (1, 3, 3, 3), "ngrams": 20, "draft": "hidden"},
    {"tree": (1, 1), "ngrams": 0, "draft": "partial"},
    {"tree": (1, 3, 3, 3), "ngrams": 20, "draft": "partial"},
]


def trees(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Speed-up of each tree over plain decoding: pairs in turn, medians of the pairs' ratios."""
    texts = prompts(llm, args.prompts, args.prompt_tokens, args.texts)
    rows = []
    for options in TREES:
        if args.only and args.only not in str(options or "default"):
            continue
        full = {"budget": 512} | options
        ratios, lengths, same = [], [], True
        for i, (_, ids) in enumerate(texts):
            for seed in range(args.seeds):
                sampling = SamplingParams(seed=seed)
                order = ["autoregressive", "tokenswift"][:: 1 if (i + seed) % 2 else -1]
                got = {
                    s: run(llm, ids, args.new_tokens, s, full if s == "tokenswift" else None, sampling)
                    for s in order
                }
                plain, fast = got["autoregressive"], got["tokenswift"]
                ratios.append(fast.metrics.tokens_per_second / plain.metrics.tokens_per_second)
                lengths.append(fast.metrics.mean_acceptance_length)
                same = same and plain.token_ids == fast.token_ids
        figures = {
            "options": full,
            "heads": llm.heads.kind if llm.heads else None,
            "dtype": llm.dtype,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "pairs": len(ratios),
            "speedup": median(ratios),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
            "mean_acceptance_length": round(statistics.mean(lengths), 3),
            "identical": same,
        }
        rows.append(row("trees", **figures))
        save(rows[-1:], args.results)
    return rows


BENCHES = {"acceptance": acceptance, "trees": trees}


def main() -> None:
    """Parse, load, run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bench", nargs="?", default="all", choices=[*BENCHES, "all"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--heads", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of .txt files")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=150)
    parser.add_argument("--texts", type=int, default=4, help="how many texts of the folder")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="acceptance, trees: only variants whose text holds this")
    parser.add_argument("--results", type=Path, default=None, help="JSON-lines file to append to")
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, device=args.device, heads=args.heads)
    torch.manual_seed(0)
    names = list(BENCHES) if args.bench == "all" else [args.bench]
    for name in names:
        BENCHES[name](llm, args)


if __name__ == "__main__":
    if not ROOT.is_dir():
        raise SystemExit("error: run from a checkout")
    main()
