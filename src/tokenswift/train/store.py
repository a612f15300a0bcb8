"""Hidden states on disk: computed once, read by memory map, so training's memory stays bounded.

A store is a folder with ``tokens.bin`` (int32), ``hidden.bin`` (bfloat16, D per token) and
``index.json`` (blocks, and what the states were made from). Blocks are appended; the index is
replaced by rename after their data is on disk, so a killed run leaves a store that is whole up to the
last indexed block.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from tokenswift.files import replacing
from tokenswift.train.manifest import refuse_other
from tokenswift.types import InputError, RunError


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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"work folder {self.folder} cannot be made: {error.strerror}") from error
        self._read_index()

    @property
    def tokens_stored(self) -> int:
        """Tokens in all indexed blocks."""
        return self.blocks[-1].start + self.blocks[-1].length if self.blocks else 0

    def _read_index(self) -> None:
        path = self.folder / "index.json"
        if not path.exists():
            return
        index = json.loads(path.read_text())
        refuse_other(self.folder, index["made_from"], self.made_from)
        self.blocks = [Block(*b) for b in index["blocks"]]
        self.complete = index["complete"]

    def _write_index(self) -> None:
        blocks = [[b.start, b.length, b.learn] for b in self.blocks]
        index = {"made_from": self.made_from, "complete": self.complete, "blocks": blocks}
        with replacing(self.folder / "index.json") as part:
            part.write_text(json.dumps(index))

    def append(self, tokens: Int[Tensor, "B n"], hidden: Float[Tensor, "B n D"], learn: int = 0) -> None:
        """Add equally long blocks, one per row; positions before ``learn`` are context only."""
        start, (rows, length) = self.tokens_stored, tokens.shape
        try:
            with _at(self.folder / "tokens.bin", start * 4) as file:
                file.write(tokens.to("cpu", torch.int32).contiguous().numpy().tobytes())
            with _at(self.folder / "hidden.bin", start * self.hidden_size * 2) as file:
                for row in hidden:
                    bits = row.to("cpu", torch.bfloat16).contiguous().view(torch.int16)
                    file.write(bits.numpy().tobytes())
            self.blocks += [Block(start + r * length, length, learn) for r in range(rows)]
            self._write_index()
        except OSError as error:
            raise RunError(
                f"cannot write to {self.folder}: {error.strerror}; {len(self.blocks)} blocks are kept"
            ) from error

    def finish(self) -> None:
        """Mark the store as complete."""
        self.complete = True
        self._write_index()

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Memory maps: tokens (N,) int32 and hidden states (N, D) as the bits of bfloat16."""
        size = self.tokens_stored
        tokens = np.memmap(self.folder / "tokens.bin", np.int32, "r", shape=(size,))
        hidden = np.memmap(self.folder / "hidden.bin", np.int16, "r", shape=(size, self.hidden_size))
        return tokens, hidden


def _at(path: Path, offset: int) -> Any:
    """The file, open for writing at an offset, what lay beyond cut off."""
    file = open(path, "r+b" if path.exists() else "w+b")
    file.truncate(offset)
    file.seek(offset)
    return file


def held_out(store: HiddenStore, share: float) -> tuple[list[Block], list[Block]]:
    """The store's blocks to learn from, and those that are held out: evenly spaced, none of a few."""
    every = round(1 / share) if share > 0 else 0
    if not every or len(store.blocks) < every:
        return store.blocks, []
    kept = [i % every == every - 1 for i in range(len(store.blocks))]
    return (
        [b for b, out in zip(store.blocks, kept, strict=True) if not out],
        [b for b, out in zip(store.blocks, kept, strict=True) if out],
    )


class Windows(Dataset[dict[str, Tensor]]):
    """Training items of fixed shape cut from a store: ``chunk`` positions each.

    Args:
        store: the states.
        count: heads; an item holds ``count`` further states as targets.
        chunk: positions per item.
        context: tokens before them (for the penalty).
        blocks: the blocks to use; None takes all.
    """

    def __init__(
        self, store: HiddenStore, count: int, chunk: int, context: int, blocks: list[Block] | None = None
    ) -> None:
        self.tokens, self.states = store.arrays()
        self.count, self.chunk, self.context = count, chunk, context
        self.items: list[tuple[Block, int]] = []
        for block in store.blocks if blocks is None else blocks:
            last = block.length - count  # positions from here on have no full set of targets
            self.items += [(block, s) for s in range(block.learn, last, chunk)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block, start = self.items[index]
        end = min(start + self.chunk, block.length - self.count)
        tail = block.start + end + self.count
        first = block.start + max(0, start - self.context)
        length, n = self.context + self.chunk + self.count, self.chunk + self.count
        tokens = torch.full((length,), -1, dtype=torch.long)
        tokens[length - (tail - first) :] = torch.from_numpy(self.tokens[first:tail].astype(np.int64))
        hidden = torch.zeros(n, self.states.shape[1], dtype=torch.bfloat16)
        rows = torch.from_numpy(np.array(self.states[block.start + start : tail]))
        hidden[n - len(rows) :] = rows.view(torch.bfloat16)
        valid: Bool[Tensor, " chunk"] = torch.arange(self.chunk) >= n - len(rows)
        return {"tokens": tokens, "hidden": hidden, "valid": valid}
