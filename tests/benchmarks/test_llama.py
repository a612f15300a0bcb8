"""llama.cpp's rows, by a program that answers like llama-bench; rows of our speeds; the tables of both."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import llama, specs
from tests.gguf_files import QuantType, small, write
from tokenswift.loader.gguf import GgufFile

#: writes at 10, 30 and 20 tokens a second without flash attention and at twice that with it; reads at 100
PROGRAM = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
flash, new = int(given["-fa"]), int(given["-n"])
speeds = [x * (1 + flash) for x in ((10.0, 30.0, 20.0) if new else (100.0,))]
entry = {{"build_commit": "abc1234", "build_number": 7, "n_threads": int(given["-t"]), "flash_attn": flash,
          "n_prompt": int(given["-p"]), "n_gen": new, "n_depth": int(given.get("-d", 0)), "n_batch": 1,
          "n_ubatch": 1, "type_k": given["-ctk"], "type_v": given["-ctv"], "samples_ts": speeds}}
print("noise", file=sys.stderr)
print(json.dumps([entry]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A llama-bench, with what its build folder and its library would say."""
    file = tmp_path / "build" / "bin" / "llama-bench"
    file.parent.mkdir(parents=True)
    file.write_text(PROGRAM.format(python=sys.executable))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "build" / "CMakeCache.txt").write_text("GGML_NATIVE:BOOL=ON\nGGML_CCACHE:BOOL=ON\n")
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A tiny model whose matrices are stored in 4 bits."""
    made = small(tie_word_embeddings=False, max_position_embeddings=512)
    write(tmp_path / "model.gguf", made, {"weight": QuantType.Q4_0})
    return tmp_path / "model.gguf"


def config(program: Path, file: Path, **more: Any) -> dict[str, Any]:
    (made,) = specs.load("llama").rows("smoke", {"model": str(file), "llama_bench": str(program), **more})
    return made


def test_a_row_of_llama_cpp(program: Path, file: Path) -> None:
    """Its better flash attention named, medians of its runs, what it was built of, bytes by hand."""
    made = llama.measure(config(program, file, prefill=32, points=[8]))
    figures = made["figures"]["8"]
    assert (figures["plain"], figures["plain_least"], figures["plain_most"]) == (40.0, 20.0, 60.0)
    assert figures["reading"] == 200.0 and made["flash"] == "on" and made["dtype"] == "stored"
    assert made["stored"]["file"] == "model.gguf" and "Q4_0" in made["stored"]["types"]
    said = GgufFile(file).tensors
    whole = sum(entry.nbytes for entry in said.values())
    assert figures["weights_mb"] == round((whole - said["token_embd.weight"].nbytes) / 1e6, 4)
    shape = small(tie_word_embeddings=False).config
    values = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    assert figures["kv_mb"] == round(32 * values * 2 / 1e6, 4)
    told = made["program"]
    assert (told["commit"], told["number"], told["threads"]) == ("abc1234", 7, torch.get_num_threads())
    assert told["built"] == {"GGML_NATIVE": "ON"} and told["features"] == "" and "-fa 1" in told["flags"]
    assert [(run["flash_attn"], run["n_depth"], run["n_prompt"]) for run in made["raw"]] == [
        *((0, 32, 0), (1, 32, 0)),
        *((0, 0, 32), (1, 0, 32)),
    ]
