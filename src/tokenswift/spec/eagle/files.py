"""EAGLE-3 drafters (Li et al. 2025): what one is made of, and its files, read within bounds and held against
its target.

Three forms are published: that of the research (``midlayer.*`` beside a flat config), that of Speculators
(``layers.0.*``, and the layer's config in the config), and GGUF files of the architecture ``eagle3``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenswift.checks import integer_of, shown
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.kernels.formats import Stored
from tokenswift.loader.config import check_numbers, positions_said, refusal
from tokenswift.loader.default_model import weights
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.find import SHIPPED, cache_dir, check_eagle, gguf_in, locate
from tokenswift.loader.gguf import GgufFile, architecture, called, number_of, positions, short, straight
from tokenswift.loader.identity import TOLERANCE, BaseIdentity
from tokenswift.loader.rope import Rotary, check_stated_once, rotary_of_config
from tokenswift.spec.files import Entry, tensors_in
from tokenswift.types import InputError

#: layers of the target that features are taken of
FEATURES = 3
#: the window of a drafter whose checkpoint names none
WINDOW = 2048
#: what the target gives where a checkpoint lacks it
SHARED = ("embed", "lm_head")
AT_ONCE = 4096  # rows that are looked at together
VALID = "valid: an EAGLE-3 drafter of one layer"
#: numbers of the layer by transformers' names
NUMBERS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
NUMBERS += ("head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window")
#: parts that not all drafters have, and that are said in so many words
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

#: tensors by canonical names: what safetensors files call them (``midlayer.`` may be ``layers.0.``) and what
#: GGUF files do, each with ``.weight`` behind; shapes by the sizes of :meth:`EagleConfig.shapes`; and which
#: field of the config says that it is there, where not all drafters have it
NAMES = {
    "embed": ("embed_tokens", "token_embd", "VH", ""),
    "fc": ("fc", "fc", "HF", ""),
    "features_norm": ("input_norm", "enc.output_norm", "F", "norm_before_fc"),
    "fc_norm.0": ("fc_norm.0", "fc_norm.0", "T", "fc_norm"),
    "fc_norm.1": ("fc_norm.1", "fc_norm.1", "T", "fc_norm"),
    "fc_norm.2": ("fc_norm.2", "fc_norm.2", "T", "fc_norm"),
    "input_norm": ("midlayer.input_layernorm", "blk.0.attn_norm", "H", ""),
    "hidden_norm": ("midlayer.hidden_norm", "blk.0.attn_norm_2", "H", ""),
    "q": ("midlayer.self_attn.q_proj", "blk.0.attn_q", "QW", ""),
    "k": ("midlayer.self_attn.k_proj", "blk.0.attn_k", "KW", ""),
    "v": ("midlayer.self_attn.v_proj", "blk.0.attn_v", "KW", ""),
    "o": ("midlayer.self_attn.o_proj", "blk.0.attn_output", "HQ", ""),
    "q_norm": ("midlayer.self_attn.q_norm", "", "d", "qk_norm"),
    "k_norm": ("midlayer.self_attn.k_norm", "", "d", "qk_norm"),
    "post_norm": ("midlayer.post_attention_layernorm", "blk.0.ffn_norm", "H", ""),
    "gate": ("midlayer.mlp.gate_proj", "blk.0.ffn_gate", "IH", ""),
    "up": ("midlayer.mlp.up_proj", "blk.0.ffn_up", "IH", ""),
    "down": ("midlayer.mlp.down_proj", "blk.0.ffn_down", "HI", ""),
    "norm": ("norm", "output_norm", "H", ""),
    "lm_head": ("lm_head", "output", "DH", ""),
    "embed_proj": ("embed_proj", "embed_proj", "HT", "narrow"),
    "out_proj": ("out_proj", "out_proj", "TH", "narrow"),
}
#: projections that may have biases, canonically ``q_bias`` and so on, by the field of the config that says so
BIASES = {"qkv_bias": ("q", "k", "v"), "o_bias": ("o",), "mlp_bias": ("gate", "up", "down")}
IN_FOLDERS = {f"{theirs}.weight": ours for ours, (theirs, *_) in NAMES.items()} | {"d2t": "d2t", "t2d": "t2d"}
IN_FOLDERS |= {f"{NAMES[one][0]}.bias": f"{one}_bias" for group in BIASES.values() for one in group}
IN_GGUF = {f"{theirs}.weight": ours for ours, (_, theirs, *_) in NAMES.items() if theirs}
IN_GGUF |= {"d2t.weight": "d2t", "d2t": "d2t"}
#: what training leaves in some files and no drafting reads
ASIDE = re.compile(r".*rotary_emb\.inv_freq|verifier_.*|(blk\.0\.)?rope_freqs\.weight")
#: types of weights, and of maps of vocabularies, by their names in safetensors files
TYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I64", "I32")}
WEIGHTS = ("F32", "BF16", "F16")
#: of a GGUF file: a sample of the target's weights (see `loader.identity`)
BASE = "tokenswift.base"
DRAFTERS = "drafters"  # the folder of drafters that are found by what they were trained for


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
        feature_layers: the target's layers whose input is a feature, in the order of `fc`'s columns; the
            number of its layers stands for what leaves the last one.
        trained: positions of the texts that it was trained with, as its config says.
        norm_before_residual: the layer's residual is the normed feature.
        norm_before_fc: a norm of all 3 Ht features before `fc`.
        fc_norm: a norm of each layer's features before `fc`.
        norm_output: what is fed back is the normed output (EAGLE 3.1).
        window: newest keys that a token sees, itself included, as it was trained; None is all.
        qkv_bias, o_bias, mlp_bias: whether these projections have biases.
        qk_norm: whether heads of queries and keys have norms.
        narrow: the target's embeddings and LM head are read through projections to and from H.
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
    feature_layers: tuple[int, int, int]
    trained: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    narrow: bool = False

    @property
    def default_window(self) -> int:
        """Newest keys that a token sees where nobody says how many."""
        return min(self.window or WINDOW, self.trained)

    def rotary(self) -> Rotary:
        """The drafter's own rotary positions.

        Raises:
            InputError: a kind that depends on the text's length.
        """
        said = {"rope_parameters": dict(self.rope), "head_dim": self.head_dim}
        return rotary_of_config(SimpleNamespace(**said, max_position_embeddings=None))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors, those of :data:`SHARED` included."""
        sizes = {"V": self.vocab, "D": self.draft_vocab, "T": self.target_hidden}
        sizes |= {"F": FEATURES * self.target_hidden, "H": self.hidden, "W": 2 * self.hidden}
        sizes |= {"Q": self.heads * self.head_dim, "K": self.kv_heads * self.head_dim}
        sizes |= {"d": self.head_dim, "I": self.intermediate}
        found = {
            name: tuple(sizes[size] for size in shape)
            for name, (_, _, shape, part) in NAMES.items()
            if (not part or getattr(self, part)) and not (self.narrow and name in SHARED)
        }
        for part, names in BIASES.items():
            found |= {f"{name}_bias": found[name][:1] for name in names if getattr(self, part)}
        return found


