"""Tokenizers read without transformers: those that are sure to be its own, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.chats import chat_tokenizer
from tests.gguf_files import tokenizer_fields
from tokenswift.loader import plain_tokenizer
from tokenswift.loader.gguf_tokenizer import gguf_tokenizer, words_of
from tokenswift.types import InputError

Change = Callable[[Path], object]
PATH = Path("model.gguf")


def edited(name: str, **changes: object) -> Change:
    """A change of some fields of a file; None leaves a field out."""

    def change(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text(encoding="utf-8")) | changes
        left = {key: value for key, value in content.items() if value is not None}
        file.write_text(json.dumps(left), encoding="utf-8")

    return change


def written(name: str, text: str = "{}") -> Change:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


CONFIG = "tokenizer_config.json"
FILE = "tokenizer.json"


def several_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edited(CONFIG, chat_template=[{"name": "default", "template": "x"}])(folder)


def saved(folder: Path) -> Path:
    """A folder with a tokenizer that is read."""
    chat_tokenizer().save_pretrained(folder)
    edited(CONFIG, tokenizer_class="PreTrainedTokenizerFast")(folder)
    return folder


def test_a_tokenizer_of_a_folder_is_that_of_transformers(tmp_path: Path) -> None:
    real = chat_tokenizer()
    ours = plain_tokenizer.read(saved(tmp_path), "llama")
    assert ours is not None
    for text in ("Hello, you.", "<s>a</s>", " é 日 <x>", ""):
        for special in (True, False):
            ids = real(text, add_special_tokens=special)["input_ids"]
            assert ours(text, add_special_tokens=special)["input_ids"] == ids
            assert ours.decode(ids) == real.decode(ids)
    assert ours.chat_template == real.chat_template
    assert ours.eos_token_id == real.eos_token_id


@pytest.mark.parametrize(
    "change",
    [
        edited(CONFIG, tokenizer_class="LlamaTokenizer"),
        edited(CONFIG, tokenizer_class=None),
        edited(CONFIG, add_prefix_space=True),
        edited(CONFIG, split_special_tokens=True),
        edited(CONFIG, from_slow=True),
        edited(CONFIG, added_tokens_decoder={"256": {"content": "<other>"}}),
        edited(CONFIG, extra_special_tokens=["no such token"]),
        edited(CONFIG, extra_special_tokens={"image": "<x>"}),
        edited(CONFIG, unk_token="a"),
        several_templates,
        edited(
            FILE,
            truncation={
                "direction": "Right",
                "max_length": 3,
                "strategy": "LongestFirst",
                "stride": 0,
            },
        ),
        written("tekken.json"),
        written("added_tokens.json"),
        written("special_tokens_map.json"),
        written(CONFIG, "[]"),
        written(CONFIG, "{"),
        lambda folder: (folder / FILE).unlink(),
        lambda folder: (folder / "additional_chat_templates").mkdir(),
    ],
)
def test_what_may_be_another_tokenizer_is_left_to_transformers(
    change: Change, tmp_path: Path
) -> None:
    change(saved(tmp_path))
    assert plain_tokenizer.read(tmp_path, "llama") is None


def test_a_family_whose_class_may_do_more_is_left_to_transformers(tmp_path: Path) -> None:
    assert plain_tokenizer.read(saved(tmp_path), "gemma2") is None


def fields(changes: Mapping[str, object]) -> dict[str, object]:
    """What a file says of a byte-level vocabulary."""
    values = tokenizer_fields(chat_tokenizer(), pre="qwen2")
    return values | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"bos_token_id": 300}, "bos_token_id is 300; valid: 0 to 299, a row of the embedding"),
        ({"eos_token_id": -1}, "eos_token_id is -1; valid: 0 to 299"),
        ({"tokens": []}, "tokens has 0 tokens; valid: 1 to 300, the rows of the embedding"),
        ({"tokens": ["a"] * 301}, "tokens has 301 tokens; valid: 1 to 300"),
        ({"token_type": [1, 1]}, "token_type has 2 values; valid: 260"),
        ({"scores": [0.5]}, "scores has 1 values; valid: 260"),
        ({"tokens": "abc"}, "tokens"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(
    changes: Mapping[str, object], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        words_of(fields(changes), PATH, rows=300)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; valid: gpt2, llama"),
        ({"model": "llama"}, "lacks tokenizer.ggml.scores; valid: a file with its tokenizer"),
        ({"pre": "jais"}, "tokenizer.ggml.pre is 'jais'; valid: gpt-2, .*tekken.*, minerva-7b"),
        ({"merges": ["no token"]}, "its tokenizer cannot be built"),
        ({"merges": ["abc"]}, "its tokenizer cannot be built"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused_in_a_line(
    changes: Mapping[str, object], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        gguf_tokenizer(fields(changes), PATH)


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, [257]),
        ({"eot_token_id": 7}, [7, 257]),
        ({"eom_token_id": 9, "eos_token_id": None}, [9, 257]),
    ],
)
def test_which_tokens_end_a_text(changes: Mapping[str, object], ends: list[int]) -> None:
    assert words_of(fields(changes), PATH).ends() == ends
