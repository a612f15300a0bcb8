"""Hidden states of text that the model writes, which writing computes anyway: kept on disk,
read as they are needed. What the model writes after is a text's passages, or what it is asked.

A store is a folder with a safetensors file for each text: ``tokens`` (n,), int32, and ``states``
    (n, W),
bfloat16: the states that enter some layers, side by side, the last of them those before the final
    norm. Files
are there whole or not at all, so a killed run leaves a store that is whole up to its last text.
"""

from __future__ import annotations

import logging
import random
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.ticket import Ticket
from tokenswift.files import line_of, replacing
from tokenswift.loader.identity import digest_of, file_digest
from tokenswift.speculation.eagle.features import Features
from tokenswift.tokenizer import Tokenizer
from tokenswift.train.options import DataOptions, Job
from tokenswift.train.work import BadData, claim
from tokenswift.types import InputError, OnProgress, RunError

logger = logging.getLogger("tokenswift")
MADE_FROM, COMPLETE = "made_from", "complete"  # files of a store
DIGITS = 7  # of a text's number, in the name of its file
SHORTEST = 64  # tokens; shorter remainders of a document teach little
PIECE = 1 << 25  # characters of a file in memory at once
MOST_CHARACTERS = 8  # that a token is thought to have


def files_of(source: str) -> list[Path]:
    """The files of ``--data``, in order.

    Raises:
        InputError: there are none.
    """
    path = Path(source)
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise InputError(
            f"--data {source} holds no text; valid: self, a text file or a folder of .txt files"
        )
    return files


def fingerprint(source: str) -> str:
    """What a source holds: a hash of its files' contents, wherever they lie."""
    if source == "self":
        return source
    return digest_of([[file_digest(file), file.suffix] for file in files_of(source)])


def read_texts(source: str) -> Iterator[str]:
    """The documents of a file or a folder, one after the other; a large text comes in pieces."""
    for file in files_of(source):
        try:
            with file.open(encoding="utf-8", newline="") as opened:
                while piece := opened.read(PIECE):
                    yield piece
        except UnicodeDecodeError as error:
            raise BadData(f"--data {file} is not UTF-8; valid: UTF-8 text") from error
        except OSError as error:
            line = f"--data {file} cannot be read ({line_of(error)})"
            raise BadData(f"{line}; valid: UTF-8 text") from error


def questions(seed: int) -> Iterator[tuple[str, float]]:
    """Without an end: what a model is asked, of six kinds in turns, for answers that can be learnt
    from, and their temperature."""
    text = resources.files("tokenswift").joinpath("data/questions.toml").read_text("utf-8")
    kinds = tomllib.loads(text)
    drawn = random.Random(seed)

    def endless(kind: dict[str, list[str]]) -> Iterator[tuple[str, float]]:
        while True:
            pairs = list(product(kind["tasks"], kind["topics"]))
            for task, topic in drawn.sample(pairs, len(pairs)):
                yield task.replace("{0}", topic), drawn.choice((0.7, 1.0))

    yield from chain.from_iterable(zip(*map(endless, kinds.values()), strict=True))


def blocks(source: str, tokenizer: Tokenizer, limit: int, length: int) -> Iterator[list[int]]:
    """Blocks of at most ``length`` tokens, none across two documents, about ``limit`` tokens in
    all.

    Documents give in proportion to their lengths, long ones whole blocks; short remainders are
    dropped.
    """
    prefix = list(tokenizer("")["input_ids"])
    room = length - len(prefix)
    total, credit, shortest = max(1, sum(map(len, read_texts(source)))), 0, min(SHORTEST, room)
    for text in read_texts(source):
        credit += limit * len(text)  # times total
        share = credit // total
        share -= share % room if share > room else 0
        if share < shortest:
            continue  # what a short document would give is left to a later one
        credit -= share * total
        piece = text[: MOST_CHARACTERS * share]  # hardly more is tokenised than is used
        tokens = list(tokenizer(piece, add_special_tokens=False)["input_ids"])[:share]
        pieces = (tokens[start : start + room] for start in range(0, len(tokens), room))
        yield from ([*prefix, *piece] for piece in pieces if len(piece) >= shortest)


LEAST = 256  # tokens of text that anything can be learnt from
PLAIN = "autoregressive"


class Recorder(Features):
    """Features of a text, all of them, in bfloat16."""

    def __init__(self) -> None:
        super().__init__(1 << 40)

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """See `Features.take`."""
        super().take(at, features.to("cpu", torch.bfloat16))


# ---- the store -----------------------------------------------------------------------------------


