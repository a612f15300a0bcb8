"""Long matches: where the newest tokens have stood before, the text may go on as it did then.

What `ngram.NgramTable` cannot do for automatic drafting: match as much of the context as agrees, say how
long the match is, and go on beyond n - 1 tokens (prompt look-up; Saxena 2023).
"""

from __future__ import annotations

import math

from tokenswift.drafting.calibration import FEATURES, Regression

LEAST = 3  # tokens that must agree
MOST = 32  # tokens compared, and tokens drafted
_PLACES = 4  # newest places kept for each beginning
_RATE = 0.3  # one prediction a step at most: learn fast
_MEMORY = 0.9  # of the running share of right predictions


class Reuse:
    """Finds the longest earlier match of the text's end and predicts what followed it.

    Args:
        penalised: the sampler penalises repetition, which makes repeating less likely.
    """

    def __init__(self, penalised: bool) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        weights = (-3.0 if penalised else -1.5, 1.0, 1.5, 0.0, 0.0, 0.0)
        self._chance = Regression(weights, _RATE)
        self._recent = 0.0  # running share of right predictions
        self._drafted: list[tuple[int, tuple[float, ...], float]] = []  # token, features, chance
        if len(weights) != FEATURES:
            raise ValueError(f"a regression has {FEATURES} features")

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
        text, places = self._text, self._places
        for token in tokens:
            text.append(token)
            if len(text) >= LEAST:
                known = places.setdefault(tuple(text[-LEAST:]), [])
                known.append(len(text))
                if len(known) > _PLACES:
                    del known[0]

    def predict(self) -> list[tuple[int, float]]:
        """Tokens that may follow, each with its chance given the one before; empty without a match."""
        self._drafted = []
        text = self._text
        best, length = 0, 0
        for place in self._places.get(tuple(text[-LEAST:]), ())[::-1]:
            if place == len(text):
                continue
            agreed = LEAST
            while agreed < MOST and agreed < place and text[place - 1 - agreed] == text[-1 - agreed]:
                agreed += 1
            if agreed > length:
                best, length = place, agreed
        if not length:
            return []
        made = []
        ahead = text[best : best + MOST]
        while len(ahead) < MOST:  # the match reaches into its own continuation: a loop
            ahead += ahead[: MOST - len(ahead)]
        for i, token in enumerate(ahead):
            x = (1.0, math.log(length + i), self._recent, 0.0, 0.0, 0.0)
            chance = self._chance.chance(x)
            self._drafted.append((token, x, chance))
            made.append((token, chance))
        return made

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
