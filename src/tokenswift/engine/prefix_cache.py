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

    def contains(self, other: CachedPrefix) -> bool:
        """Whether all that another one of the same owner holds is in this one, too."""
        length = other.cache.length
        return (
            self.owner == other.owner
            and self.cache.is_long == other.cache.is_long
            and common_prefix(self.tokens, other.tokens) >= length
            and self.cache.holds(length)
        )


class PrefixCache:
    """KV caches of running sequences and of some that have ended, for one model and one thread: a
    shared prefix is copied from them instead of prefilled.

    The copy is part of the new sequence's own cache, so neither sees what the other does. But the
    time to the first token tells which prefixes are cached, so only sequences of one owner share
    them; and where a model has other positions for long texts, only sequences with the same. A
    copy has the bits of a prefill because a row's bits depend on its own context alone; models for
    which this does not hold share nothing. Where it holds for decoding alone (see
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
        self._ended: list[CachedPrefix] = []  # the least recently used first

    @classmethod
    def for_model(cls, model: BaseTarget) -> PrefixCache:
        """Make one in which ended sequences may take a quarter of the memory that is free now."""
        memory = model.backend.memory()
        return cls(0 if memory is None else memory.free // MEMORY_SHARE)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of ended sequences."""
        return sum(prefix.nbytes for prefix in self._ended)

    def fork_longest(self, sequence: SequenceState, capacity: int) -> FullCache | None:
        """A new cache with the longest known prefix of a sequence; None where none is long enough.

        The last `OBSERVED` tokens are left to prefill, since their queries select the partial
        cache.

        Args:
            sequence: the sequence; its last token is not cached.
            capacity: tokens that the cache must hold, scratch rows included.
        """
        best: SequenceState | CachedPrefix | None = None
        longest = MIN_PREFIX - 1
        for other in (*self._running, *self._ended):
            if other.owner != sequence.owner or other.cache.is_long != sequence.is_long:
                continue
            length = other.cache.usable(self._shared_length(sequence, other))
            if length > longest:
                best = other
                longest = length
        if best is None or not sequence.model.equal_bits:
            return None
        self._ended = sorted(self._ended, key=lambda prefix: prefix is best)
        self.reused += longest
        return best.cache.fork(capacity, longest)

    def _shared_length(self, sequence: SequenceState, other: SequenceState | CachedPrefix) -> int:
        """Tokens that a sequence may copy from another one's cache."""
        length = min(
            common_prefix(other.tokens, sequence.tokens),
            other.cache.length,
            len(sequence.tokens) - 1 - OBSERVED,
        )
        model = sequence.model
        if model.prefill_keeps_bits:
            return length
        shorter_prompt = min(sequence.prompt_tokens, other.prompt_tokens)
        length = min(length, shorter_prompt - 1 - OBSERVED)
        return length - length % model.prefill_chunk

    def add_running(self, sequence: SequenceState) -> None:
        """Let later sequences copy from this one, which is about to run."""
        self._running.append(sequence)

    def retire(self, sequence: SequenceState) -> None:
        """Keep the cache of a sequence that has ended while there is room; it replaces its own
        prefixes."""
        self._running = [other for other in self._running if other is not sequence]
        tokens = sequence.tokens
        cache = sequence.cache
        length = cache.length
        if not MIN_PREFIX <= length < len(tokens) or not sequence.model.equal_bits:
            return  # too short, or interrupted within a step
        prefix = CachedPrefix(sequence.owner, tokens, sequence.prompt_tokens, cache)
        if any(other.contains(prefix) for other in self._ended):
            return
        if 2 * length <= cache.capacity:
            prefix.cache = cache.fork(length)  # it ended early, most of its memory is unused
        self._ended = [other for other in self._ended if not prefix.contains(other)]
        self._ended.append(prefix)
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used caches until the others take at most ``max_bytes``."""
        prefixes = list(self._ended)
        while prefixes and sum(prefix.nbytes for prefix in prefixes) > max_bytes:
            del prefixes[0]
        self._ended = prefixes

    def clear(self) -> bool:
        """Drop the caches of all ended sequences; returns whether there were any."""
        had_any = bool(self._ended)
        self._ended = []
        return had_any


def common_prefix(first: list[int], second: list[int]) -> int:
    """Length of the common prefix of two lists."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next((i for i in range(length) if first[i] != second[i]), length)
