"""An EAGLE-3 drafter on its target's kernels, with packed weights, and the features that it reads.

Its layer is one of a decoder's but for its input: queries, keys and values are made of the normed embedding
and the normed feature side by side, which is a sum of two products.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.checks import shown
from tokenswift.interfaces import KVCache, Segment
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.torch import row_paths
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv.full import Arena, FullCache
from tokenswift.loader.rope import AngleTable
from tokenswift.loader.weights import unstored
from tokenswift.models.base import BaseTarget
from tokenswift.models.target import Target
from tokenswift.sampling.ranking import Subset
from tokenswift.spec.eagle.files import SHIPPED, EagleWeights, load_eagle, place_of
from tokenswift.types import InputError

CHUNK = 512  # rows of a pass that reads features
SCRATCH = 32  # drafted rows in a cache
NARROW = ("embed_proj", "out_proj")
JUDGED = 200  # drafted tokens, all of them wrong, after which a drafter is probably another model's

logger = logging.getLogger("tokenswift")


def _halves(weight: Tensor | Stored, width: int) -> tuple[Tensor | Stored, Tensor | Stored]:
    """The columns of embeddings and those of features, (N, width) each, of a weight (N, 2 width)."""
    if not isinstance(weight, Stored):
        return weight[:, :width], weight[:, width:]
    if width % weight.format.block:
        return _halves(weight.decode(), width)
    size = weight.format.row_bytes(width)
    one, other = weight.blocks[:, :size], weight.blocks[:, size:]
    return Stored(weight.format, one.contiguous()), Stored(weight.format, other.contiguous())


def _nbytes(weights: Any) -> int:
    """Bytes of packed weights or a tensor; 0 of anything else."""
    return weights.nbytes if isinstance(weights, Packed | Tensor) else 0


class Features:
    """A `interfaces.FeatureStore` of committed tokens that a drafter has not read yet.

    Args:
        most: tokens that are worth keeping, the newest; up to a pass more are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._parts: list[Tensor] = []
        self._at = self._end = 0  # positions of the first one, and behind the last one

    def __len__(self) -> int:
        return self._end - self._at

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """See `interfaces.FeatureStore.take`; what lies before a gap is dropped."""
        if at != self._end:
            self._parts, self._at = [], at
        self._parts.append(features)
        self._end = at + features.shape[1]
        while len(self) - (first := self._parts[0].shape[1]) >= self.most:
            del self._parts[0]
            self._at += first

    def drain(self) -> tuple[int, Float[Tensor, "k n D"]] | None:
        """The position of the first of them, and all of them, which are gone then; None without any."""
        if not self._parts:
            return None
        found = self._at, self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts, dim=1)
        self._parts, self._at = [], self._end
        return found

    def copy(self) -> Features:
        """Another store of the same."""
        made = Features(self.most)
        made._parts, made._at, made._end = list(self._parts), self._at, self._end
        return made


