"""Sides that take turns, and what is counted of each."""

from __future__ import annotations

from tokenswift.turns import DecodingSide, take_turns
from tokenswift.types import Step

STEPS = (
    Step((1, 2), 0, 0, 0, 0, sources=("head", "target"), times={"draft": 1.0, "verify": 2.0}),
    Step((3,), 0, 0, 0, 0, sources=("target",), times={"verify": 2.0}),
    Step((4,), 0, 0, 0, 0, sources=("target",), times={"verify": 2.0}),
)


def test_the_order_is_reversed_after_each_round() -> None:
    turns = list(take_turns(["plain", "auto"], range(3)))
    expected = [(0, "plain"), (0, "auto"), (1, "auto"), (1, "plain"), (2, "plain"), (2, "auto")]
    assert turns == expected


def test_a_turn_ends_with_the_step_that_reaches_its_length() -> None:
    side = DecodingSide(iter(STEPS))
    side.run_to(1)
    assert side.tokens == [1, 2]
    side.run_to(2)
    assert side.step_count == 1
    side.run_to(3)
    assert side.tokens == [1, 2, 3]


def test_steps_are_added_up_until_the_text_ends() -> None:
    side = DecodingSide(iter(STEPS))
    side.run_to(100)
    assert side.step_count == 3
    assert side.seconds == 7.0
    assert side.phase_seconds == {"draft": 1.0, "verify": 6.0}
    assert side.token_sources == {"target": 3, "head": 1}
