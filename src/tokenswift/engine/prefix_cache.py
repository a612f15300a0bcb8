"""Texts that were read lately: what begins as one of them is not read again.

Keys and values of a beginning are copied into the cache of the text that shares it, so neither text sees
what the other does. But how soon a text begins tells what was read before it: texts of one owner alone share
beginnings. A row's bits depend on its own context alone, not on the passes that read it, so a copy
has the bits of reading; models of which this is not true are not given any. Where it is true of decoding
alone (`BaseTarget.prefill_keeps_bits`), whole chunks that both prompts have are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenswift.kv import OBSERVED, FullCache
from tokenswift.memory import Sized
from tokenswift.spec.strategy import TokenSequence

LEAST = 16  # tokens that are worth a copy
SHARE = 4  # of the free memory, the part that ended texts may take: one in so many


@dataclass(slots=True, eq=False)
class Kept:
    """What is kept of a text that has ended; see `TokenSequence`."""

    owner: str
    tokens: list[int]
    prompt_tokens: int
    cache: FullCache

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, with the kernels' scratch memory."""
        return self.cache.nbytes + self.cache.work.nbytes


class Prefixes:
    """Caches of texts under way and of some that have ended, for one model and one thread.

    Args:
        most: bytes that caches of ended texts may take.

    Attributes:
        reused: tokens that were copied instead of read.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.reused = 0
        self._running: list[TokenSequence] = []
        self._kept: list[Kept] = []  # those that were used last at the end

    @classmethod
    def beside(cls, model: Sized) -> Prefixes:
        """For a model: ended texts may take a quarter of what is free now on its device."""
        memory = model.backend.memory()
        return cls(0 if memory is None else memory.free // SHARE)

    @property
    def nbytes(self) -> int:
        """Bytes of caches of ended texts."""
        return sum(one.nbytes for one in self._kept)

    def begin(self, text: TokenSequence, capacity: int) -> FullCache | None:
        """A cache with the longest known beginning of a text; None where none is worth it.

        The rows that a partial cache is chosen by are left to be read: drafts are those of a text alone, too.

        Args:
            text: of whose tokens the last one is not to be cached.
            capacity: tokens that the cache is to hold, scratch room included.
        """
        tokens, model, prompt = text.tokens, text.model, text.prompt_tokens
        best, longest = None, LEAST - 1
        for one in (*self._running, *self._kept):
            if one.owner != text.owner:
                continue
            shared = min(common(one.tokens, tokens), one.cache.length, len(tokens) - 1 - OBSERVED)
            if not model.prefill_keeps_bits:
                shared = min(shared, prompt - 1 - OBSERVED, one.prompt_tokens - 1 - OBSERVED)
                shared -= shared % model.prefill_chunk
            if shared > longest and one.cache.holds(shared):
                best, longest = one, shared
        if best is None or not model.equal_bits:
            return None
        self._kept = sorted(self._kept, key=lambda one: one is best)
        self.reused += longest
        return best.cache.fork(capacity, longest)

    def watch(self, sequence: TokenSequence) -> None:
        """A text begins; others may begin as it does from now on."""
        self._running.append(sequence)

    def keep(self, sequence: TokenSequence) -> None:
        """A text has ended: keep it while there is room, instead of those that it begins with."""
        self._running = [one for one in self._running if one is not sequence]
        tokens, cache, length = sequence.tokens, sequence.cache, sequence.cache.length
        if not LEAST <= length < len(tokens) or not sequence.model.equal_bits:
            return  # nothing to share, or interrupted within a step
        own = [(one, common(one.tokens, tokens)) for one in self._kept if one.owner == sequence.owner]
        if any(shared >= length and one.cache.holds(length) for one, shared in own):
            return
        if 2 * length <= cache.capacity:
            cache = cache.fork(length)  # it ended early: most of its room is empty
        contained = [one for one, shared in own if shared >= (end := one.cache.length) and cache.holds(end)]
        self._kept = [one for one in self._kept if one not in contained]
        self._kept.append(Kept(sequence.owner, tokens, sequence.prompt_tokens, cache))
        self.shrink(self.most)

    def shrink(self, most: int) -> None:
        """Let go of the texts that were not used for longest, until the rest take ``most`` bytes."""
        kept = list(self._kept)
        while kept and sum(one.nbytes for one in kept) > most:
            del kept[0]
        self._kept = kept

    def clear(self) -> bool:
        """Let go of all ended texts; whether there were any."""
        there, self._kept = bool(self._kept), []
        return there


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginnings."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)
