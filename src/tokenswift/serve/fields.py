"""Fields of requests: their types, those that are refused, and names of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field, PrivateAttr

from tokenswift.config.sampling import MOST_BIASES, MOST_TEXTS, SamplingParams

MOST_MESSAGES = 4096  # of a conversation
MOST_ENTRIES = 32  # of an object of settings
NOT_SET = -1  # as other servers have it: of a length, as many tokens as fit

#: fields that are not served, and without which an answer would mean something else
REFUSED_FIELDS = frozenset(
    "functions function_call conversation prompt suffix audio documents chat_template "
    "truncate_prompt_tokens "
    "allowed_token_ids use_beam_search echo include_stop_str_in_output logprobs top_logprobs "
    "prompt_logprobs "
    "grammar json_schema guided_json guided_regex guided_choice guided_grammar structured_outputs "
    "previous_response_id instructions input messages".split()
)
#: fields that may ask for a grammar of the text
GRAMMAR_FIELDS = ("response_format", "text", "tools")
#: keys of ``tokenswift`` besides settings of the sampling
OWN_SETTINGS = ("strategy", "ignore_eos", "on_loop")
SAMPLING = [field.name for field in fields(SamplingParams) if field.name != "greedy"]
#: names of the engine's arguments that clients know by others
ENGINE_NAMES = {"template_options": "chat_template_kwargs"}


class Quick(FailFast):
    """Of a list, the first entry that is wrong is the only one looked at; may stand in a union."""

    __hash__ = object.__hash__  # type: ignore[assignment]


Several = Annotated[list[object] | None, Field(max_length=MOST_TEXTS)]
Object = Annotated[dict[str, object] | None, Field(max_length=MOST_ENTRIES)]
ClientMessages = Annotated[
    list[dict[str, object]], Quick(), Field(min_length=1, max_length=MOST_MESSAGES)
]
#: any number of 64 bits, with a sign or without
Seed = Annotated[int | None, Field(ge=-(2**63), lt=2**64)]


class BodyFields(BaseModel):
    """The fields of all bodies."""

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
    logit_bias: Annotated[dict[str, object] | None, Field(max_length=MOST_BIASES)] = None
    min_tokens: int | None = None
    bad_words: Several = None
    stop: str | Several = None
    stop_token_ids: Annotated[list[int] | None, Quick(), Field(max_length=MOST_TEXTS)] = None
    ignore_eos: bool | None = None
    seed: Seed = None
    response_format: object = None
    tokenswift: Object = Field(
        default=None, description="settings of this server alone, see its docs"
    )
    _unbound: frozenset[str] = PrivateAttr(default=frozenset())
    _sample: int = PrivateAttr(default=0)

    @property
    def own_settings(self) -> Mapping[str, object]:
        """The settings that no other server has."""
        return self.tokenswift or {}

    def value_of(self, name: str) -> object:
        """The value of a field that not all bodies have; None where this one has none of the name,
        whatever a client has sent."""
        return getattr(self, name) if name in type(self).model_fields else None

    def settings_of(self, name: str) -> Mapping[str, object]:
        """The entries of a field that holds an object; none where it is not there."""
        value = self.value_of(name)
        return value if isinstance(value, Mapping) else {}
