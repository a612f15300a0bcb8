"""One generation, from its request to its result: checks, prefill, steps, text and journal. And the
prefix cache.

A caller that wants one generation iterates it; the scheduler makes the same calls for several at
once.
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
from tokenswift.config.sampling import SamplingParams, settings_of
from tokenswift.engine.detokenize import LoopGuard, TextStream, begins_turn, context_of
from tokenswift.engine.request import Request
from tokenswift.engine.step import prefill, step
from tokenswift.kv.cache import FullCache
from tokenswift.kv.sparse import OBSERVED
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.loader.weights import digest_of, versions
from tokenswift.memory import check_run, default_length, needs_of
from tokenswift.models.decoder import BaseTarget
from tokenswift.runs.folder import RunWriter, load
from tokenswift.runs.journal import End, Header, Identity, Loading, RunState, Session
from tokenswift.sampling.penalties import rules_of
from tokenswift.speculation.methods import STRATEGIES, drafts_from
from tokenswift.speculation.sequence_state import SequenceState
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
    shown,
)

logger = logging.getLogger("tokenswift")
JOURNAL_TYPES = str | int | float | tuple | None  # types of options that a journal can hold
MEMORY_SHARE = 4  # ended sequences may take 1 / this of the free memory
MIN_PREFIX = 16  # tokens that a prefix needs to be worth a copy


class Sequence(SequenceState):
    """One generation. Making it checks everything; nothing runs before it is iterated.

    ``__iter__`` shows its life. The scheduler makes the same calls: `open`; `prefill` until nothing
    is left; `step.step` and `add_step` in turns until there is a finish reason; `finish`; and in
    any case `close`.

    Args:
        llm: the ``LLM``.
        request: the checked arguments of the call.
        prefixes: KV caches of other sequences, to copy a shared prefix from; None: none.
        spare: bytes that will be free when it runs, besides those that are free now.
        owner: its client; prefixes are shared among sequences of one owner.

    Attributes:
        new_tokens: generated token ids up to the end of the text.
        sources: number of them by the source that drafted them.
        logprobs: log-probabilities of each, if requested.
        finish_reason: why the text ended; None until then.
        tail: text that was held back until the end.
        new_turn: whether the text is a turn of its own, and does not go on from the prompt's.
        detokenizer: turns tokens into text.
        guard: detects loops.
    Raises:
        InputError: naming the argument, its value and what is valid.
    """

    def __init__(
        self,
        llm: Any,
        request: Request,
        prefixes: PrefixCache | None = None,
        spare: int = 0,
        owner: str = "",
    ) -> None:
        target, source, resources = llm.target, llm.source, llm.resources
        prompt: list[int] = llm.encode(request.prompt, None, request.template_options)
        prompt = kept_prompt(request) or prompt
        new = request.max_new_tokens or default_length(target, is_chat(request.prompt), len(prompt))
        target.check_room(len(prompt) + new)
        self.llm, self.prompt, self.max_new_tokens = llm, prompt, new
        self.request = request = replace(request, max_new_tokens=new)
        eos = () if request.ignore_eos else source.end_tokens()
        self._stops = tuple(ids for ids in request.stop if not isinstance(ids, str))
        texts = tuple(text for text in request.stop if isinstance(text, str))
        self.new_turn = request.new_turn or begins_turn(request.prompt, request.template_options)
        self.detokenizer = TextStream(source.codec, texts, self._context())
        self.guard = LoopGuard()
        ends = {*eos, *(ids[0] for ids in self._stops if len(ids) == 1)}
        rules = rules_of(request.sampling, source.codec, target.vocab_size, len(prompt), ends)
        sampler = target.sampler(request.sampling, rules)
        if request.sampling.grammar is not None:
            sampler.masks = resources.grammars.masks(request.sampling.grammar, len(prompt))
        strategy = STRATEGIES[request.strategy](resources, request.options, sampler)
        no_cache: Any = None  # until `make_cache`
        super().__init__(
            list(prompt), len(prompt), no_cache, target, sampler, strategy, eos=eos, owner=owner
        )
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

    # ---- its life --------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Step]:
        try:
            self.open()
            if self.finish_reason is None:  # a resumed run may have ended
                self.prefill()
            while self.finish_reason is None:
                (made,) = step([self])
                if isinstance(made, Exception):
                    raise made
                yield self.add_step(made)
            self.finish()
        except GeneratorExit:  # before `torch` below, which may be gone when the interpreter exits
            raise
        except torch.OutOfMemoryError as error:
            raise failure(error) from error
        finally:
            self.close()

    def open(self) -> None:
        """Begin or resume the journal, if there is one."""
        if self.journal is not None:
            self.journal.begin(self._end())

    def prefill(self, rows: int | None = None) -> int:
        """Prefill about ``rows`` tokens of the prompt (and of a resumed text), or all; returns how
        many are left. At 0 the strategy begins, and steps may follow."""
        self.make_cache()
        with self.meter.phase(PREFILL):
            left = prefill(self, self.request.on_progress, rows)
            if not left:
                self.remaining = self.max_new_tokens - len(self.new_tokens)
                self.strategy.begin(self)
        if not left:
            self.meter.lap()
        return left

    @property
    def prefill_left(self) -> int:
        """Tokens still to prefill before the first step."""
        return len(self.tokens) - 1 - (0 if self.cache is None else self.cache.length)

    def make_cache(self) -> None:
        """Make the KV cache, with the longest known prefix copied into it, unless it exists."""
        if self.cache is not None:
            return
        capacity = len(self.prompt) + self.max_new_tokens + self.strategy.max_nodes
        with self.meter.phase(PREFILL):
            if self.features is None and self.request.strategy == "auto":
                self.features = self.llm.resources.features()
            cache = None if self.prefixes is None else self.prefixes.fork_longest(self, capacity)
            self.cache = self.model.new_cache(capacity) if cache is None else cache
        if self.prefixes is not None:
            self.prefixes.add_running(self)

    def add_step(self, made: Step) -> Step:
        """Add a step's tokens to the result and the journal; returns the step, cut at the end of
        the text, with its text."""
        pieces: list[str] = []
        for token in made.token_ids:
            pieces.append(self._push(token))
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
        tail = self._flush()
        if self.journal is not None:
            newest: dict[str, Any] = {"seconds": self.meter.seconds, "passes": self.draft_passes}
            self.journal.add(made, {**newest, "loop": self.guard.first, "end": self._end()})
        return replace(made, text=made.text + tail)

    def _context(self) -> list[int]:
        """The tokens of the prompt that the text is decoded behind."""
        return [] if self.new_turn else context_of(self.llm.source.codec, self.prompt)

    def _push(self, token: int) -> str:
        """Add a token; returns the text that it completes, and sets the finish reason if it ends
        the text."""
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

    def _flush(self) -> str:
        """The text still held back, once the text has ended; "" before."""
        self.tail = self.detokenizer.finish() if self.finish_reason is not None else ""
        self._written.append(self.tail)
        return self.tail

    def _end(self) -> End | None:
        """The journal's record of the end; None before it."""
        return None if self.finish_reason is None else End(self.finish_reason, self.tail)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Write the text beside the journal, where there is one."""
        if self.journal is not None:
            self.journal.finish(self.tail)

    def close(self) -> None:
        """Free the memory and close the journal, at any point; the journal's content stays."""
        if self.prefixes is not None and self.cache is not None:
            try:
                self.prefixes.retire(self)
            except Exception as error:  # it would only have made later prefills faster
                logger.warning("the KV cache of a finished text is not kept for reuse (%s)", error)
        self.cache = self.last_pass = self.features = None  # type: ignore[assignment]
        if self.journal is not None:
            self.journal.close()

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

    # ---- a resumed run ---------------------------------------------------------------------------

    def restore(self, state: RunState) -> None:
        """Resume at the end of a run's journal.

        Raises:
            InputError: it has more tokens than ``max_new_tokens``, or ids that the model does not
                have.
        """
        most, made = self.max_new_tokens, len(state.tokens)
        if most < made:
            had = f"the run has {counted(made, 'token')} already"
            raise InputError(f"max_new_tokens is {most}; {had}; valid: at least as many")
        check_tokens(state.tokens, self.model.vocab_size)
        self.tokens += state.tokens
        self._read(state.tokens)
        written = "".join(self._written)
        if written != state.text and written.lstrip(" ") == state.text.lstrip(" "):
            # a journal does not say whether its text is a turn of its own
            self.new_turn = not self.new_turn
            self._read(state.tokens)
        self.draft_passes = state.passes
        self.sources.update({name: state.sources.count(name[0]) for name in SOURCES})
        self.meter.restore(state.steps, state.seconds)
        self._flush()

    def _read(self, tokens: list[int]) -> None:
        """Take all new tokens of a journal, as if they came now."""
        self.new_tokens = []
        self._written = []
        self.detokenizer = TextStream(self.llm.source.codec, self.detokenizer.stop, self._context())
        self.guard = LoopGuard()
        for token in tokens:  # what ends it now may not have ended it then
            self.finish_reason = None
            self._written.append(self._push(token))

    # ---- memory ----------------------------------------------------------------------------------

    def check_memory(self, spare: int = 0) -> None:
        """Raise unless it fits the memory; cached prefixes are dropped if that is what it takes."""
        sizes = (self.model, self.strategy, len(self.prompt), self.max_new_tokens)
        try:
            check_run(*sizes, spare)
        except InputError:
            if self.prefixes is None or not self.prefixes.clear():
                raise
            check_run(*sizes, spare)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it will allocate in any case."""
        needs = needs_of(self.model, self.strategy, len(self.prompt), self.max_new_tokens)
        return sum(need.nbytes for need in needs if need.sure)


def failure(error: BaseException) -> Exception:
    """The exception that callers see for an error of a generation."""
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

    A stream is a context manager: leaving it early frees the run's memory and closes its journal,
        as `close`
    does.
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
            raise InputError(
                "stream.result is not available before the end; valid: after the last step"
            )
        return self._sequence.result()

    def finish(self, on_step: Callable[[Step], None] | None = None) -> Generation:
        """Run to the end and return the result; ``on_step`` is called with each step. The run's
        journal is closed even if that raises."""
        with self:
            check_callback("on_step", on_step)
            for step in self:
                if on_step is not None:
                    on_step(step)
            return self.result

    def close(self) -> None:
        """End the generation here; its journal stays and can be resumed."""
        self._steps.close()
        self._sequence.close()  # the steps do not, where none was taken

    def __exit__(self, *exception: object) -> None:
        self.close()


# ---- the prefix cache ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """The cache of a sequence that has ended; for the fields see `SequenceState`."""

    owner: str
    tokens: list[int]
    prompt_tokens: int
    cache: FullCache

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, with the kernels' scratch memory."""
        return self.cache.nbytes + self.cache.work.nbytes


