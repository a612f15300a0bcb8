"""Tables of what a CUDA card has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import cards


def test_passes_by_rows_and_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "card.jsonl"
    monkeypatch.setattr(cards, "PASSES", file)
    assert "Not measured yet" in cards.passes().markdown()
    rows = [
        {"what": "versions", "torch": "2.11.0", "triton": "3.6.0", "commit": "0123456789"},
        {"what": "pass", "context": 9000, "rows": 16, "ms": 6.0, "over_one_row": 1.2},
        {"what": "pass", "context": 9000, "rows": 1, "ms": 5.0, "over_one_row": 1.0},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = cards.passes().markdown()
    assert "| 9,000 | 5.0 (1.00) | 6.0 (1.20) |" in text
    assert "Triton 3.6.0, commit 01234567." in text


def test_tasks_of_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "real.jsonl"
    monkeypatch.setattr(cards, "REAL", file)
    assert "Not measured yet" in cards.real().markdown()
    row = {
        "task": "chat",
        "tokens": 100,
        "plain": 300.4,
        "auto": 450.6,
        "auto_over_plain": 1.5,
        "tokens_a_step": 2.25,
        "identical": False,
        "model": "m",
        "dtype": "bfloat16",
        "machine": "card",
        "commit": "c",
    }
    file.write_text(json.dumps(row) + "\n" + json.dumps({"context": 1024}) + "\n")
    text = cards.real().markdown()
    assert "| chat | 100 | 300 | 451 | **1.50** | 2.25 | **no** |" in text
