"""DRY ("don't repeat yourself"): a penalty of the token that would make a repeated sequence longer.

The form is llama.cpp's. Let n be the number of tokens at the end of the text that also stand somewhere before
it, followed by token v; of several places the longest counts. With n at least the allowed length A, the logit
of v loses multiplier · base^(n - A). A *breaker* is a token that contains one of some texts: no repetition is
seen across it, and it is never penalised itself.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tokenswift.config import SamplingParams

_MOST = 512  # repeated tokens beyond the allowed length that still add to the penalty
_LARGEST = 3e38  # float32 holds it


def penalties(params: SamplingParams) -> NDArray[np.float32]:
    """The penalty of n = A, A + 1, …; longer repetitions have that of the last. Empty where DRY is off."""
    multiplier, base = params.dry_multiplier, params.dry_base
    if not multiplier:
        return np.empty(0, np.float32)
    steps = _MOST if base == 1 else math.log(_LARGEST / multiplier) / math.log(base)
    made = [multiplier * base**n for n in range(int(min(steps, _MOST)) + 1)]
    return np.array(made, np.float32)


def repeated(
    text: NDArray[np.int32], breakers: NDArray[np.uint8], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What would make a repetition longer.

    Args:
        text: the tokens that are looked at.
        breakers: (V,) whether each token of the vocabulary is a breaker.
        most: longer repetitions count as so long.

    Returns:
        Tokens, and to each the length n of the longest repetition that it would follow; none is a breaker.
    """
    last = len(text) - 1
    none = np.empty(0, np.int64)
    if last < 1 or breakers[text[last]]:
        return none, none
    ends = np.flatnonzero(text[:last] == text[last])
    ends = ends[breakers[text[ends + 1]] == 0]
    alive, lengths = ends, np.ones(len(ends), np.int64)
    for n in range(1, min(most, last + 1)):
        wanted = text[last - n]
        if breakers[wanted]:
            break
        alive = alive[alive >= n]
        alive = alive[text[alive - n] == wanted]
        if not len(alive):
            break
        lengths[np.searchsorted(ends, alive)] += 1
    tokens, places = np.unique(text[ends + 1], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, places, lengths)
    return tokens.astype(np.int64), longest
