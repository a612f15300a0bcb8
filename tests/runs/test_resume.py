"""Runs that are interrupted and gone on with, in one process: tokens, text, figures."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenswift
from tests.conftest import tiny_model, tiny_tokenizer
from tests.lossless.test_tokens import random_heads
from tests.runs.common import CALL, OPTIONS, Stop, after, begin, journal_tokens, texts
from tokenswift import LLM, InputError, RunError, Step
from tokenswift.engine import run_journal
from tokenswift.engine.detokenize import TextStream
from tokenswift.runs import folder as folders
from tokenswift.runs.folder import is_locked

SPARSE = {"gamma": 3, "budget": 24, "sinks": 2}
STRATEGIES = {"autoregressive": {}, "tokenswift": OPTIONS, "magicdec": SPARSE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_uninterrupted_text(strategy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Interrupted twice, then made longer: tokens and text are the uninterrupted run's every
    time."""
    heads = random_heads("conditioned", 32, 260) if strategy == "tokenswift" else None
    llm = LLM.from_model(tiny_model().to(dtype), tiny_tokenizer(), heads=heads)
    how = {"strategy": strategy, "strategy_options": STRATEGIES[strategy]}
    folder = tmp_path / "run"
    begin(llm, folder, 12, **how)
    with pytest.raises(Stop):
        tokenswift.resume(folder, llm=llm, on_step=after(9))
    assert texts(folder) == {}
    resumed = tokenswift.resume(folder, llm=llm)
    expected = llm.generate("hello", **CALL, **how)
    assert resumed.token_ids == expected.token_ids
    assert resumed.text == expected.text
    assert (resumed.finish_reason, resumed.prompt_tokens) == ("length", expected.prompt_tokens)
    assert resumed.metrics.distinct == expected.metrics.distinct
    assert resumed.metrics.mean_acceptance_length == len(expected.token_ids) / resumed.metrics.steps
    assert texts(folder) == {"text.txt": expected.text}
    again = tokenswift.resume(folder, llm=llm)
    nothing = replace(resumed.metrics, seconds=0)
    assert replace(again, metrics=nothing) == replace(resumed, metrics=nothing)  # nothing to do
    assert again.metrics.steps == resumed.metrics.steps
    longer = tokenswift.resume(folder, max_new_tokens=130, llm=llm)
    assert (
        longer.token_ids
        == llm.generate("hello", **{**CALL, "max_new_tokens": 130}, **how).token_ids
    )
    assert texts(folder) == {"text.txt": longer.text}
    assert len(longer.token_ids) == 130
    assert not is_locked(folder)


def test_another_strategy_may_go_on(llm: LLM, tmp_path: Path) -> None:
    """What drafts never decides the tokens, so it may change; generate with the same run goes on
    too."""
    begin(llm, tmp_path / "run", 10, strategy="autoregressive")
    steps: list[Step] = []
    call: dict[str, Any] = {**CALL, "strategy": "magicdec", "run_dir": tmp_path / "run"}
    resumed = llm.generate("hello", **call, on_step=steps.append)
    assert resumed.token_ids == llm.generate("hello", **CALL).token_ids
    assert sum(len(step.token_ids) for step in steps) == 80
    assert resumed.text.endswith("".join(step.text for step in steps))


