"""Choice of the backend; targets from loaded transformers models; and the draft models of a target.

A loaded transformers model runs on the native decoder where that fits, else by its own forward.
Either is checked against the model's own logits, by a prefill in two chunks and a tree pass over a
few dozen tokens, and is not used if it fails. Models read from files are not checked at loading:
tests/models does that.
"""

from __future__ import annotations

import logging
import os
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from tokenswift.checks import shown
from tokenswift.config.loading import RopeScaling
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu import check as cpu_check
from tokenswift.kernels.cpu.library import kernels_wanted, usable_processors
from tokenswift.loader.default_model import DRAFT, cache_dir
from tokenswift.loader.errors import refused_as
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.load import load
from tokenswift.loader.rope import by_length, positions_name, rotary_of
from tokenswift.loader.rotary import Rotary
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.fits import fits
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError, OnProgress

if TYPE_CHECKING:  # it imports transformers' modelling code, which takes seconds
    from tokenswift.models.generic import GenericTarget

Target: TypeAlias = "NativeTarget | GenericTarget"

#: the check: tokens of a random text, the end of its first prefill chunk, and the parents of a tree
#: after it
CHECK_TOKENS = 24
CHECK_CUT = 15
PARENTS = (-1, 0, 0, 1, 3, 2)
#: largest relative error of logits against the model's own, by type: rounding alone
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

logger = logging.getLogger("tokenswift")
_backends: dict[str, Backend] = {}


