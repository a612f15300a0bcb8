"""Logit processing and the choice rule: the argmax of processed scores plus noise keyed by position.

The order is: logit biases, contextual penalty, presence and frequency penalties, DRY, tokens that may not
come (`sampling.penalties` has all of these but the second), temperature, top-k, top-p, min-p, eta.

The processors work on (n, V) float32 rows and equal transformers' processors of the same names, in
transformers' order (penalty, temperature, top-k, top-p, min-p, eta), except for exact ties: each
filter here is a threshold on the score, so tokens tied at the cut are all kept, whatever the sort
order. Filtered tokens get -inf. A row's largest score always survives.

The penalty is the paper's contextual one (section 3.4): it looks at the last W tokens of a row's own
context, and that window slides along a drafted path exactly as in autoregressive decoding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.sampling.masks import Masks
from tokenswift.sampling.noise import Noise
from tokenswift.sampling.penalties import NO_RULES, Adjustments, TextRules
from tokenswift.sampling.ranking import LogitRows, Ranked, Ranker, window_ids
from tokenswift.types import Logprob, RunError, check_tokens

_TOGETHER = 16  # rows that an accelerator processes at a time


class RefusedRow(RunError):
    """No token can be chosen from a row of logits; its arguments are the position and what the row holds."""

    def __str__(self) -> str:
        position, found = self.args
        return (
            f"the model's logits for position {position} hold {found}; no token can be chosen "
            "(try dtype float32)"
        )


def repetition_penalty(
    logits: Float[Tensor, "n V"], ids: Int[Tensor, "n w"], theta: float
) -> Float[Tensor, "n V"]:
    """Positive logits of the given tokens ÷ θ, negative ones × θ; repeated ids count once.

    Args:
        ids: token ids to penalise, a row for each row of logits; repeat an id to pad.
    """
    values = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(values < 0, values * theta, values / theta))


def _keep(scores: Float[Tensor, "n V"], threshold: Float[Tensor, "n 1"]) -> Float[Tensor, "n V"]:
    """Scores with everything below the row's threshold set to -inf (NaN stays NaN)."""
    # where() on two tensors is vectorised on the CPU, masked_fill() with a scalar is not (10 times slower)
    return torch.where(scores < threshold, scores.new_full((), -math.inf), scores)


def top_k(scores: Float[Tensor, "n V"], k: int) -> Float[Tensor, "n V"]:
    """Keep the k largest scores of each row and whatever ties with the k-th."""
    if k >= scores.shape[-1]:
        return scores
    return _keep(scores, scores.topk(k, dim=-1).values[:, -1:])


def top_p(scores: Float[Tensor, "n V"], p: float) -> Float[Tensor, "n V"]:
    """Keep each row's smallest set of most likely tokens whose probability reaches p (and ties).

    A token stays when the tokens before it hold less than p.
    """
    best = scores.sort(dim=-1, descending=True).values
    peak = best[:, :1]
    total = (scores - peak).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    mass = (best - peak).to(torch.float64).exp_() / total
    before = mass.cumsum(-1) - mass
    last = (before < p).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return _keep(scores, best.gather(1, last))


def min_p(scores: Float[Tensor, "n V"], p: float) -> Float[Tensor, "n V"]:
    """Keep tokens at least p times as likely as the row's best one."""
    return _keep(scores, scores.amax(-1, keepdim=True) + math.log(p))


def eta(scores: Float[Tensor, "n V"], epsilon: float) -> Float[Tensor, "n V"]:
    """Keep tokens whose probability is at least min(ε, √ε · exp(-entropy)) (Hewitt et al. 2022)."""
    total = scores.logsumexp(-1, keepdim=True)
    entropy = torch.special.entr((scores - total).exp()).sum(-1, keepdim=True)
    cut = torch.clamp(0.5 * math.log(epsilon) - entropy, max=math.log(epsilon))
    return _keep(scores, torch.minimum(scores.amax(-1, keepdim=True), total + cut))


