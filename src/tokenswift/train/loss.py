"""What drafters learn: the base model's own next-token distribution, as decoding will process it.

The *teacher distribution* of a token is the base model's after temperature and every filter, through the
functions of decoding (`sampling`). It comes from the stored hidden state of the position before, never from
the text's token alone. Penalties are left to decoding, which applies them to drafted tokens too. The loss is
the cross-entropy of teacher and student over a subset of frequent tokens (the whole vocabulary where that is
affordable), summed over the levels that the student drafts.

With ``targets="text"`` (the paper's recipe) the target is the text's own token and nothing is processed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenswift.config import SamplingParams
from tokenswift.kernels.weights import Stored
from tokenswift.loader.config import HEAD
from tokenswift.models.generic import shaped_logits
from tokenswift.sampling.choice import processed

MANY = 4096  # tokens in a loss, above which a step looks at some of them
LIKELIEST = 32  # of many tokens that the model's distribution is told of
OTHERS = 1024  # tokens of a step's loss beside those

Targets = tuple[Float[Tensor, "b r K"], Int[Tensor, "b r K"]]  # shares, and whose: places in the subset


class FrozenBase:
    """The parts of a base model that training needs: embedding, final norm, rows of the LM head.

    They are the model's own, used without gradients, but for the rows, which are a copy.

    Args:
        llm: the model, an ``LLM``.
        subset: tokens that the loss looks at, ascending, (S,).
        dtype: of products with the rows.
    """

    def __init__(self, llm: Any, subset: Int[Tensor, " S"], dtype: torch.dtype = torch.float32) -> None:
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
        return self.target.embed(tokens.clamp_min(0).flatten()).clone().view(*tokens.shape, self.width)

    @torch.no_grad()
    def teacher(self, hidden: Float[Tensor, "b r D"], sampling: SamplingParams) -> Targets:
        """The model's processed distribution of the next token, of the tokens that the filters left; of many
        tokens, of the :data:`LIKELIEST`."""
        scores = processed(self.logits(self.normed(hidden).flatten(0, 1), self.rows), sampling)
        kept = 1 if sampling.greedy else int((scores > -torch.inf).sum(-1).max())
        if self.size > MANY:
            kept = min(kept, LIKELIEST)
        if kept * 4 > self.size > 4:  # most of them: without a sort
            best, places = scores, torch.arange(self.size, device=self.device).expand_as(scores)
        else:
            best, places = scores.topk(kept)
        return best.softmax(-1).unflatten(0, hidden.shape[:2]), places.unflatten(0, hidden.shape[:2])

    def of_text(self, tokens: Int[Tensor, "b r"]) -> Targets:
        """The text's own tokens as targets; those outside the subset have no share."""
        places = torch.searchsorted(self.subset, tokens.contiguous()).clamp_max(self.size - 1)[..., None]
        return (self.subset[places] == tokens[..., None]).float(), places

    def among(self, places: Int[Tensor, "b r K"]) -> tuple[Tensor, Int[Tensor, "b r K"]]:
        """Of many tokens, the LM head's rows of those at these places and of some others, and where they are
        among those rows: what a step's loss looks at. Which others, the places say."""
        if self.size <= MANY or places.shape[-1] == 1:
            return self.rows, places
        apart = self.size // OTHERS
        others = torch.arange(int(places.sum()) % apart, self.size, apart, device=self.device)
        chosen = torch.cat([places.flatten(), others]).unique()
        return self.rows[chosen], torch.searchsorted(chosen, places)

    def logits(self, normed: Float[Tensor, "m D"], rows: Float[Tensor, "S D"]) -> Float[Tensor, "m S"]:
        """Of states as these rows of the LM head read them."""
        logits = nn.functional.linear(normed.to(self.dtype), rows)
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
        """For each level the states that the base's LM head reads, of the first m positions (r = b · m).

        Args:
            tokens: of those positions and after; -1 pads.
            states: the base's, n = m + :attr:`levels`.
        """
        raise NotImplementedError


class Distillation(nn.Module):
    """A student plus its loss: a batch in, ``{"loss": …}`` out.

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
        self.student, self.base, self.sampling, self.text = student, base, sampling, targets == "text"

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n W"], valid: Bool[Tensor, "b m"]
    ) -> dict[str, Tensor]:
        """Sum over the levels of the mean cross-entropy, nats a token.

        Arguments as `states.Windows` makes them; its ``extra`` is the student's levels.
        """
        base, m = self.base, valid.shape[1]
        if self.text:
            shares, places = base.of_text(tokens[:, 2:])
        else:
            shares, places = base.teacher(states[:, 1:, -base.width :], self.sampling)
        head, places = base.among(places)
        plain = self.text or self.sampling.greedy
        losses = []
        for i, normed in enumerate(self.student(tokens, states, base)):
            scores = base.logits(normed, head) / (1.0 if plain else self.sampling.temperature)
            share, place = (rows[:, i : i + m].flatten(0, 1) for rows in (shares, places))
            rows = scores.logsumexp(-1) * share.sum(-1) - (share * scores.gather(-1, place)).sum(-1)
            known = valid.flatten() & (share.sum(-1) > 0)
            losses.append((rows * known).sum() / known.sum().clamp_min(1))
        return {"loss": torch.stack(losses).sum(), "losses": torch.stack(losses).detach()}
