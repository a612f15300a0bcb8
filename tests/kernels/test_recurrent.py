"""Kernels of the delta rule, which take a head's columns in blocks and rows in tiles: neither shows
in any bit."""

from __future__ import annotations

import pytest
import torch

from tests.lossless.test_recurrent import TEXT, drafts_change_nothing, one_by_one
from tests.tiny import tiny_model
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import make_target

#: a width that is half a block, blocks and a half, blocks alone
WIDTHS = (16, 48, 64)


def target_of(width: int) -> NativeTarget:
    target = make_target(tiny_model("qwen3_5", linear_value_head_dim=width))
    assert isinstance(target, NativeTarget)
    return target


@pytest.mark.parametrize("width", WIDTHS)
def test_a_prompt_has_the_bits_of_rows_one_by_one(width: int) -> None:
    target = target_of(width)
    cache = target.new_cache(120)
    hidden = target.prefill(TEXT[:110], cache).hidden
    expected = one_by_one(target, 110)
    assert torch.equal(hidden, expected[110 - len(hidden) :])


@pytest.mark.parametrize("width", WIDTHS)
def test_drafts_of_heads_of_a_width_change_no_bit(width: int) -> None:
    assert drafts_change_nothing(target_of(width))


@pytest.mark.parametrize("width", WIDTHS)
def test_logits_are_those_of_transformers(width: int) -> None:
    model = tiny_model("qwen3_5", linear_value_head_dim=width)
    tokens = torch.tensor(TEXT[:70])
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    target = make_target(model)
    hidden = target.forward(tokens, torch.arange(70), target.new_cache(70)).hidden
    torch.testing.assert_close(target.logits(hidden), expected, rtol=1e-4, atol=1e-4)


def test_states_behind_drafts_are_not_written() -> None:
    """Their log is replayed for those that are accepted."""
    target = target_of(16)
    cache = target.new_cache(40)
    target.prefill(TEXT[:20], cache)
    states = cache.states
    assert states is not None
    before = states.next.clone()
    target.forward(torch.tensor(TEXT[20:24]), torch.arange(20, 24), cache, list(range(-1, 3)))
    assert torch.equal(states.next, before)
    cache.commit((0, 1, 2, 3))
    assert states.length == 24
