"""``tokenswift generate --prompts``: many texts, each in a folder that can be resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, Outcome, chatty_model
from tokenswift.config.sampling import ANSWERS
from tokenswift.engine.llm import LLM
from tokenswift.runs import folder as folders

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "seed": 3},
    {"id": "short", "prompt": "x", "max_new_tokens": 5},
    {"id": "chat.1", "messages": [{"role": "user", "content": "Hello"}]},
    {"prompt": "Once upon a time", "greedy": True, "stop": ["q"]},
]
NAMES = ["00001", "short", "chat.1", "00004"]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_model(tmp_path_factory.mktemp("chatty"), 256)


def lines_of(prompts: list[Any], name: str = "p.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(one) + "\n" for one in prompts), encoding="utf-8")
    return name


@pytest.fixture
def many(cli: Call, chatty: Path) -> Callable[..., Outcome]:
    def call(prompts: list[Any], *argv: object) -> Outcome:
        common = (
            "--model",
            chatty,
            "--strategy",
            "autoregressive",
            "--max-new-tokens",
            20,
            "--ignore-eos",
        )
        return cli("generate", "--prompts", lines_of(prompts), "--out", "out", *common, *argv)

    return call


def texts() -> dict[str, list[int]]:
    return {path.name: folders.load(path)[1].tokens for path in sorted(Path("out").iterdir())}


def test_each_text_is_that_of_its_prompt_alone(many: Callable[..., Outcome], chatty: Path) -> None:
    done = many(PROMPTS, "--json", "r.jsonl", "--seed", 8)
    assert (done.code, done.out) == (0, ""), done
    records = [
        json.loads(line) for line in Path("r.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [record["id"] for record in records] == NAMES
    with LLM(chatty) as llm:
        for record, prompt in zip(records, PROMPTS, strict=True):
            more = {
                k: v for k, v in prompt.items() if k in ("seed", "greedy", "max_new_tokens", "stop")
            }
            if "messages" in prompt:
                more = {**asdict(ANSWERS), "seed": 8, **more}
            how = {
                "max_new_tokens": 20,
                "seed": 8,
                "strategy": "autoregressive",
                "ignore_eos": True,
                **more,
            }
            alone = llm.generate(prompt.get("prompt") or prompt["messages"], **how)
            assert record["token_ids"] == alone.token_ids
            assert record["text"] == alone.text
            assert texts()[record["id"]] == alone.token_ids
    assert done.err.splitlines()[-1].startswith("4 of 4 texts are in out")


def test_a_second_start_goes_on_with_what_is_missing(many: Callable[..., Outcome]) -> None:
    assert many(PROMPTS[:2]).code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("journal")}
    done = many(PROMPTS, "--json")
    assert done.code == 0
    assert len(done.out.splitlines()) == len(PROMPTS)
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert sorted(texts()) == sorted(NAMES)


def test_a_prompt_that_fails_does_not_stop_the_others(many: Callable[..., Outcome]) -> None:
    """One too long for the model, and one whose folder holds another run."""
    assert many([{"id": "other", "prompt": "another"}]).code == 0
    long = {"id": "long", "prompt": "word " * 100}
    done = many([long, *PROMPTS, {"id": "other", "prompt": "changed"}], "--json", "-")
    assert done.code == 1
    *_, last = done.err.splitlines()
    assert last == "error: 2 of 6 prompts failed: long, other"
    assert "long failed: prompt and new tokens are" in done.err
    assert "other failed: " in done.err
    records = {record["id"]: record for record in map(json.loads, done.out.splitlines())}
    assert [name for name, record in records.items() if record.get("error")] == ["long", "other"]
    assert sorted(texts()) == ["00002", "00005", "chat.1", "other", "short"]


@pytest.mark.parametrize(
    "lines,words",
    [
        ([], "--prompts p.jsonl holds no prompts"),
        (["text"], "line 1: it has neither prompt nor messages, or both"),
        ([{"messages": ["a"]}], "line 1: messages is ['a']; valid: a list of objects"),
        ([{"prompt": "a", "sead": 1}], "line 1: 'sead' is not a field; valid: id, prompt,"),
        ([{"prompt": "a", "max_new_tokens": 0}], "line 1: --max-new-tokens is 0"),
        ([{"prompt": "a", "id": "../a"}], "line 1: id is '../a'; valid: up to 100 letters"),
        (
            [{"prompt": "a", "id": "b"}, {"prompt": "a", "id": "b"}],
            "line 2: id is 'b', as in a line before",
        ),
    ],
)
def test_bad_prompts(many: Callable[..., Outcome], lines: list[Any], words: str) -> None:
    done = many(lines)
    assert done.code == 2, done
    assert words in done.error
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_folder_of_prompts_is_gone_on_with(
    many: Callable[..., Outcome], chatty: Path, number: signal.Signals
) -> None:
    """Killed or interrupted while texts are under way."""
    prompts = [{"prompt": f"The story of number {i}", "seed": i} for i in range(5)]
    common = ("--model", str(chatty), "--strategy", "autoregressive", "--max-new-tokens", "200")
    argv = (
        "generate",
        "--prompts",
        lines_of(prompts),
        *common,
        "--ignore-eos",
        "--max-num-seqs",
        "2",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenswift", *argv, "--out", "out"],
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not (Path("out").exists() and len(list(Path("out").rglob("journal"))) > 2):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert err.splitlines()[-1].endswith("of 5 texts are written; the same command resumes"), (
            err
        )
    assert len(list(Path("out").rglob("text.txt"))) < 5
    assert many(prompts, "--max-new-tokens", 200, "--max-num-seqs", 2).code == 0
    with LLM(chatty) as llm:
        for i, prompt in enumerate(prompts):
            how = {"strategy": "autoregressive", "ignore_eos": True, "seed": i}
            assert texts()[f"{i + 1:05}"] == llm.generate(prompt["prompt"], 200, **how).token_ids


def test_long_continued_texts_have_their_length(cli: Call, tmp_path: Path) -> None:
    model = chatty_model(tmp_path, 1100)
    prompts = [
        {"id": "long", "prompt": "Once"},
        {"id": "short", "prompt": "Once", "max_new_tokens": 20},
        {"id": "free", "prompt": "Once", "min_tokens": 0},
        {"id": "stopped", "prompt": "Once", "stop": ["q"]},
        {"id": "answer", "messages": [{"role": "user", "content": "Hello"}]},
    ]
    cli("generate", "--prompts", lines_of(prompts), "--out", "o", "--model", model, "-n", 1000)
    lengths = {path.name: folders.load(path)[1].min_tokens for path in Path("o").iterdir()}
    assert lengths == {"long": 1000, "short": 0, "free": 0, "stopped": 0, "answer": 0}
