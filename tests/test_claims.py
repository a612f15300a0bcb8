"""The check of sentences with numbers: what holds is silent, and each way of not holding is a line."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.benchmark.test_report import row
from tests.test_docs_commands import script

claims = script("claims")
TEXT = {"page": "It is **1.5** times as fast at 200 tokens. So.\n\n```sh\nrun 99\n```\n\nFloat32 is `7`."}
CLAIM: dict[str, Any] = {
    "says": "It is **1.5** times as fast at 200 tokens.",
    "rows": [{"spec": "mine", "where": {"variant": "a"}, "point": 200, "speedup": [1.5, 1.5]}],
}


def faults(text: str = TEXT["page"], **changed: Any) -> list[str]:
    claim = copy.deepcopy(CLAIM)
    claim["rows"][0] |= changed
    rows = [row("a", speedup=0.7), row("a", seed=1, speedup=0.8), row("b", speedup=9.0)]
    return claims.faults({"page": text}, [claim], rows)


def test_what_holds_is_silent() -> None:
    """Twice .7 and .8: a median of 1.5 at 200 tokens."""
    assert faults() == []


@pytest.mark.parametrize(
    "fault, text, changed",
    [
        ("nothing in claims.toml holds 'It is 3 years old.'", TEXT["page"] + " It is 3 years old.", {}),
        ("no page says 'It is **1.5** times", "It is **1.6** times as fast at 200 tokens.", {}),
        ("speedup is 1.5 in a row of mine; said: 1.6 to 1.7", TEXT["page"], {"speedup": [1.6, 1.7]}),
        ("no row holds 1.5", TEXT["page"], {"speedup": [1.4, 1.6]}),
        ("there are no rows of mine with {'variant': 'c'}", TEXT["page"], {"where": {"variant": "c"}}),
        ("there are no rows of mine with {'variant': 'a'} and 300 new", TEXT["page"], {"point": 300}),
        ("speedup is 18.0 in a row of mine", TEXT["page"], {"where": {}}),
        ("d4 is None in a row", TEXT["page"], {"d4": [0.1, 0.2]}),
    ],
)
def test_what_does_not_hold_is_a_line(fault: str, text: str, changed: dict[str, Any]) -> None:
    assert any(fault in line for line in faults(text, **changed)), faults(text, **changed)


def test_names_and_code_are_no_numbers() -> None:
    assert claims.numbers("SmolLM2-135M in bfloat16 (Tables 3, 5, 7) took 1,024 tokens, 0.97 times.") == [
        1024,
        0.97,
    ]
    assert list(claims.sentences(TEXT["page"])) == ["It is **1.5** times as fast at 200 tokens."]