def processed(scores: Float[Tensor, "n V"], params: SamplingParams) -> Float[Tensor, "n V"]:
    """Penalised logits → log-scores up to a constant: temperature, then every filter in its order.

    With ``greedy`` they stay as they are. Decoding, the text that a model writes for training, and the
    teacher distribution all come through here.
    """
    p = params
    if p.greedy:
        return scores
    if p.temperature != 1:
        scores = scores / p.temperature
    if p.top_k:
        scores = top_k(scores, p.top_k)
    if p.top_p < 1:
        scores = top_p(scores, p.top_p)
    if p.min_p:
        scores = min_p(scores, p.min_p)
    if p.eta_cutoff:
        scores = eta(scores, p.eta_cutoff)
    return scores


class Sampler:
    """The target's choice rule.

    For one seed the choice at a position depends on the logits and the context alone, not on when,
    in which batch or by which strategy it is asked for.

    Args:
        params: processors, seed, and whether to decode greedily.
        vocab_size: V.
        device: where the logits are.
        ranker: does the work of :meth:`candidates` where there is one; torch otherwise.
        walks: whether choosing row by row costs nothing extra, as on a CPU.
        rules: what `sampling.penalties` has to know of the text.

    Attributes:
        masks: of the grammar that the text has to follow.
    """

    masks: Masks | None = None

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        device: torch.device | str = "cpu",
        ranker: Ranker | None = None,
        walks: bool = True,
        rules: TextRules = NO_RULES,
    ) -> None:
        self.params = params
        self.walks = walks
        self.ranker = ranker
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.noise = Noise(params.seed, vocab_size, self.device)
        self._adjust = Adjustments(params, rules, vocab_size, self.device)

    def scores(
        self,
        logits: Float[Tensor, "n V"],
        history: list[int],
        paths: list[list[int]],
        positions: list[int] | None = None,
    ) -> Float[Tensor, "n V"]:
        """Processed log-scores of each row up to a constant, float32; -inf where filtered out.

        With ``greedy`` they are the penalised and adjusted logits (no temperature, no filter).

        Args:
            positions: the position that each row predicts; by default the one after its context.
        """
        if self.masks is not None:
            masks = self.masks.of(history, paths, positions)
            logits = LogitRows(logits, history, paths, [], [], coupled=False, masks=masks).masked()
        return self._processed(logits, history, paths, positions)

    def _processed(
        self, logits: Tensor, history: list[int], paths: list[list[int]], positions: list[int] | None
    ) -> Tensor:
        scores = self._penalised(self._adjust.biased(logits.to(torch.float32)), history, paths, positions)
        scores = self._adjust.adjusted(scores, history, paths, positions)
        if self.walks or self.params.greedy:
            return processed(scores, self.params)
        # a device may add up a row in another order where there are more rows, so there are always as many
        more = scores[-1:].expand(-len(scores) % _TOGETHER, -1)
        parts = [processed(part, self.params) for part in torch.cat((scores, more)).split(_TOGETHER)]
        return torch.cat(parts)[: len(scores)]

    def _penalised(
        self, logits: Tensor, history: list[int], paths: list[list[int]], positions: list[int] | None
    ) -> Tensor:
        window = self.params.window
        if not window:
            return logits
        for tokens in (history[-window:], *paths):
            check_tokens(tokens, self.vocab_size)
        gaps = [0] * len(paths)
        if positions is not None:
            gaps = [at - len(history) - len(path) for at, path in zip(positions, paths, strict=True)]
        ids, empty = window_ids(history, paths, gaps, window, self.device)
        if ids is None:
            return logits
        scores = repetition_penalty(logits, ids, self.params.repetition_penalty)
        if any(empty):
            scores = torch.where(torch.tensor(empty, device=self.device)[:, None], logits, scores)
        return scores

    def perturbed(
        self, logits: Float[Tensor, "n V"], history: list[int], paths: list[list[int]]
    ) -> Float[Tensor, "n V"]:
        """Processed scores plus the noise at each row's position; the choice is the argmax."""
        scores = self.scores(logits, history, paths)
        if self.params.greedy:
            return scores
        return scores + self._noise([len(history) + len(path) for path in paths])

    def _noise(self, positions: list[int]) -> Float[Tensor, "n V"]:
        """The noise of each row's position; the rows of one position share it."""
        if len(set(positions)) == 1:
            return self.noise.at(positions[0])[None]
        return torch.stack([self.noise.at(position) for position in positions])

    def choose(self, logits: Float[Tensor, "n V"], history: list[int], paths: list[list[int]]) -> list[int]:
        """The token that follows each row's context ``history + path``.

        Raises:
            RefusedRow: the logits hold NaN or an infinite maximum.
        """
        positions = [len(history) + len(path) for path in paths]
        rows = LogitRows(logits, history, paths, positions, [1] * len(paths), coupled=True, shares=False)
        return [ranked.tokens[0] for ranked in self.candidates(rows)]

    def logprobs(
        self,
        logits: Float[Tensor, "n V"],
        history: list[int],
        paths: list[list[int]],
        tokens: list[int],
        top: int,
    ) -> tuple[Logprob, ...]:
        """How likely each row's token is after ``history + path``, and the ``top`` likeliest ones there."""
        known = self.scores(logits, history, paths).to(torch.float32).log_softmax(-1)
        own = known.gather(1, torch.tensor(tokens, device=known.device)[:, None])
        above = (known > own).sum(-1).tolist()
        values, ids = (best.tolist() for best in known.topk(min(top, known.shape[-1]), dim=-1))
        return tuple(
            Logprob(value, tuple((t, v) for t, v in zip(*best, strict=True) if v > -math.inf), 1 + better)
            for value, better, *best in zip(own.squeeze(1).tolist(), above, ids, values, strict=True)
        )

    def candidates(self, rows: LogitRows) -> list[Ranked]:
        """The best candidates of each row, best first, filtered tokens left out.

        Raises:
            RefusedRow: the logits hold NaN or an infinite maximum.
        """
        if self.masks is not None:
            rows = replace(rows, masks=self.masks.of(rows.history, rows.paths, rows.positions))
        if self.ranker is not None:
            found = self.ranker.rank(replace(rows, logits=self._adjust.on_host(rows)))
            if isinstance(found, int):
                raise _refused(rows.masked()[found], rows.positions[found])
            return found
        logits = rows.masked() if rows.subset is None else rows.subset.spread(rows.masked())
        scores = self._processed(logits, rows.history, rows.paths, rows.positions)
        coupled = rows.coupled and not self.params.greedy
        distribution = scores.softmax(-1) if rows.shares else scores
        if coupled:
            scores = scores + self._noise(rows.positions)
        most = min(max(rows.widths), scores.shape[-1])
        if most == 1:
            values, tokens = scores.max(-1, keepdim=True)
        else:
            values, tokens = scores.topk(most, dim=-1)
        # the one place at which a step waits for a device: float64 holds all three
        parts = torch.stack([tokens.double(), values.double(), distribution.gather(1, tokens).double()])
        ranked = []
        for i, (places, row, share, width) in enumerate(zip(*parts.tolist(), rows.widths, strict=True)):
            ids = [int(place) for place in places]
            if not math.isfinite(row[0]):
                raise _refused(scores[i], rows.positions[i])
            kept = sum(value > -math.inf for value in row[:width])
            ranked.append(Ranked(ids[:kept], row[:kept], share[:kept] if rows.shares else []))
        return ranked


def finite_or_raise(best: Float[Tensor, " m"], scores: Float[Tensor, "m V"], position: int) -> None:
    """Refuse scores of a position whose best values are not all finite.

    NaN wins every maximum of torch, so NaN anywhere in a row shows up in its best value.
    """
    if not all(map(math.isfinite, best.tolist())):
        raise _refused(scores, position)


def _refused(scores: Tensor, position: int) -> RefusedRow:
    return RefusedRow(position, "NaN" if bool(scores.isnan().any()) else "no finite maximum")
