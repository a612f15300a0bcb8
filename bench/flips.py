"""How often rounding flips a choice: one-row passes against passes of other shapes, by measure.

    python bench/flips.py [--model M] [--dtype T] [--tokens N] [--seeds N] [--measures "a;b"] [--results F]

A fixed text is teacher-forced twice, by one-row passes as plain decoding runs them and by tree passes, so
that both see the same context at every position. A flip is a position where the choice (temperature 1,
min-p 0.1, penalty 1.2) differs, for one seed of the noise. One JSON line per measure and shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenswift import LLM, SamplingParams
from tokenswift.audit.passes import forced_passes
from tokenswift.audit.run import shipped_prompts
from tokenswift.models.numerics import Numerics
from tokenswift.models.target import HFTarget
from tokenswift.sampling import Sampler

MEASURES: dict[str, Numerics] = {
    "default": Numerics(),
    "products in blocks": Numerics(block=16),
    "float32 attention": Numerics(attention=torch.float32),
    "float64 attention": Numerics(attention=torch.float64),
    "float32 head": Numerics(head_float32=True),
    "blocks, float32 attention": Numerics(block=16, attention=torch.float32),
    "blocks, float64 attention": Numerics(block=16, attention=torch.float64),
    "blocks, float64 attention, float32 head": Numerics(16, torch.float64, True),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "chain 1,1,1": (1, 1, 1),
    "tree 1,3,3,3": (1, 3, 3, 3),
    "tree 3,3,3,3": (3, 3, 3, 3),
}


@torch.inference_mode()
def rows_of(llm: LLM, text: list[int], start: int, shape: tuple[int, ...]) -> tuple[list[Tensor], float]:
    """Logits that choose ``text[start:]``, by passes of a shape; the seconds taken."""
    began = time.perf_counter()
    if shape:
        found = []
        for i, row in forced_passes(llm, text[:start], text[start:], shape):
            if i == len(found):
                found.append(row.clone())
        return found, time.perf_counter() - began
    target = llm.target
    cache = target.new_cache(len(text) + 1)
    target.prefill(text[: start - 1], cache)
    rows = []
    for place in range(start - 1, len(text) - 1):
        token, position = (torch.tensor([x], device=target.device) for x in (text[place], place))
        mask = torch.ones(1, 1, dtype=torch.bool, device=target.device)
        rows.append(target.logits(target.forward(token, position, cache, mask).hidden)[0])
        cache.commit((0,))
    return rows, time.perf_counter() - began


def choices(
    llm: LLM, rows: list[Tensor], text: list[int], start: int, seeds: int, greedy: bool
) -> list[list[int]]:
    """The choice at each place, for every seed of the noise."""
    found = []
    for seed in range(1 if greedy else seeds):
        sampler = Sampler(SamplingParams(seed=seed, greedy=greedy), llm.target.vocab_size, llm.target.device)
        found.append([sampler.choose(row[None], text[: start + i], [[]])[0] for i, row in enumerate(rows)])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--start", type=int, default=200, help="tokens of prompt")
    parser.add_argument("--tokens", type=int, default=300, help="positions compared")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--measures", default=";".join(MEASURES), help="separated by ;")
    parser.add_argument("--shapes", default=";".join(SHAPES))
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    llm: Any = LLM(args.model, dtype=args.dtype, device=args.device, heads="none")
    text = llm.encode(shipped_prompts()[0])[: args.start + args.tokens]
    start = min(args.start, len(text) - 1)
    lines = []
    for name in args.measures.split(";"):
        llm.target.close()
        llm.target = HFTarget(llm.model, MEASURES[name])
        plain, plain_seconds = rows_of(llm, text, start, ())
        count = len(plain)
        told = [choices(llm, plain, text, start, args.seeds, greedy) for greedy in (False, True)]
        for shape in args.shapes.split(";"):
            rows, seconds = rows_of(llm, text, start, SHAPES[shape])
            other = [choices(llm, rows, text, start, args.seeds, greedy) for greedy in (False, True)]
            flips = [
                sum(a != b for one, two in zip(x, y, strict=True) for a, b in zip(one, two, strict=True))
                for x, y in zip(told, other, strict=True)
            ]
            far = [float((a - b).abs().max()) for a, b in zip(plain, rows, strict=True)]
            line = {
                "measure": name,
                "shape": shape,
                "dtype": args.dtype,
                "device": str(llm.target.device),
                "threads": torch.get_num_threads(),
                "positions": count,
                "seeds": args.seeds,
                "flips": flips[0],
                "flips_per_10000": round(1e4 * flips[0] / (count * args.seeds), 1),
                "greedy_flips": flips[1],
                "identical_rows": sum(value == 0 for value in far),
                "greatest_difference": max(far),
                "mean_difference": sum(far) / len(far),
                "one_row_ms": round(1e3 * plain_seconds / count, 1),
                "shape_ms_per_token": round(1e3 * seconds / count, 1),
            }
            lines.append(json.dumps(line))
            print(lines[-1], flush=True)
            if args.results:
                with args.results.open("a", encoding="utf-8") as handle:
                    handle.write(lines[-1] + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
