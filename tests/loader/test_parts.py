"""GGUF models in several files: read with their siblings, from any part, as the joined file is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gguf_files import small, write
from tests.malformed.gguf_bytes import I32, U32, Draft, Value
from tokenswift import LLM, SamplingParams
from tokenswift.loader.find import gguf_in
from tokenswift.loader.load import load
from tokenswift.loader.parts import first_parts, part_names
from tokenswift.types import InputError

PROMPT = [5, 9, 200, 33, 5, 9]
GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)

pytestmark = pytest.mark.usefixtures("own_cache")


def opened(path: Path) -> LLM:
    return LLM(path, device="cpu", dtype="float32", heads="none")


def refusal_of(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        opened(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The files of a model in three parts."""
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "tiny.gguf", small(), split=8)
    files = sorted((tmp_path / "model").iterdir())
    assert [file.name for file in files] == part_names("tiny-00001-of-00003.gguf")
    return files


def changed(file: Path, key: str, value: Value | None) -> None:
    Draft.of(file).set(key, value).write(file)


# ---- names


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("a-00002-of-00002.gguf", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]),
        ("q/a-00001-of-00001.GGUF", ["q/a-00001-of-00001.GGUF"]),
        ("a-1-of-2.gguf", ["a-1-of-2.gguf"]),
        ("a-00000-of-00002.gguf", ["a-00000-of-00002.gguf"]),
        ("a-00003-of-00002.gguf", ["a-00003-of-00002.gguf"]),
        ("a-00001-of-99999.gguf", ["a-00001-of-99999.gguf"]),
    ],
)
def test_the_names_of_all_parts(name: str, names: list[str]) -> None:
    assert part_names(name) == names


def test_all_parts_of_a_model_count_as_one() -> None:
    names = ["b.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "c-00002-of-00003.gguf"]
    assert first_parts(names) == ["a-00001-of-00002.gguf", "b.gguf", "c-00002-of-00003.gguf"]


# ---- models


@pytest.mark.parametrize("which", [0, 1, 2, None])
def test_any_part_means_the_model_that_the_joined_file_is(
    which: int | None, parts: list[Path], tmp_path: Path
) -> None:
    write(tmp_path / "joined.gguf", small())
    joined = opened(tmp_path / "joined.gguf")
    split = opened(parts[0].parent if which is None else parts[which])
    assert split.resources.identity() == joined.resources.identity()
    expected = joined.generate(PROMPT, 8, sampling=GREEDY, ignore_eos=True).token_ids
    assert split.generate(PROMPT, 8, sampling=GREEDY, ignore_eos=True).token_ids == expected


def test_transformers_own_model_of_parts(parts: list[Path]) -> None:
    assert load(parts[1], device="cpu").tokenizer("Hi")["input_ids"]


def test_another_last_part_is_another_model(parts: list[Path], tmp_path: Path) -> None:
    before = opened(parts[0]).resources.identity()
    draft = Draft.of(parts[2])
    norm = draft.tensor("output_norm.weight")
    norm.data = norm.data[4:] + norm.data[:2] + b"\0?"
    draft.write(parts[2])
    after = opened(parts[0]).resources.identity()
    assert before["weights"] != after["weights"]


def test_a_later_part_that_changes_is_noticed(parts: list[Path]) -> None:
    llm = opened(parts[0])
    os.utime(parts[2], (1, 1))
    with pytest.raises(InputError, match="has changed since the model was loaded"):
        llm.resources.identity()


def test_two_models_in_parts_in_a_folder(parts: list[Path]) -> None:
    write(parts[0].with_name("other.gguf"), small(), split=8)
    with pytest.raises(InputError, match="holds 2 GGUF models .other-00001-of-00003.gguf, tiny-"):
        gguf_in(parts[0].parent)


# ---- what is refused


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(missing: int, parts: list[Path]) -> None:
    parts[missing].unlink()
    there = parts[0 if missing else 1]
    line = f"is one of 3 parts of a model, and {parts[missing].name} is not in its folder; valid:"
    assert line in refusal_of(there)
    assert line in refusal_of(there.parent)


@pytest.mark.parametrize(
    ("part", "key", "value", "words"),
    [
        (0, "split.count", Value(U32, 2), "split.count is 2, split.no is 0; valid: 3, as its name"),
        (1, "split.count", Value(U32, 2), "split.count is 2; valid: 3"),
        (1, "split.count", None, "split.count is None; valid: 3"),
        (1, "split.no", Value(U32, 2), "split.no is 2; valid: 1"),
        (2, "split.no", Value(I32, -1), "split.no is -1; valid: 2"),
        (0, "split.tensors.count", Value(U32, 40), "split.tensors.count is 40; valid: 21, the"),
        (0, "split.tensors.count", None, "split.tensors.count is None; valid: 21, the tensors of"),
    ],
)
def test_parts_that_do_not_belong_together(
    part: int, key: str, value: Value | None, words: str, parts: list[Path]
) -> None:
    changed(parts[part], key, value)
    line = refusal_of(parts[0])
    assert words in line
    assert f"model file {parts[part]}" in line


def rename(parts: list[Path]) -> Path:
    return parts[0].rename(parts[0].with_name("tiny.gguf"))


def repeat(parts: list[Path]) -> Path:
    repeated = Draft.of(parts[0]).tensors[0]
    draft = Draft.of(parts[1])
    draft.tensors[0] = repeated
    draft.write(parts[1])
    return parts[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rename, "split.count is 3, split.no is 0; valid: a file named …-00001-of-00003.gguf"),
        (repeat, "a tensor of another part is "),
    ],
)
def test_files_that_are_no_parts(
    change: Callable[[list[Path]], Path], words: str, parts: list[Path]
) -> None:
    assert words in refusal_of(change(parts))