def backend_for(
    device: torch.device | str = "cpu",
    wanted: str = "auto",
    on_progress: OnProgress | None = None,
) -> Backend:
    """The backend of a device; made, and its kernels checked, once in a process.

    Args:
        wanted: one of `loading.Backend`. "auto": compiled kernels on a CPU, Triton's on CUDA, or
            torch (with a warning) where they cannot run or fail the check that a row's bits do not
            depend on the others.
        on_progress: called with the stage "compile" and parts of the kernels, where they have to be
            compiled.
    Raises:
        InputError: the kernels asked for do not work here.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device(
            "cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0
        )
    key = str(device) if wanted == "auto" else f"{device} {wanted}"
    if key not in _backends:
        backend = _open_backend(device, wanted, on_progress)
        if isinstance(backend, str):
            reason = backend
            if wanted != "auto":
                raise InputError(f"backend is {wanted!r}, but {reason}; valid: auto, torch")
            logger.warning("%s; the slower torch path is used", reason)
            backend = Backend(device)
        _backends[key] = backend
    return _backends[key]


def _open_backend(
    device: torch.device, wanted: str, on_progress: OnProgress | None = None
) -> Backend | str:
    """A backend, or the reason why its kernels do not work."""
    if device.type == "cpu":
        # a control group may allow fewer processors
        if torch.get_num_threads() > usable_processors():
            torch.set_num_threads(usable_processors())
        # a forked child inherits the memory of thread pools, but not their threads
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    kernels = kernels_wanted() if wanted == "auto" else wanted
    if kernels == "torch" or device.type not in ("cpu", "cuda"):
        return Backend(device)
    if device.type == "cuda":
        from tokenswift.kernels.cuda.check import open_backend

        opened = open_backend(device)
        if isinstance(opened, str):
            return f"the CUDA kernels do not work here ({opened})"
        return opened
    return cpu_check.open_backend(cache_dir() / "kernels", on_progress)


def backend_with_states(backend: Backend) -> Backend:
    """The backend that runs a model with recurrent layers: one that has no such layers gives way to
    plain torch on its device, as transformers keeps no state that a draft can be taken back from.
    """
    if backend.decodes and backend.recurrences:
        return backend
    key = f"{backend.device} states"
    if key not in _backends:
        _backends[key] = Backend(backend.device, decodes=True)
    return _backends[key]


def check_model(model: Any) -> None:
    """Raise :class:`InputError` unless a model has the parts that every target needs."""
    body = getattr(model, "model", None)
    if getattr(model, "lm_head", None) is None or not (
        positions_name(body) is not None and hasattr(body, "layers")
    ):
        kind = getattr(getattr(model, "config", None), "model_type", "?")
        raise InputError(
            f"model type is {kind!r}; valid: causal language models with rotary positions and an "
            "LM head"
        )


def make_target(
    model: Any,
    scaling: RopeScaling | None = None,
    on_progress: OnProgress | None = None,
    backend: Backend | None = None,
) -> Target:
    """Make a target of a loaded causal LM.

    Args:
        model: a model of transformers, which stays as it is.
        scaling: the wish for YaRN.
        on_progress: called with the stage "pack", in layers.
        backend: the backend, if the model is on its device; else the default one of the model's
            device.
    Raises:
        InputError: the model cannot run here; one line says why.
    """
    from tokenswift.models.generic import GenericTarget, device_of, shared_copy

    check_model(model)
    name = type(model).__name__
    rotary = rotary_of(model, scaling)
    device = device_of(model.lm_head)  # for attention and cache of all layers
    device_backend = backend_for(device)
    if backend is None or backend.device != device_backend.device:
        backend = device_backend
    cases = _cases(model.lm_head.weight.shape[0])
    with refused_as(f"model {name}: its own forward fails"):
        expected = _expected(shared_copy(model, rotary), cases, device)
    if not bool(expected.isfinite().all()):
        raise InputError(f"model {name}: logits of its own forward hold NaN or infinite values")
    native = _native_target(model, backend, rotary, cases, expected, on_progress)
    if native is not None:
        return native
    if rotary.long is not None:
        raise by_length("longrope")
    with refused_as(
        f"model {name} does not run through transformers' attention interface with our cache"
    ):
        target: Target = GenericTarget(model, backend, rotary)
        error = logit_error(target, cases, expected)
    if not error <= _tolerance(target.dtype, model.config):
        raise InputError(
            f"model {name} is not supported: logits of chunked prefill and tree passes differ "
            f"from those of its own forward by {error:.1e} of their size"
        )
    return target


def _native_target(
    model: nn.Module,
    backend: Backend,
    rotary: Rotary,
    cases: list[list[int]],
    expected: Tensor,
    on_progress: OnProgress | None,
) -> NativeTarget | None:
    """A model on the native decoder; None: it does not fit, or its logits are not the model's.

    Args:
        cases: the texts of the check.
        expected: the model's own logits after each, (cases, V) float32.
        on_progress: called with the stage "pack", in layers.
    """
    from tokenswift.models.generic import hooks_of

    config = attrgetter("config")(model)
    is_spread = any(True for _ in hooks_of(model))  # over several devices
    if is_spread or not fits(model):
        return None
    family = FAMILIES[config.model_type]
    if family.recurrent:
        backend = backend_with_states(backend)
    if not backend.decodes or not (backend.mixtures or family.experts is None):
        return None
    target = NativeTarget(model, backend, rotary, on_progress)
    error = logit_error(target, cases, expected)
    if error <= _tolerance(target.dtype, config):
        return target
    logger.warning(
        "the native decoder differs from %s by %.1e; transformers' own forward is used",
        type(model).__name__,
        error,
    )
    return None


def _tolerance(dtype: torch.dtype, config: object) -> float:
    """The largest relative error of a model's logits. Of a mixture of experts in two bytes it is
    larger: one rounding of a router's scores sends a row through other experts."""
    tolerance = TOLERANCES.get(dtype, 0.1)
    return 4 * tolerance if is_rounded_mixture(dtype, config) else tolerance


def is_rounded_mixture(dtype: torch.dtype, config: object) -> bool:
    """Whether a model is a mixture of experts whose router rounds to two bytes, so that of nearly
    tied experts another may be asked than in float32."""
    has_experts = getattr(config, "num_experts_per_tok", None) is not None
    return has_experts and dtype != torch.float32


def _cases(vocabulary_size: int) -> list[list[int]]:
    """The text of the check, continued by the path to each node of the tree."""
    generator = torch.Generator().manual_seed(1)
    count = CHECK_TOKENS + len(PARENTS)
    tokens = torch.randint(vocabulary_size, (count,), generator=generator).tolist()
    text = tokens[:CHECK_TOKENS]
    nodes = tokens[CHECK_TOKENS:]
    paths: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else text), nodes[node]])
    return paths


@torch.inference_mode()
def _expected(model: nn.Module, cases: list[list[int]], device: torch.device) -> Tensor:
    """The model's own logits after each case, (cases, V) float32."""
    texts = (torch.tensor([case], device=device) for case in cases)
    rows = [model(input_ids=text, use_cache=False).logits[0, -1] for text in texts]
    return torch.stack(rows).to(device).float()


