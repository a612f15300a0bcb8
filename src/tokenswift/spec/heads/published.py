"""Checkpoints of others: TokenSwift's published layout, and Medusa-1 heads.

- *TokenSwift*: a whole transformers checkpoint with extra tensors
  ``model.medusa_layers.{i}.linear.weight``, ``.input_layernorm.weight``, ``.post_layernorm.weight``
  and ``medusa_heads`` in its config. It carries its base model, hence the base's identity too.
- *Medusa-1*: ``medusa_lm_head.pt`` (or ``.safetensors``) with ``{i}.{j}.linear.weight`` and ``.bias``
  (residual block j of head i) and ``{i}.{n}.weight`` (the head's LM head); the base comes apart.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tokenswift.checks import check_integer, shown
from tokenswift.files import MOST_CONFIG, object_in, weight_map
from tokenswift.loader.find import HUB_ID, cached_file
from tokenswift.loader.identity import BaseIdentity, base_of, sample_of
from tokenswift.loader.weights import open_weights
from tokenswift.spec.heads.checkpoint import MOST_NAME, TYPES, build_heads, check_base
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.types import InputError

PREFIX = "model.medusa_layers."
EMBEDDING = "model.embed_tokens.weight"
PARTS = ("linear.weight", "input_layernorm.weight", "post_layernorm.weight")

SHARDS = ("safetensors", "bin")
SMALL = ("config.json", "*.index.json", "medusa_lm_head.*")


def checkpoint_folder(spec: str | Path) -> Path:
    """The folder of a checkpoint: a local one, or a hub id's, fetched as far as heads need it.

    Of a sharded checkpoint only the shards with heads and with what identifies the base are fetched.

    Raises:
        InputError: no such folder, or the hub does not give it.
    """
    path = Path(spec)
    if path.exists() or not HUB_ID.fullmatch(str(spec)) or ".." in str(spec):
        return path
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(str(spec), allow_patterns=list(SMALL)))
        if not any(folder.glob("medusa_lm_head.*")):
            snapshot_download(str(spec), allow_patterns=_shards_of_heads(folder))
    except InputError:
        raise
    except Exception as error:  # the hub's own errors are many
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InputError(
            f"--checkpoint {spec} is not a folder here, and the hub does not give it ({reason})"
        ) from error
    return folder


def _shards_of_heads(folder: Path) -> list[str]:
    """The weight files that an import reads, by the index; without one, the single file."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            files = weight_map(index, f"--checkpoint {folder}", SHARDS)
            wanted = _wanted(folder, read_config(folder))
            return sorted({file for name, file in files.items() if wanted.search(name)})
    return ["model.safetensors", "pytorch_model.bin"]


def cached_folder(name: str) -> Path | None:
    """Where the files of a loaded model are: its own folder, or its hub id's in the hub's local cache."""
    if Path(name).is_dir():
        return Path(name)
    found = cached_file(name, "config.json") if HUB_ID.fullmatch(name) else None
    return None if found is None else Path(found).parent


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``."""
    if not folder.is_dir():
        raise InputError(f"--checkpoint {folder} is not a folder")
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"--checkpoint {folder} has no config.json")
    return object_in(path, MOST_CONFIG, f"--checkpoint {folder}")


def read_tensors(folder: Path, wanted: re.Pattern[str]) -> dict[str, Tensor]:
    """Tensors whose names match, from single or sharded safetensors or bin files."""
    found: dict[str, Tensor] = {}
    for file in _weight_files(folder, wanted):
        try:
            if file.suffix == ".safetensors":
                shard = open_weights(file, "--checkpoint file")
                names = [name for name in shard.keys() if wanted.search(name)]  # noqa: SIM118
                found |= {name: shard.get_tensor(name) for name in names}
            else:
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                found |= {name: t for name, t in content.items() if wanted.search(name)}
        except InputError:
            raise
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
            raise InputError(f"--checkpoint file {file} cannot be read as weights") from error
        except Exception as error:  # unpickling fails in many ways
            raise InputError(f"--checkpoint file {file} holds more than plain weights") from error
    for name, tensor in found.items():
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.numel()
        if not plain or tensor.dtype not in TYPES:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in TYPES)
            raise InputError(f"--checkpoint {folder}: {shown(name)} is not a tensor of {kinds}")
    return found


def _weight_files(folder: Path, wanted: re.Pattern[str]) -> list[Path]:
    """The files that hold tensors with such names."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            where = weight_map(index, f"--checkpoint {folder}", SHARDS)
            names = sorted({file for name, file in where.items() if wanted.search(name)})
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise InputError(f"--checkpoint {folder} lacks the shard {missing[0]}")
            return [folder / name for name in names]
        if (folder / stem).is_file():
            return [folder / stem]
    for name in ("medusa_lm_head.safetensors", "medusa_lm_head.pt"):
        if (folder / name).is_file():
            return [folder / name]
    raise InputError(f"--checkpoint {folder} has no safetensors or bin weights")


