"""Where the native decoder's weights come from: modules of a loaded transformers model, or a model's files.

Both give tensors by the names that checkpoints use, and a `config.Layout` that says which there are. Names,
shapes and types of a file's tensors are held against its table before anything is read
(:func:`check_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tokenswift.files import weight_map
from tokenswift.kernels.weights import FORMATS, Stored
from tokenswift.loader.config import EMBEDDING, HEAD, Layout
from tokenswift.loader.find import refused_as
from tokenswift.types import InputError

INDEX = "model.safetensors.index.json"
#: types of numbers in safetensors files that weights are made of
FLOATS = ("F32", "BF16", "F16", "F64", "F8_E4M3", "F8_E5M2")


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
    needed = layout.shapes()
    for name in needed:
        if name not in found and not name.endswith("o_proj.bias"):  # without one it is zero
            raise InputError(f"{where} lacks {what} {called(name)}; valid: files where none is missing")
    for name, (shape, kind) in found.items():
        wanted = needed.get(name)
        if wanted is None:
            wrong = f"does not belong to a {layout.model_type} model; valid: a file without it"
        elif shape != wanted:
            wrong = f"has shape {shape}; valid: {wanted}"
        elif kind not in types:
            wrong = f"has the type {kind}, which cannot be unpacked; valid: {', '.join(types)}"
        else:
            continue
        raise InputError(f"{where}: {what} {called(name)} {wrong}")


class Weights:
    """Tensors of a model by name: those of a layout, and biases.

    Attributes:
        copies: whether what is packed stands beside the weights themselves.
    """

    layout: Layout
    copies = False

    def get(self, name: str) -> Tensor | Stored | None:
        """A tensor, or a weight as a file holds it; None: the model has none of that name."""
        raise NotImplementedError

    def rest(self) -> None:
        """Told between layers: memory that nobody needs may go, such as what was read of a file."""


class StoredWeights(Weights):
    """Weights of a model's files.

    Attributes:
        dtype, device: of what is not stored in a quantized format.
    """

    dtype: torch.dtype
    device = torch.device("cpu")

    def names(self) -> list[str]:
        """The names of all tensors in the files, in order."""
        raise NotImplementedError

    def values(self) -> Iterator[tuple[str, Tensor | Stored]]:
        """The tensors that a decoder reads, by name and in order."""
        raise NotImplementedError


class ModuleWeights(Weights):
    """Weights of a loaded transformers model, which stays as it is.

    Args:
        model: for which `decoder.fits`.
        layout: of it.
    """

    copies = True

    def __init__(self, model: Any, layout: Layout) -> None:
        self.layout, self._model = layout, model

    def get(self, name: str) -> Tensor | None:
        """See :class:`Weights`."""
        try:
            found = attrgetter(name)(self._model)
        except AttributeError:
            return None
        return None if found is None else found.detach()


class FileWeights(StoredWeights):
    """Weights of a checkpoint's safetensors files, read in place.

    Args:
        folder: of the checkpoint; its name is what messages call the model.
        layout: which weights there must be.
        dtype: the type that they are given in.
    Raises:
        InputError: files or weights are missing or damaged, or shapes are others.
    """

    def __init__(self, folder: Path, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype, self.folder = layout, dtype, folder
        self._open: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        self._table = layout.shapes().keys()
        for path in weight_files(folder):
            file = open_weights(path)
            for name in file.keys():  # noqa: SIM118
                self._where[name] = path
                if name in self._table:
                    part = file.get_slice(name)
                    found[name] = tuple(part.get_shape()), part.get_dtype()
        check_tensors(layout, found, FLOATS, f"model folder {folder}", "weight")

    def names(self) -> list[str]:
        """See :class:`StoredWeights`."""
        return sorted(self._where)

    def get(self, name: str) -> Tensor | None:
        """See :class:`Weights`."""
        name = EMBEDDING if name == HEAD and self.layout.tied else name
        return self.raw(name).to(self.dtype) if name in self._where else None

    def values(self) -> Iterator[tuple[str, Tensor | Stored]]:
        """See :class:`StoredWeights`; as the files have them."""
        return ((name, self.raw(name)) for name in sorted(self._table & self._where.keys()))

    def raw(self, name: str) -> Tensor:
        """A tensor as the files have it."""
        path = self._where[name]
        if path not in self._open:
            self._open[path] = open_weights(path)
        return self._open[path].get_tensor(name)

    def rest(self) -> None:
        """See :class:`Weights`."""
        self._open.clear()


def weight_files(folder: Path) -> Iterator[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        InputError: there are none, or their index cannot be read or names other files than those of the
            folder.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
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


def unstored(weight: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """A weight as a tensor of a type; one that has it already is itself."""
    return (weight.decode() if isinstance(weight, Stored) else weight).to(dtype)


#: more than any model's file has: bytes of a header, tensors
MOST_HEADER, MOST_TENSORS = 1 << 24, 1 << 16


def open_weights(path: Path, what: str = "weight file") -> Any:
    """A safetensors file, opened for reading; its library has checked that tensors lie apart and in the file.

    Args:
        what: the file is, for messages.
    Raises:
        InputError: it cannot be read, or its header is larger than a model's.
    """
    with refused_as(f"{what} {path} cannot be read as safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        if MOST_HEADER < size < path.stat().st_size:
            raise InputError(f"{what} {path} has a header of {size:,} bytes; valid: up to {MOST_HEADER:,}")
        made = safe_open(path, framework="pt")
        count = len(made.keys())
    if count > MOST_TENSORS:
        raise InputError(f"{what} {path} has {count:,} tensors; valid: up to {MOST_TENSORS:,}")
    return made


class Recoded(StoredWeights):
    """Weights of a model's files, its matrices stored otherwise.

    Args:
        weights: of the files.
        kind: one of `load.WEIGHTS`, but for "stored".
    """

    def __init__(self, weights: StoredWeights, kind: str) -> None:
        self._weights, self._kind = weights, kind
        self.layout, self.dtype = weights.layout, weights.dtype
        self.names, self.values, self.rest = weights.names, weights.values, weights.rest

    def get(self, name: str) -> Tensor | Stored | None:
        """See :class:`Weights`."""
        found = self._weights.get(name)
        if found is None or len(found.shape) != 2:
            return found
        if self._kind not in FORMATS:
            return unstored(found, getattr(torch, self._kind))
        format = FORMATS[self._kind]
        if isinstance(found, Stored) and found.format is format:
            return found
        if found.shape[1] % format.block:
            raise InputError(
                f"weights is {self._kind!r}, but {name} has {found.shape[1]} columns; valid: a model whose "
                f"columns are a multiple of {format.block}, or stored"
            )
        return Stored(format, format.encode(unstored(found, torch.float32)))
