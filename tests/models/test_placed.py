"""Weights in several places: the tokens, the identity and the refusals are those of one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tokenswift import LLM

PROMPT = list(range(40, 100)) * 2
PAPER = {"tree": (1, 2, 2), "ngrams": 4, "budget": 64, "sinks": 8, "draft": "partial"}
HOW: list[tuple[str, dict[str, object], bool]] = [  # with greedy decoding or a seed
    ("autoregressive", {}, True),
    ("tokenswift", PAPER, False),
    ("magicdec", {"budget": 64}, True),
]
DISK: dict[str, str | int] = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "disk",
    "lm_head": "disk",
}


def texts(llm: LLM) -> list[list[int]]:
    """The text of each way."""
    return [
        llm.generate(PROMPT, 14, name, options, greedy=greedy, seed=2, ignore_eos=True).token_ids
        for name, options, greedy in HOW
    ]


@pytest.fixture(scope="module", params=["llama", "tied qwen2"])
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> str:
    tied = request.param.startswith("tied ")
    return str(tiny_folder(request.param.removeprefix("tied "), tie_word_embeddings=tied))


@pytest.fixture(scope="module")
def plain(folder: str) -> LLM:
    return LLM(folder, heads=None)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return texts(plain)


@pytest.fixture(scope="module")
def disk(folder: str, plain: LLM) -> dict[str, str | int]:
    """Most of the model on the disk; tied weights lie together."""
    tied = (
        plain.target.config.tie_word_embeddings
        if plain.target.layout is None
        else plain.target.layout.tied
    )
    return DISK | ({"model.embed_tokens": "disk"} if tied else {})


@pytest.mark.parametrize("kind", ["auto", "disk"])
def test_tokens_are_those_of_one_device(
    folder: str, plain: LLM, expected: list[list[int]], disk: dict[str, str | int], kind: str
) -> None:
    where: object = disk if kind == "disk" else kind
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=where)
    llm = LLM.from_model(model, plain.tokenizer, heads=None)
    assert texts(llm) == expected
    assert llm.resources.identity() == plain.resources.identity()
    assert llm.source.host.base.distance(plain.source.host.base) == 0
    if kind == "disk":
        assert llm.target.layout is None
        assert "transformers' own forward" in str(llm.target.numerics()["how"])
        assert llm.model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
