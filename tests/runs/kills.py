"""A process that kills its own runs: generates in children, ends each with SIGKILL at a random moment.

    python -m tests.runs.kills MODEL DTYPE FOLDER TOKENS KILLS SEED PAUSE

Prints one JSON object: what the uninterrupted run wrote, what was left after all kills and resumes, and for
each kill how many tokens were lost and how many of them had waited longer than the sync interval. The model
is loaded once; children are forks of it, so it runs on one thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tokenswift
from tokenswift.runs import folder as folders
from tokenswift.runs.writer import SYNC_SECONDS

PROMPT = "The lamp at Sallow Point had gone out, and nobody on the island could say when."
SLACK = 1.0  # seconds for a thread to wake and a disk to write, on a busy machine
ENTRY = struct.Struct("=id")


def child(llm: Any, folder: Path, call: dict[str, Any], pipe: int, pause: float) -> None:
    """Begin the run or go on with it; tells of every step, when it was accepted."""

    def on_step(step: tokenswift.Step) -> None:
        os.write(pipe, ENTRY.pack(len(step.token_ids), time.monotonic()))
        if pause:
            time.sleep(pause)

    if (folder / folders.JOURNAL).exists():
        tokenswift.resume(folder, llm=llm, on_step=on_step)
    else:
        llm.generate(**call, run_dir=folder, on_step=on_step)


def tokens_in(folder: Path) -> int:
    """Tokens in the journal."""
    return len(folders.load(folder)[1].tokens) if (folder / folders.JOURNAL).exists() else 0


def one(llm: Any, folder: Path, call: dict[str, Any], after: float | None, pause: float) -> dict[str, Any]:
    """One child, killed ``after`` seconds (None: left alone)."""
    before = tokens_in(folder)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            child(llm, folder, call, write, pause)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(9)
    os.close(write)
    killed_at = float("inf")
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    told = told[: len(told) - len(told) % ENTRY.size]
    steps = [ENTRY.unpack_from(told, at) for at in range(0, len(told), ENTRY.size)]
    accepted = before + sum(count for count, _ in steps)
    old = before + sum(count for count, when in steps if when < killed_at - SYNC_SECONDS - SLACK)
    kept = tokens_in(folder)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a child failed with {os.WEXITSTATUS(status)}")
    return {
        "killed": os.WIFSIGNALED(status),
        "before": before,
        "kept": kept,
        "lost": max(0, accepted - kept),
        "lost_too_old": max(0, old - kept) if after is not None else 0,
    }


def main() -> None:
    """See the module."""
    model, dtype, name, tokens, kills, seed, pause = sys.argv[1:8]
    folder, most, left = Path(name), int(tokens), int(kills)
    torch.set_num_threads(1)
    llm = tokenswift.LLM(model, dtype=dtype, device="cpu")
    call = {"prompt": PROMPT, "max_new_tokens": most, "ignore_eos": True}
    call["sampling"] = tokenswift.SamplingParams(seed=int(seed))
    begun = time.monotonic()
    whole = llm.generate(**call)
    rate = 1 / ((time.monotonic() - begun) / most + float(pause))
    chance = random.Random(int(seed))
    rows: list[dict[str, Any]] = []
    killed = 0
    while killed < left:
        rest = (most - tokens_in(folder)) / rate
        rows.append(
            one(llm, folder, call, chance.random() * min(0.9, 1.5 / (left - killed)) * rest, float(pause))
        )
        killed += rows[-1]["killed"]
    rows.append(one(llm, folder, call, None, float(pause)))
    _, state = folders.load(folder)
    record = {
        "kills": killed,
        "rows": rows,
        "same_tokens": state.tokens == whole.token_ids,
        "same_text": (folder / "text.txt").read_bytes().decode() == whole.text,
        "same_sources": len(state.sources) == len(state.chars) == most,
        "sessions": len(state.sessions),
        "reason": state.end.reason if state.end else None,
        "equal_bits": llm.numerics()["equal_bits"],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
