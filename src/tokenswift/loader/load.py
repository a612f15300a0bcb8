"""A model's files, opened for the native decoder, or loaded as transformers' own model and tokenizer.

Every way in which this can fail is one line that says what to do instead. transformers' own modelling
code runs the model; nothing is forked here. GGUF files are unpacked in memory from the very weights that the
native decoder reads.
"""

from __future__ import annotations

import copy
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import CRITICAL
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from tokenswift.config import Dtype, LoadConfig, Weights, check_backend
from tokenswift.kernels.weights import Stored
from tokenswift.loader import default_model
from tokenswift.loader.config import (
    CAUSAL,
    EMBEDDING,
    FAMILIES,
    HEAD,
    NativeConfig,
    check_small_files,
    completed,
    gguf_sampling,
    layout_of,
    named_sampling,
    read_config,
    read_generation,
)
from tokenswift.loader.find import cache_dir, gguf_in, locate, refused_as, wanted_files
from tokenswift.loader.gguf import (
    OUTER,
    GgufFile,
    GgufWeights,
    config_of,
    own_dtype,
)
from tokenswift.loader.identity import config_digest, weights_digest
from tokenswift.loader.prompts import end_ids
from tokenswift.loader.rope import Rotary, rotary_of_config
from tokenswift.loader.tokenizer import gguf_tokenizer, read, wrapped
from tokenswift.loader.weights import INDEX, FileWeights, open_weights, unstored, weight_files
from tokenswift.memory import memory_of
from tokenswift.types import InputError, RunError, check_choice, shown

_one_at_a_time = threading.RLock()
DTYPES = get_args(Dtype)
#: what weights are stored as in memory: as their files hold them, as floats, or in a quantized format
WEIGHTS = get_args(Weights)
#: numbers of a model that a byte of its files may hold: those of one bit
PER_BYTE = 8
SUPPORTED = "causal language models with rotary positions, such as Llama, Qwen or Mistral"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run.

    Attributes:
        model: the transformers causal LM, in evaluation mode, on its device.
        tokenizer: its transformers tokenizer.
        name: the name it was asked for by.
    """

    model: Any
    tokenizer: Any
    name: str


def check_place(how: LoadConfig) -> str:
    """The device to use: "cpu", "cuda" or "cuda:N".

    Raises:
        InputError: CUDA is asked for where there is none, or a backend that does not run on the device.
    """
    device, count = how.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    elif device != "cpu" and not count:
        raise InputError(
            f"device is {device!r}, but no CUDA device is available here; valid: auto, cpu", "device"
        )
    elif ":" in device and int(device.partition(":")[2]) >= count:
        raise InputError(f"device is {device!r}; valid: cuda:0 to cuda:{count - 1}", "device")
    check_backend(how.backend, device)
    return device


def native_bfloat16(device: str) -> bool:
    """Whether torch's bfloat16 products run in hardware on a place from :func:`check_place`; for training.

    On a CPU without them torch emulates bfloat16, several times slower than float32; the kernels that texts
    are written with do not, and "auto" never looks at the processor there: it is the checkpoint's type.
    """
    if device != "cpu":
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:  # not Linux: no way to tell
        return False
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)


def load(name_or_path: str | Path, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name_or_path: an alias (`find.ALIASES`), a folder in transformers' format, a GGUF file or a folder
            with one, a hub id ``owner/name``, or ``owner/name:file.gguf``.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
    Raises:
        InputError: one line: what is wrong with the name, the folder, its files, or the place to run.
        RunError: the model does not fit into memory, or making the default model failed.
    """
    check_choice("dtype", dtype, tuple(name for name in DTYPES if name != "int8"))
    how = LoadConfig(dtype, device)
    place, name = check_place(how), str(name_or_path)
    return load_located(name, locate(name), how, place)


