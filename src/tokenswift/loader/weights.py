"""Weights by the names of transformers' checkpoints, from a model's files or a loaded model.

Names, shapes and types of a file's tensors are held against the table of a `Layout` before
anything is read (`tensors.check_tensors`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from tokenswift.kernels.formats import FORMATS, MXFP4, Stored
from tokenswift.loader.drafting import (
    BEGINNING,
    drafting_layout,
    drafting_names,
    drafting_shapes,
)
from tokenswift.loader.experts import CHOICE_BIAS_NAME, is_router, parameter_parts, split_entries
from tokenswift.loader.fused import split_fused, split_tensors
from tokenswift.loader.layout import EMBEDDING, HEAD, Layout
from tokenswift.loader.multimodal import text_name
from tokenswift.loader.recurrent import our_name, renamed
from tokenswift.loader.safetensors_file import SafetensorsFile, weight_files
from tokenswift.loader.tensors import FLOATS, Entry, check_tensors, dense
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
#: what some checkpoints hold besides weights: frequencies of positions, which the config says, too
FREQUENCIES = "rotary_emb.inv_freq"


class Weights:
    """Weights of a model's files.

    Args:
        layout: which weights there must be.
        dtype: the type that those are given in which are not stored in a quantized format.
        entries: tensors of the files by their names in transformers.
        kind: what matrices are stored as in memory, one of `config.loading.Weights`.
        drafting: tensors of a layer that drafts (`drafting.drafting_names`).

    Attributes:
        copies: whether what is packed stands beside the weights themselves.
    """

    copies = False

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        entries: Mapping[str, Entry],
        kind: str = "stored",
        drafting: Mapping[str, Entry] | None = None,
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.entries = entries
        self.kind = kind
        self.drafting = drafting or {}

    def raw(self, name: str) -> Tensor | Stored | None:
        """A tensor, or a weight in a quantized format, as the files have it; None: there is
        none."""
        entry = self.entries.get(EMBEDDING if name == HEAD and self.layout.tied else name)
        return None if entry is None else entry.get()

    def get(self, name: str) -> Tensor | Stored | None:
        """A weight in the type that is asked for, matrices stored as is asked for; None: there is
        none.

        Raises:
            InputError: a matrix has no whole blocks of a format.
        """
        weight = self.raw(name)
        if isinstance(weight, Tensor):
            weight = weight.to(self.dtype)
        if weight is None or self.kind == "stored" or len(weight.shape) != 2 or is_router(name):
            return weight
        form = FORMATS.get(self.kind)
        if form is None:
            return unstored(weight, getattr(torch, self.kind))
        if isinstance(weight, Stored) and weight.format in (form, MXFP4):
            return weight  # of four bits, which would be rounded once more
        columns = weight.shape[1]
        if columns % form.block:
            raise InputError(
                f"weights is {self.kind!r}, but {name} has {columns} columns; valid: a model whose "
                f"columns are a multiple of {form.block}, or stored"
            )
        return Stored(form, form.encode(unstored(weight, torch.float32)))

    def needed(self, keeps: Callable[[str, torch.dtype], bool]) -> int:
        """Bytes of the weights in memory.

        Args:
            keeps: whether products of a type read a format as it is stored
                (`kernels.base.Backend.keeps`).
        """
        nbytes = 0.0
        for name, entry in self.entries.items():
            is_stored = self.kind == "stored" or len(entry.shape) != 2 or is_router(name)
            is_stored = is_stored or entry.kind == MXFP4.name.upper()
            kind = entry.kind if is_stored else self.kind
            form = FORMATS.get(kind.lower())
            bytes_a_number = float(self.dtype.itemsize)
            if form is not None and keeps(form.name, self.dtype):
                bytes_a_number = form.nbytes / form.block
            nbytes += math.prod(entry.shape) * bytes_a_number
        return int(nbytes)


class ModuleWeights:
    """Weights of a loaded transformers model, which stays as it is.

    Args:
        model: for which `decoder.fits`.
        layout: of it.
    """

    copies = True

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        tensors = chain(model.named_parameters(remove_duplicate=False), _biases(model))
        named = renamed(tensors, layout.family)
        self._parameters: dict[str, Tensor] = {}
        for name, parameter in split_tensors(named, layout) if layout.family.fused else named:
            values = parameter.detach()
            if layout.mixture is None:
                self._parameters[name] = values
            else:
                self._parameters.update(parameter_parts(name, values, layout.in_turn))

    def get(self, name: str) -> Tensor | None:
        """A weight or bias by its name; None: there is none."""
        return self._parameters.get(name)

    def raw(self, name: str) -> Tensor | None:
        """The same."""
        return self.get(name)


def _biases(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Biases of the choice of experts, which are no parameters."""
    for name, tensor in model.named_buffers():
        if name.endswith(CHOICE_BIAS_NAME):
            yield name, tensor


def unstored(weight: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """A weight as a tensor of a type; one that has it already is itself."""
    return (weight.decode() if isinstance(weight, Stored) else weight).to(dtype)


def stored_names(folder: Path) -> set[str]:
    """The names of all tensors of a checkpoint's files.

    Raises:
        InputError: files are missing or damaged.
    """
    return {name for path in weight_files(folder) for name in SafetensorsFile(path).entries}


def weights_in(folder: Path, layout: Layout, dtype: torch.dtype, kind: str) -> Weights | None:
    """Weights of a checkpoint's files; None where they have other names, which transformers may
    know.

    Raises:
        InputError: files are missing or damaged, or shapes or types are others.
    """
    entries: dict[str, Entry] = {}
    for path in weight_files(folder):
        for name, entry in SafetensorsFile(path).entries.items():
            ours = text_name(name)
            if ours is not None and not name.endswith(FREQUENCIES):
                entries[our_name(ours, layout.family)] = entry
    if layout.family.fused:
        entries = split_fused(entries, layout, f"model folder {folder}")
    if layout.tied and _head_is_embedding(entries):
        del entries[HEAD]
    drafting = {name: entry for name, entry in entries.items() if name.startswith(BEGINNING)}
    entries = {name: entry for name, entry in entries.items() if name not in drafting}
    drafting = drafting_names(drafting)
    if layout.mixture is not None:
        entries = split_entries(entries, layout, f"model folder {folder}")
        with suppress(InputError):  # of another shape, it is of another kind
            drafting = split_entries(drafting, layout, f"model folder {folder}")
    shapes = layout.shapes()
    if entries.keys() != shapes.keys():
        return None
    check_tensors(entries, shapes, (*FLOATS, MXFP4.name.upper()), f"model folder {folder}")
    return Weights(layout, dtype, entries, kind, drafting)


def drafting_weights(weights: Weights) -> Weights | None:
    """The weights of the layer; None where there is none, or another kind of it than runs here, of
    which a WARNING tells.

    Args:
        weights: the model's.
    """
    entries = weights.drafting
    if not entries:
        return None
    shapes = {name: entry.shape for name, entry in entries.items()}
    layout = drafting_layout(weights.layout)
    if shapes == drafting_shapes(layout):
        return Weights(layout, weights.dtype, entries, weights.kind)
    logger.warning(
        "the model brings a layer that drafts, of a kind that does not run here; it is left out"
    )
    return None


def _head_is_embedding(entries: Mapping[str, Entry]) -> bool:
    """Whether files hold an LM head that is their embedding once more."""
    head = entries.get(HEAD)
    embedding = entries.get(EMBEDDING)
    if head is None or embedding is None:
        return False
    if head.shape != embedding.shape or head.kind != embedding.kind:
        return False
    return torch.equal(dense(head), dense(embedding))
