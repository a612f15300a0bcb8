"""What an EAGLE-3 drafter computes, row by row, against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.default_model import prompt_of
from tests.kernels.cuda.cases import backend_on_cpu
from tests.speculation.drafters.prices import always, fix_prices
from tests.speculation.eagle.reference import EagleCache, EagleReference
from tests.speculation.eagle_drafters import random_eagle
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import backend_for
from tokenswift.sampling.rows import LogitRows, Ranked
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.control import Control
from tokenswift.speculation.drafters.base import Candidates
from tokenswift.speculation.drafters.eagle import Branches
from tokenswift.speculation.eagle.config import EagleWeights
from tokenswift.speculation.eagle.model import WINDOW, EagleModel
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.types import InputError

TEXT = torch.randint(2, VOCAB, (60,), generator=torch.Generator().manual_seed(6)).tolist()
SAMPLINGS = {
    "greedy": SamplingParams(greedy=True, repetition_penalty=1.0),
    "noisy": SamplingParams(seed=4),
}
NARROW = frozenset({"narrow", "fc_norm"})
#: drafters in every form
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "names": {"names": 41, "norm_before_residual": True},
    "shared": {"shared": True, "names": 41, "parts": frozenset({"qk_norm"})},
    "biased": {"shared": True, "parts": frozenset({"qkv_bias", "o_bias", "fc_norm"})},
    "3.1": {"norm_output": True, "head_dim": 8, "parts": frozenset({"norm_before_fc"})},
    "narrow": {"shared": True, "names": 41, "hidden": 32, "head_dim": 8, "parts": NARROW},
}


def drafts_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter drafts in every step, as far as it may, at no cost."""
    fix_prices(monkeypatch)
    monkeypatch.setattr(Control, "choose_mode", always("eagle"))


def reference_of(weights: EagleWeights, model: Any) -> EagleReference:
    return EagleReference(
        weights,
        embedding=model.model.embed_tokens.weight.detach(),
        lm_head=model.lm_head.weight.detach(),
        window=min(weights.config.window or WINDOW, weights.config.trained),
    )


def backends() -> list[Backend]:
    """The kernels, the reference in torch, and the CUDA backend with its kernels' work by torch."""
    return [backend_for(), Backend(), backend_on_cpu()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", backends(), ids=["kernels", "torch", "cuda"])
def test_kernels_give_the_references_rows(form: str, backend: Backend) -> None:
    """A text in three passes, then a tree behind it, depth by depth; over keys that lie before the
    window."""
    weights = random_eagle(window=9, std=0.1, **FORMS[form])
    model = tiny_model("llama")
    target = NativeTarget(model, backend, rotary_of(model))
    eagle = EagleModel(weights, target)
    reference = reference_of(weights, model)
    features = torch.randn(3, 40, 48, generator=torch.Generator().manual_seed(1))
    rows = reference.fuse(features.transpose(0, 1).flatten(1))
    keys = EagleCache()
    hidden, logits = reference.step(torch.tensor(TEXT[1:41]), rows, torch.arange(40), keys)
    cache = eagle.new_cache()
    parts = []
    for start, end in ((0, 1), (1, 30), (30, 40)):
        inputs = eagle.fuse(features[:, start:end])
        parts.append(eagle.run(TEXT[start + 1 : end + 1], inputs, start, cache))
        cache.commit(tuple(range(end - start)))
    state = torch.cat(parts)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(eagle.fed_back(state), hidden, **close)
    torch.testing.assert_close(eagle.logits(state), logits, **close)
    sampler = target.sampler(SamplingParams())
    sequence = SequenceState(TEXT[:41], 41, target.new_cache(50), target, sampler)
    candidates = Candidates(sequence, sampler, True)
    tree = candidates.tree
    branches = Branches(eagle, cache, candidates, 39, state[-1:])
    torch.testing.assert_close(branches.logits([0]), logits[-1:], **close)
    # both at first, then those below the first alone, and one of these
    for parents in ((0, 0), (1, 1, 2), (3, 4), (6, 6), (8,)):
        nodes = [tree.add(parent, token) for token, parent in enumerate(parents, 5 * len(tree))]
        drafted = branches.logits(nodes)
        for node, row in zip(nodes, drafted.split(1), strict=True):
            keys.cut(40)
            last = hidden[-1:]
            for depth, token in enumerate(tree.path(node)):
                last, logits = reference.step(
                    torch.tensor([token]), last, torch.tensor([40 + depth]), keys
                )
            torch.testing.assert_close(row, logits, **close)
    assert cache.length == 40 + 4  # the path that all of the last pass have in common


def test_a_narrow_drafter_is_ranked_with_half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts_always(monkeypatch)
    noises = set[tuple[str, float]]()
    real = Sampler.candidates

    def candidates(self: Sampler, rows: LogitRows) -> list[Ranked]:
        noises.add((form if rows.subset else "target", rows.noise))
        return real(self, rows)

    monkeypatch.setattr(Sampler, "candidates", candidates)
    for form in ("shared", "narrow"):
        llm = LLM.from_model(
            tiny_model("llama"), heads=None, eagle=random_eagle(window=9, **FORMS[form])
        )
        llm.generate(TEXT, 20, sampling=SAMPLINGS["noisy"])
    assert noises == {("target", 1.0), ("shared", 1.0), ("narrow", 0.5)}


def test_the_shipped_drafter_is_often_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts for the default model, which writes the same text, and for no other."""
    drafts_always(monkeypatch)
    llm = LLM("smollm2-135m", dtype="float32", device="cpu", heads=None, eagle="shipped")
    params = SamplingParams(seed=2, temperature=0.7, min_p=0.1, repetition_penalty=1.0)
    prompt = prompt_of("harbour", 60)
    plain = llm.generate(prompt, 40, "autoregressive", sampling=params)
    drafted = llm.generate(prompt, 40, "auto", sampling=params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.steps < 30
    with pytest.raises(InputError, match="eagle.*vocab_size is 49152; valid: "):
        LLM.from_model(tiny_model("llama"), heads=None, eagle="shipped")
