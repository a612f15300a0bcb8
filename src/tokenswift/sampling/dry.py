"""DRY ("don't repeat yourself"): a penalty for the token that would lengthen a repetition, as
llama.cpp has it.

Let n be the length of the longest end of the text that also occurs earlier, followed by token v. If
n is at least the allowed length A, the logit of v loses multiplier · base^(n - A). A *breaker* is a
token that contains one of some texts: no repetition extends across it, and it is never penalised
itself.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tokenswift.config.sampling import SamplingParams

_MOST = 512  # repeated tokens beyond the allowed length that still add to the penalty
_LARGEST = 3e38  # largest penalty: float32 can hold it


def dry_penalties(params: SamplingParams) -> NDArray[np.float32]:
    """Penalties for n = A, A + 1, …; the last one is for all longer repetitions. Empty without
    DRY."""
    multiplier = params.dry_multiplier
    base = params.dry_base
    if not multiplier:
        return np.empty(0, np.float32)
    steps = _MOST if base == 1 else math.log(_LARGEST / multiplier) / math.log(base)
    penalties = [multiplier * base**n for n in range(int(min(steps, _MOST)) + 1)]
    return np.array(penalties, np.float32)


def repeated(
    text: NDArray[np.int32], breakers: NDArray[np.uint8], least: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens that would lengthen a repetition at the end of a text.

    Args:
        text: the tokens.
        breakers: (V,) whether each token of the vocabulary is a breaker.
        least, most: repetitions shorter than ``least`` do not count, longer than ``most`` count as
            ``most``.

    Returns:
        Distinct tokens, and for each the length n of the longest repetition that it would lengthen.
    """
    last = len(text) - 1
    none = np.empty(0, np.int64)
    if last < 1 or breakers[text[last]]:
        return none, none
    ends = np.flatnonzero(text[:last] == text[last])  # of repetitions, and their lengths
    lengths = np.ones(len(ends), np.int64)
    growing = ends
    for n in range(1, min(most, last + 1)):
        wanted = text[last - n]
        if breakers[wanted]:
            break
        # those before the text's start wrap around, and the next line cuts them off
        growing = growing[text[growing - n] == wanted]
        growing = growing[np.searchsorted(growing, n) :]
        if not len(growing):
            break
        if n < least:  # those that ended before are too short
            ends = growing
            lengths = np.full(len(growing), n + 1)
        else:
            lengths[np.searchsorted(ends, growing)] += 1
    if not len(ends) or lengths[0] < least:
        return none, none
    following = text[ends + 1]
    penalised = breakers[following] == 0
    tokens, places = np.unique(following[penalised], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, places, lengths[penalised])
    return tokens.astype(np.int64), longest
