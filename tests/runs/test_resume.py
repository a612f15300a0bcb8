"""Runs that are interrupted and gone on with, in one process: tokens, text, figures."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenswift
from tests.conftest import tiny_model, tiny_tokenizer
from tests.lossless.test_tokens import random_heads
from tests.runs.common import CALL, Stop, adapted, after, begin, journal_tokens, texts
from tokenswift import LLM, InputError, RunError, Step
from tokenswift.engine.journal import request_of
from tokenswift.runs import folder as folders
from tokenswift.runs import writer
from tokenswift.runs.folder import is_locked


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model(), tiny_tokenizer())


STRATEGIES = {
    "autoregressive": {},
    "tokenswift": {
        "tree": (2, 2),
        "ngrams": 2,
        "ngram_count": 1,
        "budget": 24,
        "sinks": 2,
        "draft": "partial",
    },
    "magicdec": {"gamma": 3, "budget": 24, "sinks": 2},
}


@pytest.mark.parametrize("given", [{}, {"tree": (2, 1)}, {"acceptance": "published"}])
def test_a_run_of_the_papers_method(llm: LLM, tmp_path: Path, given: dict[str, Any]) -> None:
    """It stays that method, with the options it had."""
    begin(llm, tmp_path, 4, strategy="tokenswift", strategy_options={"ngrams": 3, **given})
    request = request_of(folders.load(tmp_path)[1], tmp_path)
    assert (request.strategy, request.given) == ("tokenswift", {"ngrams": 3, **given})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_uninterrupted_text(strategy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Interrupted twice, then made longer: tokens and text are the uninterrupted run's every time."""
    heads = random_heads("conditioned", 32, 260) if strategy == "tokenswift" else None
    llm = LLM.from_model(tiny_model().to(dtype), tiny_tokenizer(), heads=heads)
    how = {"strategy": strategy, "strategy_options": STRATEGIES[strategy]}
    folder = tmp_path / "run"
    begin(llm, folder, 12, **how)
    with pytest.raises(Stop):
        tokenswift.resume(folder, llm=llm, on_step=after(9))
    assert set(texts(folder)) == {"text.unfinished.txt"}
    found = tokenswift.resume(folder, llm=llm)
    whole = llm.generate("hello", **CALL, **how)
    assert found.token_ids == whole.token_ids and found.text == whole.text
    assert (found.finish_reason, found.prompt_tokens) == ("length", whole.prompt_tokens)
    assert found.metrics.distinct == whole.metrics.distinct
    assert found.metrics.mean_acceptance_length == len(whole.token_ids) / found.metrics.steps
    assert texts(folder) == {"text.txt": whole.text}
    again, nothing = tokenswift.resume(folder, llm=llm), replace(found.metrics, seconds=0)
    assert replace(again, metrics=nothing) == replace(found, metrics=nothing)  # nothing to do
    assert again.metrics.steps == found.metrics.steps
    longer = tokenswift.resume(folder, max_new_tokens=130, llm=llm)
    assert longer.token_ids == llm.generate("hello", **{**CALL, "max_new_tokens": 130}, **how).token_ids
    assert texts(folder) == {"text.txt": longer.text} and len(longer.token_ids) == 130
    _, state = folders.load(folder)
    assert len(state.sources) == len(state.chars) == 130 and sum(state.chars) + len(state.tail) == len(
        longer.text
    )
    assert [s.strategy for s in state.sessions] == [strategy] * 4 and not is_locked(folder)


