"""How byte-level tokenizers of GGUF files cut a text, by the names that files have for it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models

from tokenswift.loader.cuts import RULES, SAME, rule_of


def pieces(name: str, text: str) -> list[str]:
    rule = rule_of(name)
    assert rule is not None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    cuts = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cuts]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "It's 1234  x", ["It", "'s", " 1234", " ", " x"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("minerva-7b", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "WE'LL 12345!\n x", ["WE", "'LL", " ", "123", "45", "!\n", " x"]),
        ("falcon3", "12345", ["123", "45"]),
        ("qwen2", "x 12\r\n\ny", ["x", " ", "1", "2", "\r\n\n", "y"]),
        ("deepseek-r1-qwen", "12 a", ["1", "2", " a"]),
        ("tekken", "HelloWorld's 12 a/\n", ["Hello", "World", "'s", " ", "1", "2", " a", "/\n"]),
        ("tekken", "HTTPServer Äa éÉ", ["HTTPServer", " Äa", " éÉ"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("gpt-4o", "WE'LL go//\n", ["WE'LL", " go", "//\n"]),
        ("seed-coder", "a = 12;\n\nb", ["a", " =", " ", "1", "2", ";", "\n\n", "b"]),
        (
            "deepseek-llm",
            "Élan vital, 漢字 12\n\n",
            ["É", "lan", " vital", ",", " ", "漢字", " ", "12", "\n", "\n"],
        ),
        ("deepseek-llm", "ab  \nᄃ", ["ab", "  ", "\n", "ᄃ"]),
        ("deepseek-coder", "ab c_d 12漢", ["ab", " c", "_", "d", " ", "1", "2", "漢"]),
        ("deepseek-coder", "漢字a\t-b", ["漢字", "a", "\t-", "b"]),
        ("viking", "Hei, maailma 42!", ["Hei", ",", " maailma", " ", "4", "2", "!"]),
        ("viking", "ab(c)|d", ["ab", "(", "c", ")|", "d"]),
    ],
)
def test_pieces(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected


@pytest.mark.parametrize("name", [*RULES, *SAME])
def test_pieces_are_the_text(name: str) -> None:
    text = "".join(chr(point) for point in (*range(0x250), *range(0x900, 0x910), 0x4E00, 0x1F600))
    assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize("name", [*RULES, *SAME])
@pytest.mark.parametrize("text", ["漢" * 50_000, "a" * 50_000, " " * 50_000, "é\u0301" * 25_000])
def test_a_long_text_is_cut_at_once(name: str, text: str) -> None:
    """Patterns that tried every way would take for ever."""
    assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize("name", ["llama-bpe", "falcon3", "tekken"])
def test_which_rules_put_the_beginning_before_a_text(name: str) -> None:
    rule = rule_of(name)
    assert rule is not None
    assert rule.adds_bos
    assert rule.ignores_merges


@pytest.mark.parametrize("name", [None, "", "jais", "tekken "])
def test_a_rule_that_is_not_known(name: str | None) -> None:
    assert rule_of(name) is None
