"""Layers with a state: its bits do not depend on how a text was drafted, cut or copied, and faults
that other engines had are seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.tiny import RECURRENT, VOCAB, tiny_model
from tokenswift.kernels.cpu.recurrent import CReplay
from tokenswift.kv.cache import FullCache
from tokenswift.kv.passes import Segment
from tokenswift.kv.states import UNLOGGED, Recurrence, States
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import make_target

TEXT = torch.randint(2, VOCAB, (200,), generator=torch.Generator().manual_seed(4)).tolist()
#: trees whose nodes continue the text where the path says so, and are wrong elsewhere: parents, and
#: the path that is accepted
TREES: list[tuple[list[int], list[int]]] = [
    ([-1, 0, 0, 2, 3, 1, 4], [0, 2, 3, 4, 6]),
    ([-1, 0, 1, 2, 3], [0, 1, 2]),
    ([-1, 0, 0, 0], [0]),
    ([-1, 0, 1, 2], [0, 1, 2, 3]),
    ([-1, 0, 1, 0, 3, 1, 4], [0, 3, 4, 6]),
]


def target_of(family: str) -> NativeTarget:
    target = make_target(tiny_model(family))
    assert isinstance(target, NativeTarget)
    return target


def one_by_one(target: NativeTarget, count: int) -> Tensor:
    """Hidden states of the text, each token by a pass of its own, (count, D)."""
    cache = target.new_cache(count + 8)
    rows: list[Tensor] = []
    for position in range(count):
        rows.append(run(target, cache, TEXT[position : position + 1], [-1]).clone())
        cache.commit((0,))
    return torch.cat(rows)


def run(
    target: NativeTarget, cache: FullCache, tokens: Sequence[int], parents: list[int]
) -> Tensor:
    """Hidden states of a tree behind a cache's tokens."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    positions = torch.tensor(depths) + cache.length
    return target.forward(torch.tensor(tokens), positions, cache, parents).hidden


def drafted(target: NativeTarget, cache: FullCache, count: int) -> Tensor:
    """Hidden states of the text behind a cache's tokens, by trees most of whose nodes are wrong,
    (count, D)."""
    rows: list[Tensor] = []
    turn = 0
    while len(rows) < count:
        parents, path = TREES[turn % len(TREES)]
        turn += 1
        tokens = [(7 * node + turn) % VOCAB for node in range(len(parents))]
        for depth, node in enumerate(path):
            tokens[node] = TEXT[cache.length + depth]
        hidden = run(target, cache, tokens, parents)
        rows += [hidden[node].clone() for node in path]
        cache.commit(tuple(path))
    return torch.stack(rows[:count])


def drafts_change_nothing(target: NativeTarget) -> bool:
    """Whether rows behind a prompt have the bits that they have one by one."""
    cache = target.new_cache(len(TEXT) + 8)
    target.prefill(TEXT[:30], cache)
    return torch.equal(drafted(target, cache, 60), one_by_one(target, 90)[30:])


@pytest.mark.parametrize("family", RECURRENT)
def test_drafts_change_no_bit(family: str) -> None:
    assert drafts_change_nothing(target_of(family))


@pytest.mark.parametrize("family", RECURRENT)
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(family)
    expected = one_by_one(target, 150)
    for chunk in (1, 7, UNLOGGED, 150):
        monkeypatch.setattr(NativeTarget, "prefill_chunk", chunk)
        cache = target.new_cache(160)
        hidden = target.prefill(TEXT[:150], cache).hidden
        assert torch.equal(hidden, expected[150 - len(hidden) :])
        assert cache.states is not None
        assert cache.states.length == 150


