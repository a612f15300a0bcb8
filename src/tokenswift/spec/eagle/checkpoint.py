"""EAGLE-3 checkpoints of the forms that are published, read within bounds and held against their target.

Forms: the research form (``midlayer.*``, a flat config), that of Speculators (``layers.0.*``, a config of the
layer in the config), and GGUF files of the architecture ``eagle3``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenswift.checks import shown
from tokenswift.kernels.formats import Stored
from tokenswift.loader.config import MOST_TOKENS
from tokenswift.spec.eagle.config import SHARED, EagleConfig
from tokenswift.spec.eagle.files import INNER, INTEGERS, MAPS, OUTER, SWITCHES, WEIGHTS, Files, open_files
from tokenswift.spec.eagle.said import VALID, unsupported
from tokenswift.types import InputError

AT_ONCE = 4096  # rows that are looked at together


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A drafter's weights by canonical names.

    Attributes:
        config: of the drafter.
        tensors: ``fc`` (H, 3 Ht); ``input_norm`` (H) of embeddings and ``hidden_norm`` (H) of features;
            ``q`` (heads · d, 2 H), ``k`` and ``v`` (kv heads · d, 2 H), ``o`` (H, heads · d);
            ``post_norm`` (H); ``gate`` and ``up`` (I, H), ``down`` (H, I); ``norm`` (H). Those that not all
            have: ``embed`` (V, H) and ``lm_head`` (Vd, H), without which the target's are used (of the LM
            head the rows of `d2t`); ``features_norm`` (3 Ht) with ``norm_before_fc``; ``fc_norm.0`` to
            ``fc_norm.2`` (Ht) with ``fc_norm``; ``q_norm`` and ``k_norm`` (d) with ``qk_norm``; biases
            ``q_bias`` and so on. Types are those of the files; matrices of GGUF files may be `Stored`.
        d2t: the target's ids of the drafter's tokens, (Vd,) int64, rising; None: they are the same.
        name: what the checkpoint was asked for by.
    """

    config: EagleConfig
    tensors: Mapping[str, Tensor | Stored]
    d2t: Tensor | None
    name: str


def load_eagle(path: str | Path, target: Any, tokens: Sequence[str] | None = None) -> EagleWeights:
    """A drafter's weights for a target.

    Args:
        path: a folder with config.json and weights, or a GGUF file.
        target: the target's config (`loader.config.NativeConfig` or transformers').
        tokens: of the target's tokenizer, by their ids; those of a GGUF drafter must be the same.
    Raises:
        InputError: the files cannot be read, are none of an EAGLE-3 drafter, or do not fit the target.
    """
    files, config = open_eagle(path, target, tokens)
    d2t = _vocabulary(files, config)
    read = {name: files.get(name) for name in config.shapes() if name in files.found}
    for name, tensor in read.items():
        _check_finite(files, name, tensor)
    if d2t is not None and not bool((d2t[1:] > d2t[:-1]).all()):
        d2t, order = d2t.sort()
        if "lm_head" in read:
            head = read["lm_head"]
            read["lm_head"] = head.take(order) if isinstance(head, Stored) else head[order]
    return EagleWeights(config, read, d2t, str(path))


def open_eagle(
    path: str | Path, target: Any, tokens: Sequence[str] | None = None
) -> tuple[Files, EagleConfig]:
    """A drafter's files, and its config as their headers have it; see :func:`load_eagle`. No weight is read.

    Raises:
        InputError: as there, but for what the weights hold.
    """
    _check_target(target)
    files = open_files(Path(path).expanduser())
    _check_kind(files)
    config = files.config(target)
    _check_fit(files, config, target, tokens)
    _check_table(files, config)
    return files, config


def _check_target(target: Any) -> None:
    """Refuse a target whose layers cannot be told apart."""
    for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if not isinstance(getattr(target, name, None), int):
            kind = getattr(target, "model_type", "?")
            raise InputError(
                f"the target is of the kind {kind}, whose config has no {name}: its layers cannot be tapped; "
                "valid: a causal language model of text"
            )


def _check_kind(files: Files) -> None:
    """Recognise what is no EAGLE-3 by its tensors."""
    if "fc" not in files.found:
        raise InputError(f"{files.where} has no tensor fc.weight: it is not an EAGLE-3 drafter; {VALID}")
    shape, hidden = files.found["fc"][0], "hidden_norm" in files.found
    if len(shape) != 2:
        raise InputError(f"{files.where}: tensor fc.weight has shape {shape}; valid: a matrix")
    if not hidden and shape[1] <= 2 * shape[0]:
        raise unsupported(files.where, "an EAGLE-1 or EAGLE-2")
    if any("mask_hidden" in name for name in files.found):
        raise unsupported(files.where, "a P-EAGLE")


