"""The choice rule in C (cpu_choose.h, cpu_adjust.h): what `sampling.choice.Sampler` does in torch."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int32, pointer

import torch
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.config import SamplingParams
from tokenswift.kernels.cpu.structs import address, fields
from tokenswift.sampling.noise import position_key
from tokenswift.sampling.penalties import NO_RULES, KnownText, TextRules, breaker_marks, dry_penalties
from tokenswift.sampling.ranking import LogitRows, Ranked

_FOREIGN = -2  # a token for which there is no place; -1: all is well


class CAdjust(ctypes.Structure):
    _fields_ = fields(
        "pointer text; long text_size, vocabulary; pointer biased, bias; long biases, start, window; "
        "double presence, frequency; pointer dry; long dry_size, allowed, range; "
        "pointer breakers, words, word_sizes; long word_count; pointer ends; long end_count, least"
    )


class CRule(ctypes.Structure):
    _fields_ = fields(
        "long size, ld; pointer ids, place, tail; long tail_size; float theta, temperature; long top_k; "
        "double top_p, eta; float min_p; int greedy; long tokens; adjust adjust",
        adjust=POINTER(CAdjust),
    )


class CRow(ctypes.Structure):
    _fields_ = fields(
        "long drop; pointer path; long path_size; uint64 key; int coupled, width; long position; pointer mask"
    )


class Adjusting:
    """The adjustments of one text.

    Args:
        params: what is on.
        rules: of the text.
    """

    def __init__(self, params: SamplingParams, rules: TextRules) -> None:
        self._rules, self._known = rules, KnownText()
        self._held: list[Tensor] = []  # what C has addresses of
        biased, bias = zip(*params.biases, strict=True) if params.biases else ((), ())
        words = [token for word in rules.words for token in word]
        dry = dry_penalties(params).tolist()
        self._made = CAdjust(
            biased=self._numbers(biased, torch.int32),
            bias=self._numbers(bias, torch.float32),
            biases=len(biased),
            start=rules.start,
            window=params.penalty_window,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            dry=self._numbers(dry, torch.float32),
            dry_size=len(dry),
            allowed=params.dry_allowed_length,
            range=params.dry_range,
            words=self._numbers(words, torch.int32),
            word_sizes=self._numbers([len(word) for word in rules.words], torch.int32),
            word_count=len(rules.words),
            ends=self._numbers(rules.ends, torch.int32),
            end_count=len(rules.ends),
            least=rules.start + params.min_tokens,
        )

    def _numbers(self, values: Sequence[float], dtype: torch.dtype) -> int:
        self._held.append(torch.tensor(values, dtype=dtype))
        return address("numbers of the sampling", self._held[-1], dtype, len(values))

    def of(self, history: list[int], room: int, vocab_size: int) -> CAdjust:
        """What C goes by for rows of a text.

        Args:
            history: the text.
            room: tokens of the longest path behind it.
            vocab_size: V.
        Raises:
            InputError: a token id that is not below V.
        """
        made = self._made
        if vocab_size != made.vocabulary:
            self._marks = torch.from_numpy(breaker_marks(self._rules, vocab_size))
            made.breakers = address("breakers", self._marks, torch.uint8, vocab_size)
            made.vocabulary = vocab_size
        text = torch.from_numpy(self._known.take(history, room, vocab_size))
        made.text = address("text", text, torch.int32, len(text))
        made.text_size = len(history)
        return made


class NativeRanker:
    """Implements ``sampling.ranking.Ranker``. Keeps work space between calls, so each generation has its own.

    Args:
        library: the compiled kernels (`library.library`).
        params: processors and seed.
        rules: of the text, for what is adjusted by it.
    """

    def __init__(self, library: ctypes.CDLL, params: SamplingParams, rules: TextRules = NO_RULES) -> None:
        self._rank = library.ts_rank
        self.params = params
        self._work: dict[int, Tensor] = {}
        p = params
        self._rule = CRule(
            theta=p.repetition_penalty,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            eta=p.eta_cutoff,
            min_p=math.log(p.min_p) if p.min_p else -math.inf,
            greedy=p.greedy,
        )
        self._adjusting = Adjusting(params, rules) if params.adjusts else None

    def rank(self, rows: LogitRows) -> list[Ranked] | int:
        """See ``sampling.ranking.Ranker.rank``."""
        rule, window, seed = self._rule, self.params.window, self.params.seed
        logits, subset = rows.logits.float().contiguous(), rows.subset
        count, size = logits.shape
        tail = array("i", rows.history[-window:] if window else ())
        rule.size = rule.ld = rule.tokens = size
        rule.ids = rule.place = None
        if subset is not None:
            rule.tokens = subset.vocab_size
            rule.ids = address("ids of the subset", subset.ids32, torch.int32, size)
            rule.place = address("places of the subset", subset.place, torch.int32, subset.vocab_size)
        rule.tail, rule.tail_size = tail.buffer_info()
        follows = window > 0
        if self._adjusting is not None:
            follows, longest = True, max(map(len, rows.paths))
            rule.adjust = pointer(self._adjusting.of(rows.history, longest, rule.tokens))
        known, kept = len(rows.history), len(tail)
        asked, held = (CRow * count)(), []
        for row, path, position, width in zip(asked, rows.paths, rows.positions, rows.widths, strict=True):
            row.drop = max(0, kept + position - known - window)
            if path and follows:
                tokens = array("i", path)
                held.append(tokens)
                row.path, row.path_size = tokens.buffer_info()
            row.key = position_key(seed, position)
            row.coupled, row.width, row.position = rows.coupled, width, position
        for row, mask in zip(asked, rows.masks, strict=False):
            if mask is not None:
                row.mask = address("a mask", mask, torch.int32, -(-rule.tokens // 32))
        most = min(max(rows.widths), size)
        tokens, values = (c_int32 * (count * most))(), (c_float * (count * most))()
        distribution = (c_float * (count * most))() if rows.shares else None
        counts = (c_int32 * count)()
        work = self._work.get(size)
        if work is None:
            work = self._work[size] = torch.zeros(13 * size + 64, dtype=torch.uint8, device="cpu")
        refused = self._rank(
            byref(rule),
            address("logits", logits, torch.float32, count, size),
            asked,
            count,
            most,
            tokens,
            values,
            distribution,
            counts,
            address("work space", work, torch.uint8, 13 * size + 64),
        )
        if refused >= 0:
            return refused
        if refused == _FOREIGN:
            for known_tokens in (tail, *rows.paths):
                check_tokens(known_tokens, rule.tokens)
            raise ValueError(f"places of the subset are not columns; valid: -1 to {size - 1}")
        ranked = []
        for at, n in zip(range(0, count * most, most), counts, strict=True):
            best = slice(at, at + n)
            shares = [] if distribution is None else distribution[best]
            ranked.append(Ranked(tokens[best], values[best], shares))
        return ranked
