"""One generation: checks its arguments, turns the decode loop's tokens into text, keeps the journal.

A run is iterated by whoever wants it alone; the scheduler makes the same calls for several concurrently.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tokenswift.config import settings_of
from tokenswift.engine.prefixes import Prefixes
from tokenswift.engine.request import Request
from tokenswift.engine.step import PrefillChunk, RunningSequence, advance, prefill
from tokenswift.engine.text import TextStream
from tokenswift.interfaces import Calibrated, TokenSequence
from tokenswift.loader.identity import versions
from tokenswift.memory import check_run, needs_of, ran_out
from tokenswift.metrics import Meter
from tokenswift.models.low_bit import savings
from tokenswift.ranks import Ranks
from tokenswift.runs.loop import LoopGuard
from tokenswift.runs.state import RunState
from tokenswift.runs.writer import RunWriter, open_run
from tokenswift.sampling.adjust import rules_of
from tokenswift.spec.drafters.registry import mark_of, marks
from tokenswift.spec.methods.table import STRATEGIES, drafts_from
from tokenswift.types import Generation, InputError, Logprob, Metrics, RunError, Step
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")


class Run:
    """One generation: everything is checked when it is made, nothing runs before it is iterated.

    Instead of being iterated it can be led by `open`, `read` until nothing is left, a step of `text` after
    the other through `take` until there is a finish reason, `finish`, and in any case `close`.

    Args:
        llm: the ``LLM``.
        request: what is asked for.
        prefixes: texts read lately, whose beginnings need not be read again.
        spare: bytes that will be free by the time that it runs, besides those that are free now.
        owner: whose it is; of ``prefixes`` it gets its owner's alone.

    Attributes:
        wanted: whether somebody still wants the text: asked between the passes that draft for it.
        patience: seconds that a step may draft for now: asked there too.
        text: the text under way, once the prompt is read.
        finish_reason: why it ended; None until then.
        written: the text so far, in pieces.
    Raises:
        InputError: naming the argument, its value and what is valid.
    """

    def __init__(
        self,
        llm: Any,
        request: Request,
        prefixes: Prefixes | None = None,
        spare: int = 0,
        owner: str = "",
    ) -> None:
        options = request.options
        self.llm, self.request, self.owner = llm, request, owner
        self.wanted: Callable[[], bool] | None = None
        self.patience: Callable[[], float] | None = None
        self.target = llm.target
        self.sampling = request.sampling
        self.prompt: list[int] = llm.encode(request.prompt)
        self.ranks: Ranks | None = llm.ranks
        if self.ranks is not None:
            self.ranks.agree("the prompt", self.prompt)
        llm.check_room(len(self.prompt) + request.max_new_tokens)
        self.max_new_tokens = request.max_new_tokens
        self.eos: Collection[int] = () if request.ignore_eos else llm.source.end_tokens()
        stop = tuple(text for text in request.stop if isinstance(text, str))
        self.stops = tuple(ids for ids in request.stop if not isinstance(ids, str))
        self._longest_stop = max(map(len, self.stops), default=1)
        ends = {*self.eos, *(ids[0] for ids in self.stops if len(ids) == 1)}
        rules = rules_of(self.sampling, llm.source.codec, self.target.vocab_size, len(self.prompt), ends)
        self.sampler = self.target.sampler(self.sampling, rules)
        if self.sampling.grammar is not None:
            self.sampler.masks = llm.grammars.masks(self.sampling.grammar, len(self.prompt))
            self.sampler.later = None  # a mask needs the tokens before it
        self.strategy = STRATEGIES[request.strategy].build(llm, options, self.sampler)
        self.heads, self.draft_source = drafts_from(llm, request.strategy, options)
        drafts_itself = request.strategy == "auto" and llm.low_bit(options.draft_weights) is not None
        if request.strategy in ("auto", "tokenswift") and self.heads is None and not drafts_itself:
            llm.warn_without_heads()
        self.prefixes = prefixes if self.target.equal_bits else None
        self.check_memory(spare)
        self.stream = TextStream(llm.source.codec, stop)
        self.guard = LoopGuard(request.loop)
        self.meter = Meter() if self.ranks is None else Meter(self.ranks.shared)
        self.tokens: list[int] = []
        self.written: list[str] = []
        self.text: RunningSequence | None = None
        self._sequence: TokenSequence | None = None
        self._tail = ""  # what the end released
        self._was_over = False
        self.sources: Counter[str] = Counter(dict.fromkeys(marks(), 0))
        self.logprobs: list[Logprob] = []
        self.finish_reason: str | None = None
        self.draft_passes = 0
        self.before: RunState | None = None
        self.writer: RunWriter | None = None
        if request.run_dir is not None:
            identity = self._identity()
            state = self._take_folder(Path(request.run_dir), identity)
            if state is not None:
                try:
                    self._go_on(state)
                except BaseException:
                    self.close()
                    raise

    # ---- memory ---------------------------------------------------------------------------------

    def check_memory(self, spare: int = 0) -> None:
        """See that it fits the memory, without texts that are kept for their beginnings if need be."""
        sizes = (self.target, self.strategy, len(self.prompt), self.max_new_tokens)
        try:
            check_run(*sizes, spare)
        except InputError:
            if self.prefixes is None or not self.prefixes.clear():
                raise
            check_run(*sizes, spare)

    def explained(self, error: Exception) -> Exception:
        """An error as whoever asked for the text is told of it: where a card's memory ran out, what would
        fit."""
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        held = 0 if self._sequence is None else self.nbytes
        ways = [f"weights {form} (frees {nbytes:,} bytes)" for form, nbytes in savings(self.target).items()]
        made = RunError(ran_out(self.target, self.strategy, len(self.prompt), held, error, ways))
        made.__cause__ = error
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that it will hold in any case."""
        needs = needs_of(self.target, self.strategy, len(self.prompt), self.max_new_tokens)
        return sum(need.nbytes for need in needs if need.sure)

    # ---- the journal ----------------------------------------------------------------------------

    def _take_folder(self, folder: Path, identity: dict[str, Any]) -> RunState | None:
        """The run that is there already. Of several ranks the first one alone writes."""

        def opened() -> RunState | None:
            self.writer = open_run(folder, identity, self.prompt, self.request.drop_damaged)
            return self.writer.state

        return opened() if self.ranks is None else self.ranks.first(opened)

    def _identity(self) -> dict[str, Any]:
        """What decides the tokens (but for the prompt)."""
        return {
            **self.llm.identity(),
            "sampling": settings_of(self.sampling),
            "eos": sorted(self.eos),
            "stop": [text if isinstance(text, str) else list(text) for text in self.request.stop],
            "acceptance": self.strategy.acceptance,
        }

    def _header(self) -> dict[str, Any]:
        identity = self._identity()
        header = {"kind": "header", "made": time.time(), "name": self.llm.name, "model": self.llm.loading}
        return header | {"identity": identity, "prompt": self.prompt}

    def _session(self) -> dict[str, Any]:
        """What may change from one session to the next without changing the tokens."""
        request = self.request
        given = {k: v for k, v in request.given.items() if k != "explain" and _is_plain(v)}
        if request.strategy == "tokenswift":  # without its tree it is an earlier version's name of ``auto``
            given["tree"] = request.options.tree
        return {
            "kind": "session",
            "time": time.time(),
            "pid": os.getpid(),
            "max_new_tokens": self.max_new_tokens,
            "strategy": request.strategy,
            "options": given,
            "on_loop": request.on_loop,
            "loop": asdict(self.guard.options),
            "ignore_eos": request.ignore_eos,
            "numerics": self.llm.numerics(),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }

    def _go_on(self, state: RunState) -> None:
        """Take up a run where its journal ends."""
        if self.max_new_tokens < len(state.tokens):
            raise InputError(
                f"max_new_tokens is {self.max_new_tokens}; the run has "
                f"{counted(len(state.tokens), 'token')} already; valid: at least as many"
            )
        if max(state.tokens, default=0) >= self.target.vocab_size:
            raise InputError(
                f"run_dir {self.request.run_dir} holds the token id {max(state.tokens)}; valid: ids of the "
                f"model's vocabulary, 0 to {self.target.vocab_size - 1}"
            )
        self.before = state
        self.tokens, self.written = list(state.tokens), [state.text]
        self.draft_passes = state.passes
        self.sources.update({mark_of(letter).name: n for letter, n in Counter(state.sources).items()})
        if state.stream is not None:
            self.stream.restore(state.stream)
        self.guard.restore(self.tokens, state.loop)
        figures = [
            (drafted, accepted, ngram, gamma) for _, drafted, accepted, ngram, gamma, _ in state.all_steps
        ]
        self.meter.restore(figures, state.seconds)
        self.finish_reason = state.finished(self.max_new_tokens, self.request.on_loop)
        self._was_over = self.finish_reason is not None
        if self._was_over:
            self._tail = self.stream.finish()
            self.written.append(self._tail)
        else:
            then = {"numerics": state.session.numerics, "versions": state.session.versions}
            _warn(then, self._session(), self.strategy.acceptance)

    # ---- the loop -------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Step]:
        try:
            self.open()
            while self.finish_reason is None and self.read():
                pass
            while self.text is not None and self.finish_reason is None:
                made = advance([self.text])[0]
                if isinstance(made, Exception):
                    raise made
                yield self.take(made)
            self.finish()
        except GeneratorExit:  # left unfinished, at the interpreter's end too, where torch may be gone
            raise
        except torch.OutOfMemoryError as error:
            raise self.explained(error) from error
        except Exception as error:
            if self.ranks is None or (found := self.ranks.explained(error)) is error:
                raise
            raise found from error
        finally:
            self.close()

    def open(self) -> None:
        """Begin the journal or go on with it, where there is one."""
        if self.writer is not None and not self._is_kept():
            self.writer.begin(self._header(), self._session())
            if self.writer.note:
                logger.warning("%s", self.writer.note)

    def _is_kept(self) -> bool:
        """Whether the end of the run was in its journal before, and its text file has its name."""
        state, writer = self.before, self.writer
        ended = self._was_over and state is not None and state.end is not None
        return ended and writer is not None and not writer.is_unfinished()

    @property
    def left(self) -> int:
        """Tokens that are still to be read before the first step."""
        known = len(self.prompt) + len(self.tokens) - 1
        return known if self._sequence is None else known - self._sequence.cache.length

    def begin(self) -> TokenSequence:
        """Make the cache, with what is known of the beginning already, unless it is there."""
        if self._sequence is not None:
            return self._sequence
        capacity = len(self.prompt) + self.max_new_tokens + self.strategy.max_nodes
        with self.meter.phase("prefill"):
            if self.request.prefilled is not None and not self.tokens:
                self._sequence = self._named(self.request.prefilled.fork(capacity, self.sampler))
                return self._sequence
            known, cache = self.prompt + self.tokens, None
            if self.prefixes is not None:
                cache = self.prefixes.begin(known, capacity, self.owner)
            if cache is None:
                cache = self.target.new_cache(capacity)
            made = TokenSequence(known, len(self.prompt), cache, self.target, self.sampler)
            self._sequence = self._named(made)
        self._sequence.draft_passes = self.draft_passes
        if self.prefixes is not None:
            self.prefixes.watch(self._sequence)
        return self._sequence

    def _named(self, sequence: TokenSequence) -> TokenSequence:
        """The sequence, with whose it is, whether it is wanted, and how long it may draft."""
        sequence.owner = self.owner
        if self.wanted is not None:
            sequence.wanted = self.wanted
        if self.patience is not None and self.strategy.acceptance == "exact":  # others' drafts change tokens
            sequence.patience = self.patience
        return sequence

    def read(self, rows: int | None = None) -> int:
        """Read on in the prompt (and in what was written before), about so many rows or all that is left;
        returns what is left then. With nothing left `text` is there."""
        sequence = self.begin()
        with self.meter.phase("prefill"):
            left = prefill(sequence, self.request.on_progress, rows)
        if not left:
            self._make_text(sequence)
        return left

    def part(self, rows: int) -> PrefillChunk:
        """The same part, to be read in the pass of others; `took` has to follow."""
        sequence = self.begin()
        return PrefillChunk(sequence, min(rows, self.left), self.meter)

    def took(self, part: PrefillChunk) -> int:
        """A part was read; returns what is left.

        Raises:
            Exception: what kept it from being read.
        """
        if part.error is not None:
            raise part.error
        if self.request.on_progress is not None:
            known = len(part.sequence.tokens) - 1
            self.request.on_progress("prompt", known - part.left, known)
        if not part.left:
            self._make_text(part.sequence)
        return part.left

    def _make_text(self, sequence: TokenSequence) -> None:
        room = self.max_new_tokens - len(self.tokens)
        self.text = RunningSequence(sequence, self.strategy, self.sampler, room, self.eos, self.meter)
        self.text.logprobs, self.text.ranks = self.request.logprobs, self.ranks
        self.text.begin()

    def take(self, step: Step) -> Step:
        """Take in a step of `text`; returns it up to the end of the text, with what it released."""
        ids, pieces = self._take(step.token_ids)
        self.tokens += ids
        if self._sequence is not None:
            self.draft_passes = self._sequence.draft_passes
        self.guard.observe(step)
        if self.finish_reason is None and len(self.tokens) >= self.max_new_tokens:
            self.finish_reason = "length"
        taken = {"token_ids": ids, "sources": step.sources[: len(ids)], "logprobs": step.logprobs[: len(ids)]}
        step = replace(step, **taken, text="".join(pieces), chars=tuple(map(len, pieces)))
        self.sources.update(step.sources)
        self.logprobs += step.logprobs
        if self.writer is not None:
            self._keep(self.writer, step, pieces)
        self._tail = self.stream.finish() if self.finish_reason is not None else ""
        self.written += [step.text, self._tail]
        return replace(step, text=step.text + self._tail)

    def finish(self) -> None:
        """Write the end to the journal, where there is one; keep what the steps have shown of their costs."""
        if self.text is not None and isinstance(self.strategy, Calibrated):
            self.strategy.settle()
        if self.writer is not None and not self._is_kept():
            self.writer.finish(self.finish_reason or "length", self._tail, self.metrics())

    def close(self) -> None:
        """Let go of memory and journal, wherever the run is; what was kept of it stays."""
        if self.prefixes is not None and self._sequence is not None:
            self.prefixes.keep(self._sequence)
        self._sequence = self.text = None
        if self.writer is not None:
            self.writer.close()

    def _take(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], list[str]]:
        """The tokens of a step up to the end of the text, and the text that each released."""
        pieces: list[str] = []
        for token in token_ids:
            written = [*self.tokens[-self._longest_stop :], *token_ids[: len(pieces) + 1]]
            enough = len(self.tokens) + len(pieces) + 1 > self.sampling.min_tokens
            self.stream.may_stop = enough
            stops = enough and any(tuple(written[-len(ids) :]) == ids for ids in self.stops)
            ends = token in self.eos
            pieces.append("" if ends or stops else self.stream.push((token,)))  # no "</s>" in the text
            self.guard.push(token)
            if self.stream.stopped or stops:
                self.finish_reason = "stop"
            elif ends:
                self.finish_reason = "eos"
            elif self.guard.loop is not None and self.request.on_loop == "stop":
                self.finish_reason = "loop"
            if self.finish_reason is not None:
                break
        return tuple(token_ids[: len(pieces)]), pieces

    def _keep(self, writer: RunWriter, step: Step, pieces: Sequence[str]) -> None:
        """Hand a step to the journal, with times and passes of this process."""
        seconds, passes = self.meter.seconds, self.draft_passes
        if self.before is not None:
            seconds = {k: v - self.before.seconds.get(k, 0.0) for k, v in seconds.items()}
            passes -= self.before.passes
        writer.add(step, pieces, seconds, passes, self.stream.state(), self.guard.first)

    # ---- the result -----------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Figures of the run so far, earlier sessions included."""
        return self.meter.finish(self.tokens, self.draft_passes, loop=self.guard.first)

    def result(self) -> Generation:
        """The finished generation."""
        heads = self.heads
        return Generation(
            token_ids=self.tokens,
            text="".join(self.written),
            finish_reason=self.finish_reason or "length",
            metrics=self.metrics(),
            prompt_tokens=len(self.prompt),
            lossless=self.strategy.acceptance == "exact",
            drafting=self.strategy.report(),
            heads=None if heads is None else {"kind": heads.kind, "file": heads.source},
            draft_source=self.draft_source,
            token_sources=dict(self.sources),
            logprobs=self.logprobs,
        )


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
