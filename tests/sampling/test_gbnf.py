"""Grammars in llama.cpp's syntax, and how they are told from Lark's."""

from __future__ import annotations

import pytest

from tests.lossless.test_grammar import ids_of, masks_of
from tokenswift import Grammar


def follows(grammar: Grammar, text: str) -> bool:
    ids = [*ids_of(text), 257]
    return masks_of(grammar).reach([], ids) == len(ids)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (r"root ::= [a\-c]+", "a-c", "b"),
        (r'root ::= "a\-b\.\/\"\\\\"', 'a-b./"\\\\', "a"),
        (r"root ::= [\x41-\x43]+", "ABC", "D"),
        (r'root ::= "\u00e9" [\u00e0-\u00ef]', "éç", "eç"),
        (r'root ::= "\u0041\n\t\x22"', 'A\n\t"', "A"),
    ],
)
def test_escapes(text: str, good: str, bad: str) -> None:
    grammar = Grammar.written(text)
    assert grammar.kind == "gbnf" and follows(grammar, good) and not follows(grammar, bad)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('start: "a ::= b"', "a ::= b"),
        ("// root ::= x\nstart: /[ab]::=/", "a::="),
        ('%llguidance {}\nstart: A\nA: "::="', "::="),
    ],
)
def test_lark_that_names_the_other_sign(text: str, good: str) -> None:
    grammar = Grammar.written(text)
    assert grammar.kind == "lark" and follows(grammar, good)
