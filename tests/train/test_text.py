"""Training text: first tokens, whole blocks, passages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.conftest import tiny_model, tiny_tokenizer
from tests.train.test_train import full_run, small, words
from tokenswift.train.data import blocks, passages, prefix_of

BOOK = words(2000)


def test_training_on_pg19(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub: Any = ModuleType("datasets")
    hub.load_dataset = lambda name, **options: iter([{"short_book_title": "Sea", "text": BOOK}] * 3)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    notes = full_run(tiny_model(), "pg19", tmp_path, small(steps=2))
    assert notes["steps"] == 2 and (tmp_path / "h.safetensors").exists()


def with_bos() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, made to put <s> before a text as Llama-3's does."""
    from tokenizers.processors import TemplateProcessing

    made = tiny_tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return made


def test_blocks_begin_as_decoding_begins(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(BOOK)
    tokenizer = with_bos()
    assert prefix_of(tiny_tokenizer()) == [] and prefix_of(tokenizer) == tokenizer("")["input_ids"] == [256]
    made = list(blocks(str(tmp_path), tokenizer, 1000, 100, prefix_of(tokenizer)))
    assert all(block[0] == 256 and len(block) == 100 and 256 not in block[1:] for block in made)
    assert made[0] == tokenizer(BOOK)["input_ids"][:100]
    assert [t for block in made for t in block[1:]] == tokenizer(BOOK)["input_ids"][1 : 1 + 99 * len(made)]
    starts = passages(str(tmp_path), tokenizer, [40, 80], [256], 0)
    assert [len(p) for p in starts] == [40, 80] and all(p[0] == 256 for p in starts)


def test_blocks_never_cross_documents(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"text": "{letter * n}"}}\n' for letter, n in (("a", 250), ("b", 30), ("c", 100)))
    )
    made = list(blocks(str(tmp_path), tiny_tokenizer(), 10**6, 100))
    assert [len(b) for b in made] == [100, 100, 100]  # remainders of 50 and 30 tokens teach little
    assert all(len(set(b)) == 1 for b in made)