def holds_heads(folder: str | Path) -> bool:
    """True for a folder in the published TokenSwift layout."""
    path = Path(folder) / "config.json"
    try:
        return path.is_file() and "medusa_heads" in object_in(path, MOST_CONFIG, str(folder))
    except InputError:
        return False


def import_checkpoint(folder: str | Path, model: Any = None) -> tuple[Heads, BaseIdentity]:
    """Heads and their base's identity from a published checkpoint.

    Args:
        folder: the checkpoint, of either layout.
        model: the base model, loaded; its weights are compared with the checkpoint's own where those
            are there. Medusa-1 heads need it.
    """
    folder = Path(folder)
    config = read_config(folder)
    if "medusa_num_heads" in config or any(folder.glob("medusa_lm_head.*")):
        return _import_medusa(folder, config, model)
    return _import_tokenswift(folder, config, model)


def _middle(folder: Path, config: dict[str, Any]) -> str:
    """The weight of the middle layer that identifies a base."""
    return f"model.layers.{_whole(folder, config, 'num_hidden_layers') // 2}.self_attn.q_proj.weight"


def _whole(folder: Path, config: dict[str, Any], name: str, default: int = 0) -> int:
    """An integer that a config says."""
    return check_integer(f"--checkpoint {folder}: {name}", config.get(name, default), 0)


def _wanted(folder: Path, config: dict[str, Any]) -> re.Pattern[str]:
    """Names of what is read of a TokenSwift checkpoint."""
    own = f"{re.escape(PREFIX)}[0-9]{{1,6}}[.].*"
    return re.compile(f"^({own}|{re.escape(EMBEDDING)}|{re.escape(_middle(folder, config))})$")


def _import_tokenswift(folder: Path, config: dict[str, Any], model: Any) -> tuple[Heads, BaseIdentity]:
    tensors, middle = read_tensors(folder, _wanted(folder, config)), _middle(folder, config)
    heads = {k.removeprefix(PREFIX): v for k, v in tensors.items() if k.startswith(PREFIX)}
    if not heads:
        raise InputError(f"--checkpoint {folder} has no heads: no tensor is named {PREFIX}*")
    count = 1 + max(int(name.partition(".")[0]) for name in heads)
    said = _whole(folder, config, "medusa_heads", count)
    if said != count:
        raise InputError(f"--checkpoint {folder} has {count} heads, its config says medusa_heads {said}")
    width = next((v.numel() for k, v in heads.items() if k.endswith(PARTS[1:])), 0)
    vocabulary = _whole(folder, config, "vocab_size")
    if EMBEDDING in tensors:
        if tensors[EMBEDDING].ndim != 2:
            found = shown(list(tensors[EMBEDDING].shape))
            raise InputError(f"--checkpoint {folder}: {EMBEDDING} has shape {found}; valid: a matrix")
        vocabulary, width = tensors[EMBEDDING].shape
    try:
        shape = HeadsConfig("linear", count, width, vocabulary, eps=config.get("rms_norm_eps", 1e-5))
    except InputError as error:
        raise InputError(f"--checkpoint {folder}: {error}") from error
    built = build_heads(shape, {f"layers.{k}": v for k, v in heads.items()}, str(folder))
    name = str(config.get("_name_or_path") or folder.resolve().name).rstrip("/").rpartition("/")[2]
    name = name[:MOST_NAME]
    if EMBEDDING in tensors and middle in tensors:
        sample = torch.cat((sample_of(tensors[EMBEDDING]), sample_of(tensors[middle])))
        base = BaseIdentity(name, width, vocabulary, sample)
        if model is not None:
            check_base(f"in {folder}", base, base_of(model))
        return built, base
    if model is None:
        raise InputError(f"--checkpoint {folder} lacks its base model's weights; name the base with --model")
    base = base_of(model)
    if base.hidden_size != width:
        raise InputError(f"--checkpoint {folder} has hidden size {width}, {base.name} has {base.hidden_size}")
    return built, base