def _check_fit(files: Files, config: EagleConfig, target: Any, tokens: Sequence[str] | None) -> None:
    """Refuse a drafter of another target's sizes or tokens."""
    where = files.where
    for what, mine, theirs in (
        ("hidden size", config.target_hidden, target.hidden_size),
        ("vocabulary", config.vocab, target.vocab_size),
    ):
        if mine != theirs:
            raise InputError(
                f"{where} was made for a target with {what} {mine:,}, the model has {theirs:,}; valid: a "
                "drafter of this model"
            )
    for name in SHARED:
        if name not in files.found and config.hidden != config.target_hidden:
            raise InputError(
                f"{where} has no {name} of its own and hidden size {config.hidden:,}, the model has "
                f"{config.target_hidden:,}; valid: the same, or a checkpoint with {name}"
            )
    if files.tokens is None or tokens is None:
        return
    for number, (mine, theirs) in enumerate(zip(files.tokens, tokens, strict=False)):
        if mine != theirs and not str(mine).startswith("[PAD"):
            raise InputError(
                f"{where} has another tokenizer: its token {number} is {shown(mine)}, the model's is "
                f"{shown(theirs)}; valid: a drafter of this model"
            )


def _check_table(files: Files, config: EagleConfig) -> None:
    """Hold all tensors against the drafter's table, before any is read."""
    table, where = config.shapes(), files.where
    for name in table:
        if name not in files.found and name not in SHARED:
            raise InputError(f"{where} lacks the tensor {_called(name)}; {VALID}")
    maps = {"d2t": (config.draft_vocab,), "t2d": (config.vocab,)}
    kinds = {"d2t": INTEGERS, "t2d": SWITCHES}
    for name, (shape, kind) in files.found.items():
        wanted = table.get(name, maps.get(name))
        if wanted is None:
            raise InputError(
                f"{where}: the tensor {files.names[name]} is not part of an EAGLE-3 drafter; {VALID}"
            )
        if shape != wanted:
            raise InputError(f"{where}: tensor {files.names[name]} has shape {shape}; valid: {wanted}")
        if kind not in (valid := kinds.get(name, WEIGHTS)):
            raise InputError(
                f"{where}: tensor {files.names[name]} has the type {kind}; valid: {', '.join(valid)}"
            )
    if config.draft_vocab > min(config.vocab, MOST_TOKENS):
        raise InputError(
            f"{where}: draft_vocab_size is {config.draft_vocab:,}; valid: up to {config.vocab:,}, vocab_size"
        )


def _called(name: str) -> str:
    """A tensor's name as the research form has it, for messages."""
    inner = {ours: f"midlayer.{theirs}" for theirs, ours in INNER.items()}
    return (inner | {ours: theirs for theirs, ours in OUTER.items()})[name]


def _vocabulary(files: Files, config: EagleConfig) -> Tensor | None:
    """The target's ids of the drafter's tokens, from whichever map the files have."""
    where, vocab, size = files.where, config.vocab, config.draft_vocab
    maps: dict[str, Any] = {name: files.get(name) for name in MAPS if name in files.found}
    said = maps["d2t"].long() if "d2t" in maps else None
    listed = maps["t2d"].bool().nonzero().flatten() if "t2d" in maps else None
    if listed is not None and not len(listed):  # never filled
        listed = None
    if listed is not None and len(listed) != size:
        raise InputError(
            f"{where}: t2d names {len(listed):,} tokens; valid: {size:,}, as many as draft_vocab_size"
        )
    if said is None or (not bool(said.any()) and size > 1):
        if listed is None and size != vocab:
            raise InputError(
                f"{where} does not say which {size:,} of {vocab:,} tokens it drafts; valid: a checkpoint "
                "with d2t or t2d"
            )
        return None if size == vocab else listed
    ways = [ids for ids in _ways(said, files.absolute) if _is_map(ids, vocab)]
    if not ways:
        raise InputError(
            f"{where}: d2t does not give {size:,} different tokens from 0 to {vocab - 1:,}, neither as ids "
            "nor as offsets; valid: one of both"
        )
    if listed is None:
        return ways[0]
    for ids in ways:
        if torch.equal(ids.sort().values, listed):
            return ids
    raise InputError(f"{where}: d2t and t2d name different tokens; valid: the same")


def _ways(said: Tensor, absolute: bool) -> list[Tensor]:
    """What d2t may mean, the likelier first; ids are taken for what they are in GGUF files if they rise."""
    offsets = said + torch.arange(len(said))
    rising = bool((said[1:] > said[:-1]).all())
    return [said, offsets] if absolute and rising else [offsets, said]


def _is_map(ids: Tensor, vocab: int) -> bool:
    return 0 <= int(ids.min()) and int(ids.max()) < vocab and len(ids.unique()) == len(ids)


def _check_finite(files: Files, name: str, tensor: Tensor | Stored) -> None:
    """Refuse weights that are not finite, a part of the rows at a time."""
    for start in range(0, len(tensor), AT_ONCE):
        if isinstance(tensor, Stored):
            part = Stored(tensor.format, tensor.blocks[start : start + AT_ONCE]).decode()
        else:
            part = tensor[start : start + AT_ONCE]
        if not bool(torch.isfinite(torch.stack(part.aminmax())).all()):
            raise InputError(f"{files.where}: tensor {files.names[name]} holds values that are not finite")
