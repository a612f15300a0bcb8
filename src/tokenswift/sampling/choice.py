"""The choice rule: process a row of logits, add Gumbel noise keyed by position, take the argmax.

*Processing*, in this order: logit biases, contextual penalty, presence and frequency penalties,
    DRY,
forbidden tokens (all but the second are in `sampling.penalties`), temperature, top-k, top-p, min-p,
eta. Rows are (n, V) float32. The processors equal transformers' of the same names, in its order,
except for exact ties: each filter is a threshold on the score, so tokens tied at the cut are all
kept. Filtered tokens get -inf; a row's largest score always survives. The penalty is the paper's
contextual one (section 3.4): it covers the last W tokens of a row's own context, a window that
slides along a drafted path exactly as in autoregressive decoding.

*Noise* is the library's only source of randomness: one Gumbel value for each (seed, position,
    token). It is a
pure function of that key, so there is no generator state to store, resume or move between devices,
and every strategy sees the same noise at the same position.

*Integers.* Two rounds of the splitmix64 finalizer (Steele, Lea and Flood 2014; constants of
Stafford's "Mix 13") in wrapping 64-bit arithmetic, one for the key of (seed, position) and one for
the token. They are the same on every device. At one position the map from token to integer is a
bijection, so no two tokens ever share an integer.

*Floats.* The upper 53 bits give w in (0, 1) on the grid (j + 1/2) / 2^53, and the noise is
g = -log(-log1p(-w)) in float64, rounded once to float32. Large noise, which decides the winner,
belongs to small w, where the grid is fine relative to w: among V tokens the winner has w near 1/V,
so 53 bits leave about 2^53 / V values below it (a 24-bit uniform leaves about 100 at V = 150,000).
The logarithms may differ between devices in the last bit of float64; after the rounding to
float32 that is seen about once in 10^8 values.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling.masks import Masks
from tokenswift.sampling.penalties import NO_RULES, Adjustments, Places, TextRules
from tokenswift.types import Logprob, RunError, check_tokens

_TOGETHER = 16  # rows that are processed at a time on an accelerator
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 ÷ golden ratio, odd: token -> token * _GOLDEN is a bijection
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_POSITION = 0xD1342543DE82EF95  # odd, unrelated to _GOLDEN: keeps positions and tokens apart
_MEMO = 64  # positions whose noise is kept


# ---- noise ---------------------------------------------------------------------------------------


def _signed(word: int) -> int:
    """The two's-complement value of a 64-bit word, as torch's int64 holds it."""
    return word - (1 << 64) if word >> 63 else word


def mix64(word: int) -> int:
    """The splitmix64 finalizer on Python integers (a bijection of 64-bit words)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def position_key(seed: int, position: int) -> int:
    """The 64-bit key of a position: the noise of a token comes from ``mix64(key + token *
    _GOLDEN)``."""
    return mix64(mix64(seed + _GOLDEN) + position * _POSITION)


def gumbel(key: int, token: int) -> float:
    """Noise of one token from its position's key, float64; on the host, for a few tokens."""
    w = ((mix64(token * _GOLDEN + key) >> 11) + 0.5) * 2.0**-53
    return -math.log(-math.log1p(-w)) if w < 1 else -math.inf


def _mix_(words: Int[Tensor, " *s"]) -> Int[Tensor, " *s"]:
    """:func:`mix64` on a tensor of int64 words, in place."""
    shifted = torch.empty_like(words)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        torch.bitwise_right_shift(words, shift, out=shifted)
        shifted.bitwise_and_(
            (1 << (64 - shift)) - 1
        )  # torch shifts arithmetically: drop the sign bits
        words.bitwise_xor_(shifted)
        if factor is not None:
            words.mul_(_signed(factor))
    return words


def noise_bits(seed: int, position: int, tokens: Int[Tensor, " *s"]) -> Int[Tensor, " *s"]:
    """The 64 random bits of each (seed, position, token), as int64; the same on every device.

    Args:
        seed: at least 0 (taken modulo 2^64).
        position: absolute position of the token to choose, counted from 0 at the text's start.
        tokens: token ids, int64, any shape.
    """
    words = tokens.mul(_signed(_GOLDEN))
    words.add_(_signed(position_key(seed, position)))
    return _mix_(words)


def uniforms_(bits: Int[Tensor, " *s"]) -> Float[Tensor, " *s"]:
    """float64 uniforms in (0, 1) on the grid (j + 1/2) / 2^53 from the upper bits (overwritten)."""
    bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-53)


def gumbels_(bits: Int[Tensor, " *s"]) -> Float[Tensor, " *s"]:
    """float32 standard Gumbel noise from random bits (overwritten)."""
    # At j = 2^53 - 1 the sum rounds to 2^53, hence w = 1 and noise -inf: one value in 2^53, which a
    # clamp would hide at the price of one more pass; -inf only says that this token does not win.
    w = uniforms_(bits)
    return torch.log1p(w.neg_(), out=w).neg_().log_().neg_().to(torch.float32)


def gumbels_of(seed: int, position: int, tokens: Int[Tensor, " *s"]) -> Float[Tensor, " *s"]:
    """Noise of some tokens at a position, float32."""
    return gumbels_(noise_bits(seed, position, tokens))