def test_options_of_numpy_are_kept_as_numbers(llm: LLM, tmp_path: Path) -> None:
    how = {
        "strategy": "tokenswift",
        "strategy_options": {"tree": (1, np.int64(3)), "ngrams": np.int64(2)},
    }
    begin(llm, tmp_path / "run", 2, **how)
    assert folders.load(tmp_path / "run")[1].session.options == {"tree": [1, 3], "ngrams": 2}
    assert len(tokenswift.resume(tmp_path / "run", llm=llm).token_ids) == CALL["max_new_tokens"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_string_across_the_interruption(llm: LLM, tmp_path: Path, cut: int) -> None:
    """The run ends inside a stop string: what was held back still counts."""
    plain = llm.generate("hello", **CALL)
    pieces = (plain.text[i : i + 4] for i in range(20, 80))
    stop = next(
        one for i, one in enumerate(pieces, 20) if one.isascii() and plain.text.find(one) == i
    )
    expected = llm.generate("hello", **CALL, stop=(stop,))
    assert expected.finish_reason == "stop"
    assert expected.text == plain.text[: plain.text.find(stop)]
    begin(
        llm,
        tmp_path / "run",
        len(expected.token_ids) - cut,
        strategy="autoregressive",
        stop=(stop,),
    )
    resumed = tokenswift.resume(tmp_path / "run", llm=llm)
    assert (resumed.token_ids, resumed.text, resumed.finish_reason) == (
        expected.token_ids,
        expected.text,
        "stop",
    )
    assert texts(tmp_path / "run") == {"text.txt": expected.text}
    assert (
        tokenswift.resume(tmp_path / "run", max_new_tokens=120, llm=llm).token_ids
        == expected.token_ids
    )


@pytest.mark.parametrize("reason", ["stop", "eos", "length"])
def test_killed_before_the_text_was_written(llm: LLM, tmp_path: Path, reason: str) -> None:
    """All tokens are there, the text file is not: nothing is added to the text."""
    plain = llm.generate("hello", **CALL)
    call: dict[str, Any] = {**CALL}
    if reason == "stop":
        call["stop"] = (next(c for c in plain.text[30:] if c.isascii()),)
    elif reason == "eos":
        model = tiny_model()
        model.generation_config.eos_token_id = plain.token_ids[40]
        llm = LLM.from_model(model, tiny_tokenizer())
        call["ignore_eos"] = False
    expected = llm.generate("hello", **call, run_dir=tmp_path / "run")
    assert expected.finish_reason == reason
    (tmp_path / "run" / "text.txt").unlink()
    resumed = tokenswift.resume(tmp_path / "run", llm=llm)
    assert (resumed.token_ids, resumed.text, resumed.finish_reason) == (
        expected.token_ids,
        expected.text,
        reason,
    )
    assert texts(tmp_path / "run") == {"text.txt": expected.text}


def test_an_end_without_new_tokens(llm: LLM, tmp_path: Path) -> None:
    """The limit is set to what is there; a longer run is killed before its text replaces the
    shorter one."""
    folder = tmp_path / "run"
    begin(llm, folder, 30, strategy="autoregressive")
    tokenswift.resume(folder, max_new_tokens=30, llm=llm)
    end = folders.load(folder)[1].end
    short = texts(folder)["text.txt"]
    assert end is not None
    assert end.reason == "length"
    longer = tokenswift.resume(folder, max_new_tokens=90, llm=llm)
    (folder / "text.txt").write_bytes(short.encode())
    assert tokenswift.resume(folder, llm=llm).text == longer.text
    assert texts(folder) == {"text.txt": longer.text}


def test_what_cannot_be_encoded_leaves_no_gap(llm: LLM, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError, match="0 tokens are kept"):
        patch.setattr(TextStream, "push", lambda stream, token: "\ud800")
        llm.generate("hello", **CALL, run_dir=tmp_path / "run")
    assert tokenswift.resume(tmp_path / "run", llm=llm).text == llm.generate("hello", **CALL).text


def test_text_that_the_user_has_edited_is_kept(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(llm, folder, 30, strategy="autoregressive")
    (folder / "text.txt").write_text("mine", encoding="utf-8")
    done = tokenswift.resume(folder, llm=llm)
    assert texts(folder) == {"text.old": "mine", "text.txt": done.text}
    longer = tokenswift.resume(
        folder, max_new_tokens=100, llm=llm
    ).text  # an end that grew is no edit
    assert texts(folder) == {"text.old": "mine", "text.txt": longer}


def test_damage_is_refused_and_what_is_good_said(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(3):
        begin(llm, folder, 12, strategy="autoregressive")
    state = folders.load(folder)[1]
    data = bytearray((folder / "journal").read_bytes())
    ends = [i for i, byte in enumerate(data) if byte == 10]
    data[ends[-2] - 20] ^= 1
    (folder / "journal").write_bytes(data)
    with pytest.raises(
        InputError, match="journal is damaged at byte .*; the 24 tokens before"
    ) as caught:
        tokenswift.resume(folder, llm=llm)
    assert (folder / "journal").read_bytes() == data
    assert 24 < len(state.tokens)
    command = str(caught.value).rpartition("(")[2].rstrip(")")
    subprocess.run(command.split(), check=True)
    assert tokenswift.resume(folder, llm=llm).token_ids == llm.generate("hello", **CALL).token_ids


# ---- what is kept and told -----------------------------------------------------------------------


def test_tokens_do_not_wait_for_a_slow_step(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that never ends keeps no accepted token from the disk."""
    monkeypatch.setattr(folders, "SYNC_SECONDS", 0.02)
    folder = tmp_path / "run"

    def on_step(step: Step) -> None:
        while journal_tokens(folder) == 0:  # hangs here if only further steps brought it there
            pass
        raise Stop

    with pytest.raises(Stop):
        llm.generate("hello", **CALL, run_dir=folder, on_step=on_step)


def test_unequal_bits_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, llm: LLM) -> None:
    """Without the compiled kernels: the journal says so, resume warns in a line."""
    other = LLM.from_model(tiny_model(), tiny_tokenizer(), backend="torch")
    begin(other, tmp_path / "run", 20)
    assert folders.load(tmp_path / "run")[1].session.numerics["equal_bits"] is False
    assert caplog.records == []
    tokenswift.resume(tmp_path / "run", llm=other)
    assert [r.getMessage().count("may differ") for r in caplog.records] == [1]
    begin(llm, tmp_path / "equal", 20)
    tokenswift.resume(tmp_path / "equal", llm=llm)
    assert len(caplog.records) == 1
    assert llm.target.numerics()["equal_bits"]


def test_a_signal_before_the_journals_thread_starts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stays an interruption, and the run can be resumed."""

    class Late(threading.Thread):
        def start(self) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(folders, "Thread", Late)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", **CALL, run_dir=tmp_path / "run")
    expected = llm.generate("hello", **CALL)
    assert tokenswift.resume(tmp_path / "run", llm=llm).token_ids == expected.token_ids


DATED = "{{ strftime_now('%S.%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_chat_whose_template_writes_the_date(llm: LLM, tmp_path: Path) -> None:
    """The prompt is the one that the run began with; that of other messages is refused."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = DATED
    dated = LLM.from_model(llm.model, tokenizer)
    ask = [{"role": "user", "content": "hello"}]
    assert dated.encode(ask) != dated.encode(ask)

    def go_on(messages: list[dict[str, str]], **call: Any) -> list[int]:
        keywords: dict[str, Any] = {**CALL, "run_dir": tmp_path / "run", **call}
        return dated.generate(messages, **keywords).token_ids

    short = go_on(ask, max_new_tokens=20)
    prompt = folders.load(tmp_path / "run")[1].header.prompt
    expected = dated.generate(prompt, **CALL).token_ids
    assert go_on(ask) == expected
    assert expected[:20] == short
    with pytest.raises(InputError, match="holds another run: prompt differs"):
        go_on([{"role": "user", "content": "hallo"}])
    assert (
        tokenswift.resume(tmp_path / "run", max_new_tokens=95, llm=dated).token_ids[:90] == expected
    )


def test_figures_are_the_whole_runs(llm: LLM, tmp_path: Path) -> None:
    """Plain decoding takes a step a token, whatever happened between."""
    for _ in range(2):
        begin(llm, tmp_path / "run", 20, strategy="autoregressive")
    done = tokenswift.resume(tmp_path / "run", llm=llm)
    expected = llm.generate("hello", **CALL, strategy="autoregressive")
    assert done.metrics.steps == expected.metrics.steps == CALL["max_new_tokens"]
    assert done.metrics.mean_acceptance_length == 1.0
    assert done.metrics.distinct == expected.metrics.distinct
    assert done.token_sources == expected.token_sources
    assert done.prompt_tokens == expected.prompt_tokens


def test_a_run_of_the_papers_method_stays_one(llm: LLM, tmp_path: Path) -> None:
    begin(llm, tmp_path / "run", 3, strategy="tokenswift", strategy_options=OPTIONS)
    tokenswift.resume(tmp_path / "run", llm=llm)
    state = folders.load(tmp_path / "run")[1]
    assert [one.strategy for one in state.sessions] == ["tokenswift", "tokenswift"]
    assert state.sessions[0].options == state.sessions[1].options
    assert set(state.sessions[1].options) == set(OPTIONS)


def test_a_model_that_was_moved_may_go_on(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """What decides the tokens is in its files, not where they lie."""
    first = shutil.copytree(tiny_folder(), tmp_path / "first")
    begin(LLM(first), tmp_path / "run", 10)
    moved = shutil.move(first, tmp_path / "second")
    with LLM(moved) as llm:
        done = llm.generate("hello", **CALL, run_dir=tmp_path / "run")
        assert done.token_ids == llm.generate("hello", **CALL).token_ids


@pytest.mark.parametrize("name", ["torch", "tokenswift"])
def test_another_version_is_told(
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    begin(llm, tmp_path / "run", 10)
    now = {**run_journal.versions(), name: "9.9"}
    monkeypatch.setattr(run_journal, "versions", lambda: now)
    tokenswift.resume(tmp_path / "run", llm=llm)
    (line,) = caplog.messages
    assert line.startswith(f"{name} is 9.9, was ")
    assert line.endswith(": the text may differ from the uninterrupted run's")


def test_a_run_of_the_published_rule_goes_on_with_a_warning(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"acceptance": "published", "tree": (1, 2)}
    begin(llm, tmp_path / "run", 3, strategy="tokenswift", strategy_options=options)
    caplog.clear()
    tokenswift.resume(tmp_path / "run", llm=llm)
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "the published rule draws by what was drafted"
    ]
