"""macOS, which nothing here runs: its functions replaced, and the library for it compiled and read."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import wheels
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, InputError, files, resume
from tokenswift.cli import version
from tokenswift.kernels.cpu import build, prebuilt, threads
from tokenswift.kv import pages
from tokenswift.loader import load
from tokenswift.loader.templates import worker
from tokenswift.spec.adaptive import cost


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


class System:
    """macOS' C library: the answers of sysctl by name, and an error for others."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts

        def sysctlbyname(name: bytes, value: Any, size: Any, new: None, length: int) -> int:
            if name.decode().replace(".", "_") not in counts:
                return -1
            value._obj.value = counts[name.decode().replace(".", "_")]
            return 0

        self.sysctlbyname = sysctlbyname


@pytest.mark.usefixtures("mac")
def test_threads_are_as_many_as_fast_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for counts, expected in (
        ({"hw_perflevel0_physicalcpu": 4, "hw_perflevel1_physicalcpu": 4}, 4),
        ({}, 8),
        ({"hw_perflevel0_physicalcpu": 0}, 8),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, counts=counts: System(**counts))
        assert threads.usable() == expected


@pytest.mark.usefixtures("mac")
def test_files_are_flushed_through_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(os, "fsync", asked.append)
    monkeypatch.setattr(fcntl, "fcntl", lambda *words: asked.append(words))
    files.sync(7)
    assert asked == [(7, 51)]

    def unknown(*words: object) -> None:
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    files.sync(8)
    assert asked == [(7, 51), 8]


@pytest.mark.usefixtures("mac")
def test_no_large_pages_and_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ctypes, "CDLL")
    assert pages.large_empty(1 << 21, dtype=pages.torch.float32).numel() == 1 << 21
    assert version.cuda_count() == 0


@pytest.mark.usefixtures("mac")
def test_a_template_runs_where_memory_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    lines = [json.dumps(each).encode() for each in ("{{ a }}!", {"a": "text"})]
    assert worker._answer(lines, 1 << 28, 1 << 18, 60.0) == {"text": "text!"}
    assert worker._answer([json.dumps("{{ 'a' * 99 }}").encode(), b"{}"], 1 << 28, 9, 60.0) == {
        "limit": "text"
    }


def test_a_run_without_what_only_linux_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = LLM.from_model(tiny_model("llama"), tiny_tokenizer())
    expected = llm.generate("hello", 12, "tokenswift", ignore_eos=True).token_ids
    asked: list[str] = []

    def without(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *words: Any, **named: Any) -> Any:
            if str(path).startswith(("/proc", "/sys")):
                asked.append(str(path))
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return real(path, *words, **named)

        return call

    for owner, name in ((Path, "open"), (Path, "read_text"), (os, "listdir")):
        monkeypatch.setattr(owner, name, without(getattr(owner, name)))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(threads, "performance_cores", lambda: 2)
    monkeypatch.setattr(build, "_mac_says", lambda name: False)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)  # which Linux refuses
    folder = tmp_path / "run"
    stream = llm.stream("hello", 12, "tokenswift", ignore_eos=True, run_dir=folder)
    next(stream)
    with pytest.raises(InputError, match=f"is being written by process {os.getpid()}"):
        llm.generate("hello", 12, ignore_eos=True, run_dir=folder)
    stream.close()
    assert resume(folder, llm=llm).token_ids == expected
    assert cost._ran_and_waited() is None and asked


def test_a_processor_of_arm64_may_have_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(load, "Path", lambda name: told)
    for line, expected in (
        ("Features\t: fp asimd i8mm bf16", True),
        ("Features\t: fp asimd asimddp", False),
        ("flags\t\t: sse2 avx512_bf16", True),
        ("flags\t\t: sse2 avx2", False),
        ("model name\t: one with bf16", False),
    ):
        told.write_text(f"processor\t: 0\n{line}\nother\t: bf16\n")
        assert load.native_bfloat16("cpu") is expected
    told.unlink()
    assert load.native_bfloat16("cpu") is False


# ---- the library -----------------------------------------------------------------------------------

SETS = ("neon", "neon-bf16")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The library of a wheel, with two of its instruction sets."""
    for needed in ("ziglang", "macholib"):
        pytest.importorskip(needed, reason="what builds wheels is not installed: the extra wheels")
    made = tmp_path_factory.mktemp("mac")
    with pytest.MonkeyPatch.context() as patch:
        for cache in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
            patch.setenv(cache, str(made / cache))
        return prebuilt.make("macos-arm64", made / "built", sets=SETS).read_bytes()


def version_word(major: int) -> bytes:
    """Platform macOS, and its least version, in a load command."""
    return struct.pack("<2I", 1, major << 16)


#: what is changed in the library, into what, and what is found
FAULTS = {
    "another processor": (
        struct.pack("<I", 0x0100000C),
        struct.pack("<I", 0x01000007),
        "no library for arm64",
    ),
    "no signature": (struct.pack("<2I", 0x1D, 16), struct.pack("<2I", 0x2B, 16), "not signed"),
    "a later system": (version_word(14), version_word(15), r"\[\(1, 983040\)\].*macOS and 14"),
    "a name": (b"@rpath/kernels.so", b"/home/kernels.so\0", "calls itself /home/kernels.so"),
    "a library": (b"libSystem.B.dylib", b"libzzzzzz.B.dylib", "asks for /usr/lib/libzzzzzz.B.dylib"),
    "an entry": (b"\0_ts_norm__neon\0", b"\0_my_norm__neon\0", "_my_norm__neon, _ts_norm__neon"),
    "a barrier": (b"\0_pthread_cond_wait\0", b"\0_pthread_barrier_t\0", "calls _pthread_barrier_t"),
}


@pytest.mark.slow
def test_the_library_for_macos(library: bytes, tmp_path: Path) -> None:
    path = tmp_path / prebuilt.LIBRARY
    path.write_bytes(library)
    assert wheels.fault_for_mac(path, SETS) is None
    assert "_ts_attend__neon_i8mm" in str(wheels.fault_for_mac(path, [*SETS, "neon-i8mm"]))
    assert {b"_pthread_attr_set_qos_class_np", b"_pthread_atfork"} <= set(library.split(b"\0"))


@pytest.mark.slow
@pytest.mark.parametrize("changed", FAULTS)
def test_a_fault_of_the_library_for_macos_is_found(library: bytes, tmp_path: Path, changed: str) -> None:
    before, after, found = FAULTS[changed]
    assert len(before) == len(after) and before in library
    path = tmp_path / prebuilt.LIBRARY
    path.write_bytes(library.replace(before, after))
    assert re.search(found, wheels.fault_for_mac(path, SETS) or "nothing")