def load_located(name: str, source: Path, how: LoadConfig, place: str) -> Loaded:
    """:func:`load` for what `find.locate` has found, on a place from :func:`check_place`."""
    if name == default_model.DRAFT:
        return Loaded(*packed_draft(source, how.floats, place), name)
    if (path := gguf_in(source)) is not None:
        return Loaded(*_load_gguf(name, path, how, place), name)
    with quiet_transformers():
        config, tokenizer = load_config(name, source), load_tokenizer(name, source)
        check_size(name, source, config, how, place)
        model = _model(name, source, config, how, place)
    return Loaded(model, tokenizer, name)


def load_config(name: str, folder: Path) -> Any:
    """transformers' config of files in its format.

    Raises:
        InputError: it cannot be used, or is no causal language model's.
    """
    from transformers import AutoConfig

    read_config(name, folder / "config.json")
    with quiet_transformers(), refused_as(f"model {name}: its config.json cannot be used", SUPPORTED):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    named = getattr(config, "architectures", None) or [CAUSAL[0]]
    if not (isinstance(named, list) and any(str(each).endswith(CAUSAL) for each in named)):
        raise InputError(
            f"model {name} is not a causal language model (its architectures are {shown(named)}); "
            f"valid: {SUPPORTED}"
        )
    return config


def load_tokenizer(name: str, source: Path) -> Any:
    """transformers' tokenizer of what `find.locate` has found.

    Raises:
        InputError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if (path := gguf_in(source)) is not None:
        return wrapped(gguf_tokenizer(GgufFile(path).metadata, path))
    if not any((source / file).is_file() for file in TOKENIZER_FILES):
        raise InputError(f"model folder {name} has no tokenizer files; valid: with {TOKENIZER_FILES[0]}")
    check_small_files(name, source)
    with quiet_transformers(), refused_as(f"model {name}: its tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)


def check_size(name: str, folder: Path, config: Any, how: LoadConfig, place: str) -> None:
    """See that a config does not ask for more numbers than the files hold, before any of them is made, that
    an index names files of its folder, and that the weights fit into memory.

    Raises:
        InputError: they do not, or the config is no causal language model's.
    """
    from transformers import AutoModelForCausalLM

    if (folder / INDEX).exists():
        tuple(weight_files(folder))
    wrong = f"model {name}: its config.json does not describe a causal language model"
    with refused_as(wrong, SUPPORTED), torch.device("meta"):  # without memory
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    numbers = sum(part.numel() for part in model.parameters())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    if numbers > PER_BYTE * (size := sum(sizes.values())):
        raise InputError(
            f"model {name}: its weights do not fit its config.json, which asks for {numbers:,} numbers of "
            f"files with {size:,} bytes; valid: the config of these weights"
        )
    weights = [file for file in wanted_files(list(sizes)) if file.endswith((".safetensors", ".bin"))]
    stored = getattr(config, "dtype", None)
    scale = how.floats.itemsize / stored.itemsize if how.floats and isinstance(stored, torch.dtype) else 1.0
    check_memory(name, int(sum(sizes[file] for file in weights) * scale), place)


def check_memory(name: str, needed: int, place: str) -> None:
    """Refuse a model whose weights alone are more than the memory that can be had: the system would end the
    process without a word.

    Args:
        needed: bytes.
        place: from :func:`check_place`.
    Raises:
        InputError: they do not fit.
    """
    memory = memory_of(torch.device(place))
    if memory is not None and needed > memory.free:
        raise InputError(
            f"model {name} needs {needed:,} bytes of memory for its weights, {memory.free:,} bytes are "
            "available; valid: a smaller model, or weights of fewer bits (dtype bfloat16, weights q4_0)"
        )


@contextmanager
def fitting(name: str, place: object) -> Iterator[None]:
    """Inside the block, memory that runs out is a failure in one line.

    Raises:
        RunError: the model does not fit.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        line = f"model {name} does not fit into the memory of device {place}; valid: a smaller model"
        raise RunError(f"{line}; nothing was kept") from error


