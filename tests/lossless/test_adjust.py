"""Penalties, DRY, biases and what may not come: every strategy, batch and run that is taken up
writes what plain decoding writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import rare
from tests.lossless import toy
from tests.lossless.enumeration import joint_distribution
from tests.lossless.test_strategies import PROMPT, llm_of, runs
from tests.lossless.test_tokens import same
from tests.sampling.test_adjust import losses
from tests.stats import chi_square
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams, resume
from tokenswift.sampling.text_rules import TextRules

WARM: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0, "temperature": 0.7}
SETTINGS: dict[str, dict[str, Any]] = {
    "counted": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "penalty_window": 30},
    "dry": {
        "dry_multiplier": 3.0,
        "dry_allowed_length": 1,
        "dry_breakers": [[5]],
        "temperature": 0.1,
    },
    "words": {"bad_words": [[7], [8, 9], [11, 12]], "logit_bias": {8: 4, 9: 3, 11: 4, 12: 3}},
    "all": {
        "repetition_penalty": 1.1,
        "penalty_window": 40,
        "frequency_penalty": -0.6,
        "dry_multiplier": 1.0,
        "logit_bias": {8: 3, 9: 3},
        "bad_words": [[8, 9]],
        "min_p": 0.02,
    },
}


def params_of(setting: str, seed: int) -> SamplingParams:
    return SamplingParams(**WARM | SETTINGS[setting], seed=seed)


@pytest.mark.parametrize("setting", ["dry", "all", rare("counted"), rare("words")])
def test_strategies_write_what_plain_decoding_writes(setting: str) -> None:
    llm = llm_of("llama")
    draft = tiny_model("llama", seed=1)
    longest = 0.0
    for seed, greedy in ((1, False), (2, False), (3, True)):
        params = SamplingParams(**WARM | SETTINGS[setting], seed=seed, greedy=greedy)
        plain = llm.generate(PROMPT, 90, "autoregressive", sampling=params, ignore_eos=True)
        bare = {**WARM, "temperature": params.temperature, "seed": seed, "greedy": greedy}
        off = llm.generate(PROMPT, 90, "autoregressive", **bare, ignore_eos=True)
        assert plain.token_ids != off.token_ids
        for strategy, options in [*runs(draft)[seed::3], ("auto", {})]:
            got = llm.generate(PROMPT, 90, strategy, options, params, ignore_eos=True)
            assert same(plain, got), (strategy, options, params)
            longest = max(longest, got.metrics.mean_acceptance_length)
    assert longest > 1.1


def test_the_law_of_all_of_them() -> None:
    """Whole runs of drafts on a toy against its logits with what tokens lose by the definitions."""
    llm = toy.toy_llm(tiny_model("llama"), "tokenswift")
    fields: dict[str, Any] = {
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "dry_multiplier": 1.0,
    }
    fields |= {"dry_breakers": [[5]], "logit_bias": {2: 0.8, 3: 0.5}, "bad_words": [[4, 1], [1, 1]]}
    params = SamplingParams(**{**WARM, "temperature": 1.0}, **fields)
    rules = TextRules(len(toy.PROMPT), breakers=(5,), words=((4, 1), (1, 1)))
    model = llm.model

    def after(more: tuple[int, ...]) -> list[float]:
        text = [*toy.PROMPT, *more]
        with torch.inference_mode():
            scores = (
                model(input_ids=torch.tensor([text]), use_cache=False)
                .logits[0, -1]
                .double()
                .clone()
            )
            for token, loss in losses(text, len(text), params, rules).items():
                scores[token] -= loss
            return scores.softmax(-1).tolist()

    seen = list(toy.outcomes(llm, "tokenswift", params, 400))
    assert chi_square(seen, joint_distribution(after, toy.LENGTH)) > 1e-4


def test_a_batch_writes_what_each_text_writes_alone() -> None:
    llm = llm_of("llama")
    params = params_of("all", 4)
    alone = [
        llm.generate(PROMPT[i:], 60, sampling=params, ignore_eos=True).token_ids for i in range(3)
    ]
    prompts = [PROMPT[i:] for i in range(3)]
    together = llm.generate_many(prompts, 60, sampling=params, ignore_eos=True)
    assert [one.token_ids for one in together] == alone


def test_a_bad_word_never_comes_and_its_parts_do() -> None:
    llm = llm_of("llama")
    tokens = llm.generate(PROMPT, 120, sampling=params_of("words", 5), ignore_eos=True).token_ids
    pairs = set(zip(tokens, tokens[1:], strict=False))
    assert 7 not in tokens
    assert not pairs & {(8, 9), (11, 12)}
    assert {8, 9, 11, 12} <= set(tokens)


def test_a_run_is_taken_up_with_its_settings(tmp_path: Path) -> None:
    """The journal keeps them; what counts new tokens does not begin anew."""
    llm = llm_of("llama")
    params = SamplingParams(**WARM | SETTINGS["all"], dry_breakers=[[5]], min_tokens=50, seed=6)
    stop = [[found, *more] for found, *more in _pairs(llm, params)]
    uninterrupted = llm.generate(PROMPT, 90, sampling=params, stop=stop)
    assert uninterrupted.finish_reason == "stop"
    assert len(uninterrupted.token_ids) > 50
    part = llm.generate(PROMPT, 30, sampling=params, stop=stop, run_dir=tmp_path / "run")
    assert len(part.token_ids) == 30
    assert part.finish_reason == "length"
    rest = resume(tmp_path / "run", 90, llm=llm)
    assert same(uninterrupted, rest)
    assert rest.finish_reason == "stop"
    assert resume(tmp_path / "run", 95, llm=llm).token_ids == uninterrupted.token_ids


def _pairs(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    """Two tokens that stand behind each other in the text before the 50th token, and two after
    it."""
    tokens = llm.generate(PROMPT, 80, sampling=params, ignore_eos=True).token_ids
    return [tuple(tokens[20:22]), tuple(tokens[60:62])]


def test_no_end_before_its_time() -> None:
    """Ends are the model's, and single tokens that are to stop; without the rule they come at
    once."""
    llm = llm_of("llama")
    biases = dict.fromkeys(range(3, VOCAB, 2), -100.0)
    stop = [[t] for t in range(2, VOCAB, 4)]
    for least in (0, 1, 17):
        params = SamplingParams(**WARM, seed=7, logit_bias=biases, min_tokens=least)
        for strategy in ("autoregressive", "tokenswift"):
            options = {"tree": (3, 2)} if strategy == "tokenswift" else {}
            got = llm.generate(PROMPT, 60, strategy, options, params, stop=stop)
            ended = next(i for i, t in enumerate(got.token_ids) if [t] in stop)
            assert least <= ended == len(got.token_ids) - 1
            assert got.finish_reason in ("stop", "eos")
