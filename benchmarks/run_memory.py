"""What a run holds in memory at its peak, behind a long context.

    python -m benchmarks.run_memory MODEL BOOK [--context 20000] [--tokens 100] [--out FILE]

MODEL is a GGUF file or a name of `benchmarks/models.toml`; BOOK a text file, whose first tokens
are continued by `tokenswift generate` in a process of its own. One line of JSON. (`lengths` counts
the KV cache three times: prompt, plain decoding and drafts are each a text of their own there.)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.fetch import model_file
from benchmarks.json_lines import peak_bytes, publish
from benchmarks.row import commit, machine
from tokenswift import LLM
from tokenswift.types import RunError

POLL_SECONDS = 0.05


def peak_of(command: list[str]) -> int:
    """Bytes that a command held at most.

    Raises:
        RunError: it failed.
    """
    peak = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, peak_bytes(process.pid))
        time.sleep(POLL_SECONDS)
    if process.returncode:
        raise RunError(f"{' '.join(command)} ended with code {process.returncode}")
    return peak


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("--context", type=int, default=20_000, help="tokens of the book")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens")
    parser.add_argument("--out", type=Path, help="the row is added to this file")
    return parser.parse_args()


def main() -> int:
    """Print a line of JSON."""
    options = parse_options()
    file = model_file(options.model)
    with LLM(str(file), heads="none", eagle="none") as llm:
        ids = llm.encode(options.book.read_text(encoding="utf-8"))[: options.context]
        text = llm.tokenizer.decode(ids)
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder, "prompt.txt")
        prompt.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "tokenswift", "generate", "--continue"]
        command += ["--model", str(file), "--prompt-file", str(prompt)]
        command += ["--max-new-tokens", str(options.tokens), "--min-tokens", str(options.tokens)]
        peak = peak_of(command)
    row = {
        "model": file.stem,
        "context": len(ids),
        "tokens": options.tokens,
        "peak": peak,
        "machine": machine("cpu"),
        "commit": commit(),
    }
    publish(row, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
