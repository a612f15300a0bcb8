"""After some long texts of a model that has no drafter: what training one would bring and cost."""

from __future__ import annotations

import json
import logging
import shlex
from typing import TYPE_CHECKING

from tokenswift.checks import counted
from tokenswift.config.sampling import LONG_TEXT
from tokenswift.config.strategies import AutoOptions
from tokenswift.engine.request import Request
from tokenswift.files import replacing
from tokenswift.loader.default_model import cache_dir
from tokenswift.types import Generation

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM

logger = logging.getLogger("tokenswift")
COUNTS = "long_texts.json"  # file of the cache folder: long texts by the model's name
SAID_AT = 3  # long texts of a model
MOST_MODELS = 1000
LEAST_LAYERS = 6  # that a drafter reads states of
#: how many times as fast texts became by a trained drafter (docs/benchmarks.md)
GAIN = "1.1 to 1.2 times as fast (as measured with Qwen2.5-Coder 1.5B)"


def advice_on_drafter(llm: LLM, model: str, request: Request, result: Generation) -> str:
    """A line after the third long text of a model for which nothing was trained; "" otherwise.

    Args:
        model: as the user names it.
        request: that was run.
        result: its text, which says how fast this machine writes.
    """
    resources = llm.resources
    is_plain = resources.eagle is None and resources.heads is None
    is_auto = isinstance(request.options, AutoOptions)
    is_long = len(result.token_ids) >= LONG_TEXT
    if not (is_plain and is_auto and is_long and llm.target.layers >= LEAST_LAYERS):
        return ""
    if _counted(llm.name) != SAID_AT:
        return ""
    from tokenswift.train.options import DataOptions

    speed = result.metrics.tokens_per_second
    tokens = DataOptions("self").tokens
    hours = tokens / max(speed, 1e-3) / 3600
    took = counted(round(60 * hours), "minute") if hours < 1.5 else f"{hours:.1f} hours"
    return (
        f"nothing was trained to draft for this model; tokenswift train -m {shlex.quote(model)} "
        f"makes texts {GAIN}; it takes {took} at most, for {tokens:,} tokens that the model writes "
        f"several texts at a time (this one: {speed:.0f} tokens a second)"
    )


def _counted(name: str) -> int:
    """How many long texts of a model there were, with this one; 0 where that cannot be kept."""
    path = cache_dir() / COUNTS
    try:
        stored = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError):
        stored = {}
    known = stored if isinstance(stored, dict) else {}
    before = known.get(name)
    count = before + 1 if isinstance(before, int) else 1
    newest = [*((key, value) for key, value in known.items() if key != name), (name, count)]
    try:
        with replacing(path) as part:
            part.write_text(json.dumps(dict(newest[-MOST_MODELS:])), encoding="utf-8")
    except OSError:
        return 0
    return count
