"""``generate --preset``: the paper's setting, what goes over it, and a name that is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.config import CONTINUED, PRESETS, sampling_over, settings_of


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_the_record_says(cli: Call, tiny_folder: Callable[..., Path], name: str) -> None:
    words = ("generate", "hello", "--model", tiny_folder(), "--max-new-tokens", "3", "--json", "r.json")
    assert cli(*words, "--preset", name, "--seed", "5").code == 0
    sampling = json.loads(Path("r.json").read_text())["sampling"]
    made = sampling_over(CONTINUED, PRESETS[name])
    assert sampling == settings_of(replace(made, seed=5)) and made.dry_multiplier == 0
    assert cli(*words, "--preset", name, "--top-p", "0.5", "--min-p", "0.1").code == 0
    sampling = json.loads(Path("r.json").read_text())["sampling"]
    assert sampling == settings_of(replace(made, top_p=0.5, min_p=0.1))
