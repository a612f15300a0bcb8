"""The page in a real browser, where there is a Chromium: conversations, Markdown, and what a model
must not be able to do."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.browser import Browser, program
from tests.serve.conftest import Slow, Start
from tests.serve.scripted import Script, ScriptedServer
from tokenswift import LLM

pytestmark = pytest.mark.skipif(program() is None, reason="needs a Chromium")
READY = "document.querySelector('#state').innerText === 'Ready.'"
DONE = f"{READY} && !document.querySelector('.writing')"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.close()


@pytest.fixture
def page(chromium: Browser, server: ScriptedServer) -> Browser:
    """The page of the scripted server, without a conversation."""
    opened(chromium, server.url)
    return chromium


def opened(browser: Browser, url: str) -> None:
    """Open a page without what earlier ones have kept; broken rules of the policy are noted."""
    browser.call("Page.navigate", url="about:blank")
    browser.call("Storage.clearDataForOrigin", origin=url.rstrip("/"), storageTypes="all")
    browser.open(url)
    browser.run(
        "window.broken = []; document.addEventListener('securitypolicyviolation', "
        "event => broken.push(event.violatedDirective + ' ' + event.blockedURI)); 0"
    )
    browser.wait_for(READY)


def answered(
    page: Browser, server: ScriptedServer, text: str, thought: str = "", ended_by: str = "eos"
) -> None:
    """Ask, and wait for this answer."""
    server.scripts.append(Script(text, thought, ended_by))
    page.ask("A question")
    page.wait_for(DONE)


MARKDOWN = """\
# Flour

