"""One run of a real model that is killed on its way and resumed, as its journal tells it.

    python -m benchmarks.long_run MODEL BOOK FOLDER [--tokens 100000] [--kills 3] [--part 10000]
        [--characters 4000] [--rope-scaling yarn] [--seed 1] [--checked 500] [--out FILE]

MODEL is a GGUF file, or a name that ``-m`` takes; BOOK a text file whose beginning is continued by
``tokenswift generate --continue``, in a run of its own under FOLDER. Kills (SIGKILL) come at equal
shares of the tokens; ``tokenswift resume`` writes on after each. At the end the run's last tokens
are taken from a copy of its journal and written anew by plain decoding. The same command goes on
with a run that is there. Prints one line of JSON for each part of the text, with its speed, and one
for the whole.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import PLAIN
from benchmarks.json_lines import peak_bytes, publish
from benchmarks.row import commit, machine
from benchmarks.words import Measured
from tokenswift.runs import journal
from tokenswift.runs.folder import JOURNAL, TEXT, has_run, load, load_whole
from tokenswift.runs.records import RunState, Tokens
from tokenswift.types import RunError, distinct

POLL_SECONDS = 2.0  # between two readings of the journal
COMMAND = (sys.executable, "-m", "tokenswift")


@dataclass(frozen=True, slots=True)
class Session:
    """What one process wrote.

    Attributes:
        tokens_before: tokens in the journal when it began.
        tokens_after: tokens in the journal when it ended.
        first_token_seconds: from its start until the journal held more, loading and prefill
            included, to the nearest poll.
        peak: bytes of memory that it held at most.
        is_killed: whether it was killed.
    """

    tokens_before: int
    tokens_after: int
    first_token_seconds: float
    peak: int
    is_killed: bool


def journal_tokens(folder: Path) -> int:
    """New tokens that a run's journal holds; 0 where there is no run yet."""
    return len(load(folder)[1].tokens) if has_run(folder) else 0


def write_until(command: list[str], folder: Path, kill_at: int | None) -> Session:
    """Let a process write, and kill it once the journal holds so many tokens.

    Raises:
        RunError: it ended with an error.
    """
    tokens_before = journal_tokens(folder)
    tokens = tokens_before
    start = time.monotonic()
    first_token_seconds = 0.0
    peak = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and (kill_at is None or tokens < kill_at):
            time.sleep(POLL_SECONDS)
            tokens = journal_tokens(folder)
            peak = max(peak, peak_bytes(process.pid))
            if not first_token_seconds and tokens > tokens_before:
                first_token_seconds = time.monotonic() - start
    finally:
        process.kill()
        code = process.wait()
    is_killed = kill_at is not None and tokens >= kill_at
    if code and not is_killed:
        raise RunError(f"{' '.join(command)} ended with code {code}")
    return Session(tokens_before, journal_tokens(folder), first_token_seconds, peak, is_killed)


def generate(options: argparse.Namespace, folder: Path, *more: str) -> list[str]:
    """The command of a run in a folder."""
    return [
        *(*COMMAND, "generate", "--continue", "--model", options.model),
        *("--prompt-file", str(options.folder / "prompt.txt"), "--run-dir", str(folder)),
        *("--max-new-tokens", str(options.tokens), "--min-tokens", str(options.tokens)),
        *("--rope-scaling", options.rope_scaling, "--seed", str(options.seed), *more),
    ]


