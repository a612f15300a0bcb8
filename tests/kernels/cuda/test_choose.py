"""The choice rule in one table there and one back: equal to the sampler's own, for every rule and context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokenswift.config import SamplingParams
from tokenswift.interfaces import LaterTree
from tokenswift.kernels.cuda.choose import DeviceRanker
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.sampling.choice import RefusedRow, Sampler
from tokenswift.sampling.noise import Noise, gumbel_rows, signed_key
from tokenswift.sampling.ranking import LogitRows, Subset
from tokenswift.spec.accept import accept_exact, accept_later
from tokenswift.types import DraftTree, InputError

CPU, VOCAB = torch.device("cpu"), 90
RULES: list[dict[str, Any]] = [
    {"greedy": True},
    {"greedy": True, "repetition_penalty": 1.3, "penalty_window": 7},
    {"temperature": 0.7},
    {"min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 1024},
    {"top_p": 0.8, "repetition_penalty": 1.5, "penalty_window": 3},
    {"top_k": 5, "temperature": 1.4},
    {"eta_cutoff": 0.02, "repetition_penalty": 1.1, "penalty_window": 12},
]


def rows_of(rule: int, history: int, coupled: bool, limited: bool, shares: bool) -> LogitRows:
    """Rows with paths of all lengths, unknown tokens between some of them and their place, and all widths."""
    made = torch.Generator().manual_seed(100 * rule + history)
    text = torch.randint(VOCAB, (history,), generator=made).tolist()
    paths = [torch.randint(VOCAB, (n,), generator=made).tolist() for n in (0, 1, 3, 2, 0, 9, 3)]
    gaps = (0, 0, 0, 2, 5, 0, 1)
    positions = [len(text) + len(path) + gap for path, gap in zip(paths, gaps, strict=True)]
    subset = Subset(torch.randperm(VOCAB, generator=made)[:40], VOCAB) if limited else None
    logits = 4 * torch.randn(len(paths), 40 if limited else VOCAB, generator=made)
    return LogitRows(logits, text, paths, positions, [1, 4, 2, 1, 3, 4, 1], coupled, subset, shares)


def ranker(params: SamplingParams) -> DeviceRanker:
    return DeviceRanker(params, Graphs(CPU), CPU, Tensor.tolist)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("rule", range(len(RULES)))
def test_rankings_are_the_samplers(rule: int, coupled: bool, limited: bool) -> None:
    params = SamplingParams(seed=5, **RULES[rule])
    sampler, device = Sampler(params, VOCAB), ranker(params)
    for history in (40, 2, 0):
        for shares in (True, False):
            rows = rows_of(rule, history, coupled, limited, shares)
            found, expected = device.rank(rows), sampler.candidates(rows)
            assert isinstance(found, list)
            for one, other in zip(found, expected, strict=True):
                assert one.tokens == other.tokens
                assert one.values == pytest.approx(other.values, rel=1e-6)
                assert one.shares == pytest.approx(other.shares, rel=1e-5)
            alone = [device.rank(rows.one(row)) for row in range(len(rows.paths))]
            assert [one for part in alone if isinstance(part, list) for one in part] == found


@pytest.mark.parametrize("rule", [4, 6])
def test_sums_are_made_of_sixteen_rows_at_once(rule: int) -> None:
    """Whatever the number of rows: a library may add up a row in another order beside more of them. Top-p's
    sums are of float64, and eta's a logsumexp."""
    seen: dict[str, set[int]] = {}

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name in ("sum", "cumsum", "logsumexp", "_softmax", "_log_softmax", "amax"):
                seen.setdefault(name, set()).add(len(args[0]))
            return func(*args, **(kwargs or {}))

    params, one = SamplingParams(seed=5, **RULES[rule]), rows_of(rule, 40, True, False, True)
    device, expected = DeviceRanker(params, None, CPU, Tensor.tolist), None
    for count in (1, 7, 16, 17, 70):
        rows = LogitRows(
            one.logits[[2] * count], one.history, [one.paths[2]] * count, [43] * count, [2] * count, True
        )
        with Sums():
            found = device.rank(rows)
        assert isinstance(found, list) and found == [found[0]] * count
        assert expected is None or found[0] == expected
        expected = found[0]
    assert {size for sizes in seen.values() for size in sizes} == {16}
    assert ("logsumexp" in seen) == (rule == 6) and ("cumsum" in seen) == (rule == 4) and "sum" in seen