class PrefixCache:
    """KV caches of running sequences and of some that have ended, for one model and one thread: a
    shared prefix is copied from them instead of prefilled.

    The copy is part of the new sequence's own cache, so neither sees what the other does. But the
    time to the first token tells which prefixes are cached, so only sequences of one owner share
    them. A copy has the bits of a prefill because a row's bits depend on its own context alone;
    models for which this does not hold share nothing. Where it holds for decoding alone (see
    `BaseTarget.prefill_keeps_bits`), only whole prefill chunks that both prompts have are copied.

    Args:
        max_bytes: bytes that caches of ended sequences may take.

    Attributes:
        reused: number of tokens copied instead of prefilled.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.reused = 0
        self._running: list[SequenceState] = []
        self._kept: list[CachedPrefix] = []  # the least recently used first

    @classmethod
    def for_model(cls, model: BaseTarget) -> PrefixCache:
        """Make one in which ended sequences may take a quarter of the memory that is free now."""
        memory = model.backend.memory()
        return cls(0 if memory is None else memory.free // MEMORY_SHARE)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of ended sequences."""
        return sum(one.nbytes for one in self._kept)

    def fork_longest(self, sequence: SequenceState, capacity: int) -> FullCache | None:
        """A new cache with the longest known prefix of a sequence; None where none is long enough.

        The last `kv.OBSERVED` tokens are left to prefill, since their queries select the partial
        cache.

        Args:
            sequence: the sequence; its last token is not cached.
            capacity: tokens that the cache must hold, scratch rows included.
        """
        tokens, model, prompt = sequence.tokens, sequence.model, sequence.prompt_tokens
        best, longest = None, MIN_PREFIX - 1
        for one in (*self._running, *self._kept):
            if one.owner != sequence.owner:
                continue
            shared = min(
                common_prefix(one.tokens, tokens), one.cache.length, len(tokens) - 1 - OBSERVED
            )
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

    def add_running(self, sequence: SequenceState) -> None:
        """Let later sequences copy from this one, which is about to run."""
        self._running.append(sequence)

    def retire(self, sequence: SequenceState) -> None:
        """Keep the cache of a sequence that has ended while there is room; it replaces its own
        prefixes."""
        self._running = [one for one in self._running if one is not sequence]
        tokens, cache, length = sequence.tokens, sequence.cache, sequence.cache.length
        if not MIN_PREFIX <= length < len(tokens) or not sequence.model.equal_bits:
            return  # too short, or interrupted within a step
        own = [
            (one, common_prefix(one.tokens, tokens))
            for one in self._kept
            if one.owner == sequence.owner
        ]
        if any(shared >= length and one.cache.holds(length) for one, shared in own):
            return
        if 2 * length <= cache.capacity:
            cache = cache.fork(length)  # it ended early, and most of its memory is unused
        contained = [
            one for one, shared in own if shared >= (end := one.cache.length) and cache.holds(end)
        ]
        self._kept = [one for one in self._kept if one not in contained]
        self._kept.append(CachedPrefix(sequence.owner, tokens, sequence.prompt_tokens, cache))
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used caches until the others take at most ``max_bytes``."""
        kept = list(self._kept)
        while kept and sum(one.nbytes for one in kept) > max_bytes:
            del kept[0]
        self._kept = kept

    def clear(self) -> bool:
        """Drop the caches of all ended sequences; returns whether there were any."""
        there, self._kept = bool(self._kept), []
        return there


def common_prefix(one: list[int], other: list[int]) -> int:
    """Length of the common prefix of two lists."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)


