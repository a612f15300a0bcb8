"""The prefix cache: a prompt's beginning is copied from the cache of another sequence."""

from __future__ import annotations

from dataclasses import dataclass

from tokenswift.kv.cache import FullCache
from tokenswift.kv.sparse import OBSERVED
from tokenswift.models.base import BaseTarget
from tokenswift.speculation.sequence_state import SequenceState

MEMORY_SHARE = 4  # ended sequences may take 1 / this of the free memory
MIN_PREFIX = 16  # tokens that a prefix needs to be worth a copy


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """The cache of a sequence that has ended; for the fields see `SequenceState`."""

    owner: str
    tokens: list[int]
    prompt_tokens: int
    cache: FullCache

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, with the kernels' scratch memory."""
        return self.cache.nbytes + self.cache.work.nbytes


class PrefixCache:
    """KV caches of running sequences and of some that have ended, for one model and one thread: a
    shared prefix is copied from them instead of prefilled.

    The copy is part of the new sequence's own cache, so neither sees what the other does. But the
    time to the first token tells which prefixes are cached, so only sequences of one owner share
    them. A copy has the bits of a prefill because a row's bits depend on its own context alone;
    models for which this does not hold share nothing. Where it holds for decoding alone (see
    `BaseTarget.prefill_keeps_bits`), only whole prefill chunks that both prompts have are copied.

    Args:
        max_bytes: bytes that caches of ended sequences may take.

    Attributes:
        reused: number of tokens copied instead of prefilled.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.reused = 0
        self._running: list[SequenceState] = []
        self._kept: list[CachedPrefix] = []  # the least recently used first

    @classmethod
    def for_model(cls, model: BaseTarget) -> PrefixCache:
        """Make one in which ended sequences may take a quarter of the memory that is free now."""
        memory = model.backend.memory()
        return cls(0 if memory is None else memory.free // MEMORY_SHARE)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of ended sequences."""
        return sum(one.nbytes for one in self._kept)

    def fork_longest(self, sequence: SequenceState, capacity: int) -> FullCache | None:
        """A new cache with the longest known prefix of a sequence; None where none is long enough.

        The last `OBSERVED` tokens are left to prefill, since their queries select the partial
        cache.

        Args:
            sequence: the sequence; its last token is not cached.
            capacity: tokens that the cache must hold, scratch rows included.
        """
        tokens, model, prompt = sequence.tokens, sequence.model, sequence.prompt_tokens
        best, longest = None, MIN_PREFIX - 1
        for one in (*self._running, *self._kept):
            if one.owner != sequence.owner:
                continue
            shared = min(
                common_prefix(one.tokens, tokens), one.cache.length, len(tokens) - 1 - OBSERVED
            )
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

    def add_running(self, sequence: SequenceState) -> None:
        """Let later sequences copy from this one, which is about to run."""
        self._running.append(sequence)

    def retire(self, sequence: SequenceState) -> None:
        """Keep the cache of a sequence that has ended while there is room; it replaces its own
        prefixes."""
        self._running = [one for one in self._running if one is not sequence]
        tokens, cache, length = sequence.tokens, sequence.cache, sequence.cache.length
        if not MIN_PREFIX <= length < len(tokens) or not sequence.model.equal_bits:
            return  # too short, or interrupted within a step
        own = [
            (one, common_prefix(one.tokens, tokens))
            for one in self._kept
            if one.owner == sequence.owner
        ]
        if any(shared >= length and one.cache.holds(length) for one, shared in own):
            return
        if 2 * length <= cache.capacity:
            cache = cache.fork(length)  # it ended early, and most of its memory is unused
        contained = [
            one for one, shared in own if shared >= (end := one.cache.length) and cache.holds(end)
        ]
        self._kept = [one for one in self._kept if one not in contained]
        self._kept.append(CachedPrefix(sequence.owner, tokens, sequence.prompt_tokens, cache))
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used caches until the others take at most ``max_bytes``."""
        kept = list(self._kept)
        while kept and sum(one.nbytes for one in kept) > max_bytes:
            del kept[0]
        self._kept = kept

    def clear(self) -> bool:
        """Drop the caches of all ended sequences; returns whether there were any."""
        there, self._kept = bool(self._kept), []
        return there


def common_prefix(one: list[int], other: list[int]) -> int:
    """Length of the common prefix of two lists."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)
