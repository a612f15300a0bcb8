"""Runs that are interrupted and gone on with, in one process: tokens, text, figures, refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tokenswift
from tests.conftest import tiny_model, tiny_tokenizer
from tests.lossless.test_tokens import random_heads
from tokenswift import LLM, InputError, RunError, SamplingParams, Step
from tokenswift.runs import folder as folders
from tokenswift.runs import journal, writer
from tokenswift.runs.folder import is_locked
from tokenswift.runs.identity import identity_of

HOT = SamplingParams(seed=3, temperature=1.3, penalty_window=20)
CALL: dict[str, Any] = {"max_new_tokens": 90, "sampling": HOT, "ignore_eos": True}


class Stop(Exception):
    """Ends a run from outside."""


def after(steps: int) -> Callable[[Step], None]:
    """A callback that ends the run after some steps."""
    left = [steps]

    def on_step(step: Step) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stop

    return on_step


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model(), tiny_tokenizer())


def begin(llm: LLM, folder: Path, steps: int, prompt: Any = "hello", **call: Any) -> None:
    with pytest.raises(Stop):
        llm.generate(prompt, **{**CALL, **call}, run_dir=folder, on_step=after(steps))


def texts(folder: Path) -> dict[str, str]:
    return {p.name: p.read_bytes().decode() for p in folder.glob("text*")}


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
    assert [s["strategy"] for s in state.sessions] == [strategy] * 4 and not is_locked(folder)


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
    whole = llm.generate("hello", **{**CALL, "max_new_tokens": 120}).text
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


def test_text_edited_while_the_run_writes(llm: LLM, tmp_path: Path) -> None:
    """An editor replaces the file under the run: the run's text goes to a new one."""
    folder = tmp_path / "run"

    def on_step(step: Step) -> None:
        (folder / "new").write_text("mine", encoding="utf-8")
        os.replace(folder / "new", folder / "text.unfinished.txt")

    done = llm.generate("hello", **CALL, run_dir=folder, on_step=on_step)
    assert texts(folder) == {"text.unfinished.txt": "mine", "text.2.txt": done.text}


def test_a_torn_tail_is_dropped(llm: LLM, tmp_path: Path) -> None:
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


def journal_tokens(folder: Path) -> int:
    return len(folders.load(folder)[1].tokens)


# ---- refusals ---------------------------------------------------------------------------------------------


