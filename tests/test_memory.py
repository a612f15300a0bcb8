"""Memory that cannot be had is refused in one line with the bytes, before anything is allocated."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, memory
from tokenswift.kv.cache import FullCache
from tokenswift.kv.entries import Entries
from tokenswift.kv.sparse import SparseCache
from tokenswift.memory import Memory, default_length, host_memory
from tokenswift.types import InputError, RunError

PROMPT = [3, 4, 5, 6]
KV = 2 * 3 * 2 * 8 * 4  # layers × (keys, values) × heads × width × float32


def llm_of() -> LLM:
    """A tiny model that sets no limit to positions worth the name."""
    model = tiny_model("llama", max_position_embeddings=2**45)
    return LLM.from_model(model, heads=random_heads("medusa", 48, VOCAB))


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Entries.__init__

    def small(self: Entries, *args: Any) -> None:
        if max(args[:4]) > 64:  # the check of a model at load makes a tiny one
            raise AssertionError("a cache was allocated")
        real(self, *args)

    monkeypatch.setattr(Entries, "__init__", small)


@pytest.mark.parametrize(
    ("strategy", "options", "new", "named", "least"),
    [
        ("autoregressive", {}, 10**12, "max_new_tokens is 1000000000000;", 10**12 * KV),
        (
            "auto",
            {"budget": 10**12, "draft": "partial"},
            4,
            "budget is 1000000000000;",
            10**12 * KV,
        ),
        ("magicdec", {"budget": 10**12}, 4, "budget is 1000000000000;", 10**12 * KV),
        ("triforce", {"budget": 10**12}, 4, "budget is 1000000000000;", 10**12 * KV),
        (
            "triforce",
            {"draft_budget": 10**12},
            4,
            "draft_budget is 1000000000000;",
            10**12 * KV * 7 // 8,
        ),
    ],
)
def test_refused_with_the_bytes(
    strategy: str,
    options: dict[str, object],
    new: int,
    named: str,
    least: int,
    nothing_allocated: None,
) -> None:
    draft = tiny_model("llama", seed=1)
    if strategy == "triforce":
        options = {**options, "draft_model": draft}
    for run in (llm_of().generate, llm_of().stream):
        with pytest.raises(InputError, match=r"^[^\n]+$") as caught:
            run(PROMPT, new, strategy, options)
        line = str(caught.value)
        assert line.startswith(named), line
        sizes = re.search(
            r"needs ([\d,]+) bytes of memory, ([\d,]+) bytes are available; valid: ", line
        )
        assert sizes, line
        needed, available = (int(number.replace(",", "")) for number in sizes.groups())
        assert needed >= least
        assert needed > available > 0


def test_the_reckoning_is_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run fits exactly the bytes that it is said to need, and not one less."""
    llm = llm_of()
    nodes = 1 + 2 + 2 * 2 + 3 * 4
    exact = (len(PROMPT) + 20 + nodes) * KV + nodes * VOCAB * 4 + (8 + 1) * KV
    options = {"tree": (2, 2), "ngrams": 3, "budget": 8, "sinks": 2, "draft": "partial"}
    allocated: list[int] = []
    for kind in (FullCache, SparseCache):
        before = kind.__init__

        def allocate(self: Any, *args: Any, before: Any = before, **kwargs: Any) -> None:
            before(self, *args, **kwargs)
            allocated.append(self.data.numel() * self.data.element_size())

        monkeypatch.setattr(kind, "__init__", allocate)
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(exact, exact))
    llm.generate(PROMPT, 20, "tokenswift", options, ignore_eos=True)
    assert sum(allocated) == exact - nodes * VOCAB * 4
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(exact - 1, exact))
    with pytest.raises(
        InputError, match=f"needs {exact:,} bytes of memory, {exact - 1:,} bytes are"
    ):
        llm.generate(PROMPT, 20, "tokenswift", options, ignore_eos=True)


def test_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is available, or what the tightest control group leaves; page cache counts as free."""
    own_groups = tmp_path / "own"
    groups = tmp_path / "cgroup"
    host = SimpleNamespace(available=5000 * 1024, total=8000 * 1024)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    assert host_memory(groups, own_groups) == (5000 * 1024, 8000 * 1024)
    own_groups.write_text("0::/a/b\n")
    for folder, most in ((groups, None), (groups / "a", "4096000"), (groups / "a" / "b", "max")):
        folder.mkdir(exist_ok=True)
        if most is not None:
            (folder / "memory.max").write_text(f"{most}\n")
            (folder / "memory.current").write_text("3000000\n")
            (folder / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    assert host_memory(groups, own_groups) == (4096000 - 2000000, 4096000)


def test_an_answer_by_default_takes_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = llm_of().target
    monkeypatch.setattr(type(target.backend), "memory", lambda self: Memory(0, 16 * 5000 * KV))
    assert default_length(target, True, 10) == 5000
    assert default_length(target, False, 10) == 200
    monkeypatch.setattr(type(target.backend), "memory", lambda self: Memory(0, 16 * KV))
    assert default_length(target, True, 10) == 1024


def test_memory_that_runs_out_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    llm = llm_of()
    monkeypatch.setattr(llm.target, "_run", full)
    with pytest.raises(RunError, match="^out of memory; valid: [^\n]+$") as caught:
        llm.generate(PROMPT, 5, "autoregressive")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
