"""The choice rule in C (cpu_choose.h): what `sampling.choice.Sampler` does in torch, on float32 on a CPU."""

from __future__ import annotations

import ctypes
import math
from array import array
from ctypes import POINTER, byref, c_double, c_float, c_int, c_int32, c_long, c_uint64, c_void_p, pointer

import torch
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.config import SamplingParams
from tokenswift.kernels.cpu.adjust import Adjust, Adjusting
from tokenswift.kernels.cpu.buffers import address
from tokenswift.sampling.adjust import NO_RULES, TextRules
from tokenswift.sampling.noise import position_key
from tokenswift.sampling.ranking import LogitRows, Ranked

_FOREIGN = -2  # a token for which there is no place; -1: all is well


class _Rule(ctypes.Structure):
    _fields_ = [
        ("size", c_long),
        ("ld", c_long),
        ("ids", c_void_p),
        ("place", c_void_p),
        ("tail", c_void_p),
        ("tail_size", c_long),
        ("theta", c_float),
        ("temperature", c_float),
        ("top_k", c_long),
        ("top_p", c_double),
        ("eta", c_double),
        ("min_p", c_float),
        ("greedy", c_int),
        ("tokens", c_long),
        ("adjust", POINTER(Adjust)),
    ]


class _Row(ctypes.Structure):
    _fields_ = [
        ("drop", c_long),
        ("path", c_void_p),
        ("path_size", c_long),
        ("key", c_uint64),
        ("coupled", c_int),
        ("width", c_int),
        ("position", c_long),
        ("mask", c_void_p),
    ]


class NativeRanker:
    """Implements ``sampling.ranking.Ranker``. Keeps work space between calls, so each generation has its own.

    Args:
        library: the compiled kernels (`build.library`).
        params: processors and seed.
        rules: of the text, for what is adjusted by it.
    """

    def __init__(self, library: ctypes.CDLL, params: SamplingParams, rules: TextRules = NO_RULES) -> None:
        self._rank = library.ts_rank
        self._rank.argtypes = [POINTER(_Rule), c_void_p, c_void_p, c_long, c_int, *[c_void_p] * 5]
        self._rank.restype = c_long
        self.params = params
        self._work: dict[int, Tensor] = {}
        p = params
        self._rule = _Rule(
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
        asked, held = (_Row * count)(), []
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
