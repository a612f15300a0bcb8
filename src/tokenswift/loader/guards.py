"""Guards around the loading of a model: memory that suffices, and quiet in transformers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL

import torch

from tokenswift.memory import memory_of
from tokenswift.types import InputError, RunError

_one_at_a_time = threading.RLock()


def check_memory(name: str, needed: int, place: str) -> None:
    """Refuse a model whose weights alone are more than the memory that can be had: the system would
    end the process without a word.

    Args:
        needed: bytes.
        place: from :func:`check_place`.
    Raises:
        InputError: they do not fit.
    """
    memory = memory_of(torch.device(place))
    if memory is not None and needed > memory.free:
        raise InputError(
            f"model {name} needs {needed:,} bytes of memory for its weights, {memory.free:,} "
            "bytes are available; valid: a smaller model, or weights of fewer bits "
            "(dtype bfloat16, weights q4_0)"
        )


@contextmanager
def fitting(name: str, place: object) -> Iterator[None]:
    """Inside the block, memory that runs out is a failure in one line.

    Raises:
        RunError: the model does not fit.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(
            f"model {name} does not fit into the memory of device {place}; valid: a smaller "
            "model; nothing was kept"
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, log lines and Python warnings inside the block. These
    settings are the whole process's, so other threads wait for their turn.

    Loading errors still surface: they are exceptions. The previous settings come back at the end.
    """
    from transformers.utils import logging

    with _one_at_a_time:
        has_bars = logging.is_progress_bar_enabled()
        verbosity = logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity(CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.set_verbosity(verbosity)
            if has_bars:
                logging.enable_progress_bar()
