"""Files of draft heads: our own, those inside published TokenSwift checkpoints, and which heads a name means.

A heads file is one safetensors file: the tensors of :class:`Heads` under ``heads.``, a sample of the base
model's weights as ``base.sample``, and a JSON object under ``tokenswift_heads`` in the header's metadata. The
sample is the base's identity. It is compared with a tolerance, so that a base model cast to another type
still matches, and a fine-tuned one does not.

Published checkpoints are folders: a whole transformers checkpoint with the paper's linear heads in it, as
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
from safetensors import SafetensorError
from safetensors.torch import save_file

from tokenswift.checks import shown
from tokenswift.config import HEAD_KINDS
from tokenswift.files import MOST_CONFIG, line_of, object_in, replacing
from tokenswift.kernels.base import check_ids
from tokenswift.loader.default_model import weights, where
from tokenswift.loader.find import HUB_ID, cached, fetch
from tokenswift.loader.identity import TOLERANCE, BaseIdentity, base_of, base_of_weights
from tokenswift.loader.weights import open_weights
from tokenswift.spec.files import Entry, entries_of, tensors_in
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.types import InputError

FORMAT_VERSION = 1
METADATA_KEY = "tokenswift_heads"
OWN, PUBLISHED = "heads.", "model.medusa_"  # what tensors' names begin with
SAMPLE, FREQUENT = "base.sample", "draft.frequent"
MOST_NAME, MOST_WORDS = 200, 500  # characters of a name, and of what is wrong, in messages
#: greatest distance of a model from the one that shipped heads were made for: that one's weights are those of
#: a Q4_1 file, rounding to which moves weights by .08 of their size; the model before it gets them, too
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
    """A loaded transformers causal LM as heads see it; a :class:`HeadsHost` as it is."""
    if isinstance(model, HeadsHost):
        return model
    place = str(getattr(model.config, "_name_or_path", "") or "")
    return HeadsHost(base_of(model), model.dtype, model.device, place)


# ---- files -------------------------------------------------------------------------------------------------

_Row = Annotated[list[float], msgspec.Meta(min_length=6, max_length=6)]
_Rows = Annotated[list[_Row], msgspec.Meta(min_length=2, max_length=2)]


class _Header(msgspec.Struct):
    """What a heads file says of itself.

    Attributes:
        version: of the format.
        heads: what they are made of.
        base: the model's name.
        notes: how they were trained.
        calibration: weights of `spec.chances`, two rows of six a source.
    """

    version: int
    heads: HeadsConfig
    base: str = "?"
    notes: dict[str, Any] | None = None
    calibration: dict[str, _Rows] | None = None


def save_heads(
    heads: Heads,
    path: str | Path,
    base: BaseIdentity,
    dtype: torch.dtype = torch.bfloat16,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a heads file; a failure leaves no half-written file behind.

    Args:
        heads: the heads.
        path: the file; by custom it ends in ``.heads.safetensors``.
        base: the identity of their base model, from `loader.identity.base_of`.
        dtype: type of the stored weights.
        notes: JSON values kept in the header (how the heads were trained).
    Raises:
        InputError: a weight is not finite in that type, or the file cannot be written.
    """
    tensors = {OWN + k: v.detach().to("cpu", dtype).contiguous() for k, v in heads.state_dict().items()}
    tensors[SAMPLE] = base.sample.float().contiguous()
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"heads tensor {name} is not finite in {kind}; nothing was written to {path}")
    if heads.frequent is not None:
        tensors[FREQUENT] = heads.frequent.to("cpu", torch.int32).contiguous()
    header = _Header(FORMAT_VERSION, heads.config, base.name, notes or {}, heads.calibration)
    try:
        with replacing(Path(path)) as part:
            save_file(tensors, part, metadata={METADATA_KEY: msgspec.json.encode(header).decode()})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write heads to {path}: {line_of(error)}") from error


def read_heads(path: str | Path) -> tuple[Heads, BaseIdentity, dict[str, Any]]:
    """The heads in a heads file, or in the folder of a published checkpoint: float32 on the CPU, their base's
    identity, their notes.

    Raises:
        InputError: it is not there, damaged, or holds no heads.
    """
    path = Path(path)
    if path.is_dir():
        heads, base = _published(path)
    elif not path.is_file():
        raise InputError(f"heads file {path} does not exist")
    else:
        heads, base = _own(path)
    heads.source = str(path)
    return heads, base, heads.notes