class Prefilled(PrefixCache):
    """A prefilled prompt, made by ``LLM.prefill``. Generations start from a copy: they neither
    change it nor see one another, in whatever order or thread they run, and give the tokens of
    ``LLM.generate``.

    Attributes:
        tokens: token ids of the prompt.
        seconds: time of its prefill.
        sequence: the prompt with its cache.
    """

    def __init__(self, llm: Any, prompt: Prompt) -> None:
        super().__init__(0)
        self._llm, self._prompt, target = llm, prompt, llm.target
        self.tokens: list[int] = llm.encode(prompt)
        count = len(self.tokens)
        target.check_room(count + 1)
        cache = target.new_cache(max(1, count - 1))
        self.sequence = SequenceState(
            self.tokens, count, cache, target, target.sampler(SamplingParams())
        )
        self.sequence.features = llm.resources.features()
        begun = perf_counter()
        prefill(self.sequence)
        self.seconds = perf_counter() - begun

    def fork_longest(self, sequence: SequenceState, capacity: int) -> FullCache:
        """A copy for a sequence with this prompt."""
        base = self.sequence
        sequence.last_pass, sequence.last_row = base.last_pass, base.last_row
        if base.features is not None:
            sequence.features = base.features.copy()
        return base.cache.fork(capacity)

    def add_running(self, sequence: SequenceState) -> None:
        """Nothing: sequences share the prompt alone."""

    def retire(self, sequence: SequenceState) -> None:
        """Nothing."""

    def generate(
        self, *args: Any, on_step: Callable[[Step], None] | None = None, **options: Any
    ) -> Generation:
        """``LLM.generate`` for this prompt, from a copy; ``prefill_seconds`` is then the time of
        copying."""
        return self.stream(*args, **options).finish(on_step)

    def stream(self, *args: Any, **options: Any) -> Stream:
        """``LLM.stream`` for this prompt, from a copy.

        Raises:
            InputError: a prompt is given; as ``LLM.stream``.
        """
        first = args[0] if args else None
        if "prompt" in options or isinstance(first, str | list | tuple | Prefilled):
            value = shown(options.get("prompt", first))
            valid = (
                "generate(max_new_tokens, …) here, or LLM.generate(prompt, …) for another prompt"
            )
            raise InputError(
                f"prompt is {value}, beside the one prefilled; valid: {valid}", "prompt"
            )
        return self._llm.start(self._llm.request(self._prompt, self.tokens, *args, **options), self)


