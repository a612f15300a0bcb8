"""What the config.json of a drafter says, in the research form and in that of Speculators."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from tokenswift.checks import integer_of, shown
from tokenswift.loader.config import COMMON, OWN, check_numbers, positions_said, refusal
from tokenswift.loader.rope import merged
from tokenswift.spec.eagle.config import FEATURES, EagleConfig, default_layers
from tokenswift.types import InputError

#: shapes and types of tensors by canonical names
Found: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]
#: what is no EAGLE-3, by a part of what a config says of its kind, and its name
OTHERS = {
    "peagle": "a P-EAGLE",
    "dflash": "a DFlash",
    "dspark": "a DSpark",
    "xpress": "an Xpress",
    "medusa": "a Medusa",
    "hydra": "a Hydra",
    "mlpspeculator": "an MLP speculator",
    "mtp": "an MTP",
}
VALID = "valid: an EAGLE-3 drafter of one layer"
#: what the layer's families leave out of their configs
USUAL = ("llama", "qwen3")


def unsupported(where: str, what: str) -> InputError:
    """That a checkpoint is a drafter of another kind."""
    return InputError(f"{where} is {what} checkpoint, which is not supported; {VALID}")


def check_kind(said: Mapping[str, Any], where: str) -> None:
    """Refuse the config of a drafter of another kind.

    Raises:
        InputError: naming the kind.
    """
    inner = said.get("speculators_config")
    algorithm = inner.get("algorithm") if isinstance(inner, Mapping) else None
    architectures = said.get("architectures")
    names = [said.get("speculators_model_type"), said.get("model_type"), algorithm]
    names += architectures if isinstance(architectures, list) else []
    called = [str(name).lower().replace("_", "").replace("-", "") for name in names if name]
    for part, what in OTHERS.items():
        if any(part in name for name in called):
            raise unsupported(where, what)
    if said.get("parallel_drafting") or "ptd_token_id" in said:
        raise unsupported(where, "a P-EAGLE")
    if "dflash_config" in said:
        raise unsupported(where, "a DFlash")
    kind = said.get("speculators_model_type")
    if kind == "eagle" or "eagleforcausallm" in called:
        raise unsupported(where, "an EAGLE-1 or EAGLE-2")
    if kind not in (None, "eagle3"):
        raise unsupported(where, f"a {shown(kind)}")
    more = said.get("eagle_config")
    if isinstance(more, Mapping) and more.get("use_aux_hidden_state") is False:
        raise InputError(
            f"{where} drafts from the last layer alone (use_aux_hidden_state is false), which is not "
            f"supported; {VALID}"
        )


def config_of(said: Mapping[str, Any], there: Found, target: Any, where: str) -> EagleConfig:
    """The drafter of a config.json that passed :func:`check_kind`.

    Args:
        there: shapes and types of the tensors in its files, by canonical names.
        target: the target's config.
        where: the checkpoint, for messages.
    Raises:
        InputError: numbers that no drafter has.
    """
    layer: Any = said.get("transformer_layer_config") if "speculators_model_type" in said else said
    if not isinstance(layer, Mapping):
        raise refusal(where, "transformer_layer_config", layer, "an object")
    layer = merged(layer, f"config.json of {where}")
    kind = layer.get("model_type", "llama")
    if "speculators_model_type" in said and kind not in USUAL:
        raise refusal(where, "transformer_layer_config.model_type", kind, ", ".join(USUAL))
    usual = COMMON | OWN[kind if kind in USUAL else "llama"] | {"num_hidden_layers": 1}
    fields = usual | {name: value for name, value in layer.items() if value is not None}
    flags = dict(said["eagle_config"]) if isinstance(said.get("eagle_config"), Mapping) else {}
    flags |= {name: value for name, value in said.items() if value is not None}
    rope = layer.get("rope_scaling") or layer.get("rope_parameters")
    checked = {name: fields.get(name) for name in _NUMBERS} | {"rope_parameters": rope}
    checked["rope_theta"] = layer.get("rope_theta")
    check_numbers(checked, f"config.json of {where}")
    if fields["num_hidden_layers"] != 1:
        raise refusal(where, "num_hidden_layers", fields["num_hidden_layers"], "1")
    if fields["hidden_act"] not in ("silu", "swish"):
        raise refusal(where, "hidden_act", fields["hidden_act"], "silu")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise refusal(where, "partial_rotary_factor", fields["partial_rotary_factor"], "1.0")
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    return EagleConfig(
        hidden=hidden,
        target_hidden=_whole(
            said.get("target_hidden_size"), there["fc"][0][-1] // FEATURES, "target_hidden_size", where
        ),
        heads=heads,
        kv_heads=fields["num_key_value_heads"] or heads,
        head_dim=fields.get("head_dim") or hidden // heads,
        intermediate=fields["intermediate_size"],
        eps=float(fields["rms_norm_eps"]),
        rope=_rope(layer, fields["max_position_embeddings"], target, where),
        vocab=fields["vocab_size"],
        draft_vocab=_whole(said.get("draft_vocab_size"), fields["vocab_size"], "draft_vocab_size", where),
        feature_layers=layers_of(flags.get("eagle_aux_hidden_state_layer_ids"), target, where),
        trained=fields["max_position_embeddings"],
        norm_before_residual=_flag(flags, "norm_before_residual", where),
        norm_before_fc=_flag(flags, "norm_before_fc", where) or "features_norm" in there,
        fc_norm=_flag(flags, "fc_norm", where) or "fc_norm.0" in there,
        norm_output=_flag(flags, "norm_output", where),
        window=_window(layer),
        **biases_of(there),
    )


_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "sliding_window",
)


def biases_of(there: Collection[str]) -> dict[str, bool]:
    """Parts of a drafter that say themselves whether they are there."""
    return {
        "qkv_bias": "q_bias" in there,
        "o_bias": "o_bias" in there,
        "mlp_bias": "gate_bias" in there,
        "qk_norm": "q_norm" in there,
    }


def layers_of(ids: object, target: Any, where: str) -> tuple[int, int, int]:
    """The target's layers whose input is a feature.

    Most checkpoints name those; some of them, which begin with 1, name the layers before, whose output it is.

    Args:
        ids: what the checkpoint says; None: nothing.
    Raises:
        InputError: the target has no such layers.
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
    fits = len({*numbers}) == len(numbers) == FEATURES and 0 <= min(numbers) <= max(numbers) <= layers
    if not fits:
        raise refusal(
            where,
            "eagle_aux_hidden_state_layer_ids",
            ids,
            f"{FEATURES} different layers, from 0 to {layers}, those that the target has",
        )
    return numbers[0], numbers[1], numbers[2]


