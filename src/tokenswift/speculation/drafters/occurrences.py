"""Where the newest tokens of a text occurred before, and what DRY makes of it.

:class:`Occurrences` indexes a growing text by every few tokens in a row. Prompt lookup copies from
there. :class:`DryLosses` tells from it how much a drafted token would lose under DRY, without
searching the text as the exact rule does (`sampling.dry`).
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling.dry import dry_penalties

# Figures as in `drafters.lookup`.

LEAST = 3  # tokens in a row that are looked up: 2 +2.2%, 5 -2.3%
_MAX_PLACES = 4  # occurrences remembered of the same LEAST tokens, the newest ones: +.6, +.2%
#: tokens of a context that DRY's losses are told from: beyond, a token can hardly be chosen
_COMPARED = 12


class Occurrences:
    """A growing text, and where each LEAST tokens in a row occurred last.

    Attributes:
        text: the tokens.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def append(self, token: int) -> int | None:
        """Add a token; return the place behind the last earlier occurrence of the newest LEAST
        tokens, None where there is none."""
        self.text.append(token)
        places = self._places.setdefault(tuple(self.text[-LEAST:]), [])
        earlier = places[-1] if places else None
        places.append(len(self.text))
        if len(places) > _MAX_PLACES:
            del places[0]
        return earlier

    def behind(self, tokens: tuple[int, ...]) -> list[int]:
        """The places behind occurrences of LEAST tokens, the oldest first."""
        return self._places.get(tokens, [])

    def before_end(self) -> list[int]:
        """The places behind earlier occurrences of the newest LEAST tokens, the oldest first."""
        return self.behind(tuple(self.text[-LEAST:]))[:-1]  # the last one is the text's end


class DryLosses:
    """What DRY takes from drafted tokens, by their newest occurrences.

    A repetition counts from LEAST - 1 tokens on, and occurrences within the draft do not.

    Args:
        params: a sampling with DRY.
        breakers: tokens that end repetitions.
        occurrences: of the text, without drafted tokens.
    """

    def __init__(
        self, params: SamplingParams, breakers: Iterable[int], occurrences: Occurrences
    ) -> None:
        self._allowed = params.dry_allowed_length
        self._range = params.dry_range
        self._penalties = dry_penalties(params).tolist()
        self._breakers = frozenset(breakers)
        self._occurrences = occurrences

    def losses(self, path: list[int], tokens: list[int]) -> list[float]:
        """What the logits of tokens lose after the text and a drafted path."""
        text = self._occurrences.text
        context = [*text[-_COMPARED:], *path][-_COMPARED:]
        oldest = 0 if self._range < 0 else max(0, len(text) + len(path) - self._range)
        return [self._loss(context, token, oldest) for token in tokens]

    def _loss(self, context: list[int], token: int, oldest: int) -> float:
        end = context[1 - LEAST :]
        if token in self._breakers or not self._breakers.isdisjoint(end):
            return 0.0
        places = self._occurrences.behind((*end, token))
        longest = max((self._repeated(context, place - 1, oldest) for place in places), default=0)
        if longest < self._allowed:
            return 0.0
        return self._penalties[min(longest - self._allowed, len(self._penalties) - 1)]

    def _repeated(self, context: list[int], place: int, oldest: int) -> int:
        """How many tokens before a place end the context, too, of those from the oldest in DRY's
        range on."""
        text = self._occurrences.text
        most = min(len(context), place - oldest)
        length = min(LEAST - 1, most)
        while length < most and text[place - 1 - length] == context[-1 - length]:
            if context[-1 - length] in self._breakers:
                break
            length += 1
        return length
