"""Mixtures of experts in files and in models of transformers: their weights one by one.

Checkpoints hold a tensor for each projection of each expert, or one of three dimensions for all of
them, under several names. Here all have the names of the first kind: matrices are read, quantized
and packed one at a time.

gpt-oss holds gate and up row by row in turn: as matrices the other way round, or in blocks of
MXFP4, whose numbers and scales are two tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from jaxtyping import UInt8
from torch import Tensor

from tokenswift.kernels.formats import MXFP4, Stored
from tokenswift.kernels.weights import Mixture
from tokenswift.loader.tensors import Entry
from tokenswift.types import InputError

#: the router, the gate of the expert that all rows go through, and that expert
ROUTER = "mlp.gate.weight"
ROUTER_BIAS = "mlp.gate.bias"
SHARED_GATE = "mlp.shared_expert_gate.weight"
SHARED = "mlp.shared_expert"
#: what is added to the scores by which experts are chosen
CHOICE_BIAS_NAME = "expert_bias"
CHOICE_BIAS = f"mlp.{CHOICE_BIAS_NAME}"
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
    "experts.gate_up_proj.weight": (GATE, UP),
    "input_linear.weight": (GATE, UP),
    "output_linear.weight": (DOWN,),
    "experts.gate_proj.weight": (GATE,),
    "experts.up_proj.weight": (UP,),
    "experts.down_proj.weight": (DOWN,),
    "experts.gate_proj.bias": (GATE,),
    "experts.up_proj.bias": (UP,),
    "experts.down_proj.bias": (DOWN,),
}
#: the same of a family whose projections stand row by row in turn (`ExpertFields.in_turn`)
IN_TURN_NAMES = {
    "experts.gate_up_proj": (GATE, UP),
    "experts.down_proj": (DOWN,),
    "experts.gate_up_proj_bias": (GATE, UP),
    "experts.down_proj_bias": (DOWN,),
}
#: ends of the names of a weight's numbers and scales in MXFP4
BLOCKS = "_blocks"
SCALES = "_scales"
ROUTER_NAMES = ("gate.weight", "router.weight", "router.layer.weight")
ROUTER_BIAS_NAME = "router.bias"
_LAYER_PART = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe|feed_forward)\.(.+)")
_ONE_EXPERT = re.compile(r"experts\.(\d+)\.(w[123])\.weight")


def expert_name(layer: str, expert: int, projection: str) -> str:
    """The name of a projection's weight.

    Args:
        layer: what names of the layer begin with, "model.layers.0.".
    """
    return f"{layer}mlp.experts.{expert}.{projection}.weight"


def bias_name(layer: str, expert: int, projection: str) -> str:
    """The name of a projection's bias."""
    return f"{layer}mlp.experts.{expert}.{projection}.bias"


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
        in_turn: whether rows of its projections take turns instead.
        is_bias: whether it holds biases.
    """

    layer: str
    name: str
    projections: tuple[str, ...] = ()
    in_turn: bool = False
    is_bias: bool = False

    def parts(self, experts: int, rows: int) -> Iterator[Part]:
        """What it holds, in order.

        Args:
            rows: of one projection.
        """
        name_of = bias_name if self.is_bias else expert_name
        for expert in range(experts):
            for number, projection in enumerate(self.projections):
                part = slice(number * rows, (number + 1) * rows)
                if self.in_turn:
                    part = slice(number, None, len(self.projections))
                yield Part(name_of(self.layer, expert, projection), expert, part)

    def shape(self, mixture: Mixture, hidden: int) -> tuple[int, ...]:
        """The shape of one projection."""
        is_down = self.projections == (DOWN,)
        rows = hidden if is_down else mixture.inner
        columns = mixture.inner if is_down else hidden
        return (rows,) if self.is_bias else (rows, columns)


class Part(NamedTuple):
    """A projection's weight or bias of one expert, and which rows of all the expert's it is."""

    name: str
    expert: int
    rows: slice


def place_of(name: str, in_turn: bool = False) -> Place | None:
    """The place of a tensor by its name in a checkpoint or a model of transformers; None: it is no
    part of a mixture, or has its name here.

    Args:
        in_turn: whether the family's projections stand row by row in turn.
    """
    match = _LAYER_PART.fullmatch(name)
    if match is None:
        return None
    layer, part = match.groups()
    if part in ROUTER_NAMES:
        return Place(layer, layer + ROUTER)
    if part == ROUTER_BIAS_NAME:
        return Place(layer, layer + ROUTER_BIAS)
    is_bias = part.endswith("bias")
    if in_turn and part in IN_TURN_NAMES:
        return Place(layer, "", IN_TURN_NAMES[part], in_turn=True, is_bias=is_bias)
    if part in JOINT_NAMES:
        return Place(layer, "", JOINT_NAMES[part], is_bias=is_bias)
    one = _ONE_EXPERT.fullmatch(part)
    if one is None:
        return None
    expert, short = one.groups()
    return Place(layer, expert_name(layer, int(expert), SHORT_NAMES[short]))


#: reads some rows of one expert's matrix, or of its bias, from a tensor of all experts
ReadPart: TypeAlias = Callable[[Entry, Part], Tensor | Stored]


def read_part(entry: Entry, part: Part) -> Tensor | Stored:
    """Rows of an expert from a tensor of two or three dimensions, of which no more than that is
    read."""
    values = entry.get()
    if isinstance(values, Stored):
        raise InputError(f"tensor {entry.name} is quantized; valid: a tensor of float numbers")
    return values[part.expert, part.rows]


def _read_turned(entry: Entry, part: Part) -> Tensor | Stored:
    """The same of a tensor that holds matrices the other way round."""
    values = entry.get()
    if isinstance(values, Stored):
        raise InputError(f"tensor {entry.name} is quantized; valid: a tensor of float numbers")
    return values[part.expert].T[part.rows]


def _read_blocks(numbers: Entry, scales: Entry, part: Part) -> Stored:
    """The same of two tensors of MXFP4 (`microscaled`)."""
    parts: list[Tensor] = []
    for entry in (numbers, scales):
        values = entry.get()
        if isinstance(values, Stored):
            raise InputError(f"tensor {entry.name} is quantized; valid: a tensor of bytes")
        parts.append(values[part.expert, part.rows])
    return microscaled(*parts)


def microscaled(numbers: UInt8[Tensor, "N B 16"], scales: UInt8[Tensor, "N B"]) -> Stored:
    """A weight from the numbers and scales of its blocks: here a block's scale stands before its
    numbers, and a byte holds two that are 16 apart, not neighbours."""
    places = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
    halves = places[..., :16] | places[..., 16:] << 4
    return Stored(MXFP4, torch.cat((scales[..., None], halves), -1).flatten(-2))


def split_entries(
    entries: Mapping[str, Entry], layout: MixtureLayout, where: str, read: ReadPart = read_part
) -> dict[str, Entry]:
    """The tensors of a file, each weight by itself, under its name here.

    Args:
        entries: by names that `place_of` knows, or by those that they have here.
        layout: of a model whose layers have experts.
        where: the file, for messages.
        read: how a part of a tensor of all experts is read.
    Raises:
        InputError: a tensor of all experts has another shape than the config says.
    """
    split: dict[str, Entry] = {}
    for name, entry in entries.items():
        numbers = name.removesuffix(BLOCKS)
        scales = entries.get(numbers + SCALES)
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in entries:
            continue
        if numbers != name and scales is not None:
            split.update(_parts_in_blocks(numbers, entry, scales, layout, where))
            continue
        place = place_of(name, layout.in_turn)
        if place is None:
            split[name] = entry
        elif place.name:
            split[place.name] = entry
        else:
            split.update(_parts_of(place, entry, layout, where, read))
    return split


class MixtureLayout(Protocol):
    """What of a model's layout its experts depend on (`layout.Layout`)."""

    @property
    def mixture(self) -> Mixture | None:
        """How rows go through experts."""
        ...

    @property
    def hidden_size(self) -> int:
        """D."""
        ...

    @property
    def in_turn(self) -> bool:
        """Whether gate and up stand row by row in turn."""
        ...


