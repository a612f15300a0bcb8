"""Memory ahead of a run: what it will hold, what can be had, and a refusal before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from tokenswift.config import shown
from tokenswift.types import InputError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
LOGIT = 4  # bytes of a float32


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a run holds, and what the user asked for it with.

    Attributes:
        name, value: the argument or option that sets its size, as an error names them.
        nbytes: bytes.
        sure: whether a run allocates it in any case; what only a longer text would call for is held
            against the device's whole memory, the rest against what is free.
    """

    name: str
    value: object
    nbytes: int
    sure: bool = True


class Memory(NamedTuple):
    """Bytes of a device that can be had now, and all that it has."""

    free: int
    total: int


class Planned(Protocol):
    """A strategy that tells what it will hold besides the text's own cache."""

    def needs(self, text: int, row: int) -> list[Need]:
        """Tree rows and caches of its own.

        Args:
            text: tokens of prompt and output, at most.
            row: bytes of one node of a tree: its cache entry and its logits.
        """
        ...


class Sized(Protocol):
    """What the reckoning takes from a model."""

    vocab_size: int
    device: torch.device

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per cached token."""
        ...


def check_run(model: Sized, strategy: Planned, prompt: int, max_new_tokens: int) -> None:
    """See that the caches and tree rows of a run fit the free memory of the model's device.

    Args:
        prompt, max_new_tokens: tokens.
    Raises:
        InputError: they do not; one line with the largest part, the bytes needed and those available.
    """
    memory = device_memory(model.device)
    if memory is None:
        return
    token = model.kv_bytes
    needs = [
        Need("prompt", f"{prompt} tokens", prompt * token),
        Need("max_new_tokens", max_new_tokens, max_new_tokens * token),
        *strategy.needs(prompt + max_new_tokens, token + LOGIT * model.vocab_size),
    ]
    total = sum(need.nbytes for need in needs if need.sure)
    if total > memory.free:
        _refuse(max((need for need in needs if need.sure), key=lambda need: need.nbytes), total, memory.free)
    for need in needs:
        if need.nbytes > memory.total:
            _refuse(need, need.nbytes, memory.total)


def _refuse(need: Need, nbytes: int, available: int) -> None:
    value = need.value if isinstance(need.value, str) else shown(need.value)
    raise InputError(
        f"{need.name} is {value}; the run needs {nbytes:,} bytes of memory, {available:,} bytes are "
        f"available; valid: a smaller {need.name}"
    )


def device_memory(device: torch.device) -> Memory | None:
    """Memory of a device; None where the system does not tell."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Memory(free + cached, total)  # what torch keeps for itself can be had as well
    return host_memory() if device.type == "cpu" else None


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> Memory | None:
    """Memory of the host as Linux reports it, or of the control group where that has less.

    Args:
        proc, cgroups: where these file systems are mounted.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        parts = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if " kB" in line}
        found = [Memory(parts["MemAvailable"], parts["MemTotal"])]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    for folder, limit, used in _groups(proc, cgroups):
        try:
            most = int((folder / limit).read_text())  # "max" where there is none
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(
                stat.get("total_inactive_file", stat.get("inactive_file", "0"))
            )  # given back on need
            held = int((folder / used).read_text()) - cached
        except (OSError, ValueError):
            continue
        found.append(Memory(max(0, most - held), most))
    return Memory(min(m.free for m in found), min(m.total for m in found))


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, str, str]]:
    """The control groups that bind this process: folder, file of the limit, file of the use."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            top, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            top, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = Path(path.lstrip("/"))
        for part in (inside, *inside.parents):  # a limit of any group above binds as well
            yield top / part, *names
