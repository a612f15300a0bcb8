"""How well heads draft: accuracy, coupled match rate, and accepted tokens by source.

- *top-1, top-3*: the text's next token is among the head's likeliest (no processing).
- *match, match-3*: the head's candidates under the target's own noise hold the token that the target
  chooses with that noise, both distributions processed as in decoding. What acceptance is made of.
- *chain*: so do the first candidates of all depths up to this one.
Each head is given the text's true tokens before the one it predicts, in a chain as well.
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
from tokenswift.spec.eagle.checkpoint import EagleWeights
from tokenswift.spec.eagle.reference import EagleCache, EagleReference
from tokenswift.spec.heads.modules import Heads
from tokenswift.train.features import features_of
from tokenswift.train.selftext import Backbone, continuations

Tell = Callable[[int, int], object]  #: how much is done, and how much there is
Drafts = Callable[[int], Iterator[Tensor]]  #: logits of each level, from a position on
MEASURES = ("top1", "top3", "match", "match3", "chain")
MATCH = MEASURES.index("match")


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

    def drafts(tokens: Tensor, hidden: Tensor) -> Drafts:
        return lambda t: _drafts(backbone, heads, tokens, hidden, t)

    return _rates(backbone, heads.count, drafts, texts, sampling, learn, positions, tell)


@torch.no_grad()
def eagle_rates(
    backbone: Backbone,
    weights: EagleWeights,
    depths: int,
    texts: list[list[int]],
    sampling: SamplingParams,
    learn: int = 0,
    positions: int = 2000,
    tell: Tell = lambda done, total: None,
) -> list[dict[str, float]]:
    """The same of the depths of an EAGLE-3 drafter, whose window is that of its training.

    Args:
        weights: of the drafter.
        depths: how many to look at.
    """
    model = backbone.model
    window = weights.config.default_window
    parts = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    eagle = EagleReference(weights, *parts, window)

    def drafts(tokens: Tensor, hidden: Tensor) -> Drafts:
        first = max(0, learn + 1 - window)  # rows before this one are seen from no place that counts
        features = features_of(backbone, weights.config.feature_layers, tokens[None])[0, first:-1]
        at, cache = torch.arange(first, len(tokens) - 1, device=tokens.device), EagleCache()
        states, logits = eagle.step(tokens[first + 1 :], eagle.fuse(features), at, cache)
        return lambda t: _chain(eagle, cache, states, logits, tokens, t, first, depths)

    return _rates(backbone, depths, drafts, texts, sampling, learn, positions, tell)


def _chain(
    eagle: EagleReference,
    cache: EagleCache,
    states: Tensor,
    logits: Tensor,
    tokens: Tensor,
    t: int,
    first: int,
    depths: int,
) -> Iterator[Float[Tensor, "1 V"]]:
    """A drafter's logits from the state of position t, with the text's tokens in between.

    Args:
        cache, states, logits: of the first depth, of the text from position ``first`` on.
    """
    chain, row = EagleCache(cache.keys, cache.values, cache.positions), t - first
    chain.cut(row + 1)
    state, said = states[row : row + 1], logits[row : row + 1]
    for i in range(depths):
        if i:
            at = torch.tensor([t + i], device=tokens.device)
            state, said = eagle.step(tokens[at + 1], state, at, chain)
        if eagle.d2t is None:
            yield said
            continue
        whole = said.new_full((1, eagle.config.vocab), -torch.inf)
        whole[:, eagle.d2t] = said
        yield whole


def _rates(
    backbone: Backbone,
    count: int,
    drafts: Callable[[Tensor, Tensor], Drafts],
    texts: list[list[int]],
    sampling: SamplingParams,
    learn: int,
    positions: int,
    tell: Tell,
) -> list[dict[str, float]]:
    """The measures of ``count`` levels of any drafter, which ``drafts`` makes for a text and its states."""
    model = backbone.model
    noise = Noise(sampling.seed, model.get_input_embeddings().weight.shape[0], model.device)
    sums, chain = torch.zeros(count, len(MEASURES), dtype=torch.float32), torch.ones((), dtype=torch.float32)
    seen = 0
    ends = [len(text) - 1 - count for text in texts]
    places = [range(learn, end, max(1, (end - learn) * len(texts) // positions)) for end in ends]
    total = sum(map(len, places))
    for text, here in zip(texts, places, strict=True):
        tokens = torch.tensor(text, device=model.device)
        hidden = backbone.hidden(tokens[None])[0]
        said = drafts(tokens, hidden)
        for t in here:
            for i, logits in enumerate(said(t)):
                found = _measure(backbone, logits, tokens, hidden, t + 1 + i, sampling, noise)
                chain = found[MATCH] * chain if i else found[MATCH]
                sums[i] += torch.stack((*found, chain))
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