@torch.inference_mode()
def logit_error(target: Target, cases: list[list[int]], expected: Tensor) -> float:
    """Relative error of a target's logits."""
    text = cases[0][:-1]
    device = target.device
    rows = CHECK_TOKENS + len(PARENTS)
    cache = target.new_cache(rows, is_long=target.rotary.is_long(rows))
    for chunk in (text[:CHECK_CUT], text[CHECK_CUT:]):
        positions = torch.arange(cache.length, cache.length + len(chunk), device=device)
        target.forward(torch.tensor(chunk, device=device), positions, cache)
        cache.commit(tuple(range(len(chunk))))
    positions = torch.tensor([len(case) - 1 for case in cases], device=device)
    tokens = torch.tensor([case[-1] for case in cases], device=device)
    logits = target.logits(target.forward(tokens, positions, cache, PARENTS).hidden)
    expected = expected.to(device)
    return float((logits - expected).norm() / expected.norm().clamp_min(1e-9))


class DraftModels:
    """The draft models of a target, each loaded at first use.

    Args:
        target: the target model.
        tokenizer: its tokenizer, or None.
        is_default: whether it is the default model, for which a draft model is shipped.
    """

    def __init__(self, target: Target, tokenizer: Tokenizer | None, is_default: bool) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._is_default = is_default
        self._targets: dict[str | int, Target] = {}  # by name, or by the id of a model
        self._models: list[object] = []  # those that were given, so that their ids stay their own
        self._lock = Lock()

    def name(self, draft_model: object) -> str:
        """The name of a draft model in records."""
        if draft_model is None:
            return DRAFT
        if isinstance(draft_model, str | Path):
            return str(draft_model)
        return type(draft_model).__name__

    def get(self, draft_model: object) -> Target:
        """A draft model, loaded once.

        Args:
            draft_model: alias, folder, hub id or a loaded transformers model; None: the one shipped
                for the default model.
        Raises:
            InputError: there is none, it cannot be loaded, or its vocabulary differs.
        """
        if draft_model is None and not self._is_default:
            raise InputError(
                "draft_model is not given; valid: a causal LM with the target's tokenizer, such "
                "as a smaller one of its family"
            )
        key = self.name(draft_model) if _is_named(draft_model) else id(draft_model)
        with self._lock:
            if key not in self._targets:
                self._targets[key] = self._load(draft_model)
                self._models.append(draft_model)
            return self._targets[key]

    def _load(self, draft_model: object) -> Target:
        target = self._target
        name = self.name(draft_model)
        tokenizer = None
        try:
            if _is_named(draft_model):
                dtype = str(target.dtype).removeprefix("torch.")
                loaded = load(name, dtype=dtype, device=str(target.device))
                tokenizer = loaded.tokenizer
                draft = make_target(loaded.model, backend=target.backend)
            else:
                draft = make_target(draft_model, backend=target.backend)
        except InputError as error:
            value = name if _is_named(draft_model) else shown(draft_model)
            raise InputError(f"draft_model {value} cannot be used: {error}") from error
        if draft.recurrence is not None:
            raise InputError(
                f"draft_model {name} has recurrent layers, whose states follow the text whole; "
                "valid: a model whose layers all attend"
            )
        if (draft.device, draft.dtype) != (target.device, target.dtype):
            valid = f"as the target, {target.dtype} on {target.device}"
            raise InputError(f"draft_model is {draft.dtype} on {draft.device}; valid: {valid}")
        if not self._has_same_tokens(draft, tokenizer):
            raise InputError(
                f"draft_model {name} has a vocabulary of {draft.vocab_size} tokens, the target one "
                f"of {target.vocab_size}, or its tokens are others; valid: a model with the "
                "target's tokenizer"
            )
        if target.padding is not None:
            draft.padding = target.padding[target.padding < draft.vocab_size]
        return draft

    def _has_same_tokens(self, draft: Target, tokenizer: Tokenizer | None) -> bool:
        """Whether a draft model has the target's tokens, as far as tokenizers are known."""
        if tokenizer is not None and self._tokenizer is not None:
            return tokenizer.get_vocab() == self._tokenizer.get_vocab()
        return draft.vocab_size == self._target.vocab_size


def _is_named(draft_model: object) -> bool:
    """Whether a draft model is loaded by its name, the shipped one's included."""
    return draft_model is None or isinstance(draft_model, str | Path)
