"""Structures of recurrent layers, as cpu_recurrent.h has them, and the replay of their states."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_long, c_void_p

import torch
from torch import Tensor

from tokenswift.kv.states import Recurrence


class CRecurrence(Structure):
    _fields_ = [
        ("taps", c_long),
        ("channels", c_long),
        ("key_heads", c_long),
        ("value_heads", c_long),
        ("key_width", c_long),
        ("value_width", c_long),
        ("tiled", c_long),
    ]


class CGates(Structure):
    """A weight, as `structs.CWeight`."""

    _fields_ = [("parts", c_void_p), ("bias", c_void_p)]


class CRecurrent(Structure):
    _fields_ = [
        ("gates", CGates),
        ("taps", c_void_p),
        ("rate", c_void_p),
        ("shift", c_void_p),
        ("norm", c_void_p),
    ]


#: what the kernels' loops over a head's columns take
COLUMNS = 16
#: greatest sizes, which go by the stack of a thread
MOST_TAPS = 64
MOST_CHANNELS = 1 << 17
MOST_HEAD_WIDTH = 1 << 12


def recurrence_of(recurrence: Recurrence | None) -> CRecurrence:
    """Sizes for the kernels; of None, those of a model without recurrent layers.

    Raises:
        ValueError: sizes that the kernels do not run.
    """
    if recurrence is None:
        return CRecurrence()
    heads = recurrence.value_heads
    grouped = not heads or (recurrence.key_heads > 0 and heads % recurrence.key_heads == 0)
    taps = recurrence.taps
    width = recurrence.value_width
    if (
        not grouped
        or width % COLUMNS
        or max(width, recurrence.key_width) > MOST_HEAD_WIDTH
        or not 2 <= taps <= MOST_TAPS
        or not 1 <= recurrence.channels <= MOST_CHANNELS
    ):
        raise ValueError(
            f"recurrent layers are {recurrence}; valid: 2 to {MOST_TAPS} taps of up to "
            f"{MOST_CHANNELS:,} channels, heads of values a multiple of those of keys, of a "
            f"multiple of {COLUMNS} numbers, and all heads of up to {MOST_HEAD_WIDTH:,}"
        )
    return CRecurrence(
        taps=taps,
        channels=recurrence.channels,
        key_heads=recurrence.key_heads,
        value_heads=heads,
        key_width=recurrence.key_width,
        value_width=width,
        tiled=recurrence.tiled,
    )


class CReplay:
    """Moves states along rows of a log, by the kernels.

    Args:
        library: the kernels.
        threads: of a replay; None: as many as torch uses.
    """

    def __init__(self, library: ctypes.CDLL, threads: int | None) -> None:
        self._library = library
        self._threads = threads

    def __call__(
        self, recurrence: Recurrence, states: Tensor, log: Tensor, nodes: Sequence[int]
    ) -> None:
        """See `kv.states.Replay`.

        Raises:
            ValueError: tensors of other shapes or types than the kernels read, or a node without a
                row.
        """
        layers, rows = log.shape[:2]
        valid = (
            states.shape == (layers, recurrence.state)
            and log.shape == (layers, rows, recurrence.logged)
            and all(0 <= node < rows for node in nodes)
            and all(
                tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in (states, log)
            )
        )
        if not valid:
            raise ValueError(
                f"states are {tuple(states.shape)} and a log {tuple(log.shape)}, moved along "
                f"{tuple(nodes)}; valid: float32, contiguous, and rows of the log"
            )
        numbers = torch.tensor(nodes, dtype=torch.int64)
        self._library.ts_replay(
            ctypes.byref(recurrence_of(recurrence)),
            states.data_ptr(),
            log.data_ptr(),
            numbers.data_ptr(),
            layers,
            rows,
            len(nodes),
            self._threads or torch.get_num_threads(),
        )
