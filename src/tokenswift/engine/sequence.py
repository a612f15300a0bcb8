"""One text, from its request to its end: checked against the model, its prompt read, its steps taken one by
one, its tokens turned into text and kept in a journal. And what texts share: their beginnings.

Whoever wants it alone iterates it; the scheduler makes the same calls for several concurrently.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tokenswift.chat import Tools
from tokenswift.config import SamplingParams, settings_of
from tokenswift.engine.detokenize import LoopGuard, TextStream
from tokenswift.engine.request import Request
from tokenswift.engine.step import prefill, step
from tokenswift.kv import OBSERVED, FullCache
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.loader.weights import digest_of, versions
from tokenswift.memory import check_run, default_length, needs_of
from tokenswift.models.decoder import BaseTarget
from tokenswift.runs.folder import RunWriter, load
from tokenswift.runs.journal import End, Header, Identity, Loading, RunState, Session
from tokenswift.sampling.penalties import rules_of
from tokenswift.spec.methods import STRATEGIES, drafts_from
from tokenswift.spec.strategy import SequenceState
from tokenswift.types import (
    PREFILL,
    SOURCES,
    Generation,
    InputError,
    Logprob,
    RunError,
    Step,
    check_callback,
    check_tokens,
    counted,
)

logger = logging.getLogger("tokenswift")
PLAIN = str | int | float | tuple | None  # options that a journal can hold: no model objects
SHARE = 4  # of the free memory, the part that ended texts may take: one in so many
LEAST = 16  # tokens that are worth a copy


class Sequence(SequenceState):
    """One generation: everything is checked when it is made, nothing runs before it is iterated.

    Instead of being iterated it can be led by `open`, `read` until nothing is left, `step.step` and `take`
    in turns until there is a finish reason, `finish`, and in any case `close`.

    Args:
        llm: the ``LLM``.
        request: what is asked for.
        prefixes: texts read lately, whose beginnings need not be read again.
        spare: bytes that will be free by the time that it runs, besides those that are free now.
        owner: whose it is; of ``prefixes`` it gets its owner's alone.

    Attributes:
        new_tokens: those written, up to the end of the text.
        sources: how many of them each source drafted, by its name.
        logprobs: of each, where they are asked for.
        finish_reason: why the text ended; None until then.
        tail: text that the end released.
        detokenizer: makes text of tokens.
        guard: watches for loops.
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
        target, source, resources = llm.target, llm.source, llm.resources
        prompt: list[int] = llm.encode(request.prompt, None, request.template_options)
        if request.run_dir is not None:
            prompt = kept_prompt(request) or prompt
        new = request.max_new_tokens or default_length(target, is_chat(request.prompt), len(prompt))
        target.check_room(len(prompt) + new)
        self.llm, self.prompt, self.max_new_tokens = llm, prompt, new
        self.request = request = replace(request, max_new_tokens=new)
        eos = () if request.ignore_eos else source.end_tokens()
        self._stops = tuple(ids for ids in request.stop if not isinstance(ids, str))
        texts = tuple(text for text in request.stop if isinstance(text, str))
        self.detokenizer, self.guard = TextStream(source.codec, texts), LoopGuard()
        ends = {*eos, *(ids[0] for ids in self._stops if len(ids) == 1)}
        rules = rules_of(request.sampling, source.codec, target.vocab_size, len(prompt), ends)
        sampler = target.sampler(request.sampling, rules)
        if request.sampling.grammar is not None:
            sampler.masks = resources.grammars.masks(request.sampling.grammar, len(prompt))
        strategy = STRATEGIES[request.strategy](resources, request.options, sampler)
        no_cache: Any = None  # until `begin`
        super().__init__(list(prompt), len(prompt), no_cache, target, sampler, strategy, eos=eos, owner=owner)
        self.top_logprobs = request.logprobs
        self.heads, self.draft_source = drafts_from(resources, request.strategy, request.options)
        self.prefixes = prefixes
        self.check_memory(spare)
        self.new_tokens: list[int] = []
        self.sources: Counter[str] = Counter(dict.fromkeys(SOURCES, 0))
        self.logprobs: list[Logprob] = []
        self.finish_reason: str | None = None
        self.tail = ""
        self._written: list[str] = []
        self.journal = None if request.run_dir is None else open_journal(self)

    # ---- memory ---------------------------------------------------------------------------------

    def check_memory(self, spare: int = 0) -> None:
        """See that it fits the memory, without texts that are kept for their beginnings if need be."""
        sizes = (self.model, self.strategy, len(self.prompt), self.max_new_tokens)
        try:
            check_run(*sizes, spare)
        except InputError:
            if self.prefixes is None or not self.prefixes.clear():
                raise
            check_run(*sizes, spare)

    @property
    def nbytes(self) -> int:
        """Bytes that it will hold in any case."""
        needs = needs_of(self.model, self.strategy, len(self.prompt), self.max_new_tokens)
        return sum(need.nbytes for need in needs if need.sure)

    # ---- the loop -------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Step]:
        try:
            self.open()
            if self.finish_reason is None:  # by its journal
                self.read()
            while self.finish_reason is None:
                (made,) = step([self])
                if isinstance(made, Exception):
                    raise made
                yield self.take(made)
            self.finish()
        except GeneratorExit:  # left unfinished, at the interpreter's end too, where torch may be gone
            raise
        except torch.OutOfMemoryError as error:
            raise failure(error) from error
        finally:
            self.close()

    def open(self) -> None:
        """Begin the journal or go on with it, where there is one."""
        if self.journal is not None:
            self.journal.begin(self._end())

    def restore(self, state: RunState) -> None:
        """Go on where a run's journal ends.

        Raises:
            InputError: it is longer than the text may become, or holds ids that the model has not.
        """
        most, made = self.max_new_tokens, len(state.tokens)
        if most < made:
            had = f"the run has {counted(made, 'token')} already"
            raise InputError(f"max_new_tokens is {most}; {had}; valid: at least as many")
        check_tokens(state.tokens, self.model.vocab_size)
        self.tokens += state.tokens
        for token in state.tokens:  # what ends a text now may not have ended it then
            self.finish_reason = None
            self._written.append(self._piece(token))
        self.draft_passes = state.passes
        self.sources.update({name: state.sources.count(name[0]) for name in SOURCES})
        self.meter.restore(state.steps, state.seconds)
        self._release()

    @property
    def unread(self) -> int:
        """Tokens that are still to be read before the first step."""
        return len(self.tokens) - 1 - (0 if self.cache is None else self.cache.length)

    def begin(self) -> None:
        """Make the cache, with what is known of the beginning already, unless it is there."""
        if self.cache is not None:
            return
        capacity = len(self.prompt) + self.max_new_tokens + self.strategy.max_nodes
        with self.meter.phase(PREFILL):
            if self.features is None and self.request.strategy == "auto":
                self.features = self.llm.resources.features()
            cache = None if self.prefixes is None else self.prefixes.begin(self, capacity)
            self.cache = self.model.new_cache(capacity) if cache is None else cache
        if self.prefixes is not None:
            self.prefixes.watch(self)

    def read(self, rows: int | None = None) -> int:
        """Read on in the prompt (and in what was written before), about so many rows or all that is left;
        returns what is left then. With nothing left the first step may come."""
        self.begin()
        with self.meter.phase(PREFILL):
            left = prefill(self, self.request.on_progress, rows)
            if not left:
                self.remaining = self.max_new_tokens - len(self.new_tokens)
                self.strategy.begin(self)
        if not left:
            self.meter.lap()
        return left

    def take(self, made: Step) -> Step:
        """Take in a step; returns it up to the end of the text, with what it released."""
        pieces: list[str] = []
        for token in made.token_ids:
            pieces.append(self._piece(token))
            if self.finish_reason is not None:
                break
        count = len(pieces)
        made = replace(
            made,
            token_ids=made.token_ids[:count],
            sources=made.sources[:count],
            logprobs=made.logprobs[:count],
            text="".join(pieces),
            chars=tuple(map(len, pieces)),
        )
        self.sources.update(made.sources)
        self.logprobs += made.logprobs
        self._written.append(made.text)
        tail = self._release()
        if self.journal is not None:
            newest: dict[str, Any] = {"seconds": self.meter.seconds, "passes": self.draft_passes}
            self.journal.add(made, {**newest, "loop": self.guard.first, "end": self._end()})
        return replace(made, text=made.text + tail)

    def _piece(self, token: int) -> str:
        """The text that a new token releases; says whether the text ends with it."""
        self.new_tokens.append(token)
        enough = len(self.new_tokens) > self.request.sampling.min_tokens
        self.detokenizer.may_stop = enough
        stops = enough and any(tuple(self.new_tokens[-len(ids) :]) == ids for ids in self._stops)
        ends = token in self.eos
        piece = "" if ends or stops else self.detokenizer.push(token)  # no "</s>" in the text
        self.guard.push(token)
        if self.detokenizer.stopped or stops:
            self.finish_reason = "stop"
        elif ends:
            self.finish_reason = "eos"
        elif self.guard.loop is not None and self.request.on_loop == "stop":
            self.finish_reason = "loop"
        elif len(self.new_tokens) >= self.max_new_tokens:
            self.finish_reason = "length"
        return piece

    def _release(self) -> str:
        """The text that was held back, once the text has ended; "" before."""
        self.tail = self.detokenizer.finish() if self.finish_reason is not None else ""
        self._written.append(self.tail)
        return self.tail

    def _end(self) -> End | None:
        """How the text ended, as journals have it; None before."""
        return None if self.finish_reason is None else End(self.finish_reason, self.tail)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Write the text beside the journal, where there is one."""
        if self.journal is not None:
            self.journal.finish(self.tail)

    def close(self) -> None:
        """Let go of memory and journal, wherever it is; what was kept of it stays."""
        if self.prefixes is not None and self.cache is not None:
            try:
                self.prefixes.keep(self)
            except Exception as error:  # later texts alone gain by it
                logger.warning("the KV cache of a finished text is not kept for reuse (%s)", error)
        self.cache = self.last_pass = self.features = None  # type: ignore[assignment]
        if self.journal is not None:
            self.journal.close()

    # ---- the result -----------------------------------------------------------------------------

    def result(self) -> Generation:
        """The finished generation."""
        heads = self.heads
        return Generation(
            token_ids=self.new_tokens,
            text="".join(self._written),
            finish_reason=self.finish_reason or "length",
            metrics=self.meter.finish(self.new_tokens, self.draft_passes, loop=self.guard.first),
            prompt_tokens=len(self.prompt),
            lossless=self.strategy.acceptance == "exact",
            drafting=self.strategy.report(),
            heads=None if heads is None else {"kind": heads.kind, "file": heads.source},
            draft_source=self.draft_source,
            token_sources=dict(self.sources),
            logprobs=self.logprobs,
        )


def failure(error: BaseException) -> Exception:
    """What made a text fail, as whoever asked for it is told."""
    if isinstance(error, torch.OutOfMemoryError):
        ways = "fewer or shorter texts, or weights of fewer bits (weights=q8_0)"
        made = RunError(f"out of memory; valid: {ways}")
    elif isinstance(error, Exception):
        return error
    else:
        made = RunError(f"generation failed ({error!r})")  # a callback's sys.exit, say
    made.__cause__ = error
    return made


class Stream(Iterator[Step], AbstractContextManager["Stream"]):
    """The steps of a generation, as they happen; afterwards its result.

    ::

        stream = llm.stream("Once upon a time")
        for step in stream:
            print(step.text, end="", flush=True)
        print(stream.result.finish_reason, stream.result.metrics.tokens_per_second)

    A stream is a context manager: leaving it early lets go of the run's memory and closes its journal, as
    `close` does.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence, self._steps = sequence, iter(sequence)

    def __next__(self) -> Step:
        return next(self._steps)

    @property
    def result(self) -> Generation:
        """The finished generation: all tokens, the text, ``finish_reason``, ``metrics``.

        Raises:
            InputError: the last step has not been taken.
        """
        if self._sequence.finish_reason is None:
            raise InputError("stream.result is not available before the end; valid: after the last step")
        return self._sequence.result()

    def finish(self, on_step: Callable[[Step], None] | None = None) -> Generation:
        """Take the steps that are left, and return the result; ``on_step`` is called with each. Whatever it
        raises, the run's journal is closed."""
        with self:
            check_callback("on_step", on_step)
            for step in self:
                if on_step is not None:
                    on_step(step)
            return self.result

    def close(self) -> None:
        """End the generation here; what was kept of it is kept."""
        self._steps.close()
        self._sequence.close()  # the steps do not, where none was taken

    def __exit__(self, *exception: object) -> None:
        self.close()


