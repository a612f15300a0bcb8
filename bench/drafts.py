"""Quality of automatic drafting by counts, without times.

    python bench/drafts.py nodes         tokens a step at equal numbers of verified nodes: trees grown for
                                         each step against the best fixed tree
    python bench/drafts.py calibration   predicted against observed chances by decile

``nodes``: heads from the verified state alone (no n-grams, no partial pass), the same prompts, states and
seeds. Every fixed tree of that many nodes or one less is tried on another seed; the best three run on all.

``calibration``: automatic drafting as it is, from the shipped weights, learning as it goes; each candidate's
chance when its place was ranked, and whether the target chose it. Deciles of equal counts.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import PROMPTS, decoded, prompts, row, save
from tokenswift import LLM, SamplingParams
from tokenswift.drafting import auto
from tokenswift.drafting.calibration import Calibration
from tokenswift.drafting.control import HIDDEN, Control
from tokenswift.drafting.costs import Costs, Table
from tokenswift.tree import tree_nodes

DEPTH = 6  # of a fixed tree


def fixed_trees(nodes: int) -> list[tuple[int, ...]]:
    """All trees of ``nodes`` or ``nodes - 1`` nodes below the root."""
    found: list[tuple[int, ...]] = []

    def extend(widths: tuple[int, ...]) -> None:
        count = tree_nodes(widths) - 1 if widths else 0
        if count in (nodes - 1, nodes):
            found.append(widths)
        if count < nodes and len(widths) < DEPTH:
            for width in range(1, nodes + 1):
                extend((*widths, width))

    extend(())
    return found


def pretend(llm: LLM, nodes: int) -> None:
    """Let ``nodes`` rows cost nothing and more than the world."""
    table = Table((1, nodes + 1, nodes + 2), (1.0, 1.0 + 1e-9, 1e12), (0.0, 0.0, 0.0), 1e-9)
    llm.costs = lambda: table  # type: ignore[method-assign]
    Costs.observe = lambda *_: None  # type: ignore[method-assign]
    Control.level_took = lambda *_: None  # type: ignore[method-assign]

    def mode(self: Control, context: int) -> str:
        self._reprice(context)
        self.rate = 1.0
        return HIDDEN

    Control.mode = mode  # type: ignore[method-assign]


def nodes(llm: LLM, args: argparse.Namespace) -> None:
    """Trees grown against the best fixed tree."""
    texts = prompts(llm, args.prompts, args.prompt_tokens, args.texts)
    states = [llm.prefill(ids) for _, ids in texts]

    def tokens_a_step(options: dict[str, Any], seeds: range, new: int) -> tuple[float, float]:
        """Mean tokens a step and nodes a step."""
        runs = [
            decoded(state, new, "tokenswift", options, SamplingParams(seed=seed)).metrics
            for state in states
            for seed in seeds
        ]
        drafted = [(m.mean_acceptance_length - 1) / (m.node_acceptance_rate or 1) for m in runs]
        return statistics.mean(m.mean_acceptance_length for m in runs), statistics.mean(drafted)

    shared: dict[str, Any] = {"ngrams": 0, "draft": "hidden"}
    count, measured, new = args.nodes, range(args.seeds), args.new_tokens
    tried = {
        tree: tokens_a_step(shared | {"tree": tree}, range(90, 91), new // 2)[0]
        for tree in fixed_trees(count)
    }
    best = sorted(tried, key=tried.__getitem__)[-3:]
    fixed = {tree: tokens_a_step(shared | {"tree": tree}, measured, new) for tree in best}
    tree = max(best, key=lambda tree: fixed[tree][0])
    pretend(llm, count)
    dynamic, drafted = tokens_a_step(shared, measured, new)
    figures = {
        "nodes": count,
        "fixed_tree": tree,
        "fixed_trees_tried": len(tried),
        "fixed_tokens_a_step": round(fixed[tree][0], 3),
        "fixed_nodes_a_step": round(fixed[tree][1], 2),
        "dynamic_tokens_a_step": round(dynamic, 3),
        "dynamic_nodes_a_step": round(drafted, 2),
        "ratio": round(dynamic / fixed[tree][0], 3),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "texts": [name for name, _ in texts],
        "seeds": args.seeds,
        "dtype": llm.dtype,
    }
    save([row("draft-nodes", **figures)], args.results)


def calibration(llm: LLM, args: argparse.Namespace) -> None:
    """Predicted against observed chances."""
    seen: dict[str, list[tuple[float, bool]]] = {"first candidates": [], "all candidates": []}
    learn = Calibration.learn

    def watched(
        self: Calibration, source: str, made: Any, chances: list[float], tokens: list[int], right: int
    ) -> None:
        pairs = [(chance, token == right) for chance, token in zip(chances, tokens, strict=True)]
        seen["first candidates"] += pairs[:1]
        seen["all candidates"] += pairs
        learn(self, source, made, chances, tokens, right)

    Calibration.learn = watched  # type: ignore[method-assign]
    auto._YOUNG = 1 << 30  # every step is learnt from, so that more is seen
    texts = prompts(llm, args.prompts, args.prompt_tokens, args.texts)
    for _, ids in texts:
        state = llm.prefill(ids)
        for seed in range(args.seeds):
            decoded(state, args.new_tokens, "tokenswift", {}, SamplingParams(seed=seed))
    for name, pairs in seen.items():
        pairs.sort()
        cuts = [len(pairs) * i // 10 for i in range(11)]
        parts = [pairs[low:high] for low, high in pairwise(cuts)]
        predicted = [round(statistics.mean(chance for chance, _ in part), 3) for part in parts]
        observed = [round(statistics.mean(hit for _, hit in part), 3) for part in parts]
        figures = {
            "of": name,
            "count": len(pairs),
            "predicted": predicted,
            "observed": observed,
            "worst": round(max(abs(p - o) for p, o in zip(predicted, observed, strict=True)), 3),
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "texts": [name for name, _ in texts],
            "seeds": args.seeds,
            "dtype": llm.dtype,
        }
        save([row("draft-calibration", **figures)], args.results)


PARTS = {"nodes": nodes, "calibration": calibration}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of texts")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="JSON lines file to append to")
    args = parser.parse_args()
    PARTS[args.part](LLM(args.model, dtype=args.dtype), args)


if __name__ == "__main__":
    main()