def test_two_writers_and_a_stale_lock(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    running = llm.stream("hello", **CALL, run_dir=folder)
    next(running)
    assert is_locked(folder)
    with pytest.raises(InputError, match=f"is being written by process {os.getpid()};"):
        llm.generate("hello", **CALL, run_dir=folder)
    running.close()  # type: ignore[attr-defined]
    assert not is_locked(folder)
    (folder / "lock").write_text("999999\n")  # left by a process that died
    assert tokenswift.resume(folder, llm=llm).finish_reason == "length"
    never = llm.stream("hello", **{**CALL, "max_new_tokens": 99}, run_dir=folder)
    del never  # a stream that was never begun holds nothing
    assert len(tokenswift.resume(folder, max_new_tokens=100, llm=llm).token_ids) == 100


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": replace(HOT, seed=4)}, "seed is 4, was 3"),
        (
            {"sampling": replace(HOT, top_p=0.5, temperature=1.0)},
            "temperature is 1.0, was 1.3; top_p is 0.5, was 1.0",
        ),
        ({"prompt": "hullo"}, "the prompt differs"),
        ({"stop": ("x",)}, "stop is ['x'], was []"),
        ({"ignore_eos": False}, "the end-of-text tokens (ignore_eos) is [257], was []"),
        ({"strategy_options": {"acceptance": "published"}}, "acceptance is 'published', was 'exact'"),
        ({"max_new_tokens": 5}, "max_new_tokens is 5; the run has 20 tokens already"),
    ],
)
def test_changed_settings(llm: LLM, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    folder = tmp_path / "run"
    begin(llm, folder, 20, strategy="autoregressive")
    before = (folder / "journal").read_bytes()
    call = {"prompt": "hello", **CALL, **change}
    with pytest.raises(InputError) as caught:
        llm.generate(**call, run_dir=folder)
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert (folder / "journal").read_bytes() == before and not is_locked(folder)


def test_changed_model(llm: LLM, tmp_path: Path, tiny_folder: Callable[..., Path]) -> None:
    """Other weights, another config, another dtype, another tokenizer, other positions: each is named."""
    folder = tmp_path / "run"
    begin(llm, folder, 20)
    tuned = tiny_model()
    with torch.no_grad():
        for parameter in tuned.model.layers[1].mlp.parameters():
            parameter.add_(1e-4)
    other = tiny_tokenizer()
    other.add_tokens(["hey"])
    cases = [
        (LLM.from_model(tuned, tiny_tokenizer()), "the model's weights differs;"),
        (LLM.from_model(tiny_model(rms_norm_eps=1e-4), tiny_tokenizer()), "the model's config differs;"),
        (LLM.from_model(tiny_model().bfloat16(), tiny_tokenizer()), "dtype is 'bfloat16', was 'float32';"),
        (LLM.from_model(tiny_model(), other), "the tokenizer differs;"),
        (
            LLM.from_model(tiny_model(), tiny_tokenizer(), rope_scaling="yarn:2"),
            "rope_scaling is 'yarn:2', was",
        ),
    ]
    for changed, named in cases:
        with pytest.raises(InputError, match="holds another run: ") as caught:
            tokenswift.resume(folder, llm=changed)
        assert named in str(caught.value), (named, str(caught.value))


class Adapted(nn.Module):
    """A linear layer with a low-rank addition, as PEFT names its parts."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"style": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"style": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base_layer(states) + self.lora_B["style"](self.lora_A["style"](states))


def adapted(seed: int, rank: int = 2) -> LLM:
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj, seed)
    model.peft_config = {"style": type("Config", (), {"to_dict": lambda self: {"r": rank}})()}
    return LLM.from_model(model.eval(), tiny_tokenizer())


def test_changed_adapter(llm: LLM, tmp_path: Path) -> None:
    """An adapter is known apart from its base: added, changed or taken away, it is named."""
    folder, plain = tmp_path / "run", tmp_path / "plain"
    begin(adapted(1), folder, 20)
    begin(llm, plain, 20)
    kept = folders.load(folder)[1].header["identity"]
    assert kept["adapter"]["names"] == ["style"]
    assert folders.load(plain)[1].header["identity"]["adapter"] is None
    for changed in (adapted(2), adapted(1, rank=3)):
        with pytest.raises(InputError, match="another run: the adapter differs;"):
            tokenswift.resume(folder, llm=changed)
    with pytest.raises(InputError, match="the adapter differs"):
        tokenswift.resume(folder, llm=llm)
    with pytest.raises(InputError, match="the adapter differs"):
        tokenswift.resume(plain, llm=adapted(1))
    assert tokenswift.resume(folder, llm=adapted(1)).finish_reason == "length"


def test_the_identity_does_not_depend_on_where_a_model_lies(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    there = tmp_path / "copy"
    shutil.copytree(tiny_folder(), there)
    with LLM(tiny_folder()) as one, LLM(there) as two:
        assert one.identity() == two.identity()
    model = tiny_model()
    assert identity_of(model) == identity_of(model)


def test_another_version_and_no_run(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(llm, folder, 5)
    data = (folder / "journal").read_bytes()
    (folder / "journal").write_bytes(data.replace(b"journal 1\n", b"journal 7\n", 1))
    for call in (
        lambda: tokenswift.resume(folder, llm=llm),
        lambda: llm.generate("hello", **CALL, run_dir=folder),
    ):
        with pytest.raises(InputError, match="journal is of version 7; valid: version 1"):
            call()
    with pytest.raises(InputError, match="holds no run; valid: a folder made with --run-dir"):
        tokenswift.resume(tmp_path, llm=llm)
    (folder / "journal").unlink()
    with pytest.raises(InputError, match="has no journal but text.unfinished.txt"):
        llm.generate("hello", **CALL, run_dir=folder)
    journal.create(folder / "journal", [{"kind": "end"}])
    with pytest.raises(InputError, match="does not begin with a run's header"):
        tokenswift.resume(folder, llm=llm)


def test_a_folder_that_cannot_be_written(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="run_dir .*file cannot be written .*; valid: a writable folder"):
        llm.generate("hello", **CALL, run_dir=tmp_path / "file")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.access(locked, os.W_OK):  # root may write everywhere

        def refuse(*_: object) -> int:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(folders.os, "open", refuse)
    with pytest.raises(
        InputError, match="locked cannot be written .(Read-only file system|Permission denied)"
    ):
        llm.generate("hello", **CALL, run_dir=locked / "")


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_full_disk(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """The run ends with what was kept and how to go on; with room again it goes on to the same text."""
    folder = tmp_path / "run"
    monkeypatch.setattr(writer, "SYNC_TOKENS", 4)
    real, left = journal.Appender.append, [room]

    def full(self: journal.Appender, *records: journal.Record) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(self, *records)

    with monkeypatch.context() as patch:
        patch.setattr(journal.Appender, "append", full)
        with pytest.raises(
            RunError, match=r"failed .No space left on device.; \d+ tokens are kept in"
        ) as caught:
            llm.generate("hello", **CALL, run_dir=folder)
    kept = journal_tokens(folder)
    assert f"; {kept} tokens are kept in {folder}; go on with: tokenswift resume {folder}" in str(
        caught.value
    )
    assert not is_locked(folder)
    assert tokenswift.resume(folder, llm=llm).token_ids == llm.generate("hello", **CALL).token_ids


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
    assert folders.load(tmp_path / "run")[1].session["numerics"]["equal_bits"] is False
    assert caplog.records == []
    tokenswift.resume(tmp_path / "run", llm=other)
    assert [r.getMessage().count("may differ") for r in caplog.records] == [1]
    begin(llm, tmp_path / "equal", 20)
    tokenswift.resume(tmp_path / "equal", llm=llm)
    assert len(caplog.records) == 1 and llm.numerics()["equal_bits"]


def test_a_model_from_a_program_has_to_be_given(llm: LLM, tmp_path: Path) -> None:
    begin(llm, tmp_path / "run", 5)
    with pytest.raises(InputError, match="llm is not given, and the run's model .* came from a program"):
        tokenswift.resume(tmp_path / "run")


def test_a_hundred_thousand_tokens_are_read_without_decoding_them_again(llm: LLM, tmp_path: Path) -> None:
    """Reading is linear, and no text is decoded again: the detokeniser takes up its state."""
    folder = tmp_path / "run"
    begin(llm, folder, 30)
    contents, state = folders.load(folder)
    template = contents.records[2]
    more = [template] * (100_000 // len(template["ids"]))
    journal.create(folder / "journal", [*contents.records, *more])
    calls: list[int] = []
    tokenizer = type("Counting", (), {"decode": lambda self, ids, **_: calls.append(1) or "x"})()
    big = folders.load(folder)[1]
    assert len(big.tokens) > 99_000 and len(big.text) >= len(more) * len(template["text"])
    stream = tokenswift.text.TextStream(tokenizer)  # type: ignore[attr-defined]
    assert big.stream is not None
    stream.restore(big.stream)
    assert calls == []


def test_a_closed_llm_says_so(tmp_path: Path) -> None:
    llm = LLM.from_model(tiny_model(), tiny_tokenizer())
    assert llm.generate("hello", 2).token_ids
    llm.close()
    uses: list[Callable[[], Any]] = [
        lambda: llm.generate("hello"),
        lambda: llm.stream("hello"),
        lambda: llm.draft_model(),
        lambda: llm.heads_of("medusa"),
        lambda: llm.model,
        lambda: llm.dtype,
        lambda: llm.device,
    ]
    for use in uses:
        with pytest.raises(InputError, match="the LLM is closed; valid: one that was not closed"):
            use()
    llm.close()  # once more does no harm


def test_unknown_arguments_are_named(llm: LLM) -> None:
    with pytest.raises(InputError, match="'rundir' is no argument; valid: on_loop, loop, run_dir"):
        llm.generate("hello", rundir="x")
    with pytest.raises(InputError, match="on_loop is 'halt'; valid: report, stop"):
        llm.generate("hello", on_loop="halt")


def test_metrics_survive(llm: LLM, tmp_path: Path) -> None:
    """Counts of a resumed run are the whole run's: plain decoding takes a step a token, whatever happened."""
    begin(llm, tmp_path / "run", 33, strategy="autoregressive")
    found = tokenswift.resume(tmp_path / "run", llm=llm)
    assert found.metrics.steps == 90 and found.metrics.mean_acceptance_length == 1.0
    _, state = folders.load(tmp_path / "run")
    assert state.end is not None
    kept = state.end["metrics"]
    assert kept["steps"] == 90 and kept == json.loads(json.dumps(asdict(found.metrics)))
    assert found.metrics.seconds == pytest.approx(
        sum(v for k, v in state.seconds.items() if k != "prefill"), abs=0.05
    )
