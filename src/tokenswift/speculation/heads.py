"""Draft heads: small modules that guess further tokens from one hidden state of the model, and
their files.

All states are hidden states *before* the base model's final norm, (m, D). From the state of
position t the base model predicts token t+1, and head i (counted from 0) predicts token t+2+i.
A head's state comes from :meth:`Heads.advance`; the base model's own LM head, applied by the
caller to :meth:`Heads.normed` of it, gives the head's logits.

A heads file is one safetensors file: the tensors of :class:`Heads` under ``heads.``, a sample of
    the base
model's weights as ``base.sample``, and a JSON object under ``tokenswift_heads`` in the header's
metadata. A matrix is of floats, or of bytes: rows of Q8_0 blocks as GGUF files hold them. The
sample is the base's identity. It is compared with a tolerance, so that a base model cast to another
type still matches, and a fine-tuned one does not.

Published checkpoints are folders: a whole transformers checkpoint with the paper's linear heads in
    it, as
``model.medusa_layers.{i}…``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from jaxtyping import Float
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tokenswift.checks import shown
from tokenswift.config.loading import HEAD_KINDS
from tokenswift.files import MOST_CONFIG, line_of, object_in, replacing
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import check_ids
from tokenswift.kernels.formats import Q8_0, Stored
from tokenswift.loader.default_model import left_out, rivals_note, shipped_files, trained_files
from tokenswift.loader.find import HEADS, HUB_ID, cached, fetch
from tokenswift.loader.identity import TOLERANCE, BaseIdentity, base_of, base_of_weights
from tokenswift.loader.weights import Entry, entries_of, open_weights, unstored
from tokenswift.speculation.files import read_tensors, tensors_in
from tokenswift.types import InputError

_Size = Annotated[int, Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What it takes to build a set of heads. Files' are held to the bounds that the types name.

    Attributes:
        kind: "linear", "conditioned" or "medusa".
        count: number of heads; a shared step (conditioned) drafts any number of levels.
        hidden_size: D of the base model.
        vocab_size: V of the base model.
        inner: width of the hidden layer (conditioned); 0 for none.
        eps: ε of the norms.
    """

    kind: Annotated[str, Meta(pattern=f"^({'|'.join(HEAD_KINDS)})$")]
    count: Annotated[int, Meta(ge=1, le=64)]
    hidden_size: _Size
    vocab_size: _Size
    inner: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    eps: Annotated[float, Meta(ge=0, le=1)] = 1e-5


def _layer(config: HeadsConfig) -> nn.ModuleDict:
    """The parts of a head, or of the step that conditioned heads share; linear ones have the names
    of the published checkpoints."""
    width, inner, parts = config.hidden_size, config.inner, dict[str, nn.Module]()

    def linear(columns: int, rows: int, bias: bool = True) -> nn.Linear:
        return nn.Linear(columns, rows, bias, dtype=torch.float32)

    if config.kind == "conditioned":
        norms = ("first_norm", "state_norm", "base_norm", "embed_norm")
        parts["linear"] = linear(3 * width, width)
        if inner:
            parts |= {"inner": linear(3 * width, inner), "outer": linear(inner, width, bias=False)}
    elif config.kind == "linear":
        norms, parts["linear"] = (
            ("input_layernorm", "post_layernorm"),
            linear(width, width, bias=False),
        )
    else:
        norms, parts["blocks"] = ("final_norm",), nn.ModuleList([linear(width, width)])
    return nn.ModuleDict(
        {name: nn.RMSNorm(width, config.eps, dtype=torch.float32) for name in norms} | parts
    )


