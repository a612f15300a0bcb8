"""What tells models apart: digests of their config, weights and tokenizer, and base models.

*Digests* are exact: of JSON values, of files, of sampled weights. A *base model's identity* is a
sample of its weights, compared with a tolerance: a cast to another type is the same base, a
fine-tuned model is another one. *A run's identity* holds digests of everything that decides its
tokens. Reading 16 GB of weights before every resume would take longer than the prefill, so weights
are sampled there too: of every parameter its name, shape and type, and 64 values in four places.
Training changes nearly every value of the parameters that it touches; a change of single values can
go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.kernels.formats import Stored
from tokenswift.loader.config import activation_of
from tokenswift.loader.experts import CHOICE_BIAS_NAME, parameter_parts
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.find import MERGED
from tokenswift.loader.fused import split_tensors
from tokenswift.loader.layout import EMBEDDING, head_width, layout_of
from tokenswift.loader.recurrent import FIRST_MATRICES, our_name
from tokenswift.tokenizer import Tokenizer, backend_of
from tokenswift.types import InputError
from tokenswift.version import __version__

# ---- digests -------------------------------------------------------------------------------------

#: places of a weight that a digest looks at, and values at each
PLACES = 4
RUN = 16
#: parts of a config that say where a model came from or what it runs on, not what it is
IGNORED_FIELDS = {
    "_attn_implementation",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
}


def digest_of(
    value: object, length: int = 64, default: Callable[[object], object] | None = None
) -> str:
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


def weights_digest(
    named: Iterable[tuple[str, Tensor | Stored]], dtype: torch.dtype | None = None
) -> str:
    """A digest of sampled weights, by name and in the order of their names.

    Args:
        dtype: the type that they are taken in; None: each in its own, where all are tensors.
    """
    digest = hashlib.sha256()
    for name, weight in named:
        kind = dtype
        if kind is None:
            kind = torch.float32 if isinstance(weight, Stored) else weight.dtype
        sample = _sample(weight, _digest_places(math.prod(weight.shape))).to(kind)
        digest.update(name.encode() + b"\0")
        digest.update(str((tuple(weight.shape), str(kind))).encode() + b"\0")
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes() + b"\0")
    return digest.hexdigest()[:32]


def _digest_places(count: int) -> Tensor:
    """Places of a weight of so many values that a digest looks at."""
    if count <= PLACES * RUN:
        return torch.arange(count)
    starts = [(count - RUN) * part // (PLACES - 1) for part in range(PLACES)]
    return torch.cat([torch.arange(start, start + RUN) for start in starts])


def _sample(weight: Tensor | Stored, places: Tensor) -> Tensor:
    """Values of a weight at places of its flat form, on the CPU."""
    if isinstance(weight, Stored):
        return weight.at(places)
    return weight.detach().reshape(-1)[places.to(weight.device)].cpu()


def config_digest(config: Any) -> str:
    """A digest of what a config says of a model; of a native family, of what its forward pass
    depends on.

    Args:
        config: of `config.completed`, or transformers'.
    """
    if config.model_type not in FAMILIES:
        fields = {
            name: value for name, value in config.to_dict().items() if name not in IGNORED_FIELDS
        }
        return digest_of(fields, 32, default=str)
    rope = {name: value for name, value in config.rope_parameters.items() if value is not None}
    rope.pop("type", None)
    others = (activation_of(config), config.max_position_embeddings, config.eos_token_id)
    parts = {"layout": layout_of(config).stated(), "rope": rope, "others": others}
    return digest_of(parts, 32, default=str)


def tokenizer_digest(tokenizer: Tokenizer | None) -> str | None:
    """A digest of what a tokenizer does; None without one."""
    if tokenizer is None:
        return None
    backend = backend_of(tokenizer)
    return digest_of(tokenizer.get_vocab() if backend is None else backend.to_str(), 32)


def identity_of(
    config: Any, dtype: torch.dtype, named: Iterable[tuple[str, Tensor | Stored]]
) -> dict[str, str]:
    """What of a model decides its tokens: its type, and digests of config and sampled weights.

    Args:
        config: of `config.completed`, or transformers'.
        named: its weights by name, in the order of their names.
    """
    weights = weights_digest(named, dtype)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "config": config_digest(config),
        "weights": weights,
    }


def load_parameter(module: nn.Module, path: str = "weight") -> Tensor:
    """All values of a parameter, or buffer, where accelerate brings them when they are needed, too.

    Args:
        path: its name within the module.
    """
    prefix, _, name = path.rpartition(".")
    owner: Any = module.get_submodule(prefix)
    weight = owner._parameters.get(name)
    if weight is None:
        return owner._buffers[name].detach()
    return owner._hf_hook.weights_map[name] if weight.device.type == "meta" else weight.detach()


def parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A transformers model's parameters in the order of their names, tied ones once.

    Raises:
        InputError: adapters are attached to it, whose settings are no part of what is sampled.
    """
    adapters = getattr(model, "peft_config", None)
    if adapters:
        raise InputError(
            f"the model has PEFT adapters ({', '.join(map(str, adapters))}); valid: {MERGED}"
        )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = [name for name, _ in model.named_parameters() if name not in tied]
    biases = [name for name, _ in model.named_buffers() if name.endswith(CHOICE_BIAS_NAME)]
    paths = sorted([*names, *biases])
    named = ((path, load_parameter(model, path)) for path in paths)
    config = getattr(model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if config is None or family is None or not (family.fused or family.experts or family.names):
        yield from named
        return
    named = ((our_name(path, family), values) for path, values in named)
    if family.fused:
        parts = list(split_tensors(named, layout_of(config)))
    else:
        in_turn = family.experts is not None and family.experts.in_turn
        parts = [part for path, values in named for part in parameter_parts(path, values, in_turn)]
    yield from sorted(parts, key=itemgetter(0))


def versions() -> dict[str, str]:
    """What a run was made with."""
    return {
        "tokenswift": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
    }


# ---- base models ---------------------------------------------------------------------------------

SAMPLE_SIZE = 256  # values taken of a weight for a base's identity
TOLERANCE = 0.01  # greatest relative distance of two samples of one base; a bf16 cast gives 0.002


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
        if (self.hidden_size, self.vocab_size) != (other.hidden_size, other.vocab_size):
            return math.inf
        if self.sample.shape != other.sample.shape:
            return math.inf
        pairs = zip(self.sample.split(SAMPLE_SIZE), other.sample.split(SAMPLE_SIZE), strict=True)
        return max(float((a - b).norm() / a.norm().clamp_min(1e-9)) for a, b in pairs)


def base_of(model: Any, name: str | None = None) -> BaseIdentity:
    """The identity of a loaded transformers causal LM."""
    layers = model.base_model.layers
    layer = layers[len(layers) // 2]
    family = FAMILIES.get(model.config.model_type)
    if family is not None and family.fused:
        fused = load_parameter(layer, "self_attn.qkv_proj.weight")
        middle = fused[: model.config.num_attention_heads * head_width(model.config)]
    else:
        path = next(path for path, part in layer.named_parameters() if part.ndim == 2)
        middle = load_parameter(layer, path)
    name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
    embedding = load_parameter(model.get_input_embeddings())
    return _base(str(name), embedding, middle)


def base_of_weights(
    get: Callable[[str], Tensor | Stored | None], layers: int, name: str
) -> BaseIdentity:
    """The identity of a model of one of the native families from its named weights, the same as
    :func:`base_of` gives.

    Args:
        get: a weight by its name, None where there is none.
        layers: how many the model has.
    """
    layer = f"model.layers.{layers // 2}."
    middle_name = f"{layer}self_attn.q_proj.weight"
    embedding = get(EMBEDDING)
    candidates = (middle_name, *(layer + name for name in FIRST_MATRICES))
    middle = next((weight for weight in map(get, candidates) if weight is not None), None)
    if embedding is None or middle is None:
        raise InputError(f"model {name} lacks one of the weights {EMBEDDING}, {middle_name}")
    return _base(name, embedding, middle)


def _base(name: str, embedding: Tensor | Stored, middle: Tensor | Stored) -> BaseIdentity:
    shares = torch.linspace(0.02, 0.98, SAMPLE_SIZE, dtype=torch.float64)
    samples: list[Tensor] = []
    for weight in (embedding, middle):
        places = (shares * (math.prod(weight.shape) - 1)).long()
        samples.append(_sample(weight, places).float())
    vocab_size, hidden_size = embedding.shape
    return BaseIdentity(
        name=os.path.basename(name.rstrip("/")) or name,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        sample=torch.cat(samples),
    )
