"""Where the native decoder's weights come from: modules of a loaded transformers model, or a model's files.

Both give tensors by the names that checkpoints use, and a :class:`Layout` that says which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokenswift.json_files import weight_map
from tokenswift.kernels.formats.format import Stored
from tokenswift.loader.safetensors import open_weights
from tokenswift.types import InputError

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
#: model types that the native decoder runs
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
#: projections of a layer, and the families whose queries and keys have norms
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMED = ("qwen3",)
#: projections that may have biases, by model type
BIASED = {"llama": PROJECTIONS, "qwen2": PROJECTIONS[:3], "qwen3": PROJECTIONS[:4], "mistral": ()}
#: types of numbers in safetensors files that weights are made of
FLOATS = ("F32", "BF16", "F16", "F64", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Layout:
    """What a native decoder is made of, by the names of transformers' configs.

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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights that every such decoder has."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        wide, inner = self.hidden_size, self.intermediate_size
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, wide), NORM: (wide,)}
        if not self.tied:
            found[HEAD] = (self.vocab_size, wide)
        layer: dict[str, tuple[int, ...]] = {
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
        if self.model_type in NORMED:
            layer |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (self.head_dim,))
        for number in range(self.num_hidden_layers):
            found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        return found

    def biases(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what some of the family's decoders have besides."""
        there = self.shapes()
        weights = [
            f"model.layers.{number}.{name}"
            for number in range(self.num_hidden_layers)
            for name in BIASED.get(self.model_type, ())
        ]
        return {f"{name}.bias": there[f"{name}.weight"][:1] for name in weights}


def check_tensors(
    layout: Layout,
    found: Mapping[str, tuple[tuple[int, ...], str]],
    types: Collection[str],
    where: str,
    what: str,
    called: Callable[[str], str] = str,
) -> None:
    """Hold all that a decoder may read of a file against the family's table, before anything is read.

    Args:
        found: shape and type of each tensor of the file, by its name in transformers.
        types: that weights may have.
        where, what: the file, and what it calls a tensor, for messages.
        called: the file's own name of a tensor.
    Raises:
        InputError: one is missing, of another shape or type, or none that the family has.
    """
    needed, more = layout.shapes(), layout.biases()
    for name in needed:
        if name not in found:
            raise InputError(f"{where} lacks {what} {called(name)}; valid: files where none is missing")
    for name, (shape, kind) in found.items():
        wanted = needed.get(name, more.get(name))
        if name == HEAD and layout.tied:  # not read: the embedding is
            continue
        if wanted is None:
            if is_read(name):
                raise InputError(
                    f"{where}: {what} {called(name)} does not belong to a {layout.model_type} model; "
                    "valid: a file without it"
                )
            continue
        if shape != wanted:
            raise InputError(f"{where}: {what} {called(name)} has shape {shape}; valid: {wanted}")
        if kind not in types:
            raise InputError(
                f"{where}: {what} {called(name)} has the type {kind}, which cannot be unpacked; valid: "
                f"{', '.join(types)}"
            )


def is_read(name: str) -> bool:
    """Whether the native decoder asks for a tensor of that name of some family."""
    if name in (EMBEDDING, HEAD, NORM, "lm_head.bias"):
        return True
    inner, _, end = name.removeprefix("model.layers.").partition(".")[2].rpartition(".")
    if not name.startswith("model.layers.") or end not in ("weight", "bias"):
        return False
    norms = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")
    return inner in PROJECTIONS or (inner in norms and end == "weight")


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
        dtype, device: of what is not stored in a quantized format.
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
        layout: of it.
        take: replace its weights by empty ones as they are packed, so that they exist once.
    """

    def __init__(self, model: Any, layout: Layout, take: bool) -> None:
        self.layout, self.copies = layout, not take
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
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, path in self._where.items():
            part = self._file(path).get_slice(name)
            found[name] = tuple(part.get_shape()), part.get_dtype()
        check_tensors(layout, found, FLOATS, f"model folder {folder}", "weight")

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
        return self.raw(name).to(self.dtype)

    def raw(self, name: str) -> Tensor:
        """A tensor as the files have it."""
        return self._file(self._where[name]).get_tensor(name)

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
            self._open[path] = open_weights(path)
        return self._open[path]


def headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of each tensor of a checkpoint's safetensors files.

    Raises:
        InputError: files cannot be read.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in weight_files(folder):
        file = open_weights(path)
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            found[name] = tuple(part.get_shape()), part.get_dtype()
    return found


def weight_files(folder: Path) -> Iterator[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        InputError: there are none, or their index cannot be read or names other files than those of the
            folder.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    where = f"model folder {folder}"
    if single.is_file():
        yield single
        return
    if not index.exists():
        raise InputError(f"{where} has no safetensors files")
    names = set(weight_map(index, where).values())
    for name in sorted(names):
        if not (folder / name).is_file():
            raise InputError(f"{where} lacks {name}, which {index.name} names; valid: all of its files")
    yield from sorted(folder / name for name in names)


def head_width(config: Any) -> int:
    """d, the width of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def unstored(weight: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """A weight as a tensor of a type; one that has it already is itself."""
    return (weight.decode() if isinstance(weight, Stored) else weight).to(dtype)
