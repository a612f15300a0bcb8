"""The choice rule on a device: a ranking is one table that goes there and one that comes back.

What `sampling.choice.Sampler` does in torch, in tensors of few shapes, so that the work can be recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.config import SamplingParams
from tokenswift.kernels.base import Replays
from tokenswift.kernels.cuda.plan import RECORDED, power
from tokenswift.kv.pages import to_device
from tokenswift.sampling.choice import processed, repetition_penalty
from tokenswift.sampling.noise import gumbel_rows, signed_key
from tokenswift.sampling.ranking import Asked, LogitRows, Ranked, filled

TOGETHER = RECORDED[0]  # rows whose sums are made at once

Fetch = Callable[[Tensor], list[Any]]


class _Form(NamedTuple):
    """Sizes of a ranking: rows, positions that differ, tokens of the penalty's window, tokens after the text,
    the vocabulary, and candidates."""

    rows: int
    keys: int
    window: int
    added: int
    vocab_size: int
    width: int

    @property
    def sizes(self) -> list[int]:
        """Of the parts of the table: keys, key of each row, dropped tokens of each, whether its window is
        empty, the text's tail, and the tokens after it."""
        return [self.keys, self.rows, self.rows, self.rows, self.window, self.rows * self.added]


class DeviceRanker:
    """Implements ``sampling.ranking.LaterRanker``.

    Args:
        params: processors and seed.
        replays: records the work; None: it is done every time.
        device: where logits are.
        fetch: brings a tensor's numbers here.
    """

    def __init__(
        self, params: SamplingParams, replays: Replays | None, device: torch.device, fetch: Fetch
    ) -> None:
        self.params, self._replays, self._device, self._fetch = params, replays, device, fetch
        self._unseeded = replace(params, seed=0, grammar=None)  # seed and masks are in what is given

    def rank(self, rows: LogitRows) -> list[Ranked] | int:
        """See ``sampling.ranking.Ranker.rank``."""
        found = self.answer([self.ask(rows)])[0]
        ranked = [one for one in found if one is not None]
        return ranked if len(ranked) == len(found) else found.index(None)

    @torch.inference_mode()
    def ask(self, rows: LogitRows, later: Int[Tensor, " m"] | None = None) -> Asked:
        """See ``sampling.ranking.LaterRanker.ask``."""
        subset, (count, columns) = rows.subset, rows.logits.shape
        size = next((size for size in RECORDED if size >= count), -(-count // TOGETHER) * TOGETHER)
        vocab_size = columns if subset is None else subset.vocab_size
        form, numbers = self._table(rows, size, vocab_size, 0 if later is None else len(later))
        coupled, shares, params = rows.coupled and not self.params.greedy, rows.shares, self._unseeded
        logits = F.pad(rows.masked().float(), (0, 0, 0, size - count))
        table = to_device(numbers, self._device)
        if later is not None and form.window:
            after = table[sum(form.sizes[:-1]) :]
            after.copy_(filled(after, later))
        given = [logits, table]
        if subset is not None:
            given.append(subset.ids)

        def work(logits: Tensor, numbers: Tensor, *ids: Tensor) -> Tensor:
            return _ranked(logits, numbers, ids, form, params, coupled, shares)

        if self._replays is not None and size in RECORDED:
            made = self._replays.run((params, form, coupled, shares), work, *given)
        else:
            made = work(*given)
        return Asked(rows, made[:count], made[:count, : max(rows.widths), 0].long())

    def answer(self, asked: Sequence[Asked]) -> list[list[Ranked | None]]:
        """See ``sampling.ranking.LaterRanker.answer``."""
        widest = max(one.made.shape[1] for one in asked)
        parts = [F.pad(one.made, (0, 0, 0, widest - one.made.shape[1])) for one in asked]
        found = iter(self._fetch(torch.cat(parts)))
        return [_read(one.rows, [next(found) for _ in one.rows.paths]) for one in asked]

    def _table(self, rows: LogitRows, size: int, vocab_size: int, later: int) -> tuple[_Form, list[int]]:
        """What the work has to know of the rows' places and contexts, so many tokens of which come later."""
        window, deepest = self.params.window, max(map(len, rows.paths))
        added = power(deepest) + 1 if deepest else 1
        tail = rows.history[-window:] if window else []
        if window:
            for tokens in (tail, *rows.paths):
                check_tokens([token for token in tokens if not -later <= token < 0], vocab_size)
        drops: list[int] = []
        empty: list[int] = []
        extras: list[int] = []
        for path, position in zip(rows.paths, rows.positions, strict=True):
            # of the window: unknown tokens before the position, and older ones than the text has
            over = window - len(tail) + max(0, len(tail) + position - len(rows.history) - window)
            extra = path[max(0, over - window) :] if window else []
            filler = extra[-1] if extra else tail[-1] if tail else 0
            extras += extra + [filler] * (added - len(extra))
            drops.append(min(over, window))
            empty.append(int(not extra and over >= window))
        keys = {position: place for place, position in enumerate(dict.fromkeys(rows.positions))}
        more = [0] * (size - len(rows.paths))
        form = _Form(size, power(len(keys)), window, added, vocab_size, power(max(rows.widths)))
        signed = [signed_key(self.params.seed, position) for position in keys]
        signed += [0] * (form.keys - len(keys))
        which = [keys[position] for position in rows.positions]
        numbers = [*signed, *which, *more, *drops, *more, *empty, *more]
        numbers += [0] * (window - len(tail)) + tail + extras + [0] * (len(more) * added)
        return form, numbers


def _read(rows: LogitRows, found: list[list[list[float]]]) -> list[Ranked | None]:
    """Rankings of rows, from the token, value and share of each candidate."""
    ranked: list[Ranked | None] = []
    for best, width in zip(found, rows.widths, strict=True):
        if not math.isfinite(best[0][1]):
            ranked.append(None)
            continue
        kept = [one for one in best[:width] if one[1] > -math.inf]
        tokens, values, shares = (list(part) for part in zip(*kept, strict=True))
        ranked.append(Ranked([int(token) for token in tokens], values, shares if rows.shares else []))
    return ranked


def _ranked(
    logits: Float[Tensor, "n S"],
    numbers: Int[Tensor, " m"],
    ids: tuple[Tensor, ...],
    form: _Form,
    params: SamplingParams,
    coupled: bool,
    shares: bool,
) -> Float[Tensor, "n w 3"]:
    """Token, value and share of each row's best candidates, best first, float64."""
    keys, which, drops, empty, tail, added = numbers.split(form.sizes)
    if ids:
        logits = logits.new_full((form.rows, form.vocab_size), -math.inf).index_copy(1, ids[0], logits)
    scores = logits
    if form.window:
        after = added.view(form.rows, form.added)
        places = torch.arange(form.window, device=logits.device)
        known = torch.where(places < drops[:, None], after[:, -1:], tail)
        scores = repetition_penalty(logits, torch.cat((known, after), 1), params.repetition_penalty)
        scores = torch.where(empty[:, None] > 0, logits, scores)
    # torch may add up a row in another order where there are more rows, so there are always as many
    scores = torch.cat([processed(part, params, at_once=True) for part in scores.split(TOGETHER)])
    parts = torch.cat([part.softmax(-1) for part in scores.split(TOGETHER)]) if shares else scores
    if coupled:
        scores = scores + gumbel_rows(keys, form.vocab_size)[which]
    if form.width == 1:
        values, tokens = scores.max(-1, keepdim=True)
    else:
        values, tokens = scores.topk(min(form.width, form.vocab_size), dim=-1)
    return torch.stack([part.double() for part in (tokens, values, parts.gather(1, tokens))], -1)
