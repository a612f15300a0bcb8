"""A model's files, opened for the native decoder, or loaded as transformers' own model and
tokenizer.

Every way in which this can fail is one line that says what to do instead. transformers' own
modelling code runs the model; nothing is forked here. GGUF files are unpacked in memory from the
very weights that the native decoder reads.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from tokenswift.checks import check_choice
from tokenswift.config.loading import Dtype, LoadConfig, check_backend
from tokenswift.files import MOST_TOKENIZER
from tokenswift.kernels.formats import Stored
from tokenswift.loader.config import ModelConfig, completed
from tokenswift.loader.config_file import SUPPORTED, read_config
from tokenswift.loader.default_model import DEFAULT, DRAFT, GGUF, METADATA_KEY
from tokenswift.loader.errors import refused_as
from tokenswift.loader.experts import CHOICE_BIAS_NAME, joint_parameter
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.find import gguf_in, locate
from tokenswift.loader.fused import parts_of
from tokenswift.loader.gguf import GgufFile
from tokenswift.loader.gguf_names import OUTER
from tokenswift.loader.gguf_tokenizer import gguf_tokenizer
from tokenswift.loader.guards import check_memory, fitting, quiet_transformers
from tokenswift.loader.layout import EMBEDDING
from tokenswift.loader.multimodal import wraps_text
from tokenswift.loader.opened import Opened, open_files, open_gguf
from tokenswift.loader.plain_tokenizer import wrapped
from tokenswift.loader.positions import counts_factor
from tokenswift.loader.recurrent import in_groups, our_name
from tokenswift.loader.rope import positions_name
from tokenswift.loader.safetensors_file import INDEX, SafetensorsFile, weight_files
from tokenswift.loader.weights import Weights, unstored
from tokenswift.types import InputError, RunError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

#: a causal LM of transformers, whose own annotations do not hold (``to`` takes a model for a name)
CausalModel: TypeAlias = Any

#: numbers of a model that a byte of its files may hold: those of one bit
PER_BYTE = 8
#: ends of the names of files that parsers read whole
SMALL = (".json", ".jinja", ".txt", ".model")
#: without one of them transformers makes a tokenizer that knows no words
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class Loaded(NamedTuple):
    """A model ready to run.

    Attributes:
        model: the transformers causal LM, in evaluation mode, on its device.
        tokenizer: its transformers tokenizer.
        name: the name it was asked for by.
    """

    model: CausalModel
    tokenizer: PreTrainedTokenizerBase
    name: str


def check_place(how: LoadConfig) -> str:
    """The device to use: "cpu", "cuda" or "cuda:N".

    Raises:
        InputError: CUDA is asked for where there is none, or a backend that does not run on the
            device.
    """
    device = how.device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    elif device != "cpu" and not count:
        raise InputError(
            f"device is {device!r}, but no CUDA device is available here; valid: auto, cpu",
            "device",
        )
    elif ":" in device and int(device.partition(":")[2]) >= count:
        raise InputError(f"device is {device!r}; valid: cuda:0 to cuda:{count - 1}", "device")
    check_backend(how.backend, device)
    return device


def native_bfloat16(device: str) -> bool:
    """Whether torch's bfloat16 products run in hardware on a place from :func:`check_place`; for
    training.

    On a CPU without them torch emulates bfloat16, several times slower than float32; the kernels
    that texts are written with do not, and "auto" never looks at the processor there: it is the
    checkpoint's type.
    """
    if device != "cpu":
        return True
    processors = Path("/proc/cpuinfo")
    if not processors.exists():  # there is no way to tell
        return False
    flags = processors.read_text().split()
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)


def load(name_or_path: str | Path, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name_or_path: an alias (`find.ALIASES`), a folder in transformers' format, a GGUF file or a
            folder with one, a hub id ``owner/name``, or ``owner/name:file.gguf``.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
    Raises:
        InputError: one line: what is wrong with the name, the folder, its files, or the place to
            run.
        RunError: the model does not fit into memory, or making the default model failed.
    """
    check_choice("dtype", dtype, tuple(name for name in get_args(Dtype) if name != "int8"))
    how = LoadConfig(dtype, device)
    place = check_place(how)
    name = str(name_or_path)
    return load_located(name, locate(name), how, place)


