"""The choice rule: process a row of logits, add Gumbel noise keyed by position, take the argmax.

*Processing*, in this order: logit biases, contextual penalty, presence and frequency penalties,
DRY, forbidden tokens (all but the second are in `sampling.penalties`), temperature, top-k, top-p,
min-p, eta. Rows are (n, V) float32. The processors equal transformers' of the same names, in its
order, except for exact ties: each filter is a threshold on the score, so tokens tied at the cut are
all kept. Filtered tokens get -inf; a row's largest score always survives. The penalty is the
paper's contextual one (section 3.4): it covers the last W tokens of a row's own context, a window
that slides along a drafted path exactly as in autoregressive decoding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling.filters import processed, repetition_penalty
from tokenswift.sampling.masks import Masks
from tokenswift.sampling.noise import Noise
from tokenswift.sampling.penalties import NO_RULES, Adjustments, Places, TextRules
from tokenswift.sampling.rows import LogitRows, Ranked, Ranker
from tokenswift.types import Logprob, RunError

_TOGETHER = 16  # rows that are processed at a time on an accelerator


class RefusedRow(RunError):
    """A row of logits that no token can be chosen from; its arguments are the position and what is
    wrong."""

    def __str__(self) -> str:
        position, found = self.args
        return (
            f"the model's logits for position {position} hold {found}; no token can be chosen "
            "(try dtype float32)"
        )


class Sampler:
    """The target's choice rule.

    For one seed, the choice at a position depends on the logits and the context alone, not on when,
    in which batch or by which strategy it is made.

    Args:
        params: processors, seed, and whether to decode greedily.
        vocab_size: V.
        device: where the logits are.
        ranker: compiled code that does the work of :meth:`candidates`; None: torch does.
        row_by_row: whether choosing row by row costs no more than all rows at once, as on a CPU.
        rules: what `sampling.penalties` needs to know about the sequence.

    Attributes:
        masks: the grammar that the text must follow; None: none.
    """

    masks: Masks | None = None

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        device: torch.device | str = "cpu",
        ranker: Ranker | None = None,
        row_by_row: bool = True,
        rules: TextRules = NO_RULES,
    ) -> None:
        self.params = params
        self.row_by_row = row_by_row
        self.ranker = ranker
        self.device = torch.device(device)
        self.noise = Noise(params.seed, vocab_size, self.device)
        self._adjust = Adjustments(params, rules, vocab_size, self.device)

    def choose(
        self, logits: Float[Tensor, "n V"], history: list[int], paths: list[list[int]]
    ) -> list[int]:
        """The target's token after each row's context ``history + path``.

        Raises:
            RefusedRow: the logits hold NaN or an infinite maximum.
        """
        positions = [len(history) + len(path) for path in paths]
        rows = LogitRows(
            logits, history, paths, positions, [1] * len(paths), noise=1.0, with_probs=False
        )
        return [ranked.tokens[0] for ranked in self.candidates(rows)]

    def candidates(self, rows: LogitRows) -> list[Ranked]:
        """The best candidates of each row, best first, without filtered tokens.

        Raises:
            RefusedRow: the logits hold NaN or an infinite maximum.
        """
        if self.masks is not None:
            rows = replace(rows, masks=self.masks.of(rows.history, rows.paths, rows.positions))
        return (
            self._rank_in_torch(rows)
            if self.ranker is None
            else self._rank_compiled(self.ranker, rows)
        )

    def _rank_compiled(self, ranker: Ranker, rows: LogitRows) -> list[Ranked]:
        columns = None if rows.subset is None else rows.subset.columns.numpy()
        places = rows.history, rows.paths, rows.positions
        found = ranker.rank(
            replace(rows, logits=self._adjust.all_on_host(rows.logits, places, columns))
        )
        if isinstance(found, int):
            raise _refused(rows.masked()[found], rows.positions[found])
        return found

    def _rank_in_torch(self, rows: LogitRows) -> list[Ranked]:
        logits = rows.masked() if rows.subset is None else rows.subset.full_rows(rows.masked())
        scores = self._processed(logits, (rows.history, rows.paths, rows.positions))
        distribution = scores.softmax(-1) if rows.with_probs else scores
        if rows.noise and not self.params.greedy:
            scores = scores + rows.noise * self._noise(rows.positions)
        most = min(max(rows.widths), scores.shape[-1])
        if most == 1:
            best, tokens = scores.max(-1, keepdim=True)
        else:
            best, tokens = scores.topk(most, dim=-1)
        # one copy to the host, the only place where a step waits for the device: float64 holds all
        # three
        parts = torch.stack(
            [tokens.double(), best.double(), distribution.gather(1, tokens).double()]
        )
        ranked = []
        for i, (ids, values, probs, width) in enumerate(
            zip(*parts.tolist(), rows.widths, strict=True)
        ):
            if not math.isfinite(values[0]):
                raise _refused(scores[i], rows.positions[i])
            kept = sum(value > -math.inf for value in values[:width])
            kept_ids = [int(token) for token in ids[:kept]]
            ranked.append(Ranked(kept_ids, values[:kept], probs[:kept] if rows.with_probs else []))
        return ranked

    def best(self, logits: Float[Tensor, "n V"], most: int) -> list[tuple[list[int], list[float]]]:
        """Tokens of each row's largest logits, as they are, the largest first, and these logits."""
        if self.ranker is not None:
            return self.ranker.best(logits, most)
        best = logits.topk(min(most, logits.shape[1]))
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def logprobs(
        self,
        logits: Float[Tensor, "n V"],
        history: list[int],
        paths: list[list[int]],
        tokens: list[int],
        top: int,
    ) -> tuple[Logprob, ...]:
        """Log-probability of each row's token after ``history + path``, and of the ``top``
        likeliest."""
        known = self.scores(logits, history, paths).to(torch.float32).log_softmax(-1)
        own = known.gather(1, torch.tensor(tokens, device=known.device)[:, None])
        above = (known > own).sum(-1).tolist()
        values, ids = (best.tolist() for best in known.topk(min(top, known.shape[-1]), dim=-1))
        return tuple(
            Logprob(
                value,
                tuple((t, v) for t, v in zip(*best, strict=True) if v > -math.inf),
                1 + better,
            )
            for value, better, *best in zip(
                own.squeeze(1).tolist(), above, ids, values, strict=True
            )
        )

    def scores(
        self,
        logits: Float[Tensor, "n V"],
        history: list[int],
        paths: list[list[int]],
        positions: list[int] | None = None,
    ) -> Float[Tensor, "n V"]:
        """Processed log-scores of each row up to a constant, float32; -inf for filtered tokens.

        With ``greedy`` they are the penalised logits (no temperature, no filter).

        Args:
            positions: the position that each row predicts; default: the one after its context.
        """
        if self.masks is not None:
            masks = self.masks.of(history, paths, positions)
            logits = LogitRows(logits, history, paths, [], [], noise=0.0, masks=masks).masked()
        return self._processed(logits, (history, paths, positions))

    def perturbed(
        self, logits: Float[Tensor, "n V"], history: list[int], paths: list[list[int]]
    ) -> Float[Tensor, "n V"]:
        """Processed scores plus the noise of each row's position: the choice is the argmax."""
        scores = self.scores(logits, history, paths)
        if self.params.greedy:
            return scores
        return scores + self._noise([len(history) + len(path) for path in paths])

    def _processed(self, logits: Tensor, places: Places) -> Tensor:
        scores = self._penalised(self._adjust.biased(logits.to(torch.float32)), places)
        scores = self._adjust.adjusted(scores, places)
        if self.row_by_row or self.params.greedy:
            return processed(scores, self.params)
        # a device may sum a row in another order when there are more rows, so their number is
        # always the same
        more = scores[-1:].expand(-len(scores) % _TOGETHER, -1)
        parts = [
            processed(part, self.params) for part in torch.cat((scores, more)).split(_TOGETHER)
        ]
        return torch.cat(parts)[: len(scores)]

    def _penalised(self, logits: Tensor, places: Places) -> Tensor:
        window = self.params.window
        if not window:
            return logits
        rows = [text[max(0, at - window) :].copy() for text, at in self._adjust.contexts(places)]
        widest = max(map(len, rows))
        if not widest:
            return logits
        ids = (
            torch.from_numpy(np.stack([np.resize(row, widest) for row in rows]))
            .long()
            .to(self.device)
        )
        scores = repetition_penalty(logits, ids, self.params.repetition_penalty)
        if all(map(len, rows)):
            return scores
        has_context = torch.tensor([len(row) > 0 for row in rows]).to(ids.device)[:, None]
        return torch.where(has_context, scores, logits)

    def _noise(self, positions: list[int]) -> Float[Tensor, "n V"]:
        """The noise of each row's position."""
        if len(set(positions)) == 1:
            return self.noise.at(positions[0])[None]
        return torch.stack([self.noise.at(position) for position in positions])


def finite_or_raise(best: Float[Tensor, " m"], scores: Float[Tensor, "m V"], position: int) -> None:
    """Raise :class:`RefusedRow` unless the best value of every row is finite.

    NaN wins every maximum of torch, so NaN anywhere in a row shows up there.
    """
    if not all(map(math.isfinite, best.tolist())):
        raise _refused(scores, position)


def _refused(scores: Tensor, position: int) -> RefusedRow:
    return RefusedRow(position, "NaN" if bool(scores.isnan().any()) else "no finite maximum")