def _import_medusa(folder: Path, config: dict[str, Any], model: Any) -> tuple[Heads, BaseIdentity]:
    if model is None:
        raise InputError(f"--checkpoint {folder} holds Medusa heads only; name their base with --model")
    raw = read_tensors(folder, re.compile(r"^(medusa_head\.)?[0-9]{1,6}\.[0-9]{1,6}\."))
    raw = {k.removeprefix("medusa_head."): v for k, v in raw.items()}
    if not raw:
        raise InputError(f"--checkpoint {folder} has no heads: no tensor is named like 0.0.linear.weight")
    base = base_of(model)
    count = 1 + max(int(k.split(".")[0]) for k in raw)
    blocks = 1 + max((int(k.split(".")[1]) for k in raw if ".linear." in k), default=-1)
    said = _whole(folder, config, "medusa_num_heads", count)
    if said > count or blocks < 1:
        raise InputError(
            f"--checkpoint {folder} has {count} heads of {blocks} blocks, its config says {said}"
        )
    norm = model.base_model.norm
    tensors: dict[str, Tensor] = {}
    for i in range(count):
        tensors[f"layers.{i}.final_norm.weight"] = norm.weight.detach().cpu()
    for name, tensor in raw.items():
        i, j, rest = name.split(".", 2)
        part = (
            f"blocks.{j}.{rest.removeprefix('linear.')}" if rest.startswith("linear.") else f"lm_head.{rest}"
        )
        tensors[f"layers.{i}.{part}"] = tensor
    eps = float(getattr(norm, "variance_epsilon", 1e-5))
    shape = HeadsConfig(
        "medusa", count, base.hidden_size, base.vocab_size, eps=eps, own_lm_heads=True, blocks=blocks
    )
    return build_heads(shape, tensors, str(folder)), base


def check_export(folder: Path) -> None:
    """Raise :class:`InputError` unless a folder is free for an export."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--export {folder} exists and is not empty; valid: a new or empty folder")


def export_checkpoint(heads: Heads, model: Any, folder: str | Path, tokenizer: Any = None) -> None:
    """Write base model and linear heads as a checkpoint in the published layout.

    With the tokenizer it is a model folder too: transformers loads it, and does not look at the heads.
    """
    if heads.kind != "linear":
        raise InputError(f"heads are {heads.kind}; the published layout holds linear heads only")
    folder = Path(folder)
    check_export(folder)
    for name, tensor in heads.state_dict().items():
        if not bool(torch.isfinite(tensor.to(model.dtype)).all()):
            raise InputError(f"heads tensor {name} is not finite; nothing was written to --export {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        for name, tensor in heads.state_dict().items():
            weights[PREFIX + name.removeprefix("layers.")] = (
                tensor.detach().to("cpu", model.dtype).contiguous()
            )
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        config = model.config.to_dict() | {"medusa_heads": heads.count}
        (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write to --export {folder}: {error}") from error
