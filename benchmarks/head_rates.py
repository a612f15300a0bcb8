"""How well heads draft: accuracy, coupled match rate, and accepted tokens by source.

- *top-1, top-3*: the text's next token is among the head's likeliest (no processing).
- *match, match-3*: the head's candidates under the target's own noise hold the token that the target
  chooses with that noise, both distributions processed as in decoding. What acceptance is made of.
- *chain*: so do the first candidates of all depths up to this one.
Each head is given the text's true tokens before the one it predicts, in a chain as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.sampling.choice import recent_scores
from tokenswift.sampling.noise import Noise
from tokenswift.spec.heads.modules import Heads
from tokenswift.train.heads import HeadsStudent
from tokenswift.train.loss import FrozenBase, Student
from tokenswift.train.states import Backbone, continuations

Tell = Callable[[int, int], object]  #: how much is done, and how much there is
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

    model: Any = backbone.model
    base = FrozenBase(model, torch.zeros(1, dtype=torch.long))

    def logits(i: int, rows: Tensor) -> Tensor:
        return model.lm_head(rows.to(model.dtype)).float()

    def read(tokens: Tensor, hidden: Tensor) -> Tensor:
        return hidden

    student = HeadsStudent(heads)
    return rates_of(backbone, student, base, read, logits, texts, sampling, learn, positions, tell)


def rates_of(
    backbone: Backbone,
    student: Student,
    base: FrozenBase,
    read: Callable[[Tensor, Tensor], Tensor],
    logits: Callable[[int, Tensor], Tensor],
    texts: list[list[int]],
    sampling: SamplingParams,
    learn: int,
    positions: int,
    tell: Tell,
) -> list[dict[str, float]]:
    """:func:`head_rates` of the levels of any student.

    Args:
        base: whose embeddings it reads.
        read: what it reads of a text, (n, …), of the text and its hidden states.
        logits: (m, V) of a level, counted from 0, from rows that the student made.
    """
    model, count, extra = backbone.model, student.levels, student.extra
    noise = Noise(sampling.seed, model.get_input_embeddings().weight.shape[0], model.device)
    sums, chain = torch.zeros(count, len(MEASURES), dtype=torch.float32), torch.ones((), dtype=torch.float32)
    seen = 0
    ends = [len(text) - 1 - count for text in texts]
    places = [range(learn, end, max(1, (end - learn) * len(texts) // positions)) for end in ends]
    total = sum(map(len, places))
    for text, here in zip(texts, places, strict=True):
        tokens = torch.tensor(text, device=model.device)
        hidden = backbone.hidden(tokens[None])[0]
        padded = F.pad(tokens, (0, extra + 1), value=-1)[None]
        made = student(padded, F.pad(read(tokens, hidden), (0, 0, 0, extra))[None], base)
        for t in here:
            for i, rows in enumerate(made):
                said = logits(i, rows[t : t + 1])
                found = _measure(backbone, said, tokens, hidden, t + 1 + i, sampling, noise)
                chain = found[MATCH] * chain if i else found[MATCH]
                sums[i] += torch.stack((*found, chain))
            seen += 1
            tell(seen, total)
    rates = (sums / max(seen, 1)).tolist()
    return [dict(zip(MEASURES, row, strict=True)) | {"positions": float(seen)} for row in rates]


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