def _model(name: str, source: Path, config: Any, how: LoadConfig, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
    wrong = f"model {name}: its weights cannot be loaded"
    with refused_as(wrong, "complete files of a checkpoint"), fitting(name, device):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=how.floats or "auto",
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    model, report = loaded
    for fault in ("missing_keys", "mismatched_keys"):
        if tensors := sorted(str(key) for key in report.get(fault) or ()):
            raise InputError(
                f"model {name}: its weights do not fit its config.json "
                f"({len(tensors)} tensors {fault.removesuffix('_keys')}, e.g. {tensors[0]})"
            )
    return model.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, log lines and Python warnings inside the block. These settings are
    the whole process's, so other threads wait for their turn.

    Loading errors still surface: they are exceptions. The previous settings come back at the end.
    """
    from transformers.utils import logging

    with _one_at_a_time:
        bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity(CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


# ---- models of other files than transformers' own: GGUF, and the packed draft model ------------------------


def model_of(
    config: NativeConfig,
    get: Callable[[str], Tensor | Stored | None],
    dtype: torch.dtype,
    ends: list[int] | None = None,
) -> Any:
    """A native family's model of transformers, filled with the very weights that the native decoder reads,
    unpacked to a type: transformers' reader of GGUF files leaves out some of what they say. Torch's default
    type, the whole process's, stays as it is.

    Args:
        get: gives a weight by its name; None: a bias that is zero.
        ends: end-of-text ids, where the config does not say all.
    """
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        with torch.device("meta"):  # without memory
            model: Any = AutoModelForCausalLM.from_config(config.of_transformers(), dtype=torch.float32)
        body = model.model  # with its only buffers:
        body.rotary_emb = type(body.rotary_emb)(config=model.config)
        if hasattr(body.embed_tokens, "scalar_embed_scale"):
            body.embed_tokens.embed_scale = torch.tensor(body.embed_tokens.scalar_embed_scale)
    filled: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found = get(name)
        made = torch.zeros(parameter.shape, dtype=dtype) if found is None else unstored(found, dtype)
        filled[name] = made.to(dtype, copy=made is found).contiguous()
    model.load_state_dict(filled, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    if ends:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    return model.eval()


def packed_draft(path: Path, dtype: torch.dtype | None, device: str) -> tuple[Any, Any]:
    """TriForce's draft model for the default model: trained layers of a checkout's file, and that model's own
    embedding, LM head and tokenizer.

    Args:
        path: safetensors of its layers and final norm, its config in the header.
        dtype: None: float32.
        device: from :func:`check_place`.
    """
    file = GgufFile(default_model.ensure(cache_dir()) / default_model.GGUF)
    packed = open_weights(path, "draft model")
    config = completed("llama", json.loads(packed.metadata()[default_model.METADATA_KEY])["config"])
    if config is None:
        raise RunError(f"the draft model {path} is of another family; valid: llama")
    tensors: dict[str, Any] = {name: packed.get_tensor(name) for name in packed.keys()}  # noqa: SIM118
    tensors[EMBEDDING] = unstored(file[OUTER[EMBEDDING]], torch.float32)
    made = model_of(config, tensors.get, dtype or torch.float32)
    return made.to(device), wrapped(gguf_tokenizer(file.metadata, file.path))


def _load_gguf(name: str, path: Path, how: LoadConfig, place: str) -> tuple[Any, Any]:
    """transformers' own model and tokenizer of a GGUF file, unpacked.

    Raises:
        InputError: the file cannot be read.
    """
    found = _open_gguf(name, path, GgufFile(path), how, place.partition(":")[0])
    model = model_of(found.config, found.weights.get, found.weights.dtype).to(place)
    found.weights.rest()
    model.name_or_path = model.config._name_or_path = str(path)
    return model, wrapped(found.tokenizer)


#: types that a checkpoint's weights are computed with
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's files, read but for the weights themselves.

    Attributes:
        name: what the model was asked for by.
        folder: where the files are: a folder, or a GGUF file.
        config, rotary: of the model.
        weights: by name, with their layout.
        tokenizer: a `PlainTokenizer`; None where transformers' own has to be loaded.
        ends: ids that end a text, the tokenizer's own aside.
        sampling: settings that the model names.
        stamps: size and time of each file.
    """

    name: str
    folder: Path
    config: NativeConfig
    rotary: Rotary
    weights: FileWeights | GgufWeights
    tokenizer: Any
    ends: frozenset[int]
    sampling: dict[str, Any]
    stamps: tuple[tuple[str, int, int], ...]

    def digests(self) -> dict[str, str]:
        """Digests "config" and "weights" of `identity`: read when they are asked for, as a journal begins.

        Raises:
            InputError: as of :meth:`check_unchanged`.
        """
        self.check_unchanged()
        weights = weights_digest(self.weights.values(), self.weights.dtype)
        self.weights.rest()
        return {"config": config_digest(self.config), "weights": weights}

    def check_unchanged(self) -> None:
        """Refuse files that are not those that were opened.

        Raises:
            InputError: one has changed.
        """
        if _stamps(self.folder) != self.stamps:
            raise InputError(
                f"model folder {self.folder} has changed since the model was loaded; valid: to load it again"
            )


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    found = [(path.name, path.stat()) for path in paths if path.exists()]
    return tuple((name, about.st_size, about.st_mtime_ns) for name, about in found)


def open_files(name: str, folder: Path, how: LoadConfig, kind: str) -> Opened | None:
    """The files of a model of a native family; None where transformers has to read them.

    Args:
        name: what the model was asked for by.
        folder: its folder, or a GGUF file.
        kind: of device: "cpu" or "cuda".
    Raises:
        InputError: the files say what no model's files say, or are not whole.
    """
    if (path := gguf_in(folder)) is not None:
        return _open_gguf(name, folder, GgufFile(path), how, kind)
    return _open_folder(name, folder, how) if folder.is_dir() else None


def _open_gguf(name: str, folder: Path, file: GgufFile, how: LoadConfig, kind: str) -> Opened:
    stamps, config = _stamps(folder), config_of(file)
    dtype = how.floats or getattr(torch, own_dtype(file, kind))
    weights = GgufWeights(file, layout_of(config), dtype)
    sampling = gguf_sampling(file.metadata)
    if not sampling and folder.is_dir():
        sampling = named_sampling(SimpleNamespace(**(read_generation(folder, name) or {})))
    rotary, ends = rotary_of_config(config, how.scaling, double=True), frozenset(end_ids(config))
    tokenizer = gguf_tokenizer(file.metadata, file.path)
    return Opened(name, folder, config, rotary, weights, tokenizer, ends, sampling, stamps)


def _open_folder(name: str, folder: Path, how: LoadConfig) -> Opened | None:
    """A checkpoint in transformers' format whose files hold what transformers would make of them."""
    said, stamps = read_config(name, folder / "config.json"), _stamps(folder)
    config = completed(said["model_type"], said) if said.get("model_type") in FAMILIES else None
    if config is None:
        return None
    layout = layout_of(config)
    dtype = how.floats or getattr(torch, str(config.dtype), None)
    if dtype not in FLOATS or any(size % 2 for size in (layout.hidden_size, layout.intermediate_size)):
        return None
    rotary = rotary_of_config(config, how.scaling)
    try:
        weights = FileWeights(folder, layout, dtype)
    except InputError:
        return None  # other files than safetensors, or other names: transformers may know them
    there = {one for one in weights.names() if not one.endswith("rotary_emb.inv_freq")}
    if layout.tied and HEAD in there and torch.equal(weights.raw(HEAD), weights.raw(EMBEDDING)):
        there.remove(HEAD)
    if there != layout.shapes().keys():
        return None
    weights.rest()
    generation = read_generation(folder, name)
    settings = SimpleNamespace(**(said if generation is None else generation))
    tokenizer, ends = read(folder, config.model_type), frozenset(end_ids(settings, config))
    sampling = named_sampling(settings)
    return Opened(name, folder, config, rotary, weights, tokenizer, ends, sampling, stamps)
