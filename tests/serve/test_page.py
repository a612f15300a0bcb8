"""The page: what it may do, what it asks of the server, and a conversation where there is a
browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Running, Start
from tokenswift.serve.schemas import Responses

PAGE = (files("tokenswift.serve") / "page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
STYLE = PAGE.partition("<style>")[2].partition("</style>")[0]


def test_nothing_becomes_markup() -> None:
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in SCRIPT
    for text in (SCRIPT, STYLE):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"-src 'sha256-{digest}'" in PAGE, (
            f"the policy at the top of the page needs sha256-{digest}"
        )
    markup = PAGE.replace(SCRIPT, "").replace(STYLE, "")
    assert not re.search(r"\s(style|on\w+|src|href)=", markup), (
        "the policy forbids it, or it is from elsewhere"
    )


NUMBERS = json.loads(SCRIPT.partition("NUMBERS = ")[2].partition(";")[0])
#: a request as the page makes it, with all its settings
REQUEST: dict[str, Any] = {
    "background": True,
    "stream": True,
    "instructions": "Be brief.",
    "max_output_tokens": 40,
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "seed": 7,
    "tokenswift": {"strategy": "auto"},
    "input": [{"role": role, "content": "a"} for role in ("user", "assistant", "user")],
}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.iter_lines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_what_it_reads_is_what_the_server_writes(server: Running) -> None:
    assert set(NUMBERS) <= REQUEST.keys()
    assert REQUEST.keys() <= set(Responses.model_fields)
    with httpx.stream("POST", f"{server.url}/v1/responses", json=REQUEST, timeout=60) as first:
        name = first.headers["x-answer-id"]
        first_events = events(first)
    text = "".join(event.get("delta", "") for event in first_events)
    last = first_events[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    own_fields = last["response"]["tokenswift"]
    usage = last["response"]["usage"]
    assert own_fields["seed"] == 7
    assert 0 < own_fields["steps"] <= usage["output_tokens"]
    assert last["response"]["output"][0]["content"][0]["text"] == text
    # a page that was loaded again
    again = f"{server.url}/v1/responses/{name}?stream=true&starting_after=-1"
    with httpx.stream("GET", again, timeout=60) as second:
        assert second.headers["x-answer-id"] == name
        assert "".join(event.get("delta", "") for event in events(second)) == text


@pytest.mark.parametrize("allow", [False, True])
def test_it_offers_the_strategies_that_the_server_takes(start: Start, allow: bool) -> None:
    page = start(allow_strategies=allow).get("/").text
    assert "<option>auto<option>autoregressive" in page
    assert ("<option>magicdec" in page) is allow
    assert "<!--" not in page
