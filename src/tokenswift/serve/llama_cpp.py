"""``/infill`` in the form of llama.cpp's server, which plugins of editors ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec
from pydantic import AliasChoices, BaseModel, Field

from tokenswift.chat.prompts import Prompt
from tokenswift.engine.infill import Infill
from tokenswift.serve.answer import GRAMMAR, Answer
from tokenswift.serve.base import Body
from tokenswift.serve.fields import MOST_MESSAGES, Quick
from tokenswift.serve.objects import PING, QUIET, data, own_fields, why_unfinished
from tokenswift.serve.refusals import Refused

#: why a text ended → llama.cpp's word for it
STOP_TYPES = {"length": "limit", "eos": "eos", "stop": "word", "loop": "limit", GRAMMAR: "limit"}
#: fields of its server about its memory, its slots, and the order of its samplers
OTHER_FIELDS = frozenset(
    "cache_prompt samplers id_slot t_max_prompt_ms n_indent n_keep n_probs n_cache_reuse "
    "timings_per_token return_progress return_tokens lora typical_p".split()
)
MOST_FIELDS = 64  # that a reply is cut down to


class ExtraFile(BaseModel):
    """Another file of the project.

    Attributes:
        filename: its name.
        text: what it holds.
    """

    filename: str = ""
    text: str = ""


class InfillBody(Body):
    """The body of ``/infill``.

    Attributes:
        input_prefix: the text before the gap.
        input_suffix: the text behind it.
        input_extra: other files, the nearest last.
        prompt: what the text in the gap begins with.
        n_predict: new tokens at most, -1: as many as fit; 0: none, the prompt is read alone.
        t_max_predict_ms: milliseconds of writing, after which a text ends that has a line; 0: any.
        response_fields: the fields of the reply that are wanted; default: all.
    """

    kind: ClassVar[str] = "infill"
    id_prefix: ClassVar[str] = "infill-"
    prompt_field: ClassVar[str] = "input_prefix"
    length_fields: ClassVar[tuple[str, ...]] = ("n_predict",)

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraFile], Quick(), Field(max_length=MOST_MESSAGES)] = []
    prompt: str = ""
    n_predict: int | None = Field(
        default=None, validation_alias=AliasChoices("n_predict", "max_tokens")
    )
    t_max_predict_ms: float = 0
    response_fields: Annotated[list[str], Quick(), Field(max_length=MOST_FIELDS)] = []
    repetition_penalty: float | None = Field(
        default=None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )

    def full_prompt(self, has_template: bool, before: Sequence[Mapping[str, object]]) -> Prompt:
        return self.input_prefix

    def gap(self) -> Infill:
        extra = [(file.filename, file.text) for file in self.input_extra]
        return Infill(self.input_prefix, self.input_suffix, extra, self.prompt)

    @property
    def writes_nothing(self) -> bool:
        return self.n_predict == 0

    @property
    def most_seconds(self) -> float:
        return self.t_max_predict_ms / 1000

    def ignored_fields(self) -> list[str]:
        return [name for name in super().ignored_fields() if name not in OTHER_FIELDS]


def infill_object(answer: Answer, model: str) -> dict[str, object]:
    """A finished text in a gap."""
    body = answer.body
    begun = answer.record.created
    first = answer.first_step or begun
    last = answer.last_step or first
    prompt_tokens = answer.record.prompt_tokens
    new_tokens = len(answer.pieces)
    full_reply: dict[str, object] = {
        "index": 0,
        "content": answer.text,
        "id_slot": 0,
        "stop": True,
        "model": model,
        "tokens_predicted": new_tokens,
        "tokens_evaluated": prompt_tokens,
        "tokens_cached": prompt_tokens + new_tokens,
        "truncated": False,
        "stop_type": STOP_TYPES.get(answer.reason, "none"),
        "stopping_word": "",
        "generation_settings": {},
        "timings": {
            **_timing("prompt", prompt_tokens, first - begun),
            **_timing("predicted", new_tokens, last - first),
        },
        "tokenswift": own_fields(answer),
    }
    fields = body.response_fields if isinstance(body, InfillBody) else []
    if not fields:
        return full_reply
    selected = {path: _at(full_reply, path) for path in fields}
    return {path: value for path, value in selected.items() if value is not None}


def _timing(name: str, tokens: int, seconds: float) -> dict[str, float]:
    """Figures of tokens that were read or written in some time."""
    took = max(seconds, 1e-6)
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1000 * took,
        f"{name}_per_token_ms": 1000 * took / max(tokens, 1),
        f"{name}_per_second": tokens / took,
    }


def _at(reply: object, path: str) -> object:
    """The value of a reply at a path such as ``timings/prompt_ms``; None: there is none."""
    value = reply
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def infill_json(answer: Answer, model: str) -> bytes:
    """`infill_object`, as it is sent."""
    return msgspec.json.encode(infill_object(answer, model))


async def stream_infill(answer: Answer, model: str) -> AsyncIterator[bytes]:
    """The events of a text in a gap as it is written."""
    yield PING
    async for stretch in answer.follow(QUIET):
        if stretch is None:
            yield PING
            continue
        start, end = stretch
        yield data({"index": 0, "content": "".join(answer.pieces[start:end]), "stop": False})
    if not answer.reason:
        yield data(Refused(answer.status, why_unfinished(answer), code="stopped").body)
        return
    yield data({**infill_object(answer, model), "content": answer.tail, "stop": True})
