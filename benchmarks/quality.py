"""What a type of products, keys and values costs in quality: perplexity of given texts, beside float32.

Every text is read once by the model in the type and once in float32; a position's logits are those of a pass
over all tokens before it, as in generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import exp
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.prompts import prompt
from tokenswift.engine.llm import LLM

READ = 256  # tokens of a pass


@torch.inference_mode()
def measure(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """Perplexity over ``config["prefill"]`` tokens of each of ``config["novels"]`` texts, that of float32,
    their ratio, the mean divergence (nats a token) and the share of equal most probable tokens."""
    exact = LLM(config["model"], dtype="float32", device=llm.device, heads="none")
    loss = own = far = same = count = 0.0
    names: list[str] = []
    for index in range(config["novels"]):
        begun = prompt(config["prompts"], llm.encode, index, config["prefill"], llm.target.vocab_size)
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
