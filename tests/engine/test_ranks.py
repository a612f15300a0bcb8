"""A model over two processes: the tokens of one, one voice, and a clear end where they part.

Both are started here as torchrun would start them, once for all tests.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine import ranks_worker
from tokenswift import LLM, resume

pytestmark = pytest.mark.slow  # two processes of torch
ROOT = Path(__file__).parents[2]
WHOLE: dict[str, str | int] = {"": "cpu"}  # transformers' own forward in one process


class Ended(NamedTuple):
    """A rank that has ended."""

    code: int
    out: str
    err: str
    found: dict[str, Any]


def free_port() -> str:
    """A port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.fixture(scope="module")
def model(tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder("llama", max_position_embeddings=512))


@pytest.fixture(scope="module")
def plain(model: str) -> LLM:
    return LLM(model, heads=None, device_map=WHOLE)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    """The texts by one process."""
    return ranks_worker.texts(plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(model: str, folder: Path, tiny_folder: Callable[..., Path]) -> list[Ended]:
    """Both, with what they found."""
    odd = tiny_folder("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    command = [sys.executable, "-m", "tests.engine.ranks_worker", model, str(odd), str(folder)]
    usual = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    for rank, one in enumerate(started):
        out, err = one.communicate(timeout=600)
        path = folder / f"rank{rank}.json"
        assert path.is_file(), err
        ended.append(Ended(one.returncode, out, err, json.loads(path.read_text())))
    return ended


def test_tokens_are_those_of_one_process(ranks: list[Ended], expected: list[list[int]]) -> None:
    for one in ranks:
        assert one.found["texts"] == expected
        assert one.found["many"] == [expected[0][:5], one.found["many"][1]]
    assert len({tuple(text) for text in expected}) == 2  # greedily and with a seed
    assert ranks[0].found["many"] == ranks[1].found["many"]


def test_each_holds_its_part_and_knows_the_whole(ranks: list[Ended], plain: LLM, model: str) -> None:
    for one in ranks:
        assert one.found["kv_heads"] == 1 and plain.target.kv_heads == 2
        assert one.found["identity"] == plain.resources.identity()
        assert plain.resources.identity() == LLM(model, heads=None).resources.identity()
        assert "over 2 ranks" in one.found["numerics"]["how"]
        assert one.found["numerics"]["equal_bits"] is False


def test_what_a_clock_or_a_disk_tells_is_the_first_ranks_word(ranks: list[Ended]) -> None:
    first, second = (one.found for one in ranks)
    assert first["shared"] == second["shared"] == 10
    assert first["clock"] == second["clock"]
    assert first["first"] == second["first"] == "rank 0"
    assert first["refused"] == second["refused"] == "InputError: by rank 0"


@pytest.mark.parametrize(
    "case, line",
    [
        ("parted", "RunError: the ranks of the model do not agree on their number"),
        ("other prompt", "RunError: the ranks of the model do not agree on the prompt"),
        ("other seed", "RunError: the ranks of the model do not agree on the tokens of a step"),
        ("other drafts", "RunError: the ranks of the model do not agree on what to draft"),
    ],
)
def test_ranks_that_part_end_alike(ranks: list[Ended], case: str, line: str) -> None:
    assert [one.found[case] for one in ranks] == [line, line]


def test_heads_that_cannot_be_shared_out(ranks: list[Ended]) -> None:
    for one in ranks:
        assert one.found["heads"].startswith("InputError: tp is 2, but model ")
        assert one.found["heads"].endswith(" has 6 heads of queries and 3 of keys; valid: 1, 3")


def test_the_first_rank_alone_writes(
    ranks: list[Ended], folder: Path, plain: LLM, expected: list[list[int]]
) -> None:
    assert json.loads((folder / "record.json").read_text())["token_ids"] == expected[0][:9]
    for name in ("command", "longer"):
        assert [one.found[name] for one in ranks] == [0, 0]
    assert "loading" in ranks[0].err and ranks[0].out
    assert "loading" not in ranks[1].err and not ranks[1].out
    assert resume(folder / "run", max_new_tokens=30, llm=plain).token_ids == expected[0][:30]


def test_a_rank_that_is_gone_ends_the_others_and_one_goes_on(
    ranks: list[Ended], folder: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert [one.code for one in ranks] == [0, 9]
    assert ranks[0].found["gone"] == "RunError: another rank is gone"
    assert ranks[0].found["seconds"] < 10
    with caplog.at_level("WARNING", "tokenswift"):
        whole = resume(folder / "left")
    assert whole.token_ids == expected[0]
    assert "over 2 ranks" in caplog.text and "may differ" in caplog.text
