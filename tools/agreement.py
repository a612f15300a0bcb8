"""How often a trained drafter's choice is its model's own, by depth and by kind of text.

    python -m tools.agreement MODEL DRAFTER [DRAFTER ...] [--work WORK] [--held-out 0.06]
        [--prose FILE] [--out FILE]

DRAFTER is a file of kind eagle or conditioned. WORK is the work folder of `tokenswift train --model
MODEL --data self --held-out 0.06`: its held-out answers are looked at, without their prompts, by
the kind of question. FILE is a long text that the model has written, such as `--text` of
`benchmarks.long_text` keeps: it is read, and looked at behind 1,000 and 4,096 tokens.

Both sides choose with the same noise, weighed as in drafting, the model from its whole vocabulary;
at temperature 0.7 in answers, 0.8 in prose. One line of JSON for each drafter and kind: the share
of places where the first drafted token is the model's, the first two, and so on.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.json_lines import publish
from benchmarks.row import commit
from tokenswift import LLM
from tokenswift.loader.layout import HEAD
from tokenswift.loader.weights import unstored
from tokenswift.sampling.noise import Noise
from tokenswift.speculation.eagle.files import load_eagle
from tokenswift.speculation.eagle.model import NARROW_NOISE
from tokenswift.speculation.heads.files import read_heads
from tokenswift.train.distillation import FrozenBase, Student
from tokenswift.train.eagle import EagleStudent, eagle_config
from tokenswift.train.heads import HeadsStudent
from tokenswift.train.states import Recorder, recorded_states
from tokenswift.train.store import HiddenStore, held_out
from tokenswift.types import InputError

DEPTHS = 5
PROMPT_END = 3  # tokens that end a prompt: where the answer begins
SEED = 5  # of the noise
BEFORE = 600  # tokens before the places of prose that a drafter sees: more than its window
PLACES = 1400  # of prose, behind each number of tokens
BEHIND = {"prose behind 1,000 tokens": 1000, "prose behind 4,096": 4096}


@dataclass(frozen=True, slots=True)
class Passage:
    """A text whose places are looked at.

    Attributes:
        kind: of the text.
        tokens: ids, (n,).
        states: of the model, (n, W).
        first: the first place that counts.
        temperature: that both choose at.
    """

    kind: str
    tokens: Int[Tensor, " n"]
    states: Float[Tensor, "n W"]
    first: int
    temperature: float


# ---- texts ---------------------------------------------------------------------------------------


def kinds_of_questions() -> dict[str, str]:
    """The kind of each question that self-written text answers."""
    file = resources.files("tokenswift").joinpath("data/questions.toml")
    return {
        task.replace("{0}", topic): name
        for name, kind in tomllib.loads(file.read_text("utf-8")).items()
        for task, topic in product(kind["tasks"], kind["topics"])
    }


def answer_start(tokens: list[int], prompt_end: list[int]) -> int | None:
    """Where a text's answer begins: behind the first end of a prompt; None: it is no answer."""
    for place in range(len(tokens)):
        if tokens[place : place + PROMPT_END] == prompt_end:
            return place + PROMPT_END
    return None


def answers(llm: LLM, work: Path, share: float) -> Iterator[Passage]:
    """The held-out answers of a training."""
    folder = work / "states"
    store = HiddenStore(folder, (folder / "made_from").read_text(encoding="utf-8"))
    kinds = kinds_of_questions()
    prompt_end = llm.encode([{"role": "user", "content": "?"}])[-PROMPT_END:]
    for number in held_out(store, share)[1]:
        tokens = store.texts[number].long()
        first = answer_start(tokens.tolist(), prompt_end)
        if first is None:
            continue
        prompt = llm.tokenizer.decode(tokens[:first].tolist())
        asked = max((each for each in kinds if each in prompt), key=len, default="")
        yield Passage(kinds.get(asked, "others"), tokens, store.states(number), first, 0.7)


def prose(llm: LLM, file: Path) -> Iterator[Passage]:
    """Places of a long text, behind its first tokens."""
    needed = max(BEHIND.values()) + PLACES + DEPTHS + 2
    ids = llm.encode(file.read_text(encoding="utf-8"))[:needed]
    if len(ids) < needed:
        raise InputError(f"{file} has {len(ids):,} tokens; valid: at least {needed:,}")
    llm.target.set_feature_layers(eagle_config(llm, 1, 64).feature_layers)
    recorder = Recorder()
    llm.resources.features = lambda: recorder
    llm.prefill(ids)
    states = recorded_states(recorder)[1]
    tokens = torch.tensor(ids)
    for kind, behind in BEHIND.items():
        part = slice(behind - BEFORE, behind + PLACES + DEPTHS)
        yield Passage(kind, tokens[part], states[part], BEFORE, 0.8)


