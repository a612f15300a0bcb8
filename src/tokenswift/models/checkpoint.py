"""Where the lean decoder's weights come from: modules of a loaded transformers model, or a model's files.

Both give tensors by the names that checkpoints use, and a :class:`Layout` that says which there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tokenswift.models.base import head_width
from tokenswift.types import InputError
from tokenswift.weights.format import Stored

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Layout:
    """What a lean decoder is made of, by the names of transformers' configs.

    Attributes:
        eps: of the norms.
        scale: of attention scores.
        windows: newest keys that a token sees, by layer; 0 is all.
        tied: whether the LM head is the embedding.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    eps: float
    scale: float
    windows: tuple[int, ...]
    tied: bool

    @classmethod
    def of(cls, model: Any) -> Layout:
        """The layout of a loaded transformers model that the lean decoder can run."""
        config, body = model.config, model.model
        first = body.layers[0]

        def window(layer: Any) -> int:
            own = getattr(layer.self_attn, "sliding_window", None)
            return (config.sliding_window if config.model_type == "mistral" else own) or 0

        return cls(
            model_type=config.model_type,
            vocab_size=model.lm_head.weight.shape[0],
            hidden_size=model.lm_head.weight.shape[1],
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=head_width(config),
            eps=float(first.input_layernorm.variance_epsilon),
            scale=float(first.self_attn.scaling),
            windows=tuple(window(layer) for layer in body.layers),
            tied=model.lm_head.weight is body.embed_tokens.weight,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights that every such decoder has."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        wide, inner = self.hidden_size, self.intermediate_size
        found = {EMBEDDING: (self.vocab_size, wide), NORM: (wide,)}
        if not self.tied:
            found[HEAD] = (self.vocab_size, wide)
        layer = {
            "self_attn.q_proj": (queries, wide),
            "self_attn.k_proj": (keys, wide),
            "self_attn.v_proj": (keys, wide),
            "self_attn.o_proj": (wide, queries),
            "mlp.gate_proj": (inner, wide),
            "mlp.up_proj": (inner, wide),
            "mlp.down_proj": (wide, inner),
            "input_layernorm": (wide,),
            "post_attention_layernorm": (wide,),
        }
        for number in range(self.num_hidden_layers):
            found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        return found


class Weights(Protocol):
    """Tensors of a model by name."""

    layout: Layout
    copies: bool  # whether what is packed stands beside the weights themselves

    def get(self, name: str) -> Tensor | Stored | None:
        """A tensor, or a weight as a file holds it; None: the model has none of that name."""
        ...

    def packed(self, name: str, restore: Callable[[], Tensor]) -> None:
        """Told when a weight is packed: it may go; ``restore`` makes it again."""
        ...

    def rest(self) -> None:
        """Told between layers: memory that nobody needs may go."""
        ...

    def done(self) -> list[tuple[nn.Module, Callable[[], Tensor]]]:
        """Told when everything is packed; the modules whose weights were taken, and what makes them again."""
        ...


class StoredWeights(Weights, Protocol):
    """Weights of a model's files.

    Attributes:
        dtype, device: of what is not stored in a low-bit format.
    """

    dtype: torch.dtype
    device: torch.device

    def names(self) -> list[str]:
        """The names of all tensors in the files, in order."""
        ...


class ModuleWeights:
    """Weights of a loaded transformers model (implements :class:`Weights`).

    Args:
        model: for which `decoder.unfit` is None.
        take: replace its weights by empty ones as they are packed, so that they exist once.
    """

    def __init__(self, model: Any, take: bool) -> None:
        self.layout, self.copies = Layout.of(model), not take
        self._model, self._take = model, take
        self._taken: list[tuple[nn.Module, Callable[[], Tensor]]] = []

    def get(self, name: str) -> Tensor | None:
        """See :class:`Weights`."""
        try:
            found = attrgetter(name)(self._model)
        except AttributeError:
            return None
        return None if found is None else found.detach()

    def packed(self, name: str, restore: Callable[[], Tensor]) -> None:
        """See :class:`Weights`."""
        if not self._take:
            return
        module = attrgetter(name.removesuffix(".weight"))(self._model)
        empty = module.weight.new_empty(0)
        module.weight = nn.Parameter(empty, requires_grad=False)
        self._taken.append((module, restore))
        if name == HEAD and self.layout.tied:
            embedding = self._model.model.embed_tokens
            embedding.weight = nn.Parameter(empty, requires_grad=False)
            self._taken.append((embedding, lambda: module.weight))

    def rest(self) -> None:
        """See :class:`Weights`."""

    def done(self) -> list[tuple[nn.Module, Callable[[], Tensor]]]:
        """See :class:`Weights`."""
        if self._take:  # what is left shares the checkpoint's mapped file, which would stay in memory
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
        return self._taken


class FileWeights:
    """Weights of a checkpoint's safetensors files, read in place (implements :class:`Weights`).

    Args:
        folder: of the checkpoint; its name is what messages call the model.
        layout: which weights there must be.
        dtype: the type that they are given in.
    Raises:
        InputError: files or weights are missing or damaged, or shapes are others.

    Attributes:
        dtype, device: of the tensors.
    """

    device = torch.device("cpu")

    def __init__(self, folder: Path, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.copies, self.dtype, self.folder = layout, False, dtype, folder
        self._open: dict[Path, Any] = {}
        self._where = {name: path for path in weight_files(folder) for name in self._file(path).keys()}  # noqa: SIM118
        for name, shape in layout.shapes().items():
            if name not in self._where:
                raise InputError(f"model folder {folder} lacks weight {name}")
            found = tuple(self._file(self._where[name]).get_slice(name).get_shape())
            if found != shape:
                raise InputError(f"model folder {folder}: weight {name} has shape {found}; valid: {shape}")

    def names(self) -> list[str]:
        """The names of all tensors in the files, in order."""
        return sorted(self._where)

    def get(self, name: str) -> Tensor | None:
        """See :class:`Weights`."""
        if name == HEAD and self.layout.tied:
            name = EMBEDDING
        return self[name] if name in self._where else None

    def __getitem__(self, name: str) -> Tensor:
        """A tensor of the files, of this type."""
        return self._file(self._where[name]).get_tensor(name).to(self.dtype)

    def packed(self, name: str, restore: Callable[[], Tensor]) -> None:
        """See :class:`Weights`."""

    def rest(self) -> None:
        """See :class:`Weights`: what was read of the files leaves the process."""
        self._open.clear()

    def done(self) -> list[tuple[nn.Module, Callable[[], Tensor]]]:
        """See :class:`Weights`."""
        self.rest()
        return []

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"weight file {path} cannot be read ({error})") from error
        return self._open[path]


def weight_files(folder: Path) -> Iterator[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        InputError: there are none, or their index cannot be read.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        yield single
    elif index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"model folder {folder}: its weights' index cannot be read ({error})") from error
        files = [name for name in names if isinstance(name, str) and Path(name).name == name]
        yield from sorted(folder / name for name in files)
    else:
        raise InputError(f"model folder {folder} has no safetensors files")