# ---- beginnings -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Kept:
    """What is kept of a text that has ended; see `SequenceState`."""

    owner: str
    tokens: list[int]
    prompt_tokens: int
    cache: FullCache

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, with the kernels' scratch memory."""
        return self.cache.nbytes + self.cache.work.nbytes


class Prefixes:
    """Caches of texts under way and of some that have ended, for one model and one thread: what begins as one
    of them is not read again.

    Keys and values of a beginning are copied into the cache of the text that shares it, so neither text sees
    what the other does. But how soon a text begins tells what was read before it: texts of one owner alone
    share beginnings. A row's bits depend on its own context alone, not on the passes that read it, so a copy
    has the bits of reading; models of which this is not true are not given any. Where it is true of decoding
    alone (`BaseTarget.prefill_keeps_bits`), whole chunks that both prompts have are copied.

    Args:
        most: bytes that caches of ended texts may take.

    Attributes:
        reused: tokens that were copied instead of read.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.reused = 0
        self._running: list[SequenceState] = []
        self._kept: list[Kept] = []  # those that were used last at the end

    @classmethod
    def beside(cls, model: BaseTarget) -> Prefixes:
        """For a model: ended texts may take a quarter of what is free now on its device."""
        memory = model.backend.memory()
        return cls(0 if memory is None else memory.free // SHARE)

    @property
    def nbytes(self) -> int:
        """Bytes of caches of ended texts."""
        return sum(one.nbytes for one in self._kept)

    def begin(self, text: SequenceState, capacity: int) -> FullCache | None:
        """A cache with the longest known beginning of a text; None where none is worth it.

        The rows that a partial cache is chosen by are left to be read: drafts are those of a text alone, too.

        Args:
            text: of whose tokens the last one is not to be cached.
            capacity: tokens that the cache is to hold, scratch room included.
        """
        tokens, model, prompt = text.tokens, text.model, text.prompt_tokens
        best, longest = None, LEAST - 1
        for one in (*self._running, *self._kept):
            if one.owner != text.owner:
                continue
            shared = min(common(one.tokens, tokens), one.cache.length, len(tokens) - 1 - OBSERVED)
            if not model.prefill_keeps_bits:
                shared = min(shared, prompt - 1 - OBSERVED, one.prompt_tokens - 1 - OBSERVED)
                shared -= shared % model.prefill_chunk
            if shared > longest and one.cache.holds(shared):
                best, longest = one, shared
        if best is None or not model.equal_bits:
            return None
        self._kept = sorted(self._kept, key=lambda one: one is best)
        self.reused += longest
        return best.cache.fork(capacity, longest)

    def watch(self, sequence: SequenceState) -> None:
        """A text begins; others may begin as it does from now on."""
        self._running.append(sequence)

    def keep(self, sequence: SequenceState) -> None:
        """A text has ended: keep it while there is room, instead of those that it begins with."""
        self._running = [one for one in self._running if one is not sequence]
        tokens, cache, length = sequence.tokens, sequence.cache, sequence.cache.length
        if not LEAST <= length < len(tokens) or not sequence.model.equal_bits:
            return  # nothing to share, or interrupted within a step
        own = [(one, common(one.tokens, tokens)) for one in self._kept if one.owner == sequence.owner]
        if any(shared >= length and one.cache.holds(length) for one, shared in own):
            return
        if 2 * length <= cache.capacity:
            cache = cache.fork(length)  # it ended early: most of its room is empty
        contained = [one for one, shared in own if shared >= (end := one.cache.length) and cache.holds(end)]
        self._kept = [one for one in self._kept if one not in contained]
        self._kept.append(Kept(sequence.owner, tokens, sequence.prompt_tokens, cache))
        self.shrink(self.most)

    def shrink(self, most: int) -> None:
        """Let go of the texts that were not used for longest, until the rest take ``most`` bytes."""
        kept = list(self._kept)
        while kept and sum(one.nbytes for one in kept) > most:
            del kept[0]
        self._kept = kept

    def clear(self) -> bool:
        """Let go of all ended texts; whether there were any."""
        there, self._kept = bool(self._kept), []
        return there


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts have in common at their beginnings."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)


class Prefilled(Prefixes):
    """The state after a prompt's prefill (``LLM.prefill`` makes it). Generations fork it: they neither change
    it nor see one another, in whatever order or thread they run, and give the tokens that ``LLM.generate``
    gives for the prompt.

    Attributes:
        tokens: the prompt.
        seconds: time of its prefill.
        sequence: the prompt in its cache.
    """

    def __init__(self, llm: Any, prompt: Prompt) -> None:
        super().__init__(0)
        self._llm, self._prompt, target = llm, prompt, llm.target
        self.tokens: list[int] = llm.encode(prompt)
        count = len(self.tokens)
        target.check_room(count + 1)
        cache = target.new_cache(max(1, count - 1))
        self.sequence = SequenceState(self.tokens, count, cache, target, target.sampler(SamplingParams()))
        self.sequence.features = llm.resources.features()
        begun = perf_counter()
        prefill(self.sequence)
        self.seconds = perf_counter() - begun

    def begin(self, text: SequenceState, capacity: int) -> FullCache:
        """A fork, for a text that begins with all of the prompt."""
        base = self.sequence
        text.last_pass, text.last_row = base.last_pass, base.last_row
        if base.features is not None:
            text.features = base.features.copy()
        return base.cache.fork(capacity)

    def watch(self, sequence: SequenceState) -> None:
        """Nothing: texts share the prompt alone."""

    def keep(self, sequence: SequenceState) -> None:
        """Nothing, as well."""

    def generate(
        self, *args: Any, on_step: Callable[[Step], None] | None = None, **options: Any
    ) -> Generation:
        """``LLM.generate`` without its prompt, from a fork; ``prefill_seconds`` is the copy's time then."""
        return self.stream(*args, **options).finish(on_step)

    def stream(self, *args: Any, **options: Any) -> Stream:
        """``LLM.stream`` without its prompt, from a fork."""
        return self._llm.start(self._llm.request(self._prompt, self.tokens, *args, **options), self)


