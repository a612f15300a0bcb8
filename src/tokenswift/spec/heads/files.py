"""Files of draft heads: our own format, published checkpoints, and which heads a name means.

A heads file is one safetensors file: the tensors of :class:`Heads` under ``heads.``, a sample of the base
model's weights as ``base.sample``, and a JSON object under ``tokenswift_heads`` in the header's metadata. The
sample is the base's identity. It is compared with a tolerance, so that a base model cast to another type
still matches, and a fine-tuned one does not.

Published checkpoints are folders. TokenSwift's are whole transformers checkpoints with heads in them
(``model.medusa_layers.{i}…``), whose base is known by its own weights. Medusa-1's hold heads alone
(``{i}.{j}.linear…``: residual block j of head i; ``{i}.{n}.weight``: the head's LM head).
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tokenswift.checks import check_integer, shown
from tokenswift.config import HEAD_KINDS
from tokenswift.files import MOST_CONFIG, line_of, object_in, replacing
from tokenswift.loader.default_model import weights, where
from tokenswift.loader.find import HUB_ID, cached_file
from tokenswift.loader.identity import SAMPLE_SIZE, TOLERANCE, BaseIdentity, Values, base_of, sample_of
from tokenswift.loader.weights import open_weights
from tokenswift.spec.files import STEMS, Entry, entries_of, indexed, tensors_in
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.types import InputError

FORMAT_VERSION = 1
METADATA_KEY = "tokenswift_heads"
SAMPLE, FREQUENT = "base.sample", "draft.frequent"
#: types that weights of heads may have
TYPES = ("F32", "BF16", "F16", "F64")
MOST_NAME = 200  # characters of a name in messages
#: greatest distance of a model from the one that shipped heads were made for: that one's weights are those of
#: a Q4_1 file, rounding to which moves weights by .08 of their size; the model before it gets them, too
ROUNDED = 0.15

#: names of tensors in published checkpoints, and ours
PUBLISHED = (
    (re.compile(r"model\.medusa_layers\.(\d{1,6})\.(.+)"), r"layers.\1.\2"),
    (re.compile(r"(?:medusa_head\.)?(\d{1,6})\.(\d{1,6})\.linear\.(.+)"), r"layers.\1.blocks.\2.\3"),
    (re.compile(r"(?:medusa_head\.)?(\d{1,6})\.\d{1,6}\.(.+)"), r"layers.\1.lm_head.\2"),
)
EMBEDDING = "model.embed_tokens.weight"
#: files of published heads that are fetched at once, and those of Medusa's
SMALL = ("config.json", "*.index.json", "medusa_lm_head.*")
ALONE = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True, slots=True)
class HeadsHost:
    """The model that heads are to draft for.

    Attributes:
        base: its identity.
        dtype, device: of the weights.
        place: the folder or hub id that it was loaded from, "" where it came from a program.
        norm: gives the weight (D,) of its final norm, through which Medusa's heads read.
        eps: of that norm.
    """

    base: BaseIdentity
    dtype: torch.dtype
    device: torch.device
    place: str
    norm: Callable[[], Any] | None = None
    eps: float = 1e-5


def host_of(model: Any, values: Values | None = None) -> HeadsHost:
    """A loaded transformers causal LM as heads see it; a :class:`HeadsHost` as it is. ``values`` as for
    `loader.identity.base_of`."""
    if isinstance(model, HeadsHost):
        return model
    place = str(getattr(model.config, "_name_or_path", "") or "")
    eps = getattr(model.config, "rms_norm_eps", 1e-5)
    base = base_of(model, values=values)
    return HeadsHost(base, model.dtype, model.device, place, partial(_final_norm, model), eps)


def _final_norm(model: Any) -> Any:
    from tokenswift.models.generic import final_norm  # which brings transformers with it

    return final_norm(model).weight


def check_base(heads: str, wanted: BaseIdentity, model: BaseIdentity) -> None:
    """Raise :class:`InputError` unless heads made for ``wanted`` fit ``model``."""
    mine = f"hidden size {wanted.hidden_size}, vocabulary {wanted.vocab_size}"
    theirs = f"hidden size {model.hidden_size}, vocabulary {model.vocab_size}"
    if mine != theirs:
        raise InputError(
            f"heads {heads} were made for {wanted.name} ({mine}), the model is {model.name} ({theirs})"
        )
    far = wanted.distance(model)
    if not far <= TOLERANCE:
        raise InputError(
            f"heads {heads} were made for {wanted.name}, the model is {model.name}: "
            f"their weights differ by {far:.0%}"
        )


# ---- our own files -----------------------------------------------------------------------------------------


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
    tensors = {f"heads.{k}": v.detach().to("cpu", dtype).contiguous() for k, v in heads.state_dict().items()}
    tensors[SAMPLE] = base.sample.float().contiguous()
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"heads tensor {name} is not finite in {kind}; nothing was written to {path}")
    if heads.frequent is not None:
        tensors[FREQUENT] = heads.frequent.to("cpu", torch.int32).contiguous()
    header = {"version": FORMAT_VERSION, "base": base.name, "heads": heads.config.to_dict()}
    header |= {"notes": notes or {}}
    if heads.calibration is not None:
        header["calibration"] = heads.calibration
    try:
        with replacing(Path(path)) as part:
            save_file(tensors, part, metadata={METADATA_KEY: json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write heads to {path}: {line_of(error)}") from error


_Row = tuple[float, float, float, float, float, float]


class _Header(msgspec.Struct):
    """What a heads file says of itself.

    Attributes:
        version: of the format.
        base: the model's name.
        heads: what they are made of.
        notes: how they were trained.
        calibration: weights of `spec.chances`, two rows of six a source.
    """

    version: int
    heads: HeadsConfig
    base: str = "?"
    notes: dict[str, Any] | None = None
    calibration: dict[str, tuple[_Row, _Row]] | None = None


def read_heads(path: str | Path) -> tuple[Heads, BaseIdentity, dict[str, Any]]:
    """A heads file's content: float32 heads on the CPU, their base's identity, their notes.

    Raises:
        InputError: it is not there, damaged, or no heads file.
    """
    path, what = Path(path), f"heads file {path}"
    if not path.is_file():
        raise InputError(f"{what} does not exist")
    header = _header(path)
    config, found = header.heads, {entry.name: entry for entry in entries_of(path, what)}
    if SAMPLE not in found:
        raise InputError(f"{what} lacks tensor {SAMPLE}")
    sample = _read(found.pop(SAMPLE), (2 * SAMPLE_SIZE,), str(path))
    frequent = found.pop(FREQUENT, None)
    heads = build_heads(config, {k.removeprefix("heads."): v for k, v in found.items()}, str(path))
    if frequent is not None:
        heads.frequent = _frequent(frequent, config.vocab_size, what)
    if header.calibration is not None:
        heads.calibration = {k: [[*row] for row in rows] for k, rows in header.calibration.items()}
    heads.source, heads.notes = str(path), header.notes or {}
    base = BaseIdentity(header.base[:MOST_NAME], config.hidden_size, config.vocab_size, sample)
    return heads, base, heads.notes


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


def _frequent(entry: Entry, vocab: int, what: str) -> Tensor:
    """Token ids worth drafting, (S,) int64."""
    fits = entry.kind in ("I32", "I64") and len(entry.shape) == 1 and 0 < entry.shape[0] <= vocab
    ids = entry.get().long() if fits else torch.tensor([-1])
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise InputError(
            f"{what}: tensor {entry.name} is {entry.kind} of shape {shown(list(entry.shape))}; valid: 1 to "
            f"{vocab} token ids below {vocab}"
        )
    return ids


def build_heads(config: HeadsConfig, found: Mapping[str, Entry], source: str) -> Heads:
    """Heads from tensors by our names, float32; all shapes are looked at before any is read.

    Raises:
        InputError: a tensor is missing, unknown, of another shape or type, or not finite.
    """
    if not config.kind == "conditioned" and config.count * config.blocks > len(found):
        raise InputError(f"heads in {source} have {len(found)} tensors, too few for {config.count} heads")
    try:
        with torch.device("meta"):
            heads = Heads(config)  # without memory, and without the random numbers that modules begin with
    except RuntimeError as error:  # sizes beyond what a tensor's can be
        raise InputError(f"heads in {source} have impossible sizes: {line_of(error)}") from error
    wanted = heads.state_dict()
    unknown = sorted(found.keys() - wanted.keys())
    missing = next((name for name in wanted if name not in found), None)
    if missing or unknown:
        what = f"lack tensor {missing}" if missing else f"hold an unknown tensor {unknown[0][:MOST_NAME]}"
        raise InputError(f"heads in {source} {what}")
    made = {name: _read(found[name]._replace(name=name), part.shape, source) for name, part in wanted.items()}
    heads.load_state_dict(made, assign=True)
    return heads.eval().requires_grad_(False)


def _read(entry: Entry, shape: Iterable[int], source: str) -> Tensor:
    """A tensor, float32; refused where it is of another shape, of no float type, or not finite."""
    if entry.shape != tuple(shape):
        raise InputError(
            f"heads in {source}: tensor {entry.name} has shape {shown(list(entry.shape))}; "
            f"{[*shape]} is needed"
        )
    if entry.kind not in TYPES:
        raise InputError(
            f"heads in {source}: tensor {entry.name} is of the type {entry.kind}; valid: {', '.join(TYPES)}"
        )
    tensor = entry.get().to(torch.float32, copy=True)
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"heads in {source}: tensor {entry.name} holds values that are not finite")
    return tensor


# ---- published checkpoints ---------------------------------------------------------------------------------


def holds_heads(folder: str | Path) -> bool:
    """True for a folder in the published TokenSwift layout."""
    path = Path(folder) / "config.json"
    try:
        return path.is_file() and "medusa_heads" in object_in(path, MOST_CONFIG, str(folder))
    except InputError:
        return False


def published_heads(folder: Path, host: HeadsHost) -> Heads:
    """The heads of a published checkpoint, float32 on the CPU; its base's weights are compared where they
    are there.

    Raises:
        InputError: the folder holds none, or those of another model.
    """
    source, config = f"heads {folder}", _config_in(folder)
    there = {entry.name: entry for entry in tensors_in(folder, source, _wanted(config, source), ALONE)}
    found = {_ours(name): entry for name, entry in there.items() if _ours(name)}
    if not found:
        raise InputError(f"{source}: no tensor is named as heads are, model.medusa_layers.* or 0.0.linear.*")
    if EMBEDDING in there and (middle := there.get(_middle(config, source))) is not None:
        for entry in (there[EMBEDDING], middle):
            if entry.kind not in TYPES or len(entry.shape) != 2 or 0 in entry.shape:
                shape = shown(list(entry.shape))
                raise InputError(
                    f"{source}: tensor {entry.name} is {entry.kind} of shape {shape}; valid: a matrix"
                )
        vocab, width = there[EMBEDDING].shape
        sample = torch.cat((sample_of(there[EMBEDDING].get()), sample_of(middle.get())))
        name = str(config.get("_name_or_path") or folder.resolve().name).rstrip("/").rpartition("/")[2]
        check_base(f"in {folder}", BaseIdentity(name[:MOST_NAME], width, vocab, sample), host.base)
    count = 1 + max(int(name.split(".")[1]) for name in found)
    said = config.get("medusa_heads", config.get("medusa_num_heads", count))
    if not check_integer(f"{source}: number of heads", said, 0) <= count:
        raise InputError(f"{source} has {count} heads, its config says {said}")
    inner = [int(name.split(".")[3]) for name in found if ".blocks." in name]
    more: dict[str, Any] = {"eps": config.get("rms_norm_eps", 1e-5)}
    if inner:
        norm = host.norm() if host.norm is not None else torch.ones(0)
        more = {"eps": host.eps, "own_lm_heads": True, "blocks": 1 + max(inner)}
        entry = Entry("final_norm", tuple(norm.shape), "F32", lambda: norm.detach().cpu())
        found |= {f"layers.{i}.final_norm.weight": entry for i in range(count)}
    try:
        shape = HeadsConfig(
            "medusa" if inner else "linear", count, host.base.hidden_size, host.base.vocab_size, **more
        )
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    heads = build_heads(shape, found, str(folder))
    heads.source = str(folder)
    return heads


def _ours(name: str) -> str:
    """Our name of a tensor of a published checkpoint; "" for one that is no head's."""
    for theirs, ours in PUBLISHED:
        if (found := theirs.fullmatch(name)) is not None:
            return found.expand(ours)
    return ""


