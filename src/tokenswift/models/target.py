"""Choice of the backend; targets from loaded transformers models; and the draft models of a target.

A loaded transformers model runs on the native decoder where that fits, else by its own forward.
Either is checked against the model's own logits, by a prefill in two chunks and a tree pass over a
few dozen tokens, and is not used if it fails. Models read from files are not checked at loading:
tests/models does that.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from tokenswift.checks import shown
from tokenswift.config.loading import RopeScaling
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu import backend as cpu
from tokenswift.kernels.cpu.library import kernels_wanted, usable_processors
from tokenswift.loader.default_model import DRAFT, cache_dir
from tokenswift.loader.errors import refused_as
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.load import load
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget, fits
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError, OnProgress

if TYPE_CHECKING:  # it imports transformers' modelling code, which takes seconds
    from tokenswift.models.generic import GenericTarget

Target: TypeAlias = "NativeTarget | GenericTarget"

#: the check: tokens of a random text, the end of its first prefill chunk, and the parents of a tree
#: after it
TEXT, CUT = 24, 15
PARENTS = (-1, 0, 0, 1, 3, 2)
#: largest relative error of logits against the model's own, by type: rounding alone
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

logger = logging.getLogger("tokenswift")
_backends: dict[str, Backend] = {}


def backend_for(device: torch.device | str = "cpu", wanted: str = "auto") -> Backend:
    """The backend of a device; made, and its kernels checked, once in a process.

    Args:
        wanted: one of `loading.Backend`. "auto": compiled kernels on a CPU, Triton's on CUDA, or
            torch (with a warning) where they cannot run or fail the check that a row's bits do not
            depend on the others.
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
        made = _made(device, wanted)
        if isinstance(made, str):
            if wanted != "auto":
                raise InputError(f"backend is {wanted!r}, but {made}; valid: auto, torch")
            logger.warning("%s; the slower torch path is used", made)
            made = Backend(device)
        _backends[key] = made
    return _backends[key]


def _made(device: torch.device, wanted: str) -> Backend | str:
    """A backend, or the reason why its kernels do not work."""
    if device.type == "cpu":
        if (
            torch.get_num_threads() > usable_processors()
        ):  # a control group may allow fewer processors
            torch.set_num_threads(usable_processors())
        # a forked child inherits the memory of thread pools, but not their threads
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    if (kernels_wanted() if wanted == "auto" else wanted) == "torch" or device.type not in (
        "cpu",
        "cuda",
    ):
        return Backend(device)
    if device.type == "cuda":
        from tokenswift.kernels.cuda.check import open_backend

        found = open_backend(device)
        return f"the CUDA kernels do not work here ({found})" if isinstance(found, str) else found
    return cpu.open_backend(cache_dir() / "kernels")


def check_model(model: Any) -> None:
    """Raise :class:`InputError` unless a model has the parts that every target needs."""
    body = getattr(model, "model", None)
    if getattr(model, "lm_head", None) is None or not (
        hasattr(body, "rotary_emb") and hasattr(body, "layers")
    ):
        kind = getattr(getattr(model, "config", None), "model_type", "?")
        raise InputError(
            f"model type is {kind!r}; valid: causal language models with rotary positions and an "
            f"LM head"
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
        scaling: the asked rope scaling.
        on_progress: called with the stage "pack", in layers.
        backend: the backend, if the model is on its device; else the default one of the model's
            device.
    Raises:
        InputError: the model cannot run here; one line says why.
    """
    from tokenswift.models.generic import GenericTarget, device_of, hooks_of, shared_copy

    check_model(model)
    name = type(model).__name__
    rotary = rotary_of(model, scaling)
    usual = backend_for(place := device_of(model.lm_head))  # for attention and cache of all layers
    if backend is None or backend.device != usual.device:
        backend = usual
    cases = _cases(model.lm_head.weight.shape[0])
    with refused_as(f"model {name}: its own forward fails"):
        expected = _expected(shared_copy(model, rotary), cases, place)
    if not bool(expected.isfinite().all()):
        raise InputError(f"model {name}: logits of its own forward hold NaN or infinite values")
    spread = any(True for _ in hooks_of(model))  # over several devices
    if backend.decodes and not spread and fits(model) and _runs(model.config.model_type, backend):
        target: Target = NativeTarget(model, backend, rotary, on_progress)
        error = logit_error(target, cases, expected)
        if error <= _tolerance(target.dtype, model.config):
            return target
        logger.warning(
            "the native decoder differs from %s by %.1e; transformers' own forward is used",
            name,
            error,
        )
    with refused_as(
        f"model {name} does not run through transformers' attention interface with our cache"
    ):
        target = GenericTarget(model, backend, rotary)
        error = logit_error(target, cases, expected)
    if not error <= _tolerance(target.dtype, model.config):
        raise InputError(
            f"model {name} is not supported: logits of chunked prefill and tree passes differ "
            f"from those of "
            f"its own forward by {error:.1e} of their size"
        )
    return target


def _tolerance(dtype: torch.dtype, config: object) -> float:
    """The largest relative error of a model's logits. Of a mixture of experts in two bytes it is
    larger: one rounding of a router's scores sends a row through other experts."""
    tolerance = TOLERANCES.get(dtype, 0.1)
    has_experts = getattr(config, "num_experts_per_tok", None) is not None
    return 4 * tolerance if has_experts and dtype != torch.float32 else tolerance


def _runs(family: str, backend: Backend) -> bool:
    """Whether a backend has experts for a native family, if that has any."""
    return backend.mixtures or FAMILIES[family].experts is None


def _cases(vocab: int) -> list[list[int]]:
    """The text of the check, continued by the path to each node of the tree."""
    made = torch.randint(
        vocab, (TEXT + len(PARENTS),), generator=torch.Generator().manual_seed(1)
    ).tolist()
    text, nodes = made[:TEXT], made[TEXT:]
    paths: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else text), nodes[node]])
    return paths