def _whole(value: object, usual: int, name: str, where: str) -> int:
    if value is None:
        return usual
    number = integer_of(value)
    if number is None or not 1 <= number <= 1 << 20:
        raise refusal(where, name, value, "an integer from 1 to 1,048,576")
    return number


def _flag(said: Mapping[str, Any], name: str, where: str) -> bool:
    value = said.get(name, False)
    if not isinstance(value, bool):
        raise refusal(where, name, value, "true or false")
    return value


def _window(layer: Mapping[str, Any]) -> int | None:
    """The window that the layer was trained with."""
    kinds = layer.get("layer_types")
    if isinstance(kinds, list) and kinds and kinds[0] != "sliding_attention":
        return None
    return layer.get("sliding_window") if layer.get("use_sliding_window", True) else None


def _rope(layer: Mapping[str, Any], limit: int, target: Any, where: str) -> dict[str, Any]:
    """The drafter's positions; those of the target where the base is null."""
    scaling = layer.get("rope_scaling") or layer.get("rope_parameters")
    if "rope_theta" in layer and layer["rope_theta"] is None:
        if scaling is None:
            return dict(target.rope_parameters)
        layer = {**layer, "rope_theta": target.rope_parameters["rope_theta"]}
    found = positions_said(layer, limit)
    if found is None:
        raise refusal(where, "rope_scaling", scaling, "positions of the kinds default, linear, llama3, yarn")
    return found