def default_layers(layers: int) -> tuple[int, int, int]:
    """The layers that features are taken of where a checkpoint names none, of a target with so many."""
    return 2, layers // 2, layers - 3


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A drafter's weights by canonical names.

    Attributes:
        config: of the drafter.
        tensors: ``fc`` (H, 3 Ht); ``input_norm`` (H) of embeddings and ``hidden_norm`` (H) of features;
            ``q`` (heads · d, 2 H), ``k`` and ``v`` (kv heads · d, 2 H), ``o`` (H, heads · d);
            ``post_norm`` (H); ``gate`` and ``up`` (I, H), ``down`` (H, I); ``norm`` (H). Those that not all
            have: ``embed`` (V, H) and ``lm_head`` (Vd, H), without which the target's are used (of the LM
            head the rows of `d2t`); ``features_norm`` (3 Ht) with ``norm_before_fc``; ``fc_norm.0`` to
            ``fc_norm.2`` (Ht) with ``fc_norm``; ``q_norm`` and ``k_norm`` (d) with ``qk_norm``; biases
            ``q_bias`` and so on; of a narrow one ``embed_proj`` (H, Ht) and ``out_proj`` (Ht, H). Types are
            those of the files; matrices of GGUF files may be `Stored`.
        d2t: the target's ids of the drafter's tokens, (Vd,) int64, rising; None: they are the same.
        name: what the checkpoint was asked for by.
    """

    config: EagleConfig
    tensors: Mapping[str, Tensor | Stored]
    d2t: Tensor | None
    name: str


class _Opened(NamedTuple):
    """A checkpoint whose weights are not read yet.

    Attributes:
        where: it is, for messages.
        found: its tensors by canonical names; what has none keeps its own, in brackets.
        layer: :data:`NUMBERS` of the layer, checked.
        rope: ``rope_parameters`` of its positions.
        more: what the checkpoint says besides, by the names of Speculators.
        tokens: of the tokenizer that a GGUF file holds, if any.
        ids: whether d2t may hold ids, which rise then; otherwise offsets.
    """

    where: str
    found: dict[str, Entry]
    layer: Mapping[str, Any]
    rope: Mapping[str, Any]
    more: Mapping[str, Any]
    tokens: Any = None
    ids: bool = False


def load_eagle(path: str | Path, target: Any, tokens: Sequence[str] | None = None) -> EagleWeights:
    """A drafter's weights for a target.

    Args:
        path: a folder with config.json and weights, or a GGUF file.
        target: the target's config (`loader.config.NativeConfig` or transformers').
        tokens: of the target's tokenizer, by their ids; those of a GGUF drafter must be the same.
    Raises:
        InputError: the files cannot be read, are none of an EAGLE-3 drafter, or do not fit the target.
    """
    for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if not isinstance(getattr(target, name, None), int):
            kind = getattr(target, "model_type", "?")
            raise InputError(
                f"the target is of the kind {kind}, whose config has no {name}: its layers cannot be tapped; "
                "valid: a causal language model of text"
            )
    path = Path(path).expanduser()
    file = gguf_in(path)
    opened = _folder(path, target) if file is None else _gguf(GgufFile(file), target)
    where, found = opened.where, opened.found
    config = _config(opened, target)
    _check_fit(opened, config, target, tokens)
    _check_table(opened, config)
    d2t = _vocabulary(opened, config)
    read = {name: _finite(found[name], where) for name in config.shapes() if name in found}
    if d2t is not None and not _rising(d2t):
        d2t, order = d2t.sort()
        if "lm_head" in read:
            head = read["lm_head"]
            read["lm_head"] = head.take(order) if isinstance(head, Stored) else head[order]
    return EagleWeights(config, read, d2t, str(path))


# ---- the three forms ---------------------------------------------------------------------------------------


def _folder(path: Path, target: Any) -> _Opened:
    """A folder of either safetensors form."""
    where = f"eagle {path}"
    if not (path / "config.json").is_file():
        raise InputError(
            f"{where} has no config.json and is not a GGUF file; valid: a drafter's folder or file"
        )
    said = object_in(path / "config.json", MOST_CONFIG, where)
    kind, inner = said.get("speculators_model_type"), said.get("eagle_config")
    more = dict(inner) if isinstance(inner, Mapping) else {}
    more |= {name: value for name, value in said.items() if value is not None}
    if kind not in (None, "eagle3"):
        raise refusal(where, "speculators_model_type", kind, "eagle3")
    if more.get("use_aux_hidden_state") is False:
        raise refusal(where, "use_aux_hidden_state", False, "true, a drafter that reads three layers")
    layer: Any = said if kind is None else said.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise refusal(where, "transformer_layer_config", layer, "an object")
    found = dict[str, Entry]()
    for entry in tensors_in(path, where):
        plain = entry.name.removeprefix("model.")
        if ASIDE.fullmatch(plain):
            continue
        name = IN_FOLDERS.get(re.sub(r"^layers\.0\.", "midlayer.", plain), f"({entry.name})")
        if name in found:
            raise InputError(f"{where} has two tensors {entry.name}; valid: one of each")
        found[name] = entry
    _check_fc(found, where)  # before numbers, which a model has as well
    check_stated_once(layer, f"config.json of {where}")
    numbers = _numbers(layer, where)
    rope = _rope(layer, numbers["max_position_embeddings"], target, where)
    return _Opened(where, found, numbers, rope, more)


def _numbers(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a config.json says of the layer, with what its family leaves out."""
    kind = "qwen3" if said.get("model_type") == "qwen3" else "llama"
    given = {name: value for name, value in said.items() if value is not None}
    fields = FAMILIES[kind].usual | {"num_hidden_layers": 1} | given
    made = {name: fields.get(name) for name in NUMBERS}
    rope = {"rope_parameters": said.get("rope_scaling") or said.get("rope_parameters")}
    check_numbers({**made, **rope, "rope_theta": said.get("rope_theta")}, f"config.json of {where}")
    for name, valid in (("num_hidden_layers", 1), ("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        if fields.get(name, valid) != valid:
            raise refusal(where, name, fields[name], str(valid))
    kinds = said.get("layer_types")
    full = isinstance(kinds, list) and kinds and kinds[0] != "sliding_attention"
    window = said.get("sliding_window") if said.get("use_sliding_window", True) and not full else None
    return made | {"sliding_window": window}


def _rope(said: Mapping[str, Any], limit: int, target: Any, where: str) -> Mapping[str, Any]:
    """The layer's positions; those of the target where the base is null."""
    scaling = said.get("rope_scaling") or said.get("rope_parameters")
    if "rope_theta" in said and said["rope_theta"] is None:
        if scaling is None:
            return dict(target.rope_parameters)
        said = {**said, "rope_theta": target.rope_parameters["rope_theta"]}
    found = positions_said(said, limit)
    if found is None:
        raise refusal(where, "rope_scaling", scaling, "positions of the kinds default, linear, llama3, yarn")
    return found


def _gguf(file: GgufFile, target: Any) -> _Opened:
    """A GGUF file; queries and keys get the order of transformers' rows."""
    where, said = f"eagle {file.path}", file.metadata
    if architecture(file) != "eagle3":
        raise InputError(f"{where} has the architecture {architecture(file)!r}; valid: eagle3")
    heads, tokens = number_of(file, "attention.head_count"), said.get("tokenizer.ggml.tokens")
    numbers = {
        "hidden_size": number_of(file, "embedding_length"),
        "intermediate_size": number_of(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number_of(file, "attention.head_count_kv", heads),
        "head_dim": said.get("eagle3.attention.key_length") or None,
        "max_position_embeddings": number_of(file, "context_length"),
        "rms_norm_eps": short(number_of(file, "attention.layer_norm_rms_epsilon")),
        "vocab_size": number_of(file, "vocab_size", len(tokens or ())),
        "sliding_window": said.get("eagle3.attention.sliding_window") or None,
    }
    check_numbers(numbers, where, called(file))
    if (blocks := number_of(file, "block_count")) != 1:
        raise refusal(where, "eagle3.block_count", blocks, "1")
    turned = {"q": heads, "k": numbers["num_key_value_heads"]}
    found = dict[str, Entry]()
    for name, entry in file.tensors.items():
        if not ASIDE.fullmatch(name):
            ours = IN_GGUF.get(name, f"({name})")
            kind = entry.kind if entry.kind in TYPES["d2t"] else "F32"  # quantized ones, too
            found[ours] = Entry(name, entry.shape, kind, partial(_of_gguf, file, name, turned.get(ours)))
    _check_fc(found, where)
    listed = next((found[name] for name in ("d2t", "lm_head") if name in found), None)
    more = {"target_hidden_size": target.hidden_size}
    more |= {name.removeprefix("eagle3."): value for name, value in said.items()}
    more["eagle_aux_hidden_state_layer_ids"] = more.get("target_layers", more.get("extract_layers"))
    more["draft_vocab_size"] = numbers["vocab_size"] if listed is None else (*listed.shape, 0)[0]
    width = numbers["head_dim"] or numbers["hidden_size"] // heads
    rope = positions(file, width, numbers["max_position_embeddings"])
    return _Opened(where, found, numbers, rope, more, tokens, ids=True)


def _of_gguf(file: GgufFile, name: str, heads: int | None) -> Tensor | Stored:
    read = file[name]
    if heads is None:
        return read
    rows = straight(len(read), heads)
    return read.take(rows) if isinstance(read, Stored) else read[rows]


# ---- what a checkpoint must be -----------------------------------------------------------------------------


def _check_fc(found: Mapping[str, Entry], where: str) -> None:
    if "fc" not in found or len(found["fc"].shape) != 2:
        raise InputError(f"{where} has no tensor fc.weight, a matrix: it is not an EAGLE-3 drafter; {VALID}")


def _config(opened: _Opened, target: Any) -> EagleConfig:
    """The drafter that a checkpoint describes."""
    where, found, layer, more = opened.where, opened.found, opened.layer, opened.more
    heads, hidden, vocab = layer["num_attention_heads"], layer["hidden_size"], layer["vocab_size"]
    wide = _whole(more, "target_hidden_size", found["fc"].shape[1] // FEATURES, 1 << 20, where)
    flags = {name: more.get(name, False) for name in FLAGS}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise refusal(where, name, value, "true or false")
    flags["norm_before_fc"] |= "features_norm" in found
    flags["fc_norm"] |= "fc_norm.0" in found
    return EagleConfig(
        hidden=hidden,
        target_hidden=wide,
        heads=heads,
        kv_heads=layer["num_key_value_heads"] or heads,
        head_dim=layer["head_dim"] or hidden // heads,
        intermediate=layer["intermediate_size"],
        eps=float(layer["rms_norm_eps"]),
        rope=opened.rope,
        vocab=vocab,
        draft_vocab=_whole(more, "draft_vocab_size", vocab, vocab, where),
        feature_layers=_layers(more.get("eagle_aux_hidden_state_layer_ids"), target, where),
        trained=layer["max_position_embeddings"],
        window=layer["sliding_window"],
        qkv_bias="q_bias" in found,
        o_bias="o_bias" in found,
        mlp_bias="gate_bias" in found,
        qk_norm="q_norm" in found,
        narrow="embed_proj" in found,
        **flags,
    )


def _whole(said: Mapping[str, Any], name: str, usual: int, most: int, where: str) -> int:
    number = usual if said.get(name) is None else integer_of(said[name])
    if number is None or not 1 <= number <= most:
        raise refusal(where, name, said.get(name, usual), f"an integer from 1 to {most:,}")
    return number


def _layers(ids: object, target: Any, where: str) -> tuple[int, int, int]:
    """The target's layers whose input is a feature.

    Most checkpoints name those; some of them, which begin with 1, name the layers before, whose output it is.
    """
    layers = target.num_hidden_layers
    if ids is None:
        found = default_layers(layers)
        if len({*found}) < FEATURES or min(found) < 0:
            raise InputError(
                f"{where} names no layers and the target has {layers}; valid: a target with 7 layers or "
                "more, or a checkpoint with eagle_aux_hidden_state_layer_ids"
            )
        return found
    numbers = [integer_of(one) for one in ids] if isinstance(ids, list | tuple) else []
    numbers = [one + 1 if numbers[0] == 1 else one for one in numbers if one is not None]
    if not (len({*numbers}) == len(numbers) == FEATURES and 0 <= min(numbers) <= max(numbers) <= layers):
        valid = f"{FEATURES} different layers, from 0 to {layers}, those that the target has"
        raise refusal(where, "eagle_aux_hidden_state_layer_ids", ids, valid)
    return numbers[0], numbers[1], numbers[2]


def _check_fit(opened: _Opened, config: EagleConfig, target: Any, tokens: Sequence[str] | None) -> None:
    """Refuse a drafter of another target's sizes or tokens."""
    where = opened.where
    for what, mine, theirs in (
        ("hidden size", config.target_hidden, target.hidden_size),
        ("vocabulary", config.vocab, target.vocab_size),
    ):
        if mine != theirs:
            raise InputError(
                f"{where} was made for a target with {what} {mine:,}, the model has {theirs:,}; valid: a "
                "drafter of this model"
            )
    own = opened.tokens if isinstance(opened.tokens, list) else []
    for number, (mine, theirs) in enumerate(zip(own, tokens or (), strict=False)):
        if mine != theirs and not str(mine).startswith("[PAD"):
            raise InputError(
                f"{where} has another tokenizer: its token {number} is {shown(mine)}, the model's is "
                f"{shown(theirs)}; valid: a drafter of this model"
            )


def _check_table(opened: _Opened, config: EagleConfig) -> None:
    """Hold all tensors against the drafter's table, before any is read."""
    table, where = config.shapes(), opened.where
    shared = SHARED if config.hidden == config.target_hidden else ()
    missing = next((name for name in table if name not in opened.found and name not in shared), None)
    if missing is not None:
        theirs = {ours: name for name, ours in IN_FOLDERS.items()}
        raise InputError(f"{where} lacks the tensor {theirs[missing]}; {VALID}")
    shapes = {**table, "d2t": (config.draft_vocab,), "t2d": (config.vocab,)}
    for name, entry in opened.found.items():
        if name not in shapes:
            raise InputError(f"{where}: the tensor {entry.name} is not part of an EAGLE-3 drafter; {VALID}")
        if entry.shape != shapes[name]:
            raise InputError(f"{where}: tensor {entry.name} has shape {entry.shape}; valid: {shapes[name]}")
        if entry.kind not in (valid := TYPES.get(name, WEIGHTS)):
            raise InputError(
                f"{where}: tensor {entry.name} has the type {entry.kind}; valid: {', '.join(valid)}"
            )


def _vocabulary(opened: _Opened, config: EagleConfig) -> Tensor | None:
    """The target's ids of the drafter's tokens, of whichever map the files have; None: they are the same."""
    where, vocab, size, found = opened.where, config.vocab, config.draft_vocab, opened.found
    listed = found["t2d"].get().bool().nonzero().flatten() if "t2d" in found else torch.zeros(0)
    if "d2t" in found:
        ids = found["d2t"].get().long()
        if not (opened.ids and _rising(ids)):
            ids = ids + torch.arange(size)
    elif len(listed) or size == vocab:
        ids = listed if len(listed) else torch.arange(size)
    else:
        raise InputError(
            f"{where} does not say which {size:,} of {vocab:,} tokens it drafts; valid: a checkpoint with "
            "d2t or t2d"
        )
    if len(ids.unique()) != size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise InputError(
            f"{where}: d2t or t2d does not give {size:,} different tokens from 0 to {vocab - 1:,}; valid: as "
            "many as draft_vocab_size"
        )
    if len(listed) and not torch.equal(ids.sort().values, listed):  # one that was never filled says nothing
        raise InputError(f"{where}: d2t and t2d name different tokens; valid: the same")
    return None if size == vocab and _rising(ids) else ids


def _rising(ids: Tensor) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _finite(entry: Entry, where: str) -> Tensor | Stored:
    """Read weights, and refuse them where they are not finite; some rows are looked at at a time."""
    read: Any = entry.get()
    for start in range(0, len(read), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        part = Stored(read.format, read.blocks[rows]).decode() if isinstance(read, Stored) else read[rows]
        if not bool(torch.isfinite(torch.stack(part.aminmax())).all()):
            raise InputError(f"{where}: tensor {entry.name} holds values that are not finite")
    return read


def trained_for(base: BaseIdentity) -> Path | None:
    """The drafter that was trained for a model, the user's own or beside the source; None where
    there is none."""
    for folder in (cache_dir() / DRAFTERS, Path(__file__).parents[4] / DRAFTERS):
        for file in sorted(folder.glob("*.gguf")):
            sample = GgufFile(file).metadata.get(BASE)
            if isinstance(sample, list) and len(sample) == len(base.sample):
                made = replace(base, sample=torch.tensor(sample, dtype=torch.float32))
                if made.distance(base) <= TOLERANCE:
                    return file
    return None


def place_of(name: str) -> Path:
    """A checkpoint's folder or file, fetched where it is the hub's.

    Raises:
        InputError: there is none of that name.
    """
    check_eagle(name)
    if name == SHIPPED:
        return Path(str(weights(".eagle.gguf")[0]))
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        return locate(name)
    except InputError as error:
        raise InputError(re.sub("^model", "eagle", str(error)), "eagle") from error
