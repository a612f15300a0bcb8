"""What all benchmarks share: prompts, rows with their provenance, medians of paired runs."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from tokenswift import LLM, Generation, SamplingParams
from tokenswift.benchmark.machine import machine
from tokenswift.prefilled import Prefilled

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "src" / "tokenswift" / "data" / "prompts"


def command() -> str:
    """The command line, without the places of files on this machine."""
    return shlex.join(["python", *("FOLDER" if Path(arg).is_absolute() else arg for arg in sys.argv)])


def commit() -> str:
    """Short hash of the checkout, with a + when it has uncommitted changes to the library."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src", "bench"], cwd=ROOT).returncode
    return head.stdout.strip() + ("+" if dirty else "")


def row(bench: str, **figures: Any) -> dict[str, Any]:
    """One result with its provenance."""
    return {
        "bench": bench,
        **figures,
        "command": command(),
        "machine": machine(),
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def save(rows: list[dict[str, Any]], file: Path | None) -> None:
    """Print rows as JSON lines and append them to ``file``."""
    for line in (json.dumps(r, ensure_ascii=False) for r in rows):
        print(line, flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")


def prompts(llm: LLM, folder: Path, length: int, count: int) -> list[tuple[str, list[int]]]:
    """The first ``length`` tokens of ``count`` texts of a folder, by name, front matter skipped."""
    found = []
    for file in sorted(folder.glob("*.txt")):
        text = file.read_text(encoding="utf-8")
        start = 0 if len(text) < 40_000 else text.index("\n\n", 20_000) + 2
        ids = llm.encode(text[start : start + 12 * length])[:length]
        if len(ids) == length:
            found.append((file.stem, ids))
    if len(found) < count:
        raise SystemExit(f"error: {folder} has {len(found)} texts of {length} tokens; {count} are needed")
    return found[:count]


def median(values: list[float]) -> float:
    """The median, rounded to four digits."""
    return round(statistics.median(values), 4)


def run(
    llm: LLM,
    ids: list[int],
    new: int,
    strategy: str,
    options: dict[str, Any] | None = None,
    sampling: SamplingParams | None = None,
) -> Generation:
    """One generation that does not stop at EOS."""
    return llm.generate(ids, new, strategy, options, sampling, ignore_eos=True)


def decoded(
    base: Prefilled, new_tokens: int, strategy: str, options: dict[str, Any], params: SamplingParams
) -> Generation:
    """Decode from a copy of a prefilled state; does not stop at EOS."""
    return base.generate(new_tokens, strategy, options, params, ignore_eos=True)
