"""What a run will take: memory by part, the largest length that fits, time from what was
measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.cli.conftest import Call
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, InputError, memory
from tokenswift.cli.plan import memory_forecast, text_of
from tokenswift.engine.request import Request
from tokenswift.engine.sequence import Sequence
from tokenswift.memory import Memory, largest, needs_of

OPTIONS: dict[str, object] = {
    "tree": (2, 2),
    "ngrams": 3,
    "budget": 60,
    "sinks": 2,
    "draft": "partial",
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model(max_position_embeddings=100_000), tiny_tokenizer())


def run_of(llm: LLM, new: int) -> Sequence:
    return Sequence(llm.resources, Request([1, 2, 3], new, "tokenswift", OPTIONS, ignore_eos=True))


@pytest.mark.parametrize("free", [0, 10_000, 100_000, 333_333, 5_000_000])
def test_the_largest_length_fits_and_one_more_does_not(llm: LLM, free: int) -> None:
    """Also around the budget, where a partial cache joins in."""
    run = run_of(llm, 5)
    most = largest(llm.target, run.strategy, 3, free)

    def needed(new: int) -> int:
        return sum(n.nbytes for n in needs_of(llm.target, run.strategy, 3, new) if n.sure)

    assert needed(most + 1) > free
    assert most == 0 or needed(most) <= free


def test_a_run_that_does_not_fit_is_told_what_would(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(3_000_000, 10**9))
    with pytest.raises(
        InputError, match=r"valid: max_new_tokens up to \d+, a dtype of two bytes$"
    ) as caught:
        run_of(llm, 90_000)
    most = int(str(caught.value).rsplit("up to ", 1)[1].split(",")[0])
    assert run_of(llm, most).max_new_tokens == most
    with pytest.raises(InputError, match=f"up to {most},"):
        run_of(llm, most + 1)
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(100, 10**9))
    with pytest.raises(
        InputError, match="valid: a smaller ngrams"
    ):  # the tree's rows alone are too many
        run_of(llm, 1)


def test_the_parts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is there once: the sum is what the process holds and what the run adds."""
    monkeypatch.setattr(memory, "resident", lambda: 50_000_000)
    run = run_of(llm, 500)
    forecast = memory_forecast(run)
    parts = forecast["parts"]
    bytes_a_token = llm.target.kv_bytes
    assert parts["prompt 3 tokens"] == 3 * bytes_a_token
    assert parts["max_new_tokens 500"] == 500 * bytes_a_token
    assert parts["budget 60"] == 61 * bytes_a_token
    assert parts["weights"] + parts["the rest of the program"] == 50_000_000
    assert forecast["peak"] == sum(parts.values())
    assert forecast["seconds"] is None
    assert forecast["most"] is not None
    assert forecast["most"] > 500


def test_a_partial_cache_is_no_part_of_a_run_that_never_fills_it(llm: LLM) -> None:
    assert "budget 60" not in memory_forecast(run_of(llm, 5))["parts"]


def test_as_a_command(cli: Call, tiny: Path) -> None:
    """With a short run that is timed, and without; nothing is written."""
    argv = ("plan", "hello", "--model", tiny, "--quiet")
    shown = cli(*argv, "--max-new-tokens", "100")
    assert shown.code == 0
    assert shown.err == ""
    assert shown.files == []
    for words in ("expected peak", "expected time", "5 tokens of prompt, 100 new tokens"):
        assert words in shown.out
    assert "expected time" in cli(*argv, "--regex", "[a-z]+").out
    record = json.loads(cli(*argv, "--no-measure", "--json").out)
    assert record["seconds"] is None
    assert record["peak"] == sum(record["parts"].values())
    refused = cli(*argv, "--max-new-tokens", "1000")
    assert refused.code == 2
    assert "valid: up to the model's 256 positions" in refused.error


def test_the_layers_with_keys_of_16_bits_are_named(llm: LLM) -> None:
    forecast = memory_forecast(run_of(llm, 5))
    assert forecast["int16_keys"] == []
    assert "keys have 16 bits" not in text_of(forecast)
    forecast["int16_keys"] = [0, 3]
    assert "keys have 16 bits in layers 0, 3\n" in text_of(forecast)


def test_a_mixture_reads_fewer_weights_than_it_holds() -> None:
    mixture = LLM.from_model(tiny.tiny_model("qwen3_moe"), tiny_tokenizer(), heads="none")
    run = Sequence(mixture.resources, Request([1, 2, 3], 5, "autoregressive", ignore_eos=True))
    forecast = memory_forecast(run)
    assert forecast["weights_read"] < forecast["weights"]
    assert f"a token reads {forecast['weights_read'] / 1e9:.3f} of" in text_of(forecast)


def test_a_dense_model_reads_all_its_weights(llm: LLM) -> None:
    forecast = memory_forecast(run_of(llm, 5))
    assert forecast["weights_read"] == forecast["weights"]