**Bread** needs `flour`, see [the mill](https://mill.example/a).

| flour | grams |
|:--|--:|
| rye | 300 |

```python
def bake(loaf: List[str]) -> None:
    print("<b>hot</b>")
```

1. mix
2. wait
"""


# ---- Markdown ------------------------------------------------------------------------------------


def test_markdown_is_drawn(page: Browser, server: ScriptedServer) -> None:
    answered(page, server, MARKDOWN)
    for selector, text in (
        ("h1", "Flour"),
        ("strong", "Bread"),
        ("p code", "flour"),
        ("td[align=right]", "300"),
        (".code span", "python"),
        ("ol li", "wait"),
    ):
        assert page.text(f".assistant .text {selector}") == text
    code = page.run("document.querySelector('.assistant pre').textContent")
    assert code == 'def bake(loaf: List[str]) -> None:\n    print("<b>hot</b>")\n'
    assert page.run("broken") == []


def test_links_open_elsewhere_and_tell_nobody_where_from(
    page: Browser, server: ScriptedServer
) -> None:
    answered(page, server, MARKDOWN)
    link = page.run(
        "(({href, target, rel}) => [href, target, rel])(document.querySelector('.text a'))"
    )
    assert link == ["https://mill.example/a", "_blank", "noopener noreferrer nofollow"]


def test_types_in_prose_are_not_taken_for_tags(page: Browser, server: ScriptedServer) -> None:
    answered(page, server, "A Vec<String> or a Map<K, V>.\n\n<div>\n  as it is\n</div>")
    assert (
        page.text(".assistant > .text")
        == "A Vec<String> or a Map<K, V>.\n\n<div>\n  as it is\n</div>"
    )


def test_a_text_in_pieces_is_drawn_as_a_whole_one(page: Browser, server: ScriptedServer) -> None:
    drawn = []
    for size in (1, 10_000):
        server.scripts.append(Script(MARKDOWN, size=size))
        page.ask("A question")
        page.wait_for(DONE)
        drawn.append(
            page.run("[...document.querySelectorAll('.assistant > .text')].at(-1).innerHTML")
        )
    assert drawn[0] == drawn[1]


def test_blocks_that_are_complete_stay_while_more_comes(
    page: Browser, server: ScriptedServer
) -> None:
    """So a selection lasts, and a long text costs no more than a short one."""
    script = (
        "(box => { Markdown.draw(box, 'one\\n\\ntwo', copyButton); const first = box.firstChild;"
        "Markdown.draw(box, 'one\\n\\ntwo and more\\n\\nthree', copyButton);"
        "return [box.firstChild === first, box.textContent] })(document.createElement('div'))"
    )
    assert page.run(script) == [True, "one\ntwo and more\nthree\n"]


# ---- hostile text --------------------------------------------------------------------------------

HOSTILE = [
    "<img src=x onerror=hacked=1>",
    '<img src="https://evil.example/a.png">',
    "![a picture](https://evil.example/a.png)",
    '![a picture](x" onerror="hacked=1)',
    "[click](javascript:hacked=1)",
    "[click](JaVaScRiPt:hacked=1)",
    "[click](java&#x73;cript:hacked=1)",
    "[click](data:text/html,<script>hacked=1</script>)",
    "[click](vbscript:hacked)",
    "<javascript:hacked=1>",
    "<script>hacked=1</script>",
    "<svg onload=hacked=1><script>hacked=1</script></svg>",
    "<math><mtext><table><mglyph><style><!--</style>"
    '<img title="--&gt;&lt;img src=1 onerror=hacked=1&gt;">',
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<style>body{display:none}</style>",
    "<br onclick=hacked=1 onfocus=hacked=1 autofocus tabindex=1>",
    "<a href=javascript:hacked=1>click</a>",
    "<form action=https://evil.example><input name=a autofocus onfocus=hacked=1></form>",
    "<base href=https://evil.example>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<b id=prompt name=prompt>named</b>",
    '```js" onmouseover="hacked=1\n</code></pre><img src=x onerror=hacked=1>\n```',
    "| a |\n|---|\n| <img src=x onerror=hacked=1> |",
    "`<img src=x onerror=hacked=1>`",
    "[a]: javascript:hacked=1\n\n[a]",
    '[t](https://mill.example "\\" onmouseover=hacked=1 x=\\"")',
]


def test_what_a_model_writes_does_not_run(page: Browser, server: ScriptedServer) -> None:
    """Nor is it fetched, nor does it take the place of the page's own parts."""
    answered(page, server, "\n\n".join(HOSTILE), thought="<img src=x onerror=hacked=1>")
    page.run("document.querySelectorAll('.assistant > .text *').forEach(part => part.click?.())")
    page.run("new Promise(done => setTimeout(done, 300))")
    assert page.run("typeof hacked") == "undefined"
    assert page.run("broken") == [], "the sanitiser leaves nothing for the policy to refuse"
    tags = "img,script,svg,math,iframe,style,form,input,base,meta,link,object,embed"
    barred = f".assistant > .text :is({tags},[id],[name],[style])"
    assert page.run(f"document.querySelectorAll('{barred}').length") == 0
    links = page.run("[...document.querySelectorAll('.text a')].map(link => link.protocol)")
    assert set(links) <= {"https:", "mailto:", ":"}
    handlers = page.run(
        "[...document.querySelectorAll('.text *')].flatMap(part => part.getAttributeNames())"
    )
    assert {name for name in handlers if name.startswith("on")} == set()
    assert set(server.paths) == {"/", "/v1/models", "/v1/responses"}
    assert page.run("location.href") == server.url


def test_the_policy_holds_where_the_sanitiser_does_not(page: Browser) -> None:
    page.run(
        "const box = document.createElement('div'); document.body.append(box);"
        "try { box.innerHTML = '<img src=x onerror=hacked=1>' } catch {}"
        "const script = document.createElement('script');"
        "try { script.text = 'hacked=1' } catch {} document.body.append(script);"
        "new Promise(done => setTimeout(done, 200))"
    )
    assert page.run("typeof hacked") == "undefined"
    assert any(rule.startswith("require-trusted-types-for") for rule in page.run("broken"))


@pytest.mark.parametrize(
    "text", [">" * 20_000, "[" * 20_000, "*a " * 20_000, "`" * 20_001, "- " * 9_000]
)
def test_a_text_of_signs_neither_hangs_nor_breaks_the_page(
    page: Browser, server: ScriptedServer, text: str
) -> None:
    server.scripts.append(Script(text, size=len(text)))
    page.ask("A question")
    page.wait_for(DONE)


# ---- a conversation ------------------------------------------------------------------------------


def test_thoughts_are_shown_while_they_come(page: Browser, server: ScriptedServer) -> None:
    gate = threading.Event()
    server.scripts.append(Script("", thought="Rye, or *wheat*?", gate=gate))
    page.ask("Which flour?")
    page.wait_for("document.querySelector('.thoughts .text')?.innerText === 'Rye, or *wheat*?'")
    assert page.run("document.querySelector('.thoughts').open")
    assert page.text("#state") == "Thinking …"
    gate.set()
    page.wait_for(DONE)


def test_thoughts_close_when_the_answer_comes_and_are_not_sent_again(
    page: Browser, server: ScriptedServer
) -> None:
    answered(page, server, "Rye.", thought="Rye, or wheat?")
    assert not page.run("document.querySelector('.thoughts').open")
    answered(page, server, "Yes.")
    assert server.bodies[1]["input"] == [
        {"role": "user", "content": "A question"},
        {"role": "assistant", "content": "Rye."},
        {"role": "user", "content": "A question"},
    ]


def test_regenerate_asks_the_same_again(page: Browser, server: ScriptedServer) -> None:
    answered(page, server, "First.")
    answered(page, server, "Second.")
    server.scripts.append(Script("Third."))
    page.click(".again")
    page.wait_for(DONE)
    assert page.text("#log").count("Second.") == 0
    assert page.text(".assistant > .text") == "Third."
    assert server.bodies[2] == server.bodies[1]


def test_regenerate_takes_another_seed_where_one_is_set(
    page: Browser, server: ScriptedServer
) -> None:
    page.run("document.querySelector('#seed').value = 5")
    for seed in (5, 6, 7):
        server.scripts.append(Script(f"With {seed}."))
    page.ask("A question")
    page.wait_for(DONE)
    for _ in range(2):
        page.click(".again")
        page.wait_for(DONE)
    assert [body["seed"] for body in server.bodies] == [5, 6, 7]


def test_an_edited_question_is_asked_in_place_of_the_old_one(
    page: Browser, server: ScriptedServer
) -> None:
    answered(page, server, "First.")
    answered(page, server, "Second.")
    server.scripts.append(Script("Better."))
    page.run("document.querySelector('.user .change').click()")
    page.run("document.querySelector('.edit textarea').select()")
    page.type("A better question")
    page.press("Enter", 13, "\r")
    page.wait_for(f"{DONE} && document.querySelectorAll('article').length === 2")
    assert server.bodies[2]["input"] == "A better question"
    assert page.text(".assistant > .text") == "Better."


def test_escape_leaves_a_question_as_it_was(page: Browser, server: ScriptedServer) -> None:
    answered(page, server, "First.")
    page.click(".change")
    page.type("something else")
    page.press("Escape", 27)
    assert page.text(".user .text") == "A question"
    assert page.run("document.querySelector('.edit')") is None
    assert len(server.bodies) == 1


def test_copy_takes_what_the_model_wrote(page: Browser, server: ScriptedServer) -> None:
    answered(page, server, MARKDOWN)
    page.run(
        "window.clip = []; navigator.clipboard.writeText = async text => { clip.push(text) }; 0"
    )
    page.click(".assistant .tools .copy")
    page.click(".code .copy")
    page.wait_for("clip.length === 2")
    assert page.run("clip") == [MARKDOWN, MARKDOWN.split("```")[1].removeprefix("python\n")]
    page.wait_for("document.querySelector('.code .copy').innerText === 'Copied'")


@pytest.mark.parametrize(
    ("ended_by", "most", "note"),
    [
        ("eos", "", ""),
        ("length", "", "Ended: there is no room for more tokens."),
        ("length", "40", "Ended: as many tokens as were asked for (Settings)."),
        ("loop", "", "Stopped: it repeats itself."),
    ],
)
def test_the_note_says_why_an_answer_ended(
    page: Browser, server: ScriptedServer, ended_by: str, most: str, note: str
) -> None:
    page.run(f"document.querySelector('#max_output_tokens').value = {json.dumps(most)}")
    answered(page, server, "Rye.", ended_by=ended_by)
    assert page.text(".note").startswith(note or "1 token; 0.5 tokens a step; seed ")


def test_a_reload_brings_everything_back(page: Browser, server: ScriptedServer) -> None:
    answered(page, server, MARKDOWN, thought="Rye?")
    before = page.run("document.querySelector('#log').innerText")
    page.reload()
    page.wait_for(READY)
    assert page.run("document.querySelector('#log').innerText") == before


@pytest.mark.parametrize("width", [320, 1400])
def test_nothing_is_wider_than_the_page(page: Browser, server: ScriptedServer, width: int) -> None:
    page.resize(width, 800)
    wide = "| " + " | ".join(["column"] * 30) + " |\n" + "|---" * 30 + "|\n"
    answered(page, server, f"{MARKDOWN}\n{wide}\n```\n{'x' * 400}\n```\n{'y' * 400}")
    assert page.run("document.documentElement.scrollWidth") <= width
    log = page.run("(log => log.scrollWidth - log.clientWidth)(document.querySelector('#log'))")
    assert log <= 0
    page.resize(1000, 800)


# ---- with the real server ------------------------------------------------------------------------


def test_a_conversation_with_a_model(chromium: Browser, start: Start) -> None:
    opened(chromium, f"{start().url}/")
    chromium.run("document.querySelector('#max_output_tokens').value = 20")
    chromium.ask("Hello")
    chromium.wait_for(DONE)
    first = chromium.run("talk[1].text")
    assert first
    chromium.reload()
    chromium.wait_for(DONE)
    assert chromium.run("talk[1].text") == first
    chromium.click(".again")
    chromium.wait_for(DONE)
    assert len(chromium.run("talk")) == 2


def test_a_stop_keeps_what_there_is(
    chromium: Browser, slowed: tuple[LLM, Slow], start: Start
) -> None:
    model, pauses = slowed
    pauses.pause = 0.05
    try:
        opened(chromium, f"{start(llm=model).url}/")
        chromium.ask("Hello")
        chromium.wait_for("talk[1].text.length > 3")
        chromium.press("Escape", 27)
        chromium.wait_for("talk[1].end === 'stopped'")
        chromium.wait_for("!talk[1].asked")  # the server knows
        assert chromium.text(".note").startswith("Stopped.")
    finally:
        pauses.pause = 0.0


PICTURES = os.environ.get("TOKENSWIFT_PICTURES", "")  # a folder


@pytest.mark.skipif(not PICTURES, reason="TOKENSWIFT_PICTURES names no folder for them")
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_pictures(page: Browser, server: ScriptedServer, width: int, dark: bool) -> None:
    """For a person to look at."""
    page.resize(width, 800)
    page.dark(dark)
    answered(page, server, MARKDOWN, thought="Rye, or wheat?")
    page.run("document.querySelector('#log').scrollTop = 0")
    page.picture(Path(PICTURES) / f"page-{width}-{'dark' if dark else 'light'}.png")
    page.dark(False)
    page.resize(1000, 800)
