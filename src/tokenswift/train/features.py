"""Features of stored text: what enters chosen layers of the base model, beside the states of a store.

The tokens of a store are run once more; a killed run repeats at most one batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.loader.identity import digest_of
from tokenswift.train.selftext import Backbone
from tokenswift.train.store import HiddenStore
from tokenswift.types import InputError, OnProgress

AT_ONCE = 8192  # tokens that are run together


@contextmanager
def _taps(backbone: Backbone, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Inside the block, what last entered each layer of the backbone, by the layer's number."""
    found: dict[int, Tensor] = {}

    def tap(number: int) -> Any:
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[number] = args[0] if args else kwargs["hidden_states"]

        return backbone.body.layers[number].register_forward_pre_hook(keep, with_kwargs=True)

    handles = [tap(number) for number in layers if number < len(backbone.body.layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def features_of(
    backbone: Backbone, layers: Sequence[int], tokens: Int[Tensor, "B n"]
) -> Float[Tensor, "B n F"]:
    """What enters the layers, side by side; behind the last one for the number of layers."""
    with _taps(backbone, layers) as found:
        last = backbone.hidden(tokens)
        return torch.cat([found.get(number, last) for number in layers], dim=-1)


def check_room(stores: Sequence[HiddenStore], width: int, folder: Path) -> int:
    """Bytes that the features of some stores take on the disk.

    Raises:
        InputError: the disk has not so many.
    """
    needed = sum(store.tokens_stored for store in stores) * width * 2
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise InputError(
            f"work folder {folder} needs {needed / 1e9:.1f} GB for features, the disk has {free / 1e9:.1f}; "
            "valid: a --work folder with room, or fewer --tokens"
        )
    return needed


def gathered(
    model: Any, store: HiddenStore, layers: Sequence[int], folder: Path, on_progress: OnProgress
) -> HiddenStore:
    """A store of the features of another store's tokens, block by block the same.

    Raises:
        OSError: the disk takes no more; what is there is gone on with.
    """
    made_from = {"states": digest_of(store.made_from), "layers": list(layers)}
    made = HiddenStore(folder, len(layers) * store.hidden_size, made_from)
    if made.complete:
        return made
    backbone, (tokens, _) = Backbone(model), store.arrays()
    while (done := len(made.blocks)) < len(store.blocks):
        first, size = store.blocks[done], 0
        for block in store.blocks[done : done + max(1, AT_ONCE // first.length)]:
            if (block.length, block.learn) != (first.length, first.learn):
                break
            size += block.length
        text = torch.from_numpy(tokens[first.start : first.start + size].astype(np.int64))
        rows = text.view(-1, first.length).to(model.device)
        made.append(rows, features_of(backbone, layers, rows), first.learn)
        on_progress("features", min(made.tokens_stored, store.tokens_stored - 1), store.tokens_stored)
    made.finish()
    return made
