"""What a run will take: memory by part, the largest length that fits, time from what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, InputError, memory
from tokenswift.cli.plan import SHORT, plan, plan_many, text_of
from tokenswift.engine.request import Request
from tokenswift.engine.sequence import Sequence
from tokenswift.memory import Memory, largest, needs_of

OPTIONS: dict[str, Any] = {"tree": (2, 2), "ngrams": 3, "budget": 60, "sinks": 2, "draft": "partial"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model(max_position_embeddings=100_000), tiny_tokenizer())


def run_of(llm: LLM, new: int) -> Sequence:
    return Sequence(llm, Request([1, 2, 3], new, "tokenswift", OPTIONS, ignore_eos=True))


@pytest.mark.parametrize("free", [0, 10_000, 100_000, 333_333, 5_000_000])
def test_the_largest_length_fits_and_one_more_does_not(llm: LLM, free: int) -> None:
    """Also around the budget, where a partial cache joins in."""
    run = run_of(llm, 5)
    most = largest(llm.target, run.strategy, 3, free)

    def needed(new: int) -> int:
        return sum(n.nbytes for n in needs_of(llm.target, run.strategy, 3, new) if n.sure)

    assert needed(most + 1) > free and (most == 0 or needed(most) <= free)


def test_a_run_that_does_not_fit_is_told_what_would(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(3_000_000, 10**9))
    with pytest.raises(InputError, match=r"valid: max_new_tokens up to \d+, a dtype of two bytes$") as caught:
        run_of(llm, 90_000)
    most = int(str(caught.value).rsplit("up to ", 1)[1].split(",")[0])
    assert run_of(llm, most).max_new_tokens == most
    with pytest.raises(InputError, match=f"up to {most},"):
        run_of(llm, most + 1)
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(100, 10**9))
    with pytest.raises(InputError, match="valid: a smaller ngrams"):  # the tree's rows alone are too many
        run_of(llm, 1)


def test_the_parts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is there once: the sum is what the process holds and what the run adds."""
    monkeypatch.setattr(memory, "resident", lambda: 50_000_000)
    run = run_of(llm, 500)
    found = plan(run, False)
    parts = {part.name: part.nbytes for part in found.parts}
    row, nodes = llm.target.kv_bytes, run.strategy.max_nodes
    assert parts["full cache"] == (503 + nodes) * row
    assert parts["partial cache (budget 60)"] == 61 * row
    assert parts["logits of a step"] == 3 * nodes * 260 * 4
    assert parts["weights"] + parts["program, libraries, work space"] == 50_000_000
    assert found.peak == sum(parts.values()) and len(parts) == 6
    assert found.seconds is None and found.most is not None and found.most > 500
    short = {part.name for part in plan(run_of(llm, 5), False).parts}
    assert "partial cache (budget 60)" not in short  # the text never gets that long


def test_a_measured_plan(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement is a run of the same kind, shorter; it leaves the model as it was."""
    before = llm.generate([1, 2, 3], 20, ignore_eos=True).token_ids
    run, made = run_of(llm, 2000), list[Request]()
    real = Sequence.__init__

    def noted(self: Sequence, llm: LLM, request: Request, *more: Any) -> None:
        made.append(request)
        real(self, llm, request, *more)

    monkeypatch.setattr(Sequence, "__init__", noted)
    found = plan(run, True)
    assert [one.max_new_tokens for one in made] == [SHORT] and made[0].strategy == "tokenswift"
    assert found.speed is not None and found.speed.at == 3 and 1.0 <= found.speed.rate <= 7
    assert found.range is not None and found.seconds is not None
    assert found.seconds == found.speed.expected(3, 2000)
    assert 0 < found.range[0] < found.seconds < found.range[1]
    assert llm.generate([1, 2, 3], 20, ignore_eos=True).token_ids == before


def test_a_plan_of_many(llm: LLM) -> None:
    """As many at once as there are for a node; twice the nodes, half the time; nothing measured, no time."""
    requests = [Request([1, 2, 3], new, "tokenswift", OPTIONS, ignore_eos=True) for new in (40, 60, 50, 50)]
    found = plan_many(llm, requests, 2, "auto", True)
    assert (found.texts, found.prompt, found.new, found.nodes, found.at_once) == (4, 12, 200, 2, 2)
    assert found.peak == sum(part.nbytes for part in found.parts)
    assert found.parts[-1].name == "caches of 1 more texts" and found.rate is not None and found.rate > 0
    shown = text_of(found, True)
    for words in ("4 texts, 12 tokens of prompts, 200 new tokens; 2 nodes, 2 concurrent sequences on each",
                  "expected peak of a node", "expected time 0:0", "node hours; a node writes"):  # fmt: skip
        assert words in shown
    assert plan_many(llm, requests, 1, 3, False).seconds is None
