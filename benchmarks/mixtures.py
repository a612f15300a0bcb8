"""Mixtures of experts beside llama.cpp, on files of random weights in true shapes, in turns.

    python -m benchmarks.mixtures FOLDER --llama PYTHON [--shapes qwen3-30b-a3b-12 …]
        [--context 1024] [--new 100] [--rounds 3] [--out FILE]

FOLDER gets the files that it lacks (Q4_K: 4.4, 3.9 and 1.9 GB). PYTHON is an interpreter that has
llama_cpp. Every program has a process of its own for each round, which loads the file, reads a
prompt of random tokens and writes new ones. One line of JSON for each shape and program.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from pathlib import Path

from benchmarks.json_lines import publish
from benchmarks.lengths import Program, Trial, figures
from benchmarks.random_gguf import file_of
from benchmarks.random_mixture import SHAPES, write_random
from benchmarks.row import commit, machine
from tokenswift.turns import take_turns


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    usual = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=usual)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new", type=int, default=100, help="new tokens behind the context")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama", help="a Python interpreter that has llama_cpp")
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    return parser.parse_args()


def main() -> int:
    """Print a line of JSON for each shape and program."""
    options = parse_options()
    programs = [Program("tokenswift", sys.executable, "tokenswift_speed.py")]
    if options.llama:
        programs.append(Program("llama.cpp", options.llama, "llama_speed.py"))
    for shape in options.shapes:
        chance = random.Random(1)
        count = options.context + options.new
        tokens = [chance.randrange(3, SHAPES[shape].vocabulary - 1) for _ in range(count)]
        question: dict[str, object] = {
            "prompt": tokens[: options.context],
            "continuation": tokens[options.context :],
            "new_tokens": options.new,
        }
        trials: dict[str, list[Trial]] = {}
        write = partial(write_random, sizes=SHAPES[shape])
        file = file_of(options.folder, shape, write)
        for _, program in take_turns(programs, range(options.rounds)):
            trials.setdefault(program.name, []).append(program.run(file, question))
        for name, of_program in trials.items():
            row = {
                "model": file.stem,
                "program": name,
                **figures(options.context, of_program),
                "machine": machine("cpu"),
                "commit": commit(),
            }
            publish(row, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
