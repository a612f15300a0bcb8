"""One long text of a real model: adaptive drafting and plain decoding, in turns.

    python -m benchmarks.long_text MODEL BOOK [--tokens 20000] [--prompt 1000] [--part 1000]
        [--seed 1] [--sampling JSON] [--llama PYTHON] [--pause FILE] [--text FILE] [--out FILE]

MODEL is a GGUF file or a name of `benchmarks/models.toml`; BOOK a text file whose first tokens are
continued, with the sampling of continued text unless ``--sampling`` says otherwise, such as
``'{"temperature": 0.9}'``. Both ways write the same text from the same prefilled prompt, in turns
of some tokens; while a file that ``--pause`` names is there, no turn begins. PYTHON is an
interpreter that has llama_cpp: afterwards llama.cpp runs the same tokens, 50 in the middle of each
part one after another, which are timed, and the others in batches. Prints one line of JSON for each
part of the text, and one for the whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.common import AUTO, PLAIN, first_litany
from benchmarks.fetch import model_file
from benchmarks.json_lines import LlamaProcess, publish
from benchmarks.row import commit, machine
from benchmarks.words import Measured
from tokenswift import LLM
from tokenswift.config.sampling import CONTINUED
from tokenswift.engine.stream import Prefilled
from tokenswift.turns import DecodingSide, take_turns
from tokenswift.types import distinct

TURN = 250  # tokens of a turn
SHORTEST_PART = 100  # tokens of a part that llama.cpp is timed in: twice what is timed
PAUSE_SECONDS = 1.0  # between looks at the file that says to wait


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a way of decoding has come.

    Attributes:
        tokens: new tokens.
        steps: of the loop.
        seconds: of these steps.
    """

    tokens: int
    steps: int
    seconds: float

    @classmethod
    def of(cls, side: DecodingSide) -> Mark:
        """Where a side is now."""
        return cls(len(side.tokens), side.step_count, side.seconds)

    def speed_since(self, earlier: Mark) -> float:
        """Tokens a second since then."""
        return (self.tokens - earlier.tokens) / (self.seconds - earlier.seconds)

    def step_tokens_since(self, earlier: Mark) -> float:
        """Tokens a step since then."""
        return (self.tokens - earlier.tokens) / (self.steps - earlier.steps)


START = Mark(0, 0, 0.0)


def compare(auto: tuple[Mark, Mark], plain: tuple[Mark, Mark]) -> Measured:
    """Figures of a part, from where either way was at its start and at its end."""
    auto_speed = auto[1].speed_since(auto[0])
    plain_speed = plain[1].speed_since(plain[0])
    return {
        "auto_over_plain": auto_speed / plain_speed,
        "plain": plain_speed,
        "auto": auto_speed,
        "tokens_a_step": auto[1].step_tokens_since(auto[0]),
    }


@dataclass(frozen=True, slots=True)
class LlamaSpeeds:
    """What llama.cpp takes for a text.

    Attributes:
        ends: of the parts, in tokens.
        speeds: tokens a second in the middle of each part.
        peak: bytes of memory, at most.
        version: of llama_cpp.
    """

    ends: Sequence[int]
    speeds: Sequence[float]
    peak: int
    version: str

    def totals(self) -> Measured:
        """Figures of the whole text, whose time follows from its parts' speeds."""
        lengths = [end - start for start, end in pairwise([0, *self.ends])]
        pairs = zip(lengths, self.speeds, strict=True)
        seconds = sum(length / speed for length, speed in pairs)
        return {
            "llama": self.ends[-1] / seconds,
            "llama_seconds": seconds,
            "llama_peak": self.peak,
            "llama_version": self.version,
        }


