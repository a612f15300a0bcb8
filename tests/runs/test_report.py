"""The report: whole, self-contained, every token in it once, readable without colours."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tests.lossless.test_tokens import random_heads
from tokenswift import LLM, SamplingParams
from tokenswift.runs import folder as folders
from tokenswift.runs.report import bins, number, page, repeats
from tokenswift.runs.state import RunState

VOID = {"meta", "input", "br", "hr", "path", "link"}


class Reader(HTMLParser):
    """Elements that are opened and closed in order; what is inside them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.words: list[str] = []
        self._run = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            if self._run or ("class", "run") in attrs:
                self._run += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"
        self._run -= bool(self._run)

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text.setdefault(tag, []).append(data)
        if self._run:
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.seen)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> RunState:
    """A run with heads and n-grams, in two sessions, with letters that HTML has to escape."""
    model = tiny_model()
    model.lm_head.weight.data[60] *= 3  # "<"
    heads = random_heads("conditioned", 32, 260)
    llm = LLM.from_model(model, tiny_tokenizer(), heads=heads)
    folder = tmp_path_factory.mktemp("report") / "run"
    call: dict[str, Any] = {
        "sampling": SamplingParams(greedy=True, repetition_penalty=1.0),
        "ignore_eos": True,
    }
    drafts = {"tree": (1, 2), "ngrams": 0, "draft": "partial"}
    llm.generate("hello", 70, **call, strategy="tokenswift", strategy_options=drafts, run_dir=folder)
    drafts = {"tree": (1, 2), "ngrams": 2, "ngram_count": 1}
    llm.generate("hello", 180, **call, strategy="tokenswift", strategy_options=drafts, run_dir=folder)
    return folders.load(folder)[1]


def test_every_token_is_there_once_and_marked(state: RunState) -> None:
    reader = read(page(state, "a <run>"))
    assert "".join(reader.words) == re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", state.text)
    by_kind = {"i": "h", "b": "n", "u": "c"}
    assert state.sources.count("h") > 5 and state.sources.count("n") > 5
    ends = [sum(state.chars[:i]) for i in range(len(state.chars) + 1)]
    for tag, letter in by_kind.items():
        expected = "".join(
            state.text[ends[i] : ends[i + 1]] for i, source in enumerate(state.sources) if source == letter
        )
        legend = {"i": "draft head", "b": "n-gram of the text", "u": "drafted chain"}[tag]
        assert "".join(reader.text[tag]).replace("\ufffd", "") == legend + re.sub(
            "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]", "", expected
        )
    assert "a <run>" in "".join(reader.text["h1"])


def test_what_strangers_wrote_is_text(state: RunState) -> None:
    html = page(state, "{{ 7 * 7 }}<script>'\"\x1b")
    assert "<script" not in html and "\x1b" not in html
    assert "{{ 7 * 7 }}<script>'\"\ufffd" in "".join(read(html).text["h1"])


def test_speed_against_length_is_a_table(state: RunState) -> None:
    made = page(state, "run").split("Speed and acceptance against length</caption>")[1].split("</table>")[0]
    cells = re.findall(r"<t[hd] ?[^>]*>([^<]*)</t[hd]>", made)
    rows = bins(state, repeats(state.tokens))
    assert cells[:2] == ["up to token", "tokens a second"] and len(cells) == 6 * (1 + len(rows))
    assert cells[6] == str(rows[0].end) and cells[8] == number(rows[0].length) and cells[-6] == "180"
    assert [number(v) for v in (None, 0, 0.25, 12.34, 1234.5, 3)] == ["–", "0", "0.25", "12.3", "1,234", "3"]


def test_nothing_is_loaded_for_it(tmp_path: Path) -> None:
    """Reading journals and writing pages needs no torch: it would take seconds."""
    import subprocess
    import sys

    code = "import sys, tokenswift.runs.report, tokenswift.cli.runs;"
    code += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
