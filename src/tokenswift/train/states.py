"""Hidden states of text, computed once, kept on disk and read by memory map: of given text, or of text that
the model writes, whose states the writing computes anyway.

A store is a folder with ``tokens.bin`` (int32), ``hidden.bin`` (bfloat16, D per token) and ``index.json``
(blocks, and what the states were made from). Blocks are appended; the index is replaced by rename after their
data is on disk, so a killed run leaves a store that is whole up to the last indexed block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AttentionInterface

from tokenswift.checks import check_tokens
from tokenswift.config import SamplingParams
from tokenswift.files import replacing
from tokenswift.loader.identity import digest_of
from tokenswift.loader.rope import Rotary
from tokenswift.models.generic import final_norm, final_norm_name, shaped_logits, shared_copy
from tokenswift.sampling.choice import recent_scores
from tokenswift.train.data import SHORTEST, blocks, passages, prefix_of
from tokenswift.train.options import DataOptions, Job
from tokenswift.types import InputError, OnProgress

ATTENTION = "tokenswift_batched"
LEAST = 256  # tokens of text that anything can be learnt from
AT_ONCE = 2048  # tokens that are run together for the features of their layers


# ---- the model's forward -----------------------------------------------------------------------------------


class BatchCache:
    """Preallocated keys and values of a batch of equally long texts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append (B, K, n, d) to a layer and return all its entries."""
        if layer_idx not in self.layers:
            shape = (*key_states.shape[:2], self.capacity, key_states.shape[3])
            self.layers[layer_idx] = (key_states.new_empty(shape), value_states.new_empty(shape))
        keys, values = self.layers[layer_idx]
        end = self.length + key_states.shape[2]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries written before the pass under way."""
        return self.length


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention over whole texts, or of their newest tokens; (B, H, n, d) → (B, n, H, d).

    Query heads of one new token are packed per KV head, so that the cache is read once.
    """
    if softcap is not None or s_aux is not None:
        raise InputError("the model's attention has capped scores or sinks; training knows neither")
    batch, heads, n, width = query.shape
    length = key.shape[2]
    window = min(sliding_window or length, length)
    if n == 1:
        key, value = key[:, :, length - window :], value[:, :, length - window :]
        packed = query.view(batch, key.shape[1], heads // key.shape[1], width)
        out = F.scaled_dot_product_attention(packed, key, value, scale=scaling)
        return out.reshape(batch, 1, heads, width), None
    mask = None
    if window < length or n < length:
        at = torch.arange(length - n, length, device=query.device)[:, None]
        behind = at - torch.arange(length, device=query.device)
        mask = (behind >= 0) & (behind < window)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class Backbone:
    """A transformers causal LM run for its hidden states *before* the final norm.

    It works on a copy that shares the model's tensors; the model itself is not touched.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        copied = shared_copy(model, Rotary(None, 1.0, None, model.config))
        copied.config._attn_implementation = ATTENTION
        self.body, self.norm = copied.base_model, final_norm(model)
        setattr(self.body, final_norm_name(model), torch.nn.Identity())

    @torch.no_grad()
    def hidden(self, tokens: Int[Tensor, "B n"], cache: BatchCache | None = None) -> Float[Tensor, "B n D"]:
        """States of the tokens; they are appended to ``cache``, whose texts they continue."""
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        given = {"past_key_values": cache, "use_cache": cache is not None}
        made = self.body(input_ids=tokens, position_ids=positions, **given)
        if cache is not None:
            cache.length += tokens.shape[1]
        return made.last_hidden_state

    @torch.no_grad()
    def features(self, layers: Sequence[int], tokens: Int[Tensor, "B n"]) -> Float[Tensor, "B n F"]:
        """What enters the layers, side by side; behind the last one for the number of layers."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        given = {"use_cache": False, "output_hidden_states": True}
        states = self.body(input_ids=tokens, position_ids=positions, **given).hidden_states
        return torch.cat([states[number] for number in layers], dim=-1)

    @torch.no_grad()
    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Final norm and LM head, in float32."""
        return shaped_logits(self.model.lm_head(self.norm(hidden)), self.model.config).float()


