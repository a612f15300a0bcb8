"""Hidden states of texts, kept on disk and read as they are needed.

A store is a folder with a safetensors file for each text: ``tokens`` (n,), int32, and ``states``
(n, W), bfloat16: the states that enter some layers, side by side, the last of them those before the
final norm. A file is complete or is not there, so a killed run leaves a store that is complete up
to its last text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from tokenswift.files import replacing
from tokenswift.loader.safetensors_file import SafetensorsFile
from tokenswift.train.work import claim
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
MADE_FROM = "made_from"  # file of a store: what its states depend on
COMPLETE = "complete"  # file of a store in which nothing is missing
DIGITS = 7  # of a text's number, in the name of its file
WITHOUT_END = 1 << 60  # more tokens than any text has


def tokens_of(path: Path) -> Int[Tensor, " n"] | None:
    """The tokens of a text's file; None where the file is damaged."""
    try:
        file = SafetensorsFile(path, "file of hidden states")
        tokens = file.read("tokens")
        rows = file.entries["states"].shape[:1]
    except (InputError, KeyError):
        return None
    if tokens.dtype != torch.int32 or tokens.shape != rows:
        return None
    return tokens


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
        self.folder = Path(folder)
        self.made_from = made_from
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
        ids = torch.tensor(tokens, dtype=torch.int32)
        tensors = {"tokens": ids, "states": states.to("cpu", torch.bfloat16).contiguous()}
        with replacing(self.path(number)) as part:
            part.write_bytes(save(tensors))  # a full disk is an OSError
        self.texts[number] = ids

    def finish(self, tokens: int = WITHOUT_END) -> None:
        """Mark the store as complete: its texts in the order of their numbers, the first ones that
        hold so many tokens; the others go."""
        texts = sorted(self.texts.items())
        self.texts = {}
        for number, text in texts:
            if self.tokens < tokens:
                self.texts[number] = text
            else:
                self.path(number).unlink()
        (self.folder / COMPLETE).touch()

    def states(self, number: int, start: int = 0, most: int = WITHOUT_END) -> Float[Tensor, "n W"]:
        """Hidden states of a text, bfloat16, of at most ``most`` tokens from ``start`` on."""
        end = min(start + most, len(self.texts[number]))
        file = SafetensorsFile(self.path(number), "file of hidden states")
        return file.rows("states", start, end)


def held_out(store: HiddenStore, share: float) -> tuple[list[int], list[int]]:
    """The store's texts to learn from, and those that are held out: evenly spaced, none of a
    few."""
    every = round(1 / share) if share > 0 else WITHOUT_END
    numbers = list(store.texts)
    return [n for i, n in enumerate(numbers, 1) if i % every], numbers[every - 1 :: every]


class Windows(Dataset[dict[str, Tensor]]):
    """Training items of fixed shape cut from texts of a store: ``chunk`` positions each.

    An item holds ``tokens`` (chunk + extra + 1,), ``states`` (chunk + extra, W), and ``valid``
    (chunk,). Tokens are padded by -1, states by zeros.

    Args:
        store: where the texts lie.
        numbers: the numbers of the texts.
        extra: further states of an item, for targets.
        chunk: positions per item.
    """

    def __init__(self, store: HiddenStore, numbers: Iterable[int], extra: int, chunk: int) -> None:
        self.store = store
        self.extra = extra
        self.chunk = chunk
        self.items: list[tuple[int, int]] = []  # a text's number, and the first position in it
        for number in numbers:
            count = len(store.texts[number]) - extra  # positions with all their targets
            self.items += [(number, start) for start in range(0, count, chunk)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, start = self.items[index]
        size = self.chunk + self.extra
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


def frequent(occurrences: Int[Tensor, " V"], size: int) -> Int[Tensor, " S"]:
    """The ``size`` most frequent tokens, ascending; 0 takes the whole vocabulary. Ties: the smaller
    id."""
    return occurrences.argsort(descending=True, stable=True)[: size or None].sort().values


def covering(occurrences: Int[Tensor, " V"], share: float) -> Int[Tensor, " S"]:
    """The fewest tokens that make up ``share`` of the text, ascending; at least one."""
    total = max(1, int(occurrences.sum()))
    mass = occurrences.sort(descending=True).values.double().cumsum(0) / total
    return frequent(occurrences, int((mass < share - 1e-12).sum()) + 1)