def tokens_of(path: Path) -> Int[Tensor, " n"] | None:
    """The tokens of a text's file; None where the file is damaged."""
    try:
        with safe_open(path, "pt") as file:
            tokens = file.get_tensor("tokens")
            rows = file.get_slice("states").get_shape()[:1]
    except (SafetensorError, OSError):
        return None
    return tokens if tokens.dtype == torch.int32 and [*tokens.shape] == rows else None


class HiddenStore:
    """Texts with hidden states of the base model, a file each.

    Args:
        folder: where the store lies; made when missing.
        made_from: a digest of what the states depend on; a store with texts made from anything
            else is refused. A text whose file is damaged is left out, and is to be written anew.

    Attributes:
        texts: by number, tokens (n,), int32; those that the model writes together end in any order.
    """

    def __init__(self, folder: str | Path, made_from: str) -> None:
        self.folder, self.made_from = Path(folder), made_from
        paths = sorted(self.folder.glob(f"{'[0-9]' * DIGITS}.safetensors"))
        if not paths and not self.complete:  # nobody's: whoever began it has written no text
            (self.folder / MADE_FROM).unlink(missing_ok=True)
        claim(self.folder / MADE_FROM, made_from)
        self.texts: dict[int, Int[Tensor, " n"]] = {}
        for path in paths:
            tokens = tokens_of(path)
            if tokens is None:
                logger.warning("%s is damaged; its text is written anew", path)
                (self.folder / COMPLETE).unlink(missing_ok=True)
                path.unlink()
            else:
                self.texts[int(path.stem)] = tokens

    def path(self, number: int) -> Path:
        """The file of a text."""
        return self.folder / f"{number:0{DIGITS}}.safetensors"

    def discard(self) -> None:
        """Remove all texts, and the folder where nothing else is in it."""
        for number in self.texts:
            self.path(number).unlink()
        self.texts = {}
        for name in (COMPLETE, MADE_FROM):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # there is more in it
            self.folder.rmdir()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return (self.folder / COMPLETE).exists()

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts.values()))

    def append(self, number: int, tokens: Sequence[int], states: Float[Tensor, "n W"]) -> None:
        """Add a text.

        Raises:
            OSError: the disk takes no more; the texts before are kept.
        """
        made = torch.tensor(tokens, dtype=torch.int32)
        text = {"tokens": made, "states": states.to("cpu", torch.bfloat16).contiguous()}
        with replacing(self.path(number)) as part:
            part.write_bytes(save(text))  # a full disk is an OSError
        self.texts[number] = made

    def finish(self, tokens: int = 1 << 60) -> None:
        """Mark the store as complete: its texts in the order of their numbers, the first ones that
        hold so many tokens; the others go."""
        found, self.texts = sorted(self.texts.items()), {}
        for number, text in found:
            if self.tokens < tokens:
                self.texts[number] = text
            else:
                self.path(number).unlink()
        (self.folder / COMPLETE).touch()

    def states(self, number: int, start: int = 0, most: int = 1 << 60) -> Float[Tensor, "n W"]:
        """Hidden states of a text, bfloat16, of ``most`` tokens from ``start`` on."""
        with safe_open(self.path(number), "pt") as file:
            return file.get_slice("states")[start : min(start + most, len(self.texts[number]))]


def held_out(store: HiddenStore, share: float) -> tuple[list[int], list[int]]:
    """The store's texts to learn from, and those that are held out: evenly spaced, none of a
    few."""
    every = round(1 / share) if share > 0 else 1 << 60
    numbers = list(store.texts)
    return [n for i, n in enumerate(numbers, 1) if i % every], numbers[every - 1 :: every]


