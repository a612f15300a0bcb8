"""tokenswift: ultra-long text from open language models by speculative decoding, provably the same output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenswift.config import (
    LoopOptions,
    MagicDecOptions,
    MedusaOptions,
    SamplingParams,
    TokenSwiftOptions,
    TriForceOptions,
)
from tokenswift.streaming import Stream
from tokenswift.types import Generation, InputError, Loop, Metrics, RunError, Step
from tokenswift.version import __version__

if TYPE_CHECKING:
    from tokenswift.llm import LLM
    from tokenswift.resumption import resume

__all__ = [
    "LLM",
    "Generation",
    "InputError",
    "Loop",
    "LoopOptions",
    "MagicDecOptions",
    "MedusaOptions",
    "Metrics",
    "RunError",
    "SamplingParams",
    "Step",
    "Stream",
    "TokenSwiftOptions",
    "TriForceOptions",
    "__version__",
    "resume",
]


def __getattr__(name: str) -> Any:
    """Load ``LLM`` and ``resume`` on first use: they import transformers, which takes seconds."""
    if name == "LLM":
        from tokenswift.llm import LLM

        return LLM
    if name == "resume":
        from tokenswift.resumption import resume

        return resume
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
