"""llama.cpp's rows, by a program that answers like llama-bench; rows of our speeds; the tables of both."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common, llama, specs, speeds, tables
from benchmarks.common import Trial
from benchmarks.peer import bytes_read
from benchmarks.runner import read_rows
from scripts import summaries
from tests.cli.conftest import Call
from tests.gguf_files import QuantType, small, write
from tokenswift import LLM
from tokenswift.loader import embedded
from tokenswift.loader.gguf.file import GgufFile
from tokenswift.types import InputError, RunError

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


def test_a_quantised_cache_needs_flash_attention(program: Path, file: Path) -> None:
    """And a long prompt's speed is not measured."""
    made = llama.measure(config(program, file, kv_type="q8_0", prefill=llama.SHORT + 1))
    assert [(run["flash_attn"], run["type_k"]) for run in made["raw"]] == [(1, "q8_0")]
    assert "reading" not in made["figures"]["8"]


def test_what_is_missing_is_one_line(program: Path, file: Path, tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="llama_bench is 'nowhere': no such program; valid: the path of"):
        llama.measure(config(Path("nowhere"), file))
    with pytest.raises(InputError, match="valid for llama.cpp: a GGUF file"):
        llama.measure(config(program, tiny_folder()))
    with pytest.raises(InputError, match="kv_type is 'q3'; valid: f16, q8_0"):
        llama.measure(config(program, file, kv_type="q3"))
    program.write_text("#!/bin/sh\necho loading >&2\necho no such model >&2\nexit 3\n")
    with pytest.raises(RunError, match="llama-bench -t .*: exit code 3 no such model$"):
        llama.measure(config(program, file))
    program.write_text("#!/bin/sh\necho '[]'\n")
    with pytest.raises(RunError, match="no figures"):
        llama.measure(config(program, file))


def test_one_file_is_never_two_types(program: Path, file: Path) -> None:
    """Whatever dtypes a benchmark is asked for, llama.cpp's rows are measured once."""
    spec = specs.load("llama")
    for preset in specs.PRESETS:
        rows = spec.rows(preset, {"dtype": ["float32", "bfloat16", "int8"], "prompts": "novels"})
        assert rows == spec.rows(preset, {})
    assert len(specs.load("rates").rows("cpu", {"dtype": ["float32", "bfloat16", "int8"]})) == 3 * 4


@pytest.mark.slow
def test_measured_by_one_command(
    bench: Call,
    program: Path,
    file: Path,
) -> None:
    """All three benchmarks of one file; the row keeps no folder's name."""
    small = ("--set", "prefill=32", "--set", "points=8", "--set", "rounds=2", "--heads", "none")
    done = bench("run", "headline", "shape", "--model", file, "--llama-bench", program, *small)
    assert done.code == 0 and "left out" not in done.err, done.err
    rows = {(row["spec"], row["config"]["variant"]): row for row in read_rows(Path("bench-results"))}
    assert {spec for spec, _ in rows} == {"llama", "rates", "floats", "shape"}
    assert "llama-bench (" in rows["llama", "llama.cpp"]["config"]["llama_bench"]
    assert str(program.parent) not in json.dumps(list(rows.values()))
    prose = rows["rates", "prose"]
    figures = prose["figures"]["8"]
    assert prose["identical"] and prose["runs"] == 2
    assert figures["plain_least"] <= figures["plain"] <= figures["plain_most"]
    assert figures["least"] <= figures["speedup"] <= figures["most"]
    assert "auto" not in rows["shape", "plain"]["figures"]["8"]
    floats = rows["floats", "transformers"]["figures"]["8"]
    assert floats["float_weights_mb"] == pytest.approx(floats["peer_weights_mb"], rel=0.01)
    assert floats["stored_weights_mb"] < floats["float_weights_mb"] / 4
    for name in ("llama", "rates", "floats", "shape"):
        made = tables.table(specs.load(name), rows.values())
        assert made.body and tables.MISSING not in sum(made.body, []), made


def test_a_missing_program_leaves_the_other_rows(bench: Call, file: Path) -> None:
    done = bench("run", "llama", "shape", "--model", file, "--set", "prefill=32", "--set", "points=4")
    assert done.code == 0 and "left out: llama_bench is 'llama-bench': no such program" in done.err
    assert [row["spec"] for row in read_rows(Path("bench-results"))] == ["shape"]


def test_transformers_computes_in_floats_alone(tiny_folder: Callable[..., Path]) -> None:
    llm = LLM(tiny_folder())
    (given,) = specs.load("floats").rows("smoke", {"model": str(tiny_folder())})
    llm.target.dtype = torch.int8
    with pytest.raises(InputError, match="dtype is 'int8'; valid: float32, bfloat16, float16"):
        speeds.floats(Trial(llm, given))