def test_another_strategy_may_go_on(llm: LLM, tmp_path: Path) -> None:
    """What drafts never decides the tokens, so it may change; generate with the same run goes on too."""
    begin(llm, tmp_path / "run", 10, strategy="autoregressive")
    steps: list[Step] = []
    call: dict[str, Any] = {**CALL, "strategy": "magicdec", "run_dir": tmp_path / "run"}
    found = llm.generate("hello", **call, on_step=steps.append)
    assert found.token_ids == llm.generate("hello", **CALL).token_ids
    assert sum(len(step.token_ids) for step in steps) == 80
    assert (
        "".join(step.text for step in steps) == found.text[len("".join(step.text for step in steps)) * -1 :]
    )


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_string_across_the_interruption(llm: LLM, tmp_path: Path, cut: int) -> None:
    """The run ends inside a stop string: what was held back still counts."""
    plain = llm.generate("hello", **CALL)
    at = next(
        i
        for i in range(20, 80)
        if plain.text[i : i + 4].isascii() and plain.text.find(plain.text[i : i + 4]) == i
    )
    stop = plain.text[at : at + 4]
    whole = llm.generate("hello", **CALL, stop=(stop,))
    assert whole.finish_reason == "stop" and whole.text == plain.text[:at]
    begin(llm, tmp_path / "run", len(whole.token_ids) - cut, strategy="autoregressive", stop=(stop,))
    assert not texts(tmp_path / "run")["text.unfinished.txt"].endswith(stop[:1] * 4)
    found = tokenswift.resume(tmp_path / "run", llm=llm)
    assert (found.token_ids, found.text, found.finish_reason) == (whole.token_ids, whole.text, "stop")
    assert texts(tmp_path / "run") == {"text.txt": whole.text}
    assert tokenswift.resume(tmp_path / "run", max_new_tokens=120, llm=llm).token_ids == whole.token_ids


@pytest.mark.parametrize("reason", ["stop", "eos", "length"])
def test_killed_before_the_end_was_written(llm: LLM, tmp_path: Path, reason: str) -> None:
    """All tokens are there, the record of the end is not: nothing is added to the text."""
    plain = llm.generate("hello", **CALL)
    call: dict[str, Any] = {**CALL}
    if reason == "stop":
        call["stop"] = (next(c for c in plain.text[30:] if c.isascii()),)
    elif reason == "eos":
        model = tiny_model()
        model.generation_config.eos_token_id = plain.token_ids[40]
        llm = LLM.from_model(model, tiny_tokenizer())
        call["ignore_eos"] = False
    whole = llm.generate("hello", **call, run_dir=tmp_path / "run")
    assert whole.finish_reason == reason
    path = tmp_path / "run" / "journal"
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1])
    (tmp_path / "run" / "text.txt").rename(tmp_path / "run" / "text.unfinished.txt")
    found = tokenswift.resume(tmp_path / "run", llm=llm)
    assert (found.token_ids, found.text, found.finish_reason) == (whole.token_ids, whole.text, reason)
    assert texts(tmp_path / "run") == {"text.txt": whole.text}
    assert folders.load(tmp_path / "run")[1].end is not None