def _own(path: Path) -> tuple[Heads, BaseIdentity]:
    """What a heads file holds."""
    header, found = _header(path), {entry.name: entry for entry in entries_of(path, f"heads file {path}")}
    config, sample, frequent = header.heads, found.pop(SAMPLE, None), found.pop(FREQUENT, None)
    if sample is None:
        raise InputError(f"heads file {path} lacks tensor {SAMPLE}")
    heads = build_heads(config, {k.removeprefix(OWN): v for k, v in found.items()}, str(path))
    if frequent is not None:
        heads.frequent = ids = frequent.get().long().flatten()
        try:
            check_ids(ids, config.vocab_size)
        except InputError as error:
            raise InputError(f"heads file {path}: tensor {FREQUENT}: {error}") from error
    heads.calibration, heads.notes = header.calibration, header.notes or {}
    name = header.base[:MOST_NAME]
    return heads, BaseIdentity(name, config.hidden_size, config.vocab_size, sample.get().float())


def _header(path: Path) -> _Header:
    said = (open_weights(path, "heads file").metadata() or {}).get(METADATA_KEY)
    if said is None:
        raise InputError(f"{path} holds no draft heads of tokenswift; valid: a heads file")
    try:
        header = msgspec.json.decode(said, type=_Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"heads file {path} has a broken header: {line_of(error)}") from error
    if header.version != FORMAT_VERSION:
        raise InputError(f"heads file {path} has format version {header.version}; known: {FORMAT_VERSION}")
    return header


def _published(folder: Path) -> tuple[Heads, BaseIdentity]:
    """The linear heads in a whole checkpoint."""
    source = f"heads in {folder}"
    said, rest = object_in(folder / "config.json", MOST_CONFIG, source), dict[str, Entry]()
    found = dict[str, Entry]()
    for entry in tensors_in(folder, source):
        (found if entry.name.startswith(PUBLISHED) else rest)[entry.name.removeprefix(PUBLISHED)] = entry
    given = {"hidden_size": said.get("hidden_size"), "vocab_size": said.get("vocab_size")}
    given |= {"kind": "linear", "count": sum(name.endswith(".linear.weight") for name in found)}
    layers = said.get("num_hidden_layers")
    try:
        config = msgspec.convert(given | {"eps": said.get("rms_norm_eps", 1e-5)}, HeadsConfig)
        middle = msgspec.convert(layers, int)
    except msgspec.ValidationError as error:
        raise InputError(f"{source}: {error}; valid: a checkpoint with model.medusa_layers.*") from error

    def get(name: str) -> Any:
        matrix = (entry := rest.get(name)) is not None and len(entry.shape) == 2 and 0 not in entry.shape
        return rest[name].get() if matrix else None

    return build_heads(config, found, str(folder)), base_of_weights(get, middle, folder.resolve().name)


def build_heads(config: HeadsConfig, found: Mapping[str, Entry], source: str) -> Heads:
    """Heads from tensors by our names, float32.

    Raises:
        InputError: a tensor is missing, unknown, of another shape, or not finite.
    """
    if not config.kind == "conditioned" and config.count > len(found):
        raise InputError(f"heads in {source} have {len(found)} tensors, too few for {config.count} heads")
    try:
        with torch.device("meta"):
            heads = Heads(config)  # without memory, and without the random numbers that modules begin with
        tensors = {name: entry.get().to(torch.float32, copy=True) for name, entry in found.items()}
        heads.load_state_dict(tensors, assign=True)
    except RuntimeError as error:  # sizes beyond what a tensor's can be, and all that does not fit
        words = " ".join(str(error).split())[:MOST_WORDS]
        raise InputError(f"heads in {source} are not what their header says: {words}") from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"heads in {source}: tensor {name} holds values that are not finite")
    return heads.eval().requires_grad_(False)


# ---- which heads a name means ------------------------------------------------------------------------------


