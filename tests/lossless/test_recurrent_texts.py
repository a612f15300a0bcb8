"""Texts of models with recurrent layers: the same tokens by drafts and without, after kills, in a
batch, and behind a beginning that another text has read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tokenswift
from tests.families import rare
from tests.lossless.test_recurrent import run, target_of
from tests.runs.common import Stop, after
from tests.speculation.drafters.prices import fix_prices
from tests.tiny import RECURRENT, VOCAB, predictable, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.kv.passes import Segment
from tokenswift.kv.states import UNLOGGED
from tokenswift.models.decoder import NativeTarget

HOT = SamplingParams(seed=5, temperature=1.0, repetition_penalty=1.0)
CHAT = torch.randint(2, VOCAB, (180,), generator=torch.Generator().manual_seed(9)).tolist()
FEW = 240
MANY = 3000


def llm_of(family: str) -> LLM:
    model = predictable(tiny_model(family, max_position_embeddings=4096))
    return LLM.from_model(model, heads=None)


def written(llm: LLM, count: int, strategy: str = "autoregressive") -> list[int]:
    return llm.generate(CHAT, count, strategy, sampling=HOT, ignore_eos=True).token_ids


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive drafting drafts on any machine."""
    fix_prices(monkeypatch, 0.05)


# ---- one text in many ways -----------------------------------------------------------------------


def by_drafts(llm: LLM, count: int, folder: Path) -> list[int]:
    result = llm.generate(CHAT, count, "auto", sampling=HOT, ignore_eos=True)
    assert result.metrics.mean_acceptance_length > 1.1
    return result.token_ids