def test_text_that_the_user_has_edited_stays(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unfinished, finished, cut off: every edit is kept, and the rest of the text is in a file of its own."""
    folder = tmp_path / "run"
    whole = llm.generate("hello", **dict[str, Any](CALL, max_new_tokens=120)).text
    begin(llm, folder, 30, strategy="autoregressive")
    first = texts(folder)["text.unfinished.txt"]
    (folder / "text.unfinished.txt").write_text("mine", encoding="utf-8")
    done = tokenswift.resume(folder, llm=llm)
    assert texts(folder) == {"text.unfinished.txt": "mine", "text.2.txt": done.text[len(first) :]}
    assert "text.unfinished.txt was changed" in caplog.text and "text.2.txt" in caplog.text
    shorter = done.text[len(first) :][:-1]  # a cut is an edit too
    (folder / "text.2.txt").write_text(shorter, encoding="utf-8", newline="")
    tokenswift.resume(folder, max_new_tokens=120, llm=llm)
    shown = texts(folder)
    assert shown.pop("text.2.txt") == shorter and shown.pop("text.unfinished.txt") == "mine"
    assert (
        list(shown) == ["text.3.txt"]
        and (first + done.text[len(first) :] + shown["text.3.txt"])[:60] == whole[:60]
    )


def test_an_unfinished_record_is_overwritten(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(llm, folder, 30)
    data = (folder / "journal").read_bytes()
    (folder / "journal").write_bytes(data[:-5])
    assert tokenswift.resume(folder, llm=llm).token_ids == llm.generate("hello", **CALL).token_ids


def test_damage_is_refused_and_what_is_good_offered(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SYNC_TOKENS", 8)
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        steps = after(60)

        def on_step(step: Step) -> None:
            while journal_tokens(folder) < len(step.token_ids):  # a record for every step
                pass
            steps(step)

        llm.generate("hello", **CALL, strategy="autoregressive", run_dir=folder, on_step=on_step)
    contents, state = folders.load(folder)
    data = bytearray((folder / "journal").read_bytes())
    ends = [i for i, byte in enumerate(data) if byte == 10]
    broken_at = ends[-2] - 20
    data[broken_at] ^= 1
    (folder / "journal").write_bytes(data)
    good = sum(len(r["ids"]) for r in contents.records[2:-2])
    line = (
        f"journal is damaged at byte {ends[-3] + 1} .record {len(contents.records) - 1}.; the {good} tokens"
    )
    with pytest.raises(InputError, match=line):
        tokenswift.resume(folder, llm=llm)
    assert (folder / "journal").read_bytes() == data
    found = tokenswift.resume(folder, llm=llm, drop_damaged=True)
    assert found.token_ids == llm.generate("hello", **CALL).token_ids
    assert (folder / "journal.damaged-1").read_bytes() == data[ends[-3] + 1 :]
    assert good < len(state.tokens)


# ---- what is kept and told --------------------------------------------------------------------------------


def test_tokens_do_not_wait_for_a_slow_step(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that never ends keeps no accepted token from the disk."""
    monkeypatch.setattr(writer, "SYNC_SECONDS", 0.02)
    folder = tmp_path / "run"

    def on_step(step: Step) -> None:
        while journal_tokens(folder) == 0:  # hangs here if only further steps brought it there
            pass
        raise Stop

    with pytest.raises(Stop):
        llm.generate("hello", **CALL, run_dir=folder, on_step=on_step)


def test_not_a_number_names_the_position_and_keeps_the_text(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken = LLM.from_model(tiny_model(), tiny_tokenizer())
    real, left = broken.target.logits, [30]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        return real(hidden) if left[0] >= 0 else real(hidden) * float("nan")

    broken.target.logits = logits  # type: ignore[method-assign]
    with pytest.raises(RunError, match="logits for position 35 hold NaN"):
        broken.generate("hello", **CALL, strategy="autoregressive", run_dir=folder)
    whole = llm.generate("hello", **CALL)
    assert folders.load(folder)[1].tokens == whole.token_ids[:30]
    assert whole.text.startswith(texts(folder)["text.unfinished.txt"])
    assert tokenswift.resume(folder, llm=llm).token_ids == whole.token_ids


def test_unequal_bits_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, llm: LLM) -> None:
    """A family that runs through transformers' own forward: the journal says so, resume warns in a line."""
    other = adapted(1)
    begin(other, tmp_path / "run", 20)
    assert folders.load(tmp_path / "run")[1].session.numerics["equal_bits"] is False
    assert caplog.records == []
    tokenswift.resume(tmp_path / "run", llm=other)
    assert [r.getMessage().count("may differ") for r in caplog.records] == [1]
    begin(llm, tmp_path / "equal", 20)
    tokenswift.resume(tmp_path / "equal", llm=llm)
    assert len(caplog.records) == 1 and llm.numerics()["equal_bits"]


def test_a_signal_before_the_journals_thread_starts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stays an interruption, and the run can be resumed."""

    class Late(threading.Thread):
        def start(self) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writer, "Thread", Late)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", **CALL, run_dir=tmp_path / "run")
    expected = llm.generate("hello", **CALL)
    assert tokenswift.resume(tmp_path / "run", llm=llm).token_ids == expected.token_ids


DATED = "{{ strftime_now('%S.%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("way", ["generate", "chat"])
def test_a_chat_whose_template_writes_the_date(llm: LLM, tmp_path: Path, way: str) -> None:
    """The prompt is the one that the run began with; that of other messages is refused."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = DATED
    dated = LLM.from_model(llm.model, tokenizer)
    ask = [{"role": "user", "content": "hello"}]
    assert dated.encode(ask) != dated.encode(ask)

    def go_on(messages: list[dict[str, str]], **call: Any) -> list[int]:
        call = {**CALL, "run_dir": tmp_path / "run", **call}
        made = (
            dated.generate(messages, **call) if way == "generate" else dated.chat(messages, **call).generation
        )
        return made.token_ids

    short = go_on(ask, max_new_tokens=20)
    prompt = folders.load(tmp_path / "run")[1].prompt
    whole = dated.generate(prompt, **CALL).token_ids
    assert go_on(ask) == whole and whole[:20] == short
    with pytest.raises(InputError, match="holds another run: the prompt"):
        go_on([{"role": "user", "content": "hallo"}])
    assert tokenswift.resume(tmp_path / "run", max_new_tokens=95, llm=dated).token_ids[:90] == whole
