"""The choice rule: process a row of logits, add Gumbel noise keyed by position, take the argmax.

*Processing*, in this order: logit biases, contextual penalty, presence and frequency penalties,
DRY, forbidden tokens (all but the second are in `sampling.penalties`), temperature, top-k, top-p,
min-p, eta, XTC. Rows are (n, V) float32. The processors equal transformers' of the same names, in
its order, except for exact ties: each filter is a threshold on the score, so tokens tied at the cut
are all kept. Filtered tokens get -inf; a row's largest score always survives, except where XTC
(`sampling.xtc`) leaves it out for another one. The penalty is the paper's contextual one (section
3.4): it covers the last W tokens of a row's own context, a window that slides along a drafted path
exactly as in autoregressive decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling.filters import processed, repetition_penalty
from tokenswift.sampling.masks import Masks
from tokenswift.sampling.noise import Noise
from tokenswift.sampling.penalties import Adjustments
from tokenswift.sampling.rows import Contexts, LogitRows, Ranked, Ranker
from tokenswift.sampling.text_rules import NO_RULES, TextRules
from tokenswift.sampling.xtc import exclude_top, excludes
from tokenswift.types import Logprob, RunError

_BATCH = 16  # rows that are processed at a time on an accelerator


class RefusedRow(RunError):
    """A row of logits that no token can be chosen from.

    Args:
        position: the position that the row predicts.
        fault: what is wrong with the row.
    """

    def __init__(self, position: int, fault: str) -> None:
        super().__init__(position, fault)  # what pickle makes it again from
        self.position = position
        self.fault = fault

    def __str__(self) -> str:
        return (
            f"the model's logits for position {self.position} hold {self.fault}; no token can be "
            "chosen (try dtype float32)"
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
        rules: what the adjustments need to know about the sequence.

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
        self.rules = rules
        self.device = torch.device(device)
        self.noise = Noise(params.seed, vocab_size, self.device)
        self._adjustments = Adjustments(params, rules, vocab_size, self.device)

    def choose(
        self, logits: Float[Tensor, "n V"], history: list[int], paths: list[list[int]]
    ) -> list[int]:
        """The target's token after each row's context ``history + path``.

        Raises:
            RefusedRow: the logits hold NaN or an infinite maximum.
        """
        rows = LogitRows(
            logits=logits,
            history=history,
            paths=paths,
            positions=[len(history) + len(path) for path in paths],
            widths=[1] * len(paths),
            noise=1.0,
            with_probs=False,
        )
        return [ranked.tokens[0] for ranked in self.candidates(rows)]

    def candidates(self, rows: LogitRows) -> list[Ranked]:
        """The best candidates of each row, best first, without filtered tokens.

        Raises:
            RefusedRow: the logits hold NaN or an infinite maximum.
        """
        if self.masks is not None:
            rows = replace(rows, masks=self.masks.of(rows.history, rows.paths, rows.positions))
        if self.ranker is None:
            return self._rank_in_torch(rows)
        return self._rank_compiled(self.ranker, rows)

    def _rank_compiled(self, ranker: Ranker, rows: LogitRows) -> list[Ranked]:
        columns = None if rows.subset is None else rows.subset.columns.numpy()
        adjusted = self._adjustments.all_on_host(rows.logits, rows.contexts(), columns)
        ranked = ranker.rank(replace(rows, logits=adjusted))
        if isinstance(ranked, int):  # the number of a row that is refused
            raise _refused(rows.masked()[ranked], rows.positions[ranked])
        return ranked

    def _rank_in_torch(self, rows: LogitRows) -> list[Ranked]:
        logits = rows.masked()
        if rows.subset is not None:
            logits = rows.subset.full_rows(logits)
        scores = self._processed(logits, rows.contexts())
        distribution = scores.softmax(-1) if rows.with_probs else scores
        if rows.noise and not self.params.greedy:
            scores = scores + rows.noise * self._noise(rows.positions)
        most = min(max(rows.widths), scores.shape[-1])
        if most == 1:
            best, tokens = scores.max(-1, keepdim=True)
        else:
            best, tokens = scores.topk(most, dim=-1)
        probs = distribution.gather(1, tokens)
        # one copy to the host, the only place where a step waits for the device: float64 holds all
        # three
        parts = torch.stack([tokens.double(), best.double(), probs.double()])
        all_ids, all_values, all_probs = parts.tolist()
        ranked = []
        for row, width in enumerate(rows.widths):
            if not math.isfinite(all_values[row][0]):
                raise _refused(scores[row], rows.positions[row])
            values = all_values[row][:width]
            count = sum(value > -math.inf for value in values)
            ids = [int(token) for token in all_ids[row][:count]]
            row_probs = all_probs[row][:count] if rows.with_probs else []
            ranked.append(Ranked(ids, values[:count], row_probs))
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
        return logprobs_of(self.scores(logits, history, paths), tokens, top)

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
            rows = LogitRows(
                logits=logits,
                history=history,
                paths=paths,
                positions=[],
                widths=[],
                noise=0.0,
                masks=masks,
            )
            logits = rows.masked()
        return self._processed(logits, Contexts(history, paths, positions))

    def perturbed(
        self, logits: Float[Tensor, "n V"], history: list[int], paths: list[list[int]]
    ) -> Float[Tensor, "n V"]:
        """Processed scores plus the noise of each row's position: the choice is the argmax."""
        scores = self.scores(logits, history, paths)
        if self.params.greedy:
            return scores
        return scores + self._noise([len(history) + len(path) for path in paths])

    def _processed(self, logits: Tensor, contexts: Contexts) -> Tensor:
        biased = self._adjustments.biased(logits.to(torch.float32))
        scores = self._adjustments.adjusted(self._penalised(biased, contexts), contexts)
        if self.params.greedy:
            return scores
        filtered = self._in_batches(lambda rows: processed(rows, self.params), scores)
        return self._without_top(filtered, contexts)

    def _in_batches(self, filtered: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        """The scores that a filter leaves. A device may sum a row in another order when there are
        more rows, so there their number is always the same."""
        if self.row_by_row:
            return filtered(scores)
        padding = scores[-1:].expand(-len(scores) % _BATCH, -1)
        batches = torch.cat((scores, padding)).split(_BATCH)
        return torch.cat([filtered(batch) for batch in batches])[: len(scores)]

    def _without_top(self, scores: Tensor, contexts: Contexts) -> Tensor:
        """Scores without the likeliest tokens, at positions where XTC leaves them out."""
        affected = [excludes(self.params, position) for position in contexts.predicted()]
        if not any(affected):
            return scores
        threshold = self.params.xtc_threshold
        without = self._in_batches(lambda rows: exclude_top(rows, threshold), scores)
        return torch.where(torch.tensor(affected, device=scores.device)[:, None], without, scores)

    def _penalised(self, logits: Tensor, contexts: Contexts) -> Tensor:
        """Logits with the contextual penalty."""
        window = self.params.window
        if not window:
            return logits
        windows = [
            text[max(0, position - window) :].copy()
            for text, position in self._adjustments.each_context(contexts)
        ]
        widest = max(map(len, windows))
        if not widest:
            return logits
        padded = np.stack([np.resize(tokens, widest) for tokens in windows])
        ids = torch.from_numpy(padded).long().to(self.device)
        scores = repetition_penalty(logits, ids, self.params.repetition_penalty)
        if all(map(len, windows)):
            return scores
        has_context = torch.tensor([len(tokens) > 0 for tokens in windows])[:, None].to(ids.device)
        return torch.where(has_context, scores, logits)

    def _noise(self, positions: list[int]) -> Float[Tensor, "n V"]:
        """The noise of each row's position."""
        if len(set(positions)) == 1:
            return self.noise.at(positions[0])[None]
        return torch.stack([self.noise.at(position) for position in positions])


def logprobs_of(scores: Float[Tensor, "n V"], tokens: list[int], top: int) -> tuple[Logprob, ...]:
    """Log-probability of each row's token, and of the ``top`` likeliest.

    Args:
        scores: log-scores up to a constant, -inf for tokens that cannot come.
    """
    logprobs = scores.to(torch.float32).log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])
    better = (logprobs > chosen).sum(-1).tolist()
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    best_tokens = best.indices.tolist()
    best_values = best.values.tolist()
    records: list[Logprob] = []
    for row, value in enumerate(chosen.squeeze(1).tolist()):
        pairs = zip(best_tokens[row], best_values[row], strict=True)
        likeliest = tuple(pair for pair in pairs if pair[1] > -math.inf)
        records.append(Logprob(value, likeliest, 1 + better[row]))
    return tuple(records)


def finite_or_raise(best: Float[Tensor, " m"], scores: Float[Tensor, "m V"], position: int) -> None:
    """Raise :class:`RefusedRow` unless the best value of every row is finite.

    NaN wins every maximum of torch, so NaN anywhere in a row shows up there.
    """
    if not all(map(math.isfinite, best.tolist())):
        raise _refused(scores, position)


def _refused(scores: Tensor, position: int) -> RefusedRow:
    return RefusedRow(position, "NaN" if bool(scores.isnan().any()) else "no finite maximum")
