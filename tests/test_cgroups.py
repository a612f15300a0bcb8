"""Limits of control groups: of the process's own group and of those above it, of either version."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tokenswift import cgroups
from tokenswift.cgroups import cpu_quota, memory_limits
from tokenswift.kernels.cpu import library

V2 = "0::/a/b\n"
V1 = "12:cpu,cpuacct:/docker/c\n7:memory:/docker/c\n0::/\n"


class Tree:
    """A folder with files as Linux shows control groups."""

    def __init__(self, root: Path, own_groups: str, files: dict[str, str]) -> None:
        self.mounts = root / "cgroup"
        self.own_groups = root / "own"
        self.mounts.mkdir()
        self.own_groups.write_text(own_groups)
        for name, text in files.items():
            path = self.mounts / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


QUOTAS: list[tuple[str, dict[str, str], float]] = [
    ("", {}, math.inf),
    ("nonsense", {"cpu.max": "nonsense"}, math.inf),
    ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
    ("0::/\n", {"cpu.max": "100000 0\n"}, math.inf),
    (V2, {"a/b/cpu.max": "400000 100000\n"}, 4.0),
    (V2, {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
    (V2, {"a/b/cpu.max": "max 100000\n", "cpu.max": "300000 100000\n"}, 3.0),
    (V2, {"a/b/c/cpu.max": "100000 100000\n"}, math.inf),
    ("0::/../other\n", {"cpu.max": "250000 100000\n"}, 2.5),
    (
        V1,
        {
            "cpu,cpuacct/docker/c/cpu.cfs_quota_us": "350000\n",
            "cpu,cpuacct/docker/c/cpu.cfs_period_us": "100000\n",
        },
        3.5,
    ),
    (
        V1,  # a container that sees its own group at the root
        {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        0.5,
    ),
    (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
]


@pytest.mark.parametrize(("own_groups", "files", "count"), QUOTAS)
def test_the_tightest_quota_holds(
    tmp_path: Path, own_groups: str, files: dict[str, str], count: float
) -> None:
    tree = Tree(tmp_path, own_groups, files)
    assert cpu_quota(tree.mounts, tree.own_groups) == count


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (1.0, 1), (2.9, 2), (4.0, 4), (99.0, 6)])
def test_threads_are_a_quota_rounded_down(
    monkeypatch: pytest.MonkeyPatch, quota: float, threads: int
) -> None:
    monkeypatch.setattr(library.sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6), raising=False)
    monkeypatch.setattr(library, "cpu_quota", lambda: quota)
    assert library.usable_processors() == threads


STATISTICS = "anon 5\ninactive_file 1000\ntotal_inactive_file 2000\n"
MEMORIES: list[tuple[str, dict[str, str], list[tuple[int, int]]]] = [
    ("", {}, []),
    (V2, {"a/b/memory.max": "max\n", "a/b/memory.current": "5000\n"}, []),
    (
        V2,
        {
            "a/b/memory.max": "9000\n",
            "a/b/memory.current": "5000\n",
            "a/b/memory.stat": STATISTICS,
            "a/memory.max": "8000\n",
            "a/memory.current": "7000\n",
        },
        [(9000, 4000), (8000, 7000)],
    ),
    (V2, {"memory.max": "9000\n", "memory.current": "x\n"}, []),
    (
        V1,
        {
            "memory/docker/c/memory.limit_in_bytes": "9000\n",
            "memory/docker/c/memory.usage_in_bytes": "5000\n",
            "memory/docker/c/memory.stat": STATISTICS,
        },
        [(9000, 3000)],
    ),
    (
        V1,
        {
            "memory/memory.limit_in_bytes": "9000\n",
            "memory/memory.usage_in_bytes": "500\n",
            "memory/memory.stat": STATISTICS,
        },
        [(9000, 0)],
    ),
]


@pytest.mark.parametrize(("own_groups", "files", "limits"), MEMORIES)
def test_memory_of_groups_of_either_version(
    tmp_path: Path, own_groups: str, files: dict[str, str], limits: list[tuple[int, int]]
) -> None:
    tree = Tree(tmp_path, own_groups, files)
    assert list(memory_limits(tree.mounts, tree.own_groups)) == limits


def test_this_process_has_groups_that_can_be_read() -> None:
    assert cpu_quota() > 0
    assert all(one.limit >= 0 for one in memory_limits(cgroups.MOUNTS, cgroups.OWN_GROUPS))
