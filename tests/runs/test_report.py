"""The report: whole, self-contained, every token in it once."""

from __future__ import annotations

import re
import subprocess
import sys
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tests.lossless.test_tokens import random_heads
from tokenswift import LLM, SamplingParams
from tokenswift.runs import folder as folders
from tokenswift.runs.report import page, summary_of

CONTROL = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with heads and n-grams, in two sessions, with letters that HTML has to escape."""
    model = tiny_model()
    model.lm_head.weight.data[60] *= 3  # "<"
    heads = random_heads("conditioned", 32, 260)
    llm = LLM.from_model(model, tiny_tokenizer(), heads=heads)
    folder = tmp_path_factory.mktemp("report") / "run"
    plain = SamplingParams(greedy=True, repetition_penalty=1.0)
    call: dict[str, Any] = {
        "sampling": plain,
        "ignore_eos": True,
        "strategy": "tokenswift",
        "run_dir": folder,
    }
    llm.generate("hello", 70, **call, strategy_options={"tree": (1, 2), "ngrams": 0, "draft": "partial"})
    llm.generate("hello", 180, **call, strategy_options={"tree": (1, 2), "ngrams": 2, "ngram_count": 1})
    return folder


def test_every_token_is_there_once_and_marked(folder: Path) -> None:
    state = folders.load(folder)[1]
    html = page([summary_of(folder)], "{{ 7 * 7 }}<script>\x1b", state)
    assert "<script" not in html and "\x1b" not in html
    assert f"<h1>Run {escape('{{ 7 * 7 }}<script>')}\ufffd: 180 tokens, finished (length)</h1>" in html
    body = html.split('<div class="run" lang="">')[1].split("</div>")[0]

    def shown(part: str) -> str:
        return unescape(re.sub("<[^>]*>", "", part))

    assert shown(body) == re.sub(CONTROL, "\ufffd", state.text + state.tail)
    ends = [sum(state.chars[:i]) for i in range(len(state.chars) + 1)]
    for letter in "hn":
        places = [i for i, source in enumerate(state.sources) if source == letter]
        expected = "".join(state.text[ends[i] : ends[i + 1]] for i in places)
        marked = "".join(re.findall(rf'<i class="{letter}">(.*?)</i>', body, re.DOTALL))
        assert len(places) > 5 and shown(marked) == re.sub(CONTROL, "\ufffd", expected)


def test_nothing_is_loaded_for_it() -> None:
    """Reading journals and writing pages needs no torch: it would take seconds."""
    code = "import sys, tokenswift.runs.report, tokenswift.cli.runs;"
    code += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
