"""Objects within requests: our own settings, and those of a stream."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Own(BaseModel):
    """The key ``tokenswift`` of a request: what OpenAI's interface has no word for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    strategy: str = Field(default="auto", description="how to draft; never changes the text")
    strategy_options: dict[str, Any] = Field(default_factory=dict, description="options of the strategy")
    ignore_eos: bool = Field(default=False, description="go on after an end-of-text token")
    on_loop: str = Field(default="report", description="report, or stop where the text repeats itself")
    eta_cutoff: float | None = None
    penalty_window: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None
    dry_breakers: list[str] | None = None
    logprobs_mode: str = Field(
        default="processed_logprobs", description="raw_logprobs: those of new tokens are the model's own"
    )
    details: bool = Field(
        default=False, description="with each piece of text: who drafted it, and the steps' times"
    )


class StreamOptions(BaseModel):
    """Of a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding: there is none
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, the tokens so far in every chunk
