"""Where a row was measured: kind of machine, versions, commit; no names of machines or folders."""

from __future__ import annotations

import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tokenswift.loader.identity import versions

CHECKOUT = Path(__file__).parents[1]


def machine(device: str = "auto") -> str:
    """The kind of machine: processor and threads, or the accelerator.

    Args:
        device: where the model runs; "auto" is an accelerator where there is one.
    """
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.get_device_name(0)
    model = platform.processor() or platform.machine()
    kind = torch.backends.cpu.get_cpu_capability()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = dict(re.findall(r"^(model name|flags)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE))
        model = found.get("model name", model)
        native = {"avx512_bf16", "amx_bf16"} & set(found.get("flags", "").split())
        kind += "" if native else " without bfloat16 products"
    threads = torch.get_num_threads()
    return f"{model} ({kind}), {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str | None:
    """Short hash of the checkout that the library runs from, with a + when it has changes, or None."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "src/tokenswift", "benchmarks")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance(device: str) -> dict[str, Any]:
    """What every row says of where it comes from."""
    return {
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
