"""Hidden states of text, computed once by the engine, kept on disk and read by memory map: of text that is
given, or of text that the model writes, whose states writing computes anyway.

A store is a folder with ``tokens.bin`` (int32), ``hidden.bin`` (bfloat16, W per token: the states that enter
some layers, side by side, the last of them those before the final norm) and ``index.json`` (blocks, and what
the states were made from). Blocks are appended; the index is replaced by rename after their data is on disk,
so a killed run leaves a store that is whole up to the last indexed block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from tokenswift.config import NEUTRAL, SamplingParams
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler, Ticket
from tokenswift.files import replacing
from tokenswift.spec.eagle import Features
from tokenswift.train.data import SHORTEST, blocks, questions
from tokenswift.train.options import DataOptions, Job
from tokenswift.types import InputError, OnProgress, RunError

LEAST = 256  # tokens of text that anything can be learnt from
PLAIN = "autoregressive"


class Recorder(Features):
    """Features of a text, all of them, in bfloat16."""

    def __init__(self) -> None:
        super().__init__(1 << 40)

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """See `Features.take`."""
        super().take(at, features.to("cpu", torch.bfloat16))


# ---- the store ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """A run of tokens of one document: where it starts in the store.

    Attributes:
        start: index of its first token in the store.
        length: tokens.
        number: of the text; those that the model writes together end in any order.
    """

    start: int
    length: int
    number: int = 0


class HiddenStore:
    """Blocks of tokens with hidden states of the base model.

    Args:
        folder: where the store lies; made when missing.
        width: W, of a token's states.
        made_from: JSON values that say what the states depend on; a store made from anything else
            is refused.
    """

    def __init__(self, folder: str | Path, width: int, made_from: dict[str, Any]) -> None:
        self.folder, self.width, self.made_from = Path(folder), width, made_from
        self.blocks: list[Block] = []
        self.complete = False
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "index.json"
        if path.exists():
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["made_from"] != made_from:
                raise other_training(self.folder)
            self.blocks = [Block(block[0], block[1], block[-1]) for block in index["blocks"]]
            self.complete = index["complete"]

    @property
    def tokens(self) -> int:
        """Tokens in all indexed blocks."""
        return sum(block.length for block in self.blocks)

    @property
    def tokens_stored(self) -> int:
        """Where the next block begins: a finished store has left some out."""
        return max((block.start + block.length for block in self.blocks), default=0)

    def append(self, tokens: Sequence[int], states: Float[Tensor, "n W"], number: int = 0) -> None:
        """Add a block.

        Raises:
            OSError: the disk takes no more; the blocks before are kept.
        """
        start = self.tokens_stored
        self._write("tokens.bin", start * 4, torch.tensor(tokens, dtype=torch.int32))
        bits = states.to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        self._write("hidden.bin", start * self.width * 2, bits)
        self.blocks.append(Block(start, len(tokens), number))
        self._write_index()

    def finish(self, tokens: int = 1 << 60) -> None:
        """Mark the store as complete: its texts in the order of their numbers, the first ones that hold so
        many tokens."""
        self.blocks.sort(key=lambda block: block.number)
        ends = np.cumsum([0, *(block.length for block in self.blocks)])
        self.blocks = [block for block, end in zip(self.blocks, ends, strict=False) if end < tokens]
        self.complete = True
        self._write_index()

    def _write(self, name: str, offset: int, values: Tensor) -> None:
        """Write values at an offset of a file; what lay beyond is cut off."""
        path = self.folder / name
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(offset)
            file.seek(offset)
            file.write(values.contiguous().numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def _write_index(self) -> None:
        index = {"made_from": self.made_from, "complete": self.complete}
        index["blocks"] = [astuple(block) for block in self.blocks]
        with replacing(self.folder / "index.json") as part:
            part.write_text(json.dumps(index), encoding="utf-8")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Memory maps: tokens (N,) int32 and hidden states (N, W) as the bits of bfloat16."""
        size = self.tokens_stored
        tokens = np.memmap(self.folder / "tokens.bin", np.int32, "r", shape=(size,))
        hidden = np.memmap(self.folder / "hidden.bin", np.int16, "r", shape=(size, self.width))
        return tokens, hidden


def other_training(folder: Path) -> InputError:
    """That a work folder is none of this training."""
    return InputError(
        f"work folder {folder} belongs to a training of other data or options; name another --work folder"
    )


def held_out(store: HiddenStore, share: float) -> tuple[list[Block], list[Block]]:
    """The store's blocks to learn from, and those that are held out: evenly spaced, none of a few."""
    every = round(1 / share) if share > 0 else 0
    if not every or len(store.blocks) < every:
        return store.blocks, []
    kept = store.blocks[every - 1 :: every]
    return [block for i, block in enumerate(store.blocks, 1) if i % every], kept