class EagleModel:
    """A drafter, packed for a target. Threads may share it.

    Args:
        weights: of the drafter; it fits the target.
        target: whose features, and where the drafter has none of its own embedding and LM head, it reads.

    Attributes:
        name: of the checkpoint.
        window: newest keys that a token sees, itself included.
        subset: tokens that the columns of logits stand for; None: token ids.
        weight_bytes: bytes of weights that a pass over features reads.
        held_bytes: bytes of weights that it holds beside the target's.
    """

    def __init__(self, weights: EagleWeights, target: BaseTarget) -> None:
        self.name, self.config, self.target = weights.name, weights.config, target
        config, self._given = weights.config, weights.tensors
        self.window = config.default_window
        self.backend: Any = getattr(target.backend, "head", target.backend)
        self._dtype = torch.float32 if target.whole else target.dtype
        self._arena = Arena()
        self._angles = AngleTable(config.rotary().to(target.device))
        halves = [_halves(self._given[name], config.hidden) for name in "qkv"]
        layer = LayerWeights(
            qkv=self._packed(*(features for _, features in halves)),
            out=self._packed(self._given["o"]),
            gate_up=self._packed(self._given["gate"], self._given["up"]),
            down=self._packed(self._given["down"]),
            norm=None if config.norm_before_residual else self._vector("hidden_norm"),
            mlp_norm=self._needed("post_norm"),
            qkv_bias=self._biases(*(f"{name}_bias" for name in "qkv")),
            out_bias=self._biases("o_bias"),
            gate_up_bias=self._biases("gate_bias", "up_bias"),
            down_bias=self._biases("down_bias"),
            query_norm=self._vector("q_norm"),
            key_norm=self._vector("k_norm"),
            window=self.window,
            beside=self._packed(*(embeds for embeds, _ in halves)),
            beside_norm=self._vector("input_norm"),
        )
        self._hidden_norm = self._needed("hidden_norm")
        self._final = self._needed("norm")
        self._before = [self._vector("features_norm")] if config.norm_before_fc else []
        self._each = [self._needed(f"fc_norm.{place}") for place in range(3)] if config.fc_norm else []
        self._fc = self._packed(self._given["fc"])
        embed = self._given.get("embed")
        self._embedding = None if embed is None else self._kept(embed)
        own, d2t = self._given.get("lm_head"), weights.d2t
        self.subset = None if d2t is None else Subset(d2t.to(target.device), target.vocab_size)
        self._head = None if own is None else self._packed(own)
        self._rows = None if own is not None or d2t is None else target.head_rows(d2t.to(target.device))
        self._narrow = [self._packed(self._given[name]) for name in NARROW if config.narrow]
        own_head = [] if self._head is None else [self._head]
        packed = [*layer.packed(), self._fc, *own_head, *self._narrow]
        stored = all(weight.stored for weight in layer.packed())
        dtype = torch.float32 if stored else self._dtype
        self.shape = Shape(
            layers=1,
            hidden=config.hidden,
            inner=config.intermediate,
            heads=config.heads,
            kv_heads=config.kv_heads,
            width=config.head_dim,
            weights=dtype,
            keys=self._dtype,
            active=torch.int8 if stored else active_type(dtype),
            eps=config.eps,
            scale=config.head_dim**-0.5,
        )
        self._body = self.backend.body(self.shape, [layer])
        self.weight_bytes = sum(weight.nbytes for weight in packed)
        self.held_bytes = self.weight_bytes + _nbytes(self._embedding) + _nbytes(self._rows)
        self._wrong, self._said = 0, False
        del self._given, self._arena

    def _packed(self, *parts: Tensor | Stored) -> Packed:
        """Weights one below the other: quantized ones as they are stored, where all of them are."""
        if all(isinstance(part, Stored) for part in parts) and self.backend.formats:
            return self.backend.pack(parts, self._dtype, self._arena)
        dense = torch.cat([unstored(part, self._dtype) for part in parts]).to(self.target.device)
        return self.backend.pack_for_drafts(dense, self.target.whole)

    def _kept(self, embedding: Tensor | Stored) -> Tensor | Packed:
        """An embedding, whose rows are taken one by one."""
        if isinstance(embedding, Stored) and self.backend.formats:
            return self.backend.pack(embedding, self._dtype)
        return unstored(embedding, self._dtype).to(self.target.device)

    def _vector(self, name: str) -> Tensor | None:
        return self._needed(name) if name in self._given else None

    def _needed(self, name: str) -> Tensor:
        found = unstored(self._given[name], torch.float32)
        return found.to(self.target.device).contiguous()

    def _biases(self, *names: str) -> Tensor | None:
        found = [self._vector(name) for name in names]
        there = [bias for bias in found if bias is not None]
        return torch.cat(there) if there else None

    # ---- what a text has ------------------------------------------------------------------------

    def new_cache(self) -> FullCache:
        """Room for the keys and values of a window, of a pass's rows behind them, and of drafted rows."""
        config = self.config
        capacity = self.window + CHUNK + SCRATCH
        return self.backend.new_cache(1, config.kv_heads, config.head_dim, capacity, self._dtype)

    def features(self) -> Features:
        """What keeps a text's features until they are read."""
        return Features(self.window)

    @property
    def nbytes(self) -> int:
        """Bytes that a text holds: the cache and, before they are read, features of a window."""
        config = self.config
        entry = self.backend.new_cache(1, config.kv_heads, config.head_dim, 16, self._dtype).nbytes // 16
        return (self.window + CHUNK + SCRATCH) * entry + self.window * 3 * config.target_hidden * 4

    # ---- passes ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def fuse(self, features: Float[Tensor, "3 n Ht"]) -> Float[Tensor, "n H"]:
        """What the layer reads of the target's features."""
        backend, eps = self.backend, self.config.eps
        parts = list(features)
        if self._each:
            pairs = zip(parts, self._each, strict=True)
            parts = [backend.norm(part.contiguous(), norm, eps, torch.float32) for part, norm in pairs]
        rows = torch.cat(parts, dim=1)
        for norm in self._before:
            rows = backend.norm(rows, norm, eps, torch.float32)
        return backend.draft_product(rows.to(self._dtype), self._fc)

    @torch.inference_mode()
    def run(
        self,
        tokens: list[int] | Int[Tensor, " n"],
        states: Float[Tensor, "n H"],
        at: int,
        cache: FullCache,
        parents: Sequence[int] | None = None,
    ) -> Float[Tensor, "n H"]:
        """A pass over rows at the positions ``at`` and on, each of a state and the token *behind* its
        position: the states behind the layer. Its keys and values go to the cache's scratch.

        Args:
            tokens: on the host, or where the target is if they arose there.
            parents: of a tree, the row that each row follows (-1: none of them, so that it stands at ``at``).
        """
        ids, count = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens), len(tokens)
        positions = torch.arange(at, at + count)
        if parents is not None:
            positions = torch.tensor([at - 1 + len(path) for path in row_paths(count, parents)])
        segment = Segment(ids, positions, cast(KVCache, cache), parents)
        batch = self.backend.batch([segment], self.shape)
        beside = self._embed(batch.tokens)
        if self.config.norm_before_residual:
            states = self.backend.norm(states, self._hidden_norm, self.config.eps, torch.float32)
        made = torch.zeros_like(beside)  # also rows that fill up the batch
        made[:count] = states
        angles = self._angles.at(batch.positions)
        self.backend.layers(self._body, made, *angles, batch, keep=False, beside=beside)
        return made[:count]

    def _embed(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n H"]:
        if self._embedding is None:
            embeds = self.target.embed(tokens).float().contiguous()
            if not self._narrow:
                return embeds
            return self.backend.draft_product(embeds.to(self._dtype), self._narrow[0])
        if isinstance(self._embedding, Packed):
            return self.backend.take(self._embedding, tokens).float()
        return self._embedding[tokens].float()

    @torch.inference_mode()
    def fed_back(self, made: Float[Tensor, "n H"]) -> Float[Tensor, "n H"]:
        """The states that the next rows read, of what :meth:`run` made."""
        if not self.config.norm_output:
            return made
        return self.backend.norm(made, self._final, self.config.eps, torch.float32)

    @torch.inference_mode()
    def logits(self, made: Float[Tensor, "n H"]) -> Float[Tensor, "n S"]:
        """Of the tokens behind those that rows were run with, from what :meth:`run` made; a column for each
        token of :attr:`subset`."""
        normed = self.backend.norm(made, self._final, self.config.eps, self._dtype)
        if self._narrow:
            normed = self.backend.draft_product(normed, self._narrow[1]).to(self._dtype)
        if self._head is None:
            return self.target.project(normed, self._rows)
        return self.backend.draft_product(normed, self._head)

    # ---- whether it is this target's ------------------------------------------------------------

    def judge(self, drafted: int, right: bool) -> None:
        """Take in what came of tokens that it drafted for one place; where the first :data:`JUDGED` were all
        wrong that is said, once."""
        if self._said:
            return
        self._wrong += drafted
        if right:
            self._said = True  # it is this target's
        elif self._wrong >= JUDGED:
            self._said = True
            logger.warning(
                "the EAGLE-3 drafter %s: the first %d tokens that it drafted were all wrong; it is probably "
                "another model's, or of another version of this one (the text stays the same, but no time is "
                "saved)",
                self.name,
                self._wrong,
            )


def eagle_of(wanted: str | Path | EagleWeights, target: Target, codec: Any) -> EagleModel:
    """A drafter for a target, whose passes give features from now on.

    Args:
        wanted: folder, GGUF file or hub id of a checkpoint, "shipped", or the weights themselves.
        codec: the target's tokenizer, or None.
    Raises:
        InputError: there is none of that name, or it is none of this target.
    """
    if isinstance(wanted, EagleWeights):
        found = wanted
    elif isinstance(wanted, str | Path):
        try:
            found = load_eagle(place_of(str(wanted)), target.config, _tokens(codec))
        except InputError as error:
            if wanted != SHIPPED:
                raise
            told = "that drafter is the default model's, and does not fit this one"
            raise InputError(f"eagle is 'shipped': {told}; valid: one of this model", "eagle") from error
    else:
        raise InputError(
            f"eagle is {shown(wanted)}; valid: a folder, a GGUF file, a hub id or shipped", "eagle"
        )
    made = EagleModel(found, target)
    target.tap(found.config.feature_layers)
    return made


def _tokens(codec: Any) -> Sequence[str] | None:
    """A tokenizer's tokens by their ids; those that it does not name are padding."""
    if codec is None:
        return None
    named = {number: token for token, number in codec.get_vocab().items()}
    return [named.get(number, f"[PAD{number}]") for number in range(max(named, default=-1) + 1)]
