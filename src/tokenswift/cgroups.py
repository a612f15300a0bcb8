"""Linux's control groups: how much processor time and memory a container gives this process.

A limit of any group that the process is in holds, of its own and of those above it. Version 2 has
one tree of groups, version 1 one for each controller. What a container's files do not show, or
cannot be read, sets no limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MOUNTS = Path("/sys/fs/cgroup")  # where Linux mounts them
OWN_GROUPS = Path("/proc/self/cgroup")  # names this process's groups


class GroupFolder(NamedTuple):
    """The folder of a control group.

    Attributes:
        version: of control groups, 1 or 2.
        path: the folder, which need not exist.
    """

    version: int
    path: Path


class MemoryLimit(NamedTuple):
    """The memory of a control group, in bytes.

    Attributes:
        limit: that its processes may use.
        used: that they use, without cached files, which are dropped when needed.
    """

    limit: int
    used: int


def group_folders(controller: str, mounts: Path, own_groups: Path) -> Iterator[GroupFolder]:
    """The folders of this process's groups, its own first, then those above it.

    Args:
        controller: "cpu" or "memory".
        mounts: the folder in which control groups are mounted.
        own_groups: the file that names this process's groups.
    """
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    version_2 = PurePosixPath("/")
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if not controllers:
            version_2 = PurePosixPath(name)
        elif controller in controllers.split(","):
            for mount in dict.fromkeys((controllers, controller)):
                yield from _with_parents(1, mounts / mount, PurePosixPath(name))
    yield from _with_parents(2, mounts, version_2)


def _with_parents(version: int, mount: Path, name: PurePosixPath) -> Iterator[GroupFolder]:
    parts = [part for part in name.parts if part != "/"]
    if ".." in parts:  # a group outside of what the container sees
        parts = []
    for count in range(len(parts), -1, -1):
        yield GroupFolder(version, mount.joinpath(*parts[:count]))


def cpu_quota(mounts: Path = MOUNTS, own_groups: Path = OWN_GROUPS) -> float:
    """Processors' worth of time that this process may have; infinity where nothing is set."""
    least = math.inf
    for version, folder in group_folders("cpu", mounts, own_groups):
        with suppress(OSError, ValueError, ZeroDivisionError):  # "max" where there is no limit
            if version == 2:
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
            count = int(quota) / int(period)
            if count > 0:  # -1: no limit
                least = min(least, count)
    return least


def memory_limits(mounts: Path = MOUNTS, own_groups: Path = OWN_GROUPS) -> Iterator[MemoryLimit]:
    """The memory of this process's groups, of those that have a limit."""
    for version, folder in group_folders("memory", mounts, own_groups):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit_name, used_name, cached_name = names
        with suppress(OSError, ValueError):  # "max" where there is no limit
            limit = int((folder / limit_name).read_text(encoding="ascii"))
            used = int((folder / used_name).read_text(encoding="ascii"))
            cached = _statistic(folder / "memory.stat", cached_name)
            yield MemoryLimit(limit, max(0, used - cached))


def _statistic(path: Path, name: str) -> int:
    """A number of a file of names and numbers; 0 where there is none."""
    with suppress(OSError, ValueError):
        line = re.search(rf"^{name} (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
        return int(line[1]) if line else 0
    return 0
