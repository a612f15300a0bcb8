"""From a name to a loaded model: aliases, local folders and hub ids.

Every way in which this can fail is one line that says what to do instead. transformers' own modelling
code runs the model; nothing is forked here. The environment variables of the library are read here and
nowhere else: ``TOKENSWIFT_CACHE``, ``XDG_CACHE_HOME`` and ``TOKENSWIFT_KERNELS``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenswift.config import check_choice, check_integer, shown
from tokenswift.kernels.cpu.build import INSTRUCTION_SETS
from tokenswift.loader import draft, embedded, hub
from tokenswift.loader._hf import counted_loading, making_models, quiet_transformers
from tokenswift.loader.gguf.find import gguf_in
from tokenswift.loader.hub import line_of
from tokenswift.loader.own_sampling import named
from tokenswift.ranks import check_tp
from tokenswift.types import InputError, OnProgress, RunError
from tokenswift.words import (
    Activations,
    Backend,
    CudaGraphs,
    Device,
    Dtype,
    KvCacheDtype,
    Weights,
    words,
)

__all__ = [
    "ALIASES",
    "BACKENDS",
    "CUDA_GRAPHS",
    "DEVICES",
    "DTYPES",
    "KV_CACHE_DTYPES",
    "WEIGHTS",
    "Loaded",
    "cache_dir",
    "check_place",
    "gguf_in",
    "load",
    "native_bfloat16",
]

ALIASES = (embedded.NAME, draft.NAME)
DTYPES = words(Dtype)
#: types of keys and values
KV_CACHE_DTYPES = words(KvCacheDtype)
#: what weights are stored as in memory: as their files hold them, as floats, or in a low-bit format
WEIGHTS = words(Weights)
ACTIVATIONS = words(Activations)
DEVICES = words(Device)
#: what computes: the kernels of the device where they work, those of a kind of device or no model, or torch
BACKENDS = words(Backend)
CUDA_GRAPHS = words(CudaGraphs)
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

    def named_sampling(self) -> dict[str, Any]:
        """The sampling settings that the model itself names."""
        return named(getattr(self.model, "generation_config", None))


def cache_dir() -> Path:
    """``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else ``~/.cache/tokenswift``."""
    if own := os.environ.get("TOKENSWIFT_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "tokenswift"


def usual_backend() -> str:
    """What the backend "auto" is: "auto" or "torch", as ``TOKENSWIFT_KERNELS`` says.

    Raises:
        InputError: see :func:`kernels_wanted`.
    """
    return "torch" if kernels_wanted() == "torch" else "auto"


def kernels_wanted() -> str:
    """``TOKENSWIFT_KERNELS``: "auto", "torch", or the instruction set that CPU kernels are compiled
    for, to find out what is at fault.

    Raises:
        InputError: another value.
    """
    wanted = os.environ.get("TOKENSWIFT_KERNELS") or "auto"
    check_choice("TOKENSWIFT_KERNELS", wanted, ("auto", "torch", *INSTRUCTION_SETS))
    return wanted


def check_backend(backend: str, place: str) -> None:
    """Raise :class:`InputError` for a backend that does not run on a place from :func:`check_place`."""
    check_choice("backend", backend, BACKENDS)
    kind = place.partition(":")[0]
    if backend not in ("auto", "torch", kind):
        raise InputError(f"backend is {backend!r}, and the device is {place!r}; valid: auto, {kind}, torch")


def check_place_names(
    dtype: str,
    device: str,
    weights: str = "stored",
    activations: str = "float",
    backend: str = "auto",
    cuda_graphs: str = "auto",
    kv_cache_dtype: str = "auto",
) -> None:
    """Raise :class:`InputError` for an unknown dtype, kind of device, and so on; light."""
    check_choice("dtype", dtype, DTYPES)
    check_choice("weights", weights, WEIGHTS)
    check_choice("activations", activations, ACTIVATIONS)
    check_choice("cuda_graphs", cuda_graphs, CUDA_GRAPHS)
    check_choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    check_backend(backend, device if device in DEVICES[1:] else backend)
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


def check_spread(device_map: object, tp: object, device: str) -> None:
    """Refuse what no model can be spread by; light.

    Args:
        device_map: None; "auto", as accelerate places layers over cards, memory and disk; or, by the name of
            a module, "cpu", "disk", "cuda:N" or a card's number.
        tp: ranks of a tensor-parallel model.
    Raises:
        InputError: neither; both; or what they need is not there.
    """
    ranks = check_integer("tp", tp, 1)
    valid = "valid: auto, or a device for each module by name"
    if device_map is not None and device_map != "auto":
        if not isinstance(device_map, Mapping) or not device_map:
            raise InputError(f"device_map is {shown(device_map)}; {valid}")
        for module, place in device_map.items():
            if not isinstance(module, str) or not re.fullmatch(r"cpu|disk|cuda|cuda:\d+|\d+", str(place)):
                raise InputError(
                    f"device_map places {shown(module)} on {shown(place)}; valid: cpu, disk, cuda:N or N"
                )
    if device_map is not None and ranks > 1:
        raise InputError(f"device_map is {shown(device_map)} beside tp {tp}; valid: one of the two")
    if device_map is not None and device != "auto":
        raise InputError(f"device is {device!r} beside device_map; valid: auto, the map says where")
    if device_map is not None and find_spec("accelerate") is None:
        raise InputError("device_map needs accelerate; valid: with it installed (pip install accelerate)")
    if ranks > 1 and ":" in device:
        raise InputError(f"device is {device!r} beside tp {tp}; valid: auto, each rank has its own")
    if ranks > 1:
        check_tp(ranks)


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
    device_map: str | Mapping[str, str | int] | None = None,
    tp: int = 1,
) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name_or_path: an alias (:data:`ALIASES`), a folder in transformers' format, a GGUF file or a folder
            with one, a hub id ``owner/name``, or ``owner/name:file.gguf``.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        on_progress: told of the stages "fetch" (the default model, in bytes) and "load" (in tensors).
        device_map: where layers lie, as :func:`check_spread` takes it.
        tp: ranks that the model is spread over; this process is one of them.
    Raises:
        InputError: one line: what is wrong with the name, the folder, its files, or the place to run.
        RunError: the model does not fit into memory, or making the default model failed.
    """
    check_choice("dtype", dtype, tuple(name for name in DTYPES if name != "int8"))
    place = check_place(dtype, device)
    name = str(name_or_path)
    check_spread(device_map, tp, device)
    source, local = locate(name, on_progress)
    return load_located(name, source, local, dtype, place, on_progress, device_map, tp)