@pytest.mark.parametrize("family", RECURRENT)
def test_texts_of_a_batch_keep_their_bits(family: str) -> None:
    target = target_of(family)
    expected = one_by_one(target, 60)
    caches = [target.new_cache(80) for _ in range(3)]
    lengths = (11, 33, 50)
    for cache, length in zip(caches, lengths, strict=True):
        target.prefill(TEXT[:length], cache)
    segments: list[Segment] = []
    for cache in caches:
        tokens = torch.tensor([TEXT[cache.length], 5, TEXT[cache.length + 1]])
        segments.append(Segment(tokens, torch.tensor([0, 1, 1]) + cache.length, cache, [-1, 0, 0]))
    for result, cache, length in zip(target.forward_all(segments), caches, lengths, strict=True):
        assert torch.equal(result.hidden[[0, 2]], expected[length : length + 2])
        cache.commit((0, 2))
        assert torch.equal(drafted(target, cache, 5), expected[length + 2 : length + 7])


@pytest.mark.parametrize("family", RECURRENT)
def test_a_copy_of_a_beginning_goes_on_with_the_same_bits(family: str) -> None:
    target = target_of(family)
    expected = one_by_one(target, 140)
    cache = target.new_cache(160)
    target.prefill(TEXT[:40], cache)
    target.prefill(TEXT[40:90], cache)
    drafted(target, cache, 20)
    for length in (40, 90, cache.length):
        assert cache.usable(length + 3 if length < 100 else length) == length
        copy = cache.fork(160, length)
        assert torch.equal(drafted(target, copy, 9), expected[length : length + 9])
    cache.rewind(95)
    assert cache.length == 90
    assert torch.equal(drafted(target, cache, 9), expected[90:99])


# ---- faults of other engines ---------------------------------------------------------------------


real_commit = States.commit


def commit_all(self: States, nodes: Sequence[int]) -> None:
    """As if all rows of the pass had been accepted."""
    length = self.length + len(nodes)
    real_commit(self, range(self._rows))
    self.length = length


def commit_in_bfloat16(self: States, nodes: Sequence[int]) -> None:
    """A state that is rounded after each pass, so that it depends on the passes."""
    real_commit(self, nodes)
    self.now.copy_(self.now.bfloat16())


def clamped_replay(
    self: CReplay, recurrence: Recurrence, states: Tensor, log: Tensor, nodes: Sequence[int]
) -> None:
    """Rows beyond the convolution's width are taken for the last one within it."""
    real_replay(self, recurrence, states, log, [min(node, recurrence.taps - 1) for node in nodes])


real_replay = CReplay.__call__


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("fault", [commit_all, commit_in_bfloat16])
def test_planted_faults_of_a_commit_are_seen(
    fault: object, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(family)
    monkeypatch.setattr(States, "commit", fault)
    assert not drafts_change_nothing(target)


@pytest.mark.parametrize("family", RECURRENT)
def test_an_index_clamped_to_the_convolution_is_seen(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(family)
    monkeypatch.setattr(CReplay, "__call__", clamped_replay)
    assert not drafts_change_nothing(target)


# ---- the states themselves -----------------------------------------------------------------------


def test_a_long_chain_is_committed_whole() -> None:
    target = target_of("lfm2")
    cache = target.new_cache(200)
    tokens = torch.tensor(TEXT[:UNLOGGED])
    target.forward(tokens, torch.arange(UNLOGGED), cache)
    with pytest.raises(ValueError, match=f"of a pass over {UNLOGGED}"):
        cache.commit((0, 1))


def test_marks_are_few_and_the_newest_stays() -> None:
    recurrence = Recurrence(taps=3, channels=4)
    states = States(recurrence, 2, lambda *_: None)
    for length in range(0, 100, 10):
        states.length = length
        states.mark()
    states.length = 1000
    assert states.known(95) == 90
    assert 0 < states.known(85) < 85
    assert len(states._marks) == 4


def test_memory_of_states_is_reckoned() -> None:
    target = target_of("lfm2")
    cache = target.new_cache(16)
    assert cache.states is not None
    assert target.cache_bytes(0) == target.state_bytes > cache.states.nbytes
    assert target.cache_bytes(16) - target.cache_bytes(0) == 16 * target.kv_bytes
