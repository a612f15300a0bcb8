"""The choice rule in C (cpu_choose.h), as `sampling.sampler.Sampler` has it in torch."""

from __future__ import annotations

import ctypes
import math
from ctypes import byref, c_float, c_int32

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.cpu.structs import address, fields
from tokenswift.sampling.noise import position_key
from tokenswift.sampling.rows import LogitRows, Ranked
from tokenswift.sampling.xtc import excludes


class CRule(ctypes.Structure):
    _fields_ = fields(
        "long size; pointer ids; float temperature; long top_k; double top_p, eta, xtc; float min_p"
    )


class CRow(ctypes.Structure):
    _fields_ = fields("uint64 key; float noise; int width, excludes; pointer mask")


def rule_of(params: SamplingParams) -> CRule:
    """Temperature and filters for the kernels; greedy choices have none."""
    if params.greedy:
        return CRule(temperature=1.0, top_k=0, top_p=1.0, eta=0.0, min_p=-math.inf)
    return CRule(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        eta=params.eta_cutoff,
        xtc=math.log(params.xtc_threshold),
        min_p=math.log(params.min_p) if params.min_p else -math.inf,
    )


class NativeRanker:
    """The choice rule in C (cpu_choose.h), as `sampling.sampler.Sampler` has it in torch.

    Implements ``sampling.rows.Ranker``. Keeps work space between calls, so each generation has
    its own.

    Args:
        library: the compiled kernels.
        params: processors and seed.
    """

    def __init__(self, library: ctypes.CDLL, params: SamplingParams) -> None:
        self._rank = library.ts_rank
        self._best = library.ts_best
        self._work: dict[int, Tensor] = {}  # by the number of logits
        self._params = params
        self._rule = rule_of(params)

    def rank(self, rows: LogitRows) -> list[Ranked] | int:
        """See ``sampling.rows.Ranker.rank``."""
        logits = rows.logits.float().contiguous()
        count, size = logits.shape
        rule = self._rule
        rule.size = size
        if rows.subset is None:
            rule.ids = None
        else:
            rule.ids = address("ids of the subset", rows.subset.ids32, torch.int32, size)
        c_rows = self._rows(rows, count, size)
        most = min(max(rows.widths), size)
        tokens = (c_int32 * (count * most))()
        values = (c_float * (count * most))()
        probabilities = (c_float * (count * most))() if rows.with_probs else None
        lengths = (c_int32 * count)()
        refused_token = self._rank(
            byref(rule),
            address("logits", logits, torch.float32, count, size),
            c_rows,
            count,
            most,
            tokens,
            values,
            probabilities,
            lengths,
            address("work space", self._work_space(size), torch.float32, 4 * size),
        )
        if refused_token >= 0:
            return refused_token
        ranked: list[Ranked] = []
        for row, length in enumerate(lengths):
            best = slice(row * most, row * most + length)
            probs = [] if probabilities is None else probabilities[best]
            ranked.append(Ranked(tokens[best], values[best], probs))
        return ranked

    def _rows(self, rows: LogitRows, count: int, size: int) -> ctypes.Array[CRow]:
        """What C reads of each row beside its logits."""
        c_rows = (CRow * count)()
        noise = 0.0 if self._params.greedy else rows.noise
        for row, position, width in zip(c_rows, rows.positions, rows.widths, strict=True):
            row.key = position_key(self._params.seed, position)
            row.excludes = excludes(self._params, position)
            row.noise = noise
            row.width = width
        token_count = size if rows.subset is None else rows.subset.vocab_size
        for row, mask in zip(c_rows, rows.masks, strict=False):
            if mask is not None:
                row.mask = address("a mask", mask, torch.int32, -(-token_count // 32))
        return c_rows

    def _work_space(self, size: int) -> Tensor:
        if size not in self._work:
            self._work[size] = torch.empty(4 * size, dtype=torch.float32, device="cpu")
        return self._work[size]

    def best(self, logits: Float[Tensor, "n V"], most: int) -> list[tuple[list[int], list[float]]]:
        """See ``sampling.rows.Ranker.best``."""
        logits = logits.float().contiguous()
        count, size = logits.shape
        tokens = (c_int32 * (count * most))()
        values = (c_float * (count * most))()
        logits_address = address("logits", logits, torch.float32, count, size)
        self._best(logits_address, count, size, most, tokens, values)
        rows = [slice(start, start + most) for start in range(0, count * most, most)]
        return [(tokens[row], values[row]) for row in rows]
