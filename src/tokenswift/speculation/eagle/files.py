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
from typing import Any

import torch

from tokenswift.checks import integer_of
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader.config import positions_said
from tokenswift.loader.find import gguf_in
from tokenswift.loader.gguf import GgufFile, read_tensor
from tokenswift.loader.gguf_config import positions
from tokenswift.loader.gguf_names import CALLED
from tokenswift.loader.schema import check_numbers, refusal
from tokenswift.loader.weights import Entry
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
IN_FOLDERS, IN_GGUF = ({names[form]: ours for ours, names in NAMES.items()} for form in (0, 1))
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
    where, file = f"eagle {path}", gguf_in(path)
    settings, entries = _folder(path, where) if file is None else _gguf(GgufFile(file), where)
    listed = entries.pop("d2t", None)
    if listed is not None and (len(listed.shape) != 1 or not listed.shape[0]):
        raise refusal(where, "the shape of d2t", listed.shape, "a list of tokens")
    size = target.vocab_size if listed is None else listed.shape[0]
    config = _config(settings, entries.keys(), size, target, where)
    shared = SHARED if config.hidden == config.target_hidden else ()
    tensors = read_tensors(entries, config.shapes(), where, shared)
    if listed is None:
        return EagleWeights(config, tensors, None, str(path))
    d2t = listed.get().long() + (0 if file else torch.arange(size))  # folders have offsets
    if len(d2t.unique()) != size or int(d2t.min()) < 0 or int(d2t.max()) >= config.vocab:
        raise InputError(
            f"{where}: d2t does not name {size:,} different tokens below {config.vocab:,}; "
            f"valid: ids in a "
            "GGUF file, what is added to 0, 1, 2 … in others"
        )
    same = torch.equal(d2t, torch.arange(config.vocab))
    return EagleWeights(config, tensors, None if same else d2t, str(path))


def _folder(path: Path, where: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    """What a folder of either safetensors form says, by the names of transformers and Speculators,
    and its tensors by canonical names."""
    if not (path / "config.json").is_file():
        raise InputError(
            f"{where} has no config.json and is not a GGUF file; valid: a drafter's folder or file"
        )
    outer = object_in(path / "config.json", MOST_CONFIG, where)
    if (kind := outer.get("speculators_model_type", "eagle3")) != "eagle3":
        raise refusal(where, "speculators_model_type", kind, "eagle3")
    parts = (outer.get("eagle_config"), outer, outer.get("transformer_layer_config"))
    settings: dict[str, Any] = {}
    for part in parts:
        settings |= (
            {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
        )
    kinds = settings.get("layer_types")
    full = isinstance(kinds, list) and kinds and kinds[0] != "sliding_attention"
    if full or not settings.get("use_sliding_window", True):
        settings["sliding_window"] = None
    entries = dict[str, Entry]()
    for entry in tensors_in(path, where):
        name = re.sub(r"^layers\.0\.", "midlayer.", entry.name.removeprefix("model."))
        if not IGNORED.fullmatch(name):
            entries[IN_FOLDERS.get(name, entry.name)] = entry
    return settings, entries


def _gguf(file: GgufFile, where: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The same of a GGUF file; queries and keys get the order of transformers' rows."""
    if file.architecture != "eagle3":
        raise InputError(f"{where} has the architecture {file.architecture!r}; valid: eagle3")
    optional: dict[str, Any] = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "sliding_window"), 0
    )
    settings = {
        name: file.number(key, optional.get(name))
        for name, key in CALLED.items()
        if "." not in name
    }
    settings |= {name: settings[name] or None for name in optional}
    check_numbers(settings, where)
    heads = settings["num_attention_heads"]
    width = settings["head_dim"] or settings["hidden_size"] // heads
    settings["rope_parameters"] = positions(file, width)
    settings["eagle_aux_hidden_state_layer_ids"] = file.metadata.get("eagle3.target_layers")
    settings |= {
        name: file.metadata.get(f"eagle3.{name}")
        for name in ("norm_before_residual", "norm_output")
    }
    permuted = {"q": heads, "k": settings["num_key_value_heads"] or heads}
    entries = dict[str, Entry]()
    for name, entry in file.tensors.items():
        if not IGNORED.fullmatch(name):
            canonical = IN_GGUF.get(name, name)
            entries[canonical] = Entry(
                name, entry.shape, "F32", partial(read_tensor, file, name, permuted.get(canonical))
            )
    return settings, entries


def _config(
    settings: Mapping[str, Any], names: Collection[str], size: int, target: TargetConfig, where: str
) -> EagleConfig:
    """The drafter that a checkpoint describes; ``size``: tokens that it names."""
    check_numbers({"head_dim": None} | dict(settings), where)
    for name in REQUIRED:
        even = name in ("hidden_size", "intermediate_size")  # the kernels take numbers in pairs
        if settings.get(name) is None or (even and settings[name] % 2):
            raise refusal(where, name, settings.get(name), "an even number" if even else "a number")
    fixed = {"num_hidden_layers": 1, "hidden_act": "silu", "partial_rotary_factor": 1.0}
    for name, valid in {**fixed, "vocab_size": target.vocab_size}.items():
        if settings.get(name, valid) != valid:
            raise refusal(where, name, settings[name], str(valid))
    rope = positions_said(settings, settings["max_position_embeddings"])
    if rope is None:
        kinds = "positions of the kinds default, linear, llama3, yarn"
        raise refusal(
            where,
            "rope_scaling",
            settings.get("rope_scaling") or settings.get("rope_parameters"),
            kinds,
        )
    window = settings.get("sliding_window") or None
    if window is not None and min(window, settings["max_position_embeddings"]) > MOST_WINDOW:
        raise refusal(where, "sliding_window", window, f"up to {MOST_WINDOW:,}")
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    parts = {part for name, (*_, part) in NAMES.items() if part and name in names}
    return EagleConfig(
        hidden=hidden,
        target_hidden=target.hidden_size,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or hidden // heads,
        intermediate=settings["intermediate_size"],
        eps=float(settings["rms_norm_eps"]),
        rope=rope,
        vocab=target.vocab_size,
        draft_vocab=size,
        feature_layers=_layers(settings.get("eagle_aux_hidden_state_layer_ids"), target, where),
        trained=settings["max_position_embeddings"],
        norm_before_residual=settings.get("norm_before_residual") is True,
        norm_output=settings.get("norm_output") is True,
        window=window,
        parts=frozenset(
            parts | {part for part in ("norm_before_fc", "fc_norm") if settings.get(part) is True}
        ),
    )


def _layers(ids: object, target: TargetConfig, where: str) -> tuple[int, ...]:
    """The target's layers whose input is a feature. Checkpoints name those; some, which begin with
    1, the layers before, whose output it is; and some none."""
    layers = target.num_hidden_layers
    ids = (2, layers // 2, layers - 3) if ids is None else ids
    numbers = [integer_of(one) for one in ids] if isinstance(ids, list | tuple) else []
    feature_layers = tuple(one + (numbers[0] == 1) for one in numbers if one is not None)
    if not (
        len({*feature_layers}) == len(numbers) == FEATURES
        and 0 <= min(feature_layers) <= max(feature_layers) <= layers
    ):
        valid = f"{FEATURES} different layers, from 0 to {layers}, those that the target has"
        raise refusal(where, "eagle_aux_hidden_state_layer_ids", ids, valid)
    return feature_layers