class _Kernel(nn.Module):
    """A linear layer or a norm on a backend's kernels, its weights packed."""

    def __init__(self, layer: nn.Linear | nn.RMSNorm, backend: Backend, int8: bool) -> None:
        super().__init__()
        weight = layer.weight.detach()
        if isinstance(layer, nn.RMSNorm):
            factors, eps = weight.float().contiguous(), layer.eps or 0.0
            self._run = lambda states: backend.norm(states, factors, eps, weight.dtype)
        else:
            packed = backend.pack_for_drafts(weight, int8)
            bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
            self._run = lambda states: backend.draft_product(states, packed, bias)

    def forward(self, states: Tensor) -> Tensor:
        return self._run(states)


class Heads(nn.Module):
    """A set of draft heads for one base model: conditioned ones share a step, others have a layer
    each.

    Attributes:
        frequent: token ids worth drafting, most of the training text; None: the whole vocabulary.
        calibration: weights of `spec.control` that fit these heads; None: the library's.
        source: where they come from (a file, a folder, "… (shipped)"); "" when a program made them.
        notes: how they were trained, from their file: tokens, steps and the like.
        kind, count: of the heads; see :class:`HeadsConfig`.
        on_kernels: whether a backend's kernels compute them (see :meth:`packed`).
        conditioned: whether a head needs the embedding of the token drafted before its own.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config, self.kind, self.count = config, config.kind, config.count
        self.conditioned = config.kind == "conditioned"
        self.frequent: Tensor | None = None
        self.calibration: dict[str, list[list[float]]] | None = None
        self.source = ""
        self.notes: dict[str, Any] = {}
        self.on_kernels = False
        count = 1 if self.conditioned else config.count
        self.layers: Any = nn.ModuleList(_layer(config) for _ in range(count))

    def packed(self, backend: Backend, int8: bool) -> Heads:
        """The same heads on a backend's kernels, where it has some for them; ``int8``: of
        products."""
        weight = next(self.parameters())
        fits = weight.dtype in (torch.float32, torch.bfloat16) and weight.device == backend.device
        if not (
            fits and backend.fused and self.config.hidden_size % 2 == self.config.inner % 2 == 0
        ):
            return self
        made = copy.deepcopy(self)
        made.on_kernels = True
        for name, part in list(made.named_modules()):
            if isinstance(part, nn.Linear | nn.RMSNorm):
                above, _, own = name.rpartition(".")
                setattr(made.get_submodule(above), own, _Kernel(part, backend, int8))
        return made

    def advance(
        self,
        i: int,
        previous: Float[Tensor, "m D"],
        base: Float[Tensor, "m D"],
        embeds: Float[Tensor, "m D"] | None,
    ) -> Float[Tensor, "m D"]:
        """State of head i from the state of the head before it.

        Args:
            i: the head, counted from 0.
            previous: state of head i-1; for i = 0 the base state itself.
            base: hidden state of the base model (before its final norm).
            embeds: input embedding of the token just before the one that head i predicts
                (conditioned heads only; others ignore it).
        """
        if not self.on_kernels:  # which take any type
            kind = next(self.parameters()).dtype
            previous, base = previous.to(kind), base.to(kind)
            embeds = None if embeds is None else embeds.to(kind)
        layer = self.layers[0 if self.conditioned else i]
        if self.kind == "linear":
            return previous + layer["linear"](layer["input_layernorm"](previous))
        if self.kind == "medusa":  # they stand side by side: none looks at another
            state = layer["final_norm"](base)
            return state + nn.functional.silu(layer["blocks"][0](state))
        if embeds is None:
            raise ValueError("embeds is None; conditioned heads need the drafted token's embedding")
        x = self.inputs(previous, base, embeds, i == 0)
        state = layer["linear"](x)
        return state + layer["outer"](torch.relu(layer["inner"](x))) if self.config.inner else state

    def inputs(
        self, previous: Tensor, base: Tensor, embeds: Tensor, first: bool
    ) -> Float[Tensor, "m x"]:
        """What the step of conditioned heads reads. The state it makes lives where the LM head
        reads (after the final norm), so no norm follows and its length can say how sure the head
        is."""
        layer = self.layers[0]
        state = layer["first_norm" if first else "state_norm"](previous)
        return torch.cat((state, layer["base_norm"](base), layer["embed_norm"](embeds)), dim=-1)

    def normed(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m D"]:
        """What the base model's LM head reads to give head i's logits: linear ones have a norm
        each."""
        return self.layers[i]["post_layernorm"](states) if self.kind == "linear" else states


# ---- files ---------------------------------------------------------------------------------------


METADATA_KEY = "tokenswift_heads"
OWN, PUBLISHED = "heads.", "model.medusa_"  # what tensors' names begin with
SAMPLE, FREQUENT = "base.sample", "draft.frequent"
MOST_NAME = 200  # characters of a name in messages
#: greatest distance of a model from the one that shipped heads were made for: that one's weights
#: are those of a Q4_1 file, rounding to which moves weights by .08 of their size; the model before
#: it gets them, too
ROUNDED = 0.15


@dataclass(frozen=True, slots=True)
class HeadsHost:
    """The model that heads are to draft for.

    Attributes:
        base: its identity.
        dtype, device: of the weights.
        place: the folder or hub id that it was loaded from, "" where it came from a program.
    """

    base: BaseIdentity
    dtype: torch.dtype
    device: torch.device
    place: str


def host_of(model: Any) -> HeadsHost:
    """A loaded transformers causal LM as heads see it."""
    place = str(getattr(model.config, "_name_or_path", "") or "")
    return HeadsHost(base_of(model), model.dtype, model.device, place)


# ---- files ---------------------------------------------------------------------------------------

_Row = Annotated[list[float], msgspec.Meta(min_length=6, max_length=6)]
_Rows = Annotated[list[_Row], msgspec.Meta(min_length=2, max_length=2)]


class _Header(msgspec.Struct):
    """What a heads file says of itself.

    Attributes:
        version: of the format.
        heads: what they are made of.
        base: the model's name.
        notes: how they were trained.
        calibration: weights of `spec.control`, two rows of six a source.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    heads: HeadsConfig
    base: str = "?"
    notes: dict[str, Any] | None = None
    calibration: dict[str, _Rows] | None = None