def _config_in(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise InputError(f"heads {folder} has no config.json; valid: a checkpoint with heads")
    return object_in(folder / "config.json", MOST_CONFIG, f"heads {folder}")


def _middle(config: Mapping[str, Any], source: str) -> str:
    """The weight of the middle layer that identifies a base."""
    layers = check_integer(f"{source}: num_hidden_layers", config.get("num_hidden_layers", 0), 0)
    return f"model.layers.{layers // 2}.self_attn.q_proj.weight"


def _wanted(config: Mapping[str, Any], source: str) -> Callable[[str], bool]:
    """Whether a tensor of a published checkpoint is read: heads, and what identifies the base."""
    names = (EMBEDDING, _middle(config, source))
    return lambda name: name in names or bool(_ours(name))


def _fetched(name: str) -> Path:
    """Where heads are: a path, or the folder of a hub id, fetched as far as they need it.

    Raises:
        InputError: the hub does not give it.
    """
    path = Path(name).expanduser()
    if path.exists() or path.suffix == ".safetensors" or not HUB_ID.fullmatch(name) or ".." in name:
        return path
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(SMALL)))
        if not any((folder / one).is_file() for one in ALONE):
            files = indexed(folder, f"heads {name}", _wanted(_config_in(folder), name))
            snapshot_download(name, allow_patterns=files or list(STEMS))
    except InputError:
        raise
    except Exception as error:  # the hub's own errors are many
        reason = line_of(error)
        raise InputError(
            f"heads is {name!r}: not here, and the hub does not give it ({reason})", "heads"
        ) from error
    return folder


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
    host, place = host_of(model), _fetched(str(path))
    if place.is_dir():
        heads = published_heads(place, host)
    else:
        heads, base, _ = read_heads(place)
        check_base(str(path), base, host.base)
    return heads.to(dtype=host.dtype, device=host.device)


