"""What drafters learn: the base model's own next-token distribution, as decoding will process it.

They draft for a sampler that penalises recent tokens and drops unlikely ones, so the *teacher distribution*
of a token is the base model's after the penalty over exactly the last W tokens before it, temperature and
every filter, through the functions of decoding (`sampling`). It comes from the stored hidden state of the
position before, never from the text's token alone. The student's own logits get the same penalty and
temperature. The loss is the cross-entropy of the two over a subset of frequent tokens (the whole vocabulary
where that is affordable), summed over the levels that the student drafts.

With ``targets="text"`` (the paper's recipe) the target is the text's own token and nothing is processed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenswift.config import NEUTRAL, SamplingParams
from tokenswift.kernels.formats import Stored
from tokenswift.loader.config import HEAD
from tokenswift.models.generic import shaped_logits
from tokenswift.sampling.choice import processed

MANY = 4096  # tokens in a loss, above which a step looks at some of them
LIKELIEST = 32  # of many tokens that the model's distribution is told of
OTHERS = 1024  # tokens of a step's loss beside those

Recent = Int[Tensor, "b r w"] | None  # places of the penalised tokens of each row; None: no penalty
Targets = tuple[Float[Tensor, "b r K"], Int[Tensor, "b r K"]]  # shares, and whose: places in the subset


def penalty(logits: Float[Tensor, "m S"], ids: Int[Tensor, "m w"], theta: float) -> Float[Tensor, "m S"]:
    """`sampling.choice.repetition_penalty`, whose gradient would count repeated ids several times."""
    negative = logits.detach().gather(1, ids) < 0
    factors = torch.where(negative, theta, 1 / theta).to(logits.dtype)
    return logits * torch.ones_like(logits).scatter_(1, ids, factors)


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
        # Place S stands for every other token: its column takes the penalty of those and is dropped.
        self.rows = torch.zeros(-(-(self.size + 1) // 16) * 16, self.width, dtype=dtype, device=self.device)
        self.rows[: self.size] = found.to(dtype)
        self.place = torch.full((target.vocab_size + 1,), self.size, dtype=torch.long, device=self.device)
        self.place[self.subset] = torch.arange(self.size, device=self.device)

    @torch.no_grad()
    def normed(self, hidden: Float[Tensor, "*m D"]) -> Float[Tensor, "*m D"]:
        """The final norm, as the LM head reads it."""
        rows = self.target.norm(hidden.reshape(-1, self.width).to(self.target.dtype).contiguous())
        return rows.clone().to(self.dtype).view(hidden.shape)

    @torch.no_grad()
    def embed(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m D"]:
        """Input embeddings; padding (-1) reads as token 0."""
        return self.target.embed(tokens.clamp_min(0).flatten()).clone().view(*tokens.shape, self.width)

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
    def teacher(self, hidden: Float[Tensor, "b r D"], recent: Recent, sampling: SamplingParams) -> Targets:
        """The model's processed distribution of the next token, of the tokens that the filters left; of many
        tokens, of the :data:`LIKELIEST`."""
        scores = self._penalised(self.normed(hidden).flatten(0, 1), recent, sampling, self.rows)
        scores = processed(scores, sampling)
        kept = 1 if sampling.greedy else int((scores > -torch.inf).sum(-1).max())
        if self.size > MANY:
            kept = min(kept, LIKELIEST)
        if kept * 4 > self.size > 4:  # most of them: without a sort
            best, places = scores, torch.arange(self.size, device=self.device).expand_as(scores)
        else:
            best, places = scores.topk(kept)
        return best.softmax(-1).unflatten(0, hidden.shape[:2]), places.unflatten(0, hidden.shape[:2])

    def among(self, places: Int[Tensor, "b r K"]) -> tuple[Tensor, Int[Tensor, "b r K"]]:
        """Of many tokens, the LM head's rows of those at these places and of some others, and where they are
        among those rows: what a step's loss looks at. Which others, the places say."""
        if self.size <= MANY:
            return self.rows, places
        apart = self.size // OTHERS
        others = torch.arange(int(places.sum()) % apart, self.size, apart, device=self.device)
        chosen = torch.cat([places.flatten(), others]).unique()
        found = torch.zeros(self.size, dtype=torch.long, device=self.device)
        found[chosen] = torch.arange(len(chosen), device=self.device)
        return self.rows[chosen], found[places]

    def of_text(self, tokens: Int[Tensor, "b r"]) -> Targets:
        """The text's own tokens as targets; those outside the subset have no share."""
        places = self.place[tokens][..., None]
        return (places < self.size).float(), places.clamp_max(self.size - 1)

    def scores(
        self, normed: Float[Tensor, "m D"], recent: Recent, sampling: SamplingParams, rows: Tensor
    ) -> Float[Tensor, "m S"]:
        """A student's log-scores, from states as these rows read them: penalised, over temperature."""
        scores = self._penalised(normed, recent, sampling, rows)
        plain = sampling.greedy or sampling.temperature == 1
        return scores if plain else scores / sampling.temperature

    def _penalised(self, normed: Tensor, recent: Recent, sampling: SamplingParams, rows: Tensor) -> Tensor:
        logits = nn.functional.linear(normed.to(self.dtype), rows)
        logits = shaped_logits(logits, self.config).float()
        if recent is not None:
            logits = penalty(logits, recent.flatten(0, 1), sampling.repetition_penalty)
        return logits[:, : self.size]