def load_heads(path: str | Path, model: Any) -> Heads:
    """Heads from a file, or from a folder or hub id of a published checkpoint, in the model's type and on its
    device.

    Args:
        path: of the heads.
        model: the loaded transformers causal LM that they are to draft for, or its :class:`HeadsHost`.
    Raises:
        InputError: they cannot be read, or were made for another model.
    """
    host = host_of(model)
    heads, base, _ = read_heads(_fetched(str(path)))
    far = base.distance(host.base)
    if not far <= TOLERANCE:
        sizes = [f"hidden size {one.hidden_size}, vocabulary {one.vocab_size}" for one in (base, host.base)]
        mine, theirs = (f" ({size})" if sizes[0] != sizes[1] else "" for size in sizes)
        raise InputError(
            f"heads {path} were made for {base.name}{mine}, the model is {host.base.name}{theirs}: their "
            f"weights differ{'' if mine else f' by {far:.0%}'}"
        )
    return heads.to(dtype=host.dtype, device=host.device)


def _fetched(name: str) -> Path:
    """Where heads are: a path, or the folder of a hub id, fetched where it can be.

    Raises:
        InputError: the hub does not give it.
    """
    path = Path(name).expanduser()
    if path.exists() or path.suffix == ".safetensors" or not HUB_ID.fullmatch(name) or ".." in name:
        return path
    return fetch(name)


def shipped_kinds(model: Any) -> dict[str, Path]:
    """The files of the shipped heads that were made for this model, or for its weights quantized, by kind;
    of two of a kind the first by name. Only headers and samples are read."""
    base, found = host_of(model).base, dict[str, Path]()
    for path in (Path(str(entry)) for entry in weights(".heads.safetensors")):
        config = _header(path).heads
        if (config.hidden_size, config.vocab_size) == (base.hidden_size, base.vocab_size):
            sample = open_weights(path).get_tensor(SAMPLE).float()
            if BaseIdentity("", base.hidden_size, base.vocab_size, sample).distance(base) <= ROUNDED:
                found.setdefault(config.kind, path)
    return found


def shipped_heads(model: Any, kind: str | None = None) -> Heads | None:
    """The shipped heads of a kind that were made for this model, or its first ones by name; None without."""
    host, found = host_of(model), shipped_kinds(model)
    path = next(iter(found.values()), None) if kind is None else found.get(kind)
    if path is None:
        return None
    heads = read_heads(path)[0].to(dtype=host.dtype, device=host.device)
    heads.source = f"{path.name} (shipped)"
    return heads


def resolve_heads(spec: str | Path | Heads | None, model: Any) -> Heads | None:
    """The heads that a ``heads=`` argument or ``--heads`` names.

    Args:
        spec: "auto" (heads in the model's own folder, shipped heads that fit the model, else none),
            "none" or None, a kind of shipped heads, a heads file, the folder or hub id of a published
            checkpoint with heads, or the heads themselves.
        model: the loaded transformers causal LM, or its :class:`HeadsHost`.
    Raises:
        InputError: what holds no heads for this model, or no heads of that kind are shipped for it.
    """
    if spec is None or spec == "none":
        return None
    host = host_of(model)
    if isinstance(spec, Heads):
        width = host.base.hidden_size
        if spec.config.hidden_size != width:
            raise InputError(f"heads have hidden size {spec.config.hidden_size}, the model has {width}")
        same = (spec.dtype, next(spec.parameters()).device) == (host.dtype, host.device)
        return spec if same else copy.deepcopy(spec).to(dtype=host.dtype, device=host.device)
    if not isinstance(spec, str | Path):
        raise InputError(
            f"heads is {shown(spec)}; valid: auto, none, a kind, a file, a folder or hub id, or Heads"
        )
    if spec == "auto":
        return _heads_beside(host) or shipped_heads(host)
    if spec not in HEAD_KINDS:
        return load_heads(spec, host)
    shipped = shipped_heads(host, str(spec))
    if shipped is None:
        raise InputError(
            f"heads is {shown(spec)}, and no {spec} heads are shipped for {host.base.name}{where()}; "
            "valid: auto, none, a heads file, or a checkpoint with heads",
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
    """The heads inside a checkpoint of the published layout that the model was loaded from, a folder's or
    a hub id's."""
    place = host.place
    if HUB_ID.fullmatch(place) and not Path(place).is_dir():
        place = str(cached(place) or "")
    return load_heads(place, host) if place and holds_heads(place) else None