def load_located(
    name: str,
    source: str,
    local: bool,
    dtype: str,
    place: str,
    on_progress: OnProgress | None = None,
    device_map: str | Mapping[str, str | int] | None = None,
    tp: int = 1,
) -> Loaded:
    """:func:`load` for what :func:`locate` has found (``source``, ``local``), on a place from
    :func:`check_place`."""
    spread = device_map is not None or tp > 1
    if (file := gguf_in(Path(source))) is not None:
        from tokenswift.loader.unpacked import load_file

        model, tokenizer = load_file(
            name, file, dtype, place, lambda config: _places(name, config, device_map, tp)
        )
        return Loaded(model, tokenizer, name)
    from tokenswift.loader.checkpoint import FAMILIES
    from tokenswift.loader.folder_checks import check_weights

    with making_models(), counted_loading(on_progress):
        config = _config(name, source, local)
        tokenizer = _tokenizer(name, source, local)
        needed, folder = (0, []), _folder(source, local)
        if folder is not None:
            check_weights(name, folder, config, FAMILIES)
        if Path(source).is_dir() and not spread:
            needed = _needed(Path(source), config, dtype, place)
            check_memory(name, needed[0], place, needed[1])
        places = _places(name, config, device_map, tp)
        model = _model(name, source, local, config, dtype, place, needed, places)
    return Loaded(model, tokenizer, name)


def load_tokenizer(name: str, source: str, local: bool) -> Any:
    """The tokenizer of :func:`load` alone."""
    if (file := gguf_in(Path(source))) is not None:
        from tokenswift.loader.gguf.file import GgufFile
        from tokenswift.loader.unpacked import tokenizer_of

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


def _config(name: str, source: str, local: bool) -> Any:
    from transformers import AutoConfig

    from tokenswift.loader.checkpoint import FAMILIES
    from tokenswift.loader.folder_checks import check_config, check_said

    supported = "valid: causal language models with rotary positions, such as Llama, Qwen or Mistral"
    try:
        file = hub.file_of(source, "config.json", local)
        if file is not None:
            check_said(name, file, FAMILIES)
        config = AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    except InputError:
        raise
    except (
        Exception
    ) as error:  # transformers raises OSError, ValueError, KeyError, TypeError and its own here
        raise InputError(
            f"model {name}: its config.json cannot be used ({line_of(error)}); {supported}"
        ) from error
    architectures = getattr(config, "architectures", None) or []
    causal = isinstance(architectures, list) and any(
        str(each).endswith(("ForCausalLM", "LMHeadModel")) for each in architectures
    )
    if architectures and not causal:
        raise InputError(
            f"model {name} is not a causal language model (its architectures are {shown(architectures)}); "
            f"{supported}"
        )
    _check_unquantised(name, config)
    check_config(name, config, FAMILIES)
    return config


