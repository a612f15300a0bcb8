"""What DRY takes from drafted tokens, against the exact rule of the sampler."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenswift import SamplingParams
from tokenswift.sampling.dry import dry_penalties, repeated
from tokenswift.speculation.drafters import occurrences
from tokenswift.speculation.drafters.occurrences import DryLosses, Occurrences

VOCABULARY = 4  # few tokens, so that much repeats
TEXTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=60)
ALL_TOKENS = list(range(VOCABULARY))


def indexed(text: list[int]) -> Occurrences:
    """The occurrences of a text."""
    known = Occurrences()
    for token in text:
        known.append(token)
    return known


def exact_losses(params: SamplingParams, breakers: set[int], text: list[int]) -> list[float]:
    """What the sampler takes from every token after a text."""
    seen = text if params.dry_range < 0 else text[-params.dry_range :]
    marks = np.array([token in breakers for token in ALL_TOKENS], np.uint8)
    penalties = dry_penalties(params)
    most = params.dry_allowed_length + len(penalties) - 1
    array = np.array(seen, np.int32)
    tokens, lengths = repeated(array, marks, params.dry_allowed_length, most)
    losses = np.zeros(VOCABULARY)
    losses[tokens] = penalties[lengths - params.dry_allowed_length]
    return losses.tolist()


def params_of(allowed: int, dry_range: int) -> SamplingParams:
    """A sampling with DRY."""
    return SamplingParams(
        dry_multiplier=0.8, dry_allowed_length=allowed, dry_range=dry_range, dry_breakers=()
    )


@given(TEXTS, st.integers(2, 5), st.sampled_from([-1, 3, 8, 30]), st.sets(st.integers(0, 3)))
@settings(max_examples=300, deadline=None)
def test_losses_are_those_of_the_sampler(
    text: list[int], allowed: int, dry_range: int, breakers: set[int]
) -> None:
    """Where all occurrences are remembered and compared to their beginning."""
    params = params_of(allowed, dry_range)
    with patch.multiple(occurrences, _MAX_PLACES=100, _COMPARED=100):
        losses = DryLosses(params, breakers, indexed(text)).losses([], ALL_TOKENS)
    assert losses == exact_losses(params, breakers, text)


@given(TEXTS, TEXTS, st.integers(1, 5), st.sampled_from([-1, 3, 8, 30]))
@settings(max_examples=300, deadline=None)
def test_losses_are_never_more_than_those_of_the_sampler(
    text: list[int], path: list[int], allowed: int, dry_range: int
) -> None:
    """After drafted tokens, too, and with the few occurrences that are remembered."""
    params = params_of(allowed, dry_range)
    losses = DryLosses(params, (), indexed(text)).losses(path, ALL_TOKENS)
    exact = exact_losses(params, set(), [*text, *path])
    assert all(loss <= most for loss, most in zip(losses, exact, strict=True))


def test_a_draft_that_goes_on_with_a_repetition_loses_more_with_each_token() -> None:
    text = [*range(10, 20), 5, *range(10, 13)]
    dry = DryLosses(params_of(2, -1), (), indexed(text))
    after_three, after_four = dry.losses([], [13, 14]), dry.losses([13], [13, 14])
    assert after_three[1] == after_four[0] == 0
    assert 0 < after_three[0] < after_four[1]
