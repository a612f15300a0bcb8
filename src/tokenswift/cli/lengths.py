"""Texts of the length that was asked for: the model may not end a long continued text earlier, and
one that it did end early, or that lost its thread, says what to do. Light: no torch in here."""

from __future__ import annotations

from collections.abc import Mapping

from tokenswift.chat.prompts import Prompt, is_chat
from tokenswift.checks import counted
from tokenswift.config.sampling import LONG_TEXT
from tokenswift.engine.request import Request
from tokenswift.runs.records import RunState
from tokenswift.types import Generation

EARLY = 0.9  # a text that ends before this share of its length ended early


def default_min_tokens(
    prompt: Prompt, settings: Mapping[str, object], earlier: RunState | None
) -> int:
    """``min_tokens`` of a request where the command line names none.

    That is its length, where a text of `LONG_TEXT` tokens or more is continued that nothing but the
    model would end earlier.

    Args:
        prompt: as the model takes it.
        settings: arguments of the request.
        earlier: the run that goes on, which has its own.
    """
    length = settings.get("max_new_tokens")
    if earlier is not None:
        from tokenswift.engine.resume import min_tokens_of

        same = earlier.session.max_new_tokens
        return min_tokens_of(earlier, length if isinstance(length, int) else same)
    if is_chat(prompt) or not isinstance(length, int) or length < LONG_TEXT:
        return 0
    ends_otherwise = ("ignore_eos", "stop", "grammar")
    return 0 if any(settings.get(name) for name in ends_otherwise) else length


def advice_on_cut_form(result: Generation, request: Request) -> str:
    """A line about a text that reached its maximum length before its grammar ended it; "" where it
    did not."""
    if result.finish_reason != "length" or request.sampling.grammar is None:
        return ""
    return "the text may be incomplete: its schema or grammar had not ended it"


def advice_on_litany(result: Generation, request: Request) -> str:
    """A line about a text that became a litany without XTC; "" where it did not."""
    sampling = request.sampling
    if result.metrics.litany is None or sampling.greedy or sampling.xtc_probability:
        return ""
    return "--xtc-probability 0.5 often delays that: half the time, it drops the likeliest tokens"


def advice_on_early_end(result: Generation, request: Request, length: int | None) -> str:
    """A line about a text that the model ended far before the length that was asked for, and what
    to do; "" where it did not, or for an answer of a usual length.

    Args:
        request: that was run, with the folder of its run if it is kept.
        length: tokens that were asked for; None: nobody asked for any.
    """
    count = len(result.token_ids)
    if result.finish_reason != "eos" or length is None or count >= EARLY * length:
        return ""
    if length < LONG_TEXT and (is_chat(request.prompt) or request.new_turn):
        return ""
    line = f"the model ended the text at {count:,} of {counted(length, 'token')}"
    line += f"; --min-tokens {length} prevents that, --ignore-eos continues after its end mark"
    if request.run_dir is not None:
        line += f"; continue with: tokenswift resume {request.run_dir} --min-tokens {length}"
    return line
