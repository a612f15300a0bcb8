"""Distillation: a student learns the distribution of a frozen base."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenswift.config.sampling import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.kernels.formats import Stored
from tokenswift.loader.layout import HEAD
from tokenswift.models.shaped import shaped_logits
from tokenswift.sampling.filters import processed

MANY = 4096  # tokens in a loss, above which it learns of the model's likeliest ones alone
LIKELIEST = 32  # how many these are
MULTIPLE = 128  # positions; products of a shape that was not there yet take longer


class Targets(NamedTuple):
    """The distribution that is learnt: K tokens for each position, and the share of each.

    Attributes:
        shares: probabilities of the tokens.
        places: the tokens, by their place in the subset that the loss looks at.
    """

    shares: Float[Tensor, "b r K"]
    places: Int[Tensor, "b r K"]


class FrozenBase:
    """The parts of a base model that training needs: embedding, final norm, rows of the LM head.

    They are the model's own, used without gradients, but for the rows, which are a copy.

    Args:
        llm: the model.
        subset: tokens that the loss looks at, ascending, (S,).
        dtype: of products with the rows.

    Attributes:
        rows: the LM head's rows of the subset, (S, D).
        size: S.
        width: D, the width of a hidden state.
    """

    def __init__(
        self, llm: LLM, subset: Int[Tensor, " S"], dtype: torch.dtype = torch.float32
    ) -> None:
        self.target = llm.target
        self.config = self.target.config
        self.device = self.target.device
        self.dtype = dtype
        self.width = self.target.hidden_size
        self.subset = subset.to(self.device)
        self.size = len(subset)
        head: Stored | Tensor = llm.source.weight(HEAD)
        if isinstance(head, Stored):
            rows = head.take(subset).decode()
        else:
            rows = head.detach()[subset.to(head.device)]
        self.rows = rows.to(self.device, dtype)

    @torch.no_grad()
    def normed(self, hidden: Float[Tensor, "*m D"]) -> Float[Tensor, "*m D"]:
        """The final norm, as the LM head reads it."""
        rows = self.target.norm(hidden.reshape(-1, self.width).to(self.target.dtype).contiguous())
        return rows.clone().to(self.dtype).view(hidden.shape)

    @torch.no_grad()
    def embed(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m D"]:
        """Input embeddings; padding (-1) reads as token 0."""
        rows = self.target.embed(tokens.clamp_min(0).flatten())
        return rows.clone().view(*tokens.shape, self.width)

    @torch.no_grad()
    def teacher(self, hidden: Float[Tensor, "b r D"], sampling: SamplingParams) -> Targets:
        """The model's processed distribution of the next token, of the tokens that the filters
        left; of many tokens, of the :data:`LIKELIEST`."""
        scores = processed(self.logits(self.normed(hidden).flatten(0, 1)), sampling)
        count = 1 if sampling.greedy else int((scores > -torch.inf).sum(-1).max())
        if self.size > MANY:
            count = min(count, LIKELIEST)
        if count * 4 > self.size > 4:  # most of them: without a sort
            best = scores
            places = torch.arange(self.size, device=self.device).expand_as(scores)
        else:
            best, places = scores.topk(count)
        batch = hidden.shape[:2]
        return Targets(best.softmax(-1).unflatten(0, batch), places.unflatten(0, batch))

    def of_text(self, tokens: Int[Tensor, "b r"]) -> Targets:
        """The text's own tokens as targets; those outside the subset have no share."""
        places = torch.searchsorted(self.subset, tokens.contiguous())
        places = places.clamp_max(self.size - 1)[..., None]
        return Targets((self.subset[places] == tokens[..., None]).float(), places)

    def logits(self, normed: Float[Tensor, "m D"]) -> Float[Tensor, "m S"]:
        """Logits of states as the rows of the LM head read them."""
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
            tokens: those of these positions and after; -1 pads.
            states: the base's, n = m + :attr:`levels`.
        """
        raise NotImplementedError


class Distillation(nn.Module):
    """A student plus its loss: a batch in, the loss of each level out.

    Args:
        student: what is trained.
        base: the frozen parts of its base model.
        sampling: the sampler whose distribution is learnt.
        targets: "model" (that distribution) or "text" (the text's own tokens).
    """

    def __init__(
        self, student: Student, base: FrozenBase, sampling: SamplingParams, targets: str = "model"
    ) -> None:
        super().__init__()
        self.student = student
        self.base = base
        self.sampling = sampling
        self.learns_text = targets == "text"

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n W"], valid: Bool[Tensor, "b m"]
    ) -> Float[Tensor, " levels"]:
        """The mean cross-entropy of each level, nats a token.

        Arguments as `states.Windows` makes them; its ``extra`` is the student's levels. Positions
        that no window needs are left off, in multiples of :data:`MULTIPLE`.
        """
        base = self.base
        needed = max(1, int(valid.any(0).sum()))
        m = min(-(-needed // MULTIPLE) * MULTIPLE, valid.shape[1])
        n = m + self.student.levels
        tokens = tokens[:, : n + 1]
        states = states[:, :n]
        valid = valid[:, :m]
        temperature = self.sampling.temperature
        if self.learns_text or self.sampling.greedy:
            temperature = 1.0
        if self.learns_text:
            targets = base.of_text(tokens[:, 2:])
        else:
            targets = base.teacher(states[:, 1:, -base.width :], self.sampling)
        losses = []
        for level, normed in enumerate(self.student(tokens, states, base)):
            scores = base.logits(normed) / temperature
            shares = targets.shares[:, level : level + m].flatten(0, 1)
            places = targets.places[:, level : level + m].flatten(0, 1)
            total = shares.sum(-1)
            rows = scores.logsumexp(-1) * total - (shares * scores.gather(-1, places)).sum(-1)
            counted = valid.flatten() & (total > 0)
            losses.append((rows * counted).sum() / counted.sum().clamp_min(1))
        return torch.stack(losses)
