"""This project's speed with recurrent layers: run by `benchmarks.recurrent` with this interpreter.

    PYTHON recurrent_speed.py FILE THREADS

Prints its version, then for each line of JSON on its input, {"prompt": tokens, "new_tokens":
number, "passes": number}, the tokens a second of the prompt and of plain decoding behind it; and
the milliseconds of passes there, their logits and the commit of accepted rows included: of one row;
of chains, of which the first half is accepted; and of a tree; and of a step's choice of a token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from benchmarks.common import PLAIN
from tokenswift import LLM, __version__
from tokenswift.config.sampling import CONTINUED
from tokenswift.kv.cache import FullCache
from tokenswift.models.target import Target
from tokenswift.turns import DecodingSide, take_turns


@dataclass(frozen=True, slots=True)
class Draft:
    """The rows of a pass.

    Attributes:
        parents: of each row.
        path: the rows that are accepted.
    """

    parents: Sequence[int]
    path: tuple[int, ...]


def chain(rows: int) -> Draft:
    """A chain whose first half is accepted."""
    return Draft(range(-1, rows - 1), tuple(range(rows // 2)))


DRAFTS = {
    "plain": Draft([-1], (0,)),
    "chain_4": chain(4),
    "chain_8": chain(8),
    "tree_8": Draft([-1, 0, 0, 1, 1, 2, 2, 4], (0, 1, 4)),
}


def verify(target: Target, cache: FullCache, draft: Draft, tokens: torch.Tensor) -> None:
    """One pass, its logits, and the commit."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    positions = torch.tensor(depths) + cache.length
    result = target.forward(tokens, positions, cache, list(draft.parents))
    target.logits(result.hidden)
    cache.commit(draft.path)


@torch.inference_mode()
def prices(
    target: Target, prompt_cache: FullCache, prompt: list[int], rounds: int
) -> dict[str, float]:
    """Milliseconds by draft; a first round is not counted."""
    most = sum(len(draft.parents) for draft in DRAFTS.values())
    cache = prompt_cache.fork(prompt_cache.length + (rounds + 1) * most)
    times: dict[str, list[float]] = {name: [] for name in DRAFTS}
    for turn, name in take_turns(list(DRAFTS), range(rounds + 1)):
        draft = DRAFTS[name]
        tokens = torch.tensor(prompt[turn : turn + len(draft.parents)])
        start = perf_counter()
        verify(target, cache, draft, tokens)
        times[name].append(1e3 * (perf_counter() - start))
    return {name: median(milliseconds[1:]) for name, milliseconds in times.items()}


def speeds(llm: LLM, prompt: list[int], new_tokens: int, rounds: int) -> dict[str, object]:
    """Of a prompt, of plain decoding behind it, and of passes."""
    state = llm.prefill(prompt)
    sampling = replace(CONTINUED, seed=1, min_tokens=new_tokens)
    plain = DecodingSide(iter(state.stream(new_tokens, PLAIN, sampling=sampling)))
    plain.run_to(new_tokens)
    passes: dict[str, float] = {}
    if rounds:
        passes = prices(llm.target, state.sequence.cache, prompt, rounds)
        passes["choice"] = 1e3 * plain.phase_seconds["choose"] / len(plain.tokens)
    return {
        "reading": len(prompt) / state.seconds,
        "writing": len(plain.tokens) / plain.seconds,
        "passes": passes,
    }


def main() -> None:
    """Answer lines until the input ends."""
    torch.set_num_threads(int(sys.argv[2]))
    llm = LLM(sys.argv[1], heads="none", eagle="none")
    print(json.dumps(__version__), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        new_tokens = question["new_tokens"]
        answer = speeds(llm, question["prompt"], new_tokens, question["passes"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
