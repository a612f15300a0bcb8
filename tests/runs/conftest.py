"""A tiny model for all tests of runs."""

from __future__ import annotations

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM.from_model(tiny_model(), tiny_tokenizer())
