"""One rank of two over a tiny model: what it found goes to a file. Started by `test_ranks`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenswift import LLM, RunError
from tokenswift.cli.main import main as command
from tokenswift.ranks import Ranks
from tokenswift.types import InputError

PROMPT = list(range(40, 100)) * 2
PAPER = {"tree": (1, 2, 2), "ngrams": 4, "budget": 64, "sinks": 8, "draft": "partial"}
GREEDY: dict[str, Any] = {"greedy": True}
SEEDED: dict[str, Any] = {"seed": 3}
#: strategies with options and sampling; the first two are plain decoding
HOW: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("autoregressive", {}, GREEDY),
    ("autoregressive", {}, SEEDED),
    ("tokenswift", PAPER, GREEDY),
    ("tokenswift", PAPER, SEEDED),
    ("auto", {}, SEEDED),
)
LENGTH = 32


def texts(llm: LLM) -> list[list[int]]:
    """The text of each way."""
    more: dict[str, Any] = {"ignore_eos": True}
    return [
        llm.generate(PROMPT, LENGTH, name, options, **how, **more).token_ids for name, options, how in HOW
    ]


def failed(call: Callable[[], object]) -> str:
    """The kind and the line of a call's error."""
    try:
        call()
    except (InputError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


def main(model: str, odd: str, out: Path) -> None:
    """Run everything, in the same order on both ranks."""
    rank, found = int(os.environ["RANK"]), {}
    ranks = Ranks(2, "cpu")
    found["shared"], found["clock"] = ranks.shared(rank + 10), ranks.clock()
    found["first"] = ranks.first(lambda: f"rank {rank}")

    def refuse() -> None:
        raise InputError(f"by rank {rank}")

    found["refused"] = failed(lambda: ranks.first(refuse))
    found["parted"] = failed(lambda: ranks.agree("their number", [rank]))
    found["heads"] = failed(lambda: LLM(odd, tp=2, heads=None))

    llm = LLM(model, tp=2, heads=None)
    found["numerics"], found["identity"] = llm.numerics(), llm.resources.identity()
    found["kv_heads"], found["texts"] = llm.target.kv_heads, texts(llm)
    many = llm.generate_many([PROMPT, PROMPT[:20]], 5, greedy=True, ignore_eos=True)
    found["many"] = [one.token_ids for one in many]
    found["other prompt"] = failed(lambda: llm.generate(PROMPT[rank:], 5))
    found["other seed"] = failed(lambda: llm.generate(PROMPT, 40, seed=rank, ignore_eos=True))
    found["other drafts"] = failed(
        lambda: llm.generate(
            PROMPT, 20, "tokenswift", PAPER | {"ngrams": 4 * rank}, greedy=True, repetition_penalty=1.0
        )
    )
    ids = ",".join(map(str, PROMPT))
    asked = [
        "--model",
        model,
        "--prompt-ids",
        ids,
        "--greedy",
        "--ignore-eos",
        "--heads",
        "none",
        "--tp",
        "2",
    ]
    left = ["--run-dir", str(out / "run"), "--json", str(out / "record.json"), "--strategy", "autoregressive"]
    found["command"] = command(["generate", *asked, "--max-new-tokens", "9", *left])
    found["longer"] = command(["resume", str(out / "run"), "--max-new-tokens", "20", "--tp", "2"])

    begun = 0.0

    def leave(step: Any) -> None:
        nonlocal begun
        begun = time.monotonic()
        leave.seen += len(step.token_ids)
        if rank == 1 and leave.seen > 8:
            write()
            os._exit(9)

    def write() -> None:
        (out / f"rank{rank}.json").write_text(json.dumps(found))

    leave.seen = 0
    how: dict[str, Any] = {"greedy": True, "ignore_eos": True, "run_dir": out / "left"}
    found["gone"] = failed(lambda: llm.generate(PROMPT, LENGTH, "autoregressive", on_step=leave, **how))
    found["seconds"] = time.monotonic() - begun
    write()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