def chances(
    logits: Float[Tensor, "B V"], recent: Int[Tensor, "B L"], sampling: SamplingParams
) -> Float[Tensor, "B V"]:
    """The probabilities that continuations are drawn from; one-hot where ``sampling`` is greedy.

    Args:
        recent: the end of each text; its last W tokens are penalised.
    """
    scores = recent_scores(logits, recent, sampling)
    if sampling.greedy:
        return F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    return scores.softmax(-1)


@torch.no_grad()
def continuations(
    backbone: Backbone, prompts: Int[Tensor, "B P"], new_tokens: int, sampling: SamplingParams, seed: int
) -> Iterator[tuple[Int[Tensor, " B"], Float[Tensor, "B n D"]]]:
    """Sample ``new_tokens`` for every prompt: yields each new token with the states before it.

    The first states are those of the whole prompt (n = P), the later ones of one token (n = 1).
    """
    generator = torch.Generator(prompts.device).manual_seed(seed)
    cache = BatchCache(prompts.shape[1] + new_tokens)
    text, fresh = prompts, prompts
    for _ in range(new_tokens):
        hidden = backbone.hidden(fresh, cache)
        shares = chances(backbone.logits(hidden[:, -1]), text[:, -sampling.penalty_window :], sampling)
        fresh = shares.multinomial(1, generator=generator)
        yield fresh[:, 0], hidden
        text = torch.cat((text, fresh), dim=1)


