"""What a run writes: tokens up to the end of the text, and their text as it becomes certain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tokenswift.engine.request import Request
from tokenswift.engine.text import TextStream
from tokenswift.runs.loop import LoopGuard
from tokenswift.runs.state import RunState
from tokenswift.spec.drafters.registry import mark_of, marks
from tokenswift.types import Logprob, Step


class Output:
    """The text of one run.

    Args:
        tokenizer: of the model, or None.
        request: says how many tokens there may be, and what else ends the text.
        eos: token ids that end it.

    Attributes:
        tokens: new tokens so far.
        sources: how many of them each source drafted, by its name.
        logprobs: of each, where they are asked for.
        stops: token ids that end it where they come one after the other.
        stream: makes text of tokens.
        guard: watches for loops.
        finish_reason: why it ended; None until then.
        tail: text that the end released.
    """

    def __init__(self, tokenizer: Any, request: Request, eos: Collection[int]) -> None:
        self._most, self._least = request.max_new_tokens or 0, request.sampling.min_tokens
        self._on_loop, self._eos = request.on_loop, eos
        self.stops = tuple(ids for ids in request.stop if not isinstance(ids, str))
        self._longest_stop = max(map(len, self.stops), default=1)
        self.stream = TextStream(tokenizer, tuple(text for text in request.stop if isinstance(text, str)))
        self.guard = LoopGuard(request.loop)
        self.tokens: list[int] = []
        self.sources: Counter[str] = Counter(dict.fromkeys(marks(), 0))
        self.logprobs: list[Logprob] = []
        self.finish_reason: str | None = None if self._most else "length"
        self.tail = ""
        self._written: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._written)

    def restore(self, state: RunState) -> None:
        """Go on where a run's journal ends."""
        self.tokens, self._written = list(state.tokens), [state.text]
        self.sources.update({mark_of(letter).name: n for letter, n in Counter(state.sources).items()})
        if state.stream is not None:
            self.stream.restore(state.stream)
            self.stream.seen = len(state.text) + len(state.stream["held"])
        self.guard.restore(self.tokens, state.loop)
        self.finish_reason = state.finished(self._most, self._on_loop)
        self.finish()

    def take(self, step: Step) -> tuple[Step, list[str]]:
        """Take a step: what of it is within the text, and the text that each of its tokens released."""
        pieces: list[str] = []
        begins: list[int] = []
        for token in step.token_ids:
            written = [*self.tokens[-self._longest_stop :], *step.token_ids[: len(pieces) + 1]]
            enough = len(self.tokens) + len(pieces) + 1 > self._least
            self.stream.may_stop = enough
            stops = enough and any(tuple(written[-len(ids) :]) == ids for ids in self.stops)
            ends = token in self._eos
            begins.append(self.stream.seen)
            pieces.append("" if ends or stops else self.stream.push((token,)))  # no "</s>" in the text
            self.guard.push(token)
            if self.stream.stopped or stops:
                self.finish_reason = "stop"
            elif ends:
                self.finish_reason = "eos"
            elif self.guard.loop is not None and self._on_loop == "stop":
                self.finish_reason = "loop"
            if self.finish_reason is not None:
                break
        ids = step.token_ids[: len(pieces)]
        self.tokens += ids
        self.guard.observe(step)
        if self.finish_reason is None and len(self.tokens) >= self._most:
            self.finish_reason = "length"
        taken = {"token_ids": ids, "sources": step.sources[: len(ids)], "logprobs": step.logprobs[: len(ids)]}
        step = replace(
            step, **taken, text="".join(pieces), chars=tuple(map(len, pieces)), begins=tuple(begins)
        )
        self.sources.update(step.sources)
        self.logprobs += step.logprobs
        self._written.append(step.text)
        return step, pieces

    def finish(self) -> str:
        """The text that was held back, once the run has ended; "" before."""
        self.tail = self.stream.finish() if self.finish_reason is not None else ""
        self._written.append(self.tail)
        return self.tail
