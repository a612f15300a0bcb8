"""Real clusters of Ray on this machine: actors are killed, a node is taken away, and no text changes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.state import RunState

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WITHIN = 900.0  # seconds, on a machine that has other things to do


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with one core each; this process does not belong to it."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    try:
        yield made
    finally:
        made.shutdown()


def prompts_in(name: str, count: int) -> str:
    lines = [{"id": f"t{i:02}", "prompt": f"The story of number {i} begins", "seed": i} for i in range(count)]
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return name


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``generate`` with some options; what still runs at the end of the test is killed."""
    made: list[subprocess.Popen[str]] = []

    def run(*argv: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tokenswift", "generate", "--ignore-eos", *map(str, argv)]
        made.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return made[-1]

    yield run
    for process in made:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate(timeout=WITHIN)
    assert process.returncode == 0, err
    return err


def states(out: str) -> dict[str, RunState]:
    return {path.name: folders.load(path)[1] for path in sorted(Path(out).iterdir()) if path.is_dir()}


def writers(out: str) -> dict[int, int]:
    """Process → tokens so far of the shortest text that it writes now and has begun."""
    found: dict[int, int] = {}
    for path in Path(out).glob("*/journal"):
        if folders.is_locked(path.parent):
            state = folders.load(path.parent)[1]
            pid = state.session.pid
            found[pid] = min(found.get(pid, 10**9), len(state.tokens))
    return found


def went_on_at(folder: Path) -> list[int]:
    """How many tokens each session but the first found."""
    found, tokens = [], 0
    for record in journal.read(folder / folders.JOURNAL).records:
        if record["kind"] == "session":
            found.append(tokens)
        tokens += len(record.get("ids", ()))
    return found[1:]


@pytest.mark.model
def test_actors_that_are_killed_and_a_node_that_goes_change_no_text(
    cluster: Any,
    start: Callable[..., subprocess.Popen[str]],
    embedded: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 prompts of 400 tokens; ten kills, and one of two nodes is taken away."""
    monkeypatch.chdir(tmp_path)
    how = ("--prompts", prompts_in("p.jsonl", 12), "--max-new-tokens", 400, "--model", embedded)
    finish(start(*how, "--out", "alone", "--threads", 1))
    process = start(*how, "--out", "out", "--ray", cluster.address, "--json", "r.jsonl")
    chance, killed, end = random.Random(7), 0, time.monotonic() + WITHIN
    begun: dict[int, int] = {}
    while killed < 10 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
        # those that have written something: a kill while a model is loaded tests Ray alone
        able = [pid for pid, tokens in writers("out").items() if tokens > begun.setdefault(pid, tokens)]
        if able:
            with suppress(ProcessLookupError):  # the folder's new writer has not said so yet
                os.kill(chance.choice(able), signal.SIGKILL)
                killed += 1
            if killed == 5 and cluster.worker_nodes:
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    err = finish(process)
    assert killed == 10, err
    alone, found = states("alone"), states("out")
    assert found.keys() == alone.keys()
    for name, state in found.items():
        assert state.tokens == alone[name].tokens and len(state.tokens) == 400, name
        assert (Path("out") / name / "text.txt").read_bytes() == (
            Path("alone") / name / "text.txt"
        ).read_bytes()
        kinds = [record["kind"] for record in journal.read(Path("out") / name / folders.JOURNAL).records]
        assert kinds.count("end") == 1
    resumed = [at for name in found for at in went_on_at(Path("out") / name)]
    assert sum(0 < at < 400 for at in resumed) >= 10, resumed
    records = [json.loads(line) for line in Path("r.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["token_ids"] for record in records] == [state.tokens for state in alone.values()]
    assert re.search(r"^12 of 12 texts are in out ", err, re.MULTILINE), err
