"""From a name to a loaded model: aliases, local folders and hub ids.

Every way in which this can fail is one line that says what to do instead. transformers' own modelling
code runs the model; nothing is forked here. The environment variables of the library are read here and
nowhere else: ``TOKENSWIFT_CACHE``, ``XDG_CACHE_HOME`` and ``TOKENSWIFT_KERNELS``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenswift.config import check_choice
from tokenswift.models import draft, embedded, hub
from tokenswift.models._hf import counted_loading, quiet_transformers
from tokenswift.models.gguf_files import gguf_in
from tokenswift.models.hub import line_of
from tokenswift.types import InputError, OnProgress, RunError

__all__ = [
    "ALIASES",
    "DEVICES",
    "DTYPES",
    "WEIGHTS",
    "Loaded",
    "cache_dir",
    "check_place",
    "gguf_in",
    "load",
    "native_bfloat16",
]

ALIASES = (embedded.NAME, draft.NAME)
DTYPES = ("auto", "float32", "bfloat16", "float16")
#: what weights are stored as in memory: as their files hold them, as floats, or in a low-bit format
WEIGHTS = ("stored", "float32", "bfloat16", "q8_0", "q4_0", "q4_1")
ACTIVATIONS = ("float", "int8")
DEVICES = ("auto", "cpu", "cuda")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
GGUF_FILE = re.compile(rf"({HUB_ID.pattern}):([\w.+-]+\.gguf)", re.IGNORECASE)
#: methods by which weights were quantised for other programs
OTHERS = ("gptq", "awq", "compressed-tensors")
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

    @property
    def generation_config(self) -> Any:
        """The model's transformers ``GenerationConfig``; None where it has none."""
        return getattr(self.model, "generation_config", None)


