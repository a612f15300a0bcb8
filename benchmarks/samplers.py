"""How long texts of a real model stay readable, by sampling.

    python -m benchmarks.samplers MODEL BOOKS [--tokens 8000] [--prompt 1000] [--seeds 2]
        [--sampling JSON ...] [--texts FOLDER] [--out FILE]

MODEL is a GGUF file or a name of `benchmarks/models.toml`; BOOKS a folder of text files, each of
which is continued once for each seed, all of them at once. Each JSON is a sampling: fields of
`SamplingParams` over no filter and no penalty; without any, `CANDIDATES`. One line of JSON for each
sampling: how many texts loop or become litanies and where, and what their last tokens are like.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.common import first_litany
from benchmarks.fetch import model_file
from benchmarks.json_lines import publish
from benchmarks.prompts import FRONT
from benchmarks.row import commit, machine
from benchmarks.words import Measured
from tokenswift import LLM, SamplingParams
from tokenswift.config.sampling import NEUTRAL
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.quality import judged
from tokenswift.types import Generation, InputError, distinct

LAST = 1000  # tokens at the end of a text that are looked at
WORD = re.compile(r"[^\W\d_]+")
DRY: Mapping[str, object] = {"dry_multiplier": 0.8, "dry_breakers": ()}
CANDIDATES: tuple[Mapping[str, object], ...] = (
    {"min_p": 0.02, **DRY},
    {"min_p": 0.05, **DRY},
    {"min_p": 0.05, **DRY, "temperature": 0.8},
    {"min_p": 0.02, **DRY, "dry_range": 2048},
    {"min_p": 0.02, **DRY, "presence_penalty": 0.3},
    {"min_p": 0.02, **DRY, "xtc_probability": 0.5},
    {"min_p": 0.02, **DRY, "xtc_probability": 0.25},
    {"min_p": 0.1, "repetition_penalty": 1.2},
    {"min_p": 0.05, "temperature": 0.7},
)


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a text.

    Attributes:
        loop: the token at which a loop of copies begins; None: it has none.
        litany: the token at which a litany begins; None: it has none.
        distinct_4: different runs of four tokens ÷ all of the last ones.
        perplexity: of the last tokens, by the model itself.
        words: share of the last words that stand in one of the books.
    """

    loop: int | None
    litany: int | None
    distinct_4: float
    perplexity: float
    words: float

    @property
    def readable(self) -> int | None:
        """The token at which it ceases to be a text; None: it never does."""
        starts = [start for start in (self.loop, self.litany) if start is not None]
        return min(starts) if starts else None


def words_of(text: str) -> list[str]:
    """Words in small letters."""
    return WORD.findall(text.lower())


def ending(llm: LLM, prompt: list[int], text: Generation, vocabulary: set[str]) -> Ending:
    """What became of a text behind a prompt."""
    tokens = text.token_ids
    target = llm.target
    if not isinstance(target, NativeTarget):
        raise InputError(f"{llm.name} is not a native model; valid: a model of a native family")
    last = tokens[-LAST:]
    judgement = judged(target, prompt + tokens, len(last))
    last_words = words_of(llm.tokenizer.decode(last))
    known = sum(word in vocabulary for word in last_words)
    return Ending(
        loop=text.metrics.loop.start if text.metrics.loop else None,
        litany=first_litany(llm, tokens),
        distinct_4=distinct(last, 4),
        perplexity=float(judgement.losses.mean().exp()),
        words=known / max(1, len(last_words)),
    )


def figures(endings: Sequence[Ending], length: int) -> Measured:
    """Of all texts of a sampling."""
    return {
        "texts": len(endings),
        "loops": sum(one.loop is not None for one in endings),
        "litanies": sum(one.litany is not None for one in endings),
        "readable": [length if one.readable is None else one.readable for one in endings],
        "distinct_4": mean(one.distinct_4 for one in endings),
        "perplexity": median(one.perplexity for one in endings),
        "words": mean(one.words for one in endings),
    }


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("books", type=Path)
    parser.add_argument("--tokens", type=int, default=8000, help="new tokens of a text")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each book")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sampling", action="extend", nargs="+", help="samplings, as JSON")
    parser.add_argument("--texts", type=Path, help="the texts are written to this folder")
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    return parser.parse_args()


def main() -> int:
    """Print a line of JSON for each sampling."""
    options = parse_options()
    if options.texts:
        options.texts.mkdir(parents=True, exist_ok=True)
    file = model_file(options.model)
    llm = LLM(str(file))
    books = [path.read_text(encoding="utf-8") for path in sorted(options.books.glob("*.txt"))]
    vocabulary = {word for book in books for word in words_of(book)}
    prompts = [llm.encode(book[FRONT : 2 * FRONT])[: options.prompt] for book in books]
    candidates = CANDIDATES
    if options.sampling:
        candidates = tuple(json.loads(text) for text in options.sampling)
    for number, candidate in enumerate(candidates):
        sampling = SamplingParams(
            **{**NEUTRAL, **candidate, "seed": 0, "min_tokens": options.tokens}
        )
        texts = llm.generate_many(prompts, options.tokens, sampling=sampling, n=options.seeds)
        endings: list[Ending] = []
        for place, text in enumerate(texts):
            book, seed = divmod(place, options.seeds)
            endings.append(ending(llm, prompts[book], text, vocabulary))
            if options.texts:
                name = f"{file.stem}-{number}-{book}-{seed}.txt"
                (options.texts / name).write_text(text.text, encoding="utf-8")
        row = {
            "model": file.stem,
            "dtype": llm.dtype,
            "sampling": candidate,
            "tokens": options.tokens,
            **figures(endings, options.tokens),
            "endings": [asdict(one) for one in endings],
            "machine": machine("cpu"),
            "commit": commit(),
        }
        publish(row, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