# ---- the journal ---------------------------------------------------------------------------------


def chat_digest(
    prompt: Prompt, tools: Tools | None = None, options: Mapping[str, Any] | None = None
) -> str | None:
    """The digest of a conversation, its tools and template options, for `Request.asked`; None for a
    prompt that is no conversation."""
    asked = [prompt, tools and tools.forms, *([options] if options else [])]
    return digest_of(asked, default=str) if is_chat(prompt) else None


def _chat_digest(request: Request) -> str | None:
    return request.asked or chat_digest(request.prompt, None, request.template_options)


def kept_prompt(request: Request) -> list[int] | None:
    """The prompt's ids from the run in its folder, if that has the same conversation; else None. (A
    template may write today's date, which would make another prompt of it.)"""
    if request.run_dir is not None and (asked := _chat_digest(request)) is not None:
        with suppress(InputError):  # no run there; `open_journal` reports anything worse
            header = load(Path(request.run_dir).expanduser())[1].header
            return header.prompt if header.asked == asked else None
    return None


def open_journal(sequence: Any) -> RunWriter:
    """Lock the folder of a sequence's run; if it holds a run already, the sequence resumes it.

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
    header = Header(
        time.time(), llm.name, loading, identity, sequence.prompt, _chat_digest(request)
    )
    checked = ((name, getattr(request.options, name)) for name in request.strategy_options or ())
    options: dict[str, Any] = {
        name: value for name, value in checked if isinstance(value, JOURNAL_TYPES)
    }
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