def packaged_kinds(model: Any) -> dict[str, Traversable]:
    """The files of the shipped heads that were made for this model, or for its weights quantized, by kind, in
    the order of their names."""
    base, found = host_of(model).base, dict[str, Traversable]()
    for entry, kind, sample in _shipped(base.hidden_size, base.vocab_size):
        if BaseIdentity("", base.hidden_size, base.vocab_size, sample).distance(base) <= ROUNDED:
            found.setdefault(kind, entry)
    return found


def may_have_heads(hidden: int, vocab: int) -> bool:
    """Whether shipped heads are of a model's sizes, D and V."""
    return bool(_shipped(hidden, vocab))


def _shipped(hidden: int, vocab: int) -> list[tuple[Traversable, str, Tensor]]:
    """The files of shipped heads for a model of these sizes, their kinds and their bases' samples; only
    headers and samples are read."""
    found = []
    for entry in weights(".heads.safetensors"):
        with resources.as_file(entry) as path:
            config = _header(path).heads
            if (config.hidden_size, config.vocab_size) == (hidden, vocab):
                found.append((entry, config.kind, open_weights(path).get_tensor(SAMPLE).float()))
    return found


def packaged_heads(model: Any, kind: str | None = None) -> Heads | None:
    """The shipped heads that were made for this model, if there are any: the first file by name, or
    the first of a ``kind``."""
    host = host_of(model)
    found = packaged_kinds(host)
    entry = next(iter(found.values()), None) if kind is None else found.get(kind)
    return None if entry is None else read_packaged(entry, host.base).to(dtype=host.dtype, device=host.device)


