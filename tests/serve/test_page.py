"""The page: what it may do, and what it asks of the server. What it does in a browser is in
test_page_in_browser.py."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Running, Start
from tokenswift.serve.page import page_of, part
from tokenswift.serve.schemas import Responses

PAGE = page_of()
SCRIPT = part("page.js")
OWN_SCRIPTS = (SCRIPT, part("markdown.js"))
SCRIPTS = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)
STYLE = part("page.css")
POLICY = PAGE.partition('Content-Security-Policy" content="')[2].partition('"')[0]


def digest_of(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@pytest.mark.parametrize(
    "word",
    ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("],
)
def test_nothing_becomes_markup_but_by_the_sanitiser(word: str) -> None:
    assert all(word not in script for script in OWN_SCRIPTS)


def test_the_policy_names_every_script_and_the_style() -> None:
    assert len(SCRIPTS) == 4
    for script in SCRIPTS:
        assert digest_of(script) in POLICY.partition("script-src")[2].partition(";")[0]
    assert f"style-src 'sha256-{digest_of(STYLE)}'" in POLICY


def test_the_policy_is_strict() -> None:
    for rule in ("default-src 'none'", "connect-src 'self'", "require-trusted-types-for 'script'"):
        assert rule in POLICY
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_the_markup_has_no_code_and_nothing_from_elsewhere() -> None:
    markup = part("page.html")
    assert not re.search(r"\s(style|on\w+|src|href)=", markup)


def test_libraries_are_those_that_were_chosen_with_their_licences() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|.*`([0-9a-f]{64})` \|$", part("vendor/README.md"), re.M)
    assert len(rows) == 2
    for name, digest in rows:
        assert hashlib.sha256(part(f"vendor/{name}").encode()).hexdigest() == digest
    assert "Permission is hereby granted" in part("vendor/marked.LICENSE")
    assert "Apache License" in part("vendor/dompurify.LICENSE")


NUMBERS = json.loads(SCRIPT.partition("NUMBERS = ")[2].partition(";")[0])
#: a request as the page makes it, with all its settings
REQUEST: dict[str, object] = {
    "background": True,
    "stream": True,
    "instructions": "Be brief.",
    "max_output_tokens": 40,
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "seed": 7,
    "tokenswift": {"strategy": "auto", "on_loop": "copies"},
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
    assert "{strategies}" not in page
