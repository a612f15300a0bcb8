"""macOS, which nothing here runs: its functions replaced, and the library for it compiled and read."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenswift import files
from tokenswift.cli import version
from tokenswift.kernels.cpu import build, threads
from tokenswift.kv import pages
from tokenswift.loader import load
from tokenswift.loader.templates import worker


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

ARM64, DYLIB = 0x0100000C, 6
SYMTAB, LOAD_DYLIB, SIGNATURE, BUILD_VERSION = 0x2, 0xC, 0x1D, 0x32


def commands(data: bytes) -> list[tuple[int, bytes]]:
    """Kind and content of the load commands of a library for arm64."""
    magic, processor, _, kind, count, *_ = struct.unpack_from("<8I", data)
    assert (magic, processor, kind) == (0xFEEDFACF, ARM64, DYLIB)
    at, found = 32, []
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, at)
        found.append((command, data[at : at + size]))
        at += size
    return found


def symbols(data: bytes, table: bytes) -> tuple[set[str], set[str]]:
    """Names that a library has for others, and those that it takes from others."""
    start, count, strings, _ = struct.unpack_from("<4I", table, 8)
    given, taken = set(), set()
    for i in range(count):
        name, kind, section = struct.unpack_from("<IBB", data, start + 16 * i)
        text = data[strings + name : data.index(b"\0", strings + name)].decode()
        if kind & 1:  # external
            (given if section else taken).add(text)
    return given, taken


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="no ziglang, which compiles for macOS"
)
@pytest.mark.parametrize("processor", ["apple_m1", "apple_m2"])
def test_the_library_for_macos(processor: str, tmp_path: Path) -> None:
    path, source = tmp_path / "kernels.dylib", Path(build.__file__).with_name("cpu.c")
    target = ("-target", "aarch64-macos.11.0", f"-mcpu={processor}")
    words = [sys.executable, "-m", "ziglang", "cc", *target, *build.FLAGS, "-shared", str(source)]
    caches = {name: str(tmp_path / name) for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    subprocess.run([*words, "-o", str(path), "-lm"], check=True, timeout=600, env={**os.environ, **caches})
    data = path.read_bytes()
    found = commands(data)
    kinds = [kind for kind, _ in found]
    assert SIGNATURE in kinds, "without one no Mac with this processor loads it"
    libraries = [content[24:].split(b"\0")[0] for kind, content in found if kind == LOAD_DYLIB]
    assert libraries == [b"/usr/lib/libSystem.B.dylib"]
    platform, least = struct.unpack_from("<2I", dict(found)[BUILD_VERSION], 8)
    assert (platform, least >> 16) == (1, 11)
    given, taken = symbols(data, dict(found)[SYMTAB])
    entries = ("attend", "build", "copy", "draft", "layers", "linear", "norm", "rank", "take")
    assert {name for name in given if name.startswith("_ts_")} == {f"_ts_{name}" for name in entries}
    assert {"_pthread_attr_set_qos_class_np", "_pthread_cond_wait", "_pthread_atfork"} <= taken
    assert not [name for name in taken if "barrier" in name or "affinity" in name or "futex" in name]
