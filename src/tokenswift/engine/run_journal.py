"""The journal of a sequence's run: begun, or found and resumed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenswift.chat import Tools
from tokenswift.chat.prompts import Prompt, is_chat
from tokenswift.config.sampling import settings_of
from tokenswift.engine.request import Request
from tokenswift.loader.identity import digest_of, versions
from tokenswift.loader.rotary import Rotary
from tokenswift.runs.folder import RunWriter, load
from tokenswift.runs.records import (
    LONG_POSITIONS,
    SHORT_POSITIONS,
    Header,
    Identity,
    Loading,
    Positions,
    Session,
)
from tokenswift.types import InputError

if TYPE_CHECKING:  # it imports this module
    from tokenswift.engine.sequence import Sequence

logger = logging.getLogger("tokenswift")
JOURNAL_TYPES = str | int | float | tuple | None  # types of options that a journal can hold


def conversation_digest(
    prompt: Prompt, tools: Tools | None = None, options: Mapping[str, object] | None = None
) -> str | None:
    """The digest of a conversation, its tools and template options, for `Request`; None for a
    prompt that is no conversation."""
    if not is_chat(prompt):
        return None
    parts: list[object] = [prompt, None if tools is None else tools.forms]
    if options:
        parts.append(options)
    return digest_of(parts, default=str)


def _digest_of(request: Request) -> str | None:
    if request.conversation_digest:
        return request.conversation_digest
    return conversation_digest(request.prompt, None, request.template_options)


def journalled_prompt(request: Request) -> list[int] | None:
    """The prompt's ids from the run in its folder, if that has the same conversation; else None. (A
    template may write today's date, which would make another prompt of it.)"""
    if request.run_dir is None:
        return None
    digest = _digest_of(request)
    if digest is None:
        return None
    with suppress(InputError):  # no run there; `open_journal` reports anything worse
        header = load(Path(request.run_dir).expanduser())[1].header
        if header.asked == digest:
            return header.prompt
    return None


def is_long_run(rotary: Rotary, request: Request, tokens: int) -> bool:
    """Whether a run has the positions of long texts, where its model has such. A run that began
    with them keeps them, even if it may become shorter now.

    Args:
        tokens: of prompt and new tokens.
    """
    if rotary.is_long(tokens) or rotary.short_limit is None or request.run_dir is None:
        return rotary.is_long(tokens)
    with suppress(InputError):  # no run there; `open_journal` reports anything worse
        identity = load(Path(request.run_dir).expanduser())[1].header.identity
        return identity.positions == LONG_POSITIONS
    return False


def _positions_of(sequence: Sequence) -> Positions | None:
    """Which of its positions a model has for a run; None: it has the same for all."""
    if sequence.model.rotary.short_limit is None:
        return None
    return LONG_POSITIONS if sequence.is_long else SHORT_POSITIONS


def _check_length(sequence: Sequence, folder: Path) -> None:
    """Refuse a run that would become too long for the positions that it began with.

    Raises:
        InputError: it would; its keys are those of a shorter text.
    """
    limit = sequence.model.rotary.short_limit
    if limit is None or not sequence.is_long:
        return
    earlier: Header | None = None
    with suppress(InputError):  # no run there; `RunWriter` reports anything worse
        earlier = load(folder.expanduser())[1].header
    if earlier is None or earlier.prompt != sequence.prompt:
        return
    if earlier.identity.positions != SHORT_POSITIONS:
        return
    rest = limit - len(sequence.prompt)
    raise InputError(
        f"max_new_tokens is {sequence.max_new_tokens}, but run_dir {folder} began with the "
        f"model's positions for texts of up to {limit} tokens, prompt included, and longer ones "
        f"have others; valid: up to {rest}, or another folder for a text that is longer",
        "max_new_tokens",
    )


def open_journal(sequence: Sequence, folder: Path) -> RunWriter:
    """Lock the folder of a sequence's run; if it holds a run already, the sequence resumes it.

    Raises:
        InputError: the folder cannot be written, holds another run, or one that is longer.
    """
    _check_length(sequence, folder)
    header = _header_of(sequence)
    session = _session_of(sequence)
    writer = RunWriter(folder, header, session)
    if writer.state is not None:
        try:
            sequence.restore(writer.state)
        except BaseException:
            writer.close()
            raise
        if sequence.finish_reason is None:
            _warn(writer.state.session, session, header.identity.acceptance)
    return writer


def _header_of(sequence: Sequence) -> Header:
    """The first record of a sequence's journal."""
    request = sequence.request
    resources = sequence.resources
    identity = Identity(
        **resources.identity(),
        sampling=settings_of(request.sampling),
        eos=sorted(sequence.eos),
        stop=[stop if isinstance(stop, str) else list(stop) for stop in request.stop],
        acceptance=sequence.strategy.acceptance,
        positions=_positions_of(sequence),
    )
    return Header(
        made=time.time(),
        name=resources.name,
        model=None if resources.loading is None else Loading(**resources.loading),
        identity=identity,
        prompt=sequence.prompt,
        asked=_digest_of(request),
    )


def _session_of(sequence: Sequence) -> Session:
    """The record of this process."""
    request = sequence.request
    options: dict[str, Any] = {}  # what a journal can hold of the strategy's options
    for name in request.strategy_options or ():
        value = getattr(request.options, name)
        if isinstance(value, JOURNAL_TYPES):
            options[name] = value
    return Session(
        time=time.time(),
        pid=os.getpid(),
        max_new_tokens=sequence.max_new_tokens,
        strategy=request.strategy,
        options=options,
        on_loop=request.on_loop,
        ignore_eos=request.ignore_eos,
        numerics=sequence.resources.target.numerics(),
        threads=torch.get_num_threads(),
        versions=versions(),
        min_tokens=request.sampling.min_tokens,
    )


def _warn(then: Session, now: Session, acceptance: str) -> None:
    """Log one line if, and why, the text may differ from an uninterrupted run's."""
    old, new = ({**one.versions, **one.numerics} for one in (then, now))
    keys = ("device", "processor", "how", "compiler", "tokenswift", "torch")
    why = [
        f"{key} is {new.get(key)}, was {old.get(key)}"
        for key in keys
        if old.get(key) != new.get(key)
    ]
    if acceptance != "exact":
        why = ["the published rule draws by what was drafted"]
    elif not why and not new["equal_bits"]:
        why = [f"prefill and decoding may round differently ({new['how']}, {new['device']})"]
    if why:
        logger.warning("%s: the text may differ from the uninterrupted run's", "; ".join(why))
