"""An older version of this repository beside the checkout: milliseconds a token of the same texts.

    python -m benchmarks.versions COMMIT BOOK [--rounds 3] [--tokens 200] [--context 1024]
        [--out FILE]

Each round runs either version in a process of its own, the one first that came second before: plain
decoding and adaptive drafting of the default model, in float32 and in bfloat16. The older version's
sources are taken from git and run with the packages of this environment; it keeps a copy of the
default model and its kernels in a folder that is removed afterwards. Prints a line of JSON for each
mode; ``--out`` appends them to a file.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.json_lines import last_line_of, publish
from benchmarks.row import commit, machine
from tokenswift.turns import take_turns

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "bfloat16")
MODES = ("plain", "automatic")


@dataclass(frozen=True, slots=True)
class Version:
    """A version of this repository.

    Attributes:
        name: "older" or "newer".
        sources: the folder that its package is imported from.
        cache: where it keeps models and kernels; None: the user's cache.
        automatic: the strategy that its adaptive drafting is called.
    """

    name: str
    sources: Path
    cache: Path | None
    automatic: str


def unpack(revision: str, folder: Path) -> Path:
    """Put the sources of a commit into a folder; the folder of its packages."""
    folder.mkdir()
    packed = subprocess.run(
        ["git", "archive", revision, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def measure(
    versions: list[Version], dtype: str, options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Milliseconds a token by mode, of each version in each round."""
    rounds: dict[str, list[dict[str, float]]] = {version.name: [] for version in versions}
    for _, version in take_turns(versions, range(options.rounds)):
        arguments = [options.book, dtype, options.context, options.tokens, version.automatic]
        milliseconds = last_line_of(
            "checkout_modes.py", arguments, dict[str, float], version.sources, version.cache
        )
        rounds[version.name].append(milliseconds)
    return rounds


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("older", metavar="COMMIT")
    parser.add_argument("book", type=Path, metavar="BOOK")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--strategy", default="auto", help="what adaptive drafting was called then")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, and print medians and their ratio."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        versions = [
            Version(
                name="newer",
                sources=ROOT / "src",
                cache=None,
                automatic="auto",
            ),
            Version(
                name="older",
                sources=unpack(options.older, Path(folder) / "older"),
                cache=Path(folder) / "cache",
                automatic=options.strategy,
            ),
        ]
        for dtype in DTYPES:
            rounds = measure(versions, dtype, options)
            for mode in MODES:
                milliseconds = {
                    name: [round(of_round[mode], 2) for of_round in of_version]
                    for name, of_version in sorted(rounds.items(), reverse=True)
                }
                ratio = median(milliseconds["newer"]) / median(milliseconds["older"])
                row = {
                    "older": options.older,
                    "commit": commit(),
                    "machine": machine("cpu"),
                    "mode": mode,
                    "dtype": dtype,
                    "context": options.context,
                    "tokens": options.tokens,
                    "ms_a_token": milliseconds,
                    "newer_over_older": round(ratio, 3),
                }
                publish(row, options.out)


if __name__ == "__main__":
    main()
