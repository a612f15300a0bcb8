"""A prompt that was run once, and any number of generations from that state."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from tokenswift.engine.step import prefill
from tokenswift.engine.stream import Stream
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import Generation


class Prefilled:
    """The state after a prompt's prefill (``LLM.prefill`` makes it). Generations fork it: they neither change
    it nor see one another, in whatever order or thread they run, and give the tokens that ``LLM.generate``
    gives for the prompt.

    Attributes:
        tokens: the prompt.
        seconds: time of its prefill.
        sampling: of generations that are given none.
        answers: whether the prompt is a chat.
    """

    def __init__(self, llm: Any, prompt: Prompt) -> None:
        self._llm, self._target = llm, llm.target
        self.tokens, self.sampling = llm.encode(prompt), llm.default_sampling(prompt)
        self.answers = is_chat(prompt)
        self._target.check_room(len(self.tokens) + 1)
        sampler = self._target.sampler(self.sampling)
        cache = self._target.new_cache(max(1, len(self.tokens) - 1))
        self._sequence = TokenSequence(self.tokens, len(self.tokens), cache, self._target, sampler)
        self._sequence.features = llm.resources.features()
        begun = perf_counter()
        prefill(self._sequence)
        self.seconds = perf_counter() - begun

    def fork(self, capacity: int, sampler: Sampler) -> TokenSequence:
        """A sequence of its own after the prompt.

        Args:
            capacity: tokens that its cache is to hold, scratch room included.
            sampler: the choice rule of what follows.
        """
        base = self._sequence
        return TokenSequence(
            tokens=list(self.tokens),
            prompt_tokens=len(self.tokens),
            cache=base.cache.fork(capacity),
            model=self._target,
            sampler=sampler,
            newest=base.newest,
            newest_row=base.newest_row,
            features=None if base.features is None else base.features.copy(),
        )

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        """``LLM.generate`` without its prompt, from a fork; ``prefill_seconds`` is the copy's time then."""
        return self._llm.generate(self.tokens, *args, **kwargs, prefilled=self)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """``LLM.stream`` without its prompt, from a fork."""
        return self._llm.stream(self.tokens, *args, **kwargs, prefilled=self)
