"""One generation, from its request to its result: checks, prefill, steps, text and journal.

A caller that wants one generation iterates it; the scheduler makes the same calls for several at
once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import torch

from tokenswift.chat.prompts import is_chat
from tokenswift.checks import check_tokens, counted
from tokenswift.engine.detokenize import TextStream, begins_turn, context_of
from tokenswift.engine.failures import failure
from tokenswift.engine.litany import LitanyGuard
from tokenswift.engine.loops import CopyGuard, LoopGuard
from tokenswift.engine.prefix_cache import PrefixCache
from tokenswift.engine.prompt_logprobs import PromptLogprobs
from tokenswift.engine.prompts import encode
from tokenswift.engine.request import Request
from tokenswift.engine.request_sampler import sampler_of, stop_ids
from tokenswift.engine.run_journal import is_long_run, journalled_prompt, open_journal
from tokenswift.engine.step import prefill, step
from tokenswift.memory import check_run, default_length, needs_of
from tokenswift.metrics import PREFILL
from tokenswift.models.target import Target
from tokenswift.runs.records import End, EndReason, Progress, RunState
from tokenswift.speculation.methods import STRATEGIES, drafts_from
from tokenswift.speculation.resources import Resources
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.types import SOURCES, Generation, InputError, Logprob, Loop, Step

logger = logging.getLogger("tokenswift")


class Sequence(SequenceState):
    """One generation. Making it checks everything; nothing runs before it is iterated.

    ``__iter__`` shows its life. The scheduler makes the same calls: `open`; `prefill` until nothing
    is left; `step.step` and `add_step` in turns until there is a finish reason; `finish`; and in
    any case `close`.

    Args:
        resources: the model, and what drafts for it.
        request: the checked arguments of the call.
        prefixes: KV caches of other sequences, to copy a shared prefix from; None: none.
        spare: bytes that will be free when it runs, besides those that are free now.
        owner: its client; prefixes are shared among sequences of one owner.

    Attributes:
        new_tokens: generated token ids up to the end of the text.
        sources: number of them by the source that drafted them.
        logprobs: log-probabilities of each, if requested.
        prompt_logprobs: those of the prompt's tokens; None: they are not requested.
        finish_reason: why the text ended; None until then.
        tail: text that was held back until the end.
        new_turn: whether the text is a turn of its own, and does not go on from the prompt's.
        detokenizer: turns tokens into text.
        guard: detects loops of exact copies.
        copy_guard: detects that pages are written again.
        first_loop: the first loop that either noticed; None: there was none.
        litany_guard: detects litanies.
    Raises:
        InputError: naming the argument, its value and what is valid.
    """

    def __init__(
        self,
        resources: Resources,
        request: Request,
        prefixes: PrefixCache | None = None,
        spare: int = 0,
        owner: str = "",
    ) -> None:
        resources.check_open()
        target = resources.target
        prompt = encode(resources, request.prompt, request.template_options)
        prompt = journalled_prompt(request) or prompt
        length = length_of(request, target, len(prompt))
        self.resources = resources
        self.prompt = prompt
        self.max_new_tokens = length
        self.request = request = replace(request, max_new_tokens=length)
        eos = set() if request.ignore_eos else resources.source.end_tokens()
        sampler = sampler_of(resources, request, len(prompt), eos)
        super().__init__(
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            full_cache=None,
            model=target,
            sampler=sampler,
            strategy=STRATEGIES[request.strategy](resources, request.options, sampler),
            eos=eos,
            owner=owner,
            is_long=is_long_run(target.rotary, request, len(prompt) + length),
        )
        self.top_logprobs = request.logprobs
        self._watch_prompt()
        self.heads, self.draft_source = drafts_from(resources, request.strategy, request.options)
        self.prefixes = prefixes
        self.check_memory(spare)
        self.new_turn = request.new_turn or begins_turn(request.prompt, request.template_options)
        self._begin_text()
        self._open_journal()

    # ---- its life --------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Step]:
        try:
            self.open()
            if self.finish_reason is None:  # a resumed run may have ended
                self.prefill()
            while self.finish_reason is None:
                result = step([self])[0]
                if isinstance(result, Exception):
                    raise result
                yield self.add_step(result)
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
        return len(self.tokens) - 1 - (0 if self.full_cache is None else self.full_cache.length)

    def make_cache(self) -> None:
        """Make the KV cache, with the longest known prefix copied into it, unless it exists."""
        if self.full_cache is not None:
            return
        capacity = len(self.prompt) + self.max_new_tokens + self.strategy.max_nodes
        with self.meter.phase(PREFILL):
            if self.features is None and self.request.strategy == "auto":
                self.features = self.resources.features()
            cache = None
            if self.prefixes is not None and self.prompt_logprobs is None:  # which need each row
                cache = self.prefixes.fork_longest(self, capacity)
            if cache is None:
                cache = self.model.new_cache(capacity, is_long=self.is_long)
            self.full_cache = cache
        if self.prefixes is not None:
            self.prefixes.add_running(self)

    def add_step(self, step: Step) -> Step:
        """Add a step's tokens to the result and the journal; returns the step, cut at the end of
        the text, with its text."""
        pieces: list[str] = []
        for token in step.token_ids:
            pieces.append(self._push(token))
            if self.finish_reason is not None:
                break
        count = len(pieces)
        step = replace(
            step,
            token_ids=step.token_ids[:count],
            sources=step.sources[:count],
            logprobs=step.logprobs[:count],
            text="".join(pieces),
            chars=tuple(map(len, pieces)),
        )
        if self.prompt_logprobs is not None and count == len(self.new_tokens):  # the first step
            step = replace(step, prompt_logprobs=tuple(self.prompt_logprobs.records))
        self.sources.update(step.sources)
        self.logprobs += step.logprobs
        self._pieces.append(step.text)
        tail = self._flush()
        if self.journal is not None:
            progress = Progress(
                seconds=self.meter.seconds,
                passes=self.draft_passes,
                loop=self.first_loop,
                litany=self.litany_guard.first,
                end=self._end(),
            )
            self.journal.add(step, progress)
        return replace(step, text=step.text + tail)

    def _watch_prompt(self) -> None:
        """Have the log-probabilities of the prompt's tokens taken, where they are requested."""
        self.prompt_logprobs: PromptLogprobs | None = None
        count = self.request.prompt_logprobs
        if count is not None:
            self.prompt_logprobs = PromptLogprobs(self.model, self.prompt, count)
            self.on_hidden = self.prompt_logprobs.take

    def _open_journal(self) -> None:
        """Open the journal, where there is a folder for it; a run that it holds is resumed."""
        self.journal = None
        run_dir = self.request.run_dir
        if run_dir is not None:
            self.journal = open_journal(self, Path(run_dir))

    def _begin_text(self) -> None:
        """Begin the text, behind the tokens of the prompt that it goes on from."""
        tokenizer = self.resources.source.tokenizer
        context = [] if self.new_turn else context_of(tokenizer, self.prompt)
        stop_texts = tuple(stop for stop in self.request.stop if isinstance(stop, str))
        self.detokenizer = TextStream(tokenizer, stop_texts, context)
        self.guard = LoopGuard()
        self.copy_guard = CopyGuard()
        self.first_loop: Loop | None = None
        self.litany_guard = LitanyGuard()
        self.new_tokens: list[int] = []
        self.sources: Counter[str] = Counter(dict.fromkeys(SOURCES, 0))
        self.logprobs: list[Logprob] = []
        self.finish_reason: EndReason | None = None
        self.tail = ""
        self._pieces: list[str] = []
        self._stop_ids = stop_ids(self.request)

    def _push(self, token: int) -> str:
        """Add a token; returns the text that it completes, and sets the finish reason if it ends
        the text."""
        self.new_tokens.append(token)
        may_stop = len(self.new_tokens) > self.request.sampling.min_tokens
        self.detokenizer.may_stop = may_stop
        stops = may_stop and any(
            tuple(self.new_tokens[-len(ids) :]) == ids for ids in self._stop_ids
        )
        ends = token in self.eos
        piece = "" if ends or stops else self.detokenizer.push(token)  # no "</s>" in the text
        self.guard.push(token)
        self.copy_guard.push(token)
        self.first_loop = self.first_loop or self.guard.loop or self.copy_guard.loop
        self.litany_guard.push(piece)
        if self.detokenizer.stopped or stops:
            self.finish_reason = "stop"
        elif ends:
            self.finish_reason = "eos"
        elif self._stops_at_loop():
            self.finish_reason = "loop"
        elif len(self.new_tokens) >= self.max_new_tokens:
            self.finish_reason = "length"
        return piece

    def _stops_at_loop(self) -> bool:
        """Whether the text ends here because of a loop, or of a litany."""
        on_loop = self.request.on_loop
        if self.guard.loop is not None:
            return on_loop != "report"
        repeats = self.copy_guard.loop is not None or self.litany_guard.litany is not None
        return repeats and on_loop == "stop"

    def _flush(self) -> str:
        """The text still held back, once the text has ended; "" before."""
        self.tail = self.detokenizer.finish() if self.finish_reason is not None else ""
        self._pieces.append(self.tail)
        return self.tail

    def _end(self) -> End | None:
        """The journal's record of the end; None before it."""
        return None if self.finish_reason is None else End(self.finish_reason, self.tail)

    def finish(self) -> None:
        """Write the text beside the journal, where there is one."""
        if self.journal is not None:
            self.journal.finish(self.tail)

    def close(self) -> None:
        """Free the memory and close the journal, at any point; the journal's content stays."""
        if self.prefixes is not None and self.full_cache is not None:
            try:
                self.prefixes.retire(self)
            except Exception as error:  # it would only have made later prefills faster
                logger.warning("the KV cache of a finished text is not kept for reuse (%s)", error)
        self.full_cache = None
        self.last_pass = None
        self.features = None
        if self.journal is not None:
            self.journal.close()

    def result(self) -> Generation:
        """The finished generation."""
        heads = self.heads
        return Generation(
            token_ids=self.new_tokens,
            text="".join(self._pieces),
            finish_reason=self.finish_reason or "length",
            metrics=self.meter.finish(
                self.new_tokens,
                self.draft_passes,
                loop=self.first_loop,
                litany=self.litany_guard.first,
            ),
            prompt_tokens=len(self.prompt),
            lossless=self.strategy.acceptance == "exact",
            drafting=self.strategy.report(),
            heads=None if heads is None else {"kind": heads.kind, "file": heads.source},
            draft_source=self.draft_source,
            token_sources=dict(self.sources),
            logprobs=self.logprobs,
            prompt_logprobs=[] if self.prompt_logprobs is None else self.prompt_logprobs.records,
        )

    # ---- a resumed run ---------------------------------------------------------------------------

    def restore(self, state: RunState) -> None:
        """Resume at the end of a run's journal.

        Raises:
            InputError: it has more tokens than ``max_new_tokens``, or ids that the model does not
                have.
        """
        length = self.max_new_tokens
        count = len(state.tokens)
        if length < count:
            already = f"the run has {counted(count, 'token')} already"
            raise InputError(f"max_new_tokens is {length}; {already}; valid: at least as many")
        check_tokens(state.tokens, self.model.vocab_size)
        self.tokens += state.tokens
        self._write_again(state.tokens)
        text = "".join(self._pieces)
        if text != state.text and text.lstrip(" ") == state.text.lstrip(" "):
            # a journal does not say whether its text is a turn of its own
            self.new_turn = not self.new_turn
            self._write_again(state.tokens)
        self.draft_passes = state.passes
        self.sources.update({name: state.sources.count(name[0]) for name in SOURCES})
        self.meter.restore(state.steps, state.seconds)
        self._flush()

    def _write_again(self, tokens: list[int]) -> None:
        """Begin the text anew and take all new tokens of a journal, as if they came now."""
        self._begin_text()
        for token in tokens:  # what ends it now may not have ended it then
            self.finish_reason = None
            self._pieces.append(self._push(token))

    # ---- memory ----------------------------------------------------------------------------------

    def check_memory(self, spare: int = 0) -> None:
        """Raise unless it fits the memory; cached prefixes are dropped if that is what it takes."""
        try:
            self._check_run(spare)
        except InputError:
            if self.prefixes is None or not self.prefixes.clear():
                raise
            self._check_run(spare)

    def _check_run(self, spare: int) -> None:
        check_run(self.model, self.strategy, len(self.prompt), self.max_new_tokens, spare)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it will allocate in any case."""
        needs = needs_of(self.model, self.strategy, len(self.prompt), self.max_new_tokens)
        return sum(need.nbytes for need in needs if need.sure)


def length_of(request: Request, target: Target, prompt_tokens: int) -> int:
    """The most new tokens of a request.

    Raises:
        InputError: prompt and new tokens are more than the model has positions for.
    """
    length = request.max_new_tokens
    if length is None:
        length = default_length(target, is_chat(request.prompt), prompt_tokens)
    target.check_room(prompt_tokens + length)
    return length
