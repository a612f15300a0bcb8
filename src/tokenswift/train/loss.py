"""What drafters learn: the base model's own next-token distribution, as decoding will process it.

Heads draft for a sampler that penalises recent tokens and drops unlikely ones, so the *teacher distribution*
of head i at position t is the base model's of token t+2+i after the penalty over exactly its last W tokens,
temperature and every filter, through the functions of decoding (`sampling`). It comes from the stored hidden
state of position t+1+i, never from the text's token alone. The head's own logits get the same penalty and
temperature. The loss is the cross-entropy of the two over a subset of frequent tokens (the whole vocabulary
where that is affordable), summed over the heads. A draft model learns the same of token t+1 at every position
t of a window of text.

With ``targets="text"`` (the paper's recipe) the target is the text's own token and nothing is processed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenswift.config import SamplingParams
from tokenswift.models.generic import final_norm, shaped_logits
from tokenswift.sampling.choice import penalised, processed, temperature
from tokenswift.spec.heads.modules import Heads

Recent = Int[Tensor, "b r w"] | None  # places of the penalised tokens of each row; None: no penalty


def rms_eps(norm: nn.Module) -> float:
    """ε of a transformers RMS norm."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))


def most_kept(scores: Float[Tensor, "*m S"]) -> int:
    """The greatest number of tokens that the filters left in a row."""
    return int((scores > -torch.inf).sum(-1).max())


