"""Files of EAGLE-3 drafters, held against the target before their weights are read.

Three forms are read: that of the research (``midlayer.*`` beside a flat config), that of
Speculators (``layers.0.*``, and the layer's config in the config), and GGUF files of the
architecture ``eagle3``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch

from tokenswift.checks import integer_of
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader.find import gguf_in
from tokenswift.loader.gguf import GgufFile, read_tensor
from tokenswift.loader.gguf_names import NUMBER_KEYS
from tokenswift.loader.gguf_positions import positions
from tokenswift.loader.positions import positions_said
from tokenswift.loader.schema import check_numbers, refusal
from tokenswift.loader.tensors import Entry, dense
from tokenswift.speculation.eagle.config import (
    FEATURES,
    NAMES,
    SHARED,
    EagleConfig,
    EagleWeights,
    TargetConfig,
)
from tokenswift.speculation.files import read_tensors, tensors_in
from tokenswift.types import InputError

#: greatest window of a drafter: its keys and values stand beside those of each text
MOST_WINDOW = 1 << 18
#: canonical names by those of files
IN_FOLDERS = {form.folder: name for name, form in NAMES.items()}
IN_GGUF = {form.gguf: name for name, form in NAMES.items()}
#: what training leaves in some files and no drafting reads
IGNORED = re.compile(r"t2d|.*rotary_emb\.inv_freq|verifier_.*|(blk\.0\.)?rope_freqs\.weight")
#: of a GGUF file: a sample of the target's weights (see `loader.weights`)
BASE = "tokenswift.base"
#: numbers that a checkpoint's config has to give
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
#: those of them that have to be even, as the kernels take numbers in pairs
EVEN = ("hidden_size", "intermediate_size")
#: numbers that a GGUF file may lack
OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window")
#: what a config may not say otherwise
FIXED = {"num_hidden_layers": 1, "hidden_act": "silu", "partial_rotary_factor": 1.0}
FEATURE_LAYERS = "eagle_aux_hidden_state_layer_ids"


def load_eagle(path: str | Path, target: TargetConfig) -> EagleWeights:
    """A drafter's weights for a target.

    Args:
        path: a folder with config.json and weights, or a GGUF file.
        target: the target's config (of `loader.config.completed` or transformers').
    Raises:
        InputError: the files cannot be read, are none of an EAGLE-3 drafter, or do not fit the
            target.
    """
    path = Path(path).expanduser()
    where = f"eagle {path}"
    file = gguf_in(path)
    settings, entries = _folder(path, where) if file is None else _gguf(GgufFile(file), where)
    d2t_entry = entries.pop("d2t", None)
    if d2t_entry is not None and (len(d2t_entry.shape) != 1 or not d2t_entry.shape[0]):
        raise refusal(where, "the shape of d2t", d2t_entry.shape, "a list of tokens")
    size = target.vocab_size if d2t_entry is None else d2t_entry.shape[0]
    config = _config(settings, entries.keys(), size, target, where)
    shared = SHARED if config.hidden == config.target_hidden else ()
    tensors = read_tensors(entries, config.shapes(), where, shared)
    if d2t_entry is None:
        return EagleWeights(config, tensors, None, str(path))
    d2t = dense(d2t_entry).long()
    if file is None:  # folders have offsets
        d2t = d2t + torch.arange(size)
    if len(d2t.unique()) != size or int(d2t.min()) < 0 or int(d2t.max()) >= config.vocab:
        raise InputError(
            f"{where}: d2t does not name {size:,} different tokens below {config.vocab:,}; "
            "valid: ids in a GGUF file, what is added to 0, 1, 2 … in others"
        )
    same = torch.equal(d2t, torch.arange(config.vocab))
    return EagleWeights(config, tensors, None if same else d2t, str(path))


def _folder(path: Path, where: str) -> tuple[dict[str, object], dict[str, Entry]]:
    """The config of a folder of either safetensors form, by the names of transformers and
    Speculators, and its tensors by canonical names."""
    if not (path / "config.json").is_file():
        raise InputError(
            f"{where} has no config.json and is not a GGUF file; valid: a drafter's folder or file"
        )
    outer = object_in(path / "config.json", MOST_CONFIG, where)
    kind = outer.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise refusal(where, "speculators_model_type", kind, "eagle3")
    settings: dict[str, object] = {}
    for part in (outer.get("eagle_config"), outer, outer.get("transformer_layer_config")):
        if isinstance(part, Mapping):
            settings |= {name: value for name, value in part.items() if value is not None}
    kinds = settings.get("layer_types")
    sees_all = isinstance(kinds, list) and kinds and kinds[0] != "sliding_attention"
    if sees_all or not settings.get("use_sliding_window", True):
        settings["sliding_window"] = None
    entries = dict[str, Entry]()
    for entry in tensors_in(path, where):
        name = re.sub(r"^layers\.0\.", "midlayer.", entry.name.removeprefix("model."))
        if not IGNORED.fullmatch(name):
            entries[IN_FOLDERS.get(name, entry.name)] = entry
    return settings, entries


def _gguf(file: GgufFile, where: str) -> tuple[dict[str, object], dict[str, Entry]]:
    """The config and the tensors of a GGUF file, as :func:`_folder` gives them; queries and keys
    get the order of transformers' rows."""
    if file.architecture != "eagle3":
        raise InputError(f"{where} has the architecture {file.architecture!r}; valid: eagle3")
    settings: dict[str, object] = {}
    for name, key in NUMBER_KEYS.items():
        if name in OPTIONAL:
            settings[name] = file.number(key, 0) or None
        elif "." not in name:
            settings[name] = file.number(key)
    layer = _layer(settings, where)
    settings["rope_parameters"] = positions(file, layer.width)
    settings[FEATURE_LAYERS] = file.metadata.get("eagle3.target_layers")
    for name in ("norm_before_residual", "norm_output"):
        settings[name] = file.metadata.get(f"eagle3.{name}")
    permuted = {"q": layer.num_attention_heads, "k": layer.kv_heads}
    entries = dict[str, Entry]()
    for name, entry in file.tensors.items():
        if not IGNORED.fullmatch(name):
            canonical = IN_GGUF.get(name, name)
            read = partial(read_tensor, file, name, permuted.get(canonical))
            entries[canonical] = Entry(name, entry.shape, "F32", read)
    return settings, entries


