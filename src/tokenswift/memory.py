"""The memory of a run: what it will need, what is available, and a check before anything is
allocated."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from tokenswift.cgroups import MOUNTS, OWN_GROUPS, memory_limits
from tokenswift.checks import counted, shown
from tokenswift.config.sampling import CONTINUED_LENGTH
from tokenswift.types import InputError

ANSWER = 1024  # least default of an answer's new tokens
SHARE = 16  # an answer may fill 1 / this of a device's memory by default; a pass works in as much


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a run needs, and the option that sets its size.

    Attributes:
        name, value: the argument or option, for errors.
        nbytes: bytes.
        sure: whether it is allocated in any case, and so must fit the free memory. What only longer
            texts need must fit the device's whole memory.
    """

    name: str
    value: object
    nbytes: int
    sure: bool = True


class Memory(NamedTuple):
    """Bytes of a device: available now, and in all."""

    free: int
    total: int


def check_run(model: Any, strategy: Any, prompt: int, max_new_tokens: int, spare: int = 0) -> None:
    """Check that a run fits the memory of the model's device.

    Args:
        model: a `models.base.BaseTarget`.
        strategy: its ``needs(tokens, bytes of a tree's node)`` gives what it needs besides the full
            cache.
        prompt, max_new_tokens: numbers of tokens.
        spare: bytes that will be free when it runs, besides those that are free now.
    Raises:
        InputError: it does not; one line with the largest part, the bytes needed and available, and
            what would fit.
    """
    memory = model.backend.memory()
    if memory is None:
        return
    needs = needs_of(model, strategy, prompt, max_new_tokens)
    total, free = sum(need.nbytes for need in needs if need.sure), memory.free + spare
    if total > free:
        most = max((need for need in needs if need.sure), key=lambda need: need.nbytes)
    else:
        most = max(needs, key=lambda need: need.nbytes)
        total, free = most.nbytes, memory.total
        if total <= free:
            return
    valid = f"a smaller {most.name}"
    if most.name in ("prompt", "max_new_tokens"):
        new = largest(model, strategy, prompt, free)
        valid = f"max_new_tokens up to {new}" if new else "a shorter prompt"
        valid += ", a dtype of two bytes" if str(model.dtype) == "torch.float32" else ""
    value = most.value if isinstance(most.value, str) else shown(most.value)
    needed = f"the run needs {total:,} bytes of memory, {free:,} bytes are available"
    raise InputError(f"{most.name} is {value}; {needed}; valid: {valid}")


def needs_of(model: Any, strategy: Any, prompt: int, max_new_tokens: int) -> list[Need]:
    """What a run needs: the full cache, as two entries for prompt and new tokens; and the
    strategy's needs."""
    read, node = (
        model.cache_bytes(prompt),
        model.cache_bytes(1) + 4 * model.vocab_size,
    )  # a float32 a logit
    return [
        Need("prompt", counted(prompt, "token"), read),
        Need("max_new_tokens", max_new_tokens, model.cache_bytes(prompt + max_new_tokens) - read),
        *strategy.needs(prompt + max_new_tokens, node),
    ]


def largest(model: Any, strategy: Any, prompt: int, free: int) -> int:
    """The largest number of new tokens that fits ``free`` bytes; 0 if none does."""

    def taken(new: int) -> int:
        return sum(need.nbytes for need in needs_of(model, strategy, prompt, new) if need.sure)

    lengths = range(max(1, free // max(model.kv_bytes, 1)) + 2)
    return max(0, bisect_right(lengths, free, key=taken) - 1)


def default_length(model: Any, answered: bool, prompt: int) -> int:
    """The default of ``max_new_tokens`` after a prompt of ``prompt`` tokens.

    It is 200 for continued text. An answer may use all positions of the model that are left, as far
    as their cache fits a sixteenth of the device's memory (at least 1,024 tokens).
    """
    if not answered:
        return CONTINUED_LENGTH
    memory, limit = model.backend.memory(), model.rotary.limit
    held = (
        ANSWER if memory is None else max(ANSWER, memory.total // SHARE // max(1, model.kv_bytes))
    )
    return held if limit is None else max(1, min(held, limit - prompt))


def memory_of(device: torch.device) -> Memory | None:
    """Memory of a device; None if unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Memory(free + cached, total)  # torch's own reserve is available too
    return host_memory() if device.type == "cpu" else None


def host_memory(cgroups: Path = MOUNTS, own: Path = OWN_GROUPS) -> Memory:
    """Memory of the host, or of this process's control groups where one allows less.

    Args:
        cgroups: the folder in which Linux mounts control groups.
        own: the file that names this process's control groups.
    """
    host = psutil.virtual_memory()
    free, total = host.available, host.total
    for limit, used in memory_limits(cgroups, own):
        free = min(free, max(0, limit - used))
        total = min(total, limit)
    return Memory(free, total)


def resident() -> int:
    """Bytes of memory that this process uses."""
    return psutil.Process().memory_info().rss