def save_heads(
    heads: Heads, path: str | Path, base: BaseIdentity, notes: dict[str, Any] | None = None
) -> None:
    """Write a heads file, matrices of whole blocks in Q8_0 and all else in float32; a failure
    leaves no half-written file behind.

    Args:
        heads: the heads.
        path: the file; by custom it ends in ``.heads.safetensors``.
        base: the identity of their base model, from `loader.weights.base_of`.
        notes: JSON values kept in the header (how the heads were trained).
    Raises:
        InputError: a weight is not finite, or the file cannot be written.
    """
    tensors = {
        OWN + k: v.detach().float().cpu().contiguous() for k, v in heads.state_dict().items()
    }
    tensors[SAMPLE] = base.sample.float().contiguous()
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"heads tensor {name} is not finite; nothing was written to {path}")
        if tensor.ndim == 2 and tensor.shape[1] % Q8_0.block == 0:
            tensors[name] = Q8_0.encode(tensor)
    if heads.frequent is not None:
        tensors[FREQUENT] = heads.frequent.to("cpu", torch.int32).contiguous()
    header = _Header(1, heads.config, base.name, notes or {}, heads.calibration)
    try:
        with replacing(Path(path)) as part:
            save_file(tensors, part, metadata={METADATA_KEY: msgspec.json.encode(header).decode()})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write heads to {path}: {line_of(error)}") from error


