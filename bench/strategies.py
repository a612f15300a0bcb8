"""Acceptance of every strategy on the same prompts: mean acceptance length, α, draft passes a step.

    python bench/strategies.py --contexts 2000,8000 --texts 2 --new-tokens 150

The prompt is prefilled once; every strategy starts from a copy of that state. Tokens are compared with
those of plain decoding. Rows are printed and appended to ``--results`` as JSON lines.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from common import PROMPTS, decoded, prompts, row, save
from tokenswift import LLM, SamplingParams

TREE = {"tree": (1, 3, 3, 3), "draft": "partial"}

#: name in tables → (strategy, options without the budget)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TokenSwift": ("tokenswift", {**TREE, "ngrams": 20}),
    "TokenSwift, k = 0": ("tokenswift", {**TREE, "ngrams": 0}),
    "TokenSwift, k = 0, static partial cache": ("tokenswift", {**TREE, "ngrams": 0, "cache": "partial"}),
    "TokenSwift, k = 0, full cache": ("tokenswift", {**TREE, "ngrams": 0, "cache": "full"}),
    "Medusa": ("medusa", {"tree": (3, 3, 2, 2)}),
    "TriForce": ("triforce", {"gamma": 6, "inner_gamma": 2}),
    "TriForce, retrieval at prefill only": ("triforce", {"gamma": 6, "inner_gamma": 2, "refresh": 0}),
    "MagicDec, SnapKV": ("magicdec", {"gamma": 4, "kv": "snapkv"}),
    "MagicDec, streaming": ("magicdec", {"gamma": 4, "kv": "streaming"}),
    "MagicDec, draft model": (
        "magicdec",
        {"gamma": 4, "kv": "streaming", "draft_model": "smollm2-135m-draft"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of texts")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--contexts", default="2000,8000", help="prompt lengths in tokens")
    parser.add_argument("--new-tokens", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--only", help="variants whose name holds this")
    parser.add_argument("--results", type=Path, help="JSON lines file to append to")
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, device=args.device)
    for context in map(int, args.contexts.split(",")):
        found: dict[str, list[Any]] = {name: [] for name in VARIANTS if (args.only or "") in name}
        same = dict.fromkeys(found, True)
        texts = prompts(llm, args.prompts, context, args.texts)
        for _, ids in texts:
            base = llm.prefill(ids)
            for seed in range(args.seeds):
                plain = decoded(base, args.new_tokens, "autoregressive", {}, SamplingParams(seed=seed))
                for name in found:
                    strategy, options = VARIANTS[name]
                    known = {"budget": args.budget} if strategy != "medusa" else {}
                    got = decoded(base, args.new_tokens, strategy, options | known, SamplingParams(seed=seed))
                    found[name].append(got.metrics)
                    same[name] = same[name] and got.token_ids == plain.token_ids
        for name, metrics in found.items():
            strategy, options = VARIANTS[name]
            figures = {
                "variant": name,
                "strategy": strategy,
                "options": options,
                "budget": args.budget,
                "prompt_tokens": context,
                "new_tokens": args.new_tokens,
                "texts": [text for text, _ in texts],
                "seeds": args.seeds,
                "dtype": llm.dtype,
                "mean_acceptance_length": _mean(m.mean_acceptance_length for m in metrics),
                "acceptance_rate": _mean(m.acceptance_rate for m in metrics),
                "draft_passes_per_step": _mean(m.draft_passes / m.steps for m in metrics),
                "identical": same[name],
            }
            save([row("strategies", **figures)], args.results)


def _mean(values: Any) -> float:
    return round(statistics.mean(values), 3)


if __name__ == "__main__":
    main()