def write(options: argparse.Namespace, run: Path) -> list[Session]:
    """Write the run, with its kills."""
    shares = options.kills + 1
    kills = [options.tokens * number // shares for number in range(1, shares)]
    sessions: list[Session] = []
    while not sessions or sessions[-1].is_killed:
        tokens = journal_tokens(run)
        kill_at = next((place for place in kills if place > tokens), None)
        command = [*COMMAND, "resume", str(run)] if has_run(run) else generate(options, run)
        sessions.append(write_until(command, run, kill_at))
        print(sessions[-1], file=sys.stderr, flush=True)
    return sessions


def parts_of(state: RunState, part: int) -> list[Measured]:
    """The speed of each part of a text, by the seconds of its steps."""
    rows: list[Measured] = []
    start = end = 0
    steps = 0
    milliseconds = 0
    for step_tokens, *_, step_milliseconds in state.steps:
        end += step_tokens
        steps += 1
        milliseconds += step_milliseconds
        if end // part > start // part or end == len(state.tokens):
            part_tokens = state.tokens[start:end]
            rows.append(
                {
                    "part": end,
                    "auto": 1e3 * len(part_tokens) / milliseconds,
                    "tokens_a_step": len(part_tokens) / steps,
                    "distinct_4": distinct(part_tokens, 4),
                }
            )
            start = end
            steps = 0
            milliseconds = 0
    return rows


def with_plain_end(options: argparse.Namespace, run: Path) -> list[int]:
    """The run's tokens where plain decoding writes the last ones anew, in a copy of the folder."""
    copy = run.with_name("copy")
    if copy.exists():
        shutil.rmtree(copy)
    copy.mkdir()
    kept: list[object] = []
    tokens = 0
    for record in load(run)[0].records:
        if isinstance(record, Tokens):
            tokens += len(record.ids)
            if tokens > options.tokens - options.checked:
                break
        kept.append(record)
    journal.create(copy / JOURNAL, kept)
    subprocess.run(
        generate(options, copy, "--strategy", PLAIN), stdout=subprocess.DEVNULL, check=True
    )
    return load_whole(copy).tokens


def figures(options: argparse.Namespace, run: Path, sessions: list[Session]) -> Measured:
    """The figures of the whole run."""
    state = load_whole(run)
    milliseconds = sum(step[-1] for step in state.steps)
    return {
        "tokens": len(state.tokens),
        "prompt": len(state.header.prompt),
        "auto": 1e3 * len(state.tokens) / milliseconds,
        "auto_seconds": milliseconds / 1e3,
        "tokens_a_step": len(state.tokens) / len(state.steps),
        "kills": [session.tokens_after for session in sessions if session.is_killed],
        "first_token_seconds": [session.first_token_seconds for session in sessions],
        "peak": max((session.peak for session in sessions), default=0),
        "journal_bytes": (run / JOURNAL).stat().st_size,
        "checked": options.checked,
        "identical": with_plain_end(options, run) == state.tokens,
        "distinct_4": distinct(state.tokens, 4),
        "loop": state.loop.start if state.loop else None,
        "litany": state.litany.start if state.litany else None,
    }


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=100_000, help="new tokens")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--part", type=int, default=10_000, help="tokens of a part")
    parser.add_argument("--characters", type=int, default=4000, help="of the book")
    parser.add_argument("--rope-scaling", default="yarn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checked", type=int, default=500, help="tokens written anew at the end")
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    return parser.parse_args()


def main() -> int:
    """Print a line of JSON for each part of a text, and for the whole."""
    options = parse_options()
    options.folder.mkdir(parents=True, exist_ok=True)
    beginning = options.book.read_text(encoding="utf-8")[: options.characters]
    (options.folder / "prompt.txt").write_text(beginning, encoding="utf-8")
    run = options.folder / "run"
    sessions = write(options, run)
    state = load_whole(run)
    for measured in (*parts_of(state, options.part), figures(options, run, sessions)):
        row = {
            "model": Path(options.model).stem if "/" in options.model else options.model,
            "dtype": state.header.identity.dtype,
            "book": options.book.stem,
            "seed": options.seed,
            "rope_scaling": options.rope_scaling,
            **measured,
            "machine": machine("cpu"),
            "commit": commit(),
        }
        publish(row, options.out)
    (options.folder / TEXT).write_text(state.text + state.tail, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
