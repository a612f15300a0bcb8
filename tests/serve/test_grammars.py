"""Grammars on a server: each text is what ``LLM.generate`` writes for the same request alone, whatever else
is in its passes; and what is hostile is refused."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.lossless.test_grammar import GROWING
from tests.serve.conftest import Running, Start
from tests.serve.test_openai import CHAT, COLOUR, streamed
from tokenswift import LLM, Grammar
from tokenswift.sampling.masks import LEFT, NoMask
from tokenswift.serve.errors import fault_of
from tokenswift.types import Generation

NEW = 60
LONG = "The harbour lay still, and nobody spoke of the weather. " * 3
LIST: dict[str, Any] = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 9}
REGEX = "(ab|ac|a[0-9]){9,40}"

GBNF = 'root ::= "(" root ")" | [a-d]+'


def held(kind: str, value: Any) -> dict[str, Any]:
    """The field that binds a text."""
    return {"structured_outputs": {kind: value}}


#: fields of a completion → the same as arguments of ``LLM.generate``
COMPLETIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({**held("regex", REGEX), "n": 3}, {"grammar": Grammar.regex(REGEX)}),
    ({**held("json", LIST), "n": 2}, {"grammar": Grammar.json_schema(LIST)}),
    (held("choice", ["yes", "no", LONG]), {"grammar": Grammar.choice(["yes", "no", LONG])}),
    ({"n": 2, "stop": ["e", "\n"]}, {"stop": ["e", "\n"]}),
    (
        {**held("regex", REGEX), "stop": ["a7", "aca"]},
        {"grammar": Grammar.regex(REGEX), "stop": ["a7", "aca"]},
    ),
    (
        {**held("regex", REGEX), "max_tokens": 11, "temperature": 2.0},
        {"grammar": Grammar.regex(REGEX), "max_new_tokens": 11, "temperature": 2.0},
    ),
    (
        {**held("grammar", GBNF), "logit_bias": {"97": 2}, "n": 2},
        {"grammar": Grammar.gbnf(GBNF), "logit_bias": {"97": 2}},
    ),
    (
        {**held("json", LIST), "frequency_penalty": 0.5, "tokenswift": {"strategy": "tokenswift"}},
        {"grammar": Grammar.json_schema(LIST), "frequency_penalty": 0.5},
    ),
]


def alone(llm: LLM, prompt: Any, seed: int, **more: Any) -> Generation:
    """The text of plain decoding."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "seed": seed, **more}
    return llm.generate(prompt, strategy="autoregressive", **options)


def written(server: Running, path: str, body: dict[str, Any], stream: bool) -> list[tuple[str, str]]:
    """Text and end of each choice."""
    if not stream:
        choices = server.post(path, body).json()["choices"]
        return [(one["message"]["content"] if "message" in one else one["text"], one["finish_reason"])
                for one in choices]  # fmt: skip
    texts, ends = [""] * body.get("n", 1), [""] * body.get("n", 1)
    for line in streamed(server, path, body)[:-1]:
        (one,) = json.loads(line)["choices"]
        texts[one["index"]] += one["delta"].get("content", "") if "delta" in one else one["text"]
        ends[one["index"]] = one["finish_reason"] or ends[one["index"]]
    return list(zip(texts, ends, strict=True))


def test_texts_of_one_batch(start: Start, slowed: Any) -> None:
    """Grammars beside each other and beside none, several texts a request, beginnings that are shared,
    streams, stop texts, seeds, and texts that are cut: all concurrently."""
    llm, slow = slowed
    server = start(llm, max_choices=8)
    slow.pause = 0.002  # so that all of them come before the first has ended
    asked: list[tuple[str, dict[str, Any], bool, list[Generation]]] = []
    for i, (fields, arguments) in enumerate(COMPLETIONS):
        body = {"prompt": LONG, "max_tokens": NEW, "seed": 10 * i, **fields}
        wanted = [alone(llm, LONG, 10 * i + j, **arguments) for j in range(body.get("n", 1))]
        asked += [("/v1/completions", body, stream, wanted) for stream in (False, True)]
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
    body = {"messages": CHAT, "max_tokens": NEW, "seed": 3, "response_format": form, "n": 2}
    wanted = [alone(llm, CHAT, seed, response_format=form) for seed in (3, 4)]
    asked += [("/v1/chat/completions", body, stream, wanted) for stream in (False, True)]
    with ThreadPoolExecutor(len(asked)) as pool:
        made = list(pool.map(lambda one: written(server, *one[:3]), asked))
    slow.pause = 0.0
    ends = {"length": "length", "eos": "stop", "stop": "stop"}
    for (_, body, stream, wanted), found in zip(asked, made, strict=True):
        assert found == [(one.text, ends[one.finish_reason]) for one in wanted], (body, stream)
    figures = server.answers.scheduler.figures()
    assert figures.reused > len(LONG) and figures.steps > 3 * figures.passes
    assert {one.finish_reason for *_, wanted in asked for one in wanted} == set(ends)