def read_packaged(entry: Traversable, model: BaseIdentity | None = None) -> Heads:
    """Shipped heads from :func:`packaged_kinds`, which has seen that they fit; float32 on the CPU. Says so
    where they were made for other weights than a ``model``'s."""
    with resources.as_file(entry) as path:
        heads, base, _ = read_heads(path)
    if model is not None and (far := base.distance(model)) > TOLERANCE:
        logger.info(
            "the shipped heads were made for %s, whose weights differ from this model's by %.0f%%, as "
            "quantization does; they may guess less well here, and cannot change the text",
            base.name,
            100 * far,
        )
    heads.source = f"{entry.name} (shipped)"
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
        return _heads_beside(host) or packaged_heads(host)
    if spec not in HEAD_KINDS:
        return load_heads(spec, host)
    shipped = packaged_heads(host, str(spec))
    if shipped is None:
        raise InputError(
            f"heads is {shown(spec)}, and no {spec} heads are shipped for {host.base.name}{where()}; "
            "valid: auto, none, a heads file, or a checkpoint with heads",
            "heads",
        )
    return shipped


def _heads_beside(host: HeadsHost) -> Heads | None:
    """The heads inside a checkpoint of the published layout that the model was loaded from, a folder's or
    a hub id's."""
    place = host.place
    if place and not Path(place).is_dir():
        config = cached_file(place, "config.json") if HUB_ID.fullmatch(place) else None
        place = str(Path(config).parent) if config else ""
    return load_heads(place, host) if place and holds_heads(place) else None
