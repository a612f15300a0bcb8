"""The journal of a run: what decides its tokens, how far they are, and what was kept of it before."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tokenswift.chat.tools import Tools
from tokenswift.config import settings_of
from tokenswift.engine.output import Output
from tokenswift.engine.request import Request
from tokenswift.loader.identity import digest_of, versions
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.metrics import Meter
from tokenswift.runs.folder import has_run, load
from tokenswift.runs.state import RunState
from tokenswift.runs.writer import RunWriter, open_run
from tokenswift.types import InputError, Metrics, Step
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")


def asked_of(
    prompt: Prompt, tools: Tools | None = None, options: Mapping[str, Any] | None = None
) -> str | None:
    """What stands for a conversation, its tools and its template's options in `Request.asked`; None: the
    prompt is none."""
    asked = [prompt, tools and tools.forms, *([options] if options else [])]
    return digest_of(asked, default=str) if is_chat(prompt) else None


def _asked(request: Request) -> str | None:
    return request.asked or asked_of(request.prompt, None, request.template_options)


def kept_prompt(request: Request) -> list[int] | None:
    """The prompt's ids in a run's folder whose run was asked for by the very messages: templates may write
    today's date. None: there is no such run."""
    with suppress(InputError):  # taking the folder says what is wrong with it
        asked, folder = _asked(request), Path(request.run_dir or "")
        if asked is not None and has_run(folder):
            header = load(folder)[1].header
            return header.prompt if header.asked == asked else None
    return None


class Journal:
    """The journal of one run, which takes up the run that its folder holds already. Of several ranks the
    first one alone writes.

    Args:
        llm: the ``LLM``.
        request: of the run, with its folder.
        prompt: token ids.
        eos: token ids that end the text.
        acceptance: the strategy's rule.
        output: of the run; goes on with what is there.
        meter: counts what was done before.

    Attributes:
        passes: draft passes of earlier sessions.
    Raises:
        InputError: the folder cannot be written, holds another run, or one that is longer.
    """

    def __init__(
        self,
        llm: Any,
        request: Request,
        prompt: list[int],
        eos: Collection[int],
        acceptance: str,
        output: Output,
        meter: Meter,
    ) -> None:
        self._llm, self._request, self._prompt = llm, request, prompt
        self._output, self._meter = output, meter
        self._identity: dict[str, Any] = {
            **llm.resources.identity(),
            "sampling": settings_of(request.sampling),
            "eos": sorted(eos),
            "stop": [text if isinstance(text, str) else list(text) for text in request.stop],
            "acceptance": acceptance,
        }
        self._writer: RunWriter | None = None
        self._before = self._opened()
        self._was_over = False
        self.passes = 0
        if self._before is not None:
            try:
                self._go_on(self._before)
            except BaseException:
                self.close()
                raise

    def _opened(self) -> RunState | None:
        """Take the folder; the run that is there."""
        folder, drop = Path(self._request.run_dir or ""), self._request.drop_damaged
        self._writer = open_run(folder, self._identity, self._prompt, drop)
        return self._writer.state

    def _go_on(self, state: RunState) -> None:
        """Take up the run where its journal ends."""
        request, vocabulary = self._request, self._llm.target.vocab_size
        if (request.max_new_tokens or 0) < len(state.tokens):
            raise InputError(
                f"max_new_tokens is {request.max_new_tokens}; the run has "
                f"{counted(len(state.tokens), 'token')} already; valid: at least as many"
            )
        if max(state.tokens, default=0) >= vocabulary:
            raise InputError(
                f"run_dir {request.run_dir} holds the token id {max(state.tokens)}; valid: ids of the "
                f"model's vocabulary, 0 to {vocabulary - 1}"
            )
        self.passes = state.passes
        self._output.restore(state)
        figures = [
            (drafted, accepted, ngram, gamma) for _, drafted, accepted, ngram, gamma, _ in state.all_steps
        ]
        self._meter.restore(figures, state.seconds)
        self._was_over = self._output.finish_reason is not None
        if not self._was_over:
            then = {"numerics": state.session.numerics, "versions": state.session.versions}
            _warn(then, self._session(), self._identity["acceptance"])

    def _header(self) -> dict[str, Any]:
        header = {"kind": "header", "made": time.time(), "name": self._llm.name, "model": self._llm.loading}
        return header | {
            "identity": self._identity,
            "prompt": self._prompt,
            "asked": _asked(self._request),
        }

    def _session(self) -> dict[str, Any]:
        """What may change from one session to the next without changing the tokens."""
        request = self._request
        given = {k: v for k, v in request.given.items() if k != "explain" and _is_plain(v)}
        return {
            "kind": "session",
            "time": time.time(),
            "pid": os.getpid(),
            "max_new_tokens": request.max_new_tokens,
            "strategy": request.strategy,
            "options": given,
            "on_loop": request.on_loop,
            "loop": asdict(self._output.guard.options),
            "ignore_eos": request.ignore_eos,
            "numerics": self._llm.numerics(),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }

    def _is_kept(self) -> bool:
        """Whether the end of the run was in its journal before, and its text file has its name."""
        state, writer = self._before, self._writer
        ended = self._was_over and state is not None and state.end is not None
        return ended and writer is not None and not writer.is_unfinished()

    def begin(self) -> None:
        """Begin the journal, or go on with it."""
        if self._writer is not None and not self._is_kept():
            self._writer.begin(self._header(), self._session())
            if self._writer.note:
                logger.warning("%s", self._writer.note)

    def add(self, step: Step, pieces: Sequence[str], passes: int) -> None:
        """Take a step, with times and passes of this process.

        Args:
            pieces: the text that each of its tokens released.
            passes: draft passes of the run.
        """
        if self._writer is None:
            return
        before = {} if self._before is None else self._before.seconds
        seconds = {name: spent - before.get(name, 0.0) for name, spent in self._meter.seconds.items()}
        stream, loop = self._output.stream.state(), self._output.guard.first
        self._writer.add(step, pieces, seconds, passes - self.passes, stream, loop)

    def finish(self, metrics: Metrics) -> None:
        """Write the end."""
        if self._writer is not None and not self._is_kept():
            self._writer.finish(self._output.finish_reason or "length", self._output.tail, metrics)

    def close(self) -> None:
        """Let go of the folder; what was kept stays."""
        if self._writer is not None:
            self._writer.close()


def _is_plain(value: object) -> bool:
    """Whether a value can be written to a journal."""
    return isinstance(value, str | int | float | None) or (
        isinstance(value, tuple | list) and all(map(_is_plain, value))
    )


def _warn(then: Mapping[str, Any], now: Mapping[str, Any], acceptance: str) -> None:
    """Say in one line why the text may differ from the uninterrupted run's."""
    old, new = then["numerics"], now["numerics"]
    changed = [what for what in ("device", "processor", "how", "compiler") if old.get(what) != new.get(what)]
    if "how" in changed:
        changed[changed.index("how")] = f"how passes are computed ({old['how']}; now {new['how']})"
    changed += [k for k in ("tokenswift", "torch") if then["versions"].get(k) != now["versions"][k]]
    if acceptance != "exact":
        reason = "the published rule draws by what was drafted"
    elif changed:
        reason = f"{' and '.join(changed)} changed since"
    elif not new["equal_bits"]:
        reason = f"prefill and decoding may round differently ({new['how']}, {new['device']})"
    else:
        return
    logger.warning("%s: the text may differ from the uninterrupted run's", reason)
