"""Small helpers around transformers: it is kept off the user's terminal, and off what runs beside it.

transformers changes the whole process while it makes a model. Torch's default type becomes the model's, so
that buffers without an explicit type, in any thread, have another size than their maker thinks; what
initialises and ties weights is replaced; verbosity, warnings and bars are switched. Here one thread at a time
makes models, and the default type stays as it is: `Typed` stands in for it in that thread. Meanwhile another
``modeling_utils.local_torch_dtype`` is there, under which transformers 5.17 to 5.23 make all models.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from logging import CRITICAL, getLogger
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenswift.types import OnProgress

_one_at_a_time = threading.RLock()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, log lines and Python warnings inside the block. These settings are
    the whole process's, so other threads wait for their turn.

    Loading errors still surface: they are exceptions. The previous settings come back at the end.
    """
    from transformers.utils import logging

    with _one_at_a_time:
        bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        placing = getLogger("accelerate.big_modeling")
        level = placing.level
        placing.setLevel(CRITICAL)
        logging.disable_progress_bar()
        logging.set_verbosity(CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.set_verbosity(verbosity)
            placing.setLevel(level)
            if bars:
                logging.enable_progress_bar()


@contextmanager
def making_models() -> Iterator[None]:
    """:func:`quiet_transformers`, and in this thread models are made without a change to torch's default
    type; other threads' are made as ever."""
    from transformers import modeling_utils

    with quiet_transformers():
        usual, here = modeling_utils.local_torch_dtype, threading.get_ident()

        @contextmanager
        def local_torch_dtype(dtype: Any, model_class_name: str | None = None) -> Iterator[None]:
            ours = threading.get_ident() == here and dtype.is_floating_point
            with Typed(dtype) if ours else usual(dtype, model_class_name):
                yield

        modeling_utils.local_torch_dtype = local_torch_dtype
        try:
            yield
        finally:
            modeling_utils.local_torch_dtype = usual


@contextmanager
def counted_loading(on_progress: OnProgress | None) -> Iterator[None]:
    """Inside the block, transformers' loading of weights is told to ``on_progress`` as stage "load"."""
    from transformers.utils import logging

    if on_progress is None:
        yield
        return
    report = on_progress

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts = args and isinstance(args[0], Sized) and kwargs.get("desc") == "Loading weights"
        return _told(args[0], report) if counts else factory(*args, **kwargs)

    before = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _told(items: Any, on_progress: OnProgress) -> Iterator[Any]:
    on_progress("load", 0, len(items))
    for done, item in enumerate(items, 1):
        yield item
        on_progress("load", done, len(items))


#: functions that say by their name which type they make
_NAMED = (Tensor.float, Tensor.type)


class Typed(TorchFunctionMode):
    """Inside the block, and in this thread alone, tensors are of a type where torch would give them its
    default type: where neither an argument's numbers nor a type that was asked for decide.

    Args:
        dtype: a floating-point type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        usual = torch.get_default_dtype()
        if (
            isinstance(made, Tensor)
            and made.dtype == usual != self.dtype
            and func not in _NAMED
            and not any(map(_decides, _leaves((args, kwargs))))
        ):
            return made.detach().to(self.dtype).requires_grad_(made.requires_grad)
        return made


def _decides(value: Any) -> bool:
    """Whether an argument says of which type a result is."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, torch.dtype | np.ndarray | np.generic)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for each in value:
        yield from _leaves(each)
