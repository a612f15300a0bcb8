"""Acceptance of every strategy on the same prompts: mean acceptance length, α, draft passes a step.

    python bench/strategies.py --contexts 2000,8000 --texts 2 --new-tokens 150

The prompt is prefilled once; every strategy starts from a copy of that state. Tokens are compared with
those of plain decoding. Rows are printed and appended to ``--results`` as JSON lines.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import PROMPTS, prompts, row, save
from tokenswift import LLM, SamplingParams
from tokenswift.config import build_options
from tokenswift.decode import decode, prefill
from tokenswift.interfaces import Sequence
from tokenswift.metrics import Meter
from tokenswift.sampling import Sampler
from tokenswift.strategies.table import STRATEGIES

TREE = {"tree": (1, 3, 3, 3), "draft": "partial"}
SCRATCH = 256

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


def start(llm: LLM, ids: list[int], new_tokens: int, sampler: Sampler) -> Sequence:
    """A prefilled sequence with room for every strategy."""
    cache = llm.target.new_cache(len(ids) + new_tokens + SCRATCH)
    sequence = Sequence(list(ids), len(ids), cache, llm.target, sampler)
    prefill(sequence)
    return sequence


def fork(sequence: Sequence, sampler: Sampler) -> Sequence:
    """A copy of a prefilled sequence that can run on its own."""
    full: Any = sequence.cache
    copy = sequence.model.new_cache(full.capacity)  # type: ignore[attr-defined]
    copy.data[:, :, : full.length] = full.data[:, :, : full.length]
    copy._length = full.length
    return replace(sequence, tokens=list(sequence.tokens), cache=copy, sampler=sampler)


def measure(llm: LLM, base: Sequence, strategy: str, options: dict[str, Any], args: Any, seed: int) -> Any:
    """Run one strategy from a prefilled state; (metrics, tokens)."""
    sampler = Sampler(SamplingParams(seed=seed), llm.target.vocab_size, llm.target.device)
    sequence = fork(base, sampler)
    entry = STRATEGIES[strategy]
    drafter = entry.build(llm, build_options(entry.options, strategy, options), sampler)
    meter, tokens = Meter(), []
    for step in decode(sequence, drafter, sampler, args.new_tokens, (), meter):
        tokens += step.token_ids
    return meter.finish(tokens, sequence.draft_passes), tokens


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
            sampler = Sampler(SamplingParams(), llm.target.vocab_size, llm.target.device)
            base = start(llm, ids, args.new_tokens, sampler)
            for seed in range(args.seeds):
                _, plain = measure(llm, base, "autoregressive", {}, args, seed)
                for name in found:
                    strategy, options = VARIANTS[name]
                    known = {"budget": args.budget} if strategy != "medusa" else {}
                    metrics, tokens = measure(llm, base, strategy, options | known, args, seed)
                    found[name].append(metrics)
                    same[name] = same[name] and tokens == plain
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
