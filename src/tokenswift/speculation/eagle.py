"""EAGLE-3 drafters (Li et al. 2025): what one is made of, its files, held against its target, and
its passes.

Three forms are read: that of the research (``midlayer.*`` beside a flat config), that of
    Speculators
(``layers.0.*``, and the layer's config in the config), and GGUF files of the architecture
``eagle3``.

A drafter runs on its target's kernels, with packed weights. Its layer is one of a decoder's but for
its input: queries, keys and values are made of the normed embedding and the normed feature side by
side, which is a sum of two products.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.checks import integer_of
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.kernels.batch import row_paths
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv.cache import FullCache, KVCache
from tokenswift.kv.memory import Arena
from tokenswift.kv.passes import Segment
from tokenswift.loader.config import positions_said
from tokenswift.loader.default_model import left_out, shipped_files, trained_files
from tokenswift.loader.find import SHIPPED, check_name, gguf_in, locate
from tokenswift.loader.gguf import GgufFile, read_tensor
from tokenswift.loader.gguf_config import positions
from tokenswift.loader.gguf_names import CALLED
from tokenswift.loader.identity import TOLERANCE, BaseIdentity
from tokenswift.loader.rope import AngleTable, Rotary, rotary_of_config
from tokenswift.loader.schema import check_numbers, refusal
from tokenswift.loader.weights import Entry, unstored
from tokenswift.models.base import BaseTarget
from tokenswift.models.target import Target
from tokenswift.sampling.rows import Subset
from tokenswift.speculation.files import read_tensors, tensors_in
from tokenswift.types import InputError

#: layers of the target that features are taken of
FEATURES = 3
#: the window of a drafter whose checkpoint names none
WINDOW = 2048
#: greatest window of a drafter: its keys and values stand beside those of each text
MOST_WINDOW = 1 << 18
#: a drafter that nobody named may take so large a part of the free memory for a text
SHARE = 4
#: what the target gives where a checkpoint lacks it
SHARED = ("embed", "lm_head")
#: tensors by canonical names: what safetensors files call them (``midlayer.`` may be ``layers.0.``)
#: and what GGUF files do; shapes by the sizes of :meth:`EagleConfig.shapes`; and the part that they
#: belong to, where not all drafters have it
NAMES = {
    "embed": ("embed_tokens.weight", "token_embd.weight", "VH", ""),
    "fc": ("fc.weight", "fc.weight", "HF", ""),
    "features_norm": ("input_norm.weight", "enc.output_norm.weight", "F", "norm_before_fc"),
    "fc_norm.0": ("fc_norm.0.weight", "fc_norm.0.weight", "T", "fc_norm"),
    "fc_norm.1": ("fc_norm.1.weight", "fc_norm.1.weight", "T", "fc_norm"),
    "fc_norm.2": ("fc_norm.2.weight", "fc_norm.2.weight", "T", "fc_norm"),
    "input_norm": ("midlayer.input_layernorm.weight", "blk.0.attn_norm.weight", "H", ""),
    "hidden_norm": ("midlayer.hidden_norm.weight", "blk.0.attn_norm_2.weight", "H", ""),
    "q": ("midlayer.self_attn.q_proj.weight", "blk.0.attn_q.weight", "QW", ""),
    "k": ("midlayer.self_attn.k_proj.weight", "blk.0.attn_k.weight", "KW", ""),
    "v": ("midlayer.self_attn.v_proj.weight", "blk.0.attn_v.weight", "KW", ""),
    "o": ("midlayer.self_attn.o_proj.weight", "blk.0.attn_output.weight", "HQ", ""),
    "q_bias": ("midlayer.self_attn.q_proj.bias", "", "Q", "qkv_bias"),
    "k_bias": ("midlayer.self_attn.k_proj.bias", "", "K", "qkv_bias"),
    "v_bias": ("midlayer.self_attn.v_proj.bias", "", "K", "qkv_bias"),
    "o_bias": ("midlayer.self_attn.o_proj.bias", "", "H", "o_bias"),
    "q_norm": ("midlayer.self_attn.q_norm.weight", "", "d", "qk_norm"),
    "k_norm": ("midlayer.self_attn.k_norm.weight", "", "d", "qk_norm"),
    "post_norm": ("midlayer.post_attention_layernorm.weight", "blk.0.ffn_norm.weight", "H", ""),
    "gate": ("midlayer.mlp.gate_proj.weight", "blk.0.ffn_gate.weight", "IH", ""),
    "up": ("midlayer.mlp.up_proj.weight", "blk.0.ffn_up.weight", "IH", ""),
    "down": ("midlayer.mlp.down_proj.weight", "blk.0.ffn_down.weight", "HI", ""),
    "norm": ("norm.weight", "output_norm.weight", "H", ""),
    "lm_head": ("lm_head.weight", "output.weight", "DH", ""),
    "embed_proj": ("embed_proj.weight", "embed_proj.weight", "HT", "narrow"),
    "out_proj": ("out_proj.weight", "out_proj.weight", "TH", "narrow"),
    "d2t": ("d2t", "d2t", "D", "d2t"),
}
IN_FOLDERS, IN_GGUF = ({names[form]: ours for ours, names in NAMES.items()} for form in (0, 1))
#: what training leaves in some files and no drafting reads
ASIDE = re.compile(r"t2d|.*rotary_emb\.inv_freq|verifier_.*|(blk\.0\.)?rope_freqs\.weight")
#: of a GGUF file: a sample of the target's weights (see `loader.weights`)
BASE = "tokenswift.base"
#: numbers that a checkpoint's config has to give
SAID = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """A drafter of one layer, and the target that it was trained for.

    Attributes:
        hidden: H, the width of the drafter's rows; its layer reads rows of 2 H.
        target_hidden: Ht, the target's width; features of a token are three rows of it.
        heads, kv_heads, head_dim, intermediate: of the layer.
        eps: of the norms.
        rope: ``rope_parameters`` of the drafter's positions.
        vocab: V, tokens of the target.
        draft_vocab: Vd, tokens that the drafter can name.
        feature_layers: the target's layers whose input is a feature, in the order of `fc`'s
            columns; the number of its layers stands for what leaves the last one.
        trained: positions of the texts that it was trained with, as its config says.
        norm_before_residual: the layer's residual is the normed feature.
        norm_output: what is fed back is the normed output (EAGLE 3.1).
        window: newest keys that a token sees, itself included, as it was trained; None is all.
        parts: those of :data:`NAMES` that not all drafters have: ``norm_before_fc``, a norm of all
            3 Ht features; ``fc_norm``, one of each layer's; ``qk_norm``, of heads of queries and
            keys; biases; ``narrow``, projections of the target's embeddings to H and of states to
            its LM head.
    """

    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope: Mapping[str, Any] = field(hash=False)
    vocab: int
    draft_vocab: int
    feature_layers: tuple[int, ...]
    trained: int
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int | None = None
    parts: frozenset[str] = frozenset()

    def rotary(self) -> Rotary:
        """The drafter's own rotary positions."""
        said = {"rope_parameters": dict(self.rope), "head_dim": self.head_dim}
        return rotary_of_config(SimpleNamespace(**said, max_position_embeddings=None))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors, those of :data:`SHARED` included that it may have."""
        sizes = {"V": self.vocab, "D": self.draft_vocab, "T": self.target_hidden}
        sizes |= {"F": FEATURES * self.target_hidden, "H": self.hidden, "W": 2 * self.hidden}
        sizes |= {"Q": self.heads * self.head_dim, "K": self.kv_heads * self.head_dim}
        sizes |= {"d": self.head_dim, "I": self.intermediate}
        return {
            name: tuple(sizes[size] for size in shape)
            for name, (_, _, shape, part) in NAMES.items()
            if (not part or part in self.parts) and not ("narrow" in self.parts and name in SHARED)
        }


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A drafter's weights.

    Attributes:
        config: of the drafter.
        tensors: by canonical names, in the shapes of :meth:`EagleConfig.shapes`; without ``embed``
            and ``lm_head`` the target's are used, of the LM head the rows of `d2t`. Types are those
            of the files; matrices of GGUF files may be `Stored`.
        d2t: the target's ids of the drafter's tokens, (Vd,) int64; None: they are the same.
        name: what the checkpoint was asked for by.
    """

    config: EagleConfig
    tensors: Mapping[str, Tensor | Stored]
    d2t: Tensor | None
    name: str


