"""The commands of README and docs: collected, made short, and run.

    sh tools/walk.sh                  all of them, from a fresh clone that is installed with pip
    python tools/walk.py [PAGE …]     with the tokenswift on PATH, in a new folder

A block is a fence of kind ``sh`` or ``python``. A comment in the line before it says what is
special: ``<!-- slow: REASON -->`` or ``<!-- not run: REASON -->``. Lengths are cut
(:func:`shorten`): a page may ask for 100,000 tokens.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"(?:^<!-- (not run|slow): (.+?) -->\n)?^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
#: pages of docs/ without commands to run: the log, and the help texts where they were made
NO_WALK = ("decisions.md", "cli.md", "index.md")
#: options that make a command short, put before those of the page
SHORT = {
    "generate": "--max-new-tokens {most}",
    "plan": "--no-measure",
    "demo": "--max-new-tokens {most}",
    "audit": "--max-new-tokens 8",
    "train": "--tokens 1024 --sequence-length 128 --write-batch 4 --epochs 1",
}
LENGTH = re.compile(r"(--max-new-tokens |max_new_tokens=)([\d_]+)")


@dataclass(frozen=True)
class Block:
    """One fence: where it stands, its kind ("sh", "python"), and what its comment says."""

    page: str
    line: int
    kind: str
    mark: str  # "", "slow" or "not run"
    reason: str
    text: str

    @property
    def name(self) -> str:
        """``README.md:37``."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The lines of a block of kind "sh", without comments."""
        lines = (re.sub(r"\s+#.*", "", line).strip() for line in self.text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def plain(self) -> bool:
        """Whether every line is one call of tokenswift, without pipes and the like."""
        return all(
            c.startswith("tokenswift ") and not re.search(r"[|<>&;$]", c) for c in self.commands
        )


def pages() -> list[str]:
    """README, and the pages of the site but those of `NO_WALK`."""
    return [
        "README.md",
        *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in NO_WALK),
    ]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start(3)) + 1, m[3], m[1] or "", m[2] or "", m[4])
        for m in FENCE.finditer(text)
    ]


def shorten(text: str, most: int) -> str:
    """A command or program with at most about ``most`` tokens to write; longer requests stay
    longer."""

    def length(match: re.Match[str]) -> str:
        tokens = int(match[2])
        return f"{match[1]}{min(tokens, most + tokens // 5000)}"

    text = LENGTH.sub(length, text)
    call = re.match(r"tokenswift ([\w-]+)", text)
    options = SHORT.get(call[1], "") if call else ""
    return (
        f"{call[0]} {options.format(most=most)}{text[call.end() :]}" if call and options else text
    )


def furnish(folder: Path, model: Path) -> None:
    """Put there what the pages take for granted: the checkout's ``src`` and ``benchmarks``, a short
    ``book.txt``, long texts and the model ``my-llama``.
    """
    for name in ("src", "benchmarks"):
        (folder / name).symlink_to(ROOT / name, target_is_directory=True)
    text = (ROOT / "src" / "tokenswift" / "data" / "demo_prompt.txt").read_text(encoding="utf-8")
    (folder / "novels").mkdir()
    for name in ("book.txt", "held-out.txt", "novels/one.txt", "novels/two.txt"):
        (folder / name).write_text(
            text[: 200 if name == "book.txt" else None] + "\n", encoding="utf-8"
        )
    from tokenswift.loader.find import gguf_in
    from tokenswift.loader.load import load

    if gguf_in(model) is None:
        (folder / "my-llama").symlink_to(model, target_is_directory=True)
        return
    loaded = load(model, dtype="float32", device="cpu")
    loaded.model.save_pretrained(folder / "my-llama")
    loaded.tokenizer.save_pretrained(folder / "my-llama")


def run(
    block: Block, folder: Path, before: list[str], most: int
) -> subprocess.CompletedProcess[str]:
    """Run a block as a reader would: by a shell, or by Python after the page's earlier Python
    blocks."""
    if block.kind == "sh":
        script = "\n".join(
            " | ".join(shorten(part, most) for part in line.split(" | ")) for line in block.commands
        )
        command = ["bash", "-euo", "pipefail", "-c", script]
    else:
        program = "\n".join(shorten(text, most) for text in [*before, block.text])
        command = [sys.executable, "-c", program]
    return subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> int:
    """Walk through pages; the first failure of a page ends that page."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in ("tokenswift", "git"):
        if shutil.which(name) is None:
            print(f"error: {name} is not on PATH")
            return 2
    subprocess.run(
        ["tokenswift", "generate", "--continue", "One", "--max-new-tokens", "1"], check=True
    )
    from tokenswift.loader.default_model import cache_dir

    failed = ran = 0
    for page in sys.argv[1:] or pages():
        with tempfile.TemporaryDirectory() as scratch:
            furnish(Path(scratch), cache_dir() / "smollm2-135m")
            before: list[str] = []
            for block in blocks(page):
                if block.mark == "not run":
                    print(f"-- {block.name}: not run: {block.reason}", flush=True)
                    continue
                print(f"== {block.name}\n{block.text.rstrip()}", flush=True)
                start = time.monotonic()
                done = run(block, Path(scratch), before, most=64)
                ran += 1
                print(
                    f"{done.stdout.rstrip()}\n-- {block.name}: exit {done.returncode}, "
                    f"{time.monotonic() - start:.0f} s",
                    flush=True,
                )
                if block.kind == "python":
                    before.append(block.text)
                if done.returncode != 0:
                    failed += 1
                    break
    print(f"{ran} blocks run, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
