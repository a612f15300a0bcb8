"""How a model is loaded, and what computes it: `LoadConfig`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypedDict, get_args

from tokenswift.checks import keep_field, shown
from tokenswift.config.fields import SHOWN, Between, check_fields, refuse
from tokenswift.types import InputError

if TYPE_CHECKING:
    import torch

CORES = os.cpu_count() or 1
MOST_THREADS = max(16, 4 * CORES)

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KvCacheDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "int8", "int16"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
#: what weights are stored as in memory: as their files hold them, as floats, or in a quantized
#: format
Weights: TypeAlias = Literal["stored", "float32", "bfloat16", "q8_0", "q4_0", "q4_1"]
#: kernel backend: the kernels of the device where they work, those of one kind of device, or torch
Backend: TypeAlias = Literal["auto", "cpu", "cuda", "torch"]

#: kinds of draft heads; as ``heads`` each names the shipped ones of its kind
HeadKind: TypeAlias = Literal["linear", "conditioned", "medusa"]


#: what ``rope_scaling="yarn"`` without a factor makes room for
STATED_POSITIONS = 131_072


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A wish for YaRN.

    Attributes:
        factor: how many times the model's positions; None is the smallest power of two that makes
            room for :data:`STATED_POSITIONS`. Never a function of one run's length: a longer run
            continues a shorter.
    """

    factor: float | None

    def __str__(self) -> str:
        return "yarn" if self.factor is None else f"yarn:{self.factor:g}"


def parse_rope_scaling(text: str | None) -> RopeScaling | None:
    """Read ``"none"`` (→ None, as None), ``"yarn"`` or ``"yarn:FACTOR"``.

    Raises:
        InputError: for anything else, or a factor below 1.
    """
    if text in ("none", None):
        return None
    yarn = re.fullmatch(r"yarn(?::(\d{1,6}(?:\.\d+)?))?", text) if isinstance(text, str) else None
    factor = float(yarn[1]) if yarn and yarn[1] else None
    if yarn is None or (factor is not None and factor < 1):
        raise InputError(
            f"rope_scaling is {shown(text)}; valid: none, yarn, or yarn:FACTOR of at least 1, "
            f"such as yarn:4",
            "rope_scaling",
        )
    return RopeScaling(factor)


class LoadOptions(TypedDict, total=False):
    """Fields of `LoadConfig`, which describes them, as keywords of ``LLM``."""

    rope_scaling: str | None
    threads: int | None
    weights: Weights | str
    kv_cache_dtype: KvCacheDtype | str
    backend: Backend | str


class ModelOptions(LoadOptions, total=False):
    """Keywords of ``LLM`` that name things, as another process can be told them."""

    dtype: Dtype | str
    device: str
    heads: str | None
    eagle: str | None


class LoadArguments(TypedDict):
    """The arguments of ``LLM`` that load a model again, as a journal keeps them."""

    model: str
    dtype: str
    device: str
    heads: str | None
    eagle: str | None
    rope_scaling: str | None
    weights: str
    kv_cache_dtype: str
    backend: str


def check_backend(backend: str, device: str) -> None:
    """Raise :class:`InputError` for a backend that does not run on a device ("cpu", "cuda",
    "cuda:N")."""
    kind = device.partition(":")[0]
    if backend not in ("auto", "torch", kind):
        raise InputError(
            f"backend is {backend!r}, and the device is {device!r}; valid: auto, {kind}, torch",
            "backend",
        )


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is loaded, and what computes it: the arguments of `LLM`.

    Objects of torch become names here, and everything that can be said without torch is checked;
    what hardware there is, `loader.load.check_place` looks at.

    Attributes:
        dtype: compute dtype: float32, bfloat16, float16, int8 or auto; auto is the checkpoint's (of
            quantized weights int8 on a CPU, bfloat16 on CUDA)
        device: auto, cpu or cuda; auto is CUDA where there is one
        rope_scaling: for texts beyond the model's positions: yarn (131,072 tokens), yarn:4 (four
            times the model's) or none
        threads: CPU threads; at least 1; default: torch's choice, at most one a usable processor
        weights: number format of the weights in memory: stored (as in the files), float32,
            bfloat16, or quantized at loading, which makes another model: q8_0, q4_0, q4_1
        kv_cache_dtype: dtype of the KV cache: auto (the compute dtype; with int8, keys are of 16
            bits in layers that need it), float32, bfloat16, int8 (half the memory of bfloat16), or
            int16 (keys of 16 bits, values in int8)
        backend: kernel backend: auto (the device's own; torch where that does not work), cpu, cuda
            or torch

    Raises:
        InputError: naming the field, its value and what is valid.
    """

    dtype: Annotated[Dtype | str, SHOWN] = "auto"
    device: Annotated[str, SHOWN] = "auto"
    rope_scaling: str | None = None
    threads: Annotated[
        int | None,
        Between(1, MOST_THREADS, f"1 to {MOST_THREADS} (this machine has {CORES} cores)"),
        SHOWN,
    ] = None
    weights: Weights | str = "stored"
    kv_cache_dtype: KvCacheDtype | str = "auto"
    backend: Backend | str = "auto"

    def __post_init__(self) -> None:
        for name in ("dtype", "device"):
            value: object = getattr(self, name)
            if type(value).__module__ == "torch":  # one of its own types or devices
                keep_field(self, name, str(value).removeprefix("torch."))
        check_fields(self)
        devices = get_args(Device)
        if self.device not in devices and not re.fullmatch(r"cuda:\d+", str(self.device)):
            refuse(self, "device", f"; valid: {', '.join(devices)}")
        if self.device != "auto":
            check_backend(str(self.backend), self.device)
        parse_rope_scaling(self.rope_scaling)

    @property
    def scaling(self) -> RopeScaling | None:
        """The wish for YaRN."""
        return parse_rope_scaling(self.rope_scaling)

    @property
    def floats(self) -> torch.dtype | None:
        """The torch.dtype of float arithmetic; None: the checkpoint's."""
        import torch

        name = "float32" if self.dtype == "int8" else self.dtype
        return None if name == "auto" else getattr(torch, name)

    @property
    def keys(self) -> torch.dtype | None:
        """The torch.dtype of keys and values that is asked for; None: none is."""
        import torch

        return None if self.kv_cache_dtype == "auto" else getattr(torch, self.kv_cache_dtype)


#: kinds of draft heads; as ``heads`` each names the shipped ones of its kind
HEAD_KINDS = get_args(HeadKind)