class _Layer(msgspec.Struct, frozen=True):
    """The numbers of a config that the drafter's layer is made of, by transformers' names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def _layer(settings: Mapping[str, object], where: str) -> _Layer:
    """The layer that a checkpoint's config describes.

    Raises:
        InputError: a number is missing, or one that no drafter has.
    """
    check_numbers({"head_dim": None, **settings}, where)
    for name in REQUIRED:
        if settings.get(name) is None:
            valid = "an even number" if name in EVEN else "a number"
            raise refusal(where, name, None, valid)
    try:
        layer = msgspec.convert(dict(settings), _Layer)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}; valid: a drafter's config") from error
    for name in EVEN:
        if getattr(layer, name) % 2:
            raise refusal(where, name, getattr(layer, name), "an even number")
    window = layer.sliding_window or 0
    if min(window, layer.max_position_embeddings) > MOST_WINDOW:
        raise refusal(where, "sliding_window", window, f"up to {MOST_WINDOW:,}")
    return layer


def _config(
    settings: Mapping[str, object],
    names: Collection[str],
    size: int,
    target: TargetConfig,
    where: str,
) -> EagleConfig:
    """The drafter that a checkpoint describes; ``size``: tokens that it names."""
    layer = _layer(settings, where)
    for name, valid in {**FIXED, "vocab_size": target.vocab_size}.items():
        if settings.get(name, valid) != valid:
            raise refusal(where, name, settings[name], str(valid))
    parts = {NAMES[name].part for name in names if name in NAMES} - {""}
    parts |= {part for part in ("norm_before_fc", "fc_norm") if settings.get(part) is True}
    return EagleConfig(
        hidden=layer.hidden_size,
        target_hidden=target.hidden_size,
        heads=layer.num_attention_heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.width,
        intermediate=layer.intermediate_size,
        eps=layer.rms_norm_eps,
        rope=_rope(settings, layer, where),
        vocab=target.vocab_size,
        draft_vocab=size,
        feature_layers=_feature_layers(settings.get(FEATURE_LAYERS), target, where),
        trained=layer.max_position_embeddings,
        norm_before_residual=settings.get("norm_before_residual") is True,
        norm_output=settings.get("norm_output") is True,
        window=layer.sliding_window or None,
        parts=frozenset(parts),
    )


def _rope(settings: Mapping[str, object], layer: _Layer, where: str) -> Mapping[str, object]:
    """``rope_parameters`` of a drafter's positions."""
    rope = positions_said(settings, layer.max_position_embeddings)
    if rope is None:
        stated = settings.get("rope_scaling") or settings.get("rope_parameters")
        valid = "positions of the kinds default, linear, llama3, yarn"
        raise refusal(where, "rope_scaling", stated, valid)
    return rope


def _feature_layers(ids: object, target: TargetConfig, where: str) -> tuple[int, ...]:
    """The target's layers whose input is a feature. Some checkpoints name those. Some, whose first
    is 1, name the layers before, whose output it is; and some name none."""
    layers = target.num_hidden_layers
    ids = (2, layers // 2, layers - 3) if ids is None else ids
    numbers = [integer_of(one) for one in ids] if isinstance(ids, list | tuple) else []
    shift = 1 if numbers and numbers[0] == 1 else 0
    feature_layers = tuple(number + shift for number in numbers if number is not None)
    different = len({*feature_layers}) == len(numbers) == FEATURES
    if not different or min(feature_layers) < 0 or max(feature_layers) > layers:
        valid = f"{FEATURES} different layers, from 0 to {layers}, those that the target has"
        raise refusal(where, FEATURE_LAYERS, ids, valid)
    return feature_layers