def _folder(source: str, local: bool) -> Path | None:
    """The folder of a model's files; None where they are not here."""
    file = hub.file_of(source, "config.json", local)
    return None if file is None else file.parent


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
    if (here := _folder(source, local)) is not None:
        from tokenswift.loader.folder_checks import check_tokenizer_files

        check_tokenizer_files(name, here)
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    except Exception as error:  # as above
        raise InputError(f"model {name}: its tokenizer cannot be loaded ({line_of(error)})") from error


def _needed(folder: Path, config: Any, dtype: str, place: str) -> tuple[int, list[tuple[str, int]]]:
    """What :func:`check_memory` is given for the files of a folder: bytes, and ways to need less."""
    import torch

    from tokenswift.kernels.formats.registry import FORMATS
    from tokenswift.loader.checkpoint import FAMILIES

    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    weights = [file for file in hub.wanted_files(list(sizes)) if file.endswith((".safetensors", ".bin"))]
    stored = getattr(config, "dtype", None)
    kind = stored if dtype == "auto" else getattr(torch, dtype)
    scale = kind.itemsize / stored.itemsize if isinstance(stored, torch.dtype) and kind else 1.0
    needed = int(sum(sizes[file] for file in weights) * scale)
    ways = [("dtype bfloat16", needed // 2)] if kind == torch.float32 else []
    if place != "cpu" and kind and config.model_type in FAMILIES:  # quantised on their way to the card
        few = [FORMATS[name] for name in WEIGHTS if name in FORMATS]
        ways += [(f"weights {f.name}", needed // kind.itemsize * f.nbytes // f.block) for f in few]
    return needed, ways


def check_memory(name: str, needed: int, place: str, others: Sequence[tuple[str, int]] = ()) -> None:
    """Refuse a model whose weights alone are more than the memory that can be had: the system would end the
    process without a word.

    Args:
        needed: bytes.
        place: from :func:`check_place`.
        others: ways to load it in less, and their bytes.
    Raises:
        InputError: they do not fit; the line names the ways that do.
    """
    import torch

    from tokenswift.memory import memory_of

    memory = memory_of(torch.device(place))
    if memory is not None and needed > memory.free:
        raise InputError(no_room(name, needed, memory.free, others))


def _places(
    name: str, config: Any, device_map: str | Mapping[str, str | int] | None, tp: int
) -> dict[str, Any]:
    """What transformers' loading is told of places: nothing where the model lies on one device.

    Raises:
        InputError: the model cannot be spread, or not over so many ranks.
    """
    if device_map is None and tp == 1:
        return {}
    if config is None:
        asked = f"device_map is {shown(device_map)}" if device_map is not None else f"tp is {tp}"
        raise InputError(
            f"{asked}, but transformers unpacks model {name}; valid: one in transformers' format"
        )
    if device_map is not None:
        return {"device_map": device_map if isinstance(device_map, str) else dict(device_map)}
    from transformers.distributed.configuration_utils import DistributedConfig

    from tokenswift.loader.placed import check_heads

    check_heads(name, config, tp)
    return {"distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto")}


def no_room(name: str, needed: int, free: int, others: Sequence[tuple[str, int]] = ()) -> str:
    """In one line that a model's weights do not fit, and what would; arguments as of :func:`check_memory`."""
    fitting = [f"{way} ({nbytes:,} bytes)" for way, nbytes in others if nbytes < min(needed, free)]
    return (
        f"model {name} needs {needed:,} bytes of memory for its weights, {free:,} bytes are available; "
        f"valid: {', or '.join(['a smaller model', *fitting])}"
    )


def _model(
    name: str,
    source: str,
    local: bool,
    config: Any,
    dtype: str,
    device: str,
    needed: tuple[int, list[tuple[str, int]]],
    places: dict[str, Any],
) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from tokenswift.memory import memory_of

    options = places or ({} if device == "cpu" else {"device_map": {"": device}})
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
        memory = memory_of(torch.device(device))
        line = f"model {name} does not fit into the memory of device {device}"
        if needed[0] and memory is not None:
            line = no_room(name, needed[0], memory.free, needed[1])
        raise RunError(f"{line}; nothing was kept") from error
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
