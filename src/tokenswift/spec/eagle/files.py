"""EAGLE-3 drafters (Li et al. 2025): what one is made of, and its files, held against its target.

Three forms are read: that of the research (``midlayer.*`` beside a flat config), that of Speculators
(``layers.0.*``, and the layer's config in the config), and GGUF files of the architecture ``eagle3``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.kernels.weights import Stored
from tokenswift.loader.config import check_numbers, positions_said, refusal
from tokenswift.loader.find import SHIPPED, cache_dir, check_name, gguf_in, locate, shipped_files
from tokenswift.loader.gguf import CALLED, GgufFile, positions, straight
from tokenswift.loader.rope import Rotary, rotary_of_config
from tokenswift.loader.weights import TOLERANCE, BaseIdentity, Entry
from tokenswift.spec.files import read_tensors, tensors_in
from tokenswift.types import InputError, integer_of

#: layers of the target that features are taken of
FEATURES = 3
#: the window of a drafter whose checkpoint names none
WINDOW = 2048
#: what the target gives where a checkpoint lacks it
SHARED = ("embed", "lm_head")
#: tensors by canonical names: what safetensors files call them (``midlayer.`` may be ``layers.0.``) and what
#: GGUF files do; shapes by the sizes of :meth:`EagleConfig.shapes`; and the part that they belong to, where
#: not all drafters have it
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
SAID = ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "rms_norm_eps")
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
        norm_output: what is fed back is the normed output (EAGLE 3.1).
        window: newest keys that a token sees, itself included, as it was trained; None is all.
        parts: those of :data:`NAMES` that not all drafters have: ``norm_before_fc``, a norm of all 3 Ht
            features; ``fc_norm``, one of each layer's; ``qk_norm``, of heads of queries and keys; biases;
            ``narrow``, projections of the target's embeddings to H and of states to its LM head.
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

    @property
    def default_window(self) -> int:
        """Newest keys that a token sees where nobody says how many."""
        return min(self.window or WINDOW, self.trained)

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
        tensors: by canonical names, in the shapes of :meth:`EagleConfig.shapes`; without ``embed`` and
            ``lm_head`` the target's are used, of the LM head the rows of `d2t`. Types are those of the files;
            matrices of GGUF files may be `Stored`.
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
        InputError: the files cannot be read, are none of an EAGLE-3 drafter, or do not fit the target.
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
            f"{where}: d2t does not name {size:,} different tokens below {config.vocab:,}; valid: ids in a "
            "GGUF file, what is added to 0, 1, 2 … in others"
        )
    same = torch.equal(d2t, torch.arange(config.vocab))
    return EagleWeights(config, tensors, None if same else d2t, str(path))


def _folder(path: Path, where: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    """What a folder of either safetensors form says, by the names of transformers and Speculators, and its
    tensors by canonical names."""
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
        said |= {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
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
    said = {name: file.number(key, usual.get(name)) for name, key in CALLED.items() if "." not in name}
    said |= {name: said[name] or None for name in usual}
    check_numbers(said, where)
    heads = said["num_attention_heads"]
    width = said["head_dim"] or said["hidden_size"] // heads
    said["rope_parameters"] = positions(file, width, said["max_position_embeddings"])
    said["eagle_aux_hidden_state_layer_ids"] = file.metadata.get("eagle3.target_layers")
    said |= {name: file.metadata.get(f"eagle3.{name}") for name in ("norm_before_residual", "norm_output")}
    turned = {"q": heads, "k": said["num_key_value_heads"] or heads}
    found = dict[str, Entry]()
    for name, entry in file.tensors.items():
        if not ASIDE.fullmatch(name):
            ours = IN_GGUF.get(name, name)
            found[ours] = Entry(name, entry.shape, "F32", partial(_of_gguf, file, name, turned.get(ours)))
    return said, found


def _of_gguf(file: GgufFile, name: str, heads: int | None) -> Tensor | Stored:
    read = file[name]
    if heads is None:
        return read
    rows = straight(len(read), heads)
    return read.take(rows) if isinstance(read, Stored) else read[rows]


def _config(
    said: Mapping[str, Any], found: Collection[str], size: int, target: Any, where: str
) -> EagleConfig:
    """The drafter that a checkpoint describes; ``size``: tokens that it names."""
    check_numbers(said, where)
    for name in SAID:
        if said.get(name) is None:
            raise refusal(where, name, None, "a number")
    wanted = {"num_hidden_layers": 1, "hidden_act": "silu", "partial_rotary_factor": 1.0}
    for name, valid in {**wanted, "vocab_size": target.vocab_size}.items():
        if said.get(name, valid) != valid:
            raise refusal(where, name, said[name], str(valid))
    rope = positions_said(said, said["max_position_embeddings"])
    if rope is None:
        kinds = "positions of the kinds default, linear, llama3, yarn"
        raise refusal(where, "rope_scaling", said.get("rope_scaling") or said.get("rope_parameters"), kinds)
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
        window=said.get("sliding_window") or None,
        parts=frozenset(parts | {part for part in ("norm_before_fc", "fc_norm") if said.get(part) is True}),
    )


def _layers(ids: Any, target: Any, where: str) -> tuple[int, ...]:
    """The target's layers whose input is a feature. Checkpoints name those; some, which begin with 1, the
    layers before, whose output it is; and some none."""
    layers = target.num_hidden_layers
    ids = (2, layers // 2, layers - 3) if ids is None else ids
    found = [integer_of(one) for one in ids] if isinstance(ids, list | tuple) else []
    made = tuple(one + (found[0] == 1) for one in found if one is not None)
    if not (len({*made}) == len(found) == FEATURES and 0 <= min(made) <= max(made) <= layers):
        valid = f"{FEATURES} different layers, from 0 to {layers}, those that the target has"
        raise refusal(where, "eagle_aux_hidden_state_layer_ids", ids, valid)
    return made


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