class FrozenBase:
    """The parts of a loaded base model that training needs: embedding, final norm, rows of the LM head.

    They are the model's own, used without gradients, but for the rows, which are a copy.

    Args:
        model: a loaded causal LM.
        subset: tokens that the loss looks at, ascending, (S,).
    """

    def __init__(self, model: Any, subset: Int[Tensor, " S"]) -> None:
        head: Tensor = model.get_output_embeddings().weight.detach()
        self.config, self.device, self.dtype = model.config, head.device, head.dtype
        self.subset = subset.to(self.device)
        self.size = len(subset)
        # Place S stands for every other token: its column takes the penalty of those and is dropped.
        rows = head.new_zeros(-(-(self.size + 1) // 16) * 16, head.shape[1])
        torch.index_select(head, 0, self.subset, out=rows[: self.size])
        self.rows = rows
        self.place = torch.full((len(head) + 1,), self.size, dtype=torch.long, device=self.device)
        self.place[self.subset] = torch.arange(self.size, device=self.device)
        self._embedding: nn.Module = model.get_input_embeddings()
        self._norm = final_norm(model)

    @torch.no_grad()
    def normed(self, hidden: Float[Tensor, "*m D"]) -> Float[Tensor, "*m D"]:
        """The final norm, as the LM head reads it."""
        return self._norm(hidden.to(self.dtype))

    @torch.no_grad()
    def embed(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m D"]:
        """Input embeddings; padding (-1) reads as token 0."""
        return self._embedding(tokens.clamp_min(0))

    def recent(self, tokens: Int[Tensor, "b L"], first: int, rows: int, window: int) -> Recent:
        """The places of the last ``window`` tokens up to positions ``first`` … ``first + rows - 1``.

        Args:
            tokens: -1 pads.
        """
        if not window:
            return None
        width = min(window, first + rows)
        before = max(0, width - 1 - first)  # rows that reach to before the text
        places = nn.functional.pad(self.place[tokens], (before, 0), value=self.size)
        start = first + before - (width - 1)
        return places.unfold(1, width, 1)[:, start : start + rows]

    @torch.no_grad()
    def teacher(
        self, hidden: Float[Tensor, "b r D"], recent: Recent, sampling: SamplingParams
    ) -> tuple[Float[Tensor, "b r K"], Int[Tensor, "b r K"]]:
        """The model's processed distribution of the next token: shares and places of the tokens left."""
        scores = self._penalised(self.normed(hidden).flatten(0, 1), recent, sampling)
        scores = processed(scores, sampling)
        if sampling.greedy:
            places = scores.argmax(-1, keepdim=True)
            shares = torch.ones_like(places, dtype=torch.float32)
        elif (kept := most_kept(scores)) * 4 > self.size:
            shares, places = scores.softmax(-1), torch.arange(self.size, device=self.device).expand_as(scores)
        else:
            best, places = scores.topk(kept)
            shares = best.softmax(-1)
        return shares.unflatten(0, hidden.shape[:2]), places.unflatten(0, hidden.shape[:2])

    def scores(
        self, normed: Float[Tensor, "m D"], recent: Recent, sampling: SamplingParams
    ) -> Float[Tensor, "m S"]:
        """A drafter's log-scores, from states as the LM head reads them: penalised, over temperature."""
        scores = self._penalised(normed, recent, sampling)
        plain = sampling.greedy or sampling.temperature == 1
        return scores if plain else temperature(scores, sampling.temperature)

    def plain(self, normed: Float[Tensor, "m D"]) -> Float[Tensor, "m S"]:
        """Logits without any processing, float32."""
        return self._logits(normed)[:, : self.size]

    def _logits(self, normed: Tensor) -> Tensor:
        logits = nn.functional.linear(normed.to(self.dtype), self.rows)
        return shaped_logits(logits, self.config).to(torch.float32, copy=True)

    def _penalised(self, normed: Tensor, recent: Recent, sampling: SamplingParams) -> Tensor:
        if recent is None:
            return self.plain(normed)
        theta = sampling.repetition_penalty
        return _Penalty.apply(self._logits(normed), recent.flatten(0, 1), theta)[:, : self.size]


class _Penalty(torch.autograd.Function):
    """`sampling.choice.repetition_penalty` in place, and its gradient where ids repeat."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, theta: float) -> Tensor:
        seen = logits.gather(1, ids)
        ctx.save_for_backward(ids, seen < 0)
        ctx.theta = theta
        ctx.mark_dirty(logits)
        return logits.scatter_(1, ids, penalised(seen, theta))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ids, negative = ctx.saved_tensors
        own = gradients[0].gather(1, ids)
        own = torch.where(negative, own * ctx.theta, own / ctx.theta)
        return gradients[0].scatter(1, ids, own), None, None


def frozen_base(model: Any, subset: Int[Tensor, " S"]) -> FrozenBase:
    """The parts of a loaded model that the loss needs, where the model lies."""
    return FrozenBase(model, subset)


def cross_entropy(
    scores: Float[Tensor, "*m S"],
    shares: Float[Tensor, "*m K"],
    places: Int[Tensor, "*m K"],
    keep: Float[Tensor, "*m"],
) -> Float[Tensor, ""]:
    """Mean cross-entropy, nats, of a drafter's scores to a teacher's shares, over the rows to ``keep``."""
    rows = scores.logsumexp(-1) - (shares * scores.gather(-1, places)).sum(-1)
    return (rows * keep).sum() / keep.sum().clamp_min(1)


class Distillation(nn.Module):
    """Heads plus loss, in the shape that a trainer wants: a batch in, ``{"loss": …}`` out.

    Args:
        heads: what is trained.
        base: the frozen parts of their base model.
        sampling: the sampler whose distribution is learnt.
        targets: "model" or "text", see above.
    """

    def __init__(
        self, heads: Heads, base: FrozenBase, sampling: SamplingParams, targets: str = "model"
    ) -> None:
        super().__init__()
        self.heads, self.base, self.sampling, self.targets = heads, base, sampling, targets

    def forward(
        self, tokens: Int[Tensor, "b L"], hidden: Float[Tensor, "b n D"], valid: Bool[Tensor, "b m"]
    ) -> dict[str, Tensor]:
        """Sum over the heads of the mean cross-entropy.

        ``hidden`` holds the states of the last n tokens; its first m = n - count rows are the
        positions to learn from (where ``valid``), and the others only targets. Tokens before them
        serve the penalty; -1 pads.
        """
        base, count = self.base, self.heads.count
        b, length = tokens.shape
        n, m = hidden.shape[1], valid.shape[1]
        first = (
            length - n + 1
        )  # row r of the teacher: of the token after position r + 1; head i: rows i to i + m
        recent = None
        if self.targets == "model":
            recent = base.recent(tokens, first, n - 1, self.sampling.window)
            shares, places = base.teacher(hidden[:, 1:], recent, self.sampling)
        start = previous = hidden[:, :m].reshape(b * m, -1)
        keep = valid.reshape(-1).float()
        losses = []
        for i in range(count):
            embeds = None
            if self.heads.conditioned:
                embeds = base.embed(tokens[:, first + i : first + i + m].reshape(-1))
            previous = self.heads.advance(i, previous, start, embeds)
            normed = self.heads.normed(i, previous)
            if self.targets == "model":
                now = None if recent is None else recent[:, i : i + m]
                mine = base.scores(normed, now, self.sampling)
                share, place = (rows[:, i : i + m].flatten(0, 1) for rows in (shares, places))
                losses.append(cross_entropy(mine, share, place, keep))
            else:
                losses.append(self._text_loss(base.plain(normed), tokens, i, m, keep))
        return {"loss": torch.stack(losses).sum(), "losses": torch.stack(losses).detach()}

    def _text_loss(self, scores: Tensor, tokens: Tensor, i: int, m: int, keep: Tensor) -> Tensor:
        """Cross-entropy of head i to the text's tokens; those outside the subset do not count."""
        first = tokens.shape[1] - m - self.heads.count + 2 + i
        place = self.base.place[self._padded(tokens, first, m)].reshape(-1, 1)
        known = keep * (place[:, 0] < self.base.size)
        place = place.clamp_max(self.base.size - 1)
        return cross_entropy(scores, torch.ones_like(place, dtype=torch.float32), place, known)

    @staticmethod
    def _padded(tokens: Tensor, first: int, m: int) -> Tensor:
        """Tokens ``first`` to ``first + m``; beyond the text stands the padding."""
        piece = tokens[:, first : first + m]
        return nn.functional.pad(piece, (0, m - piece.shape[1]), value=-1)
