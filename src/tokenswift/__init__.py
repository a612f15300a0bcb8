"""tokenswift: ultra-long text from open language models by speculative decoding, provably the same output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenswift.config import SamplingParams, TokenSwiftOptions
from tokenswift.types import Generation, InputError, Metrics, RunError, Step

if TYPE_CHECKING:
    from tokenswift.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Generation",
    "InputError",
    "Metrics",
    "RunError",
    "SamplingParams",
    "Step",
    "TokenSwiftOptions",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load ``LLM`` on first use: it imports transformers, which takes seconds."""
    if name == "LLM":
        from tokenswift.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
