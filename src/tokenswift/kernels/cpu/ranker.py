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

OFF = (1.0, 0, 1.0, 0.0, -math.inf)  # temperature and filters


class CRule(ctypes.Structure):
    _fields_ = fields(
        "long size; pointer ids; float temperature; long top_k; double top_p, eta; float min_p"
    )


class CRow(ctypes.Structure):
    _fields_ = fields("uint64 key; float noise; int width; pointer mask")


class NativeRanker:
    """The choice rule in C (cpu_choose.h), as `sampling.sampler.Sampler` has it in torch.

    Implements ``sampling.rows.Ranker``. Keeps work space between calls, so each generation has
    its own.

    Args:
        library: the compiled kernels.
        params: processors and seed.
    """

    def __init__(self, library: ctypes.CDLL, params: SamplingParams) -> None:
        self._rank, self._best, self._work = library.ts_rank, library.ts_best, dict[int, Tensor]()
        self._seed, self._greedy, p = params.seed, params.greedy, params
        least = math.log(p.min_p) if p.min_p else -math.inf
        how = OFF if p.greedy else (p.temperature, p.top_k, p.top_p, p.eta_cutoff, least)
        self._rule = CRule(0, None, *how)

    def rank(self, rows: LogitRows) -> list[Ranked] | int:
        """See ``sampling.rows.Ranker.rank``."""
        rule, subset, logits = self._rule, rows.subset, rows.logits.float().contiguous()
        count, size = logits.shape
        rule.size, rule.ids, tokens = size, None, size
        if subset is not None:
            tokens = subset.vocab_size
            rule.ids = address("ids of the subset", subset.ids32, torch.int32, size)
        asked, noise = (CRow * count)(), 0.0 if self._greedy else rows.noise
        for row, position, width in zip(asked, rows.positions, rows.widths, strict=True):
            row.key, row.noise, row.width = position_key(self._seed, position), noise, width
        for row, mask in zip(asked, rows.masks, strict=False):
            if mask is not None:
                row.mask = address("a mask", mask, torch.int32, -(-tokens // 32))
        most = min(max(rows.widths), size)
        tokens, values = (c_int32 * (count * most))(), (c_float * (count * most))()
        distribution = (c_float * (count * most))() if rows.with_probs else None
        counts = (c_int32 * count)()
        work = self._work.get(size)
        if work is None:
            work = self._work[size] = torch.empty(4 * size, dtype=torch.float32, device="cpu")
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
            address("work space", work, torch.float32, 4 * size),
        )
        if refused >= 0:
            return refused
        best = [
            slice(at, at + n) for at, n in zip(range(0, count * most, most), counts, strict=True)
        ]
        return [Ranked(tokens[n], values[n], distribution[n] if distribution else []) for n in best]

    def best(self, logits: Float[Tensor, "n V"], most: int) -> list[tuple[list[int], list[float]]]:
        """See ``sampling.rows.Ranker.best``."""
        logits = logits.float().contiguous()
        count, size = logits.shape
        tokens, values = (c_int32 * (count * most))(), (c_float * (count * most))()
        self._best(
            address("logits", logits, torch.float32, count, size), count, size, most, tokens, values
        )
        return [
            (tokens[at : at + most], values[at : at + most]) for at in range(0, count * most, most)
        ]
