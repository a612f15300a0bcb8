"""One generation: a request checked against the model, its prompt read, its steps taken one by one.

A run is iterated by whoever wants it alone; the scheduler makes the same calls for several concurrently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokenswift.engine.journal import Journal, kept_prompt
from tokenswift.engine.output import Output
from tokenswift.engine.prefixes import Prefixes
from tokenswift.engine.prompt_logprobs import PromptLogprobs
from tokenswift.engine.request import Request
from tokenswift.engine.step import PrefillChunk, RunningSequence, advance, prefill
from tokenswift.loader.prompts import is_chat
from tokenswift.memory import check_run, default_length, needs_of, ran_out
from tokenswift.metrics import Meter
from tokenswift.models.decoder import savings
from tokenswift.sampling.penalties import rules_of
from tokenswift.spec.methods import STRATEGIES, drafts_from
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import Generation, InputError, Metrics, RunError, Step

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
        output: what it has written.
        scores: how likely the prompt's tokens are, where that is asked for.
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
        self.llm, self.owner = llm, owner
        self.wanted: Callable[[], bool] | None = None
        self.patience: Callable[[], float] | None = None
        self.target = llm.target
        self.prompt: list[int] = llm.encode(request.prompt, None, request.template_options)
        if request.run_dir is not None:
            self.prompt = kept_prompt(request) or self.prompt
        if self.target.ranks > 1:
            _check_ranks(request)
        new = request.max_new_tokens
        if new is None:
            answers = is_chat(request.prompt) if request.prefilled is None else request.prefilled.answers
            new = default_length(self.target, answers, len(self.prompt))
        self.target.check_room(len(self.prompt) + new)
        self.max_new_tokens = new
        request = self.request = replace(request, max_new_tokens=new)
        self.eos: Collection[int] = () if request.ignore_eos else llm.source.end_tokens()
        self.output = Output(llm.source.codec, request, self.eos)
        ends = {*self.eos, *(ids[0] for ids in self.output.stops if len(ids) == 1)}
        vocabulary, grammar = self.target.vocab_size, request.sampling.grammar
        rules = rules_of(request.sampling, llm.source.codec, vocabulary, len(self.prompt), ends)
        self.sampler = self.target.sampler(request.sampling, rules)
        if grammar is not None:
            self.sampler.masks = llm.resources.grammars.masks(grammar, len(self.prompt))
        self.strategy = STRATEGIES[request.strategy].build(llm.resources, options, self.sampler)
        self.heads, self.draft_source = drafts_from(llm.resources, request.strategy, options)
        self.prefixes = prefixes if self.target.equal_bits else None
        self.check_memory(spare)
        self.meter = Meter()
        self.scores: PromptLogprobs | None = None
        if request.prompt_logprobs is not None:
            self.scores = PromptLogprobs(self.target, self.prompt, request.prompt_logprobs)
        self.text: RunningSequence | None = None
        self._sequence: TokenSequence | None = None
        self.draft_passes = 0
        self.journal: Journal | None = None
        if request.run_dir is not None:
            rule = self.strategy.acceptance
            self.journal = Journal(llm, request, self.prompt, self.eos, rule, self.output, self.meter)
            self.draft_passes = self.journal.passes

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None until then, and until its prompt is read where that is to be told of."""
        return None if self.scores is not None and not self.scores.is_whole else self.output.finish_reason

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

    def explained(self, error: BaseException) -> BaseException:
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
        finally:
            self.close()

    def open(self) -> None:
        """Begin the journal or go on with it, where there is one."""
        if self.journal is not None:
            self.journal.begin()

    @property
    def left(self) -> int:
        """Tokens that are still to be read before the first step."""
        known = len(self.prompt) + len(self.output.tokens) - 1
        return known if self._sequence is None else known - self._sequence.cache.length

    def begin(self) -> TokenSequence:
        """Make the cache, with what is known of the beginning already, unless it is there."""
        if self._sequence is not None:
            return self._sequence
        capacity = len(self.prompt) + self.max_new_tokens + self.strategy.max_nodes
        with self.meter.phase("prefill"):
            reads = self.scores is not None  # all of the prompt, whoever has read it before
            if self.request.prefilled is not None and not self.output.tokens and not reads:
                self._sequence = self._named(self.request.prefilled.fork(capacity, self.sampler))
                return self._sequence
            known, cache = self.prompt + self.output.tokens, None
            if self.prefixes is not None and not reads:
                texts = (known, len(self.prompt))
                cache = self.prefixes.begin(self.target, *texts, capacity, self.owner)
            if cache is None:
                cache = self.target.new_cache(capacity)
            made = TokenSequence(known, len(self.prompt), cache, self.target, self.sampler)
            made.on_read = None if self.scores is None else self.scores.take
            if self.request.strategy == "auto":
                made.features = self.llm.resources.features()
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
        returns what is left then. With nothing left `text` is there, unless no token may come."""
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
        if self.output.finish_reason is not None:  # it was read for its log-probabilities
            return
        room = self.max_new_tokens - len(self.output.tokens)
        self.text = RunningSequence(sequence, self.strategy, self.sampler, room, self.eos, self.meter)
        self.text.logprobs = self.request.logprobs
        self.text.raw = self.request.logprobs_mode == "raw_logprobs"
        self.text.begin()

    def take(self, step: Step) -> Step:
        """Take in a step of `text`; returns it up to the end of the text, with what it released."""
        step, pieces = self.output.take(step)
        if self._sequence is not None:
            self.draft_passes = self._sequence.draft_passes
        if self.journal is not None:
            self.journal.add(step, pieces, self.draft_passes)
        prompt = () if self.scores is None else self.scores.once()
        return replace(step, text=step.text + self.output.finish(), prompt_logprobs=prompt)

    def finish(self) -> None:
        """Write the end to the journal, where there is one."""
        if self.journal is not None:
            self.journal.finish(self.metrics())

    def close(self) -> None:
        """Let go of memory and journal, wherever the run is; what was kept of it stays."""
        if self.prefixes is not None and self._sequence is not None:
            _keep(partial(self.prefixes.keep, self._sequence))
        self._sequence = self.text = None
        if self.journal is not None:
            self.journal.close()

    # ---- the result -----------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Figures of the run so far, earlier sessions included."""
        return self.meter.finish(self.output.tokens, self.draft_passes, loop=self.output.guard.first)

    def result(self) -> Generation:
        """The finished generation."""
        heads = self.heads
        return Generation(
            token_ids=self.output.tokens,
            text=self.output.text,
            finish_reason=self.finish_reason or "length",
            metrics=self.metrics(),
            prompt_tokens=len(self.prompt),
            lossless=self.strategy.acceptance == "exact",
            drafting=self.strategy.report(),
            heads=None if heads is None else {"kind": heads.kind, "file": heads.source},
            draft_source=self.draft_source,
            token_sources=dict(self.output.sources),
            logprobs=self.output.logprobs,
            prompt_logprobs=[] if self.scores is None else self.scores.found,
        )


def _check_ranks(request: Request) -> None:
    """Refuse what processes that compute one model together would not all do alike."""
    if request.strategy == "auto":
        raise InputError("strategy is 'auto', which depends on timings, with tp; valid: a fixed strategy")
    if request.run_dir is not None:
        raise InputError("run_dir is given with tp; valid: None")


def _keep(what: Callable[[], object]) -> None:
    """Keep what later texts alone gain by: where that fails, the text that has ended is none the worse."""
    try:
        what()
    except Exception as error:
        logger.warning("the KV cache of a finished text is not kept for reuse (%s)", error)
