"""YaRN over a loaded model equals a model that was built with it, and leaves the loaded one
alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.conftest import FAMILIES, tiny_model, tiny_tokenizer
from tokenswift import LLM
from tokenswift.config.loading import RopeScaling
from tokenswift.loader.config import completed
from tokenswift.loader.config_file import read_config
from tokenswift.loader.families import FAMILIES as READ
from tokenswift.loader.load import load
from tokenswift.loader.rope import context_limit, rotary_of, rotary_of_config, scaled_config
from tokenswift.models.target import make_target
from tokenswift.types import InputError

THETA = 10000.0
YARN = {
    "rope_type": "yarn",
    "rope_theta": THETA,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(300)[None] * 7 % 256, use_cache=False).logits[0]


def eager_model(family: str, **changes: Any) -> Any:
    return tiny_model(family, attn_implementation="eager", **changes)


def ours(model: Any, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Logits of the same text through a target."""
    target = make_target(model, scaling)
    tokens = torch.arange(300) * 7 % 256
    places = torch.arange(300)
    return target.logits(target.forward(tokens, places, target.new_cache(301)).hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_extended_equals_built_so_and_the_model_stays_as_it_was(family: str) -> None:
    model = eager_model(family, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    before = logits(model)
    config = model.config.to_dict()
    built = eager_model(family, rope_parameters=YARN, max_position_embeddings=1024)
    scaled = ours(model, RopeScaling(4.0))
    torch.testing.assert_close(scaled, logits(built), rtol=1e-4, atol=2e-5)
    assert torch.equal(scaled, ours(built))
    assert (scaled - before).abs().max() > 1e-5  # it does something
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == config


def test_a_checkpoint_with_yarn_multiplies_its_factor() -> None:
    model = tiny_model(rope_parameters=YARN, max_position_embeddings=256)
    assert context_limit(model.config) == 1024
    config = scaled_config(model.config, RopeScaling(2.0))
    assert context_limit(config) == 2048
    assert config.rope_parameters["factor"] == 8.0
    assert config.rope_parameters["original_max_position_embeddings"] == 256
    assert scaled_config(model.config, None) is model.config
    assert model.config.rope_parameters == YARN


def test_a_second_wrapping_does_not_count_the_factor_twice() -> None:
    model = tiny_model(max_position_embeddings=256)
    for _ in range(2):
        assert LLM.from_model(model, rope_scaling="yarn:4").target.rotary.limit == 1024
    assert LLM.from_model(model).target.rotary.limit == 256


def test_another_scaling_is_refused() -> None:
    llama3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model(rope_parameters=llama3, max_position_embeddings=1024)
    assert context_limit(model.config) == 1024
    with pytest.raises(InputError, match="llama3"):
        LLM.from_model(model, rope_scaling="yarn:2")


def test_frequencies_that_depend_on_a_pass_are_refused() -> None:
    """A tree reaches the boundary γ tokens before the text does, and another text would come
    out."""
    rope = {**YARN, "rope_type": "dynamic", "original_max_position_embeddings": 64}
    with pytest.raises(InputError, match="dynamic.*valid: default, linear, llama3, yarn"):
        LLM.from_model(tiny_model(rope_parameters=rope, max_position_embeddings=256))


KINDS: list[dict[str, object]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, "attention_factor": 1.2},
    {"rope_type": "yarn", "factor": 1.0},
]


@pytest.mark.parametrize("rope", KINDS)
@pytest.mark.parametrize(("theta", "width"), [(10000.0, 8), (500000, 96), (1e6, 128)])
def test_frequencies_are_those_of_transformers(
    rope: dict[str, Any], theta: float, width: int
) -> None:
    """Bit for bit, from the config alone."""
    parameters = {**rope, "rope_theta": theta}
    config = AutoConfig.for_model("llama", head_dim=width, rope_parameters=parameters)
    ours = rotary_of_config(cast("Any", config))
    theirs = LlamaRotaryEmbedding(cast("Any", config))
    assert torch.equal(ours.single(), theirs.inv_freq)
    assert ours.scaling == theirs.attention_scaling


@pytest.mark.parametrize("wrong", [{"rope_theta": 1.0}, {"rope_theta": 1e4, "beta_fast": 5e-324}])
def test_positions_without_frequencies_are_refused(wrong: dict[str, Any]) -> None:
    model_fields = tiny_model().config.to_dict()
    stated_fields = {name: model_fields[name] for name in READ["llama"].defaults}
    config = completed(
        "llama", {**stated_fields, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, **wrong}}
    )
    assert config is not None
    with pytest.raises(InputError, match="rope_parameters cannot be used"):
        rotary_of_config(config)


