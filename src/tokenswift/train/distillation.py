"""Distillation: a student learns the distribution of a frozen base."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.formats import Stored
from tokenswift.loader.layout import HEAD
from tokenswift.models.generic import shaped_logits
from tokenswift.sampling.filters import processed

MANY = 4096  # tokens in a loss, above which the model's distribution is told of some
MULTIPLE = 128  # positions; products of a shape that was not there yet take longer
LIKELIEST = 32  # of many tokens that the model's distribution is told of

Targets = tuple[
    Float[Tensor, "b r K"], Int[Tensor, "b r K"]
]  # shares, and whose: places in the subset


class FrozenBase:
    """The parts of a base model that training needs: embedding, final norm, rows of the LM head.

    They are the model's own, used without gradients, but for the rows, which are a copy.

    Args:
        llm: the model, an ``LLM``.
        subset: tokens that the loss looks at, ascending, (S,).
        dtype: of products with the rows.
    """

    def __init__(
        self, llm: Any, subset: Int[Tensor, " S"], dtype: torch.dtype = torch.float32
    ) -> None:
        self.target = target = llm.target
        self.config, self.device, self.dtype = target.config, target.device, dtype
        self.width = target.hidden_size
        self.subset, self.size = subset.to(self.device), len(subset)
        head = llm.source.weight(HEAD)
        stored = isinstance(head, Stored)
        found = head.take(subset).decode() if stored else head.detach()[subset.to(head.device)]
        self.rows = found.to(self.device, dtype)

    @torch.no_grad()
    def normed(self, hidden: Float[Tensor, "*m D"]) -> Float[Tensor, "*m D"]:
        """The final norm, as the LM head reads it."""
        rows = self.target.norm(hidden.reshape(-1, self.width).to(self.target.dtype).contiguous())
        return rows.clone().to(self.dtype).view(hidden.shape)

    @torch.no_grad()
    def embed(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m D"]:
        """Input embeddings; padding (-1) reads as token 0."""
        return (
            self.target.embed(tokens.clamp_min(0).flatten()).clone().view(*tokens.shape, self.width)
        )

    @torch.no_grad()
    def teacher(self, hidden: Float[Tensor, "b r D"], sampling: SamplingParams) -> Targets:
        """The model's processed distribution of the next token, of the tokens that the filters
        left; of many tokens, of the :data:`LIKELIEST`."""
        scores = processed(self.logits(self.normed(hidden).flatten(0, 1)), sampling)
        kept = 1 if sampling.greedy else int((scores > -torch.inf).sum(-1).max())
        if self.size > MANY:
            kept = min(kept, LIKELIEST)
        if kept * 4 > self.size > 4:  # most of them: without a sort
            best, places = scores, torch.arange(self.size, device=self.device).expand_as(scores)
        else:
            best, places = scores.topk(kept)
        return best.softmax(-1).unflatten(0, hidden.shape[:2]), places.unflatten(
            0, hidden.shape[:2]
        )

    def of_text(self, tokens: Int[Tensor, "b r"]) -> Targets:
        """The text's own tokens as targets; those outside the subset have no share."""
        places = torch.searchsorted(self.subset, tokens.contiguous()).clamp_max(self.size - 1)[
            ..., None
        ]
        return (self.subset[places] == tokens[..., None]).float(), places

    def logits(self, normed: Float[Tensor, "m D"]) -> Float[Tensor, "m S"]:
        """Of states as the rows of the LM head read them."""
        logits = nn.functional.linear(normed.to(self.dtype), self.rows)
        return shaped_logits(logits, self.config).float()


class Student(nn.Module):
    """What is distilled: a drafter that can be trained.

    From position t, level i drafts token t + 2 + i: one beyond the base model's own next token.

    Attributes:
        levels: tokens that it drafts, one after the other.
    """

    levels: int

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n W"], base: FrozenBase
    ) -> list[Float[Tensor, "r D"]]:
        """For each level the states that the base's LM head reads, of the first m positions (r = b
        · m).

        Args:
            tokens: of those positions and after; -1 pads.
            states: the base's, n = m + :attr:`levels`.
        """
        raise NotImplementedError


class Distillation(nn.Module):
    """A student plus its loss: a batch in, the loss of each level out.

    Args:
        student: what is trained.
        base: the frozen parts of its base model.
        sampling: the sampler whose distribution is learnt.
        targets: "model" or "text", see above.
    """

    def __init__(
        self, student: Student, base: FrozenBase, sampling: SamplingParams, targets: str = "model"
    ) -> None:
        super().__init__()
        self.student, self.base, self.sampling, self.text = (
            student,
            base,
            sampling,
            targets == "text",
        )

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n W"], valid: Bool[Tensor, "b m"]
    ) -> Float[Tensor, " levels"]:
        """The mean cross-entropy of each level, nats a token.

        Arguments as `states.Windows` makes them; its ``extra`` is the student's levels. What no
        window needs, is left off, in multiples of :data:`MULTIPLE`.
        """
        base, m = self.base, int(valid.any(0).sum())
        m = min(max(1, -(-m // MULTIPLE)) * MULTIPLE, valid.shape[1])
        n = m + self.student.levels
        tokens, states, valid = tokens[:, : n + 1], states[:, :n], valid[:, :m]
        if self.text:
            shares, places = base.of_text(tokens[:, 2:])
        else:
            shares, places = base.teacher(states[:, 1:, -base.width :], self.sampling)
        plain = self.text or self.sampling.greedy
        losses = []
        for i, normed in enumerate(self.student(tokens, states, base)):
            scores = base.logits(normed) / (1.0 if plain else self.sampling.temperature)
            share, place = (rows[:, i : i + m].flatten(0, 1) for rows in (shares, places))
            rows = scores.logsumexp(-1) * share.sum(-1) - (share * scores.gather(-1, place)).sum(-1)
            known = valid.flatten() & (share.sum(-1) > 0)
            losses.append((rows * known).sum() / known.sum().clamp_min(1))
        return torch.stack(losses)
