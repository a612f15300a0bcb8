"""A real model beside llama.cpp: rows, with a stand-in for llama.cpp, and the tables of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import real
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import LLM
from tokenswift.types import RunError
from tools import summaries

PEER = """#!{python}
import json, sys
print(json.dumps("1.2.3 (AVX2)"), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    reading, writing = 2.0 * len(asked["ids"]), 1.0 * len(asked["more"])
    print(json.dumps({{"reading": reading, "writing": writing}}), flush=True)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[real.Peer]:
    program = tmp_path / "python"
    program.write_text(PEER.format(python=sys.executable))
    program.chmod(0o755)
    made = real.Peer(str(program), tmp_path / "model.gguf", 1)
    yield made
    made.close()


def test_rows_and_their_tables(
    peer: real.Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways give the same tokens, ratios are those of the rates, and the docs show the newest
    rows. In a conversation the model itself answers."""
    llm = LLM.from_model(tiny_model("qwen2", max_position_embeddings=1024), chat_tokenizer())
    monkeypatch.setitem(real.TASKS, "talk", (("Hello", "And?"), 8, {}))
    text = llm.tokenizer.decode(real.prompt_of(llm, "talk"))
    assert re.fullmatch(r"<s>user: Hello\nassistant: .+\nuser: And\?\nassistant:", text, re.DOTALL)
    monkeypatch.setitem(real.TASKS, "novel", (60, 40, {}))
    row = real.task(llm, "novel", peer, 2)
    assert row["identical"] and 0 < row["tokens"] <= 80 and len(row["ratios"]) == 2
    assert row["llama"] == row["tokens"] / 2 and row["plain_over_llama"] > 0
    behind = real.context(llm, 48, peer, 2)
    assert (
        behind["context"] == 48
        and behind["llama_reading"] == 96
        and behind["llama_writing"] == real.NEW
    )
    rows = [{**row, "auto": 1.0}, row, behind, {**row, "auto": 2.0, "machine": "other"}]
    more = {"model": "m", "dtype": "int8", "machine": "cpu", "commit": "c", "peer": peer.version}
    (tmp_path / "real.jsonl").write_text("".join(json.dumps({**more, **r}) + "\n" for r in rows))
    monkeypatch.setattr(summaries, "REAL", tmp_path / "real.jsonl")
    tasks, contexts = summaries.real("cpu"), summaries.contexts("cpu")
    assert [cells[0] for cells in tasks.body] == ["novel"] and tasks.body[0][
        3
    ] == f"**{row['auto']:.1f}**"
    assert [cells[0] for cells in contexts.body] == ["48"] and "1.2.3 (AVX2)" in contexts.below


def test_a_peer_without_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="ended with code 1"):
        real.Peer(sys.executable, tmp_path / "model.gguf", 1)
