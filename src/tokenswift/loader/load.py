"""transformers' own model and tokenizer of a name, a folder or a GGUF file.

Every way in which this can fail is one line that says what to do instead. transformers' own modelling
code runs the model; nothing is forked here.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from logging import CRITICAL, getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tokenswift.checks import check_choice
from tokenswift.config import LoadConfig, check_backend, shown
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.kernels.cpu.library import kernels_wanted
from tokenswift.loader.config import FAMILIES, NativeConfig, check_numbers, completed, layout_of
from tokenswift.loader.find import file_of, gguf_in, line_of, locate, wanted_files
from tokenswift.loader.gguf import (
    ARCHITECTURES,
    GgufFile,
    GgufWeights,
    architecture,
    config_of,
    is_native,
    own_dtype,
)
from tokenswift.loader.made import RECORD
from tokenswift.loader.own_sampling import named
from tokenswift.loader.tokenizer import gguf_ends, gguf_tokenizer, is_panic, wrapped
from tokenswift.loader.weights import StoredWeights, unstored
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
        from tokenswift.loader.load import load_file

        model, tokenizer = load_file(name, file, how.floats, place, lambda config: _places(name, config, how))
        return Loaded(model, tokenizer, name)
    from tokenswift.loader.config import FAMILIES
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
        from tokenswift.loader.gguf import GgufFile
        from tokenswift.loader.load import tokenizer_of

        return tokenizer_of(GgufFile(file))
    with quiet_transformers():
        return _tokenizer(name, source, local)


def load_config(name: str, source: str, local: bool) -> Any:
    """The config of :func:`load` alone, of files in transformers' format."""
    with quiet_transformers():
        return _config(name, source, local)


def _config(name: str, source: str, local: bool) -> Any:
    from transformers import AutoConfig

    from tokenswift.loader.config import FAMILIES
    from tokenswift.loader.folder_checks import check_config, check_said

    supported = "valid: causal language models with rotary positions, such as Llama, Qwen or Mistral"
    try:
        file = file_of(source, "config.json", local)
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
    file = file_of(source, "config.json", local)
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

    from tokenswift.kernels.formats import FORMATS
    from tokenswift.loader.config import FAMILIES

    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    weights = [file for file in wanted_files(list(sizes)) if file.endswith((".safetensors", ".bin"))]
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


_one_at_a_time = threading.RLock()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, log lines and Python warnings inside the block. These settings are
    the whole process's, so other threads wait for their turn.

    Loading errors still surface: they are exceptions. The previous settings come back at the end.
    """
    from transformers.utils import logging

    with _one_at_a_time:
        bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        placing = getLogger("accelerate.big_modeling")
        level = placing.level
        placing.setLevel(CRITICAL)
        logging.disable_progress_bar()
        logging.set_verbosity(CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.set_verbosity(verbosity)
            placing.setLevel(level)
            if bars:
                logging.enable_progress_bar()


@contextmanager
def making_models() -> Iterator[None]:
    """:func:`quiet_transformers`, and in this thread models are made without a change to torch's default
    type; other threads' are made as ever."""
    from transformers import modeling_utils

    with quiet_transformers():
        usual, here = modeling_utils.local_torch_dtype, threading.get_ident()

        @contextmanager
        def local_torch_dtype(dtype: Any, model_class_name: str | None = None) -> Iterator[None]:
            ours = threading.get_ident() == here and dtype.is_floating_point
            with Typed(dtype) if ours else usual(dtype, model_class_name):
                yield

        modeling_utils.local_torch_dtype = local_torch_dtype
        try:
            yield
        finally:
            modeling_utils.local_torch_dtype = usual


@contextmanager
def counted_loading(on_progress: OnProgress | None) -> Iterator[None]:
    """Inside the block, transformers' loading of weights is told to ``on_progress`` as stage "load"."""
    from transformers.utils import logging

    if on_progress is None:
        yield
        return
    report = on_progress

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts = args and isinstance(args[0], Sized) and kwargs.get("desc") == "Loading weights"
        return _told(args[0], report) if counts else factory(*args, **kwargs)

    before = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _told(items: Any, on_progress: OnProgress) -> Iterator[Any]:
    on_progress("load", 0, len(items))
    for done, item in enumerate(items, 1):
        yield item
        on_progress("load", done, len(items))


#: functions that say by their name which type they make
_NAMED = (Tensor.float, Tensor.type)


class Typed(TorchFunctionMode):
    """Inside the block, and in this thread alone, tensors are of a type where torch would give them its
    default type: where neither an argument's numbers nor a type that was asked for decide.

    Args:
        dtype: a floating-point type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        usual = torch.get_default_dtype()
        if (
            isinstance(made, Tensor)
            and made.dtype == usual != self.dtype
            and func not in _NAMED
            and not any(map(_decides, _leaves((args, kwargs))))
        ):
            return made.detach().to(self.dtype).requires_grad_(made.requires_grad)
        return made


def _decides(value: Any) -> bool:
    """Whether an argument says of which type a result is."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, torch.dtype | np.ndarray | np.generic)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for each in value:
        yield from _leaves(each)


