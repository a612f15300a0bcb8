"""A real cluster of Ray on this machine: actors are killed, a node is taken away, and no text
changes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tokenswift.runs import folder as folders
from tokenswift.runs import journal

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WITHIN = 900.0  # seconds, on a machine that has other things to do
KILLS = 10


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with one core each; this process does not belong to it."""
    from ray.cluster_utils import Cluster

    ray_cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    ray_cluster.add_node(num_cpus=1)
    try:
        yield ray_cluster
    finally:
        ray_cluster.shutdown()


#: what docs/scale.md has, for a cluster's address, a model, prompts and a folder
PROGRAM = """
import json, pathlib, sys
import ray
from tokenswift.distributed import Generator

address, model, prompts, out = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
items = [json.loads(line) for line in pathlib.Path(prompts).read_text().splitlines()]
# no task that reads: all cores are taken
rows = ray.data.from_items(items, override_num_blocks=len(items))
how = {"out": out, "model": model, "max_new_tokens": 400, "ignore_eos": True}
most = {"max_tasks_in_flight_per_actor": 4, "max_concurrent_calls_per_actor": 4}
compute = ray.data.ActorPoolStrategy(size=2, enable_true_multi_threading=True, **most)
where = {"compute": compute, "num_cpus": 1, "batch_size": None, "batch_format": "pyarrow"}
texts = rows.map_batches(Generator, fn_constructor_kwargs=how, **where).take_all()
assert len(texts) == 12 and not any(row["error"] for row in texts), texts
"""


@contextmanager
def begun(*argv: object) -> Iterator[subprocess.Popen[str]]:
    """A program of Python's, killed at the end if it still runs."""
    command = [sys.executable, *map(str, argv)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def writers() -> dict[int, int]:
    """Process → tokens so far of the shortest text that it writes now and has begun."""
    tokens_by_process: dict[int, int] = {}
    for path in Path("out").glob("*/journal"):
        if folders.is_locked(path.parent):
            state = folders.load(path.parent)[1]
            process = state.session.pid
            shortest = min(tokens_by_process.get(process, 10**9), len(state.tokens))
            tokens_by_process[process] = shortest
    return tokens_by_process


def went_on_at(folder: Path) -> list[int]:
    """How many tokens each session but the first went on from."""
    records: Any = journal.read(folder / folders.JOURNAL).records
    sessions = [i for i, record in enumerate(records) if record["kind"] == "session"]
    return [sum(len(record.get("ids", ())) for record in records[:i]) for i in sessions[1:]]


def kill_writers(process: subprocess.Popen[str], cluster: Any) -> int:
    """Kill actors that have written something, and take a node away halfway; the number of kills,
    :data:`KILLS` unless the program ends before."""
    chance = random.Random(7)
    killed = 0
    end = time.monotonic() + WITHIN
    first_counts: dict[int, int] = {}
    while killed < KILLS and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
        # those that have written something: a kill while a model is loaded tests Ray alone
        able = [
            pid
            for pid, tokens in writers().items()
            if tokens > first_counts.setdefault(pid, tokens)
        ]
        if able:
            with suppress(ProcessLookupError):  # the folder's new writer has not said so yet
                os.kill(chance.choice(able), signal.SIGKILL)
                killed += 1
            if killed == KILLS // 2 and cluster.worker_nodes:
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    return killed


@pytest.mark.model
def test_actors_that_are_killed_and_a_node_that_goes_change_no_text(
    cluster: Any, embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 prompts of 400 tokens; ten kills, and one of two nodes is taken away."""
    monkeypatch.chdir(tmp_path)
    prompts = [
        {"id": f"t{i:02}", "prompt": f"The story of number {i} begins", "seed": i}
        for i in range(12)
    ]
    Path("p.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in prompts), encoding="utf-8"
    )
    how = ("--prompts", "p.jsonl", "--max-new-tokens", 400, "--ignore-eos", "--model", embedded)
    with begun("-m", "tokenswift", "generate", *how, "--out", "alone", "--threads", 1) as process:
        _, err = process.communicate(timeout=WITHIN)
        assert process.returncode == 0, err
    out = (tmp_path / "out").absolute()
    out.mkdir()
    with begun("-c", PROGRAM, cluster.address, embedded, tmp_path / "p.jsonl", out) as process:
        killed = kill_writers(process, cluster)
        _, err = process.communicate(timeout=WITHIN)
        assert process.returncode == 0, err
        assert killed == KILLS, err
    resumed = []
    for line in prompts:
        one = Path("alone") / line["id"]
        other = Path("out") / line["id"]
        state = folders.load(other)[1]
        assert state.tokens == folders.load(one)[1].tokens, line
        assert len(state.tokens) == 400
        assert state.end is not None
        assert (one / "text.txt").read_bytes() == (other / "text.txt").read_bytes()
        resumed += went_on_at(other)
    assert sum(0 < at < 400 for at in resumed) >= KILLS, resumed
