"""transformers' own model and tokenizer of a name, a folder or a GGUF file.

Every way in which this can fail is one line that says what to do instead. transformers' own modelling
code runs the model; nothing is forked here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.checks import check_choice
from tokenswift.config import shown
from tokenswift.kernels.cpu.build import kernels_wanted
from tokenswift.load_config import LoadConfig, check_backend
from tokenswift.loader import hub
from tokenswift.loader._hf import counted_loading, making_models, quiet_transformers
from tokenswift.loader.find import locate
from tokenswift.loader.gguf import gguf_in
from tokenswift.loader.hub import line_of
from tokenswift.loader.own_sampling import named
from tokenswift.loader.plain_tokenizer import is_panic
from tokenswift.types import InputError, OnProgress, RunError
from tokenswift.words import Dtype, Weights, words

DTYPES = words(Dtype)
#: what weights are stored as in memory: as their files hold them, as floats, or in a quantized format
WEIGHTS = words(Weights)
#: methods by which weights were quantized for other programs
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


def usual_backend() -> str:
    """What the backend "auto" is: "auto" or "torch", as ``TOKENSWIFT_KERNELS`` says.

    Raises:
        InputError: see :func:`kernels_wanted`.
    """
    return "torch" if kernels_wanted() == "torch" else "auto"


def check_place(how: LoadConfig) -> str:
    """The device to use: "cpu", "cuda" or "cuda:N".

    Raises:
        InputError: CUDA is asked for where there is none, a backend that does not run on the device, or
            ranks that torchrun did not start.
    """
    import torch

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
    if how.tp > 1:
        check_launched(how.tp)
        if device == "cpu" and count:
            raise InputError(f"device is 'cpu' beside tp {how.tp}; valid: auto, which is cuda here", "device")
    return device


def native_bfloat16(device: str) -> bool:
    """Whether torch's bfloat16 products run in hardware on a place from :func:`check_place`; for training.

    On a CPU without them torch emulates bfloat16, several times slower than float32; the kernels that texts
    are written with do not, and "auto" never looks at the processor there: it is the checkpoint's type.
    """
    if device != "cpu":
        return True
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: no way to tell
        return False
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)


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
        name_or_path: an alias (`find.ALIASES`), a folder in transformers' format, a GGUF file or a folder
            with one, a hub id ``owner/name``, or ``owner/name:file.gguf``.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        on_progress: told of the stages "fetch" (the default model, in bytes) and "load" (in tensors).
        device_map, tp: as of `LoadConfig`.
    Raises:
        InputError: one line: what is wrong with the name, the folder, its files, or the place to run.
        RunError: the model does not fit into memory, or making the default model failed.
    """
    check_choice("dtype", dtype, tuple(name for name in DTYPES if name != "int8"))
    how = LoadConfig(dtype, device, device_map=device_map, tp=tp)
    place, name = check_place(how), str(name_or_path)
    source, local = locate(name, on_progress)
    return load_located(name, source, local, how, place, on_progress)


def load_located(
    name: str,
    source: str,
    local: bool,
    how: LoadConfig,
    place: str,
    on_progress: OnProgress | None = None,
) -> Loaded:
    """:func:`load` for what `find.locate` has found (``source``, ``local``), on a place from
    :func:`check_place`."""
    if (file := gguf_in(Path(source))) is not None:
        from tokenswift.loader.dequantized import load_file

        model, tokenizer = load_file(name, file, how.floats, place, lambda config: _places(name, config, how))
        return Loaded(model, tokenizer, name)
    from tokenswift.loader.checkpoint import FAMILIES
    from tokenswift.loader.folder_checks import check_weights

    with making_models(), counted_loading(on_progress):
        config = _config(name, source, local)
        tokenizer = _tokenizer(name, source, local)
        needed, folder = (0, []), _folder(source, local)
        if folder is not None:
            check_weights(name, folder, config, FAMILIES)
        if Path(source).is_dir() and how.spread is None:
            needed = _needed(Path(source), config, how, place)
            check_memory(name, needed[0], place, needed[1])
        model = _model(name, source, local, config, how, place, needed)
    return Loaded(model, tokenizer, name)


def load_tokenizer(name: str, source: str, local: bool) -> Any:
    """The tokenizer of :func:`load` alone."""
    if (file := gguf_in(Path(source))) is not None:
        from tokenswift.loader.dequantized import tokenizer_of
        from tokenswift.loader.gguf.file import GgufFile

        return tokenizer_of(GgufFile(file))
    with quiet_transformers():
        return _tokenizer(name, source, local)


