"""macOS, which nothing here runs: its functions replaced, and the library for it compiled and
read."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, InputError, files, resume
from tokenswift.kernels.cpu import library


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


def system(**counts: int) -> object:
    """macOS' C library: the answers of sysctl by name, and an error for others."""

    def sysctlbyname(name: bytes, value: Any, size: Any, new: None, length: int) -> int:
        count = counts.get(name.decode().replace(".", "_"))
        if count is None:
            return -1
        value._obj.value = count
        return 0

    return SimpleNamespace(sysctlbyname=sysctlbyname)


@pytest.mark.usefixtures("mac")
def test_threads_are_as_many_as_fast_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for counts, expected in (
        ({"hw_perflevel0_physicalcpu": 4, "hw_perflevel1_physicalcpu": 4}, 4),
        ({}, 8),
        ({"hw_perflevel0_physicalcpu": 0}, 8),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, counts=counts: system(**counts))
        assert library.usable_processors() == expected


@pytest.mark.usefixtures("mac")
def test_files_are_flushed_through_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(os, "fsync", calls.append)
    monkeypatch.setattr(fcntl, "fcntl", lambda file, command: calls.append((file, command)))
    files.sync(7)
    assert calls == [(7, 51)]

    def unknown(*words: object) -> None:
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    files.sync(8)
    assert calls == [(7, 51), 8]


def test_a_run_without_what_only_linux_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = LLM.from_model(tiny_model("llama"), tiny_tokenizer())
    expected = llm.generate("hello", 12, "tokenswift", ignore_eos=True).token_ids
    missing: list[str] = []  # files of Linux that were looked for

    def without(real: Callable[..., object]) -> Callable[..., object]:
        def call(path: object, *args: object, **named: object) -> object:
            if str(path).startswith(("/proc", "/sys")):
                missing.append(str(path))
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return real(path, *args, **named)

        return call

    for owner, name in ((Path, "open"), (Path, "read_text"), (os, "listdir")):
        monkeypatch.setattr(owner, name, without(getattr(owner, name)))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(library, "_sysctl", lambda name: 2 if "perflevel" in name else 0)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)  # which Linux refuses
    folder = tmp_path / "run"
    stream = llm.stream("hello", 12, "tokenswift", ignore_eos=True, run_dir=folder)
    next(stream)
    with pytest.raises(InputError, match="is being written by another process"):
        llm.generate("hello", 12, ignore_eos=True, run_dir=folder)
    stream.close()
    assert resume(folder, llm=llm).token_ids == expected
    assert missing