PLAIN: dict[str, object] = {"rope_theta": 1e6, "rope_type": "default"}
ADDED: dict[str, object] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"rope_parameters": PLAIN, "rope_scaling": None}, PLAIN),
        ({"rope_theta": 1e6, "rope_scaling": ADDED}, {"rope_theta": 1e6, "factor": 4.0}),
        ({"rope_parameters": PLAIN, "rope_scaling": ADDED}, None),
    ],
)
def test_positions_in_older_and_newer_fields(fields: Any, wanted: Any, tmp_path: Path) -> None:
    """Read natively or not; in both, which transformers would drop in part, they are refused."""
    tiny_model("qwen2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {k: v for k, v in config.items() if not k.startswith("rope")}
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    if wanted is None:
        with pytest.raises(InputError, match="rope_scaling is .*; valid: rope_parameters alone"):
            load(tmp_path)
        return
    ours = LLM(tmp_path, device="cpu", heads="none").target.rotary
    theirs = load(tmp_path).model
    for rope in (ours.config.rope_parameters, theirs.config.rope_parameters):
        assert {name: rope[name] for name in wanted} == wanted
    assert torch.equal(ours.single(), theirs.model.rotary_emb.inv_freq)


LAYERS = {"full_attention": PLAIN, "sliding_attention": PLAIN}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": PLAIN},
            "rope_parameters.rope_theta is 1000000.0; valid: 10000.0, which rope_theta is",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {**ADDED, "rope_theta": 5e5}},
            "rope_scaling.rope_theta is 500000.0; valid: 10000.0, which rope_theta is",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": LAYERS},
            "rope_parameters.full_attention.rope_theta is 1000000.0; valid: 10000.0, which",
        ),
        (
            {"rope_local_base_freq": 1e4, "rope_parameters": LAYERS},
            "rope_parameters.sliding_attention.rope_theta is 1000000.0; valid: 10000.0, which rope",
        ),
        ({"rope_theta": 1e6, "rope_parameters": PLAIN}, None),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e6, "rope_parameters": LAYERS}, None),
    ],
)
def test_a_theta_that_is_stated_twice_is_one(
    fields: dict[str, object], line: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if line is None:
        assert read_config("x", tmp_path / "config.json") == fields
        return
    with pytest.raises(InputError) as caught:
        read_config("x", tmp_path / "config.json")
    assert f"config.json of model x: {line}" in str(caught.value)


LLAMA = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTHS: list[tuple[int, dict[str, object], int]] = [
    # Llama 3.2, 3.1, and one that does not say what its factor extends
    (131_072, {**LLAMA, "factor": 32.0, "original_max_position_embeddings": 8192}, 131_072),
    (131_072, {**LLAMA, "factor": 8.0, "original_max_position_embeddings": 8192}, 131_072),
    (131_072, {**LLAMA, "factor": 8.0}, 131_072),
    # Qwen as its page says, a file that counts the factor, and some that do not say what it extends
    (32_768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
    (131_072, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
    (131_072, {"rope_type": "yarn", "factor": 4.0}, 131_072),
    (131_072, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}, 131_072),
    (32_768, {"rope_type": "linear", "factor": 4.0}, 32_768),
]


@pytest.mark.parametrize(("stated", "rope", "limit"), LENGTHS)
def test_a_factor_of_positions_counts_once(
    stated: int, rope: dict[str, object], limit: int
) -> None:
    model_fields = {**tiny_model().config.to_dict(), "rope_parameters": None, "rope_theta": THETA}
    stated_fields = {name: model_fields[name] for name in READ["llama"].defaults} | {
        "rope_scaling": rope
    }
    config = completed("llama", {**stated_fields, "max_position_embeddings": stated})
    assert config is not None
    assert context_limit(config) == limit
    assert rotary_of_config(config).limit == limit


@pytest.mark.parametrize("scaling", [None, RopeScaling(2.0)])
def test_positions_of_files_that_do_not_say_what_a_factor_extends(
    scaling: RopeScaling | None, tmp_path: Path
) -> None:
    """Read natively, and through transformers, which fills in a length."""
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0}
    config["max_position_embeddings"] = 256
    (tmp_path / "config.json").write_text(json.dumps(config))
    option = None if scaling is None else "yarn:2"
    native = LLM(tmp_path, device="cpu", heads="none", rope_scaling=option).target.rotary
    theirs = rotary_of(load(tmp_path).model, scaling)
    assert native.limit == theirs.limit == (256 if scaling is None else 512)
    assert torch.equal(native.single(), theirs.single())
