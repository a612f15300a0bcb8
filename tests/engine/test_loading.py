"""What `LLM` and `LLM.from_model` take, and what they say of anything else, in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, InputError, RunError, memory
from tokenswift.loader.identity import base_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.speculation.heads.files import save_heads


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model("llama"), heads=None)


REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: LLM.from_model("smollm2-135m"), "model is 'smollm2-135m'; valid: a loaded"),
    (lambda model: LLM.from_model(None), "model type is '?'; valid: causal language models"),
    (lambda model: LLM.from_model(model, "tokens"), "tokenizer is 'tokens'; valid: None, or a"),  # type: ignore[arg-type]
    (lambda model: LLM.from_model(model, rope_scaling=3), "rope_scaling is 3; valid: none, yarn"),  # type: ignore[arg-type]
    (lambda model: LLM(model), "model is of type LlamaForCausalLM; valid: alias, folder or hub id"),
]


@pytest.mark.parametrize(("make", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_what_is_no_model_is_refused(llm: LLM, make: Callable[[Any], object], line: str) -> None:
    with pytest.raises(InputError) as caught:
        make(llm.model)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("torch_dtype", "dtype"),
        ("device_map", "device"),
        ("kv_cache", "kv_cache_dtype"),
        ("n_threads", "threads"),
        ("dtypes", "dtype"),
    ],
)
def test_a_wrong_argument_is_told_the_right_one(name: str, meant: str) -> None:
    wrong: dict[str, Any] = {name: 1}
    with pytest.raises(InputError, match=rf"'{name}' is not an argument of LLM; .*") as caught:
        LLM("./none", **wrong)
    assert str(caught.value).endswith(f"; did you mean {meant}?")


def test_errors_of_a_program_name_no_options_of_commands(llm: LLM) -> None:
    with pytest.raises(InputError, match="or more with rope_scaling yarn$") as caught:
        llm.generate([1, 2], 10_000)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_device_without_room_for_the_weights_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[..., Path], error: type[Exception]
) -> None:
    def without_room(*_: object, **__: object) -> None:
        raise error("planted")

    monkeypatch.setattr(NativeTarget, "__init__", without_room)
    line = r"does not fit into the memory of device cpu; valid: a smaller model; nothing was kept$"
    with pytest.raises(RunError, match=line):
        LLM(tiny_folder(), device="cpu", heads=None)


def test_a_system_that_does_not_tell_its_memory_refuses_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: None)
    assert len(llm.generate([1, 2], 6, ignore_eos=True).token_ids) == 6


def test_a_generation_names_the_file_of_its_heads(tmp_path: Path) -> None:
    model = tiny_model("llama")
    file = tmp_path / "x.heads.safetensors"
    save_heads(random_heads("linear", 48, VOCAB), file, base_of(model))
    generation = LLM.from_model(model, heads=file).generate([1, 2, 3], 4)
    assert generation.heads == {"kind": "linear", "file": str(file)}


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, "1000 None"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE"),
    ],
    ids=str,
)
def test_torchs_threads_do_not_spin_for_long_unless_asked_to(
    changes: dict[str, str], values: str
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    code = f"import os, tokenswift; print(*[os.environ.get(name) for name in {names}])"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **changes}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == values