class Windows(Dataset[dict[str, Tensor]]):
    """Training items of fixed shape cut from texts of a store: ``chunk`` positions each.

    An item holds ``tokens`` (chunk + extra + 1,), ``states`` (chunk + extra, W), and ``valid``
    (chunk,). Tokens are padded by -1, states by zeros.

    Args:
        numbers: of the texts.
        extra: further states of an item, for targets.
        chunk: positions per item.
    """

    def __init__(self, store: HiddenStore, numbers: Iterable[int], extra: int, chunk: int) -> None:
        self.store, self.extra, self.chunk = store, extra, chunk
        self.items = [
            (number, start)
            for number in numbers
            for start in range(
                0, len(store.texts[number]) - extra, chunk
            )  # positions with all their targets
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        (number, start), size = self.items[index], self.chunk + self.extra
        tokens = self.store.texts[number][start : start + size + 1].long()
        states = self.store.states(number, start, size)
        return {
            "tokens": F.pad(tokens, (0, size + 1 - len(tokens)), value=-1),
            "states": F.pad(states, (0, 0, 0, size - len(states))),
            "valid": torch.arange(self.chunk) < len(states) - self.extra,
        }


def counts(store: HiddenStore, vocab_size: int) -> Int[Tensor, " V"]:
    """How often each token stands in the store."""
    return torch.bincount(torch.cat([*store.texts.values()]), minlength=vocab_size)


def frequent(found: Int[Tensor, " V"], size: int) -> Int[Tensor, " S"]:
    """The ``size`` most frequent tokens, ascending; 0 takes the whole vocabulary. Ties: the smaller
    id."""
    return found.argsort(descending=True, stable=True)[: size or None].sort().values


def covering(found: Int[Tensor, " V"], share: float) -> Int[Tensor, " S"]:
    """The fewest tokens that make up ``share`` of the text, ascending; at least one."""
    mass = found.sort(descending=True).values.double().cumsum(0) / max(1, int(found.sum()))
    return frequent(found, int((mass < share - 1e-12).sum()) + 1)


# ---- filling a store -----------------------------------------------------------------------------


def collect(
    llm: Any,
    data: DataOptions,
    job: Job,
    layers: Sequence[int],
    store: HiddenStore,
    on_progress: OnProgress,
) -> None:
    """Fill a store, or the rest of it, with what the model writes and the states that enter these
    layers, until the texts so far, in order, hold the tokens. A killed run repeats the texts that
    were under way, with the same tokens.

    Raises:
        InputError: too little text.
        OSError: the disk takes no more.
    """
    llm.target.set_feature_layers(tuple(layers))
    done = {*store.texts}
    todo = (one for one in enumerate(_requests(llm, data, job)) if one[0] not in done)
    running: list[tuple[int, Request, Ticket, Recorder]] = []
    ended = 0
    with Scheduler(llm, data.write_batch) as scheduler:
        while ended < data.tokens:
            while len(running) < data.write_batch and (found := next(todo, None)):
                number, request = found
                recorder = Recorder()
                running.append(
                    (number, request, scheduler.submit(request, features=recorder), recorder)
                )
            if not running:
                break
            running[0][2].wait(0.1)
            for one in [one for one in running if one[2].is_over]:
                running.remove(one)
                number, request, ticket, recorder = one
                at, states = _states(recorder)  # of all tokens but the last one
                tokens = [*request.prompt, *ticket.result.token_ids][at : at + len(states)]
                store.append(number, tokens, states)
            first = min((number for number, *_ in running), default=1 << 40)
            ended = sum(len(text) for number, text in store.texts.items() if number < first)
            on_progress("write", min(store.tokens, data.tokens - 1), data.tokens)
    if store.tokens < LEAST:
        given = f"{store.tokens} tokens to learn from, after passages of {SHORTEST} tokens and more"
        raise BadData(f"--data {data.data} gives {given}; at least {LEAST} are needed")
    store.finish(data.tokens)


def _requests(llm: Any, data: DataOptions, job: Job) -> Iterator[Request]:
    """Passages to continue; or what a model that answers is asked, or an empty beginning."""
    new, params, seed = data.sequence_length, job.sampling, job.training.seed
    answers = data.data == "self" and llm.has_chat_template
    if data.data != "self":
        length = new // 3
        new -= length
        wanted = length * max(1, data.tokens // data.sequence_length)
        passages = blocks(data.data, llm.tokenizer, wanted, length)
        prompts: Iterable[tuple[list[int], SamplingParams]] = (
            (passage, params) for passage in passages
        )
    elif answers:
        asked = (([{"role": "user", "content": text}], warmth) for text, warmth in questions(seed))
        plain = SamplingParams(**NEUTRAL)
        prompts = ((llm.encode(chat), replace(plain, temperature=warmth)) for chat, warmth in asked)
    else:
        first = list(llm.tokenizer("")["input_ids"]) or [
            min(llm.resources.source.end_tokens(), default=0)
        ]
        prompts = repeat((first, params))
    for number, (prompt, how) in enumerate(prompts):
        how = replace(how, seed=seed * 100_003 + number)
        yield Request(prompt, new, PLAIN, sampling=how, ignore_eos=not answers)


def _states(recorder: Recorder) -> tuple[int, Float[Tensor, "n W"]]:
    """The position of the first token that has states, and each one's states side by side."""
    found = recorder.drain()
    if found is None:
        raise RunError("the model's passes gave no states")
    return found[0], found[1].transpose(0, 1).flatten(1)
