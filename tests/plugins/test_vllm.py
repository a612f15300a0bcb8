"""The proposer for vLLM: drafts follow each text, whatever row it has; vLLM makes it where that is there."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace

import numpy as np
import pytest

from tokenswift.plugins.vllm import LookupProposer
from tokenswift.spec.drafters.lookup import Matches

MOST, LIMIT = 4, 200


def config(most: int = MOST) -> SimpleNamespace:
    """What the proposer reads of a ``VllmConfig``."""
    speculative = SimpleNamespace(
        model="tokenswift.plugins.vllm.LookupProposer", num_speculative_tokens=most, method="custom_class"
    )
    return SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(max_model_len=LIMIT))


class Batch:
    """Rows of texts, as vLLM's batch holds them: with rubbish behind each text."""

    def __init__(self, rows: int) -> None:
        self.ids = np.random.default_rng(0).integers(0, 50, (rows, LIMIT + 10), dtype=np.int32)

    def ask(
        self, proposer: LookupProposer, texts: list[list[int]], sampled: list[list[int]]
    ) -> list[list[int]]:
        for row, text in enumerate(texts):
            self.ids[row, : len(text)] = text
        lengths = np.array([len(text) for text in texts] + [0] * (len(self.ids) - len(texts)), dtype=np.int32)
        return proposer.propose(sampled, lengths, self.ids, slot_mappings=None)


def alone(text: list[int], parts: list[list[int]], most: int = MOST) -> list[list[int]]:
    """The drafts of one text that grows by parts, made without a batch."""
    matches, drafts = Matches(penalised=False), []
    for part in [text, *parts]:
        matches.learn(part)
        matches.extend(part)
        drafts.append([token for token, _ in matches.predict()[:most]])
    return drafts


def test_a_text_that_repeats_is_drafted_on() -> None:
    drafts = Batch(1).ask(LookupProposer(config()), [[1, 2, 3, 4, 5, 9, 1, 2, 3]], [[3]])
    assert drafts == [[4, 5, 9, 1]]


def test_texts_keep_what_was_learnt_of_them_in_whatever_row_they_are() -> None:
    chance = random.Random(1)
    texts = [[chance.randrange(3) for _ in range(20)] for _ in range(4)]
    parts = [[[chance.randrange(3) for _ in range(chance.randrange(1, 4))] for _ in range(12)] for _ in texts]
    expected = [alone(text, part) for text, part in zip(texts, parts, strict=True)]
    proposer, batch, order = LookupProposer(config()), Batch(4), list(range(4))
    drafted = 0
    for step in range(13):
        now = [texts[i] + [token for part in parts[i][:step] for token in part] for i in order]
        found = batch.ask(proposer, now, [text[-1:] for text in now])
        assert found == [expected[i][step] for i in order]
        drafted += sum(map(len, found))
        chance.shuffle(order)
        order = order[: chance.choice((3, 4))] if step > 6 else order  # texts end, and others move up
    assert drafted > 100


def test_a_row_that_another_text_has_taken_is_read_anew() -> None:
    proposer, batch = LookupProposer(config()), Batch(1)
    batch.ask(proposer, [[1, 2, 3, 4, 1, 2, 3]], [[3]])
    assert batch.ask(proposer, [[5, 6, 7, 8, 5, 6, 7]], [[7]]) == alone([5, 6, 7, 8, 5, 6, 7], [])


def test_no_drafts_without_a_new_token_or_room() -> None:
    proposer, batch = LookupProposer(config()), Batch(2)
    text = [1, 2, 3] * 50
    assert batch.ask(proposer, [text, text[:9]], [[], [3]]) == [[], [1, 2, 3, 1]]
    full = (text * 2)[: LIMIT - 2]
    assert batch.ask(proposer, [full, text[:10]], [[full[-1]], [1]])[0] == alone(full, [])[0][:2]
    assert batch.ask(proposer, [(text * 2)[:LIMIT], text[:11]], [[1], [2]])[0] == []


def test_vllm_makes_it_and_asks_it_as_it_answers() -> None:
    made = pytest.importorskip("vllm.v1.spec_decode.custom_class_proposer", exc_type=ImportError)
    from vllm.config import SpeculativeConfig  # type: ignore[import-not-found]

    path = "tokenswift.plugins.vllm.LookupProposer"
    settings = SpeculativeConfig(model=path, num_speculative_tokens=MOST)
    assert settings.method == "custom_class"
    proposer = made.create_custom_proposer(
        SimpleNamespace(speculative_config=settings, model_config=config().model_config)
    )
    assert isinstance(proposer, LookupProposer)
    inspect.signature(proposer.propose).bind([[3]], np.zeros(1), np.zeros((1, 1)), slot_mappings=None)
    assert Batch(1).ask(proposer, [[1, 2, 3, 4, 5, 9, 1, 2, 3]], [[3]]) == [[4, 5, 9, 1]]