def run_llama(
    python: str, file: Path, prompt: Sequence[int], tokens: Sequence[int], ends: Sequence[int]
) -> LlamaSpeeds:
    """Time llama.cpp on a text.

    Args:
        python: an interpreter that has llama_cpp.
        ends: of the parts.
    """
    with LlamaProcess(python, "llama_speed.py", file, torch.get_num_threads()) as process:
        middles = [(start + end) // 2 for start, end in pairwise([0, *ends])]
        question = {"prompt": prompt, "continuation": tokens, "samples": middles}
        speeds = process.ask(question, list[float])
        return LlamaSpeeds(ends, speeds, process.peak_bytes(), process.version)


class LongText:
    """One text, written both ways.

    Args:
        llm: the model.
        state: the prompt.
        options: the command line's.

    Attributes:
        ends: of its parts, in tokens.
        auto, plain: the two ways.
    """

    def __init__(self, llm: LLM, state: Prefilled, options: argparse.Namespace) -> None:
        self._llm = llm
        self._prompt = len(state.tokens)
        self._length: int = options.tokens
        self._part: int = options.part
        self._pause: Path | None = options.pause
        sampling = replace(
            CONTINUED,
            seed=options.seed,
            min_tokens=self._length,
            **json.loads(options.sampling),
        )

        def side(strategy: str) -> DecodingSide:
            stream = state.stream(self._length, strategy, sampling=sampling)
            return DecodingSide(iter(stream))

        ends = range(self._part, self._length + self._part, self._part)
        self.ends = [min(end, self._length) for end in ends]
        self.auto = side(AUTO)
        self.plain = side(PLAIN)

    def parts(self) -> list[Measured]:
        """The figures of each part, printed while it is written."""
        rows: list[Measured] = []
        auto = plain = START
        order = (self.auto, self.plain)
        for end in self.ends:
            start = len(self.auto.tokens)
            for place, side in take_turns(order, range(start + TURN, end + TURN, TURN)):
                wait_while(self._pause)
                side.run_to(min(place, end))
            auto_end = Mark.of(self.auto)
            plain_end = Mark.of(self.plain)
            row: Measured = {
                "part": end,
                "context": self._prompt + auto_end.tokens,
                **compare((auto, auto_end), (plain, plain_end)),
                "distinct_4": distinct(self.auto.tokens[auto.tokens :], 4),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            auto = auto_end
            plain = plain_end
        return rows

    def figures(self) -> Measured:
        """Of the whole text."""
        return {
            "tokens": len(self.auto.tokens),
            "prompt": self._prompt,
            "identical": self.auto.tokens == self.plain.tokens,
            **compare((START, Mark.of(self.auto)), (START, Mark.of(self.plain))),
            "auto_seconds": self.auto.seconds,
            "plain_seconds": self.plain.seconds,
            "sources": dict(self.auto.token_sources),
            "distinct_4": distinct(self.auto.tokens, 4),
            "litany": first_litany(self._llm, self.auto.tokens),
        }


def wait_while(file: Path | None) -> None:
    """Wait as long as a file is there."""
    while file is not None and file.exists():
        time.sleep(PAUSE_SECONDS)


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000, help="new tokens")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the book")
    parser.add_argument("--part", type=int, default=1000, help="tokens of a part")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sampling", default="{}", help="fields of SamplingParams, as JSON")
    parser.add_argument("--llama", help="a Python interpreter that has llama_cpp")
    parser.add_argument("--pause", type=Path, help="while this file is there, no turn begins")
    parser.add_argument("--text", type=Path, help="the text is written to this file")
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    options = parser.parse_args()
    if options.llama is not None and options.part < SHORTEST_PART:
        parser.error(f"--part is {options.part}; valid with --llama: at least {SHORTEST_PART}")
    return options


def main() -> int:
    """Print a line of JSON for each part of a text, and for the whole."""
    options = parse_options()
    file = model_file(options.model)
    llm = LLM(str(file))
    ids = llm.encode(options.book.read_text(encoding="utf-8"))[: options.prompt]
    text = LongText(llm, llm.prefill(ids), options)
    parts = text.parts()
    total = text.figures()
    if options.llama is not None:
        llama = run_llama(options.llama, file, ids, text.auto.tokens, text.ends)
        for part, speed in zip(parts, llama.speeds, strict=True):
            part["llama"] = speed
        total |= llama.totals()
    for measured in (*parts, total):
        row = {
            "model": file.stem,
            "dtype": llm.dtype,
            "book": options.book.stem,
            "seed": options.seed,
            "sampling": json.loads(options.sampling),
            **measured,
            "machine": machine(llm.device),
            "commit": commit(),
        }
        publish(row, options.out)
    if options.text is not None:
        options.text.write_text(llm.tokenizer.decode(text.auto.tokens), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
