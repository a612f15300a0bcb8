"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """The current state of a scheduler, and its totals. The server's metrics have these names.

    Attributes:
        running: sequences that decode now.
        reading: sequences whose prompts are prefilled now.
        waiting: sequences that wait for memory or their turn.
        ended: sequences that have ended by themselves.
        failed: sequences that an error ended.
        cancelled: sequences that were cancelled.
        steps: steps of all sequences.
        passes: verify passes, which several sequences share.
        tokens: new tokens.
        drafted: drafted nodes.
        accepted: drafted tokens that were accepted.
        read: prompt tokens that were prefilled.
        reused: prompt tokens that were copied from the prefix cache.
        rows: rows of the last verify pass.
    """

    running: int = 0
    reading: int = 0
    waiting: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    read: int = 0
    reused: int = 0
    rows: int = 0
