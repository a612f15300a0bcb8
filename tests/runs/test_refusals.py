"""Who may write a run, and what has to be the same to go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenswift
from tests.conftest import tiny_model, tiny_tokenizer
from tests.runs.common import CALL, HOT, begin, journal_tokens
from tokenswift import LLM, InputError, RunError
from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.folder import is_locked

PUBLISHED = {"strategy": "tokenswift", "strategy_options": {"acceptance": "published"}}

# ---- refusals ------------------------------------------------------------------------------------


def test_two_writers_and_a_stale_lock(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    running = llm.stream("hello", **CALL, run_dir=folder)
    next(running)
    assert is_locked(folder)
    with pytest.raises(InputError, match="is being written by another process;"):
        llm.generate("hello", **CALL, run_dir=folder)
    running.close()  # type: ignore[attr-defined]
    assert not is_locked(folder)
    with llm.stream("hello", **CALL, run_dir=folder):
        assert is_locked(folder)
    assert not is_locked(folder)  # though no step was taken
    (folder / "lock").write_text("999999\n")  # left by a process that died
    assert tokenswift.resume(folder, llm=llm).finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"sampling": replace(HOT, seed=4), "stop": ("x",)},
            "seed is 4, was 3; stop is ['x'], was []",
        ),
        (
            {"ignore_eos": False, **PUBLISHED},
            "acceptance is 'published', was 'exact'; eos is [257], was []",
        ),
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
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (folder / "journal").read_bytes() == before
    assert not is_locked(folder)


def test_a_run_whose_journal_could_not_be_read_is_not_begun(llm: LLM, tmp_path: Path) -> None:
    """A name with a control character, say: the run would be lost."""
    odd = LLM.from_model(tiny_model(), tiny_tokenizer())
    odd.resources.name = "a\x1b[2Jb"
    with pytest.raises(InputError, match="cannot keep this run: its journal takes no such name;"):
        odd.generate("hello", **CALL, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_changed_model(llm: LLM, tmp_path: Path, tiny_folder: Callable[..., Path]) -> None:
    """Other weights, another config, another dtype, another tokenizer, other positions: each is
    named."""
    folder = tmp_path / "run"
    begin(llm, folder, 20)
    tuned = tiny_model()
    with torch.no_grad():
        for parameter in tuned.model.layers[1].mlp.parameters():
            parameter.add_(1e-4)
    other = tiny_tokenizer()
    other.add_tokens(["hey"])
    cases = [
        (LLM.from_model(tuned, tiny_tokenizer()), "weights differs;"),
        (
            LLM.from_model(tiny_model().bfloat16(), tiny_tokenizer()),
            "dtype is 'bfloat16', was 'float32';",
        ),
        (LLM.from_model(tiny_model(), other), "tokenizer differs;"),
    ]
    for changed, named in cases:
        with pytest.raises(InputError, match="holds another run: ") as caught:
            tokenswift.resume(folder, llm=changed)
        assert named in str(caught.value), (named, str(caught.value))


def test_another_version_and_no_run(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal").write_bytes(b"tokenswift journal 0.99\n")
    with pytest.raises(InputError, match=r"journal is of version 0.99; valid: version 0\.1$"):
        tokenswift.resume(folder, llm=llm)
    with pytest.raises(InputError, match="holds no run; valid: a folder made with --run-dir"):
        tokenswift.resume(tmp_path, llm=llm)
    (folder / "journal").rename(folder / "text.txt")
    with pytest.raises(InputError, match="it holds 'text.txt' and no run"):
        llm.generate("hello", **CALL, run_dir=folder)
    journal.create(folder / "journal", [])
    with pytest.raises(InputError, match="does not begin with a run's header"):
        tokenswift.resume(folder, llm=llm)


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_full_disk(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """The run ends with what was kept and how to go on; with room again it goes on to the same
    text."""
    folder = tmp_path / "run"
    monkeypatch.setattr(folders, "SYNC_TOKENS", 4)
    real = journal.Appender.append
    left = [room]

    def full(self: journal.Appender, *records: Any) -> None:
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
    count = journal_tokens(folder)
    assert (
        f"; {count} tokens are kept in {folder}; continue with: tokenswift resume {folder}"
        in str(caught.value)
    )
    assert not is_locked(folder)
    assert tokenswift.resume(folder, llm=llm).token_ids == llm.generate("hello", **CALL).token_ids
