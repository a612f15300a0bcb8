"""The n-gram table against a plain recount of the text, and the chances of looked-up tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenswift.speculation.drafters.base import Outcome
from tokenswift.speculation.drafters.lookup import NgramTable, PromptLookup

if TYPE_CHECKING:
    from tokenswift.speculation.drafters.base import Candidates
    from tokenswift.speculation.sequence_state import SequenceState

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=6)


def recount(
    text: list[int], delay: int, length: int, token: int, k: int
) -> list[tuple[tuple[int, ...], int]]:
    """Count from scratch: n-grams wholly older than the newest ``delay`` tokens."""
    old = text[: len(text) - min(delay, len(text))]
    starts = [i for i in range(len(old) - length + 1) if old[i] == token]
    grams = [tuple(old[i + 1 : i + length]) for i in starts]
    last = dict(zip(grams, starts, strict=True))
    order = sorted(last, key=lambda gram: (-grams.count(gram), -last[gram]))
    return [(gram, grams.count(gram)) for gram in order[:k]]


@given(TEXTS, st.integers(0, 30), st.integers(2, 5), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_the_table_equals_a_recount_at_any_time(
    chunks: list[list[int]], delay: int, length: int, k: int
) -> None:
    table = NgramTable(delay, length)
    text = list[int]()
    for chunk in chunks:
        table.extend(chunk)
        text.extend(chunk)
        for token in range(4):
            assert table.lookup(token, k) == recount(text, delay, length, token, k)


def test_what_was_new_in_its_place_is_less_likely_to_be_copied() -> None:
    """A copy of a copy: its tokens, also behind one that differed, are likelier than one after it.
    A token that ends the text ends the copy."""
    first = [*range(10, 22)]
    copied = [*range(10, 16), 50, *range(17, 22)]
    sequence: Any = SimpleNamespace(
        tokens=[*first, 5, *copied, 60, 61, 7, 12, 13, 14, 15, 50], eos={61}
    )
    drafted = list[tuple[int, float]]()
    candidates: Any = SimpleNamespace(
        min_chance=0.0, add=lambda node, token, chance: drafted.append((token, chance))
    )
    lookup = PromptLookup(False)
    lookup.begin(sequence)
    lookup.propose(sequence, candidates)
    assert [token for token, _ in drafted] == [*range(17, 22), 60]
    assert min(chance for _, chance in drafted[:5]) > 0.5
    assert drafted[5][1] < 0.5


class Text:
    """A text that is drafted from and goes on."""

    def __init__(self, tokens: list[int], lookup: PromptLookup) -> None:
        self.tokens = tokens
        self.eos: set[int] = set()
        self.lookup = lookup
        lookup.begin(cast("SequenceState", self))

    def chances(self) -> list[float]:
        """Of the copied tokens."""
        drafted = list[float]()
        candidates = SimpleNamespace(
            min_chance=0.0, add=lambda node, token, chance: drafted.append(chance)
        )
        self.lookup.propose(cast("SequenceState", self), cast("Candidates", candidates))
        return drafted

    def go_on(self, tokens: list[int]) -> None:
        """Add a step's tokens."""
        self.tokens += tokens
        self.lookup.observe(cast("SequenceState", self), Outcome(tokens, len(tokens), True))


REPEATED = [*range(10, 30), 5, *range(10, 14)]


def test_long_copies_are_less_likely_under_dry() -> None:
    without = Text(list(REPEATED), PromptLookup(False)).chances()
    under_dry = Text(list(REPEATED), PromptLookup(False, allowed_length=2)).chances()
    assert under_dry[0] > 0.85 * without[0]
    assert under_dry[4] < 0.2 * without[4]


def test_copies_that_go_on_under_dry_are_believed_again() -> None:
    """As where the sampler has no choice: what is counted outweighs what was known before."""
    text = Text(list(REPEATED), PromptLookup(False, allowed_length=2))
    before = text.chances()[5]
    for _ in range(40):
        text.go_on([*range(14, 30), 5, *range(10, 14)])
        text.chances()
    assert text.chances()[5] > 4 * before


def test_copies_that_break_off_under_dry_are_believed_less() -> None:
    """Behind so many tokens that it was to be learnt."""
    text = Text(list(REPEATED), PromptLookup(False, allowed_length=2))
    before = text.chances()[0]
    for wrong in range(100, 140):
        text.go_on([wrong, 5, *range(10, 14)])
        text.chances()
    assert text.chances()[0] < 0.5 * before
