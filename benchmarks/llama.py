"""llama.cpp on the same GGUF file, by its own ``llama-bench``: ``llama_decode`` in a loop, no sampling.

A row is a file, a context and a type of KV cache, with flash attention on or off, whichever was faster. It
says what the program was built of and for, and the bytes of weights that a token reads.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import spread
from tokenswift.checks import check_choice
from tokenswift.config import shown
from tokenswift.loader.find import gguf_in, locate
from tokenswift.loader.gguf import GgufFile
from tokenswift.types import InputError, RunError

#: type of KV cache → bytes of a value, and the settings of flash attention that it runs with
KV_TYPES: dict[str, tuple[float, tuple[str, ...]]] = {"f16": (2.0, ("0", "1")), "q8_0": (34 / 32, ("1",))}
FLASH = {"0": "off", "1": "on"}
SHORT = 2048  # tokens of a prompt up to which its speed is measured
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
#: lines of CMakeCache.txt that say how it was built
FLAGS = re.compile(
    r"^(CMAKE_BUILD_TYPE|CMAKE_CXX_FLAGS|GGML_(?:NATIVE|OPENMP|BLAS|LLAMAFILE|CPU_REPACK)):\w+=(.+)$",
    re.MULTILINE,
)
#: what tells about each run, of all that llama-bench says
KEPT = ("n_prompt", "n_gen", "n_depth", "flash_attn", "type_k", "type_v", "n_batch", "n_ubatch", "samples_ts")


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second after a context, and of a prompt.

    Raises:
        InputError: there is no such program, or the model is no GGUF file.
        RunError: the program failed.
    """
    program, file = find(config["llama_bench"]), _file(config)
    check_choice("kv_type", config["kv_type"], tuple(KV_TYPES))
    kv, (width, flashes) = config["kv_type"], KV_TYPES[config["kv_type"]]
    context, new, threads = config["prefill"], config["points"][-1], torch.get_num_threads()
    common = ["-t", str(threads), "-r", str(config["rounds"]), "-ctk", kv, "-ctv", kv]
    writing, reading = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for flash in flashes:
        for found, sizes in (
            (writing, ["-p", "0", "-n", str(new), "-d", str(context)]),
            *([(reading, ["-p", str(context), "-n", "0"])] if context <= SHORT else []),
        ):
            (found[flash],) = run(program, file, [*common, "-fa", flash, *sizes])
    flash = max(flashes, key=lambda name: median(writing[name]["samples_ts"]))
    figures = spread("plain", writing[flash]["samples_ts"])
    if reading:
        figures |= spread("reading", max((r["samples_ts"] for r in reading.values()), key=median))
    said = GgufFile(file)
    figures |= {"weights_mb": bytes_read(said) / 1e6, "kv_mb": context * width * _values(said) / 1e6}
    one = writing[flash]
    return {
        "dtype": "stored",
        "runs": config["rounds"],
        "flash": FLASH[flash],
        "stored": {"file": file.name, "types": types(said)},
        "program": {
            "name": "llama.cpp",
            "commit": one["build_commit"],
            "number": one["build_number"],
            "flags": " ".join([*common, "-n", str(new), "-d", str(context), "-fa", flash]),
            "threads": one["n_threads"],
            "features": features(program),
            "built": built(program),
        },
        "figures": {str(new): {name: round(value, 4) for name, value in figures.items()}},
        "raw": [{k: r[k] for k in KEPT} for r in (*writing.values(), *reading.values())],
    }


def find(name: str) -> Path:
    """The program.

    Raises:
        InputError: it is not there.
    """
    found = shutil.which(Path(name).expanduser())
    if found is None:
        raise InputError(
            f"llama_bench is {shown(name)}: no such program; valid: the path of llama.cpp's llama-bench"
        )
    return Path(found)


def run(program: Path, file: Path, more: list[str]) -> list[dict[str, Any]]:
    """What llama-bench says of a model; it ends with this process.

    Raises:
        RunError: it failed, or did not say what was asked.
    """
    libc = ctypes.CDLL(None)
    done = subprocess.run(
        [program, "-m", file, "-o", "json", *more],
        capture_output=True,
        text=True,
        errors="replace",
        preexec_fn=lambda: libc.prctl(END_WITH_PARENT, signal.SIGKILL),
    )
    try:
        if done.returncode:
            raise ValueError(f"exit code {done.returncode}")
        said = json.loads(done.stdout)
        if not said or any(key not in entry for entry in said for key in KEPT):
            raise ValueError("no figures")
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or [""])[-1][:200]
        raise RunError(f"{program.name} {' '.join(more)}: {error} {last}".rstrip()) from error
    return said


def features(program: Path) -> str:
    """What the processor code of the program's library was compiled for, as ``llama_print_system_info`` says;
    "" where the library is not beside the program."""
    file = program.resolve().parent / "libllama.so"
    if not file.is_file():
        return ""
    library = ctypes.CDLL(str(file))
    library.llama_print_system_info.restype = ctypes.c_char_p
    return " ".join(library.llama_print_system_info().decode().split())


def built(program: Path) -> dict[str, str]:
    """Settings of its build, where its folder still has them."""
    cache = program.resolve().parents[1] / "CMakeCache.txt"
    text = cache.read_text(encoding="utf-8", errors="replace") if cache.is_file() else ""
    return dict(FLAGS.findall(text))


def bytes_read(file: GgufFile) -> int:
    """Bytes of weights that a token reads: all but an embedding that is no LM head as well."""
    apart = "output.weight" in file.tensors
    sizes = {name: entry.nbytes for name, entry in file.tensors.items()}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if apart else 0)


def types(file: GgufFile) -> list[str]:
    """The types of its matrices."""
    return sorted({entry.kind for entry in file.tensors.values() if len(entry.shape) > 1})


def _values(file: GgufFile) -> int:
    """Values of keys and values of a token."""
    kind = file.metadata["general.architecture"]
    heads, width = (file.metadata[f"{kind}.{name}"] for name in ("attention.head_count", "embedding_length"))
    kv_heads = file.metadata.get(f"{kind}.attention.head_count_kv", heads)
    size = file.metadata.get(f"{kind}.attention.key_length", width // heads)
    return 2 * file.metadata[f"{kind}.block_count"] * kv_heads * size


def _file(config: dict[str, Any]) -> Path:
    """The model's GGUF file.

    Raises:
        InputError: it is none.
    """
    model = config["gguf"] or config["model"]
    file = gguf_in(Path(config["gguf"]).expanduser() if config["gguf"] else Path(locate(model)[0]))
    if file is None:
        raise InputError(f"gguf is {shown(model)}; valid for llama.cpp: a GGUF file, or a model that is one")
    return file
