"""Training text: first tokens, whole blocks from streams, passages, and that no more is read than needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.conftest import tiny_model, tiny_tokenizer
from tests.train.test_train import full_run, small, words
from tokenswift.train import data
from tokenswift.train.data import blocks, fingerprint, passages, prefix_of, read_texts
from tokenswift.train.store import HiddenStore
from tokenswift.types import InputError

BOOK = words(2000)


class Hub(ModuleType):
    """Stands in for the package ``datasets``: a stream of books that counts what was taken from it."""

    def __init__(self, books: int = 10**6, fails: Exception | None = None) -> None:
        super().__init__("datasets")
        self.books, self.fails, self.taken, self.asked = books, fails, 0, {}

    def load_dataset(self, name: str, **options: Any) -> Iterator[dict[str, str]]:
        self.asked = {"name": name, **options}
        if self.fails is not None:
            raise self.fails
        return self._rows()

    def _rows(self) -> Iterator[dict[str, str]]:
        for _ in range(self.books):
            self.taken += 1
            yield {"short_book_title": "Sea", "text": BOOK}


def hub(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Hub:
    made = Hub(**options)
    monkeypatch.setitem(sys.modules, "datasets", made)
    return made


def test_training_on_pg19(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, books=3)
    notes = full_run(tiny_model(), "pg19", tmp_path, small(steps=2))
    assert notes["steps"] == 2 and (tmp_path / "h.safetensors").exists()


def test_pg19_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, fails=ConnectionError("no route\nto the hub"))
    with pytest.raises(InputError, match="pg19 cannot be loaded: ConnectionError; name a local file") as told:
        list(read_texts("pg19"))
    assert "\n" not in str(told.value)


def test_pg19_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pg19 needs the package datasets; pip install datasets"):
        list(read_texts("pg19"))


def with_bos() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, made to put <s> before a text as Llama-3's does."""
    from tokenizers.processors import TemplateProcessing

    made = tiny_tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return made


class Counting:
    """A tokenizer that counts what it was given."""

    def __init__(self) -> None:
        self.made, self.characters = tiny_tokenizer(), 0

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        self.characters += len(text)
        return self.made(text, add_special_tokens=add_special_tokens)


def test_first_tokens_are_those_of_encode() -> None:
    assert prefix_of(tiny_tokenizer()) == []
    assert prefix_of(with_bos()) == with_bos()("")["input_ids"] == [256]


def test_blocks_begin_as_decoding_begins(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(BOOK)
    tokenizer = with_bos()
    made = list(blocks(str(tmp_path), tokenizer, 1000, 100, prefix_of(tokenizer)))
    assert all(block[0] == 256 and len(block) == 100 and 256 not in block[1:] for block in made)
    assert made[0] == tokenizer(BOOK)["input_ids"][:100]
    assert [t for block in made for t in block[1:]] == tokenizer(BOOK)["input_ids"][1 : 1 + 99 * len(made)]
    starts = passages(str(tmp_path), tokenizer, [40, 80], [256], 0)
    assert [len(p) for p in starts] == [40, 80] and all(p[0] == 256 for p in starts)


def test_stored_blocks_begin_as_decoding_begins(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(BOOK)
    for continued in (False, True):
        work = tmp_path / str(continued)
        work.mkdir()
        full_run(tiny_model(), str(tmp_path / "t.txt"), work, small(steps=0, epochs=0),
                 continued=continued, tokens=400, tokenizer=with_bos())  # fmt: skip
        folder = work / "work" / "states"
        store = HiddenStore(folder, 32, json.loads((folder / "index.json").read_text())["made_from"])
        tokens, _ = store.arrays()
        assert store.blocks and all(tokens[block.start] == 256 for block in store.blocks)


def test_blocks_never_cross_documents(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"text": "{letter * n}"}}\n' for letter, n in (("a", 250), ("b", 30), ("c", 100)))
    )
    made = list(blocks(str(tmp_path), tiny_tokenizer(), 10**6, 100))
    assert [len(b) for b in made] == [100, 100, 100]  # remainders of 50 and 30 tokens teach little
    assert all(len(set(b)) == 1 for b in made)


