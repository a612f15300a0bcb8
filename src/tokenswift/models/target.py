"""From a loaded transformers model to a target: the native decoder where it fits, else its own forward.

Either is checked when it is made, against the model's own forward: a prefill in two chunks and a tree pass
over a few dozen tokens must give its logits. What fails the check is not used. Models that the native
decoder reads from their files are not checked at loading: tests/models holds it against transformers.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from tokenswift.config import RopeScaling
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu import backend as cpu
from tokenswift.kernels.cpu.library import kernels_wanted, usable
from tokenswift.kernels.torch import TorchBackend
from tokenswift.loader.find import cache_dir, refused_as
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget, fits
from tokenswift.types import InputError, OnProgress

if TYPE_CHECKING:  # it imports transformers' modelling code, which takes seconds
    from tokenswift.models.generic import GenericTarget

Target: TypeAlias = "NativeTarget | GenericTarget"

#: the check: text, where its first prefill chunk ends, and a tree behind it (tokens drawn at random)
TEXT, CUT = 24, 15
PARENTS = (-1, 0, 0, 1, 3, 2)
#: greatest relative distance of logits from the model's own, by type: rounding and no more
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

logger = logging.getLogger("tokenswift")
_backends: dict[str, Backend] = {}


def backend_for(device: torch.device | str = "cpu", wanted: str = "auto") -> Backend:
    """The backend of a device; made, and its kernels checked, once a process.

    Args:
        wanted: one of `Backend`. "auto": on the CPU compiled kernels, on CUDA Triton's; or torch where
            there are none or they break the rule that a row's bits are their own affair, as one line says.
    Raises:
        InputError: the kernels that are asked for do not work here.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    key = str(device) if wanted == "auto" else f"{device} {wanted}"
    if key not in _backends:
        made = _made(device, wanted)
        if isinstance(made, str):
            if wanted != "auto":
                raise InputError(f"backend is {wanted!r}, but {made}; valid: auto, torch")
            logger.warning("%s; the slower torch path is used", made)
            made = TorchBackend(device)
        _backends[key] = made
    return _backends[key]


def _made(device: torch.device, wanted: str) -> Backend | str:
    """A backend; or why its kernels do not work."""
    if device.type == "cpu":
        if torch.get_num_threads() > usable():  # of processors that a control group allows only in part
            torch.set_num_threads(usable())
        # a forked child has the memory of torch's threads and of ours, but not the threads
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    if (kernels_wanted() if wanted == "auto" else wanted) == "torch" or device.type not in ("cpu", "cuda"):
        return TorchBackend(device)
    if device.type == "cuda":
        from tokenswift.kernels.cuda.check import started

        found = started(device)
        return f"the CUDA kernels do not work here ({found})" if isinstance(found, str) else found
    return cpu.started(cache_dir() / "kernels")


def check_model(model: Any) -> None:
    """Raise :class:`InputError` unless a model has the parts that every target needs."""
    body = getattr(model, "model", None)
    if getattr(model, "lm_head", None) is None or not (
        hasattr(body, "rotary_emb") and hasattr(body, "layers")
    ):
        kind = getattr(getattr(model, "config", None), "model_type", "?")
        raise InputError(
            f"model type is {kind!r}; valid: causal language models with rotary positions and an LM head"
        )


def make_target(
    model: Any,
    scaling: RopeScaling | None = None,
    on_progress: OnProgress | None = None,
    backend: Backend | None = None,
) -> Target:
    """A target over a loaded causal LM.

    Args:
        model: from transformers. It stays as it is.
        scaling: a wish for YaRN.
        on_progress: told of the stage "pack" (weights made ready for the kernels, in layers).
        backend: what computes, if the model is on its device; otherwise the usual one.
    Raises:
        InputError: a model that cannot run here, in one line that says why.
    """
    from tokenswift.models.generic import GenericTarget, device_of, hooks_of, shared_copy

    check_model(model)
    name = type(model).__name__
    rotary = rotary_of(model, scaling)
    usual = backend_for(place := device_of(model.lm_head))  # attention and cache are there, for all layers
    if backend is None or backend.device != usual.device:
        backend = usual
    cases = _cases(model.lm_head.weight.shape[0])
    with refused_as(f"model {name}: its own forward fails"):
        expected = _expected(shared_copy(model, rotary), cases, place)
    if not bool(expected.isfinite().all()):
        raise InputError(f"model {name}: logits of its own forward hold NaN or infinite values")
    spread = any(True for _ in hooks_of(model))  # over several devices
    if backend.decodes and not spread and fits(model):
        target: Target = NativeTarget(model, backend, rotary, on_progress)
        far = distance(target, cases, expected)
        if far <= TOLERANCES[target.dtype]:
            return target
        logger.warning(
            "the native decoder differs from %s by %.1e; transformers' own forward is used", name, far
        )
    with refused_as(f"model {name} does not run through transformers' attention interface with our cache"):
        target = GenericTarget(model, backend, rotary)
        far = distance(target, cases, expected)
    if not far <= TOLERANCES.get(target.dtype, 0.1):
        raise InputError(
            f"model {name} is not supported: logits of chunked prefill and tree passes differ from those of "
            f"its own forward by {far:.1e} of their size"
        )
    return target


def _cases(vocab: int) -> list[list[int]]:
    """The check's text, continued by each path from the tree's root to a node."""
    made = torch.randint(vocab, (TEXT + len(PARENTS),), generator=torch.Generator().manual_seed(1)).tolist()
    text, nodes = made[:TEXT], made[TEXT:]
    paths: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else text), nodes[node]])
    return paths


@torch.inference_mode()
def _expected(shared: Any, cases: list[list[int]], device: torch.device) -> Tensor:
    """Logits after each case by the model's own forward, (cases, V) float32."""
    texts = (torch.tensor([case], device=device) for case in cases)
    rows = [shared(input_ids=text, use_cache=False).logits[0, -1] for text in texts]
    return torch.stack(rows).to(device).float()


@torch.inference_mode()
def distance(target: Target, cases: list[list[int]], expected: Tensor) -> float:
    """Relative distance of a target's logits from the expected ones."""
    text, device = cases[0][:-1], target.device
    cache = target.new_cache(TEXT + len(PARENTS))
    for part in (text[:CUT], text[CUT:]):
        at = torch.arange(cache.length, cache.length + len(part), device=device)
        target.forward(torch.tensor(part, device=device), at, cache)
        cache.commit(tuple(range(len(part))))
    positions = torch.tensor([len(case) - 1 for case in cases], device=device)
    tokens = torch.tensor([case[-1] for case in cases], device=device)
    found = target.logits(target.forward(tokens, positions, cache, PARENTS).hidden)
    expected = expected.to(device)
    return float((found - expected).norm() / expected.norm().clamp_min(1e-9))
