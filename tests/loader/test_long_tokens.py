"""A file's tokens are of a length that cannot keep the one who loads it waiting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chats import chat_tokenizer
from tokenswift.loader import plain_tokenizer
from tokenswift.loader.gguf_tokenizer import words_of
from tokenswift.types import InputError

PATH = Path("model.gguf")


def fields(tokens: list[str]) -> dict[str, object]:
    """A sentencepiece vocabulary."""
    values: dict[str, object] = {"model": "llama", "tokens": tokens}
    values["scores"] = [0.0] * len(tokens)
    values["token_type"] = [1] * len(tokens)
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (["a", "b" * (1 << 20)], "tokens has a token of 1,048,576 characters; valid: up to 1,024"),
        (["a" * 1024] * 5000, "tokens has 5,120,000 characters; valid: up to 4,194,304"),
    ],
)
def test_tokens_that_no_vocabulary_has_are_refused(tokens: list[str], line: str) -> None:
    with pytest.raises(InputError, match=line):
        words_of(fields(tokens), PATH)


@pytest.mark.parametrize("length", [1024, 1025])
def test_control_tokens_of_a_folder(length: int, tmp_path: Path) -> None:
    """Prefixes of control tokens are looked for at the end of what a message says."""
    chat_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": 259, "content": "x" * length}
    )
    file.write_text(json.dumps(content), encoding="utf-8")
    if length <= plain_tokenizer.LONGEST_TOKEN:
        plain_tokenizer.read(tmp_path, "llama")
    else:
        with pytest.raises(InputError, match="has a token of 1,025 characters"):
            plain_tokenizer.read(tmp_path, "llama")