class Student(nn.Module):
    """What is distilled: a drafter that can be trained.

    Attributes:
        levels: tokens that it drafts, one after the other.
        ahead: how far its first draft lies beyond the base model's own next token.
    """

    levels: int
    ahead: int

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n W"], base: FrozenBase
    ) -> list[Float[Tensor, "r D"]]:
        """For each level the states that the base's LM head reads, of the first m positions (r = b · m).

        From position t, level i drafts token t + 1 + ahead + i.

        Args:
            tokens: of those positions and after; -1 pads.
            states: the base's, n = m + :attr:`extra`.
        """
        raise NotImplementedError

    @property
    def extra(self) -> int:
        """Positions behind the last one whose states are targets."""
        return self.ahead + self.levels - 1


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
        self.student, self.base, self.text = student, base, targets == "text"
        self.sampling = SamplingParams(**NEUTRAL) if self.text else sampling

    def forward(
        self,
        tokens: Int[Tensor, "b L"],
        states: Float[Tensor, "b n W"],
        valid: Bool[Tensor, "b m"],
    ) -> dict[str, Tensor]:
        """Sum over the levels of the mean cross-entropy, nats a token.

        Arguments as `states.Windows` makes them; its ``extra`` is the student's.
        """
        base, sampling, ahead = self.base, self.sampling, self.student.ahead
        hidden = states[..., -base.width :]  # before the final norm
        m, n = valid.shape[1], hidden.shape[1]
        context = tokens.shape[1] - n - 1
        recent = base.recent(tokens, context + ahead, n - ahead, sampling.window)
        if self.text:
            shares, places = base.of_text(tokens[:, context + ahead + 1 :])
        else:
            shares, places = base.teacher(hidden[:, ahead:], recent, sampling)
        head = base.rows
        if recent is None and not self.text:
            head, places = base.among(places)
        losses = []
        for i, normed in enumerate(self.student(tokens[:, context:], states, base)):
            seen = None if recent is None else recent[:, i : i + m]
            scores = base.scores(normed, seen, sampling, head)
            share, place = (rows[:, i : i + m].flatten(0, 1) for rows in (shares, places))
            rows = scores.logsumexp(-1) * share.sum(-1) - (share * scores.gather(-1, place)).sum(-1)
            known = valid.flatten() & (share.sum(-1) > 0)
            losses.append((rows * known).sum() / known.sum().clamp_min(1))
        return {"loss": torch.stack(losses).sum(), "losses": torch.stack(losses).detach()}