def load_config(name: str, source: str, local: bool) -> Any:
    """The config of :func:`load` alone, of files in transformers' format."""
    with quiet_transformers():
        return _config(name, source, local)


def _config(name: str, source: str, local: bool) -> Any:
    from transformers import AutoConfig

    from tokenswift.loader.checkpoint import FAMILIES
    from tokenswift.loader.folder_checks import check_config, check_said

    supported = "valid: causal language models with rotary positions, such as Llama, Qwen or Mistral"
    try:
        file = hub.file_of(source, "config.json", local)
        said = {} if file is None else check_said(name, file, FAMILIES)
        config = AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
        stated = said.get("rope_parameters")  # transformers drops it beside rope_scaling
        if isinstance(stated, Mapping) and "rope_theta" in stated:
            if (config.rope_parameters or {}).get("rope_theta") != stated["rope_theta"]:
                config.rope_parameters = dict(stated)
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
    _check_unquantized(name, config)
    check_config(name, config, FAMILIES)
    return config


def _folder(source: str, local: bool) -> Path | None:
    """The folder of a model's files; None where they are not here."""
    file = hub.file_of(source, "config.json", local)
    return None if file is None else file.parent


def _check_unquantized(name: str, config: Any) -> None:
    """Refuse weights that were quantized for other programs.

    Raises:
        InputError: with what to do instead.
    """
    said = getattr(config, "quantization_config", None) or {}
    said = said if isinstance(said, dict) else said.to_dict()
    method = str(getattr(said.get("quant_method"), "value", said.get("quant_method"))).lower()
    if method in OTHERS:
        raise InputError(
            f"model {name} is quantized by {method}; valid: the checkpoint that it was made from (--weights "
            "q4_0 or q8_0 quantizes it here), or a GGUF file of the model"
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
    except BaseException as error:  # as above, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise InputError(f"model {name}: its tokenizer cannot be loaded ({line_of(error)})") from error


def _needed(folder: Path, config: Any, how: LoadConfig, place: str) -> tuple[int, list[tuple[str, int]]]:
    """What :func:`check_memory` is given for the files of a folder: bytes, and ways to need less."""
    import torch

    from tokenswift.kernels.formats.registry import FORMATS
    from tokenswift.loader.checkpoint import FAMILIES

    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    weights = [file for file in hub.wanted_files(list(sizes)) if file.endswith((".safetensors", ".bin"))]
    stored = getattr(config, "dtype", None)
    kind = how.floats or stored
    scale = kind.itemsize / stored.itemsize if isinstance(stored, torch.dtype) and kind else 1.0
    needed = int(sum(sizes[file] for file in weights) * scale)
    ways = [("dtype bfloat16", needed // 2)] if kind == torch.float32 else []
    if place != "cpu" and kind and config.model_type in FAMILIES:  # quantized on their way to the card
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


def _places(name: str, config: Any, how: LoadConfig) -> dict[str, Any]:
    """What transformers' loading is told of places: nothing where the model lies on one device.

    Raises:
        InputError: the model cannot be spread, or not over so many ranks.
    """
    if how.spread is None:
        return {}
    if config is None:
        asked = f"tp is {how.tp}" if how.tp > 1 else f"device_map is {shown(how.device_map)}"
        raise InputError(
            f"{asked}, but transformers unpacks model {name}; valid: one in transformers' format"
        )
    if how.device_map is not None:
        return {"device_map": how.device_map}
    from transformers.distributed.configuration_utils import DistributedConfig

    from tokenswift.loader.placed import check_heads

    check_heads(name, config, how.tp)
    return {"distributed_config": DistributedConfig(tp_size=how.tp, tp_plan="auto")}


def check_launched(tp: int) -> None:
    """See that this is one of ``tp`` processes of torchrun.

    Raises:
        InputError: it is not.
    """
    if (count := os.environ.get("WORLD_SIZE", "1")) != str(tp):
        valid = f"torchrun --nproc-per-node {tp}"
        raise InputError(f"tp is {tp}, but torchrun started {count}; valid: with {valid}")


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
    how: LoadConfig,
    device: str,
    needed: tuple[int, list[tuple[str, int]]],
) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from tokenswift.memory import memory_of

    options = _places(name, config, how) or ({} if device == "cpu" else {"device_map": {"": device}})
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=how.floats or "auto",
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