# ---- the journal ----------------------------------------------------------------------------------


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
    asked = _asked(request)
    if asked is not None and request.run_dir is not None:
        with suppress(InputError):  # no run; or taking the folder says what is wrong with it
            header = load(Path(request.run_dir).expanduser())[1].header
            return header.prompt if header.asked == asked else None
    return None


def open_journal(sequence: Any) -> RunWriter:
    """Take the folder of a text's run; the text goes on with the run that is there already.

    Raises:
        InputError: the folder cannot be written, holds another run, or one that is longer.
    """
    request, llm = sequence.request, sequence.llm
    identity = Identity(
        **llm.resources.identity(),
        sampling=settings_of(request.sampling),
        eos=sorted(sequence.eos),
        stop=[text if isinstance(text, str) else list(text) for text in request.stop],
        acceptance=sequence.strategy.acceptance,
    )
    loading = None if llm.loading is None else Loading(**llm.loading)
    header = Header(time.time(), llm.name, loading, identity, sequence.prompt, _asked(request))
    checked = ((name, getattr(request.options, name)) for name in request.strategy_options or ())
    options: dict[str, Any] = {name: value for name, value in checked if isinstance(value, PLAIN)}
    session = Session(
        time=time.time(),
        pid=os.getpid(),
        max_new_tokens=request.max_new_tokens,
        strategy=request.strategy,
        options=options,
        on_loop=request.on_loop,
        ignore_eos=request.ignore_eos,
        numerics=llm.target.numerics(),
        threads=torch.get_num_threads(),
        versions=versions(),
    )
    writer = RunWriter(Path(request.run_dir), header, session)
    if writer.state is not None:
        try:
            sequence.restore(writer.state)
        except BaseException:
            writer.close()
            raise
        if sequence.finish_reason is None:
            _warn(writer.state.session, session, identity.acceptance)
    return writer


def _warn(then: Session, now: Session, acceptance: str) -> None:
    """Say in one line why the text may differ from the uninterrupted run's."""
    old, new = ({**one.versions, **one.numerics} for one in (then, now))
    keys = ("device", "processor", "how", "compiler", "tokenswift", "torch")
    why = [f"{key} is {new.get(key)}, was {old.get(key)}" for key in keys if old.get(key) != new.get(key)]
    if acceptance != "exact":
        why = ["the published rule draws by what was drafted"]
    elif not why and not new["equal_bits"]:
        why = [f"prefill and decoding may round differently ({new['how']}, {new['device']})"]
    if why:
        logger.warning("%s: the text may differ from the uninterrupted run's", "; ".join(why))