def _mixture_of(layout: MixtureLayout) -> Mixture:
    if layout.mixture is None:
        raise ValueError("the layout has no mixture; valid: one whose layers have experts")
    return layout.mixture


def _parts_of(
    place: Place, entry: Entry, layout: MixtureLayout, where: str, read: ReadPart
) -> Iterator[tuple[str, Entry]]:
    """What a tensor of all experts holds."""
    mixture = _mixture_of(layout)
    rows, *columns = place.shape(mixture, layout.hidden_size)
    joint = [rows * len(place.projections), *columns]
    is_turned = place.in_turn and not place.is_bias
    _check_shape(entry, (mixture.experts, *(reversed(joint) if is_turned else joint)), where)
    if is_turned:
        read = _read_turned
    for part in place.parts(mixture.experts, rows):
        yield part.name, Entry(entry.name, (rows, *columns), entry.kind, partial(read, entry, part))


def _parts_in_blocks(
    name: str, numbers: Entry, scales: Entry, layout: MixtureLayout, where: str
) -> Iterator[tuple[str, Entry]]:
    """What two tensors of MXFP4 hold together.

    Args:
        name: what their names have in common.
    """
    place = place_of(name, layout.in_turn)
    if place is None or not place.in_turn or place.is_bias:
        raise InputError(
            f"{where}: tensor {numbers.name} holds blocks of MXFP4; valid: of experts of gpt-oss"
        )
    mixture = _mixture_of(layout)
    rows, columns = place.shape(mixture, layout.hidden_size)
    if columns % MXFP4.block:
        raise InputError(
            f"{where}: tensor {numbers.name} holds rows of {columns} numbers in blocks; valid: "
            f"rows of a multiple of {MXFP4.block}"
        )
    shape = (mixture.experts, rows * len(place.projections), columns // MXFP4.block)
    _check_shape(numbers, (*shape, MXFP4.block // 2), where, "U8")
    _check_shape(scales, shape, where, "U8")
    for part in place.parts(mixture.experts, rows):
        read = partial(_read_blocks, numbers, scales, part)
        yield part.name, Entry(numbers.name, (rows, columns), MXFP4.name.upper(), read)


def _check_shape(entry: Entry, shape: tuple[int, ...], where: str, kind: str = "") -> None:
    """Refuse a tensor of another shape, or of another type where one is given."""
    if entry.shape == shape and entry.kind == (kind or entry.kind):
        return
    valid = f"{shape} in {kind}" if kind else f"{shape}"
    raise InputError(
        f"{where}: tensor {entry.name} is {entry.shape} in {entry.kind}; valid: {valid}"
    )


def parameter_parts(
    name: str, values: Tensor, in_turn: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The weights that a parameter of transformers' models holds, by their names here.

    Args:
        in_turn: as of `place_of`.
    """
    place = place_of(name, in_turn)
    if place is None:
        yield name, values
    elif place.name:
        yield place.name, values
    else:
        if place.in_turn and not place.is_bias:
            values = values.mT
        rows = values.shape[1] // len(place.projections)
        for part in place.parts(values.shape[0], rows):
            yield part.name, values[part.expert, part.rows]


def joint_parameter(
    name: str,
    shape: Sequence[int],
    get: Callable[[str], Tensor | Stored | None],
    in_turn: bool = False,
) -> Tensor | Stored | None:
    """A parameter of transformers' models; None: a bias that is zero.

    Args:
        get: a weight by its name here.
        in_turn: as of `place_of`.
    """
    place = place_of(name, in_turn)
    if place is None or place.name:
        return get(name if place is None else place.name)
    is_turned = place.in_turn and not place.is_bias
    rows = shape[-1 if is_turned else 1] // len(place.projections)
    values: Tensor | None = None
    for part in place.parts(shape[0], rows):
        weight = get(part.name)
        if weight is None:
            raise InputError(f"the model has no weight {part.name}")
        dense = weight.decode() if isinstance(weight, Stored) else weight
        if values is None:
            values = dense.new_empty(tuple(shape))
        (values.mT if is_turned else values)[part.expert, part.rows] = dense
    return values


def expert_shapes(layer: str, mixture: Mixture, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of a layer with experts, its attention and norms aside."""
    shapes: dict[str, tuple[int, ...]] = {layer + ROUTER: (mixture.experts, hidden)}
    for expert in range(mixture.experts):
        shapes[expert_name(layer, expert, GATE)] = (mixture.inner, hidden)
        shapes[expert_name(layer, expert, UP)] = (mixture.inner, hidden)
        shapes[expert_name(layer, expert, DOWN)] = (hidden, mixture.inner)
    if mixture.choice_bias:
        shapes[layer + CHOICE_BIAS] = (mixture.experts,)
    if mixture.biased:
        shapes[layer + ROUTER_BIAS] = (mixture.experts,)
        for expert in range(mixture.experts):
            shapes[bias_name(layer, expert, GATE)] = (mixture.inner,)
            shapes[bias_name(layer, expert, UP)] = (mixture.inner,)
            shapes[bias_name(layer, expert, DOWN)] = (hidden,)
    if mixture.shared:
        shapes[f"{layer}{SHARED}.{GATE}.weight"] = (mixture.shared, hidden)
        shapes[f"{layer}{SHARED}.{UP}.weight"] = (mixture.shared, hidden)
        shapes[f"{layer}{SHARED}.{DOWN}.weight"] = (hidden, mixture.shared)
    if mixture.shared_gate:
        shapes[layer + SHARED_GATE] = (1, hidden)
    return shapes