def test_bytes_that_a_pass_of_transformers_reads() -> None:
    """An embedding that is the LM head as well is read; another is looked up."""
    for tied in (True, False):
        model = small(tie_word_embeddings=tied)
        whole = 4 * sum(p.numel() for p in model.parameters())
        assert bytes_read(model) == whole - (0 if tied else 4 * model.get_input_embeddings().weight.numel())


def test_sides_take_turns() -> None:
    """Forth and back, so that neither is always first; the first round is not counted."""
    order: list[str] = []

    def side(name: str) -> Callable[[], float]:
        return lambda: float(order.append(name) or len(order))

    found = common.in_turns({"a": side("a"), "b": side("b")}, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found.to_dict("list") == {"a": [4.0, 5.0], "b": [3.0, 6.0]}
    assert common.spread("x", [3.0, 1.0, 2.0]) == {"x": 2.0, "x_least": 1.0, "x_most": 3.0}


def rated(spec: str, variant: str, context: int, plain: float, **more: Any) -> dict[str, Any]:
    """A row of tokens a second."""
    options = {"kv_type": more.pop("kv_type", "f16"), "model": more.pop("model", embedded.NAME)}
    figures = {"plain": plain, "plain_least": plain - 1, "plain_most": plain + 1, "weights_mb": 97.0}
    figures |= {"kv_mb": 5.0, "reading": 10 * plain}
    if spec == "rates":
        figures |= {"auto": 2 * plain, "auto_least": plain, "auto_most": 3 * plain, "speedup": 2.0}
    given: dict[str, Any] = {"spec": spec, "kind": spec, "preset": "cpu", "dtype": "stored", "runs": 5}
    given |= {"machine": "a processor", "commit": "abc", "date": "now", "stored": {"file": "m.gguf"}}
    given["config"] = {"variant": variant, "prefill": context, "options": {}, "sampling": {}, **options}
    given["figures"] = {"64": figures}
    if spec == "llama":
        given |= {"flash": "on" if context > 2000 else "off", "program": {"commit": "0c1e570"}}
    return {**given, **more}


def test_the_first_table_of_the_readme() -> None:
    """By contexts, over the faster of llama.cpp's lines; what is not measured is said."""
    rows = [
        rated("llama", "llama.cpp", 1024, 80.0),
        rated("llama", "llama.cpp", 1024, 40.0, kv_type="q8_0"),
        rated("llama", "llama.cpp", 7936, 30.0),
        rated("rates", "prose", 1024, 100.0, dtype="float32"),
        rated("rates", "prose", 7936, 45.0, dtype="float32"),
        rated("rates", "code", 1024, 100.0, dtype="int8", commit="other"),
        rated("llama", "llama.cpp", 1024, 900.0, model="another.gguf"),
    ]
    made = summaries.headline(rows)
    assert made.head[1:] == ["after 1,024", "after 7,936", "prompt of 1,024", "weights read a pass, MB"]
    body = {line[0]: line[1:] for line in made.body}
    assert body["llama.cpp, without sampling, KV cache f16"][:3] == [
        *("**80** (79–81), 1.00 ×", "**30** (29–31), 1.00 ×"),
        "800",
    ]
    assert body["llama.cpp, without sampling, KV cache q8_0"][:2] == ["**40** (39–41), 0.50 ×", "–"]
    assert body["tokenswift, plain, float32"][:2] == ["**100** (99–101), 1.25 ×", "**45** (44–46), 1.50 ×"]
    assert body["tokenswift, adaptive, prose, float32"][0] == "**200** (100–300), 2.50 ×"
    assert body["tokenswift, adaptive, code, int8"][1] == "–"
    assert "llama.cpp 0c1e570" in made.below and "on or off, whichever was faster" in made.below
    assert "commit abc, other" in made.below and tables.APART in made.below
    assert summaries.headline(rows[3:6]).markdown().startswith("Not measured yet: `python -m benchmarks run")


def test_the_table_of_random_weights() -> None:
    """Each file's llama.cpp and our plain decoding; llama.cpp's rows of the default model are not there."""
    file = {"model": "shape.gguf (1)", "stored": {"file": "shape.gguf"}}
    rows = [
        rated("llama", "llama.cpp", 128, 20.0, **file),
        rated("llama", "llama.cpp", 1024, 80.0),
        rated("shape", "plain", 128, 16.0, dtype="float32", **file),
    ]
    made = summaries.shape(rows)
    assert [line[:2] for line in made.body] == [
        ["shape.gguf: llama.cpp, KV cache f16", "**20** (19–21), 1.00 ×"],
        ["shape.gguf: tokenswift, plain, float32", "**16** (15–17), 0.80 ×"],
    ]
    assert summaries.shape(rows[:2]).body == []