# ---- drafters ------------------------------------------------------------------------------------


def student_of(llm: LLM, file: str) -> tuple[Student, torch.Tensor]:
    """A file's drafter or conditioned heads, and the tokens that they name."""
    if file.endswith(".heads.safetensors"):
        heads, _, _ = read_heads(file)
        named = (
            torch.arange(llm.target.vocab_size) if heads.frequent is None else heads.frequent.long()
        )
        return HeadsStudent(heads), named
    drafter = load_eagle(file, llm.target.config)
    if drafter.d2t is None:
        sys.exit(f"{file} names all tokens; valid: a drafter by tokenswift train")
    weights = {name: unstored(weight, torch.float32) for name, weight in drafter.tensors.items()}
    return EagleStudent(drafter.config, weights, DEPTHS).eval(), drafter.d2t


class Judge:
    """What a drafter's choices are held against.

    Args:
        llm: the model.
        file: the drafter's.
    """

    def __init__(self, llm: LLM, file: str) -> None:
        self.student, self.named = student_of(llm, file)
        self._noise_weight = NARROW_NOISE if isinstance(self.student, EagleStudent) else 1.0
        self._base = FrozenBase(llm, self.named, torch.bfloat16)
        self._head = unstored(llm.source.weight(HEAD), torch.bfloat16)
        self._width = llm.target.hidden_size
        self._noise = Noise(SEED, len(self._head), torch.device("cpu"))

    @torch.no_grad()
    def counts(self, passage: Passage) -> Int[Tensor, " levels+1"]:
        """The places of a passage, and those where one drafted token, two … are the model's."""
        levels = self.student.levels
        count = len(passage.tokens) - levels
        first = min(count, passage.first)
        noise = torch.stack([self._noise.at(place) for place in range(len(passage.tokens))])
        hidden = passage.states[:, -self._width :]
        logits = (self._base.normed(hidden) @ self._head.T).float() / passage.temperature
        chosen = (logits + noise).argmax(-1)
        agreed = torch.ones(count, dtype=torch.bool)
        counts = [count - first]
        drafts = self.student(passage.tokens[None], passage.states[None].float(), self._base)
        for depth, drafted in enumerate(drafts, 1):
            places = torch.arange(count) + depth
            rows = self._base.rows[: self._base.size]
            scores = (drafted.bfloat16() @ rows.T).float() / passage.temperature
            scores += self._noise_weight * noise[places][:, self.named]
            agreed &= self.named[scores.argmax(-1)] == chosen[places]
            counts.append(int(agreed[first:].sum()))
        return torch.tensor(counts)


def rows_of(llm: LLM, file: str, passages: list[Passage]) -> Iterator[dict[str, object]]:
    """A drafter's agreement by kind of text, and with all answers."""
    judge = Judge(llm, file)
    totals: dict[str, Int[Tensor, " levels+1"]] = {}
    for passage in passages:
        counts = judge.counts(passage)
        kinds = [passage.kind] if passage.kind in BEHIND else [passage.kind, "all answers"]
        for kind in kinds:
            totals[kind] = totals.get(kind, 0) + counts
    for kind, total in totals.items():
        shares = [round(float(n / total[0]), 3) for n in total[1:]]
        yield {"drafter": Path(file).name, "kind": kind, "places": int(total[0]), "right": shares}


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--work", type=Path, help="work folder of a training")
    parser.add_argument("--held-out", type=float, default=0.06, help="share that it held out")
    parser.add_argument("--prose", type=Path, help="a long text by the model")
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    return parser.parse_args()


def main() -> None:
    """Print the lines."""
    options = parse_options()
    llm = LLM(options.model, eagle=None, heads=None)
    model = Path(options.model).name.removesuffix(".gguf")
    passages: list[Passage] = []
    if options.work is not None:
        passages += answers(llm, options.work, options.held_out)
    if options.prose is not None:
        try:
            passages += prose(llm, options.prose)
        except InputError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
    for file in options.drafters:
        for row in rows_of(llm, file, passages):
            publish({"model": model, **row, "commit": commit()}, options.out)


if __name__ == "__main__":
    main()
