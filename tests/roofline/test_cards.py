"""Published figures of cards."""

from __future__ import annotations

import pytest

from tokenswift.roofline.cards import CARDS, card_named
from tokenswift.types import InputError


def test_cards() -> None:
    assert list(CARDS) == ["h100", "h200", "a100", "4090", "l40s"]
    for card in CARDS.values():
        assert card.source.startswith("published by NVIDIA: ")
        assert card.device == "cuda" and card.keeps("q4_1", "bfloat16") and not card.keeps("q4_k", "float32")
        assert card.arithmetic["float32"] < card.arithmetic["bfloat16"] == card.arithmetic["float16"]
        assert 8e11 < card.bandwidth < 5e12 < card.arithmetic["float32"] < card.arithmetic["bfloat16"] < 1e15
    assert card_named("a100") is CARDS["a100"]
    with pytest.raises(InputError, match="gpu is 'v100'; valid: h100, h200, a100, 4090, l40s"):
        card_named("v100")
