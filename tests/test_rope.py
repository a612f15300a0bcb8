"""YaRN on a loaded model equals a model that was built with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import FAMILIES, tiny_model
from tokenswift.models.rope import (
    RopeScaling,
    context_limit,
    extend_context,
    needed_factor,
    parse_rope_scaling,
)
from tokenswift.types import InputError

THETA = 10000.0
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 256}


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(300)[None] * 7 % 256
    return model(tokens, use_cache=False).logits[0]


def plain(family: str) -> Any:
    return tiny_model(
        family, rope_parameters={"rope_type": "default", "rope_theta": THETA}, attn_implementation="eager"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_extended_equals_built_so(family: str) -> None:
    model = plain(family)
    before = logits(model)
    built = tiny_model(
        family, rope_parameters=YARN, max_position_embeddings=1024, attn_implementation="eager"
    )
    assert extend_context(model, 4) == 1024 == model.config.max_position_embeddings
    assert torch.equal(logits(model), logits(built))
    assert (logits(model) - before).abs().max() > 1e-5  # it does something


@pytest.mark.parametrize("family", FAMILIES)
def test_always_relative_to_the_model_as_loaded(family: str) -> None:
    model = plain(family)
    before = logits(model)
    assert extend_context(model, 2) == 512
    assert extend_context(model, 4) == 1024
    assert extend_context(model, 4) == 1024
    other = plain(family)
    extend_context(other, 4)
    assert torch.equal(logits(model), logits(other))
    assert extend_context(model, 1) == 256
    assert torch.equal(logits(model), before)
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": THETA}


def test_a_checkpoint_with_yarn_multiplies_its_factor() -> None:
    model = tiny_model(rope_parameters=YARN, max_position_embeddings=256)
    assert context_limit(model.config) == 1024
    assert extend_context(model, 2) == 2048
    assert model.config.rope_parameters["factor"] == 8.0
    assert model.config.rope_parameters["original_max_position_embeddings"] == 256
    assert extend_context(model, 1) == 1024
    assert model.config.rope_parameters == YARN


def test_another_scaling_is_refused() -> None:
    llama3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model(rope_parameters=llama3, max_position_embeddings=1024)
    assert context_limit(model.config) == 1024
    assert extend_context(model, 1) == 1024
    with pytest.raises(InputError, match="llama3"):
        extend_context(model, 2)


@pytest.mark.parametrize("factor", [0.5, float("nan"), float("inf"), -1])
def test_bad_factor(factor: float) -> None:
    with pytest.raises(InputError, match="factor"):
        extend_context(plain("llama"), factor)


def test_parse() -> None:
    assert parse_rope_scaling("none") is None
    assert parse_rope_scaling("yarn") == RopeScaling(None)
    assert parse_rope_scaling("yarn:4") == RopeScaling(4.0)
    assert parse_rope_scaling("yarn:1.5") == RopeScaling(1.5)
    for bad in ("", "YARN", "yarn:", "yarn:x", "yarn:0", "yarn:nan", "yarn:inf", "linear:2", "none:2"):
        with pytest.raises(InputError, match="rope_scaling is"):
            parse_rope_scaling(bad)


def test_needed_factor() -> None:
    assert [needed_factor(8192, n) for n in (1, 8192, 8193, 100_000)] == [1, 1, 2, 16]
