"""Quality without times: of adaptive drafting by counts, and of a type of numbers by perplexity.

``calibration``: predicted against observed chances by decile, of equal counts: adaptive drafting as it is,
from the shipped weights, learning as it goes; each candidate's chance when its place was ranked, and whether
the target chose it.

It changes drafting for good: rows run in a process of their own (see `runner`).
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
from tokenswift.engine.sequence import Prefilled
from tokenswift.spec import adaptive
from tokenswift.spec.chances import Calibration

READ = 256  # tokens of a pass that reads a text


def _states(trial: Trial) -> tuple[list[str], list[Prefilled]]:
    """Names of the prompts, and the states after them."""
    found = [trial.prompt(index=index) for index in range(trial.config["texts"])]
    return [one.name for one in found], [trial.llm.prefill(one.ids) for one in found]


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
    adaptive.YOUNG = 1 << 30  # every step is learnt from, so that more is seen
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
