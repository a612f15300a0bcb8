"""Memory ahead of a run: what it will hold, what can be had, and a refusal before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from tokenswift.config import CONTINUED_LENGTH, shown
from tokenswift.types import InputError
from tokenswift.words import counted

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
ANSWER = 1024  # new tokens that an answer may have in any case
SHARE = 16  # part of a device's memory that an answer may fill by default
LOGIT = 4  # bytes of a float32
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # of torch's messages


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
    """Bytes of a device that is available now, and all that it has."""

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
    dtype: torch.dtype
    backend: Any
    rotary: Any

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per cached token."""
        ...


def check_run(model: Sized, strategy: Planned, prompt: int, max_new_tokens: int, spare: int = 0) -> None:
    """See that the caches and tree rows of a run fit the free memory of the model's device.

    Args:
        prompt, max_new_tokens: tokens.
        spare: bytes that will be free besides by the time that it runs.
    Raises:
        InputError: they do not; one line with the largest part, the bytes needed and available, and what
            would fit.
    """
    memory = model.backend.memory()
    if memory is None:
        return
    needs = needs_of(model, strategy, prompt, max_new_tokens)
    total, free = sum(need.nbytes for need in needs if need.sure), memory.free + spare
    if total > free:
        most = max((need for need in needs if need.sure), key=lambda need: need.nbytes)
        _refuse(most, total, free, _advice(most, model, strategy, prompt, free))
    for need in needs:
        if need.nbytes > memory.total:
            _refuse(need, need.nbytes, memory.total, f"a smaller {need.name}")


def needs_of(model: Sized, strategy: Planned, prompt: int, max_new_tokens: int) -> list[Need]:
    """What a run holds: the full cache (as two entries, prompt and new tokens), and the strategy's own."""
    token = model.kv_bytes
    return [
        Need("prompt", counted(prompt, "token"), prompt * token),
        Need("max_new_tokens", max_new_tokens, max_new_tokens * token),
        *strategy.needs(prompt + max_new_tokens, token + LOGIT * model.vocab_size),
    ]


def largest(model: Sized, strategy: Planned, prompt: int, free: int) -> int:
    """The most new tokens whose run fits ``free`` bytes; 0 when none does."""

    def fits(new: int) -> bool:
        return sum(n.nbytes for n in needs_of(model, strategy, prompt, new) if n.sure) <= free

    low, high = 0, max(1, free // max(model.kv_bytes, 1)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def default_length(model: Sized, answered: bool, prompt: int) -> int:
    """New tokens at most after a prompt of ``prompt`` tokens, where no number is given.

    A continued text has 200. An answer ends where the model ends it: it has what is left of the model's
    positions, as far as a sixteenth of the device's memory holds them (1,024 in any case).
    """
    if not answered:
        return CONTINUED_LENGTH
    memory, limit = model.backend.memory(), model.rotary.limit
    held = ANSWER if memory is None else max(ANSWER, memory.total // SHARE // max(1, model.kv_bytes))
    return held if limit is None else max(1, min(held, limit - prompt))


def ran_out(
    model: Sized, strategy: Planned, prompt: int, held: int, error: BaseException, others: Sequence[str] = ()
) -> str:
    """In one line that a device's memory ran out under way, and what would fit.

    Args:
        prompt: its tokens.
        held: bytes of it that the run's caches take.
        error: the device's; torch's says how much was asked for.
        others: further ways to need less.
    """
    memory = model.backend.memory() or Memory(0, 0)
    asked = re.search(r"Tried to allocate ([\d.]+) (\w)iB", str(error))
    missing = float(asked[1]) * UNITS.get(asked[2], 1) if asked else memory.total / 16
    room = memory.free + held - (missing if held else 0)  # without caches they are what was asked for
    new = largest(model, strategy, prompt, int(room))
    ways = [f"max_new_tokens up to {new}" if new else "a shorter prompt", *others]
    return (
        f"out of memory: the run's caches take {held:,} bytes, {memory.free:,} bytes are free; "
        f"valid: {', or '.join(ways)}"
    )


def _advice(most: Need, model: Sized, strategy: Planned, prompt: int, free: int) -> str:
    """What would fit."""
    new = largest(model, strategy, prompt, free)
    if most.name not in ("prompt", "max_new_tokens"):
        return f"a smaller {most.name}"
    text = f"max_new_tokens up to {new}" if new else "a shorter prompt"
    return f"{text}, a dtype of two bytes" if str(model.dtype) == "torch.float32" else text


def _refuse(need: Need, nbytes: int, available: int, valid: str) -> None:
    value = need.value if isinstance(need.value, str) else shown(need.value)
    raise InputError(
        f"{need.name} is {value}; the run needs {nbytes:,} bytes of memory, {available:,} bytes are "
        f"available; valid: {valid}"
    )


def memory_of(device: torch.device) -> Memory | None:
    """Memory of a device; None where the system does not tell."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Memory(free + cached, total)  # what torch keeps for itself can be had as well
    return host_memory() if device.type == "cpu" else None


def host_memory(cgroups: Path = CGROUPS, own: Path = OWN) -> Memory:
    """Memory of the host, or of the control group where that has less.

    Args:
        cgroups: where Linux mounts control groups.
        own: the file that names those of this process.
    """
    host = psutil.virtual_memory()
    found = [Memory(host.available, host.total)]
    for folder, limit, used in _groups(cgroups, own):
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


def resident() -> int:
    """Bytes of memory that this process holds."""
    return psutil.Process().memory_info().rss


def _groups(cgroups: Path, own: Path) -> Iterator[tuple[Path, str, str]]:
    """The control groups that bind this process: folder, file of the limit, file of the use."""
    try:
        lines = own.read_text().splitlines()
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