@torch.inference_mode()
def _expected(shared: Any, cases: list[list[int]], device: torch.device) -> Tensor:
    """The model's own logits after each case, (cases, V) float32."""
    texts = (torch.tensor([case], device=device) for case in cases)
    rows = [shared(input_ids=text, use_cache=False).logits[0, -1] for text in texts]
    return torch.stack(rows).to(device).float()


@torch.inference_mode()
def logit_error(target: Target, cases: list[list[int]], expected: Tensor) -> float:
    """Relative error of a target's logits."""
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


class DraftModels:
    """The draft models of a target, each loaded at first use.

    Args:
        target: the target model.
        tokenizer: its tokenizer, or None.
        is_default: whether it is the default model, for which a draft model is shipped.
    """

    def __init__(self, target: Target, tokenizer: Tokenizer | None, is_default: bool) -> None:
        self._target, self._tokenizer, self._is_default = target, tokenizer, is_default
        # with a given model, so that its id stays its own
        self._made: dict[str | int, tuple[Target, Any]] = {}
        self._lock = Lock()

    def name(self, wanted: Any) -> str:
        """The name of a draft model in records."""
        return (
            DRAFT if wanted is None else str(wanted) if _is_name(wanted) else type(wanted).__name__
        )

    def get(self, wanted: Any) -> Target:
        """A draft model, loaded once.

        Args:
            wanted: alias, folder, hub id or a loaded transformers model; None: the one shipped for
                the default model.
        Raises:
            InputError: there is none, it cannot be loaded, or its vocabulary differs.
        """
        if wanted is None and not self._is_default:
            raise InputError(
                "draft_model is not given; valid: a causal LM with the target's tokenizer, such "
                "as a smaller "
                "one of its family"
            )
        key = self.name(wanted) if wanted is None or _is_name(wanted) else id(wanted)
        with self._lock:
            if key not in self._made:
                self._made[key] = self._load(wanted, self.name(wanted)), wanted
            return self._made[key][0]

    def _load(self, wanted: Any, name: str) -> Target:
        target, model, tokenizer = self._target, wanted, None
        own = str(target.dtype).removeprefix("torch.")
        try:
            if wanted is None or _is_name(wanted):
                loaded = load(name, dtype=own, device=str(target.device))
                model, tokenizer = loaded.model, loaded.tokenizer
            made = make_target(model, backend=target.backend)
        except InputError as error:
            told = name if wanted is None or _is_name(wanted) else shown(wanted)
            raise InputError(f"draft_model {told} cannot be used: {error}") from error
        if (made.device, made.dtype) != (target.device, target.dtype):
            valid = f"as the target, {target.dtype} on {target.device}"
            raise InputError(f"draft_model is {made.dtype} on {made.device}; valid: {valid}")
        given = [one.get_vocab() for one in (tokenizer, self._tokenizer) if one is not None]
        same = given[0] == given[1] if len(given) == 2 else made.vocab_size == target.vocab_size
        if not same:
            raise InputError(
                f"draft_model {name} has a vocabulary of {made.vocab_size} tokens, the target "
                f"one of "
                f"{target.vocab_size}, or its tokens are others; valid: a model with the "
                f"target's tokenizer"
            )
        if target.padding is not None:
            made.padding = target.padding[target.padding < made.vocab_size]
        return made


def _is_name(wanted: Any) -> bool:
    return isinstance(wanted, str | Path)
