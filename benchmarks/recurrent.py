"""Models with recurrent layers beside llama.cpp, on files of random weights in true shapes, in
turns.

    python -m benchmarks.recurrent FOLDER --llama PYTHON [--shapes qwen3.5-2b …]
        [--contexts 1024 8192] [--new 60] [--rounds 2] [--passes 15] [--out FILE]

FOLDER gets the files that it lacks (Q4_K: .4, 1.1, 2.4 and .7 GB). PYTHON is an interpreter that
has llama_cpp. Every program has a process of its own for each round, which loads the file, reads a
prompt of random tokens and writes new ones. One line of JSON for each shape, context and program:
tokens a second of prompt and new tokens; ours also what verify passes behind the context cost in
plain ones, logits and commit included.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.json_lines import publish
from benchmarks.lengths import Program, Trial, figures
from benchmarks.random_gguf import file_of
from benchmarks.random_recurrent import SHAPES, write_random
from benchmarks.row import commit, machine
from benchmarks.words import Measured
from tokenswift.turns import take_turns

OURS = Program("tokenswift", sys.executable, "recurrent_speed.py")
#: what is said in milliseconds, of what a process says of its passes
MILLISECONDS = ("plain", "choice")


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--new", type=int, default=60, help="new tokens behind each context")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--passes", type=int, default=15, help="rounds of verify passes; 0: none are measured"
    )
    parser.add_argument("--llama", help="a Python interpreter that has llama_cpp")
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    return parser.parse_args()


def random_tokens(shape: str, count: int) -> list[int]:
    """The same for every program."""
    chance = random.Random(1)
    return [chance.randrange(3, SHAPES[shape].vocabulary - 1) for _ in range(count)]


def prices(trials: list[Trial]) -> Measured:
    """What passes cost: a plain one and the choice of a token in ms, verify passes in plain ones;
    the medians of processes."""
    passes = [trial.speed.passes for trial in trials if trial.speed.passes]
    if not passes:
        return {}
    verified = {
        name: round(median(of_trial[name] / of_trial["plain"] for of_trial in passes), 3)
        for name in passes[0]
        if name not in MILLISECONDS
    }
    ms = {
        f"{name}_ms": round(median(of_trial[name] for of_trial in passes), 3)
        for name in MILLISECONDS
    }
    return {**ms, **verified}


def measure(options: argparse.Namespace, shape: str, context: int) -> None:
    """Print the lines of a shape and context."""
    write = partial(write_random, sizes=SHAPES[shape])
    file = file_of(options.folder, shape, write)
    tokens = random_tokens(shape, context + options.new)
    question: dict[str, object] = {
        "prompt": tokens[:context],
        "continuation": tokens[context:],
        "new_tokens": options.new,
        "passes": options.passes,
    }
    programs = [OURS]
    if options.llama:
        programs.append(Program("llama.cpp", options.llama, "llama_speed.py"))
    trials: dict[str, list[Trial]] = {}
    for _, program in take_turns(programs, range(options.rounds)):
        trials.setdefault(program.name, []).append(program.run(file, question))
    for name, of_program in trials.items():
        row: Measured = {"model": file.stem, "program": name, **figures(context, of_program)}
        publish(
            {**row, **prices(of_program), "machine": machine("cpu"), "commit": commit()},
            options.out,
        )


def main() -> int:
    """Print a line of JSON for each shape, context and program."""
    options = parse_options()
    for shape in options.shapes:
        for context in options.contexts:
            measure(options, shape, context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
