"""Sixty runs of the default model as hashes of their tokens: what a restructuring must not change.

``python -m tests.lossless.frozen`` writes tests/data/frozen.json; `test_frozen` compares. Bits differ among
instruction sets, never among the tunings and compilers of one, so the file holds the runs of each kind, by
kernels compiled for it. A change that means to alter texts (kernels, noise, samplers) writes the file again
and says so.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenswift
from tokenswift import LLM, SamplingParams
from tokenswift.backends.cpu import build
from tokenswift.backends.cpu.backend import CpuBackend
from tokenswift.models import target as targets
from tokenswift.models.load import cache_dir

FILE = Path(__file__).parent.parent / "data" / "frozen.json"
PROMPTS = Path(tokenswift.__file__).parent / "data" / "prompts"
#: kinds of processors: the flags that they need, and the compiler's for them
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "avx512_bf16": (("avx512_bf16", "avx512vl", "avx512dq"), ("-march=x86-64-v4", "-mavx512bf16")),
    "avx512": (("avx512f", "avx512vl", "avx512dq", "avx512bw"), ("-march=x86-64-v4",)),
    "avx2": (("avx2", "fma", "f16c"), ("-march=x86-64-v3",)),
}
SAMPLERS = {
    "paper": SamplingParams(seed=11),
    "greedy": SamplingParams(greedy=True, repetition_penalty=1.1),
    "nucleus": SamplingParams(temperature=0.7, top_p=0.9, min_p=0.0, repetition_penalty=1.0, seed=5),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "tokenswift": {"tree": (1, 3, 3, 3), "ngrams": 20, "budget": 64, "draft": "partial"},
    "medusa": {"tree": (1, 3, 3)},
    "triforce": {"budget": 64, "draft_budget": 32},
    "magicdec": {"budget": 64, "kv": "snapkv"},
}
TEXTS, DTYPES = ("harbour", "letters"), ("float32", "bfloat16")
LENGTH, NEW = 150, 24


def kinds() -> list[str]:
    """The kinds of kernels that this processor can run, the best first."""
    known = set(build.processor().split())
    return [kind for kind, (needs, _) in KINDS.items() if known.issuperset(needs)]


def use(kind: str) -> bool:
    """Run the engine on kernels of a kind; False where they cannot be compiled."""
    library = build.library(cache_dir() / "kernels", (KINDS[kind][1],))
    if library is not None:
        targets._backends["cpu"] = CpuBackend(library)
    return library is not None


def runs(dtype: str) -> Iterator[tuple[str, str]]:
    """Name and hash of each run: its tokens, and how many steps they took, which is what was drafted."""
    llm = LLM("smollm2-135m", dtype=dtype, device="cpu")
    for text in TEXTS:
        prompt = llm.encode((PROMPTS / f"{text}.txt").read_text(encoding="utf-8"))[:LENGTH]
        for sampler, params in SAMPLERS.items():
            for strategy, options in STRATEGIES.items():
                out = llm.generate(prompt, NEW, strategy, options, params, ignore_eos=True)
                said = f"{out.token_ids} {out.metrics.steps}"
                name = f"{strategy} {sampler} {dtype} {text}"
                yield name, hashlib.sha256(said.encode()).hexdigest()[:16]


def main() -> None:
    """Write the file, for every kind that this processor can run; other kinds' runs stay."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for kind in kinds():
        if use(kind):
            kept[kind] = dict(run for dtype in DTYPES for run in runs(dtype))
            print(kind, len(kept[kind]), "runs", file=sys.stderr)
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
