"""A default type of floating-point numbers for one thread; torch's own is the whole process's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