def test_a_limit_is_shared_by_length(tmp_path: Path) -> None:
    for name, size in (("a", 1000), ("b", 3000), ("c", 4000)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    made = [b[0] for b in blocks(str(tmp_path), tiny_tokenizer(), 800, 100)]
    assert [made.count(t) for t in dict.fromkeys(made)] == [1, 3, 4]


def test_of_many_short_documents_a_part_is_taken(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"text": "{chr(97 + n % 26) * 200}"}}\n' for n in range(400))
    )
    made = list(blocks(str(tmp_path), tiny_tokenizer(), 4000, 512))
    assert 3500 <= sum(map(len, made)) <= 4000
    assert len({b[0] for b in made}) >= 15  # from all over


def test_hardly_more_is_tokenised_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(words(200_000))
    counting = Counting()
    assert sum(map(len, blocks(str(tmp_path), counting, 3000, 100))) == 3000
    assert counting.characters <= 6 * 3000
    counting.characters = 0
    assert len(passages(str(tmp_path), counting, [200] * 5, [], 0)) == 5
    assert counting.characters <= 6 * 1000


def test_long_books_of_a_stream_give_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few books of a million are read, each for whole blocks, and no more of it than those."""
    stub, counting = hub(monkeypatch), Counting()
    made = list(blocks("pg19", counting, 5000, 500, [256]))  # ten of 499 and the first token
    assert stub.asked["split"] == "train" and stub.asked["streaming"] is True
    assert [len(b) for b in made] == [500] * 10 and stub.taken <= 11
    assert counting.characters <= 6 * 5000
    assert len(passages("pg19", counting, [300] * 4, [], 0)) == 4


def test_large_files_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE", 10)
    path = tmp_path / "t.txt"
    path.write_text("héé" * 9, encoding="utf-8")
    pieces = list(read_texts(str(path)))
    assert "".join(pieces) == "héé" * 9 and max(map(len, pieces)) <= 10
    path.write_bytes(b"x" * 25 + b"\xff" + b"x" * 9)
    with pytest.raises(InputError, match="t.txt is not UTF-8"):
        list(read_texts(str(path)))


def test_passages_of_several_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(99))))
    (tmp_path / "b.txt").write_text("short")
    found = passages(str(tmp_path), tiny_tokenizer(), [20] * 5 + [250] * 5, [], 1)
    whole = tiny_tokenizer()((tmp_path / "a.txt").read_text())["input_ids"]
    assert [len(p) for p in found] == [20] * 5 + [250] * 5
    text = ",".join(map(str, whole))
    assert all(",".join(map(str, p)) in text for p in found) and len({tuple(p) for p in found}) >= 4
    assert found == passages(str(tmp_path), tiny_tokenizer(), [20] * 5 + [250] * 5, [], 1)
    with pytest.raises(InputError, match="no document of 300 tokens"):
        passages(str(tmp_path), tiny_tokenizer(), [300], [], 0)


def test_short_documents_leave_passages_to_long_ones(tmp_path: Path) -> None:
    """The one long document among many short ones gives all that these cannot."""
    lines = [f'{{"text": "{"a" * 150}"}}\n'] * 20
    (tmp_path / "t.jsonl").write_text("".join([*lines, f'{{"text": "{"b" * 700}"}}\n', *lines]))
    found = passages(str(tmp_path), tiny_tokenizer(), [100] * 3 + [200] * 6, [256], 0)
    assert [len(p) for p in found] == [100] * 3 + [200] * 6 and all(len(set(p[1:])) == 1 for p in found)


def test_a_fingerprint_is_of_contents(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text("whale")
    assert fingerprint(str(tmp_path / "one")) == fingerprint(str(tmp_path / "two" / "t.txt"))
    (tmp_path / "two" / "t.txt").write_text("Whale")
    assert fingerprint(str(tmp_path / "one")) != fingerprint(str(tmp_path / "two"))
