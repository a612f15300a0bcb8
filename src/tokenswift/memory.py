"""The memory of a run: what it will need, what is available, and a check before anything is
allocated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil
import torch

from tokenswift.cgroups import MOUNTS, OWN_GROUPS, memory_limits
from tokenswift.checks import counted, shown
from tokenswift.config.sampling import CONTINUED_LENGTH
from tokenswift.types import InputError

LEAST_ANSWER = 1024  # least default of an answer's new tokens
ANSWER_SHARE = 16  # an answer may fill 1 / this of a device's memory by default


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


class DeviceMemory(Protocol):
    """What is asked of a model's `kernels.base.Backend`."""

    def memory(self) -> Memory | None:
        """Memory of its device; None where the system does not say."""
        ...


class Positions(Protocol):
    """What is asked of a model's rotary embedding."""

    @property
    def limit(self) -> int | None:
        """The most positions; None: any number."""
        ...

    @property
    def short_limit(self) -> int | None:
        """The most positions of short texts; None: the same hold for all."""
        ...


class CachedModel(Protocol):
    """What is asked of a model, a `models.base.BaseTarget`."""

    @property
    def backend(self) -> DeviceMemory: ...

    @property
    def rotary(self) -> Positions: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the full KV cache."""
        ...

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of a full KV cache."""
        ...


class NeedsMemory(Protocol):
    """What is asked of a strategy."""

    def needs(self, text: int, row: int) -> Sequence[Need]:
        """What it needs besides the full cache, for a text of so many tokens, with so many bytes a
        node of a tree."""
        ...


def check_run(
    model: CachedModel,
    strategy: NeedsMemory,
    prompt: int,
    max_new_tokens: int,
    spare: int = 0,
) -> None:
    """Check that a run fits the memory of the model's device.

    Args:
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
    sure_needs = [need for need in needs if need.sure]
    needed = sum(need.nbytes for need in sure_needs)
    available = memory.free + spare
    largest_need = max(sure_needs, key=lambda need: need.nbytes)
    if needed <= available:
        largest_need = max(needs, key=lambda need: need.nbytes)
        needed = largest_need.nbytes
        available = memory.total
        if needed <= available:
            return
    valid = f"a smaller {largest_need.name}"
    if largest_need.name in ("prompt", "max_new_tokens"):
        fitting = largest(model, strategy, prompt, available)
        valid = f"max_new_tokens up to {fitting}" if fitting else "a shorter prompt"
        valid += ", a dtype of two bytes" if model.dtype == torch.float32 else ""
    value = largest_need.value
    value = value if isinstance(value, str) else shown(value)
    sizes = f"the run needs {needed:,} bytes of memory, {available:,} bytes are available"
    raise InputError(f"{largest_need.name} is {value}; {sizes}; valid: {valid}")


def needs_of(
    model: CachedModel, strategy: NeedsMemory, prompt: int, max_new_tokens: int
) -> list[Need]:
    """What a run needs: the full cache, as two entries for prompt and new tokens; and the
    strategy's needs."""
    prompt_bytes = model.cache_bytes(prompt)
    text_bytes = model.cache_bytes(prompt + max_new_tokens)
    row_bytes = model.cache_bytes(1) - model.cache_bytes(0)
    node_bytes = row_bytes + 4 * model.vocab_size  # logits are float32
    return [
        Need("prompt", counted(prompt, "token"), prompt_bytes),
        Need("max_new_tokens", max_new_tokens, text_bytes - prompt_bytes),
        *strategy.needs(prompt + max_new_tokens, node_bytes),
    ]


def largest(model: CachedModel, strategy: NeedsMemory, prompt: int, free: int) -> int:
    """The largest number of new tokens that fits ``free`` bytes; 0 if none does."""

    def needed(new: int) -> int:
        return sum(need.nbytes for need in needs_of(model, strategy, prompt, new) if need.sure)

    lengths = range(max(1, free // max(model.kv_bytes, 1)) + 2)
    return max(0, bisect_right(lengths, free, key=needed) - 1)


def default_length(model: CachedModel, answered: bool, prompt: int) -> int:
    """The default of ``max_new_tokens`` after a prompt of ``prompt`` tokens.

    It is 200 for continued text. An answer may use all positions of the model that are left, as far
    as their cache fits a sixteenth of the device's memory (at least 1,024 tokens). Where a model
    has other positions for long texts, an answer that has 1,024 tokens without them does without.
    """
    if not answered:
        return CONTINUED_LENGTH
    memory = model.backend.memory()
    length = LEAST_ANSWER
    if memory is not None:
        length = max(length, memory.total // ANSWER_SHARE // max(1, model.kv_bytes))
    limit = model.rotary.limit
    short_limit = model.rotary.short_limit
    if short_limit is not None and prompt + LEAST_ANSWER <= short_limit:
        limit = short_limit
    return length if limit is None else max(1, min(length, limit - prompt))


def memory_of(device: torch.device) -> Memory | None:
    """Memory of a device; None if unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Memory(free + cached, total)  # torch's own reserve is available too
    return host_memory() if device.type == "cpu" else None


def host_memory(cgroups: Path = MOUNTS, groups: Path = OWN_GROUPS) -> Memory:
    """Memory of the host, or of this process's control groups where one allows less.

    Args:
        cgroups: the folder in which Linux mounts control groups.
        groups: the file that names this process's control groups.
    """
    host = psutil.virtual_memory()
    free = host.available
    total = host.total
    for limit, used in memory_limits(cgroups, groups):
        free = min(free, max(0, limit - used))
        total = min(total, limit)
    return Memory(free, total)


def resident() -> int:
    """Bytes of memory that this process uses."""
    return psutil.Process().memory_info().rss
