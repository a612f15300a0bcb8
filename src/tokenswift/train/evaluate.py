"""How well heads draft: accuracy, coupled match rate, and accepted tokens by source.

- *top-1, top-3*: the text's next token is among the head's likeliest (no processing).
- *match, match-3*: the head's candidates under the target's own noise hold the token that the target
  chooses with that noise, both distributions processed as in decoding. What acceptance is made of.
Each head is given the text's true tokens before the one it predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.sampling.choice import recent_scores
from tokenswift.sampling.noise import Noise
from tokenswift.spec.heads.modules import Heads
from tokenswift.train.selftext import Backbone, continuations

Tell = Callable[[int, int], object]  #: how much is done, and how much there is
MEASURES = ("top1", "top3", "match", "match3")


def own_text(
    backbone: Backbone, prompts: list[list[int]], new: int, sampling: SamplingParams, tell: Tell
) -> list[list[int]]:
    """Continuations of equally long prompts by the model, the prompts before them. ``tell`` is told how many
    of the tokens are written."""
    start = torch.tensor(prompts, device=backbone.model.device)
    tokens = [start]
    for token, _ in continuations(backbone, start, new, sampling, sampling.seed):
        tokens.append(token[:, None])
        tell(len(prompts) * (len(tokens) - 1), len(prompts) * new)
    return torch.cat(tokens, dim=1).tolist()


@torch.no_grad()
def head_rates(
    backbone: Backbone,
    heads: Heads,
    texts: list[list[int]],
    sampling: SamplingParams,
    learn: int = 0,
    positions: int = 2000,
    tell: Tell = lambda done, total: None,
) -> list[dict[str, float]]:
    """Per head, the measures over about ``positions`` places of the texts, evenly spread.

    Args:
        backbone: the base model.
        heads: the heads, on its device.
        texts: token ids.
        sampling: the processing of both distributions, and the seed of the noise.
        learn: first position of each text that counts.
        positions: how many places to look at.
        tell: told how many were looked at.
    """
    model = backbone.model
    noise = Noise(sampling.seed, model.get_input_embeddings().weight.shape[0], model.device)
    sums = torch.zeros(heads.count, len(MEASURES), dtype=torch.float32)
    seen = 0
    ends = [len(text) - 1 - heads.count for text in texts]
    places = [range(learn, end, max(1, (end - learn) * len(texts) // positions)) for end in ends]
    total = sum(map(len, places))
    for text, here in zip(texts, places, strict=True):
        tokens = torch.tensor(text, device=model.device)
        hidden = backbone.hidden(tokens[None])[0]
        for t in here:
            for i, logits in enumerate(_drafts(backbone, heads, tokens, hidden, t)):
                sums[i] += _measure(backbone, logits, tokens, hidden, t + 1 + i, sampling, noise)
            seen += 1
            tell(seen, total)
    rates = (sums / max(seen, 1)).tolist()
    return [dict(zip(MEASURES, row, strict=True)) | {"positions": float(seen)} for row in rates]


def _drafts(
    backbone: Backbone, heads: Heads, tokens: Tensor, hidden: Tensor, t: int
) -> Iterator[Float[Tensor, "1 V"]]:
    """The heads' logits from the state of position t, with the text's tokens in between."""
    base = state = hidden[t : t + 1]
    embed: Any = backbone.model.get_input_embeddings()
    for i in range(heads.count):
        embeds = embed(tokens[t + 1 + i : t + 2 + i]) if heads.conditioned else None
        state = heads.advance(i, state, base, embeds)
        normed = heads.normed(i, state)
        if heads.own_lm_heads:
            yield heads.own_logits(i, normed)
        else:
            yield backbone.model.lm_head(normed.to(backbone.model.dtype)).float()


def _measure(
    backbone: Backbone,
    logits: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    at: int,
    sampling: SamplingParams,
    noise: Noise,
) -> Tensor:
    """The measures of one guess of the token after position ``at``."""
    best = logits[0].topk(3).indices
    truth = tokens[at + 1]
    recent = tokens[None, : at + 1]
    gumbel = noise.at(at + 1)
    target = (recent_scores(backbone.logits(hidden[at : at + 1]), recent, sampling)[0] + gumbel).argmax()
    drafted = (recent_scores(logits, recent, sampling)[0] + gumbel).topk(3)
    ranked = drafted.indices[drafted.values > -torch.inf]
    hits = (best[0] == truth, (best == truth).any(), ranked[0] == target, (ranked == target).any())
    return torch.stack([hit.float().cpu() for hit in hits])