def after_a_kill(llm: LLM, count: int, folder: Path) -> list[int]:
    """Drafted up to some token, and from there on again."""
    with pytest.raises(Stop):
        llm.generate(
            CHAT,
            count,
            "auto",
            sampling=HOT,
            ignore_eos=True,
            run_dir=folder,
            on_step=after(count // 25),
        )
    return tokenswift.resume(folder, llm=llm).token_ids


def in_a_batch(llm: LLM, count: int, folder: Path) -> list[int]:
    """With three others of other lengths."""
    prompts = [CHAT[:7], CHAT, CHAT[40:150], CHAT[:170]]
    results = llm.generate_many(prompts, count, sampling=HOT, at_once=4, ignore_eos=True)
    return results[1].token_ids


def behind_a_shared_beginning(llm: LLM, count: int, folder: Path) -> list[int]:
    """Behind a text that shares most of the prompt, of which a copy is taken."""
    with Scheduler(llm) as scheduler:
        prompts = ([*CHAT[:150], *CHAT[:20]], CHAT)
        for prompt in prompts:
            request = Request(prompt, count, "auto", None, HOT, ignore_eos=True)
            ticket = scheduler.submit(request)
            assert ticket.wait(600)
        assert scheduler.figures().reused > 0
    return ticket.result.token_ids


def of_a_prompt_read_before(llm: LLM, count: int, folder: Path) -> list[int]:
    prefilled = llm.prefill(CHAT)
    prefilled.generate(20, sampling=SamplingParams(seed=1), ignore_eos=True)
    return prefilled.generate(count, sampling=HOT, ignore_eos=True).token_ids


WAYS: list[Callable[[LLM, int, Path], list[int]]] = [
    by_drafts,
    after_a_kill,
    in_a_batch,
    behind_a_shared_beginning,
    of_a_prompt_read_before,
]
SIZES = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
#: of mixtures only where there is time
SOME = [name if not name.endswith("_moe") else rare(name) for name in RECURRENT]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("family", SOME)
def test_a_chat_has_the_same_tokens_in_every_way(family: str, count: int, tmp_path: Path) -> None:
    llm = llm_of(family)
    expected = written(llm, count)
    assert len(set(expected)) > 5
    for way in WAYS:
        assert way(llm, count, tmp_path / way.__name__) == expected, way.__name__


@pytest.mark.parametrize("family", SOME)
def test_sixty_four_kills(family: str, tmp_path: Path) -> None:
    """Of one run, wherever they come: a few steps each time."""
    llm = llm_of(family)
    rnd = random.Random(3)
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        llm.generate(
            CHAT, 300, "auto", sampling=HOT, ignore_eos=True, run_dir=folder, on_step=after(2)
        )
    for _ in range(63):
        with pytest.raises(Stop):
            tokenswift.resume(folder, llm=llm, on_step=after(rnd.choice((1, 1, 2))))
    assert tokenswift.resume(folder, llm=llm).token_ids == written(llm, 300)


# ---- passes --------------------------------------------------------------------------------------

DEPTH = 4
#: a tree in which every node but those of the last level has two children
BRANCHES = [(node - 1) // 2 if node else -1 for node in range(2 ** (DEPTH + 1) - 1)]


def path_to(node: int) -> list[int]:
    path = [node]
    while BRANCHES[path[0]] >= 0:
        path.insert(0, BRANCHES[path[0]])
    return path


def each_alone(target: NativeTarget, text: list[int], nodes: list[int]) -> dict[int, Tensor]:
    """Hidden states of a tree's nodes behind a text, each path token by token."""
    states: dict[int, Tensor] = {}
    for leaf in range(len(BRANCHES) // 2, len(BRANCHES)):
        cache = target.new_cache(len(text) + 40)
        target.prefill(text, cache)
        for node in path_to(leaf):
            states[node] = run(target, cache, [nodes[node]], [-1])[0].clone()
            cache.commit((0,))
    return states


@pytest.mark.parametrize("family", RECURRENT)
def test_a_tree_that_branches_at_every_depth(family: str) -> None:
    """Every node has the bits that it has alone, and any path may be accepted up to any depth."""
    target = target_of(family)
    rnd = random.Random(1)
    text = CHAT[:30]
    cache = target.new_cache(120)
    target.prefill(text, cache)
    for accepted in range(1, DEPTH + 2):
        nodes = [rnd.randrange(VOCAB) for _ in BRANCHES]
        hidden = run(target, cache, nodes, BRANCHES)
        alone = each_alone(target, text, nodes)
        for node, row in alone.items():
            assert torch.equal(hidden[node], row), node
        leaf = rnd.randrange(len(BRANCHES) // 2, len(BRANCHES))
        path = path_to(leaf)[:accepted]
        cache.commit(tuple(path))
        text = [*text, *(nodes[node] for node in path)]


@pytest.mark.parametrize("family", RECURRENT)
def test_a_batch_of_prompts_and_trees_of_unlike_lengths(family: str) -> None:
    """Nothing, one token, and more than fit into a log are before them; one reads a prompt."""
    target = target_of(family)
    befores = (0, 1, 2, UNLOGGED + 30, 40)
    rows: list[tuple[list[int], list[int] | None]] = [
        (CHAT[:90], None),
        (CHAT[1:5], [-1, 0, 0, 2]),
        (CHAT[2:3], [-1]),
        (CHAT[50:57], [-1, 0, 1, 0, 3, 3, 5]),
        (CHAT[40:70], None),
    ]
    alone: list[Tensor] = []
    segments: list[Segment] = []
    for before, (tokens, parents) in zip(befores, rows, strict=True):
        for together in (False, True):
            cache = target.new_cache(250)
            if before:
                target.prefill(CHAT[:before], cache)
            depths: list[int] = []
            for node in range(len(tokens)):
                parent = node - 1 if parents is None else parents[node]
                depths.append(0 if parent < 0 else depths[parent] + 1)
            positions = torch.tensor(depths) + before
            ids = torch.tensor(tokens)
            if together:
                segments.append(Segment(ids, positions, cache, parents))
            else:
                alone.append(target.forward(ids, positions, cache, parents).hidden.clone())
    for result, expected in zip(target.forward_all(segments), alone, strict=True):
        assert torch.equal(result.hidden, expected)