def load_eagle(path: str | Path, target: Any) -> EagleWeights:
    """A drafter's weights for a target.

    Args:
        path: a folder with config.json and weights, or a GGUF file.
        target: the target's config (of `loader.config.completed` or transformers').
    Raises:
        InputError: the files cannot be read, are none of an EAGLE-3 drafter, or do not fit the
            target.
    """
    path = Path(path).expanduser()
    where, file = f"eagle {path}", gguf_in(path)
    said, found = _folder(path, where) if file is None else _gguf(GgufFile(file), where)
    listed = found.pop("d2t", None)
    if listed is not None and (len(listed.shape) != 1 or not listed.shape[0]):
        raise refusal(where, "the shape of d2t", listed.shape, "a list of tokens")
    size = target.vocab_size if listed is None else listed.shape[0]
    config = _config(said, found.keys(), size, target, where)
    shared = SHARED if config.hidden == config.target_hidden else ()
    tensors = read_tensors(found, config.shapes(), where, shared)
    if listed is None:
        return EagleWeights(config, tensors, None, str(path))
    d2t = listed.get().long() + (0 if file else torch.arange(size))  # folders have offsets
    if len(d2t.unique()) != size or int(d2t.min()) < 0 or int(d2t.max()) >= config.vocab:
        raise InputError(
            f"{where}: d2t does not name {size:,} different tokens below {config.vocab:,}; "
            f"valid: ids in a "
            "GGUF file, what is added to 0, 1, 2 … in others"
        )
    same = torch.equal(d2t, torch.arange(config.vocab))
    return EagleWeights(config, tensors, None if same else d2t, str(path))


