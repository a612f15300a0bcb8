"""What a planted defect is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """One planted defect: ``old`` occurs exactly once in ``file`` and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
