"""What all bodies of requests have in common, and how one is refused.

A body has the fields of OpenAI's interface that mean something here, and our own. Unknown fields
are left out, which the log says; they are refused only where the answer would mean something else
(`WITHOUT`). Types are checked here, ranges where the command line's are, by `SamplingParams`
and `engine.request`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, PrivateAttr

from tokenswift.chat.messages import field_of
from tokenswift.chat.prompts import Prompt, is_chat
from tokenswift.checks import LARGEST, check_choice
from tokenswift.config.sampling import MOST_BIASES, MOST_TEXTS, SamplingParams
from tokenswift.engine.failures import QueueFull
from tokenswift.engine.request import Request
from tokenswift.grammar import Grammar
from tokenswift.serve.items import renamed
from tokenswift.serve.settings import Settings
from tokenswift.serve.tools import GrammarCompiler, OfferedTools, offered_tools, unbound_tools
from tokenswift.types import InputError

LIST = 4096  # messages of a conversation
ITEMS = 32  # of an object of settings
CHARACTERS = 32  # of a prompt for each token that it may have: no language has so many
TOKENS = 1024  # new tokens of a continued text at most, where no number is given
NOT_SET = -1  # as other servers have it: of a length, as many tokens as fit
SEEDS = LARGEST + 1  # seeds of the sampler
#: fields that are not served, and without which an answer would mean something else
WITHOUT = frozenset(
    "functions function_call conversation prompt suffix audio documents chat_template "
    "truncate_prompt_tokens "
    "allowed_token_ids use_beam_search echo include_stop_str_in_output logprobs top_logprobs "
    "prompt_logprobs "
    "grammar json_schema guided_json guided_regex guided_choice guided_grammar structured_outputs "
    "previous_response_id instructions input messages".split()
)
#: keys of ``tokenswift`` besides settings of the sampling
OWN = ("strategy", "ignore_eos", "on_loop")
SAMPLING = [one.name for one in fields(SamplingParams) if one.name != "greedy"]
#: an error of memory, and what it names as too large
NEEDED_MEMORY = re.compile(r"(\w+) is [^;]+; (the run needs [^;]+); valid: .*")
#: names of the engine's arguments that clients know by others
ENGINE_NAMES = {"template_options": "chat_template_kwargs"}


class Quick(FailFast):
    """Of a list, the first entry that is wrong is the only one looked at; may stand in a union."""

    __hash__ = object.__hash__  # type: ignore[assignment]


Several = Annotated[list[Any] | None, Field(max_length=MOST_TEXTS)]
Object = Annotated[dict[str, Any] | None, Field(max_length=ITEMS)]
Turns = Annotated[list[dict[str, Any]], Quick(), Field(min_length=1, max_length=LIST)]
#: any number of 64 bits, with a sign or without
Seed = Annotated[int | None, Field(ge=-(2**63), lt=2**64)]


class Body(BaseModel):
    """What all bodies have in common.

    Attributes:
        kind: of the answer, "chat", "completion" or "response".
        begins: what its id begins with.
        asked: the field that holds the prompt.
        lengths: the fields that say how many new tokens there may be, the best known one last.
    """

    kind: ClassVar[str]
    begins: ClassVar[str]
    asked: ClassVar[str]
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, Any] | None, Field(max_length=MOST_BIASES)] = None
    min_tokens: int | None = None
    bad_words: Several = None
    stop: str | Several = None
    stop_token_ids: Annotated[list[int] | None, Quick(), Field(max_length=MOST_TEXTS)] = None
    ignore_eos: bool | None = None
    seed: Seed = None
    response_format: Any = None
    tokenswift: Object = Field(
        default=None, description="settings of this server alone, see its docs"
    )
    _unbound: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def own(self) -> dict[str, Any]:
        """Our own settings."""
        return self.tokenswift or {}

    def given(self, name: str) -> Any:
        """The value of a field that not all bodies have; None where this one has none of the name,
        whatever a client has sent."""
        return getattr(self, name) if name in type(self).model_fields else None

    def whole_prompt(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> Prompt:
        """What is to be answered or gone on from.

        Args:
            has_template: whether the model answers chats.
            before: messages of earlier responses.
        Raises:
            InputError: naming what is wrong.
        """
        raise NotImplementedError

    def tools_asked(self) -> OfferedTools | None:
        """The tools that may be called, without those that OpenAI's servers run; None: none.

        Raises:
            InputError: naming what is wrong with them.
        """
        options = (self.given("tool_choice"), self.given("parallel_tool_calls"))
        return offered_tools(self.given("tools"), *options, self._unbound)

    def unbind_tools(self, compiler: GrammarCompiler) -> bool:
        """Let tools be called with any JSON object whose schemas no grammar can hold; whether there
        are such tools."""
        tools = self.tools_asked()
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
        values = {name: getattr(self, name) for name in self.lengths}
        given = {name: value for name, value in values.items() if value is not None}
        numbers = {name: value for name, value in given.items() if value != NOT_SET}
        if len({*numbers.values()}) > 1:
            text = ", ".join(f"{name} is {value}" for name, value in numbers.items())
            raise InputError(f"{text}; valid: one of them, or both alike", self.lengths[-1])
        return next(iter((numbers or given).items()), (self.lengths[-1], None))

    @property
    def sampler_seed(self) -> int | None:
        """The seed as the sampler takes it: negative numbers, and those beyond 63 bits, stand for
        their low 63 bits. None: none is given."""
        return None if self.seed in (None, NOT_SET) else self.seed % SEEDS

    @property
    def is_bound(self) -> bool:
        """Whether there may be a grammar, of tools or of the text, so that one is to be
        compiled."""
        return "grammar" in self.own or any(map(self.given, ("response_format", "text", "tools")))

    def left_out(self) -> list[str]:
        """The fields that nobody knows, and that ask for something.

        Raises:
            InputError: without one the answer would mean something else.
        """
        found = [name for name, value in (self.model_extra or {}).items() if value]
        for name in found:
            if name in WITHOUT:
                raise InputError(f"{name} is not supported; valid: leave it out", name)
        known = [*OWN, *(name for name in SAMPLING if name not in Body.model_fields)]
        for name in self.own:
            check_choice("tokenswift", name, tuple(known))
        return found

    def template_options(self) -> dict[str, Any]:
        """What the chat template is given besides messages and tools; it takes what it knows."""
        effort = self.given("reasoning_effort") or (self.given("reasoning") or {}).get("effort")
        made = {
            "reasoning_effort": effort,
            "continue_final_message": self.given("continue_final_message"),
        }
        made |= {"enable_thinking": False} if effort == "none" else {}
        made |= self.given("chat_template_kwargs") or {}
        return {name: value for name, value in made.items() if value is not None}

    def request(
        self, llm: Any, settings: Settings, seed: int, before: Sequence[Mapping[str, Any]] = ()
    ) -> Request:
        """The generation that the body asks for.

        Args:
            llm: the ``LLM``.
            seed: where the body names none.
            before: messages of earlier responses.
        Raises:
            InputError: naming the field, its value and what is valid.
        """
        if self.given("n") not in (None, 1):
            raise InputError(f"n is {self.given('n')}; valid: 1, in a request for each text", "n")
        self._check_stops(llm.target.vocab_size)
        prompt = self.whole_prompt(llm.has_chat_template, before)
        how = self._arguments(seed)
        tools = self.tools_asked()
        limit = llm.target.rotary.limit or LARGEST
        most = min(settings.max_prompt or LARGEST, limit - 1)
        size = len(str(prompt)) + len(str(tools.forms if tools else ""))
        if size > CHARACTERS * most:  # it is not encoded
            room = f"{CHARACTERS * most:,}, for {most:,} tokens"
            raise InputError(f"the prompt is {size:,} characters; valid: up to {room}", self.asked)
        if is_chat(prompt):
            how |= {"name": self.asked, "template_options": self.template_options() or None}
            request, _ = llm.chat_request(prompt, tools, **how)
        else:
            request = llm.request(prompt, llm.encode(prompt), TOKENS, **how)
        size = len(request.prompt)
        if size > most:
            raise InputError(f"the prompt is {size:,} tokens; valid: up to {most:,}", self.asked)
        rest = min(settings.max_tokens, limit - size)
        return replace(request, max_new_tokens=self._new_tokens(request.max_new_tokens, rest))

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

    def _new_tokens(self, default: int, rest: int) -> int:
        """How many tokens there may be, of which ``rest`` at most.

        Raises:
            InputError: the length, or the least length, is out of range.
        """
        field, wanted = self.length()
        if wanted == NOT_SET:
            wanted = rest
        if wanted is not None and not 1 <= wanted <= rest:
            raise InputError(f"{field} is {wanted}; valid: an integer from 1 to {rest:,}", field)
        new_tokens = min(default, rest) if wanted is None else wanted
        least = self.min_tokens or 0
        if least > new_tokens:
            text = f"min_tokens is {least}, {field} {new_tokens:,}"
            valid = f"up to {new_tokens:,}, or a larger {field}"
            raise InputError(f"{text}; valid: {valid}", "min_tokens")
        return new_tokens

    def _arguments(self, seed: int) -> dict[str, Any]:
        """Arguments of a generation, but for its prompt and length."""
        given = {
            name: self.own.get(name, self.given(name))
            for name in (*SAMPLING, "strategy", "on_loop")
        }
        given["seed"] = seed if self.sampler_seed is None else self.sampler_seed
        if self.top_k == NOT_SET:
            given["top_k"] = 0  # as vLLM has it: all tokens
        if given["top_p"] == 0:  # the likeliest token alone
            given |= {"top_p": None, "temperature": 0}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        given["stop"] = [*filter(None, stop), *([token] for token in self.stop_token_ids or ())]
        given["ignore_eos"] = self.own.get("ignore_eos") or bool(self.ignore_eos)
        form = Grammar.of_format((self.given("text") or {}).get("format"), "text.format")
        given["response_format"] = form or self.response_format
        return {name: value for name, value in given.items() if value is not None}

    def places(self, before: Sequence[Mapping[str, Any]]) -> list[str]:
        """What the client calls each message of the prompt, "" for those it has not sent."""
        return []

    def in_field_names(
        self, error: InputError, before: Sequence[Mapping[str, Any]] = ()
    ) -> InputError:
        """An error of the engine, in the names of fields that the client knows.

        Args:
            before: messages of earlier responses.
        """
        if isinstance(error, QueueFull):
            return error
        names = {
            **ENGINE_NAMES,
            "prompt": self.asked,
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
        text = renamed(text, self.asked, self.places(before))
        field = error.field or (word if word in names else None)
        if field == "grammar":
            field = self._grammar_field()
        named = names.get(field, field) if field else None
        return InputError(text, field_of(named) if named else None)

    def _grammar_field(self) -> str:
        """The field that asks for the text's grammar."""
        fields_with_grammars = ("response_format", "text", "tools")
        if "grammar" in self.own:
            return "tokenswift"
        return next((name for name in fields_with_grammars if self.given(name)), "tokenswift")