def cache_dir() -> Path:
    """``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else ``~/.cache/tokenswift``."""
    if own := os.environ.get("TOKENSWIFT_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "tokenswift"


def native_kernels_wanted() -> bool:
    """Whether CPU kernels may be compiled; ``TOKENSWIFT_KERNELS=torch`` forbids it.

    Raises:
        InputError: another value.
    """
    wanted = os.environ.get("TOKENSWIFT_KERNELS") or "auto"
    check_choice("TOKENSWIFT_KERNELS", wanted, ("auto", "torch"))
    return wanted == "auto"


def check_place_names(dtype: str, device: str, weights: str = "stored", activations: str = "float") -> None:
    """Raise :class:`InputError` for an unknown dtype, kind of device, weights or activations; light."""
    check_choice("dtype", dtype, DTYPES)
    check_choice("weights", weights, WEIGHTS)
    check_choice("activations", activations, ACTIVATIONS)
    if device not in DEVICES and not re.fullmatch(r"cuda:\d+", str(device)):
        raise InputError(f"device is {device!r}; valid: {', '.join(DEVICES)}")


def check_place(dtype: str, device: str) -> str:
    """Check dtype and device; the device to use, "auto" resolved.

    Raises:
        InputError: an unknown name, or CUDA asked for where there is none.
    """
    check_place_names(dtype, device)
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if count else "cpu"
    if device != "cpu" and not count:
        raise InputError(f"device is {device!r}, but no CUDA device is available here; valid: auto, cpu")
    if ":" in device and int(device.partition(":")[2]) >= count:
        raise InputError(f"device is {device!r}; valid: cuda:0 to cuda:{count - 1}")
    return device


def native_bfloat16(device: str) -> bool:
    """Whether torch's bfloat16 products run in hardware on a place from :func:`check_place`; for training.

    On a CPU without them torch emulates bfloat16, several times slower than float32; the kernels that texts
    are written with do not, and "auto" never looks at the processor there: it is the checkpoint's type.
    """
    if device != "cpu":
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    except OSError:  # not Linux: no way to tell
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def load(
    name_or_path: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    on_progress: OnProgress | None = None,
) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name_or_path: an alias (:data:`ALIASES`), a folder in transformers' format, a GGUF file or a folder
            with one, a hub id ``owner/name``, or ``owner/name:file.gguf``.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        on_progress: told of the stages "fetch" (the default model, in bytes) and "load" (in tensors).
    Raises:
        InputError: one line: what is wrong with the name, the folder, its files, or the place to run.
        RunError: the model does not fit into memory, or making the default model failed.
    """
    place = check_place(dtype, device)
    name = str(name_or_path)
    source, local = locate(name, on_progress)
    return load_located(name, source, local, dtype, place, on_progress)


def load_located(
    name: str, source: str, local: bool, dtype: str, place: str, on_progress: OnProgress | None = None
) -> Loaded:
    """:func:`load` for what :func:`locate` has found (``source``, ``local``), on a place from
    :func:`check_place`."""
    if (file := gguf_in(Path(source))) is not None:
        from tokenswift.models.unpacked import load_file

        model, tokenizer = load_file(name, file, dtype, place)
        return Loaded(model, tokenizer, name)
    with quiet_transformers(), counted_loading(on_progress):
        config = _config(name, source, local)
        tokenizer = _tokenizer(name, source, local)
        if place == "cpu" and Path(source).is_dir():
            _check_folder(name, Path(source), config, dtype)
        model = _model(name, source, local, config, dtype, place)
    return Loaded(model, tokenizer, name)


def load_tokenizer(name: str, source: str, local: bool) -> Any:
    """The tokenizer of :func:`load` alone."""
    if (file := gguf_in(Path(source))) is not None:
        from tokenswift.models.unpacked import tokenizer_of
        from tokenswift.weights.gguf import GgufFile

        return tokenizer_of(GgufFile(file))
    with quiet_transformers():
        return _tokenizer(name, source, local)


def load_config(name: str, source: str, local: bool) -> Any:
    """The config of :func:`load` alone, of files in transformers' format."""
    with quiet_transformers():
        return _config(name, source, local)


def check_name(name: str) -> None:
    """What can be said of a model's name without asking the hub; light.

    Raises:
        InputError: neither an alias, nor a folder with a config.json, nor a GGUF file or a folder with one,
            nor shaped like a hub id.
    """
    known = (
        f"valid: {', '.join(ALIASES)}, a folder in transformers' format, a GGUF file, a hub id owner/name, "
        "or owner/name:file.gguf"
    )
    if not name or "\0" in name:
        raise InputError(f"model is {name!r}; {known}")
    path = Path(name).expanduser()
    if name in ALIASES or gguf_in(path) is not None:
        return
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model folder {name} has no config.json and no GGUF file; {known}")
    elif path.exists():
        raise InputError(f"model {name} is a file, but no GGUF file; {known}")
    elif GGUF_FILE.fullmatch(name) and ".." not in name:
        return
    elif not HUB_ID.fullmatch(name) or ".." in name:
        what = "no such folder" if "/" in name or name.startswith((".", "~")) else "unknown name"
        raise InputError(f"model is {name!r}: {what}; {known}")


def locate(name: str, on_progress: OnProgress | None = None) -> tuple[str, bool]:
    """Where a name's files are: (folder, GGUF file or hub id, whether only local files may be used).

    Models that are not here yet are fetched.

    Raises:
        InputError: neither an alias, nor a folder with a config.json, nor a hub id that can be reached.
    """
    found = _at_hand(name, on_progress)
    if found is None:
        asked = GGUF_FILE.fullmatch(name)
        return (hub.fetch(name) if asked is None else hub.fetch_file(*asked.groups())), True
    return found, True


@contextmanager
def header_of(name: str) -> Iterator[tuple[str, bool]]:
    """:func:`locate` for who needs a config or the header of a GGUF file alone: of a hub's model that is not
    here, no weights are fetched. A file that was cut off behind its header is gone after the block."""
    found, asked = _at_hand(name), GGUF_FILE.fullmatch(name)
    if found is not None or asked is None:
        yield found or name, found is not None
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        path.write_bytes(hub.header(*asked.groups()))
        yield str(path), True


def _at_hand(name: str, on_progress: OnProgress | None = None) -> str | None:
    """What :func:`locate` finds without fetching a hub's model; None where that can be fetched."""
    check_name(name)
    if name in ALIASES:
        return str((draft if name == draft.NAME else embedded).ensure(cache_dir(), on_progress))
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return str(path)
    reason, asked = hub.answers(), GGUF_FILE.fullmatch(name)
    if reason is None:
        return None
    if asked is not None:
        if (there := hub.cached_file(*asked.groups())) is not None:
            return there
    elif hub.cached(name):
        return name
    raise InputError(
        f"model is {name!r}: {reason}, and there is no such local folder; "
        f"valid without the hub: {', '.join(ALIASES)}, a folder in transformers' format, or a GGUF file"
    )


def sampling_of(config: Any, name: str) -> dict[str, Any]:
    """The fields of `config.SamplingParams` that a model's ``generation_config.json`` names.

    Args:
        config: a transformers ``GenerationConfig``; None counts as one that names nothing.
        name: the model's, for messages.
    Raises:
        InputError: it names none.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")
    found = {key: value for key in names if (value := getattr(config, key, None)) is not None}
    if getattr(config, "do_sample", None) is False:
        found["greedy"] = True
    if not found:
        raise InputError(
            f"sampling is 'model', but the generation_config.json of {name} names no setting of it; "
            f"valid: default"
        )
    return found


def _config(name: str, source: str, local: bool) -> Any:
    from transformers import AutoConfig

    supported = "valid: causal language models with rotary positions, such as Llama, Qwen or Mistral"
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=local)
    except (
        Exception
    ) as error:  # transformers raises OSError, ValueError, KeyError, TypeError and its own here
        raise InputError(
            f"model {name}: its config.json cannot be used ({line_of(error)}); {supported}"
        ) from error
    architectures = [str(a) for a in getattr(config, "architectures", None) or ()]
    causal = any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in architectures)
    if architectures and not causal:
        raise InputError(
            f"model {name} is not a causal language model (architecture {architectures[0]}); {supported}"
        )
    _check_unquantised(name, config)
    return config


def _check_unquantised(name: str, config: Any) -> None:
    """Refuse weights that were quantised for other programs.

    Raises:
        InputError: with what to do instead.
    """
    said = getattr(config, "quantization_config", None) or {}
    said = said if isinstance(said, dict) else said.to_dict()
    method = str(getattr(said.get("quant_method"), "value", said.get("quant_method"))).lower()
    if method in OTHERS:
        raise InputError(
            f"model {name} is quantised by {method}; valid: the checkpoint that it was made from (--weights "
            "q4_0 or q8_0 quantises it here), or a GGUF file of the model"
        )


def _tokenizer(name: str, source: str, local: bool) -> Any:
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise InputError(f"model folder {name} has no tokenizer files; valid: with {TOKENIZER_FILES[0]}")
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local)
    except Exception as error:  # as above
        raise InputError(f"model {name}: its tokenizer cannot be loaded ({line_of(error)})") from error


def _check_folder(name: str, folder: Path, config: Any, dtype: str) -> None:
    """:func:`check_memory` for the files of a folder."""
    import torch

    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    weights = [file for file in hub.wanted_files(list(sizes)) if file.endswith((".safetensors", ".bin"))]
    stored = getattr(config, "dtype", None)
    kind = stored if dtype == "auto" else getattr(torch, dtype)
    scale = kind.itemsize / stored.itemsize if isinstance(stored, torch.dtype) and kind else 1.0
    needed = int(sum(sizes[file] for file in weights) * scale)
    check_memory(name, needed, kind == torch.float32)


def check_memory(name: str, needed: int, wide: bool) -> None:
    """Refuse a model whose weights alone are more than the memory that can be had: the system would end the
    process without a word.

    Args:
        needed: bytes.
        wide: whether the weights would be float32.
    Raises:
        InputError: they do not fit.
    """
    from tokenswift.memory import host_memory

    memory = host_memory()
    if needed > memory.free:
        smaller = ", or dtype bfloat16" if wide else ""
        raise InputError(
            f"model {name} needs {needed:,} bytes of memory for its weights, {memory.free:,} bytes are "
            f"available; valid: a smaller model{smaller}"
        )


def _model(name: str, source: str, local: bool, config: Any, dtype: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            local_files_only=local,
            output_loading_info=True,
            **options,
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(
            f"model {name} does not fit into the memory of device {device}; nothing was kept"
        ) from error
    except Exception as error:  # safetensors, transformers and torch each raise their own here
        raise InputError(
            f"model {name}: its weights cannot be loaded ({line_of(error)}); the files may be incomplete"
        ) from error
    model, report = loaded
    for fault in ("missing_keys", "mismatched_keys"):
        if tensors := sorted(str(key) for key in report.get(fault) or ()):
            raise InputError(
                f"model {name}: its weights do not fit its config.json "
                f"({len(tensors)} tensors {fault.removesuffix('_keys')}, e.g. {tensors[0]})"
            )
    return model.eval()
