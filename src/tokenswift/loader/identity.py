"""What tells files, weights, models and tokenizers apart: digests, and samples that are compared.

*Digests* are exact: of JSON values, of files, of sampled weights; whoever keeps one asks for its length.
A *base model's identity* is a sample of its weights, compared with a tolerance: a cast to another type is
the same base, a fine-tuned model is another one. *A run's identity* holds digests of everything that decides
its tokens. Reading 16 GB of weights before every resume would take longer than the prefill, so weights are
sampled there too: of every parameter its name, shape and type, and 64 values in four places. Training changes
nearly every value of the parameters that it touches; a change of single values can go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.loader.config import FAMILIES, MERGED, activation_of, layout_of
from tokenswift.types import InputError
from tokenswift.version import __version__

if TYPE_CHECKING:  # the command line is there before torch is
    import torch
    from torch import Tensor

    from tokenswift.kernels.weights import Stored

SAMPLE_SIZE = 256  # values taken of a weight for a base's identity
TOLERANCE = 0.01  # greatest relative distance of two samples of one base; a bf16 cast gives 0.002
PLACES, RUN = 4, 16  # places of a weight that a digest looks at, and values at each
#: parts of a config that say where a model came from or what it runs on, not what it is
ASIDE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")


def digest_of(value: Any, length: int = 64, default: Any = None) -> str:
    """A SHA-256 of a JSON value, or its first ``length`` digits.

    Args:
        default: makes JSON values of others, as `json.dumps` takes it.
    """
    text = json.dumps(value, sort_keys=True, default=default)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(parts: Iterable[bytes]) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
        made.update(b"\0")
    return made.hexdigest()[:32]


def sample_of(weight: Tensor | Stored) -> Tensor:
    """Values of a weight at fixed places, (256,) float32 on the CPU."""
    import torch

    steps = torch.linspace(0.02, 0.98, SAMPLE_SIZE, dtype=torch.float64)
    return _taken(weight, (steps * (math.prod(weight.shape) - 1)).long()).float().cpu()


def _taken(weight: Tensor | Stored, places: Tensor) -> Tensor:
    """Values of a weight at places of its flat form."""
    import torch

    if isinstance(weight, torch.Tensor):
        return weight.detach().reshape(-1)[places.to(weight.device)]
    return weight.at(places)


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """The identity of a base model.

    Attributes:
        name: its name, for messages only.
        hidden_size, vocab_size: D and V.
        sample: values of its input embedding, then of a weight of its middle layer, float32.
    """

    name: str
    hidden_size: int
    vocab_size: int
    sample: Tensor

    def distance(self, other: BaseIdentity) -> float:
        """Relative distance of the two samples; infinite when the shapes differ."""
        mine, theirs = ((b.hidden_size, b.vocab_size, b.sample.shape) for b in (self, other))
        if mine != theirs:
            return math.inf
        parts = zip(self.sample.split(SAMPLE_SIZE), other.sample.split(SAMPLE_SIZE), strict=True)
        return max(float((a - b).norm() / a.norm().clamp_min(1e-9)) for a, b in parts)


def base_of(model: Any, name: str | None = None) -> BaseIdentity:
    """The identity of a loaded transformers causal LM."""
    layers = model.base_model.layers
    modules = [model.get_input_embeddings(), *layers[len(layers) // 2].modules()]
    found = [(one, name) for one in modules for name, part in one._parameters.items() if part is not None]
    embedding, middle = [whole(*one) for one in found if one[0]._parameters[one[1]].ndim == 2][:2]
    known = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
    return _base(str(known), embedding, middle)


def base_of_weights(get: Callable[[str], Tensor | Stored | None], layers: int, name: str) -> BaseIdentity:
    """The identity of a model of one of the native families from its named weights, the same as
    :func:`base_of` gives.

    Args:
        get: a weight by its name, None where there is none.
        layers: how many the model has.
    """
    names = ("model.embed_tokens.weight", f"model.layers.{layers // 2}.self_attn.q_proj.weight")
    embedding, middle = map(get, names)
    if embedding is None or middle is None:
        raise InputError(f"model {name} lacks one of the weights {', '.join(names)}")
    return _base(name, embedding, middle)


def _base(name: str, embedding: Tensor | Stored, middle: Tensor | Stored) -> BaseIdentity:
    import torch

    return BaseIdentity(
        name=os.path.basename(name.rstrip("/")) or name,
        hidden_size=embedding.shape[1],
        vocab_size=embedding.shape[0],
        sample=torch.cat((sample_of(embedding), sample_of(middle))),
    )


def _values(weight: Tensor | Stored, dtype: torch.dtype) -> bytes:
    """Values of a weight at fixed places, as bytes."""
    import torch

    count = math.prod(weight.shape)
    if count > PLACES * RUN:
        starts = [(count - RUN) * i // (PLACES - 1) for i in range(PLACES)]
        places = torch.cat([torch.arange(start, start + RUN) for start in starts])
    else:
        places = torch.arange(count)
    return _taken(weight, places).to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def weights_digest(named: Iterable[tuple[str, Tensor | Stored]], dtype: torch.dtype | None = None) -> str:
    """A digest of sampled weights, by name and in the order of their names.

    Args:
        dtype: the type that they are taken in; their own where all are tensors.
    """
    kinds: Iterable[Any] = ((name, weight, dtype or weight.dtype) for name, weight in named)  # type: ignore[union-attr]
    return _digest(
        part
        for name, weight, kind in kinds
        for part in (name.encode(), str((tuple(weight.shape), str(kind))).encode(), _values(weight, kind))
    )


def whole(module: Any, name: str = "weight") -> Tensor:
    """All values of a module's own parameter, where accelerate brings them when they are needed, too."""
    weight = module._parameters[name]
    if weight.device.type == "meta":
        return module._hf_hook.weights_map[name]
    return weight.detach()


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


def identity_of(model: Any) -> dict[str, Any]:
    """The identity of a loaded transformers causal LM, before anything takes its weights: dtype, digests of
    config and sampled weights.

    Raises:
        InputError: adapters are attached to it, whose settings are no part of what is sampled.
    """
    if attached := getattr(model, "peft_config", None):
        raise InputError(f"the model has PEFT adapters ({', '.join(map(str, attached))}); valid: {MERGED}")
    named = sorted(parameters(model), key=itemgetter(0))
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": config_digest(model.config),
        "weights": weights_digest((name, make()) for name, make in named),
        "adapter": None,  # of earlier versions
    }


def config_digest(config: Any) -> str:
    """A digest of what a config says of a model; of a native family, of what its forward pass depends on."""
    if config.model_type in FAMILIES:
        rope = {name: value for name, value in config.rope_parameters.items() if value is not None}
        rope.pop("type", None)
        others = (activation_of(config), config.max_position_embeddings, config.eos_token_id)
        said = {"layout": asdict(layout_of(config)), "rope": rope, "others": others}
    else:
        said = {k: v for k, v in config.to_dict().items() if k not in ASIDE}
    return _digest([json.dumps(said, sort_keys=True, default=str).encode()])


def tokenizer_digest(tokenizer: Any) -> str | None:
    """A digest of what a tokenizer does; None without one."""
    if tokenizer is None:
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return _digest([fast.to_str().encode("utf-8", errors="surrogatepass")])
    return _digest([json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()])


def versions() -> dict[str, str]:
    """What a run was made with."""
    import torch

    return {
        "tokenswift": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
    }