def test_a_text_that_is_cut_is_said_to_be(server: Running) -> None:
    """A beginning of a valid text has the end "length", and only a whole one "stop"."""
    ended = {True: 0, False: 0}
    for new in range(1, 9):
        body = {"prompt": "a", "max_tokens": new, "seed": 1, "structured_outputs": {"regex": "abc(de)?f"}}
        ((text, reason),) = written(server, "/v1/completions", body, False)
        whole = re.fullmatch("abc(de)?f", text) is not None
        assert reason in (("stop", "length") if whole else ("length",)), (new, text)
        ended[reason == "stop"] += 1
    assert ended[True] and ended[False] >= 4


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DEEP = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(3000)}
WORDS = "start: " + " | ".join(f'"w{i}"' for i in range(3000))
#: fields of a request, and why it is refused
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": ENDLESS}}, "no mask for position 2 (parser error: Too many items"),
    ({"structured_outputs": {"json": {"$defs": DEEP, "$ref": "#/$defs/d0"}}}, "llguidance crashes on it"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "no text is possible"),
    ({"structured_outputs": {"json": {"enum": [f"{i}" for i in range(50_000)]}}}, "more than 20,000 values"),
    ({"structured_outputs": {"grammar": WORDS}}, "row has 3001 items; max is 2000"),
    ({"structured_outputs": {"grammar": 'start: "q" A\nA: /a/ & /b/'}}, "no text is possible"),
]


def test_hostile_grammars(server: Running) -> None:
    """They are refused with their reason, and others are served meanwhile."""
    free = {"prompt": "a", "max_tokens": 9, "seed": 1}
    with ThreadPoolExecutor(len(HOSTILE) + 1) as pool:
        made = [pool.submit(server.post, "/v1/completions", {**free, **fields}) for fields, _ in HOSTILE]
        assert server.post("/v1/completions", free).status_code == 200
    for (_, says), reply in zip(HOSTILE, (one.result() for one in made), strict=True):
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["type"] == "invalid_request_error", says
        assert says in error["message"] and "\n" not in error["message"] and len(error["message"]) < 500
    large = {"structured_outputs": {"json": {"enum": [f"option {i}" for i in range(3000)]}}, "max_tokens": 20}
    ((text, reason),) = written(server, "/v1/completions", {**free, **large}, False)
    assert re.fullmatch('"option [0-9]{1,4}"', text) and reason == "stop"
    ((text, reason),) = written(server, "/v1/completions", {**free, **held("choice", ["a" * 50_000])}, False)
    assert text == "a" * 9 and reason == "length"


def test_a_grammar_that_fails_midway(server: Running, llm: LLM) -> None:
    """The answer is an error, and one that clients do not take for the server's; texts beside it go on."""
    body = {"prompt": "a", "max_tokens": 60, "seed": 1, "structured_outputs": {"regex": GROWING}}
    says, free = "the grammar gives no mask for position ", {"prompt": "b", "max_tokens": 60, "seed": 2}
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(written, server, "/v1/completions", free, False)
        *chunks, last = streamed(server, "/v1/completions", body)
        assert beside.result()[0][0] == alone(llm, "b", 2, max_new_tokens=60).text
    text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    assert re.fullmatch("[ab]+", text) and all('finish_reason":null' in chunk for chunk in chunks)
    reply = server.post("/v1/completions", {**body, "n": 2})
    assert reply.status_code == 400
    for error in (json.loads(last)["error"], reply.json()["error"]):
        assert says in error["message"] and error["type"] == "invalid_request_error"
    asked = {"input": "a", "max_output_tokens": 60, "seed": 1, "structured_outputs": {"regex": GROWING}}
    failed = server.post("/v1/responses", asked).json()
    assert failed["status"] == "failed" and failed["error"]["code"] == "invalid_prompt"
    assert says in failed["error"]["message"]


def test_a_fault_of_ours_is_not_blamed_on_the_request() -> None:
    """A text that our own masks let out of its grammar is an error of the server's."""
    assert fault_of(NoMask(3, LEFT), None) is None
    assert isinstance(fault_of(NoMask(3, "lexer error: too many expressions"), None), NoMask)
