"""A generation as an iterator of steps (`Stream`); many from a prefilled prompt (`Prefilled`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Unpack

from tokenswift.chat.prompts import Prompt
from tokenswift.checks import check_callback, shown
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import Strategy
from tokenswift.engine.arguments import GenerationArguments, shows
from tokenswift.engine.prefix_cache import PrefixCache
from tokenswift.engine.prompts import encode, request_for
from tokenswift.engine.sequence import Sequence
from tokenswift.engine.step import prefill
from tokenswift.kv.cache import FullCache
from tokenswift.speculation.resources import Resources
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.types import Generation, InputError, Step


class Stream(Iterator[Step], AbstractContextManager["Stream"]):
    """The steps of a generation, as they happen; afterwards its result.

    ::

        stream = llm.stream("Once upon a time")
        for step in stream:
            print(step.text, end="", flush=True)
        print(stream.result.finish_reason, stream.result.metrics.tokens_per_second)

    A stream is a context manager: leaving it early frees the run's memory and closes its journal,
    as `close` does.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._steps = iter(sequence)

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


class Prefilled(PrefixCache):
    """A prefilled prompt, made by ``LLM.prefill``. Generations start from a copy: they neither
    change it nor see one another, in whatever order or thread they run, and give the tokens of
    ``LLM.generate``.

    Attributes:
        tokens: token ids of the prompt.
        seconds: time of its prefill.
        sequence: the prompt with its cache.
    """

    def __init__(self, resources: Resources, prompt: Prompt) -> None:
        super().__init__(0)
        self._resources = resources
        self._prompt = prompt
        target = resources.target
        self.tokens = encode(resources, prompt)
        count = len(self.tokens)
        target.check_room(count + 1)
        is_long = target.rotary.is_long(count + 1)
        cache = target.new_cache(max(1, count - 1), is_long=is_long)
        self.sequence = SequenceState(
            self.tokens, count, cache, target, target.sampler(SamplingParams()), is_long=is_long
        )
        self.sequence.features = resources.features()
        begun = perf_counter()
        prefill(self.sequence)
        self.seconds = perf_counter() - begun

    def fork_longest(self, sequence: SequenceState, capacity: int) -> FullCache | None:
        """A copy for a sequence with this prompt; None: it is so long that the model has other
        positions for it."""
        base = self.sequence
        if sequence.is_long != base.is_long:
            return None
        sequence.last_pass = base.last_pass
        sequence.last_row = base.last_row
        if base.features is not None:
            sequence.features = base.features.copy()
        return base.cache.fork(capacity)

    def add_running(self, sequence: SequenceState) -> None:
        """Nothing: sequences share the prompt alone."""

    def retire(self, sequence: SequenceState) -> None:
        """Nothing."""

    @shows(GenerationArguments)
    def generate(
        self,
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        *,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[GenerationArguments],
    ) -> Generation:
        """``LLM.generate`` for this prompt, from a copy; ``prefill_seconds`` is then the time of
        copying."""
        stream = self.stream(max_new_tokens, strategy, strategy_options, sampling, **options)
        return stream.finish(on_step)

    @shows(GenerationArguments)
    def stream(
        self,
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerationArguments],
    ) -> Stream:
        """``LLM.stream`` for this prompt, from a copy.

        Raises:
            InputError: a prompt is given; as ``LLM.stream``.
        """
        first: object = max_new_tokens
        if "prompt" in options or isinstance(first, str | list | tuple | Prefilled):
            value = shown(options.get("prompt", first))
            valid = (
                "generate(max_new_tokens, …) here, or LLM.generate(prompt, …) for another prompt"
            )
            raise InputError(
                f"prompt is {value}, together with a prefilled one; valid: {valid}", "prompt"
            )
        request = request_for(
            self._resources,
            self._prompt,
            self.tokens,
            max_new_tokens,
            strategy,
            strategy_options,
            sampling,
            **options,
        )
        return Stream(Sequence(self._resources, request, self))


def check_not_prefilled(prompt: object, name: str = "prompt") -> None:
    """Refuse what `LLM.prefill` returns where a prompt is wanted.

    Args:
        name: of the argument, for the message.
    Raises:
        InputError: saying what to call.
    """
    if isinstance(prompt, Prefilled):
        valid = "prefilled.generate(max_new_tokens, …) of the result itself, or its prompt here"
        raise InputError(f"{name} is a result of LLM.prefill; valid: {valid}", name)
