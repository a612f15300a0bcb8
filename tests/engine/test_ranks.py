"""A model over two processes by transformers' tensor-parallel plan: each writes the tokens of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenswift import LLM, InputError

ROOT = Path(__file__).parents[2]
PROMPT = list(range(40, 100)) * 2
OPTIONS = {"tree": (1, 2, 2), "ngrams": 4, "budget": 64, "sinks": 8, "draft": "partial"}
RANK = """
import json, sys
from tests.engine.test_ranks import texts
from tokenswift import LLM
with LLM(sys.argv[1], tp=2, heads=None, device="cpu") as llm:
    print(json.dumps([texts(llm), llm.numerics()["how"], llm.target.kv_heads]))
"""


def texts(llm: LLM) -> list[list[int]]:
    """Plain decoding and a tree, greedy and seeded."""
    ways: list[tuple[str, dict[str, Any]]] = [("autoregressive", {}), ("tokenswift", OPTIONS)]
    given: tuple[dict[str, Any], ...] = ({"greedy": True}, {"seed": 3})
    return [
        llm.generate(PROMPT, 24, name, options, ignore_eos=True, **how).token_ids
        for name, options in ways
        for how in given
    ]


@pytest.mark.slow
def test_tokens_are_those_of_one_process(tiny_folder: Callable[..., Path]) -> None:
    folder = str(tiny_folder("llama", max_position_embeddings=512))
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    usual = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, folder],
            cwd=ROOT,
            env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    expected = texts(LLM(folder, heads=None, backend="torch"))
    assert len({tuple(text) for text in expected}) == 2  # greedy, and with a seed
    for one in started:
        out, _ = one.communicate(timeout=300)
        found, how, heads = json.loads(out.splitlines()[-1])
        assert one.returncode == 0 and found == expected and "over 2 ranks" in how and heads == 1


def test_what_ranks_would_not_do_alike_is_refused(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^tp is 2, but torchrun started 1; valid: with torchrun --nproc"):
        LLM(tiny_folder(), tp=2)
    llm = LLM(tiny_folder(), heads=None)
    llm.target.ranks = 2
    with pytest.raises(InputError, match="^strategy is 'auto', which depends on timings"):
        llm.generate(PROMPT, 2)
    with pytest.raises(InputError, match="^run_dir is given with tp; valid: None"):
        llm.generate(PROMPT, 2, "autoregressive", run_dir=tmp_path / "run")