# ---- the store ---------------------------------------------------------------------------------------------


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
        self.folder, self.hidden_size, self.made_from = Path(folder), hidden_size, made_from
        self.blocks: list[Block] = []
        self.complete = False
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "index.json"
        if path.exists():
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["made_from"] != made_from:
                raise other_training(self.folder)
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
        index = {"made_from": self.made_from, "complete": self.complete}
        index["blocks"] = [astuple(block) for block in self.blocks]
        with replacing(self.folder / "index.json") as part:
            part.write_text(json.dumps(index), encoding="utf-8")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Memory maps: tokens (N,) int32 and hidden states (N, D) as the bits of bfloat16."""
        size = self.tokens_stored
        tokens = np.memmap(self.folder / "tokens.bin", np.int32, "r", shape=(size,))
        hidden = np.memmap(self.folder / "hidden.bin", np.int16, "r", shape=(size, self.hidden_size))
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
    """Training items of fixed shape cut from a store: ``chunk`` positions each.

    An item holds ``tokens`` (context + chunk + extra + 1,), ``hidden`` (chunk + extra, D) from the first
    position to learn from on, ``valid`` (chunk,), and ``features`` (chunk + extra, F) where there are some.
    Tokens are padded by -1, states by zeros.

    Args:
        store: the states.
        extra: further states of an item, for targets.
        chunk: positions per item.
        context: tokens before them (for the penalty).
        blocks: the blocks to use; None takes all.
        features: a second store of the same blocks.
    """

    def __init__(
        self,
        store: HiddenStore,
        extra: int,
        chunk: int,
        context: int,
        blocks: Sequence[Block] | None = None,
        features: HiddenStore | None = None,
    ) -> None:
        self.tokens, states = store.arrays()
        self.states = {"hidden": states}
        if features is not None:
            self.states["features"] = features.arrays()[1]
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
        item = {"tokens": tokens, "valid": torch.arange(self.chunk) < count}
        for name, states in self.states.items():
            rows = torch.zeros(self.chunk + self.extra, states.shape[1], dtype=torch.bfloat16)
            rows[:size] = torch.from_numpy(np.array(states[at : at + size])).view(torch.bfloat16)
            item[name] = rows
        return item


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


# ---- filling a store ---------------------------------------------------------------------------------------


def collect(
    model: Any, tokenizer: Any, data: DataOptions, job: Job, store: HiddenStore, on_progress: OnProgress
) -> None:
    """Fill a store, or the rest of it. A batch is stored whole, so a killed run repeats at most one batch,
    with the same text.

    The ends of prompts are learnt from, too, as many tokens as the shortest prompt has: their states come
    with the prefill. Of a longer one the tokens that the penalty still sees are kept beside.

    Raises:
        InputError: too little text, or a tokenizer of another model.
        OSError: the disk takes no more.
    """
    backbone, new = Backbone(model), data.new_tokens if data.writes else 0
    texts = _texts(model, tokenizer, data, job.training.seed)
    first = list(texts if data.writes else islice(texts, LEAST))
    if (found := sum(map(len, first))) < LEAST and not data.writes:
        raise InputError(
            f"--data {data.data} gives {found} tokens to learn from, in pieces of {SHORTEST} and more; "
            f"at least {LEAST} are needed"
        )
    shortest = len(first[0]) if data.writes else 0
    vocab_size, done = model.get_input_embeddings().weight.shape[0], 0
    total = len(first) * (shortest + new) if data.writes else data.tokens

    def tell(done: int) -> None:
        on_progress("write" if data.writes else "states", min(done, total - 1), total)

    at_once = data.write_batch * data.sequence_length // (1 if data.writes else 4)  # tokens
    for group in _groups(chain(first, texts), lambda length: max(1, at_once // (length + new))):
        done += len(group)
        if done <= len(store.blocks):
            continue
        for text in group:
            check_tokens(text, vocab_size)
        prompts = torch.tensor(group, device=model.device)
        if data.writes:
            seed = job.training.seed * 100_003 + done - len(group)
            _write(store, backbone, prompts, shortest, new, job.sampling, seed, tell)
        else:
            store.append(prompts, backbone.hidden(prompts))
            tell(store.tokens_stored)
    store.finish()


def _texts(model: Any, tokenizer: Any, data: DataOptions, seed: int) -> Iterator[list[int]]:
    """The texts to read, or those to continue, shorter ones first."""
    prefix = prefix_of(tokenizer)
    if not data.writes:
        yield from blocks(data.data, tokenizer, data.tokens, data.sequence_length, prefix)
        return
    count = max(1, data.tokens // data.new_tokens)
    if data.continued:
        lengths = [data.prompt_lengths[i * len(data.prompt_lengths) // count] for i in range(count)]
        yield from passages(data.data, tokenizer, lengths, prefix, seed)
    else:
        known = (tokenizer.bos_token_id, model.config.bos_token_id, model.config.eos_token_id)
        yield from [prefix or [next((token for token in known if isinstance(token, int)), 0)]] * count


def _groups(texts: Iterable[list[int]], most: Callable[[int], int]) -> Iterator[list[list[int]]]:
    """Consecutive texts of one length, at most ``most(length)`` together."""
    group: list[list[int]] = []
    for text in texts:
        if group and (len(group) == most(len(group[0])) or len(text) != len(group[0])):
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def _write(
    store: HiddenStore,
    backbone: Backbone,
    prompts: Tensor,
    shortest: int,
    new: int,
    sampling: SamplingParams,
    seed: int,
    tell: Callable[[int], None],
) -> None:
    """Let the model continue a batch of prompts, and store what it wrote and saw."""
    count, length = prompts.shape
    cut = max(0, length - shortest - sampling.window)  # tokens that nothing needs
    tokens, states, before = [prompts[:, cut:]], [], store.tokens_stored
    for token, hidden in continuations(backbone, prompts, new, sampling, seed):
        states.append(hidden if states else hidden[:, cut:])
        tokens.append(token[:, None])
        tell(before + count * (shortest + len(states) - 1))
    # The last token's own state is never computed, and no position needs it.
    store.append(torch.cat(tokens, dim=1)[:, :-1], torch.cat(states, dim=1), length - shortest - cut)


def gather_features(
    model: Any, store: HiddenStore, layers: Sequence[int], folder: Path, on_progress: OnProgress
) -> HiddenStore:
    """A store of what enters some layers, of another store's tokens, block by block the same. They are run
    once more; a killed run repeats at most one batch.

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
        made.append(rows, backbone.features(layers, rows), first.learn)
        on_progress("features", min(made.tokens_stored, store.tokens_stored - 1), store.tokens_stored)
    made.finish()
    return made
