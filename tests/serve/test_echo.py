"""Completions that tell of their prompts: what evaluation harnesses ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.serve.conftest import Running
from tests.serve.test_openai import CHAT, streamed, text
from tokenswift import LLM
from tokenswift.engine.detokenize import token_bytes

SAID = "The lamp at Zürich"
IDS = [72, 101, 108, 256, 108, 111]  # a special token among them
NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def rows(llm: LLM, ids: list[int], top: int = 1) -> list[tuple[float, dict[str, float]] | None]:
    """Of each token, by transformers' own model."""
    with torch.no_grad():
        known = llm.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    made: list[tuple[float, dict[str, float]] | None] = [None]
    for row, token in zip(known, ids[1:], strict=True):
        best = row.topk(top)
        tops = zip(best.values.tolist()[::-1], best.indices.tolist()[::-1], strict=True)
        its = row[token].item()
        made.append((its, {name(llm, token): its} | {name(llm, other): value for value, other in tops}))
    return made


def name(llm: LLM, token: int) -> str:
    return text(token_bytes(llm.tokenizer, token))


def check(llm: LLM, found: dict[str, Any], ids: list[int], top: int = 1) -> None:
    """The first token's are null, and the others transformers' own."""
    assert set(found) == {*NAMES}
    first, *due = rows(llm, ids, top)
    assert first is None and found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["tokens"][: len(ids)] == [name(llm, token) for token in ids]
    for at, one in enumerate(due, 1):
        assert one is not None
        assert found["token_logprobs"][at] == pytest.approx(one[0], abs=1e-4)
        assert found["top_logprobs"][at] == pytest.approx(one[1], abs=1e-4)


@pytest.mark.parametrize("new", [0, 1])
@pytest.mark.parametrize("prompt", [SAID, IDS], ids=["text", "ids"])
def test_what_a_harness_asks_for(server: Running, llm: LLM, prompt: Any, new: int) -> None:
    """lm-eval's ``local-completions`` sends this, and adds up what stands behind its context."""
    ids = llm.encode(prompt)
    made = server.client().completions.create(
        model="chatty", prompt=prompt, max_tokens=new, temperature=0, logprobs=1, seed=1234, echo=True
    )
    (choice,), usage = made.choices, made.usage
    assert choice.logprobs is not None and usage is not None
    found: Any = choice.logprobs.to_dict()
    check(llm, found, ids)
    assert {len(found[one]) for one in NAMES} == {len(ids) + new}
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), new)
    assert choice.finish_reason == "length"
    said = prompt if isinstance(prompt, str) else llm.tokenizer.decode(ids)
    assert choice.text.startswith(said) and (choice.text == said or new)
    shown = [*zip(found["tokens"], found["text_offset"], strict=True)]
    if isinstance(prompt, str):  # the tokenizer begins with a token that the text does not have
        assert shown.pop(0) == ("<s>", 0)
    for token, place in shown:
        assert "\ufffd" in token or choice.text[place:].lstrip("\ufffd").startswith(token)
    assert found["text_offset"][: len(ids)] == sorted(found["text_offset"][: len(ids)])


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}], ids=["text", "logprobs"])
@pytest.mark.parametrize("new", [0, 12])
def test_streams(server: Running, more: dict[str, Any], new: int) -> None:
    """The prompt comes first, in an event of its own; joined they are the whole answer."""
    own = {"ignore_eos": True}
    body = {"prompt": [SAID, "x"], "max_tokens": new, "seed": 5, "echo": True, **more, "tokenswift": own}
    whole = server.post("/v1/completions", body).json()["choices"]
    *lines, done = streamed(server, "/v1/completions", body)
    assert done == "[DONE]"
    events = [json.loads(line)["choices"][0] for line in lines]
    for choice, prompt in zip(whole, (SAID, "x"), strict=True):
        mine = [event for event in events if event["index"] == choice["index"]]
        assert mine[0]["text"] == prompt and "".join(one["text"] for one in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
        told = [one["logprobs"] for one in mine if one["logprobs"]]
        if not more:
            assert not told and choice["logprobs"] is None
            continue
        assert told[0]["token_logprobs"][0] is None
        assert {part: sum((one[part] for one in told), []) for part in NAMES} == choice["logprobs"]


BAD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("chat/completions", {"messages": CHAT, "echo": True}, "echo is not supported; valid: "),
    ("responses", {"input": "x", "echo": True}, "echo is not supported; valid: "),
    ("completions", {"max_tokens": 0}, "max_tokens is 0; valid: an integer from 1 to 32,768, or 0 with echo"),
    ("completions", {"max_tokens": 0, "echo": False}, "max_tokens is 0; valid: an integer from 1 to"),
    ("completions", {"max_tokens": -2, "echo": True}, "max_tokens is -2; valid: an integer from 0 to 32,768"),
    ("completions", {"echo": True, "logprobs": 21}, "logprobs is 21; valid: "),
    ("completions", {"prompt_logprobs": 21}, "prompt_logprobs is 21; valid: "),
    ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs cannot be streamed"),
    (
        "completions",
        {"tokenswift": {"logprobs_mode": "raw"}},
        "tokenswift.logprobs_mode is 'raw'; valid: ",
    ),
)


@pytest.mark.parametrize(("path", "body", "message"), BAD)
def test_bad_input(server: Running, path: str, body: dict[str, Any], message: str) -> None:
    asked = body if path != "completions" else {"prompt": "x", **body}
    found = server.post(f"/v1/{path}", asked)
    assert found.status_code == 400 and found.json()["error"]["message"].startswith(message)
