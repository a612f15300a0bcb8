"""Quality without times: of adaptive drafting by counts, and of a type of numbers by perplexity.

``nodes``: tokens a step at equal numbers of verified nodes, trees grown for each step against the best fixed
tree: heads from the verified state alone (no n-grams, no partial pass), the same prompts, states and seeds.
Every fixed tree of that many nodes or one less is tried on another seed; the best three run on all.

``calibration``: predicted against observed chances by decile, of equal counts: adaptive drafting as it is,
from the shipped weights, learning as it goes; each candidate's chance when its place was ranked, and whether
the target chose it.

Both change drafting for good: they run in a process of their own (see `runner`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise
from math import exp
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.common import Trial
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.prefill import Prefilled
from tokenswift.spec.adaptive import recipe
from tokenswift.spec.adaptive.acceptance import Calibration
from tokenswift.spec.adaptive.controller import Control
from tokenswift.spec.adaptive.cost import Costs, Table
from tokenswift.spec.drafters.heads import HIDDEN
from tokenswift.tree import tree_nodes

DEPTH = 6  # of a fixed tree
READ = 256  # tokens of a pass that reads a text


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
    llm.resources.costs = lambda *_: table  # type: ignore[method-assign]
    Costs.observe = lambda *_: None  # type: ignore[method-assign]
    Control._price = lambda *_: None  # type: ignore[method-assign]

    def mode(self: Control, context: int) -> str:
        self.reprice(context)
        self.rate = 1.0
        return HIDDEN

    Control.mode = mode  # type: ignore[method-assign]


def _states(trial: Trial) -> tuple[list[str], list[Prefilled]]:
    """Names of the prompts, and the states after them."""
    found = [trial.prompt(index=index) for index in range(trial.config["texts"])]
    return [one.name for one in found], [trial.llm.prefill(one.ids) for one in found]


def nodes(trial: Trial) -> dict[str, Any]:
    """Trees grown against the best fixed tree."""
    names, states = _states(trial)
    shared: dict[str, Any] = {"ngrams": 0, "draft": "hidden"}
    count, measured, new = trial.config["nodes"], range(trial.config["seeds"]), trial.new

    def tokens_a_step(more: dict[str, Any], seeds: range, new: int) -> tuple[float, float]:
        """Mean tokens a step and nodes a step."""
        strategy = "tokenswift" if "tree" in more else "auto"
        runs = [
            state.generate(new, strategy, shared | more, SamplingParams(seed=seed), ignore_eos=True).metrics
            for state in states
            for seed in seeds
        ]
        drafted = [(m.mean_acceptance_length - 1) / (m.node_acceptance_rate or 1) for m in runs]
        return statistics.mean(m.mean_acceptance_length for m in runs), statistics.mean(drafted)

    tried = {tree: tokens_a_step({"tree": tree}, range(90, 91), new // 2)[0] for tree in fixed_trees(count)}
    best = sorted(tried, key=tried.__getitem__)[-3:]
    fixed = {tree: tokens_a_step({"tree": tree}, measured, new) for tree in best}
    tree = max(best, key=lambda tree: fixed[tree][0])
    pretend(trial.llm, count)
    dynamic, drafted = tokens_a_step({}, measured, new)
    figures = {
        "fixed_trees_tried": len(tried),
        "fixed_tokens_a_step": round(fixed[tree][0], 3),
        "fixed_nodes_a_step": round(fixed[tree][1], 2),
        "dynamic_tokens_a_step": round(dynamic, 3),
        "dynamic_nodes_a_step": round(drafted, 2),
        "ratio": round(dynamic / fixed[tree][0], 3),
    }
    shown = "[" + ",".join(map(str, tree)) + "]"
    return {"fixed_tree": shown, "prompts": names, "figures": {str(count): figures}}


def calibration(trial: Trial) -> dict[str, Any]:
    """Predicted against observed chances, of first candidates or of all, as the variant's name says."""
    first = trial.config["variant"].startswith("first")
    seen: list[tuple[float, bool]] = []
    learn = Calibration.learn

    def watched(
        self: Calibration, source: str, made: Any, chances: list[float], tokens: list[int], right: int
    ) -> None:
        pairs = [(chance, token == right) for chance, token in zip(chances, tokens, strict=True)]
        seen.extend(pairs[:1] if first else pairs)
        learn(self, source, made, chances, tokens, right)

    Calibration.learn = watched  # type: ignore[method-assign]
    recipe.YOUNG = 1 << 30  # every step is learnt from, so that more is seen
    names, states = _states(trial)
    for state in states:
        for seed in range(trial.config["seeds"]):
            state.generate(trial.new, "auto", {}, SamplingParams(seed=seed), ignore_eos=True)
    seen.sort()
    figures: dict[str, dict[str, float]] = {}
    for number, (low, high) in enumerate(pairwise(len(seen) * i // 10 for i in range(11)), 1):
        if part := seen[low:high]:
            told, came = (round(statistics.mean(pair[i] for pair in part), 3) for i in (0, 1))
            figures[str(number)] = {"predicted": told, "observed": came}
    worst = max((abs(f["predicted"] - f["observed"]) for f in figures.values()), default=0.0)
    return {"count": len(seen), "worst": round(worst, 3), "prompts": names, "figures": figures}


@torch.inference_mode()
def quality(trial: Trial) -> dict[str, Any]:
    """What a type of products, keys and values costs: perplexity over ``prefill`` tokens of each of
    ``novels`` texts, that of float32, their ratio, the mean divergence (nats a token) and the share of equal
    most probable tokens.

    Every text is read once by the model in the type and once in float32; a position's logits are those of a
    pass over all tokens before it, as in generation.
    """
    llm, config = trial.llm, trial.config
    exact = LLM(config["model"], dtype="float32", device=llm.device, heads="none")
    loss = own = far = same = count = 0.0
    names: list[str] = []
    for index in range(config["novels"]):
        begun = trial.prompt(index=index)
        names.append(begun.name)
        tokens = torch.tensor(begun.ids)
        for start, (ours, theirs) in zip(
            range(0, len(tokens), READ), _both(llm, exact, begun.ids), strict=True
        ):
            after = tokens[start + 1 : start + READ + 1, None]
            ours, theirs = ours[: len(after)].log_softmax(-1), theirs[: len(after)].log_softmax(-1)
            own -= ours.gather(1, after).sum().item()
            loss -= theirs.gather(1, after).sum().item()
            far += (theirs.exp() * (theirs - ours)).sum().item()
            same += (ours.argmax(1) == theirs.argmax(1)).sum().item()
            count += len(after)
    figures = {
        "perplexity": exp(own / count),
        "perplexity_float32": exp(loss / count),
        "over_float32": exp((own - loss) / count),
        "divergence": far / count,
        "same_best": same / count,
        "kv_bytes": llm.target.kv_bytes,
    }
    return {
        "prompt": {"name": ", ".join(names), "tokens": config["prefill"]},
        "figures": {str(int(count)): {name: round(value, 5) for name, value in figures.items()}},
    }


def _both(
    llm: LLM, exact: LLM, ids: list[int]
) -> Iterator[tuple[Float[Tensor, "n V"], Float[Tensor, "n V"]]]:
    """Logits of both models in double precision, pass by pass."""
    caches = [each.target.new_cache(len(ids)) for each in (llm, exact)]
    for start, end in pairwise([*range(0, len(ids), READ), len(ids)]):
        found = []
        for each, cache in zip((llm, exact), caches, strict=True):
            target = each.target
            tokens, positions = torch.tensor(ids[start:end]), torch.arange(start, end)
            hidden = target.forward(tokens.to(target.device), positions.to(target.device), cache).hidden
            cache.commit(tuple(range(end - start)))
            found.append(target.logits(hidden).double().cpu())
        yield found[0], found[1]
