"""Grammars on a server: each text is what ``LLM.generate`` writes for the same request alone,
whatever else is in its passes; and what is hostile is refused."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

from tests.lossless.test_grammar import GROWING
from tests.serve.conftest import Running
from tests.serve.test_openai import COLOUR, streamed
from tokenswift import LLM, Grammar
from tokenswift.sampling.masks import LEFT, NoMask
from tokenswift.serve.refusals import fault_of

NEW = 60
GROWS = {"kind": "regex", "text": GROWING}
LIST: dict[str, object] = {
    "type": "array",
    "items": {"enum": [1, 22, 333]},
    "minItems": 2,
    "maxItems": 9,
}
REGEX = "(ab|ac|a[0-9]){9,40}"
LARK = 'start: "(" start ")" | /[a-d]+/'
FORM: dict[str, object] = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
#: fields of a request → the grammar of ``LLM.generate``
ASKED: list[tuple[dict[str, object], Grammar]] = [
    ({"tokenswift": {"grammar": {"kind": "regex", "text": REGEX}}}, Grammar.regex(REGEX)),
    ({"response_format": {"type": "json_schema", "schema": LIST}}, Grammar.json_schema(LIST)),
    (
        {"tokenswift": {"grammar": {"kind": "regex", "text": "yes|no"}}},
        Grammar.choice(["yes", "no"]),
    ),
    ({"tokenswift": {"grammar": {"kind": "lark", "text": LARK}}}, Grammar.lark(LARK)),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": FORM}, Grammar.json_schema(COLOUR)),
    ({"response_format": {"type": "json_object", "schema": COLOUR}}, Grammar.json_schema(COLOUR)),
]


def test_texts_are_those_of_generate(server: Running, llm: LLM) -> None:
    """Of all grammars at once."""
    body = {"prompt": "A colour: ", "max_tokens": NEW, "seed": 3}
    with ThreadPoolExecutor(len(ASKED)) as pool:
        replies = list(
            pool.map(lambda one: server.post("/v1/completions", {**body, **one[0]}).json(), ASKED)
        )
    for (_, grammar), reply in zip(ASKED, replies, strict=True):
        wanted = llm.generate(body["prompt"], NEW, "autoregressive", seed=3, grammar=grammar)
        (choice,) = reply["choices"]
        assert choice["text"] == wanted.text, grammar
        assert choice["finish_reason"] == {"eos": "stop"}.get(wanted.finish_reason, "length")


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DEEP = {
    f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
    for i in range(3000)
}
ROOT = {"$defs": DEEP, "$ref": "#/$defs/d0"}
#: a schema or a choice, and why it is refused
HOSTILE: list[tuple[dict[str, object], str]] = [
    (
        {"kind": "json_schema", "text": json.dumps(ENDLESS)},
        "no mask for position 2 (parser error: Too many",
    ),
    ({"kind": "choice", "text": "5"}, "grammar.kind is 'choice'; valid: json_schema, regex, lark"),
    ({"kind": "json_schema", "text": json.dumps(ROOT)}, "ends the process that tries it"),
]


def test_hostile_grammars(server: Running) -> None:
    """They are refused with their reason, or end their text with it, and others are served
    meanwhile."""
    free = {"prompt": "a", "max_tokens": 9, "seed": 1}
    with ThreadPoolExecutor(len(HOSTILE) + 1) as pool:
        bodies = [{**free, "tokenswift": {"grammar": grammar}} for grammar, _ in HOSTILE]
        waiting = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        assert server.post("/v1/completions", free).status_code == 200
    for (_, says), reply in zip(HOSTILE, (one.result() for one in waiting), strict=True):
        if reply.status_code == 200:  # it has a first token
            assert says in reply.json()["tokenswift"]["error"]
            assert reply.json()["choices"][0]["finish_reason"] == "length"
            continue
        error = reply.json()["error"]
        assert reply.status_code == 400, says
        assert error["type"] == "invalid_request_error", says
        assert says in error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 500


def test_a_grammar_that_fails_midway(server: Running, llm: LLM) -> None:
    """The text ends there, as one that was cut, with the reason; texts beside it go on. A response
    is an error, and one that clients do not take for the server's."""
    body = {"prompt": "a", "max_tokens": 60, "seed": 1, "tokenswift": {"grammar": GROWS}}
    says = "the grammar gives no mask for position "
    free = {"prompt": "b", "max_tokens": 60, "seed": 2}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(server.post, "/v1/completions", free)
        *chunks, last = streamed(server, "/v1/completions", body)
        wanted = llm.generate("b", 60, "autoregressive", seed=2).text
        assert other.result().json()["choices"][0]["text"] == wanted
    assert last == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    assert re.fullmatch("[ab]+", text)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    reply = server.post("/v1/completions", body).json()
    texts = sorted((reply["choices"][0]["text"], text), key=len)
    assert texts[1].startswith(texts[0])  # the limit that ends them is shared
    for choice, own in (
        (choices[-1], choices[-1]["tokenswift"]),
        (reply["choices"][0], reply["tokenswift"]),
    ):
        assert choice["finish_reason"] == "length"
        assert own["ended_by"] == "grammar"
        assert own["error"].startswith(says)
    body = {"input": "a", "max_output_tokens": 60, "seed": 1, "tokenswift": {"grammar": GROWS}}
    failed = server.post("/v1/responses", body).json()
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "invalid_prompt"
    assert says in failed["error"]["message"]


def test_a_fault_of_ours_is_not_blamed_on_the_request() -> None:
    """A text that our own masks let out of its grammar is an error of the server's."""
    assert fault_of(NoMask(3, LEFT), None) is None
    assert isinstance(fault_of(NoMask(3, "lexer error: too many expressions"), None), NoMask)