class Noise:
    """The noise of one seed over one vocabulary, on one device.

    The vectors of the 64 most recently used positions are kept: drafting asks for a position first,
        and the
    target's choice asks again.

    Args:
        seed: from 0 to 2^63 - 1.
        vocab_size: V.
        device: where the noise is computed and returned.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self._tokens = torch.arange(vocab_size, device=device).mul_(_signed(_GOLDEN))
        self._memo: OrderedDict[int, Tensor] = OrderedDict()

    def at(self, position: int) -> Float[Tensor, " V"]:
        """The Gumbel noise of every token at an absolute position, (V,) float32. Do not modify
        it."""
        vector = self._memo.get(position)
        if vector is not None:
            self._memo.move_to_end(position)
            return vector
        vector = gumbels_(_mix_(self._tokens + _signed(position_key(self.seed, position))))
        self._memo[position] = vector
        if len(self._memo) > _MEMO:
            self._memo.popitem(last=False)
        return vector


# ---- rows of logits ------------------------------------------------------------------------------


class Ranked(NamedTuple):
    """The best candidates of one row, best first.

    Attributes:
        tokens: token ids.
        values: the scores ranked by, noise included.
        probs: their probabilities under the row's processed distribution.
    """

    tokens: list[int]
    values: list[float]
    probs: list[float]


class Subset:
    """Some tokens of the vocabulary, which are the columns of rows of logits (n, S).

    Args:
        ids: token id of each column, (S,), no id twice.
        vocab_size: V.
    Raises:
        InputError: an id that is not below V.
    """

    def __init__(self, ids: Int[Tensor, " S"], vocab_size: int) -> None:
        known = ids.cpu()
        if len(known):
            check_tokens((int(known.min()), int(known.max())), vocab_size)
        self.ids = ids
        self.vocab_size = vocab_size
        self.ids32 = known.to(torch.int32).contiguous()
        self.columns = torch.full(
            (vocab_size,), -1, dtype=torch.int32
        )  # column of each token; -1: none
        self.columns[self.ids32.long()] = torch.arange(len(ids), dtype=torch.int32)

    def full_rows(self, logits: Float[Tensor, "n S"]) -> Float[Tensor, "n V"]:
        """The rows over the whole vocabulary, -inf for all other tokens."""
        rows = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        rows[:, self.ids] = logits
        return rows


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows of logits, each with its context and the position that it predicts; all lists have n
    entries.

    Attributes:
        logits: one row for each position.
        history: tokens that every context begins with.
        paths: each row's further context. Tokens between it and the position are unknown: they take
            up room in the penalty window, and are not penalised.
        positions: positions of the predicted tokens.
        widths: candidates wanted from each row, at most.
        noise: weight of the position's noise in what ranks, beside the processed score: the
            target's choice has 1, and so have drafts that are coupled with it (Daliri et al. 2024),
            or less; 0: none.
        subset: the tokens that the columns stand for; None: the whole vocabulary.
        with_probs: also return the candidates' probabilities.
        masks: for each row the tokens that a grammar allows (see :func:`allowed_tokens`), or None
            for all; empty without a grammar. Other tokens count as -inf, unless the mask leaves
            nothing of a subset.
    """

    logits: Float[Tensor, "n S"]
    history: list[int]
    paths: list[list[int]]
    positions: list[int]
    widths: list[int]
    noise: float
    subset: Subset | None = None
    with_probs: bool = True
    masks: Sequence[Int[Tensor, " w"] | None] = ()

    def masked(self) -> Float[Tensor, "n S"]:
        """The logits, -inf for tokens that the masks do not allow."""
        if not any(mask is not None for mask in self.masks):
            return self.logits
        logits, subset = self.logits, self.subset
        vocab_size = logits.shape[1] if subset is None else subset.vocab_size
        whole = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
        words = torch.stack([whole if mask is None else mask for mask in self.masks])
        allowed = allowed_tokens(words.to(logits.device), vocab_size)
        if subset is not None:
            allowed = allowed[:, subset.ids]
            allowed |= ~allowed.any(-1, keepdim=True)
        return torch.where(allowed, logits, logits.new_full((), -torch.inf))

    def one(self, row: int) -> LogitRows:
        """A single row of them."""
        names = ("logits", "paths", "positions", "widths", "masks")
        return replace(self, **{name: getattr(self, name)[row : row + 1] for name in names})


def allowed_tokens(masks: Int[Tensor, "n w"], vocab_size: int) -> Bool[Tensor, "n V"]:
    """Unpack bit masks: token t is bit t % 32 of word t // 32, w = ⌈V / 32⌉."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (masks[..., None] >> bits & 1).bool().flatten(1)[:, :vocab_size]


class Ranker(Protocol):
    """Temperature, filters, noise and top candidates in one call: compiled in
    `kernels.cpu.backend`."""

    def rank(self, rows: LogitRows) -> list[Ranked] | int:
        """Candidates of each row, or the number of the first row that holds NaN or has no finite
        maximum."""
        ...

    def best(self, logits: Float[Tensor, "n V"], most: int) -> list[tuple[list[int], list[float]]]:
        """See `Sampler.best`; filled up with -inf."""
        ...


# ---- processors and the choice -------------------------------------------------------------------


class RefusedRow(RunError):
    """A row of logits that no token can be chosen from; its arguments are the position and what is
    wrong."""

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
        ids: token ids to penalise in each row; repeat an id to pad.
    """
    values = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(values < 0, values * theta, values / theta))


def _keep(scores: Float[Tensor, "n V"], threshold: Float[Tensor, "n 1"]) -> Float[Tensor, "n V"]:
    """Scores with everything below the row's threshold set to -inf (NaN stays NaN)."""
    # where() on two tensors is vectorised on the CPU, masked_fill() with a scalar is not (10 times
    # slower)
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
    """Penalised logits → log-scores up to a constant: temperature, then the filters in their order.

    With ``greedy`` the logits stay as they are. Training uses this too, for its teacher's
    distribution.
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