def load_located(name: str, source: Path, how: LoadConfig, place: str) -> Loaded:
    """:func:`load` for the files that `find.locate` gives, on a place from :func:`check_place`."""
    if name == DRAFT:
        return _packed_draft(name, source, how.floats, place)
    if gguf_in(source) is not None:
        files = open_gguf(name, source, how, place)
        return Loaded(model_of(files).to(place), load_tokenizer(name, source), name)
    from transformers import AutoConfig

    stated = read_config(name, source / "config.json")
    if wraps_text(name, source):
        return Loaded(_text_model(name, source, how, place), load_tokenizer(name, source), name)
    with quiet_transformers():
        with refused_as(f"model {name}: its config.json cannot be used", SUPPORTED):
            config = AutoConfig.from_pretrained(
                source, local_files_only=True, trust_remote_code=False
            )
        if counts_factor(stated):
            config.counts_factor = True
        tokenizer = load_tokenizer(name, source)
        check_size(name, source, config, how, place)
        return Loaded(_model(name, source, config, how, place), tokenizer, name)


def _text_model(name: str, source: Path, how: LoadConfig, place: str) -> CausalModel:
    """The text model of a folder with one of text and pictures.

    Raises:
        InputError: it is of no family that runs here.
    """
    files = open_files(name, source, how, place)
    if files is None:
        raise InputError(
            f"model {name} is one of text and pictures, whose text model cannot be run; valid: "
            "one of a family of the native decoder, with safetensors files"
        )
    return model_of(files).to(place)


def load_tokenizer(name: str, source: Path) -> PreTrainedTokenizerBase:
    """transformers' tokenizer of the files that `find.locate` gives.

    Raises:
        InputError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    gguf = gguf_in(source)
    if gguf is not None:
        return wrapped(gguf_tokenizer(GgufFile(gguf).metadata, gguf))
    for path in source.iterdir():
        small = path.suffix in SMALL and not path.name.endswith(".index.json")
        if small and not (path.is_file() and path.stat().st_size <= MOST_TOKENIZER):
            raise InputError(
                f"model {name}: its {path.name} is not a regular file of up to "
                f"{MOST_TOKENIZER:,} bytes; valid: one that is"
            )
    if not any((source / file).is_file() for file in TOKENIZER_FILES):
        raise InputError(
            f"model folder {name} has no tokenizer files; valid: with {TOKENIZER_FILES[0]}"
        )
    with quiet_transformers(), refused_as(f"model {name}: its tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)


def check_size(
    name: str, folder: Path, config: PreTrainedConfig, how: LoadConfig, place: str
) -> None:
    """See that a config does not ask for more numbers than the files hold, before any of them is
    made, that an index names files of its folder, and that the weights fit into memory.

    Raises:
        InputError: they do not, or the config is no causal language model's.
    """
    if (folder / INDEX).exists():
        weight_files(folder)
    wrong = f"model {name}: its config.json does not describe a causal language model"
    with refused_as(wrong, SUPPORTED):
        numbers = sum(part.numel() for part in _empty(copy.deepcopy(config)).parameters())
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if numbers > PER_BYTE * size:
        raise InputError(
            f"model {name}: its weights do not fit its config.json, which asks for {numbers:,} "
            f"numbers of files with {size:,} bytes; valid: the config of these weights"
        )
    dtype = how.floats or getattr(config, "dtype", None)
    if isinstance(dtype, torch.dtype) and not hasattr(config, "quantization_config"):
        size = numbers * dtype.itemsize
    check_memory(name, size, place)


def _empty(config: PreTrainedConfig) -> CausalModel:
    """A causal LM of transformers without memory."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _model(
    name: str, source: Path, config: PreTrainedConfig, how: LoadConfig, device: str
) -> CausalModel:
    from transformers import AutoModelForCausalLM

    options: dict[str, object] = {"dtype": how.floats or "auto", "local_files_only": True}
    if device != "cpu":
        options["device_map"] = {"": device}
    wrong = f"model {name}: its weights cannot be loaded"
    with refused_as(wrong, "complete files of a checkpoint"), fitting(name, device):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, output_loading_info=True, **options
        )
        model, report = loaded
    for fault in ("missing_keys", "mismatched_keys"):
        tensors = sorted(str(key) for key in report.get(fault) or ())
        if tensors:
            raise InputError(
                f"model {name}: its weights do not fit its config.json "
                f"({len(tensors)} tensors {fault.removesuffix('_keys')}, e.g. {tensors[0]})"
            )
    return model.eval()


