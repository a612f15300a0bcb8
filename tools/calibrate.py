"""Fit the weights of `speculation.calibration` for heads from what they predict on held-out text.

    python tools/calibrate.py HEADS TEXTS OUT [--model M] [--tokens N]

The model writes ``--tokens`` tokens after passages of the texts (files of a folder) by plain
decoding; the heads rank candidates at every place, three levels deep. OUT is a copy of HEADS with
the fitted weights. Prints how often the first candidates are right, by level, and predicted against
observed chances by decile.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tokenswift import LLM, SamplingParams
from tokenswift.sampling.rows import LogitRows, Ranked
from tokenswift.speculation.calibration import features
from tokenswift.speculation.drafters.heads import HeadDrafter
from tokenswift.speculation.heads.files import read_heads, save_heads

WIDTH = 5  # candidates of a place
LEVELS = 3


@dataclass(frozen=True, slots=True)
class Place:
    """What heads say of one token.

    Attributes:
        level: how far ahead they look.
        ranking: their candidates.
        token: the token that came.
    """

    level: int
    ranking: Ranked
    token: int


def places(llm: LLM, ids: list[int], new: int, seed: int) -> list[Place]:
    """Rankings of the heads at every place of a continuation, given its true tokens."""
    if llm.resources.heads is None:
        raise SystemExit("error: there are no heads")
    sampler = llm.target.sampler(SamplingParams(seed=seed))
    done = llm.generate(
        ids, new, "autoregressive", sampling=SamplingParams(seed=seed), ignore_eos=True
    )
    text = [*ids, *done.token_ids]
    levels = HeadDrafter(llm.target, llm.resources.heads, True)
    seen: list[Place] = []
    begun: Any = SimpleNamespace(tokens=ids)
    levels.begin(begun)
    cache = llm.target.new_cache(len(text) + 1)
    llm.target.prefill(text[: len(ids) - 2], cache)
    for root in range(len(ids) - 1, len(text) - LEVELS - 1):
        before = llm.target.forward(torch.tensor([text[root - 1]]), torch.tensor([root - 1]), cache)
        cache.commit((0,))
        base = states = before.hidden
        for level in range(LEVELS):
            at = root + 1 + level
            states = levels.heads.advance(
                level, states, base, llm.target.embed(torch.tensor([text[at - 1]]))
            )
            logits = levels.vocabulary.project(levels.heads.normed(level, states))
            known = text[: root + 1]
            path = text[root + 1 : at]
            rows = LogitRows(
                logits, known, [path], [at], [WIDTH], noise=1.0, subset=levels.vocabulary.subset
            )
            (ranked,) = sampler.candidates(rows)
            seen.append(Place(level, ranked, text[at]))
    return seen


def fit(rows: list[tuple[float, ...]], hits: list[bool]) -> torch.Tensor:
    """Weights of a logistic regression, by L-BFGS."""
    x = torch.tensor(rows, dtype=torch.float64)
    y = torch.tensor(hits, dtype=torch.float64)
    weights = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([weights], max_iter=200)

    def loss() -> torch.Tensor:
        search.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(x @ weights, y)
        value = value + 1e-4 * weights.square().sum()
        value.backward()
        return value

    search.step(loss)
    chances = torch.sigmoid(x @ weights.detach())
    for part in chances.argsort().chunk(10):
        print(
            f"  predicted {chances[part].mean():.3f} observed {y[part].mean():.3f} of {len(part)}"
        )
    return weights.detach()


def print_ranks(level: int, seen: list[Place]) -> None:
    """Print how often each of a level's candidates is right."""
    count = len(seen)
    for rank in range(WIDTH):
        right = sum(place.token in place.ranking.tokens[rank : rank + 1] for place in seen)
        print(f"level {level}: candidate {rank + 1} is right in {right / count:.3f} of {count}")


def fitted_weights(seen: list[Place], first: bool) -> list[float]:
    """The weights of first candidates, or of all others."""
    rows: list[tuple[float, ...]] = []
    hits: list[bool] = []
    for place in seen:
        for rank, token in enumerate(place.ranking.tokens):
            if (rank == 0) == first:
                rows.append(features(place.ranking, rank, place.level))
                hits.append(token == place.token)
    return [round(float(weight), 3) for weight in fit(rows, hits)]


def main() -> None:
    """Fit, and write the copy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("heads", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=1000)
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, heads=str(args.heads))
    seen: list[Place] = []
    for number, file in enumerate(sorted(args.texts.glob("*.txt"))):
        text = file.read_text(encoding="utf-8")
        for part in (1, 2):
            start = part * len(text) // 3
            ids = llm.encode(text[start : start + 8 * args.prompt])[: args.prompt]
            seen += places(llm, ids, args.tokens, 10 * number + part)
    for level in range(LEVELS):
        print_ranks(level, [place for place in seen if place.level == level])
    weights = [fitted_weights(seen, first=True), fitted_weights(seen, first=False)]
    heads, base, notes = read_heads(args.heads)
    heads.calibration = {"hidden": weights, "after": weights}
    save_heads(heads, args.out, base, notes=notes)
    print(f"wrote {args.out}: {weights}")


if __name__ == "__main__":
    main()
