"""Hidden states on disk: computed once, read by memory map, so training's memory stays bounded.

A store is a folder with ``tokens.bin`` (int32), ``hidden.bin`` (bfloat16, D per token) and
``index.json`` (blocks, and what the states were made from). Blocks are appended; the index is
replaced by rename after their data is on disk, so a killed run leaves a store that is whole up to the
last indexed block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from tokenswift.files import replacing
from tokenswift.train.work import refuse_other


@dataclass(frozen=True, slots=True)
class Block:
    """A run of tokens of one document: where it starts in the store, and what may be learnt from.

    Attributes:
        start: index of its first token in the store.
        length: tokens.
        learn: first position (within the block) to learn from; those before are context only (the end of
            a long prompt, kept for the penalty).
    """

    start: int
    length: int
    learn: int = 0


class HiddenStore:
    """Blocks of tokens with the hidden states of the base model, before its final norm.

    Args:
        folder: where the store lies; made when missing.
        made_from: JSON values that say what the states depend on; a store made from anything else
            is refused.
    """

    def __init__(self, folder: str | Path, hidden_size: int, made_from: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.hidden_size = hidden_size
        self.made_from = json.loads(json.dumps(made_from))
        self.blocks: list[Block] = []
        self.complete = False
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "index.json"
        if path.exists():
            index = json.loads(path.read_text(encoding="utf-8"))
            refuse_other(self.folder, index["made_from"], self.made_from)
            self.blocks = [Block(*block) for block in index["blocks"]]
            self.complete = index["complete"]

    @property
    def tokens_stored(self) -> int:
        """Tokens in all indexed blocks."""
        return self.blocks[-1].start + self.blocks[-1].length if self.blocks else 0

    def append(self, tokens: Int[Tensor, "B n"], hidden: Float[Tensor, "B n D"], learn: int = 0) -> None:
        """Add equally long blocks, one per row; positions before ``learn`` are context only.

        Raises:
            OSError: the disk takes no more; the blocks before are kept.
        """
        start, (rows, length) = self.tokens_stored, tokens.shape
        self._write("tokens.bin", start * 4, tokens.to("cpu", torch.int32))
        bits = hidden.to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        self._write("hidden.bin", start * self.hidden_size * 2, bits)
        self.blocks += [Block(start + row * length, length, learn) for row in range(rows)]
        self._write_index()

    def finish(self) -> None:
        """Mark the store as complete."""
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
        index = {
            "made_from": self.made_from,
            "complete": self.complete,
            "blocks": [astuple(block) for block in self.blocks],
        }
        with replacing(self.folder / "index.json") as part:
            part.write_text(json.dumps(index), encoding="utf-8")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Memory maps: tokens (N,) int32 and hidden states (N, D) as the bits of bfloat16."""
        size = self.tokens_stored
        tokens = np.memmap(self.folder / "tokens.bin", np.int32, "r", shape=(size,))
        hidden = np.memmap(self.folder / "hidden.bin", np.int16, "r", shape=(size, self.hidden_size))
        return tokens, hidden


def held_out(store: HiddenStore, share: float) -> tuple[list[Block], list[Block]]:
    """The store's blocks to learn from, and those that are held out: evenly spaced, none of a few."""
    every = round(1 / share) if share > 0 else 0
    if not every or len(store.blocks) < every:
        return store.blocks, []
    kept = store.blocks[every - 1 :: every]
    return [block for i, block in enumerate(store.blocks, 1) if i % every], kept


class Windows(Dataset[dict[str, Tensor]]):
    """Training items of fixed shape cut from a store: ``chunk`` positions each.

    An item holds ``tokens`` (context + chunk + extra + 1,), ``hidden`` (chunk + extra, D) from the first
    position to learn from on, and ``valid`` (chunk,). Tokens are padded by -1, states by zeros.

    Args:
        store: the states.
        extra: further states of an item, for targets.
        chunk: positions per item.
        context: tokens before them (for the penalty).
        blocks: the blocks to use; None takes all.
    """

    def __init__(
        self, store: HiddenStore, extra: int, chunk: int, context: int, blocks: Sequence[Block] | None = None
    ) -> None:
        self.tokens, self.states = store.arrays()
        self.extra, self.chunk, self.context = extra, chunk, context
        self.items = [
            (block, start)
            for block in (store.blocks if blocks is None else blocks)
            for start in range(block.learn, block.length - extra, chunk)  # those with all their targets
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block, start = self.items[index]
        count = min(self.chunk, block.length - self.extra - start)
        known, at, size = min(start, self.context), block.start + start, count + self.extra
        taken = self.tokens[at - known : min(at + size + 1, block.start + block.length)]
        tokens = torch.full((self.context + self.chunk + self.extra + 1,), -1, dtype=torch.long)
        first = self.context - known
        tokens[first : first + len(taken)] = torch.from_numpy(taken.astype(np.int64))
        hidden = torch.zeros(self.chunk + self.extra, self.states.shape[1], dtype=torch.bfloat16)
        hidden[:size] = torch.from_numpy(np.array(self.states[at : at + size])).view(torch.bfloat16)
        return {"tokens": tokens, "hidden": hidden, "valid": torch.arange(self.chunk) < count}


class PairedWindows(Dataset[dict[str, Tensor]]):
    """Items of :class:`Windows`, with those rows of a second store of the same blocks as ``features``."""

    def __init__(self, states: Windows, features: Windows) -> None:
        self.states, self.features = states, features

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.states[index] | {"features": self.features[index]["hidden"]}


def counts(stores: Sequence[HiddenStore], vocab_size: int) -> Int[Tensor, " V"]:
    """How often each token stands in the stores."""
    total = torch.zeros(vocab_size, dtype=torch.long)
    for store in stores:
        tokens, _ = store.arrays()
        for start in range(0, len(tokens), 1 << 22):
            piece = torch.from_numpy(tokens[start : start + (1 << 22)].astype(np.int64))
            total += torch.bincount(piece, minlength=vocab_size)
    return total


def frequent(found: Int[Tensor, " V"], size: int) -> Int[Tensor, " S"]:
    """The ``size`` most frequent tokens, ascending; 0 takes the whole vocabulary. Ties: the smaller id."""
    return found.argsort(descending=True, stable=True)[: size or None].sort().values


def covering(found: Int[Tensor, " V"], share: float) -> Int[Tensor, " S"]:
    """The fewest tokens that make up ``share`` of the text, ascending; at least one."""
    mass = found.sort(descending=True).values.double().cumsum(0) / max(1, int(found.sum()))
    return frequent(found, int((mass < share - 1e-12).sum()) + 1)
