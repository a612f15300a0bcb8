"""Fit the weights of `speculation.calibration` for heads from what they predict on held-out text.

    python tools/calibrate.py HEADS TEXTS OUT [--model M] [--tokens N]

The model writes ``--tokens`` tokens after passages of the texts (files of a folder) by plain
decoding; the heads rank candidates at every place, three levels deep. OUT is a copy of HEADS with
the fitted weights. Prints how often the first candidates are right, by level, and predicted against
observed chances by decile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tokenswift import LLM, SamplingParams
from tokenswift.sampling.rows import LogitRows, Ranked
from tokenswift.speculation.calibration import features
from tokenswift.speculation.drafters.heads import HeadDrafter
from tokenswift.speculation.heads.files import read_heads, save_heads

WIDTH, LEVELS = 5, 3
Place = tuple[int, Ranked, int]  # level, ranking, the token that came


def places(llm: LLM, ids: list[int], new: int, seed: int) -> list[Place]:
    """Rankings of the heads at every place of a continuation, given its true tokens."""
    if llm.resources.heads is None:
        raise SystemExit("error: there are no heads")
    sampler = llm.target.sampler(SamplingParams(seed=seed))
    done = llm.generate(
        ids, new, "autoregressive", sampling=SamplingParams(seed=seed), ignore_eos=True
    )
    text = [*ids, *done.token_ids]
    levels, found = HeadDrafter(llm.target, llm.resources.heads, True), []
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
            known, path = text[: root + 1], text[root + 1 : at]
            rows = LogitRows(
                logits, known, [path], [at], [WIDTH], noise=1.0, subset=levels.vocabulary.subset
            )
            (ranked,) = sampler.candidates(rows)
            found.append((level, ranked, text[at]))
    return found


def fit(rows: list[tuple[float, ...]], hits: list[bool]) -> torch.Tensor:
    """Weights of a logistic regression, by L-BFGS."""
    x, y = torch.tensor(rows, dtype=torch.float64), torch.tensor(hits, dtype=torch.float64)
    weights = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([weights], max_iter=200)

    def loss() -> Any:
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


def main() -> None:
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
    found: list[Place] = []
    for number, file in enumerate(sorted(args.texts.glob("*.txt"))):
        text = file.read_text(encoding="utf-8")
        for part in (1, 2):
            start = part * len(text) // 3
            ids = llm.encode(text[start : start + 8 * args.prompt])[: args.prompt]
            found += places(llm, ids, args.tokens, 10 * number + part)
    for level in range(LEVELS):
        here = [(ranked, right) for at, ranked, right in found if at == level]
        ranks = [
            sum(len(r.tokens) > i and r.tokens[i] == right for r, right in here) / len(here)
            for i in range(WIDTH)
        ]
        print(f"level {level}: right by rank {[round(rank, 3) for rank in ranks]} of {len(here)}")
    pair = []
    for first in (True, False):
        rows, hits = [], []
        for level, ranked, right in found:
            for at, token in enumerate(ranked.tokens):
                if (at == 0) == first:
                    rows.append(features(ranked, at, level))
                    hits.append(token == right)
        pair.append([round(float(weight), 3) for weight in fit(rows, hits)])
    heads, base, notes = read_heads(args.heads)
    heads.calibration = {"hidden": pair, "after": pair}
    save_heads(heads, args.out, base, notes=notes)
    print(f"wrote {args.out}: {pair}")


if __name__ == "__main__":
    main()