def test_paths_may_still_be_on_the_device() -> None:
    params, rows = SamplingParams(seed=5, **RULES[3]), rows_of(3, 40, True, False, True)
    known = [token for path in rows.paths for token in path]
    places = iter(range(-1, -1 - len(known), -1))
    hidden = replace(rows, paths=[[next(places) for _ in path] for path in rows.paths])
    device = ranker(params)
    asked = device.ask(hidden, torch.tensor(known))
    expected = device.rank(rows)
    assert device.answer([asked]) == [expected] and isinstance(expected, list)
    assert asked.best[:, 0].tolist() == [one.tokens[0] for one in expected]
    with pytest.raises(InputError, match="token id"):
        device.ask(hidden, torch.tensor(known[:-1]))


def test_a_refused_row_matters_on_the_way_alone() -> None:
    params = SamplingParams(seed=5, **RULES[3])
    sampler, plain = Sampler(params, VOCAB, ranker=ranker(params)), Sampler(params, VOCAB)
    logits, history = rows_of(3, 40, True, False, False).logits[:4], list(range(9))
    right = plain.choose(logits[:1], history, [[]])[0]
    places = DraftTree((8, -1, -2, -1), (-1, 0, 0, 1), (0, 1, 1, 2), ("target", *["head"] * 3), 2)
    tree = replace(places, tokens=(8, right, (right + 1) % VOCAB, right))
    later = LaterTree(places, torch.tensor(tree.tokens[1:3]), [], lambda answers: (tree, range(4)))
    logits[2] = torch.nan
    found = accept_later(later, logits, history, sampler)
    assert found[1] == accept_exact(tree, logits, history, plain) and len(found[1].nodes) > 1
    logits[1] = torch.nan
    with pytest.raises(RefusedRow, match="position 10 hold NaN"):
        accept_later(later, logits, history, sampler)


def test_a_row_that_cannot_be_chosen_from_is_named() -> None:
    rows = rows_of(3, 40, True, False, False)
    rows.logits[4, 7] = torch.nan
    assert ranker(SamplingParams(seed=1)).rank(rows) == 4
    rows.logits[2] = -torch.inf
    assert ranker(SamplingParams(seed=1)).rank(rows) == 2
    with pytest.raises(RefusedRow, match="position 43 hold no finite maximum"):
        Sampler(SamplingParams(seed=1), VOCAB, ranker=ranker(SamplingParams(seed=1))).candidates(rows)


def test_more_rows_than_a_recorded_pass_has() -> None:
    params = SamplingParams(seed=5, **RULES[3])
    one = rows_of(3, 40, True, False, True)
    rows = LogitRows(
        one.logits[[0] * 70], one.history, [one.paths[2]] * 70, [43] * 70, [2] * 70, coupled=True
    )
    found = ranker(params).rank(rows)
    assert isinstance(found, list) and found == [found[0]] * 70
    assert found[0].tokens == Sampler(params, VOCAB).candidates(rows)[0].tokens


def test_noise_by_keys_is_the_noise_of_positions() -> None:
    """Made in numbers that any device has: the same bits as on the host."""
    keys = torch.tensor([signed_key(2**62 + 3, position) for position in (0, 7, 100_000)])
    noise = Noise(2**62 + 3, VOCAB)
    expected = torch.stack([noise.at(position) for position in (0, 7, 100_000)])
    assert torch.equal(gumbel_rows(keys, VOCAB), expected)
