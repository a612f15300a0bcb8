"""Filling in: the prompt by each family's marks, and texts that end at a mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_tokenizer
from tests.tiny import byte_model
from tokenswift import LLM, InputError
from tokenswift.engine.infill import Infill, infill_ids
from tokenswift.loader.gguf_tokenizer import gguf_tokenizer
from tokenswift.loader.infill_marks import FAMILIES, Marks, marks_of


def marked(marks: Marks, bos: bool = False) -> Any:
    """The byte tokenizer with a family's marks."""
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": marks.names})
    if bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return tokenizer


def filling(marks: Marks) -> LLM:
    """A tiny model with a family's marks."""
    tokenizer = marked(marks)
    return LLM.from_model(byte_model(vocab_size=len(tokenizer)), tokenizer, heads=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_known_by_its_marks(family: str) -> None:
    assert marks_of(marked(FAMILIES[family])) == FAMILIES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gap_stands_behind_both_texts(family: str) -> None:
    """In the family's order, behind the token of the beginning where the tokenizer has one."""
    marks = FAMILIES[family]
    for bos in (False, True):
        tokenizer = marked(marks, bos)
        ids = infill_ids(Infill("def f():", "return x", begun=" x"), marks, tokenizer)
        text = f"{marks.prefix}def f():{marks.suffix}return x{marks.middle} x"
        assert tokenizer.decode(ids) == "<s>" * bos + text


def test_other_files_stand_before(subtests: pytest.Subtests) -> None:
    """With the marks of a repository, where there are such, else as text before the prefix."""
    gap = Infill("a", "b", [("x.py", "one"), ("y.py", "two")])
    wanted = {
        "Qwen-Coder": "<|repo_name|>project\n<|file_sep|>x.py\none\n<|file_sep|>y.py\ntwo\n"
        "<|file_sep|>file.py\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
        "StarCoder": "<fim_prefix>one\n\ntwo\n\na<fim_suffix>b<fim_middle>",
        "DeepSeek-Coder": "<｜fim▁begin｜>one\n\ntwo\n\na<｜fim▁hole｜>b<｜fim▁end｜>",
    }
    for family, text in wanted.items():
        with subtests.test(family):
            tokenizer = marked(FAMILIES[family])
            assert tokenizer.decode(infill_ids(gap, FAMILIES[family], tokenizer)) == text


def test_marks_in_the_texts_are_text() -> None:
    """Code about models holds them."""
    marks = FAMILIES["Qwen-Coder"]
    tokenizer = marked(marks)
    ids = infill_ids(Infill("a<|fim_middle|>", "<|fim_suffix|>"), marks, tokenizer)
    named = [tokenizer.convert_tokens_to_ids(name) for name in marks.names]
    assert sum(token in named for token in ids) == 3
    assert tokenizer.decode(ids).count("<|fim_middle|>") == 2


def test_what_a_file_numbers_comes_first() -> None:
    """The keys of GGUF files, new and old, for marks of any name."""
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "<A>", "<B>", "<C>", "<D>"],
        "tokenizer.ggml.token_type": [1, 1, 3, 3, 3, 3],
        "tokenizer.ggml.merges": [],
    }
    new = {"fim_pre_token_id": 3, "fim_suf_token_id": 2, "fim_mid_token_id": 4}
    new["fim_sep_token_id"] = 5
    old = {"prefix_token_id": 3, "suffix_token_id": 2, "middle_token_id": 4}
    for numbers, file in ((new, "<D>"), (old, "")):
        keys = {f"tokenizer.ggml.{name}": number for name, number in numbers.items()}
        tokenizer = gguf_tokenizer({**values, **keys}, Path("m.gguf"))
        assert marks_of(tokenizer) == Marks("<B>", "<A>", "<C>", file=file)
    keys = {f"tokenizer.ggml.{name}": 99 for name in new}
    assert marks_of(gguf_tokenizer({**values, **keys}, Path("m.gguf"))) is None


@pytest.mark.parametrize("strategy", ["autoregressive", "auto"])
def test_a_gap_is_filled_with_the_likeliest_text(strategy: str) -> None:
    marks = FAMILIES["Qwen-Coder"]
    llm = filling(marks)
    ids = infill_ids(Infill("def f(", "):"), marks, marked(marks))
    result = llm.infill("def f(", "):", 30, strategy)
    plain = llm.generate(ids, 30, "autoregressive", temperature=0, dry_multiplier=0)
    assert result.token_ids == plain.token_ids[: len(result.token_ids)]
    assert result.prompt_tokens == len(ids)
    seeded = llm.infill("def f(", "):", 30, strategy, temperature=1.0, seed=5, ignore_eos=True)
    plain_sampling: dict[str, Any] = {"min_p": 0.0, "dry_multiplier": 0.0, "temperature": 1.0}
    other = llm.generate(ids, 30, seed=5, ignore_eos=True, **plain_sampling)
    assert seeded.token_ids == other.token_ids[: len(seeded.token_ids)]


def test_a_text_ends_at_a_mark() -> None:
    """A model that goes on with another file has filled the gap."""
    marks = FAMILIES["Qwen-Coder"]
    llm = filling(marks)
    mark = marked(marks).convert_tokens_to_ids("<|file_sep|>")
    result = llm.infill("a", "b", 30, logit_bias={mark: 100.0}, stop="never")
    assert result.token_ids == [mark]
    assert result.finish_reason == "stop"
    assert result.text == ""


BAD: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((1, "b"), {}, "prefix is 1; valid: text"),
    (("a", None), {}, "suffix is None; valid: text"),
    (("a", "\ud800"), {}, "suffix holds a lone surrogate"),
    (("a", "b"), {"extra": "x"}, "extra is 'x'; valid: a list of pairs of a name and a text"),
    (("a", "b"), {"extra": [("x",)]}, "extra[0] is ('x',); valid: a name and a text"),
]


@pytest.mark.parametrize(("texts", "more", "message"), BAD)
def test_bad_texts(texts: tuple[Any, ...], more: dict[str, Any], message: str) -> None:
    llm = LLM.from_model(byte_model(), tiny_tokenizer(), heads=None)
    with pytest.raises(InputError) as caught:
        llm.infill(*texts, **more)
    assert str(caught.value).startswith(message)


def test_a_model_without_marks_says_so() -> None:
    for tokenizer in (tiny_tokenizer(), None):
        llm = LLM.from_model(byte_model(), tokenizer, heads=None)
        with pytest.raises(InputError) as caught:
            llm.infill("a", "b")
        line = str(caught.value)
        assert line.startswith("suffix is given, but the model has no marks for filling in (such")
        assert line.endswith("or a model that fills in, such as Qwen2.5-Coder")
