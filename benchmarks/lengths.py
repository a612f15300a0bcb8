"""A real model by length of its context, beside other programs on the same file, in turns.

    python -m benchmarks.lengths MODEL BOOK [--contexts 1024 4096 16384] [--rounds 2] [--new 100]
        [--llama PYTHON] [--keys f16 q8_0] [--ik PYTHON] [--mistral PYTHON] [--out FILE]

MODEL is a GGUF file or a name of `benchmarks/models.toml`; BOOK a text file, whose first tokens are
read. Each PYTHON is an interpreter that has llama_cpp, ik_llama_cpp or mistralrs. Every program has
a process of its own for each context, which loads the model, reads the prompt and writes new
tokens. One line of JSON for each program and context: tokens a second of prompt and new tokens,
seconds to load, memory at its peak.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from benchmarks.fetch import model_file
from benchmarks.json_lines import PEERS, LineProcess, publish
from benchmarks.row import commit, machine
from benchmarks.words import Measured
from tokenswift import LLM
from tokenswift.turns import take_turns
from tokenswift.types import InputError

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("f16", "q8_0")  # types of llama.cpp's keys and values


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second.

    Attributes:
        reading: of a prompt.
        writing: of what follows it, one by one.
        drafting: the same with drafts; None where the program has none.
        passes: milliseconds of passes, by what they verify; None where they were not measured.
    """

    reading: float
    writing: float
    drafting: float | None = None
    passes: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """What one process of a program has shown.

    Attributes:
        speed: of prompt and new tokens.
        loading: seconds until it was ready.
        peak: bytes of memory, at most.
        version: of the program.
    """

    speed: Speed
    loading: float
    peak: int
    version: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program that reads and writes.

    Attributes:
        name: in rows.
        python: an interpreter that can import it.
        file: one of `benchmarks.peers`.
        options: further arguments.
    """

    name: str
    python: str
    file: str
    options: tuple[str, ...] = ()

    def run(self, model: Path, question: dict[str, object]) -> Trial:
        """One process of it, from loading to the end."""
        threads = str(torch.get_num_threads())
        command = [self.python, str(PEERS / self.file), str(model), threads, *self.options]
        environment = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        if self.python != sys.executable:
            environment = {"PYTHONPATH": ""}
        start = perf_counter()
        with LineProcess(self.name, command, environment=environment) as process:
            version = process.read(str)
            loading = perf_counter() - start
            speed = process.ask(question, Speed)
            return Trial(speed, loading, process.peak_bytes(), version)


def programs(options: argparse.Namespace) -> list[Program]:
    """This one, and those whose interpreters were named."""
    chosen = [Program("tokenswift", sys.executable, "tokenswift_speed.py")]
    if options.llama:
        for keys in options.keys:
            name = "llama.cpp" if keys == "f16" else f"llama.cpp, {keys} keys"
            chosen.append(Program(name, options.llama, "llama_speed.py", (keys,)))
    if options.ik:
        chosen.append(Program("ik_llama.cpp", options.ik, "ik_speed.py"))
    if options.mistral:
        chosen.append(Program("mistral.rs", options.mistral, "mistral_speed.py"))
    return chosen


def figures(context: int, trials: list[Trial]) -> Measured:
    """The medians of a program's trials."""
    row: Measured = {
        "context": context,
        "reading": median(trial.speed.reading for trial in trials),
        "writing": median(trial.speed.writing for trial in trials),
        "loading": median(trial.loading for trial in trials),
        "peak": max(trial.peak for trial in trials),
        "rounds": len(trials),
        "version": trials[0].version,
    }
    drafting = [trial.speed.drafting for trial in trials if trial.speed.drafting is not None]
    if drafting:
        row["drafting"] = median(drafting)
    return row


def in_turns(
    compared: Sequence[Program], rounds: int, model: Path, question: dict[str, object]
) -> Iterator[tuple[str, list[Trial]]]:
    """The name of each program with its trials, as soon as its last round is over."""
    trials: dict[str, list[Trial]] = {}
    for _, program in take_turns(compared, range(rounds)):
        of_program = trials.setdefault(program.name, [])
        of_program.append(program.run(model, question))
        if len(of_program) == rounds:
            yield program.name, of_program


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new", type=int, default=100, help="new tokens behind each context")
    parser.add_argument("--llama", help="a Python interpreter that has llama_cpp")
    parser.add_argument(
        "--keys", nargs="+", choices=KEYS, default=KEYS, help="of llama.cpp's KV cache (both)"
    )
    parser.add_argument("--ik", help="one that has ik_llama_cpp")
    parser.add_argument("--mistral", help="one that has mistralrs")
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    return parser.parse_args()


def questions(llm: LLM, book: Path, contexts: list[int], new: int) -> list[dict[str, object]]:
    """What the programs are asked, for each context.

    Raises:
        InputError: the book is too short.
    """
    ids = llm.encode(book.read_text(encoding="utf-8"))
    if len(ids) < max(contexts) + new:
        raise InputError(f"{book} has {len(ids)} tokens; valid: at least {max(contexts) + new}")
    return [
        {
            "prompt": ids[:context],
            "continuation": ids[context : context + new],
            "text": llm.tokenizer.decode(ids[:context]),
            "new_tokens": new,
        }
        for context in contexts
    ]


def main() -> int:
    """Print a line of JSON for each program and context."""
    options = parse_options()
    file = model_file(options.model)
    with LLM(str(file), heads="none", eagle="none") as llm:
        context_questions = questions(llm, options.book, options.contexts, options.new)
    for context, question in zip(options.contexts, context_questions, strict=True):
        for name, trials in in_turns(programs(options), options.rounds, file, question):
            row = {
                "model": file.stem,
                "program": name,
                **figures(context, trials),
                "machine": machine("cpu"),
                "commit": commit(),
            }
            publish(row, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
