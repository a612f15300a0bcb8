"""Ninety runs of the default model as hashes of their tokens: what a restructuring must not change.

``python -m tests.lossless.frozen`` writes tests/data/frozen.json; `test_frozen` compares. In
float32 and int8 there is one set of runs for all processors; in bfloat16 there are two, as some
have dot products of it that round in their own way. A change that means to alter texts (kernels,
noise, samplers) writes the file again and says so.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenswift
from tokenswift import LLM, Generation, SamplingParams
from tokenswift.kernels.cpu import library
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.loader.default_model import cache_dir
from tokenswift.models import target as models

FILE = Path(__file__).parent.parent / "data" / "frozen.json"
PROMPTS = Path(tokenswift.__file__).parent / "data" / "prompts"
#: the kernels that texts are written with by default, for the processor at hand
OWN = "native"
#: a processor's flag for dot products of bfloat16, which only its own kernels use
DOT_BFLOAT16 = "avx512_bf16"
SAMPLERS = {
    "paper": SamplingParams(seed=11),
    "greedy": SamplingParams(greedy=True, repetition_penalty=1.1),
    "nucleus": SamplingParams(
        temperature=0.7, top_p=0.9, min_p=0.0, repetition_penalty=1.0, seed=5
    ),
}
STRATEGIES: dict[str, dict[str, object]] = {
    "autoregressive": {},
    "tokenswift": {"tree": (1, 3, 3, 3), "ngrams": 20, "budget": 64, "draft": "partial"},
    "medusa": {"tree": (1, 3, 3)},
    "triforce": {"budget": 64, "draft_budget": 32},
    "magicdec": {"budget": 64, "kv": "snapkv"},
}
TEXTS = ("harbour", "letters")
DTYPES = ("float32", "bfloat16", "int8")
LENGTH = 150
NEW = 24


def kinds() -> list[str]:
    """Kernels that this processor can run: its own, and those of the instruction sets by name."""
    return [OWN, *library.fitting(library.processor())]


def use(kind: str) -> bool:
    """Run the engine on kernels of a kind; False where they cannot be compiled."""
    if kind not in kinds():
        return False
    targets = library.TARGETS if kind == OWN else (library.instruction_sets()[kind].flags,)
    compiled = library.compiled(cache_dir() / "kernels", targets)
    if not isinstance(compiled, str):
        models._backends["cpu"] = CpuBackend(compiled)
    return not isinstance(compiled, str)


def arithmetic(kind: str, dtype: str) -> str:
    """The name of the runs that kernels of a kind have to repeat in a type."""
    dot = (
        kind in (OWN, "avx512-bf16")
        and dtype == "bfloat16"
        and DOT_BFLOAT16 in library.processor().split()
    )
    return f"{dtype} {DOT_BFLOAT16}" if dot else dtype


def runs(
    llm: LLM, text: str, samplers: Iterable[str] = tuple(SAMPLERS)
) -> Iterator[tuple[str, str, Generation]]:
    """Strategy, sampler and output of each run behind a text."""
    prompt = llm.encode((PROMPTS / f"{text}.txt").read_text(encoding="utf-8"))[:LENGTH]
    for sampler in samplers:
        params = SAMPLERS[sampler]
        for strategy, options in STRATEGIES.items():
            yield (
                strategy,
                sampler,
                llm.generate(prompt, NEW, strategy, options, params, ignore_eos=True),
            )


def digest(out: Generation) -> str:
    """A hash of a run: its tokens, and how many steps they took, which is what was drafted."""
    return hashlib.sha256(f"{out.token_ids} {out.metrics.steps}".encode()).hexdigest()[:16]


def hashes(llm: LLM, dtype: str) -> dict[str, str]:
    """Name and hash of each run in a type."""
    return {
        f"{strategy} {sampler} {dtype} {text}": digest(out)
        for text in TEXTS
        for strategy, sampler, out in runs(llm, text)
    }


def main() -> None:
    """Write the file with what this processor's own kernels say, and in bfloat16 those of AVX2,
    too; runs that it cannot make stay."""
    digests = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for kind, dtypes in ((OWN, DTYPES), ("avx2", ("bfloat16",))):
        if kind in kinds() and use(kind):
            for dtype in dtypes:
                llm = LLM("smollm2-135m", dtype=dtype, device="cpu")
                digests[arithmetic(kind, dtype)] = hashes(llm, dtype)
                print(kind, dtype, file=sys.stderr)
    FILE.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
