"""What all bodies of requests have in common, and how one is refused.

A body has the fields of OpenAI's interface that mean something here, and our own. Unknown fields
are left out, which the log says; they are refused only where the answer would mean something else
(`REFUSED_FIELDS`). Types are checked here, ranges where the command line's are, by `SamplingParams`
and `engine.request`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from tokenswift.chat.messages import field_of
from tokenswift.chat.prompts import Prompt, is_chat
from tokenswift.checks import LARGEST, check_choice
from tokenswift.config.sampling import MOST_TEXTS
from tokenswift.engine.arguments import CallArguments, call_arguments
from tokenswift.engine.failures import QueueFull
from tokenswift.engine.infill import Infill, infill_request
from tokenswift.engine.llm import LLM
from tokenswift.engine.prompts import chat_request, encode, request_for
from tokenswift.engine.request import SEEDS, Request
from tokenswift.grammar import Grammar
from tokenswift.serve.fields import (
    ENGINE_NAMES,
    GRAMMAR_FIELDS,
    NOT_SET,
    OWN_SETTINGS,
    REFUSED_FIELDS,
    SAMPLING,
    BodyFields,
)
from tokenswift.serve.items import renamed
from tokenswift.serve.settings import Settings
from tokenswift.serve.tools import GrammarCompiler, OfferedTools, offered_tools, unbound_tools
from tokenswift.types import InputError

#: characters of a prompt for each token that it may have: no language has so many
MOST_CHARACTERS_PER_TOKEN = 32
TEXT_TOKENS = 1024  # new tokens of a continued text at most, where no number is given

#: an error of memory, and what it names as too large
NEEDED_MEMORY = re.compile(r"(\w+) is [^;]+; (the run needs [^;]+); valid: .*")


class Body(BodyFields):
    """What all bodies have in common.

    Attributes:
        kind: of the answer, "chat", "completion" or "response".
        id_prefix: what its id begins with.
        prompt_field: the field that holds the prompt.
        length_fields: the fields that say how many new tokens there may be, the best known one
            last.
    """

    kind: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]
    length_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)

    @property
    def sample(self) -> int:
        """The number of its text among those of one prompt."""
        return self._sample

    def with_sample(self, number: int, **fields: object) -> Self:
        """A request for one text of this one: the text of a number among those of its prompt.

        Args:
            fields: that differ in it.
        """
        one = self.model_copy(update={"n": None, **fields})
        one._sample = number
        return one

    def each_text(self) -> Sequence[Body]:
        """A request for each text that is asked for, in the order of the answers' choices.

        Raises:
            InputError: there are too many.
        """
        return [self]

    def gap(self) -> Infill | None:
        """The gap in a text that is to be filled in; None: there is none.

        Raises:
            InputError: the fields contradict each other.
        """
        return None

    @property
    def most_seconds(self) -> float:
        """Seconds of writing, after which a text ends that has a line; 0: any."""
        return 0.0

    @property
    def writes_nothing(self) -> bool:
        """Whether the prompt alone is wanted, with its log-probabilities."""
        return False

    def with_logprobs(self) -> CallArguments:
        """Which log-probabilities are asked for, as arguments of a generation.

        Raises:
            InputError: the fields contradict each other.
        """
        return {}

    def full_prompt(self, has_template: bool, before: Sequence[Mapping[str, object]]) -> Prompt:
        """What is to be answered or gone on from.

        Args:
            has_template: whether the model answers chats.
            before: messages of earlier responses.
        Raises:
            InputError: naming what is wrong.
        """
        raise NotImplementedError

    def offered_tools(self) -> OfferedTools | None:
        """The tools that may be called, without those that OpenAI's servers run; None: none.

        Raises:
            InputError: naming what is wrong with them.
        """
        return offered_tools(
            tools=self.value_of("tools"),
            choice=self.value_of("tool_choice"),
            parallel=self.value_of("parallel_tool_calls"),
            unbound=self._unbound,
        )

    def unbind_tools(self, compiler: GrammarCompiler) -> bool:
        """Let tools be called with any JSON object whose schemas no grammar can hold; whether there
        are such tools."""
        tools = self.offered_tools()
        if tools is None or self._unbound:
            return False
        self._unbound = unbound_tools(tools, compiler)
        return bool(self._unbound)

    def length(self) -> tuple[str, int | None]:
        """The field that says how many tokens there may be, and its value; the best known field,
        and None, where none says so.

        Raises:
            InputError: two fields differ.
        """
        best_known = self.length_fields[-1]
        lengths: dict[str, int] = {}
        for name in self.length_fields:
            value = getattr(self, name)
            if value is not None:
                lengths[name] = value
        numbers = {name: length for name, length in lengths.items() if length != NOT_SET}
        if len({*numbers.values()}) > 1:
            text = ", ".join(f"{name} is {length}" for name, length in numbers.items())
            raise InputError(f"{text}; valid: one of them, or both alike", best_known)
        for name, length in (numbers or lengths).items():
            return name, length
        return best_known, None

    def sampler_seed(self, drawn: int) -> int:
        """The seed as the sampler takes it: negative numbers, and those beyond 63 bits, stand for
        their low 63 bits. Each further text of a prompt has the next one.

        Args:
            drawn: the first text's where the body names none.
        """
        first = drawn if self.seed is None or self.seed == NOT_SET else self.seed
        return (first + self._sample) % SEEDS

    @property
    def is_bound(self) -> bool:
        """Whether there may be a grammar, of tools or of the text, so that one is to be
        compiled."""
        return "grammar" in self.own_settings or any(map(self.value_of, GRAMMAR_FIELDS))

    def ignored_fields(self) -> list[str]:
        """The fields that nobody knows, and that ask for something.

        Raises:
            InputError: without one the answer would mean something else.
        """
        unknown = [name for name, value in (self.model_extra or {}).items() if value]
        for name in unknown:
            if name in REFUSED_FIELDS:
                raise InputError(f"{name} is not supported; valid: leave it out", name)
        known = [*OWN_SETTINGS, *(name for name in SAMPLING if name not in Body.model_fields)]
        for name in self.own_settings:
            check_choice("tokenswift", name, tuple(known))
        return unknown

    def template_options(self) -> dict[str, object]:
        """What the chat template is given besides messages and tools; it takes what it knows."""
        effort = self.value_of("reasoning_effort") or self.settings_of("reasoning").get("effort")
        options: dict[str, object] = {
            "reasoning_effort": effort,
            "continue_final_message": self.value_of("continue_final_message"),
        }
        if effort == "none":
            options["enable_thinking"] = False
        options.update(self.settings_of("chat_template_kwargs"))
        return {name: value for name, value in options.items() if value is not None}

    def request(
        self,
        llm: LLM,
        settings: Settings,
        seed: int,
        before: Sequence[Mapping[str, object]] = (),
    ) -> Request:
        """The generation that the body asks for.

        Args:
            llm: the model that is served.
            settings: the limits.
            seed: where the body names none.
            before: messages of earlier responses.
        Raises:
            InputError: naming the field, its value and what is valid.
        """
        self._check_stops(llm.target.vocab_size)
        prompt = self.full_prompt(llm.has_chat_template, before)
        arguments = self._arguments(seed)
        tools = self.offered_tools()
        positions = llm.target.rotary.limit or LARGEST
        most_tokens = min(settings.max_prompt or LARGEST, positions - 1)
        self._check_characters(prompt, tools, most_tokens)
        gap = self.gap()
        if gap is not None:
            request = infill_request(llm.resources, gap, **arguments)
        elif is_chat(prompt):
            arguments["template_options"] = self.template_options() or None
            request, _ = chat_request(
                llm.resources, prompt, tools, name=self.prompt_field, **arguments
            )
        else:
            ids = encode(llm.resources, prompt)
            arguments["max_new_tokens"] = TEXT_TOKENS
            request = request_for(llm.resources, prompt, ids, **arguments)
        size = len(request.prompt)
        if size > most_tokens:
            text = f"the prompt is {size:,} tokens"
            raise InputError(f"{text}; valid: up to {most_tokens:,}", self.prompt_field)
        most_new = min(settings.max_tokens, positions - size)
        return replace(
            request,
            max_new_tokens=self._new_tokens(request.max_new_tokens or TEXT_TOKENS, most_new),
        )

    def _check_characters(
        self, prompt: Prompt, tools: OfferedTools | None, most_tokens: int
    ) -> None:
        """Refuse a prompt that is too long to be encoded."""
        written = (self.gap() or prompt, tools.forms if tools else "")
        characters = sum(len(str(one)) for one in written)
        most = MOST_CHARACTERS_PER_TOKEN * most_tokens
        if characters > most:
            text = f"the prompt is {characters:,} characters"
            valid = f"up to {most:,}, for {most_tokens:,} tokens"
            raise InputError(f"{text}; valid: {valid}", self.prompt_field)

    def _check_stops(self, vocab_size: int) -> None:
        """Check the token ids that end the text."""
        for token in self.stop_token_ids or ():
            if not 0 <= token < vocab_size:
                valid = f"0 to {vocab_size - 1:,}, the model's vocabulary"
                raise InputError(f"stop_token_ids holds {token}; valid: {valid}", "stop_token_ids")
        texts = 0 if self.stop is None or isinstance(self.stop, str) else len(self.stop)
        several = texts + len(self.stop_token_ids or ())
        if several > MOST_TEXTS:
            text = f"stop and stop_token_ids hold {several:,} entries"
            raise InputError(f"{text}; valid: up to {MOST_TEXTS:,} in all", "stop_token_ids")

    def _new_tokens(self, default: int | None, most: int) -> int:
        """How many tokens there may be.

        Args:
            default: where the body does not say; None: as many as there may be.
            most: how many there may be at most.
        Raises:
            InputError: the length, or the least length, is out of range.
        """
        field, length = self.length()
        if length == NOT_SET:
            length = most
        if length == 0 and self.writes_nothing:
            length = 1  # which nobody is told of
        if length is not None and not 1 <= length <= most:
            raise InputError(f"{field} is {length}; valid: an integer from 1 to {most:,}", field)
        if length is None:
            length = most if default is None else min(default, most)
        least = self.min_tokens or 0
        if least > length:
            text = f"min_tokens is {least}, {field} {length:,}"
            valid = f"up to {length:,}, or a larger {field}"
            raise InputError(f"{text}; valid: {valid}", "min_tokens")
        return length

    def _arguments(self, seed: int) -> CallArguments:
        """Arguments of a generation, but for its prompt and length."""
        arguments = {
            name: self.own_settings.get(name, self.value_of(name))
            for name in (*SAMPLING, "strategy", "on_loop")
        }
        arguments["seed"] = self.sampler_seed(seed)
        arguments.update(self.with_logprobs())
        if self.top_k == NOT_SET:
            arguments["top_k"] = 0  # as vLLM has it: all tokens
        if arguments["top_p"] == 0:  # the likeliest token alone
            arguments["top_p"] = None
            arguments["temperature"] = 0
        arguments["stop"] = self._stops()
        arguments["ignore_eos"] = self.own_settings.get("ignore_eos") or bool(self.ignore_eos)
        text_format = Grammar.of_format(self.settings_of("text").get("format"), "text.format")
        arguments["response_format"] = text_format or self.response_format
        named = {name: value for name, value in arguments.items() if value is not None}
        return call_arguments(named)

    def _stops(self) -> list[object]:
        """What ends the text: strings, and lists of one token id each."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        stops: list[object] = [string for string in strings if string]
        stops += ([token] for token in self.stop_token_ids or ())
        return stops

    def places(self, before: Sequence[Mapping[str, object]]) -> list[str]:
        """What the client calls each message of the prompt, "" for those it has not sent."""
        return []

    def in_field_names(
        self, error: InputError, before: Sequence[Mapping[str, object]] = ()
    ) -> InputError:
        """An error of the engine, in the names of fields that the client knows.

        Args:
            before: messages of earlier responses.
        """
        if isinstance(error, QueueFull):
            return error
        names = {
            **ENGINE_NAMES,
            "prompt": self.prompt_field,
            "max_new_tokens": self.length()[0],
        }
        text = str(error)
        needed = NEEDED_MEMORY.fullmatch(text)
        if needed is not None and needed[1] not in names:  # of drafts, which no client sizes
            text = f"max_new_tokens is too large; {needed[2]}; valid: a smaller max_new_tokens"
        first = re.match(r"\w*", text)
        word = first[0] if first else ""
        text = names.get(word, word) + text.removeprefix(word)
        text = text.replace("max_new_tokens", names["max_new_tokens"])
        text = renamed(text, self.prompt_field, self.places(before))
        field = error.field or (word if word in names else None)
        if field == "grammar":
            field = self._grammar_field()
        named = names.get(field, field) if field else None
        return InputError(text, field_of(named) if named else None)

    def _grammar_field(self) -> str:
        """The field that asks for the text's grammar."""
        if "grammar" in self.own_settings:
            return "tokenswift"
        return next((name for name in GRAMMAR_FIELDS if self.value_of(name)), "tokenswift")