logger = logging.getLogger("tokenswift")


def model_of(
    config: NativeConfig, weights: StoredWeights, dtype: torch.dtype, ends: list[int] | None = None
) -> Any:
    """A native family's model of transformers, filled with weights unpacked to a type.

    Args:
        ends: end-of-text ids, where the config does not say all.
    """
    from transformers import AutoModelForCausalLM

    with making_models():
        made = config.of_transformers()
        made.dtype = dtype
        with torch.device("meta"):  # without memory
            model: Any = AutoModelForCausalLM.from_config(made)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its only buffers
    filled: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found = weights.get(name)  # a family may have biases that a file lacks: they are 0
        made = torch.zeros(parameter.shape, dtype=dtype) if found is None else unstored(found, dtype)
        filled[name] = made.to(dtype, copy=found is not None and made is found).contiguous()
    model.load_state_dict(filled, strict=False, assign=True)
    model.tie_weights()
    weights.rest()
    if ends:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter) and parameter.device.type == "cpu"
    return model.eval()


def load_file(
    name: str,
    path: Path,
    dtype: torch.dtype | None,
    device: str,
    places: Callable[[Any], dict[str, Any]] = lambda config: {},
) -> tuple[Any, Any]:
    """transformers' own model and tokenizer of a GGUF file, unpacked.

    Args:
        name: what the model was asked for by.
        dtype: None: the file's (see `gguf.own_dtype`; bfloat16 for other families).
        device: from `load.check_place`.
        places: what ``from_pretrained`` is told of places for the weights of a config; with none, all go to
            the device. To be spread they are all unpacked in memory first, in each process. A config of None
            stands for a family that transformers unpacks.
    Raises:
        InputError: the file cannot be read, or nobody here can unpack it.
    """
    file = GgufFile(path)
    if not is_native(file):
        places(None)
        return _by_transformers(name, file, dtype, device)
    kind = dtype or getattr(torch, own_dtype(file, device))
    say_foreign(name, file, kind, lambda form: device == "cpu")
    config = config_for(file)
    model = model_of(config, GgufWeights(file, layout_of(config), kind), kind, gguf_ends(file.metadata))
    if options := places(config):
        model = _spread(model, options)
    model.name_or_path = model.config._name_or_path = str(path)
    return model if options else model.to(device), tokenizer_of(file)


def _spread(model: Any, options: dict[str, Any]) -> Any:
    """A model in memory, its weights moved to their places."""
    ends = model.generation_config
    with making_models():
        made = type(model).from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), dtype=model.dtype, **options
        )
    made.generation_config = ends
    return made.eval()


def config_for(file: GgufFile) -> NativeConfig:
    """The config of a native family's GGUF file: that beside it in a folder that was made here, otherwise its
    own. What others put beside such files often says no more than the family."""
    beside = file.path.parent / "config.json"
    if (file.path.parent / RECORD).is_file():
        said = object_in(beside, MOST_CONFIG, f"model folder {beside.parent}")
        check_numbers(said, f"config.json of model folder {beside.parent}")
        if said.get("model_type") in FAMILIES:
            found = completed(said["model_type"], said)
            if found is not None:
                return found
    return config_of(file)


def tokenizer_of(file: GgufFile) -> Any:
    """transformers' tokenizer of a GGUF file.

    Raises:
        InputError: its kind is not known here.
    """
    return wrapped(gguf_tokenizer(file.metadata, file.path))


def say_foreign(
    name: str, file: GgufFile, dtype: torch.dtype, keeps: Callable[[str], bool] = lambda form: True
) -> None:
    """Say which tensors of a file are unpacked, where some are; ``keeps``: whether a format stays."""
    if foreign := file.foreign(keeps):
        logger.warning(
            "model %s: tensors of type %s are unpacked to %s, which takes more memory than the file",
            name,
            ", ".join(foreign),
            str(dtype).removeprefix("torch."),
        )


def _by_transformers(name: str, file: GgufFile, dtype: torch.dtype | None, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if len(file.parts) > 1:
        raise InputError(
            f"model {name}: the architecture {architecture(file)} of a split file cannot be unpacked; valid: "
            f"one file (llama.cpp's gguf-split --merge), or {', '.join(ARCHITECTURES)}"
        )
    kind = dtype or torch.bfloat16
    path, what, to = file.path, architecture(file), str(kind).removeprefix("torch.")
    logger.warning("model %s: the architecture %s is unpacked to %s by transformers", name, what, to)
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        with making_models(), redirect_stderr(io.StringIO()):  # of the reader's bare progress bar
            model: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                quantization_config=GgufConfig(gguf_file=path.name, dequantize=True),
                dtype=kind,
                **options,
            )
            try:
                tokenizer = tokenizer_of(file)
            except InputError:
                tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    except Exception as error:  # its reader's errors are of every kind
        raise InputError(
            f"model {name}: the architecture {what} cannot be unpacked ({line_of(error)}); valid: "
            f"{', '.join(ARCHITECTURES)}, and what transformers reads of GGUF files"
        ) from error
    return model.to(device).eval(), tokenizer
