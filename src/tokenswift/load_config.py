"""How a model is loaded: the arguments of `LLM`, checked once and passed whole. See `config`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tokenswift.checks import check_choice, check_integer, named_errors, shown
from tokenswift.config import check_threads
from tokenswift.types import InputError
from tokenswift.words import Activations, Backend, CudaGraphs, Device, Dtype, KvCacheDtype, Weights, words

if TYPE_CHECKING:  # the command line reads options without it
    import torch


#: what ``rope_scaling="yarn"`` without a factor makes room for
STATED_POSITIONS = 131_072


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A wish for YaRN.

    Attributes:
        factor: how many times the model's positions; None is the smallest power of two that makes room for
            :data:`STATED_POSITIONS`. Never a function of one run's length: a longer run continues a shorter.
    """

    factor: float | None

    def __str__(self) -> str:
        return "yarn" if self.factor is None else f"yarn:{self.factor:g}"


def parse_rope_scaling(text: str) -> RopeScaling | None:
    """Read ``"none"`` (→ None), ``"yarn"`` or ``"yarn:FACTOR"``.

    Raises:
        InputError: for anything else, or a factor below 1.
    """
    if text == "none":
        return None
    kind, colon, number = text.partition(":")
    if kind == "yarn" and not colon:
        return RopeScaling(None)
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if kind != "yarn" or not math.isfinite(factor) or factor < 1:
        raise InputError(
            f"rope_scaling is {text!r}; valid: none, yarn, yarn:FACTOR with a factor of at least 1 (yarn:4)",
            "rope_scaling",
        )
    return RopeScaling(factor)


def check_backend(backend: str, device: str) -> None:
    """Raise :class:`InputError` for a backend that does not run on a device ("cpu", "cuda", "cuda:N")."""
    kind = device.partition(":")[0]
    if backend not in ("auto", "torch", kind):
        raise InputError(
            f"backend is {backend!r}, and the device is {device!r}; valid: auto, {kind}, torch", "backend"
        )


@named_errors
@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is loaded, and what computes it: the arguments of `LLM`, which says what each means.

    Objects of torch become names here, and everything that can be said without torch is checked; what
    hardware there is, `loader.load.check_place` looks at.

    Raises:
        InputError: naming the field, its value and what is valid.
    """

    dtype: str = "auto"
    device: str = "auto"
    rope_scaling: str | None = None
    threads: int | None = None
    weights: str = "stored"
    activations: str = "float"
    kv_cache_dtype: str = "auto"
    device_map: str | Mapping[str, str | int] | None = None
    tp: int = 1
    backend: str = "auto"
    cuda_graphs: str = "auto"

    def __post_init__(self) -> None:
        for name in ("dtype", "device"):
            value: Any = getattr(self, name)
            if type(value).__module__ == "torch":  # one of its own types or devices
                object.__setattr__(self, name, str(value).removeprefix("torch."))
        for name, kind in _LOADING.items():
            check_choice(name, getattr(self, name), words(kind))
        devices = words(Device)
        if self.device not in devices and not re.fullmatch(r"cuda:\d+", str(self.device)):
            raise InputError(f"device is {self.device!r}; valid: {', '.join(devices)}", "device")
        if self.device != "auto":
            check_backend(self.backend, self.device)
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, str):
            raise InputError(
                f"rope_scaling is {shown(self.rope_scaling)}; valid: None, yarn, yarn:4", "rope_scaling"
            )
        parse_rope_scaling(self.rope_scaling or "none")
        if self.threads is not None:
            object.__setattr__(self, "threads", check_threads(self.threads))
        object.__setattr__(self, "tp", check_integer("tp", self.tp, 1))
        self._check_spread()

    def _check_spread(self) -> None:
        """Refuse what no model can be spread by."""
        placed, tp = self.device_map, self.tp
        if placed is not None and placed != "auto":
            if not isinstance(placed, Mapping) or not placed:
                valid = "auto, or a device for each module by name"
                raise InputError(f"device_map is {shown(placed)}; valid: {valid}", "device_map")
            for module, place in placed.items():
                if not isinstance(module, str) or not re.fullmatch(r"cpu|disk|cuda|cuda:\d+|\d+", str(place)):
                    raise InputError(
                        f"device_map places {shown(module)} on {shown(place)}; valid: cpu, disk, cuda:N or N",
                        "device_map",
                    )
            object.__setattr__(self, "device_map", dict(placed))
        if placed is not None and tp > 1:
            raise InputError(f"device_map is {shown(placed)} beside tp {tp}; valid: one of the two")
        if placed is not None and self.device != "auto":
            raise InputError(
                f"device is {self.device!r} beside device_map; valid: auto, the map says where", "device"
            )
        if placed is not None and find_spec("accelerate") is None:
            raise InputError("device_map needs accelerate; valid: with it installed (pip install accelerate)")
        if tp > 1 and ":" in self.device:
            raise InputError(
                f"device is {self.device!r} beside tp {tp}; valid: auto, each rank has its own", "device"
            )
        if self.spread is not None:
            for name, usual in (("weights", "stored"), ("backend", "auto")):
                if (value := getattr(self, name)) != usual:
                    raise InputError(f"{name} is {value!r}, but {self.spread}; valid: {usual}", name)

    @property
    def scaling(self) -> RopeScaling | None:
        """The wish for YaRN."""
        return parse_rope_scaling(self.rope_scaling or "none")

    @property
    def floats(self) -> torch.dtype | None:
        """The type of float arithmetic; None: the checkpoint's."""
        import torch

        name = "float32" if self.dtype == "int8" else self.dtype
        return None if name == "auto" else getattr(torch, name)

    @property
    def int8(self) -> str | None:
        """The field that asks for products in int8; None: neither does."""
        return "dtype" if self.dtype == "int8" else "activations" if self.activations == "int8" else None

    @property
    def keys(self) -> torch.dtype | None:
        """The type of keys and values that is asked for; None: none is."""
        import torch

        return None if self.kv_cache_dtype == "auto" else getattr(torch, self.kv_cache_dtype)

    @property
    def spread(self) -> str | None:
        """How the model is spread, in words; None where it lies in one place."""
        if self.tp > 1:
            return f"the model is spread over {self.tp} ranks"
        return None if self.device_map is None else "the model's layers are placed by device_map"


#: words that fields of `LoadConfig` take
_LOADING = {
    "dtype": Dtype,
    "weights": Weights,
    "activations": Activations,
    "kv_cache_dtype": KvCacheDtype,
    "backend": Backend,
    "cuda_graphs": CudaGraphs,
}