def _folder(path: Path, where: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    """What a folder of either safetensors form says, by the names of transformers and Speculators,
    and its tensors by canonical names."""
    if not (path / "config.json").is_file():
        raise InputError(
            f"{where} has no config.json and is not a GGUF file; valid: a drafter's folder or file"
        )
    outer = object_in(path / "config.json", MOST_CONFIG, where)
    if (kind := outer.get("speculators_model_type", "eagle3")) != "eagle3":
        raise refusal(where, "speculators_model_type", kind, "eagle3")
    parts = (outer.get("eagle_config"), outer, outer.get("transformer_layer_config"))
    said: dict[str, Any] = {}
    for part in parts:
        said |= (
            {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
        )
    kinds = said.get("layer_types")
    full = isinstance(kinds, list) and kinds and kinds[0] != "sliding_attention"
    if full or not said.get("use_sliding_window", True):
        said["sliding_window"] = None
    found = dict[str, Entry]()
    for entry in tensors_in(path, where):
        name = re.sub(r"^layers\.0\.", "midlayer.", entry.name.removeprefix("model."))
        if not ASIDE.fullmatch(name):
            found[IN_FOLDERS.get(name, entry.name)] = entry
    return said, found


def _gguf(file: GgufFile, where: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The same of a GGUF file; queries and keys get the order of transformers' rows."""
    if file.architecture != "eagle3":
        raise InputError(f"{where} has the architecture {file.architecture!r}; valid: eagle3")
    usual: dict[str, Any] = dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), 0)
    said = {
        name: file.number(key, usual.get(name)) for name, key in CALLED.items() if "." not in name
    }
    said |= {name: said[name] or None for name in usual}
    check_numbers(said, where)
    heads = said["num_attention_heads"]
    width = said["head_dim"] or said["hidden_size"] // heads
    said["rope_parameters"] = positions(file, width)
    said["eagle_aux_hidden_state_layer_ids"] = file.metadata.get("eagle3.target_layers")
    said |= {
        name: file.metadata.get(f"eagle3.{name}")
        for name in ("norm_before_residual", "norm_output")
    }
    turned = {"q": heads, "k": said["num_key_value_heads"] or heads}
    found = dict[str, Entry]()
    for name, entry in file.tensors.items():
        if not ASIDE.fullmatch(name):
            ours = IN_GGUF.get(name, name)
            found[ours] = Entry(
                name, entry.shape, "F32", partial(read_tensor, file, name, turned.get(ours))
            )
    return said, found


def _config(
    said: Mapping[str, Any], found: Collection[str], size: int, target: Any, where: str
) -> EagleConfig:
    """The drafter that a checkpoint describes; ``size``: tokens that it names."""
    check_numbers({"head_dim": None} | dict(said), where)
    for name in SAID:
        even = name in ("hidden_size", "intermediate_size")  # the kernels take numbers in pairs
        if said.get(name) is None or (even and said[name] % 2):
            raise refusal(where, name, said.get(name), "an even number" if even else "a number")
    wanted = {"num_hidden_layers": 1, "hidden_act": "silu", "partial_rotary_factor": 1.0}
    for name, valid in {**wanted, "vocab_size": target.vocab_size}.items():
        if said.get(name, valid) != valid:
            raise refusal(where, name, said[name], str(valid))
    rope = positions_said(said, said["max_position_embeddings"])
    if rope is None:
        kinds = "positions of the kinds default, linear, llama3, yarn"
        raise refusal(
            where, "rope_scaling", said.get("rope_scaling") or said.get("rope_parameters"), kinds
        )
    window = said.get("sliding_window") or None
    if window is not None and min(window, said["max_position_embeddings"]) > MOST_WINDOW:
        raise refusal(where, "sliding_window", window, f"up to {MOST_WINDOW:,}")
    heads, hidden = said["num_attention_heads"], said["hidden_size"]
    parts = {part for name, (*_, part) in NAMES.items() if part and name in found}
    return EagleConfig(
        hidden=hidden,
        target_hidden=target.hidden_size,
        heads=heads,
        kv_heads=said.get("num_key_value_heads") or heads,
        head_dim=said.get("head_dim") or hidden // heads,
        intermediate=said["intermediate_size"],
        eps=float(said["rms_norm_eps"]),
        rope=rope,
        vocab=target.vocab_size,
        draft_vocab=size,
        feature_layers=_layers(said.get("eagle_aux_hidden_state_layer_ids"), target, where),
        trained=said["max_position_embeddings"],
        norm_before_residual=said.get("norm_before_residual") is True,
        norm_output=said.get("norm_output") is True,
        window=window,
        parts=frozenset(
            parts | {part for part in ("norm_before_fc", "fc_norm") if said.get(part) is True}
        ),
    )


def _layers(ids: Any, target: Any, where: str) -> tuple[int, ...]:
    """The target's layers whose input is a feature. Checkpoints name those; some, which begin with
    1, the layers before, whose output it is; and some none."""
    layers = target.num_hidden_layers
    ids = (2, layers // 2, layers - 3) if ids is None else ids
    found = [integer_of(one) for one in ids] if isinstance(ids, list | tuple) else []
    made = tuple(one + (found[0] == 1) for one in found if one is not None)
    if not (len({*made}) == len(found) == FEATURES and 0 <= min(made) <= max(made) <= layers):
        valid = f"{FEATURES} different layers, from 0 to {layers}, those that the target has"
        raise refusal(where, "eagle_aux_hidden_state_layer_ids", ids, valid)
    return made


def place_of(name: str) -> Path:
    """A checkpoint's folder or file, fetched where it is the hub's.

    Raises:
        InputError: there is none of that name.
    """
    check_name(name, "eagle")
    if name == SHIPPED:
        return shipped_files(".eagle.gguf")[0]
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        return locate(name)
    except InputError as error:
        raise InputError(re.sub("^model", "eagle", str(error)), "eagle") from error


# ---- on the kernels of its target ----------------------------------------------------------------


CHUNK = 512  # rows of a pass that reads features
SCRATCH = 32  # drafted rows in a cache


def _halves(weight: Tensor | Stored, width: int) -> tuple[Tensor | Stored, Tensor | Stored]:
    """The columns of embeddings and those of features, (N, width) each, of a weight (N, 2
    width)."""
    if not isinstance(weight, Stored):
        return weight[:, :width], weight[:, width:]
    if width % weight.format.block:
        return _halves(weight.decode(), width)
    size = weight.format.row_bytes(width)
    one, other = weight.blocks[:, :size], weight.blocks[:, size:]
    return Stored(weight.format, one.contiguous()), Stored(weight.format, other.contiguous())


class Features:
    """A `kv.FeatureStore` of committed tokens that a drafter has not read yet.

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
        """See `kv.FeatureStore.take`; what lies before a gap is dropped."""
        if at != self._end:
            self._parts, self._at = [], at
        self._parts.append(features)
        self._end = at + features.shape[1]
        while len(self) - (first := self._parts[0].shape[1]) >= self.most:
            del self._parts[0]
            self._at += first

    def drain(self) -> tuple[int, Float[Tensor, "k n D"]] | None:
        """The position of the first of them, and all of them, which are gone then; None without
        any."""
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
        target: whose features, and where the drafter has none of its own embedding and LM head, it
            reads.

    Attributes:
        name: of the checkpoint.
        window: newest keys that a token sees, itself included.
        subset: tokens that the columns of logits stand for; None: token ids.
        weight_bytes: bytes of weights that a pass over features reads.
    """

    def __init__(self, weights: EagleWeights, target: BaseTarget) -> None:
        self.name, self.config, self.target = weights.name, weights.config, target
        config, given = weights.config, weights.tensors
        self.window = min(config.window or WINDOW, config.trained)
        self.backend: Any = getattr(target.backend, "head", target.backend)
        self._dtype = torch.float32 if target.int8 else target.dtype
        self._angles = AngleTable(config.rotary().to(target.device))
        arena, device = Arena(), target.device

        def packed(*parts: Tensor | Stored) -> Packed:
            """Weights one below the other: quantized ones as they are stored, where all of them
            are."""
            if all(isinstance(part, Stored) for part in parts) and self.backend.formats:
                return self.backend.pack(parts, self._dtype, arena)
            dense = torch.cat([unstored(part, self._dtype) for part in parts]).to(device)
            return self.backend.pack_for_drafts(dense, target.int8)

        def vector(*names: str) -> Any:
            """Norms or biases in one, or None."""
            found = [unstored(given[name], torch.float32) for name in names if name in given]
            return torch.cat(found).to(device) if found else None

        halves = [_halves(given[name], config.hidden) for name in "qkv"]
        layer = LayerWeights(
            qkv=packed(*(features for _, features in halves)),
            out=packed(given["o"]),
            gate_up=packed(given["gate"], given["up"]),
            down=packed(given["down"]),
            norm=None if config.norm_before_residual else vector("hidden_norm"),
            mlp_norm=vector("post_norm"),
            qkv_bias=vector("q_bias", "k_bias", "v_bias"),
            out_bias=vector("o_bias"),
            query_norm=vector("q_norm"),
            key_norm=vector("k_norm"),
            window=self.window,
            beside=packed(*(embeds for embeds, _ in halves)),
            beside_norm=vector("input_norm"),
        )
        self._hidden_norm, self._final = vector("hidden_norm"), vector("norm")
        self._whole_norm = vector("features_norm")
        self._each_norm = [
            vector(f"fc_norm.{n}") for n in range(FEATURES) if f"fc_norm.{n}" in given
        ]
        self._fc = packed(given["fc"])
        self._embedding = self._kept(given["embed"]) if "embed" in given else None
        self._head = packed(given["lm_head"]) if "lm_head" in given else None
        self._narrow = [packed(given[name]) for name in ("embed_proj", "out_proj") if name in given]
        d2t = None if weights.d2t is None else weights.d2t.to(device)
        self.subset = None if d2t is None else Subset(d2t, target.vocab_size)
        self._rows = None if d2t is None or self._head is not None else target.head_rows(d2t)
        own = [self._fc, *self._narrow, *([] if self._head is None else [self._head])]
        self.weight_bytes = sum(weight.nbytes for weight in [*layer.packed(), *own])
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

    def _kept(self, embedding: Tensor | Stored) -> Tensor | Packed:
        """An embedding, whose rows are taken one by one."""
        if isinstance(embedding, Stored) and self.backend.formats:
            return self.backend.pack(embedding, self._dtype)
        return unstored(embedding, self._dtype).to(self.target.device)

    # ---- what a text has -------------------------------------------------------------------------

    def new_cache(self) -> FullCache:
        """Room for the keys and values of a window, of a pass's rows behind them, and of drafted
        rows."""
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
        entry = (
            self.backend.new_cache(1, config.kv_heads, config.head_dim, 16, self._dtype).nbytes
            // 16
        )
        return (self.window + CHUNK + SCRATCH) * entry + self.window * 3 * config.target_hidden * 4

    # ---- passes ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def fuse(self, features: Float[Tensor, "3 n Ht"]) -> Float[Tensor, "n H"]:
        """What the layer reads of the target's features."""
        backend, eps = self.backend, self.config.eps
        parts = list(features)
        if self._each_norm:
            pairs = zip(parts, self._each_norm, strict=True)
            parts = [
                backend.norm(part.contiguous(), norm, eps, torch.float32) for part, norm in pairs
            ]
        rows = torch.cat(parts, dim=1)
        if self._whole_norm is not None:
            rows = backend.norm(rows, self._whole_norm, eps, torch.float32)
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
        """A pass over rows at the positions ``at`` and on, each of a state and the token *behind*
        its position: the states behind the layer. Its keys and values go to the cache's scratch.

        Args:
            tokens: on the host, or where the target is if they arose there.
            parents: of a tree, the row that each row follows (-1: none of them, so that it stands
                at ``at``).
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
        final = (self._final, self.config.eps, torch.float32)
        return self.backend.norm(made, *final) if self.config.norm_output else made

    @torch.inference_mode()
    def logits(self, made: Float[Tensor, "n H"]) -> Float[Tensor, "n S"]:
        """Of the tokens behind those that rows were run with, from what :meth:`run` made; a column
        for each token of :attr:`subset`."""
        normed = self.backend.norm(made, self._final, self.config.eps, self._dtype)
        if self._narrow:
            normed = self.backend.draft_product(normed, self._narrow[1]).to(self._dtype)
        if self._head is None:
            return self.target.project(normed, self._rows)
        return self.backend.draft_product(normed, self._head)


def eagle_of(wanted: str | Path | EagleWeights, target: Target) -> EagleModel:
    """A drafter for a target, whose passes give features from now on.

    Args:
        wanted: folder, GGUF file or hub id of a checkpoint, "shipped", or the weights themselves.
    Raises:
        InputError: there is none of that name, or it is none of this target.
    """
    if not isinstance(wanted, EagleWeights):
        wanted = load_eagle(place_of(str(wanted)), target.config)
    made = EagleModel(wanted, target)
    target.set_feature_layers(wanted.config.feature_layers)
    return made


def eagle_trained(base: BaseIdentity, target: Target) -> EagleModel | None:
    """The drafter that was trained for a target, the user's own or beside the source; None where
    there is none. Files that cannot be used are left out.

    Args:
        base: the target's identity.
    """
    for file in trained_files(".gguf"):
        with left_out(file):
            said: Any = GgufFile(file).metadata.get(BASE)
            if (
                isinstance(said, list)
                and len(said) == len(base.sample)
                and {*map(type, said)} == {float}
            ):
                made = replace(base, sample=torch.tensor(said, dtype=torch.float32))
                if made.distance(base) <= TOLERANCE:
                    return _modest(load_eagle(file, target.config), target)
    return None


def _modest(weights: EagleWeights, target: Target) -> EagleModel:
    """A drafter that nobody named, for a target whose texts have room beside it.

    Raises:
        InputError: it would take too much of the free memory for each text.
    """
    model, memory = EagleModel(weights, target), target.backend.memory()
    if memory is not None and model.nbytes > memory.free // SHARE:
        raise InputError(
            f"it takes {model.nbytes:,} bytes for each text, {memory.free:,} bytes are available; "
            f"valid: up to a quarter of these"
        )
    target.set_feature_layers(weights.config.feature_layers)
    return model
