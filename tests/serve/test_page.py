"""The page: what it may do, what it asks of the server, and a conversation where there is a browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve import browser
from tests.serve.browser import Browser
from tests.serve.conftest import Running, Start
from tokenswift import LLM
from tokenswift.serve.schemas import Responses

PAGE = (files("tokenswift.serve") / "page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
STYLE = PAGE.partition("<style>")[2].partition("</style>")[0]


def test_nothing_becomes_markup() -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert word not in SCRIPT
    markup = PAGE.replace(SCRIPT, "").replace(STYLE, "")
    assert not re.search(r"\s(style|on\w+|src|href)=", markup), (
        "the policy forbids it, or it is from elsewhere"
    )


def test_every_field_has_a_label() -> None:
    labels = set(re.findall(r'<label[^>]* for="(\w+)"', PAGE))
    inside = re.findall(
        r"<label(?:(?!</label>).)*?<(?:input|select|textarea)[^>]* id=\"(\w+)\"", PAGE, re.DOTALL
    )
    fields = set(re.findall(r'<(?:input|select|textarea)[^>]* id="(\w+)"', PAGE))
    assert fields == labels | set(inside) and {"prompt", "system", "key", "seed"} <= fields
    assert set(re.findall(r'\$\("(\w+)"\)', SCRIPT)) <= set(re.findall(r'id="(\w+)"', PAGE))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme: str) -> None:
    light, dark = re.findall(r":root\{([^}]*)\}", STYLE)
    named = dict(re.findall(r"--(\w+):(#\w+)", dark if scheme == "dark" else light))

    def brightness(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, other: str) -> float:
        a, b = sorted((brightness(named[one]), brightness(named[other])))
        return (b + 0.05) / (a + 0.05)

    for name in ("fg", "soft", "head", "gram", "chain", "other", "bad"):
        for ground in ("bg", "panel"):
            assert contrast(name, ground) >= 4.5, f"{name} on {ground}"
    assert contrast("rule", "bg") >= 3 and contrast("focus", "bg") >= 3


def test_strategies_are_those_of_the_server(server: Running) -> None:
    options = PAGE.partition('id="strategy">')[2].partition("</select>")[0]
    names = re.findall(r"<option>(\w+)", options)
    assert "auto" in names
    for name in (*names, "nobody"):
        body = {"input": "Hi", "max_output_tokens": 1, "tokenswift": {"strategy": name}}
        said = server.post("/v1/responses", body).text  # some want heads or a draft model
        assert ("strategy is" in said) == (name == "nobody"), said


NUMBERS = json.loads(SCRIPT.partition("NUMBERS = ")[2].partition(";")[0])
#: a request as the page makes it, with all its settings
ASKED: dict[str, Any] = {
    "background": True,
    "stream": True,
    "input": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "instructions": "Be brief.",
    "max_output_tokens": 40,
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "seed": 7,
    "tokenswift": {"strategy": "auto", "details": True},
}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.iter_lines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_what_it_reads_is_what_the_server_writes(server: Running) -> None:
    assert set(NUMBERS) <= ASKED.keys() and ASKED.keys() <= set(Responses.model_fields)
    with httpx.stream("POST", f"{server.url}/v1/responses", json=ASKED, timeout=60) as first:
        name = first.headers["x-answer-id"]
        told = events(first)
    text, steps = "", 0
    for event in told:
        if event["type"] == "response.output_text.delta" and "tokenswift" in event:
            own = event["tokenswift"]
            assert sum(own["chars"]) == len(event["delta"]) and len(own["sources"]) == len(own["chars"])
            steps += sum(size for size, _ in own["steps"])
        text += event.get("delta", "")
    last = told[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    assert last["response"]["tokenswift"]["seed"] == 7
    assert last["response"]["output"][0]["content"][0]["text"] == text and steps > 0
    again = f"{server.url}/v1/responses/{name}?stream=true&starting_after=-1"  # a page that was loaded again
    with httpx.stream("GET", again, timeout=60) as second:
        assert second.headers["x-answer-id"] == name
        assert "".join(event.get("delta", "") for event in events(second)) == text


def test_a_stopped_answer_says_so_to_its_readers(start: Start, slowed: Any) -> None:
    llm, slow = slowed
    server = start(llm)
    slow.pause = 0.02
    body = {**ASKED, "max_output_tokens": 900, "tokenswift": {"details": True, "ignore_eos": True}}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as reading:
        name = reading.headers["x-answer-id"]
        assert server.post(f"/v1/responses/{name}/cancel").status_code == 200
        assert events(reading)[-1]["type"] == "response.incomplete"
    slow.pause = 0.0
    query = "stream=true&starting_after=-1"  # who was told too early asks again
    with httpx.stream("GET", f"{server.url}/v1/responses/{name}?{query}", timeout=60) as again:
        last = events(again)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert last["response"]["incomplete_details"] is None
    assert server.post("/v1/responses/resp_nothing/cancel").status_code == 404


# ---- in a browser ------------------------------------------------------------------------------------------

LONG, KEY = 900, "a-key-of-the-page's-tests"


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    pytest.importorskip("websockets", reason="the page is not looked at: there is no package websockets")
    if browser.found() is None:
        pytest.skip(f"the page is not looked at: there is no browser ({', '.join(browser.NAMES)})")
    made = Browser(tmp_path / "browser")
    yield made
    made.close()


def ask(window: Browser, text: str) -> None:
    window.run("$('prompt').focus()")
    window.type(text)
    window.press("Enter", 13)


#: the page's requests ask for texts that no token of the end cuts short
ENDLESS = """endless = fetch; fetch = (url, options) => {
  if (options?.body) {
    const body = JSON.parse(options.body);
    body.tokenswift.ignore_eos = true;
    options = {...options, body: JSON.stringify(body)};
  }
  return endless(url, options);
}; 1"""


def state(server: Running, name: str, **more: Any) -> str:
    return server.get(f"/v1/responses/{name}", **more).json()["status"]


def test_a_conversation(window: Browser, server: Running, llm: LLM) -> None:
    window.go(server.url)
    assert window.run("document.activeElement.id + $('model').textContent") == "promptchatty"
    window.run("$('max_output_tokens').value = 12; $('seed').value = 7; $('system').value = 'Be brief.'; 1")
    window.type("<b>one</b>")
    window.press("Enter", 13, shift=True)
    window.type("<img src=x onerror='wrong()'>")
    window.press("Enter", 13)
    window.until("talk.length === 2 && !live")
    asked = "<b>one</b>\n<img src=x onerror='wrong()'>"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
    first = llm.generate(chat, 12, seed=7).text
    shown = "[...document.querySelectorAll('article > .text')].map(text => text.textContent)"
    assert window.run(shown) == [asked, first]
    ask(window, "two")
    window.until("talk.length === 4 && !live")
    chat += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    second = llm.generate(chat, 12, seed=7).text
    assert window.run(shown) == [asked, first, "two", second]
    assert window.run("document.querySelectorAll('article > .text *').length") == 0
    # the drafting view is folded away; opened, it has the same text
    assert not window.run("[...document.querySelectorAll('article details')].some(one => one.open)")
    window.run("document.querySelectorAll('article details')[1].open = true")
    window.until("document.querySelector('.source')")
    assert window.run("document.querySelector('.source').textContent") == second
    tokens = window.run("sum(talk[3], 0)")
    told = window.run("document.querySelectorAll('article summary')[1].textContent")
    assert tokens > 0 and told.startswith(f"Drafting: {tokens} tokens")
    # all of it is there after a reload, in every window
    window.go(server.url)
    assert window.run(shown) == [asked, first, "two", second]
    assert window.run("$('seed').value + $('system').value") == "7Be brief."
    for scheme in ("light", "dark"):
        for width, height in ((1000, 800), (360, 640)):
            window.look(width, height, scheme)
            window.run("document.querySelectorAll('details').forEach(one => one.open = true)")
            size = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
            assert window.run(size) == [width, height], "the page itself scrolls"
            ground = window.run("getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    window.run("$('new').click()")
    assert window.run("talk.length + document.querySelectorAll('article').length") == 0
    assert window.wrong == []


def test_stop(window: Browser, start: Start, slowed: Any) -> None:
    llm, slow = slowed
    server = start(llm)
    window.go(server.url)
    window.run(ENDLESS)
    window.run(f"$('max_output_tokens').value = {LONG}; $('strategy').value = 'autoregressive'; 1")
    for reload in (False, True):
        slow.pause = 0.02
        ask(window, "Write.")
        window.until("live && live.asked.name && sum(live, 0) > 2")
        name = window.run("live.asked.name")
        if reload:
            window.go(server.url)
            window.until("live && sum(live, 0) > 4")
        assert window.run("[$('send').hidden, $('stop').hidden]") == [True, False]
        # in one go: no answer of the server can come between
        assert window.run("$('stop').click(), [live === null, $('send').hidden, talk.at(-1).end]") == [
            True,
            False,
            "stopped",
        ]
        window.until("!talk.at(-1).asked")
        assert state(server, name) == "cancelled"
        slow.pause = 0.0
    window.go(server.url)
    assert window.run("live === null && talk.at(-1).end") == "stopped"
    assert window.wrong == []


def test_stop_before_the_answer_has_a_name(window: Browser, start: Start, slowed: Any) -> None:
    llm, slow = slowed
    server = start(llm)
    window.go(server.url)
    slow.pause = 0.02
    window.run(ENDLESS)
    window.run(
        "fetched = fetch; fetch = async (...a) => { await new Promise(d => go = d); return fetched(...a) }; 1"
    )
    window.run(f"$('max_output_tokens').value = {LONG}; 1")
    ask(window, "Write.")
    window.press("Escape", 27)
    assert window.run("[live === null, talk.at(-1).end, talk.at(-1).asked.cancel]") == [True, "stopped", True]
    window.run("fetch = fetched, go()")
    window.until("!talk.at(-1).asked")
    slow.pause = 0.0
    time.sleep(0.1)
    passes = slow.passes
    time.sleep(0.1)
    assert slow.passes == passes, "the answer goes on"
    assert window.wrong == []


def test_keys_and_refusals(window: Browser, start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY + "\n")
    (tmp_path / "keys").chmod(0o600)
    server = start(api_key_file=str(tmp_path / "keys"))
    window.go(server.url)
    assert window.run("$('locked').hidden") is False
    for key in ("wrong", KEY):
        window.run("$('key').value = ''; $('key').focus()")
        window.type(key)
        window.press("Enter", 13)
        window.until("$('state').textContent")
    window.until("$('locked').hidden")
    window.run("$('max_output_tokens').value = 10 ** 9; 1")
    ask(window, "Hi")
    window.until("talk.length === 2 && !live")
    note = "document.querySelector('article .note.bad').textContent"
    assert "max_output_tokens is 1000000000; valid: an integer from 1" in window.run(note)
    window.run("$('max_output_tokens').value = 3; 1")
    ask(window, "Hi")  # what was refused is not told again
    window.until("talk.length === 4 && !live")
    assert window.run("talk.at(-1).end") == "length"
    assert window.wrong == []
