"""Mixtures of experts in files and in models of transformers: their weights one by one.

Checkpoints hold a tensor for each projection of each expert, or one of three dimensions for all of
them, under several names. Here all have the names of the first kind: matrices are read, quantized
and packed one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tokenswift.kernels.formats import Stored
from tokenswift.kernels.weights import Mixture
from tokenswift.loader.tensors import Entry
from tokenswift.types import InputError

#: the router, the gate of the expert that all rows go through, and that expert
ROUTER = "mlp.gate.weight"
SHARED_GATE = "mlp.shared_expert_gate.weight"
SHARED = "mlp.shared_expert"
#: projections of an expert
GATE = "gate_proj"
UP = "up_proj"
DOWN = "down_proj"
#: what some checkpoints call the projections of one expert
SHORT_NAMES = {"w1": GATE, "w2": DOWN, "w3": UP}
#: tensors of all experts, and which projections they hold, one below the other
JOINT_NAMES = {
    "experts.gate_up_proj": (GATE, UP),
    "experts.down_proj": (DOWN,),
    "input_linear.weight": (GATE, UP),
    "output_linear.weight": (DOWN,),
    "experts.gate_proj.weight": (GATE,),
    "experts.up_proj.weight": (UP,),
    "experts.down_proj.weight": (DOWN,),
}
ROUTER_NAMES = ("gate.weight", "router.weight", "router.layer.weight")
_LAYER_PART = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.(.+)")
_ONE_EXPERT = re.compile(r"experts\.(\d+)\.(w[123])\.weight")


def expert_name(layer: str, expert: int, projection: str) -> str:
    """The name of a projection's weight.

    Args:
        layer: what names of the layer begin with, "model.layers.0.".
    """
    return f"{layer}mlp.experts.{expert}.{projection}.weight"


def is_router(name: str) -> bool:
    """Whether a weight decides which experts a row goes through, or how much the shared one adds;
    such weights stay float numbers."""
    return name.endswith((f".{ROUTER}", f".{SHARED_GATE}"))


class Place(NamedTuple):
    """Where a tensor of a layer with experts belongs.

    Attributes:
        layer: what names of the layer begin with.
        name: its name here; "" where it holds several weights.
        projections: those that it holds of all experts, one below the other.
    """

    layer: str
    name: str
    projections: tuple[str, ...] = ()


def place_of(name: str) -> Place | None:
    """The place of a tensor by its name in a checkpoint or a model of transformers; None: it is no
    part of a mixture, or has its name here."""
    match = _LAYER_PART.fullmatch(name)
    if match is None:
        return None
    layer, part = match.groups()
    if part in ROUTER_NAMES:
        return Place(layer, layer + ROUTER)
    if part in JOINT_NAMES:
        return Place(layer, "", JOINT_NAMES[part])
    one = _ONE_EXPERT.fullmatch(part)
    if one is None:
        return None
    expert, short = one.groups()
    return Place(layer, expert_name(layer, int(expert), SHORT_NAMES[short]))


#: reads some rows of one expert's matrix from a tensor of all experts
ReadPart: TypeAlias = Callable[[Entry, int, slice], Tensor | Stored]


def read_part(entry: Entry, expert: int, rows: slice) -> Tensor | Stored:
    """Rows of an expert from a tensor of three dimensions, of which no more than that is read."""
    values = entry.get()
    if isinstance(values, Stored):
        raise InputError(f"tensor {entry.name} is quantized; valid: a tensor of float numbers")
    return values[expert, rows]


def split_entries(
    entries: Mapping[str, Entry],
    mixture: Mixture,
    hidden: int,
    where: str,
    read: ReadPart = read_part,
) -> dict[str, Entry]:
    """The tensors of a file, each weight by itself, under its name here.

    Args:
        entries: by names that `place_of` knows, or by those that they have here.
        hidden: D.
        where: the file, for messages.
        read: how a part of a tensor of all experts is read.
    Raises:
        InputError: a tensor of all experts has another shape than the config says.
    """
    split: dict[str, Entry] = {}
    for name, entry in entries.items():
        place = place_of(name)
        if place is None:
            split[name] = entry
        elif place.name:
            split[place.name] = entry
        else:
            rows, columns = _matrix(place, mixture, hidden)
            shape = (mixture.experts, rows * len(place.projections), columns)
            if entry.shape != shape:
                raise InputError(
                    f"{where}: tensor {entry.name} is {entry.shape} in {entry.kind}; valid: {shape}"
                )
            for part in _parts(place, mixture.experts, rows):
                get = partial(read, entry, part.expert, part.rows)
                split[part.name] = Entry(entry.name, (rows, columns), entry.kind, get)
    return split


def parameter_parts(name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weights that a parameter of transformers' models holds, by their names here."""
    place = place_of(name)
    if place is None:
        yield name, values
    elif place.name:
        yield place.name, values
    else:
        rows = values.shape[1] // len(place.projections)
        for part in _parts(place, values.shape[0], rows):
            yield part.name, values[part.expert, part.rows]


def joint_parameter(
    name: str, shape: Sequence[int], get: Callable[[str], Tensor | Stored | None]
) -> Tensor | Stored | None:
    """A parameter of transformers' models; None: a bias that is zero.

    Args:
        get: a weight by its name here.
    """
    place = place_of(name)
    if place is None or place.name:
        return get(name if place is None else place.name)
    experts: list[Tensor] = []
    rows = shape[1] // len(place.projections)
    for part in _parts(place, shape[0], rows):
        weight = get(part.name)
        if weight is None:
            raise InputError(f"the model has no weight {part.name}")
        experts.append(weight.decode() if isinstance(weight, Stored) else weight)
    return torch.cat(experts).view(shape)


class _Part(NamedTuple):
    """A projection's weight of one expert, and which rows of the expert's matrix it is."""

    name: str
    expert: int
    rows: slice


def _parts(place: Place, experts: int, rows: int) -> Iterator[_Part]:
    """What a tensor of all experts holds, in order."""
    for expert in range(experts):
        for number, projection in enumerate(place.projections):
            part = slice(number * rows, (number + 1) * rows)
            yield _Part(expert_name(place.layer, expert, projection), expert, part)


def _matrix(place: Place, mixture: Mixture, hidden: int) -> tuple[int, int]:
    """Rows and columns of one projection."""
    is_down = place.projections == (DOWN,)
    return (hidden, mixture.inner) if is_down else (mixture.inner, hidden)


def expert_shapes(layer: str, mixture: Mixture, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of a layer with experts, its attention and norms aside."""
    shapes: dict[str, tuple[int, ...]] = {layer + ROUTER: (mixture.experts, hidden)}
    for expert in range(mixture.experts):
        shapes[expert_name(layer, expert, GATE)] = (mixture.inner, hidden)
        shapes[expert_name(layer, expert, UP)] = (mixture.inner, hidden)
        shapes[expert_name(layer, expert, DOWN)] = (hidden, mixture.inner)
    if mixture.shared:
        shapes[f"{layer}{SHARED}.{GATE}.weight"] = (mixture.shared, hidden)
        shapes[f"{layer}{SHARED}.{UP}.weight"] = (mixture.shared, hidden)
        shapes[f"{layer}{SHARED}.{DOWN}.weight"] = (hidden, mixture.shared)
    if mixture.shared_gate:
        shapes[layer + SHARED_GATE] = (1, hidden)
    return shapes
