"""Models whose weights lie in several places: over cards, memory and disk, or over the ranks of a group.

Over cards, memory and disk accelerate's hooks bring a layer's inputs, and weights that lie elsewhere, to
where it computes; over ranks transformers' layers hold their shard alone (``DTensor``). Either way
transformers' own forward runs the model. Here stands what has to be known of it besides: where a module
computes, and what a weight's values are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.types import InputError

#: attributes that copies of a model share, since they cannot be copied
SHARED = ("_device_mesh", "_mesh_manager")


def hooks_of(model: nn.Module) -> Iterator[Any]:
    """accelerate's hooks in a model."""
    for module in model.modules():
        if (hook := getattr(module, "_hf_hook", None)) is not None:
            yield hook


def is_placed(model: nn.Module) -> bool:
    """Whether a model's weights lie in several places."""
    return (getattr(model, "_tp_size", None) or 1) > 1 or any(True for _ in hooks_of(model))


def is_offloaded(model: nn.Module) -> bool:
    """Whether some of the weights are brought to where they are needed, pass by pass."""
    return any(getattr(hook, "offload", False) for hook in hooks_of(model))


def tp_of(model: nn.Module) -> int:
    """Ranks that a model is spread over."""
    return getattr(model, "_tp_size", None) or 1


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes."""
    for hook in hooks_of(module):
        if (device := getattr(hook, "execution_device", None)) is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return next(module.parameters()).device


def whole(module: nn.Module, name: str = "weight") -> Tensor:
    """All values of a module's own parameter. All ranks have to ask for it."""
    weight = module._parameters[name]
    if weight is None:
        raise ValueError(f"{type(module).__name__} has no {name}")
    if weight.device.type == "meta":
        return module._hf_hook.weights_map[name]  # type: ignore[union-attr]
    gather: Callable[[], Tensor] | None = getattr(weight, "full_tensor", None)
    return (weight if gather is None else gather()).detach()


def parameters(model: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Names of a model's parameters, tied ones once as in ``named_parameters``, and what makes their
    values."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, weight in module._parameters.items():
            path = f"{prefix}.{name}" if prefix else name
            if weight is not None and id(weight) not in seen and path not in tied:
                seen.add(id(weight))
                yield path, lambda module=module, name=name: whole(module, name)


def local_bytes(weight: Tensor) -> int:
    """Bytes of a weight that lie with this rank."""
    own: Any = weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[operator]
    return own.numel() * own.element_size()


def kv_heads_of(model: Any) -> int:
    """Heads of keys and values whose attention this rank computes."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if tp_of(model) == 1:
        return heads
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    found = get_kv_heads_per_rank(model.tp_plan, heads, tp_of(model))
    if not isinstance(found, int):
        raise InputError(
            f"tp is {tp_of(model)}; valid: a number that divides the model's {heads} heads of keys"
        )
    return found