def model_of(files: Opened) -> CausalModel:
    """transformers' own model of files that were opened, filled with the very weights that the
    native decoder reads, unpacked: transformers' reader of GGUF files leaves out some of what they
    say."""
    dtype = files.weights.dtype
    model = _filled(files.config, partial(_joined, files.weights, dtype), dtype)
    ends = sorted(files.ends)
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    place = str(gguf_in(files.folder) or files.folder)
    model.name_or_path = place
    model.config._name_or_path = place
    return model


def _joined(weights: Weights, dtype: torch.dtype, name: str) -> Tensor | Stored | None:
    """A weight by its name in transformers, a fused one of its parts, heads in its order."""
    parts = parts_of(name)
    recurrence = weights.layout.recurrence
    weight = weights.get(name)
    if weight is not None and recurrence is not None and recurrence.tiled:
        return in_groups(name, unstored(weight, dtype), recurrence)
    if parts is None or not weights.layout.family.fused:
        return weight
    stored = [weights.get(part) for part in parts]
    return torch.cat([unstored(part, dtype) for part in stored if part is not None])


def _filled(
    config: ModelConfig, get: Callable[[str], Tensor | Stored | None], dtype: torch.dtype
) -> CausalModel:
    """A native family's model of transformers. Torch's default type, the whole process's, stays as
    it is.

    Args:
        get: gives a weight by its name; None: a bias that is zero.
    """
    from transformers import AutoConfig

    # some families' own id for padding is beyond a small vocabulary
    fields = {"pad_token_id": None, **copy.deepcopy(vars(config))}
    fields.pop("linear_heads_tiled", None)  # of the file, not of the model
    model = _empty(AutoConfig.for_model(fields.pop("model_type"), **fields))
    body = model.model
    with quiet_transformers():  # a model without memory lacks its buffers; these are all it has
        positions = positions_name(body) or "rotary_emb"
        setattr(body, positions, type(getattr(body, positions))(config=model.config))
    if hasattr(body.embed_tokens, "scalar_embed_scale"):
        body.embed_tokens.embed_scale = torch.tensor(body.embed_tokens.scalar_embed_scale)
    family = FAMILIES[config.model_type]
    experts = family.experts
    filled: dict[str, Tensor] = {}
    biases = [pair for pair in model.named_buffers() if pair[0].endswith(CHOICE_BIAS_NAME)]
    for name, parameter in (*model.named_parameters(), *biases):
        ours = our_name(name, family)
        if experts is None:
            weight = get(ours)
        else:
            weight = joint_parameter(ours, parameter.shape, get, experts.in_turn)
        if weight is None:
            filled[name] = torch.zeros(parameter.shape, dtype=dtype)
        else:  # never the weight itself, which is the file's
            values = unstored(weight, dtype)
            filled[name] = values.to(dtype, copy=values is weight).contiguous()
    model.load_state_dict(filled, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    return model.eval()


def _packed_draft(name: str, path: Path, dtype: torch.dtype | None, place: str) -> Loaded:
    """TriForce's draft model for the default model: trained layers of a checkout's file, and that
    model's own embedding, LM head and tokenizer.

    Args:
        path: safetensors of its layers and final norm, its config in the header.
        dtype: None: float32.
    """
    target = GgufFile(locate(DEFAULT) / GGUF)
    draft = SafetensorsFile(path, "draft model")
    config = completed("llama", json.loads(draft.metadata[METADATA_KEY])["config"])
    if config is None:
        raise RunError(f"the draft model {path} is of another family; valid: llama")
    weights = {name: entry.get() for name, entry in draft.entries.items()}
    weights[EMBEDDING] = target[OUTER[EMBEDDING]]
    model = _filled(config, weights.get, dtype or torch.float32)
    tokenizer = wrapped(gguf_tokenizer(target.metadata, target.path))
    return Loaded(model.to(place), tokenizer, name)
