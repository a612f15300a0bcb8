"""Chat templates behind the server: limits, options, orders of messages, answers that have begun."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.chats import TEMPLATE
from tests.serve.conftest import Running
from tokenswift import LLM

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_limits_are_a_400(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    body: dict[str, Any] = CHAT if "chat" in path else {"input": "Hi", "max_output_tokens": 2}
    with monkeypatch.context() as patch:
        patch.setattr(llm.source.codec, "chat_template", "{{ 'a' * 10**10 }}")
        refused = server.post(path, body)
    assert refused.status_code == 400
    assert (
        "the model's chat template takes too much memory; valid: up to" in refused.json()["error"]["message"]
    )
    assert server.post(path, body).status_code == 200


THINKS = "{% if enable_thinking is false %}quick{% else %}slow{% endif %}"


def test_options_of_the_template(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's field, and OpenAI's effort where the template knows how to do without thoughts."""
    monkeypatch.setattr(llm.source.codec, "chat_template", TEMPLATE + THINKS)
    client, asked = server.client(), {"model": "chatty", "max_tokens": 8, "seed": 5}
    quick = llm.chat(CHAT["messages"], 8, seed=5, template_options={"enable_thinking": False}).text
    slow = llm.chat(CHAT["messages"], 8, seed=5).text
    for more, wanted in (
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, quick),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, slow),
        ({"reasoning_effort": "none"}, quick),
        ({"reasoning_effort": "high"}, slow),
    ):
        found: Any = client.chat.completions.create(**asked, messages=CHAT["messages"], **more)  # type: ignore[arg-type]
        assert found.choices[0].message.content == wanted, more
    effort: Any = {"effort": "none"}
    found = client.responses.create(
        model="chatty", input="Hi", max_output_tokens=8, reasoning=effort, extra_body={"seed": 5}
    )
    assert found.output_text == quick
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs holds 'messages'; valid: names"):
        client.chat.completions.create(
            **asked, messages=CHAT["messages"], extra_body={"chat_template_kwargs": {"messages": []}}
        )  # type: ignore[call-overload]


def test_an_answer_that_has_begun_is_continued(server: Running, llm: LLM) -> None:
    """As vLLM's ``continue_final_message``; a second turn is never begun in silence."""
    messages: list[Any] = [*CHAT["messages"], {"role": "assistant", "content": "Well, "}]
    prompts = {
        None: llm.encode(messages),
        True: llm.encode(messages),
        False: llm.encode(messages, template_options={"continue_final_message": False}),
    }
    assert llm.source.codec.decode(prompts[None]).endswith("assistant: Well, ")
    assert llm.source.codec.decode(prompts[False]).endswith("assistant: Well, \nassistant:")
    for given, ids in prompts.items():
        more = {} if given is None else {"continue_final_message": given}
        found = server.client().chat.completions.create(
            model="chatty", messages=messages, max_tokens=8, seed=5, temperature=0.9, extra_body=more
        )
        wanted = llm.generate(
            ids, 8, sampling=replace(llm.default_sampling(messages), temperature=0.9, seed=5)
        )
        assert found.choices[0].message.content == wanted.text
    refused = server.post("/v1/chat/completions", {**CHAT, "continue_final_message": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "continue_final_message"
