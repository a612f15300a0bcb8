"""A model's chat template that asks for too much, asked through the server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.conftest import Running
from tokenswift import LLM

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


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