class Windows(Dataset[dict[str, Tensor]]):
    """Training items of fixed shape cut from blocks of a store: ``chunk`` positions each.

    An item holds ``tokens`` (chunk + extra + 1,), ``states`` (chunk + extra, W), and ``valid`` (chunk,).
    Tokens are padded by -1, states by zeros.

    Args:
        extra: further states of an item, for targets.
        chunk: positions per item.
    """

    def __init__(self, store: HiddenStore, blocks: Sequence[Block], extra: int, chunk: int) -> None:
        self.tokens, self.states = store.arrays()
        self.extra, self.chunk = extra, chunk
        self.items = [
            (block, start)
            for block in blocks
            for start in range(0, block.length - extra, chunk)  # positions with all their targets
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block, start = self.items[index]
        at, size = block.start + start, min(self.chunk + self.extra, block.length - start)
        taken = self.tokens[at : min(at + size + 1, block.start + block.length)]
        tokens = torch.full((self.chunk + self.extra + 1,), -1, dtype=torch.long)
        tokens[: len(taken)] = torch.from_numpy(taken.astype(np.int64))
        rows = torch.zeros(self.chunk + self.extra, self.states.shape[1], dtype=torch.bfloat16)
        rows[:size] = torch.from_numpy(np.array(self.states[at : at + size])).view(torch.bfloat16)
        return {"tokens": tokens, "states": rows, "valid": torch.arange(self.chunk) < size - self.extra}


def counts(stores: Sequence[HiddenStore], vocab_size: int) -> Int[Tensor, " V"]:
    """How often each token stands in the stores."""
    total = torch.zeros(vocab_size, dtype=torch.long)
    for store in stores:
        tokens, _ = store.arrays()
        for block in store.blocks:
            piece = torch.from_numpy(tokens[block.start : block.start + block.length].astype(np.int64))
            total += torch.bincount(piece, minlength=vocab_size)
    return total


def frequent(found: Int[Tensor, " V"], size: int) -> Int[Tensor, " S"]:
    """The ``size`` most frequent tokens, ascending; 0 takes the whole vocabulary. Ties: the smaller id."""
    return found.argsort(descending=True, stable=True)[: size or None].sort().values


def covering(found: Int[Tensor, " V"], share: float) -> Int[Tensor, " S"]:
    """The fewest tokens that make up ``share`` of the text, ascending; at least one."""
    mass = found.sort(descending=True).values.double().cumsum(0) / max(1, int(found.sum()))
    return frequent(found, int((mass < share - 1e-12).sum()) + 1)


# ---- filling a store ---------------------------------------------------------------------------------------


def collect(
    llm: Any, data: DataOptions, job: Job, layers: Sequence[int], store: HiddenStore, on_progress: OnProgress
) -> None:
    """Fill a store, or the rest of it, with the states that enter these layers, text by text: a killed run
    repeats those that were under way, with the same tokens.

    Raises:
        InputError: too little text.
        OSError: the disk takes no more.
    """
    llm.target.tap(tuple(layers))
    done = {block.number for block in store.blocks}
    if data.writes:
        todo = (one for one in enumerate(_requests(llm, data, job)) if one[0] not in done)
        return _write(llm, data, todo, store, on_progress)
    texts = blocks(data.data, llm.tokenizer, data.tokens, data.sequence_length)
    for number, text in enumerate(texts):
        if number not in done:
            found = Recorder()
            llm.target.prefill(text, llm.target.new_cache(len(text)), ends=False, features=found)
            store.append(text, _states(found)[1], number)
            on_progress("states", min(store.tokens_stored, data.tokens - 1), data.tokens)
    if store.tokens_stored < LEAST:
        raise InputError(
            f"--data {data.data} gives {store.tokens_stored} tokens to learn from, in pieces of {SHORTEST} "
            f"and more; at least {LEAST} are needed"
        )
    store.finish()


def _write(
    llm: Any,
    data: DataOptions,
    todo: Iterator[tuple[int, Request]],
    store: HiddenStore,
    on_progress: OnProgress,
) -> None:
    """Store the states of what the model writes, until the texts so far, in order, hold the tokens."""
    running: list[tuple[int, Request, Ticket, Recorder]] = []
    ended = 0
    with Scheduler(llm, data.write_batch) as scheduler:
        while ended < data.tokens:
            while len(running) < data.write_batch and (found := next(todo, None)):
                number, request = found
                recorder = Recorder()
                running.append((number, request, scheduler.submit(request, features=recorder), recorder))
            if not running:
                break
            running[0][2].wait(0.1)
            for one in [one for one in running if one[2].is_over]:
                running.remove(one)
                number, request, ticket, recorder = one
                at, states = _states(recorder)  # of all tokens but the last one
                tokens = [*request.prompt, *ticket.result.token_ids][at : at + len(states)]
                store.append(tokens, states, number)
            first = min((number for number, *_ in running), default=1 << 40)
            ended = sum(block.length for block in store.blocks if block.number < first)
            on_progress("write", min(store.tokens_stored, data.tokens - 1), data.tokens)
    store.finish(data.tokens)


def _requests(llm: Any, data: DataOptions, job: Job) -> Iterator[Request]:
    """Passages to continue; or what a model that answers is asked, or an empty beginning."""
    new, params, seed = data.sequence_length, job.sampling, job.training.seed
    prompts: Iterable[tuple[list[int], SamplingParams]]
    if data.continued:
        new -= data.prompt_length
        wanted = data.prompt_length * max(1, data.tokens // data.sequence_length)
        passages = blocks(data.data, llm.tokenizer, wanted, data.prompt_length)
        prompts = ((passage, params) for passage in passages)
    elif answers := llm.has_chat_template:
        asked = (([{"role": "user", "content": text}], warmth) for text, warmth in questions(seed))
        plain = SamplingParams(**NEUTRAL)
        prompts = ((llm.encode(chat), replace(plain, temperature=warmth)) for chat, warmth in asked)
    else:
        first = list(llm.tokenizer("")["input_ids"]) or [min(llm.resources.source.end_tokens(), default=0)]
        prompts = repeat((first, params))
    for number, (prompt, how) in enumerate(prompts):
        how = replace(how, seed=seed * 100_003 + number)
        yield Request(prompt, new, PLAIN, sampling=how, ignore_eos=data.continued or not answers)


def _states(recorder: Recorder) -> tuple[int, Float[Tensor, "n W"]]:
    """The position of the first token that has states, and each one's states side by side."""
    found = recorder.drain()
    if found is None:
        raise RunError("the model's passes gave no states")
    return found[0], found[1].transpose(0, 1).flatten(1)