def read_heads(path: str | Path) -> tuple[Heads, BaseIdentity, dict[str, Any]]:
    """The heads in a heads file, or in the folder of a published checkpoint: float32 on the CPU,
    their base's identity, their notes.

    Raises:
        InputError: it is not there, damaged, or holds no heads.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"heads file {path} does not exist")
    label, folder = f"heads {path}", path.is_dir()
    header, layers = _published(path, label) if folder else (_header(path), 0)
    prefix, found, rest = PUBLISHED if folder else OWN, dict[str, Entry](), dict[str, Entry]()
    for entry in tensors_in(path, label) if folder else entries_of(path, f"{label}: file"):
        if entry.name.startswith(prefix):
            found[entry.name.removeprefix(prefix)] = entry if folder else _unpacked(entry)
        else:
            rest[entry.name] = entry
    config, name = header.heads, header.base[:MOST_NAME]
    heads = _built(config, found, label)

    def matrix(name: str) -> Tensor | None:
        entry = rest.get(name)
        return (
            entry.get()
            if entry is not None and len(entry.shape) == 2 and 0 not in entry.shape
            else None
        )

    if folder:
        base = base_of_weights(matrix, layers, name)
    else:
        base = _sampled(config, name, rest, label)
    if FREQUENT in rest:
        heads.frequent = ids = rest[FREQUENT].get().long().flatten()
        check_ids(ids, config.vocab_size)
    heads.source, heads.calibration, heads.notes = str(path), header.calibration, header.notes or {}
    return heads, base, heads.notes


def _sampled(
    config: HeadsConfig, name: str, found: Mapping[str, Entry], label: str
) -> BaseIdentity:
    if SAMPLE not in found:
        raise InputError(f"{label} lacks tensor {SAMPLE}; valid: a heads file")
    return BaseIdentity(name, config.hidden_size, config.vocab_size, found[SAMPLE].get().float())


def _unpacked(entry: Entry) -> Entry:
    """A matrix of Q8_0 blocks as what they hold; anything else as it is."""
    if entry.kind != "U8" or len(entry.shape) != 2 or entry.shape[1] % Q8_0.nbytes:
        return entry
    shape = entry.shape[0], entry.shape[1] // Q8_0.nbytes * Q8_0.block
    return Entry(entry.name, shape, "F32", lambda: Stored(Q8_0, entry.get()))


def _built(config: HeadsConfig, found: Mapping[str, Entry], label: str) -> Heads:
    with torch.device("meta"):
        heads = Heads(
            config
        )  # without memory, and without the random numbers that modules begin with
    shapes = {name: tuple(part.shape) for name, part in heads.state_dict().items()}
    tensors = read_tensors(found, shapes, label)
    floats = {name: unstored(value, torch.float32).clone() for name, value in tensors.items()}
    heads.load_state_dict(floats, assign=True)
    return heads.eval().requires_grad_(False)


def _header(path: Path) -> _Header:
    said = (open_weights(path, "heads file").metadata() or {}).get(METADATA_KEY, "null")
    try:
        return msgspec.json.decode(said, type=_Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"{path} holds no draft heads ({line_of(error)}); valid: a heads file"
        ) from error


def _published(folder: Path, label: str) -> tuple[_Header, int]:
    """What a whole checkpoint says of the linear heads in it, and how many layers it has."""
    said = object_in(folder / "config.json", MOST_CONFIG, label)
    heads = {name: said.get(name) for name in ("hidden_size", "vocab_size")}
    heads |= {
        "kind": "linear",
        "count": said.get("medusa_heads"),
        "eps": said.get("rms_norm_eps", 1e-5),
    }
    try:
        config = msgspec.convert(heads, HeadsConfig)
        return _Header(1, config, folder.resolve().name), msgspec.convert(
            said.get("num_hidden_layers"), int
        )
    except msgspec.ValidationError as error:
        raise InputError(f"{label}: {error}; valid: a checkpoint with medusa_heads") from error


# ---- which heads a name means --------------------------------------------------------------------


def load_heads(path: str | Path, host: HeadsHost) -> Heads:
    """Heads from a file, or from a folder or hub id of a published checkpoint, in the model's type
    and on its device.

    Args:
        path: of the heads.
        host: the model that they are to draft for.
    Raises:
        InputError: they cannot be read, or were made for another model.
    """
    name, place = str(path), Path(path).expanduser()
    if (
        not place.exists()
        and place.suffix != ".safetensors"
        and HUB_ID.fullmatch(name)
        and ".." not in name
    ):
        place = fetch(name)
    heads, base, _ = read_heads(place)
    if not base.distance(host.base) <= TOLERANCE:
        mine, theirs = (
            f"{one.name} (hidden size {one.hidden_size}, vocabulary {one.vocab_size})"
            for one in (base, host.base)
        )
        raise InputError(
            f"heads {path} were made for {mine}, the model is {theirs}: their weights differ"
        )
    return heads.to(dtype=host.dtype, device=host.device)


def kind_for(path: Path, host: HeadsHost) -> str | None:
    """The kind of a file's heads where they were made for this model, or for its weights quantized.
    Only the header and the sample are read."""
    found = {entry.name: entry for entry in entries_of(path, "heads file")}
    config = _header(path).heads
    distance = _sampled(config, "", found, f"heads {path}").distance(host.base)
    return config.kind if distance <= ROUNDED else None


def is_default(host: HeadsHost) -> bool:
    """Whether shipped heads were made for this model. Files that cannot be used are left out."""
    for path in shipped_files(HEADS):
        with left_out(path):
            if kind_for(path, host) is not None:
                return True
    return False


def shipped_heads(host: HeadsHost, kind: str | None = None) -> Heads | None:
    """The heads of a kind that were trained for this model, by the user or as they are shipped, or
    the first ones of any kind; None without. Files that cannot be used are left out."""
    shipped = shipped_files(HEADS)
    for path in (*trained_files(HEADS), *shipped):
        with left_out(path):
            found = kind_for(path, host)
            if found is not None and kind in (None, found):
                heads = read_heads(path)[0].to(dtype=host.dtype, device=host.device)
                heads.source = f"{path.name} (shipped)" if path in shipped else heads.source
                return heads
    return None


def resolve_heads(spec: str | Path | Heads | None, host: HeadsHost) -> Heads | None:
    """The heads that a ``heads=`` argument or ``--heads`` names.

    Args:
        spec: "auto" (heads in the model's own folder, shipped heads that fit the model, else none),
            "none" or None, a kind of shipped heads, a heads file, the folder or hub id of a
            published checkpoint with heads, or the heads themselves.
        host: the model.
    Raises:
        InputError: what holds no heads for this model, or no heads of that kind are shipped for it.
    """
    if spec is None or spec == "none":
        return None
    if isinstance(spec, Heads):
        width = host.base.hidden_size
        if spec.config.hidden_size != width:
            raise InputError(
                f"heads have hidden size {spec.config.hidden_size}, the model has {width}"
            )
        return copy.deepcopy(spec).to(dtype=host.dtype, device=host.device)
    if spec == "auto":
        return _heads_beside(host) or shipped_heads(host)
    if isinstance(spec, str | Path) and spec not in HEAD_KINDS:
        return load_heads(spec, host)
    if (shipped := shipped_heads(host, str(spec))) is None:
        raise InputError(
            f"heads is {shown(spec)}; valid: auto, none, a kind whose heads are shipped for "
            f"{host.base.name}"
            f"{rivals_note()}, a heads file, a folder or hub id with heads, or Heads",
            "heads",
        )
    return shipped


def holds_heads(folder: str | Path) -> bool:
    """True for a folder in the published TokenSwift layout."""
    path = Path(folder) / "config.json"
    try:
        return path.is_file() and "medusa_heads" in object_in(path, MOST_CONFIG, str(folder))
    except InputError:
        return False


def _heads_beside(host: HeadsHost) -> Heads | None:
    """The heads inside a checkpoint of the published layout that the model was loaded from, a
    folder's or a hub id's; None where there are none, or none that can be used."""
    place = Path(host.place) if Path(host.place).exists() else cached(host.place)
    if not (host.place and place and holds_heads(place)):
        return None
    with left_out(place):
        return load_heads(place, host)
    return None
