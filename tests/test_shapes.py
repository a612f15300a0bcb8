"""Annotated shapes are checked in the process that runs the tests."""

from __future__ import annotations

import os

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from tokenswift.loader.rotary import Rotary
from tokenswift.sampling.filters import repetition_penalty
from tokenswift.tree import ancestor_mask, check_tree

pytestmark = pytest.mark.skipif(
    os.environ.get("TOKENSWIFT_SHAPES") == "0", reason="shapes are not checked"
)


def test_another_shape_or_type_is_refused() -> None:
    logits = torch.zeros(2, 5)
    assert repetition_penalty(logits, torch.zeros(2, 3, dtype=torch.long), 1.2).shape == (2, 5)
    bad: tuple[object, ...] = (
        torch.zeros(2, 3),
        torch.zeros(3, 3, dtype=torch.long),
        torch.zeros(2).long(),
    )
    for ids in bad:
        with pytest.raises(BeartypeCallHintViolation):
            repetition_penalty(logits, ids, 1.2)


def test_dataclasses_and_results_are_checked_too() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        Rotary(torch.zeros(2, dtype=torch.long), 1.0, None, None)
    assert ancestor_mask([-1, 0]).shape == (2, 2)
    assert hasattr(ancestor_mask, "__wrapped__")
    assert not hasattr(check_tree, "__wrapped__")
