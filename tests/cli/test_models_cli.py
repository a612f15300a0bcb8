"""``tokenswift models show``: what a model takes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Call
from tests.conftest import tiny_model


def test_show(cli: Call, tiny: Path) -> None:
    made = json.loads(cli("models", "show", tiny, "--json", "-", "--quiet").out)
    model = tiny_model()
    numbers = sum(part.numel() for part in model.parameters())
    config = model.config
    row = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert made["sizes"]["weight_bytes"] == 4 * numbers and made["sizes"]["token_bytes"] == row
    assert made["contexts"] == [{"context": 256, "nbytes": 4 * numbers + 256 * row}]
    shown = cli("models", "show", tiny)
    assert "context: 256 tokens" in shown.out and shown.err == f"reading {tiny}\n"
