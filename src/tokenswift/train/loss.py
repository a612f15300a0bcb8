"""What drafters learn: the base model's own next-token law, as decoding will process it.

Heads draft for a sampler that penalises recent tokens and drops unlikely ones, so the target of
head i at position t is the base model's distribution of token t+2+i *after* penalty, temperature and
min-p; it comes from the stored hidden state of position t+1+i, never from the text's token alone.
The head's own logits get the same penalty. The loss is the cross-entropy of the two over a subset of
frequent tokens (the whole vocabulary where that is affordable), summed over the heads. A draft model
learns the same law of token t+1 at every position t of a window of text.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenswift.config import SamplingParams
from tokenswift.heads.modules import Heads

TARGETS = 64  # tokens of the target's law that count; min-p 0.1 rarely leaves more than 10


def rms_eps(norm: nn.Module) -> float:
    """ε of a transformers RMS norm."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))


class FrozenBase(nn.Module):
    """The parts of the base model that training needs: embedding, final norm, LM head rows.

    They are buffers that are never saved or trained.
    """

    def __init__(
        self, embedding: Tensor, lm_head: Tensor, norm: nn.Module, subset: Int[Tensor, " S"]
    ) -> None:
        super().__init__()
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("rows", lm_head.detach()[subset].contiguous(), persistent=False)
        self.register_buffer("subset", subset, persistent=False)
        place = torch.full((len(embedding) + 1,), len(subset), dtype=torch.long)
        place[subset] = torch.arange(len(subset))
        self.register_buffer("place", place, persistent=False)
        self.norm_weight: Tensor
        self.register_buffer("norm_weight", norm.weight.detach(), persistent=False)  # type: ignore[union-attr]
        self.norm_eps = rms_eps(norm)
        self.embedding: Tensor
        self.rows: Tensor
        self.subset: Tensor
        self.place: Tensor

    def normed(self, hidden: Float[Tensor, "*m D"]) -> Float[Tensor, "*m D"]:
        """The final norm (RMS), as the LM head reads it."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        return (wide * self.norm_weight.float()).to(self.rows.dtype)

    def embed(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m D"]:
        """Input embeddings; padding (-1) reads as token 0."""
        return self.embedding[tokens.clamp_min(0)]

    def seen(self, tokens: Int[Tensor, "b L"], at: Int[Tensor, " r"]) -> Bool[Tensor, "b r S"]:
        """Which tokens of the subset stand among the first ``at + 1`` tokens; -1 pads."""
        b, length = tokens.shape
        first = tokens.new_full((b, len(self.subset) + 1), length)
        steps = torch.arange(length, device=tokens.device).expand(b, length)
        first.scatter_reduce_(1, self.place[tokens], steps, "amin")
        return first[:, None, :-1] <= at[None, :, None]

    @torch.no_grad()
    def law(
        self, hidden: Float[Tensor, "b r D"], seen: Bool[Tensor, "b r S"], sampling: SamplingParams
    ) -> tuple[Float[Tensor, "b r K"], Int[Tensor, "b r K"]]:
        """The model's processed law of the next token: shares of its likeliest tokens, and their places."""
        best, places = self.scores(self.normed(hidden), seen, sampling).topk(min(TARGETS, len(self.subset)))
        if sampling.min_p > 0:
            best = best.masked_fill(best < best[..., :1] + math.log(sampling.min_p), -torch.inf)
        return best.softmax(-1), places

    def scores(
        self, normed: Float[Tensor, "*m D"], seen: Bool[Tensor, "*m S"], sampling: SamplingParams
    ) -> Float[Tensor, "*m S"]:
        """Penalised logits over temperature, float32, of states as the LM head reads them."""
        logits = nn.functional.linear(normed.to(self.rows.dtype), self.rows).float()
        return penalised(logits, seen, sampling.repetition_penalty) / sampling.temperature


def penalised(logits: Tensor, seen: Bool[Tensor, "*m S"], theta: float) -> Tensor:
    """The repetition penalty on the seen tokens' logits."""
    return torch.where(seen, torch.where(logits > 0, logits / theta, logits * theta), logits)


def cross_entropy(
    scores: Float[Tensor, "*m S"], shares: Float[Tensor, "*m K"], places: Int[Tensor, "*m K"], keep: Tensor
) -> Float[Tensor, ""]:
    """Mean cross-entropy of a drafter's scores to a law from :meth:`FrozenBase.law`, where ``keep`` is 1."""
    rows = scores.logsumexp(-1) - (shares * scores.gather(-1, places)).sum(-1)
    return (rows * keep).sum() / keep.sum().clamp_min(1)


class Distillation(nn.Module):
    """Heads plus loss, in the shape that a trainer wants: a batch in, ``{"loss": …}`` out."""

    def __init__(self, heads: Heads, base: FrozenBase, sampling: SamplingParams) -> None:
        super().__init__()
        self.heads = heads
        self.sampling = sampling
        object.__setattr__(self, "base", base)  # not a submodule: neither saved nor trained
        self.base: FrozenBase

    def forward(
        self, tokens: Int[Tensor, "B L"], hidden: Float[Tensor, "B n D"], valid: Bool[Tensor, "B m"]
    ) -> dict[str, Tensor]:
        """Sum over the heads of the mean cross-entropy.

        ``hidden`` holds the states of the last n tokens; its first m = n - count rows are the
        positions to learn from (where ``valid``), and the others only targets. Tokens before them
        serve the penalty; -1 pads.
        """
        base, count = self.base, self.heads.count
        b, length = tokens.shape
        n, m = hidden.shape[1], valid.shape[1]
        # Row r of the targets is the law of the token after position r + 1; head i takes rows i to i + m.
        at = length - n + 1 + torch.arange(n - 1, device=tokens.device)
        seen = base.seen(tokens, at)  # (b, n - 1, S)
        shares, places = base.law(hidden[:, 1:], seen, self.sampling)
        start = previous = hidden[:, :m].reshape(b * m, -1)
        keep = valid.reshape(-1).float()
        losses = []
        for i in range(count):
            known = tokens[:, length - n + 1 + i : length - n + 1 + i + m].reshape(-1)
            embeds = base.embed(known) if self.heads.conditioned else None
            previous = self.heads.advance(i, previous, start, embeds)
            now, share, place = (rows[:, i : i + m].flatten(0, 1) for rows in (seen, shares, places))
            mine = base.scores(self.heads.normed(i, previous), now, self.sampling)
            losses.append(cross_entropy(mine, share, place, keep))
        return {"loss": torch.stack(losses).sum(), "losses": torch.stack(losses).detach()}
