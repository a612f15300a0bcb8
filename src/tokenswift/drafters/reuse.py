"""Long matches: where the newest tokens have stood before, the text may go on as it did then.

What `drafters.ngram.NgramTable` cannot do for automatic drafting: match as much of the context as agrees,
say how long the match is, and go on beyond n - 1 tokens (prompt look-up; Saxena 2023). Three things say how
likely a copied token is, beside the length of the match:

- whether the other earlier places of the same tokens go on alike;
- whether the token was *new* where it is copied from: no match had predicted it then (the number of a line,
  the name in a table), so it is likely to differ again;
- how often copies were right of late.

A token that differs does not end a match: one that has been followed so far is followed on behind it, until
three tokens in a row differ or a better one is found.
"""

from __future__ import annotations

import math

from tokenswift.drafters.calibration import FEATURES, Regression

LEAST = 3  # tokens that must agree
MOST = 32  # tokens compared, and tokens drafted
_PLACES = 4  # newest places kept for each beginning
_ASTRAY = 3  # tokens in a row that differ, and the match is given up
_RATE = 0.2  # one prediction a step at most: learn fast
_MEMORY = 0.9  # of the running share of right predictions


class Reuse:
    """Finds the longest earlier match of the text's end and predicts what followed it.

    Args:
        penalised: the sampler penalises repetition, which makes repeating less likely.
    """

    def __init__(self, penalised: bool) -> None:
        self._text: list[int] = []
        self._new: list[bool] = []  # of each token: no match predicted it
        self._places: dict[tuple[int, ...], list[int]] = {}
        # features: 1, log of the length, running share, new then, votes of the other places, goes on behind
        # a token that differed
        weights = (-3.0 if penalised else -1.5, 1.0, 1.5, -2.0, 1.0, -0.3)
        self._chance = Regression(weights, _RATE)
        self._recent = 0.0  # running share of right predictions
        self._follow = -1  # place of the token that the match followed now expects next; -1 without one
        self._agreed = self._differed = 0  # newest tokens that the followed match predicted, or did not
        self._drafted: list[tuple[int, tuple[float, ...], float]] = []  # token, features, chance
        if len(weights) != FEATURES:
            raise ValueError(f"a regression has {FEATURES} features")

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
        text, places = self._text, self._places
        for token in tokens:
            hit = self._follow >= 0 and text[self._follow] == token
            self._new.append(not hit)
            text.append(token)
            if self._follow >= 0:
                self._follow += 1
                self._agreed, self._differed = (self._agreed + 1, 0) if hit else (0, self._differed + 1)
                if self._differed == _ASTRAY:
                    self._follow = -1
            if len(text) < LEAST:
                continue
            known = places.setdefault(tuple(text[-LEAST:]), [])
            if known and (self._follow < 0 or self._agreed < LEAST):
                self._follow, self._agreed, self._differed = known[-1], LEAST, 0
            known.append(len(text))
            if len(known) > _PLACES:
                del known[0]

    def predict(self) -> list[tuple[int, float]]:
        """Tokens that may follow, each with its chance given the one before; empty without a match."""
        self._drafted = []
        text, end = self._text, len(self._text)
        alike, length = self._matches()
        behind = 0.0
        if not alike:
            if self._follow < 0:
                return []
            alike, length, behind = [self._follow], self._agreed + 1, 1.0
        best = alike[0]
        made = []
        for i in range(MOST):
            place = best + i % (end - best)  # the match may reach into its own continuation: a loop
            token = text[place]
            reach = [other for other in alike if other + i < end]
            alike = [other for other in reach if text[other + i] == token]
            votes = (2 * len(alike) / len(reach) - 1) * math.log(1 + len(reach)) if reach else 0.0
            x = (1.0, math.log(length + i), self._recent, float(self._new[place]), votes, behind)
            chance = self._chance.chance(x)
            self._drafted.append((token, x, chance))
            made.append((token, chance))
        return made

    def _matches(self) -> tuple[list[int], int]:
        """Places behind earlier occurrences of the newest tokens, longest match first, and its length."""
        text, end = self._text, len(self._text)
        found = []
        for place in self._places.get(tuple(text[-LEAST:]), ()):
            if place == end:
                continue
            agreed = LEAST
            while agreed < MOST and agreed < place and text[place - 1 - agreed] == text[-1 - agreed]:
                agreed += 1
            found.append((agreed, place))
        found.sort(reverse=True)
        return [place for _, place in found], found[0][0] if found else 0

    def learn(self, right: list[int]) -> list[tuple[float, bool]]:
        """Compare the last prediction with what came; returns (chance, hit) of what could be compared."""
        seen = []
        for token, (drafted, x, chance) in zip(right, self._drafted, strict=False):
            hit = token == drafted
            self._chance.learn(x, hit - chance)
            self._recent = _MEMORY * self._recent + (1 - _MEMORY) * hit
            seen.append((chance, hit))
            if not hit:
                break
        return seen
