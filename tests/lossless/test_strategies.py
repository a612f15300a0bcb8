"""Every strategy against plain decoding: token equality, joint distribution, what each must
accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.default_model import default_llm, prompt_of
from tests.families import rare
from tests.lossless import toy
from tests.lossless.test_tokens import random_heads, same
from tests.stats import chi_square
from tests.tiny import FAMILIES, RECURRENT, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import backend_for
from tokenswift.speculation.drafters.draft_model import ModelContext
from tokenswift.speculation.methods import STRATEGIES
from tokenswift.types import InputError

PAPER = {"min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 40}
SMALL = {"budget": 24, "sinks": 3}
PROMPT = torch.randint(2, VOCAB, (60,), generator=torch.Generator().manual_seed(6)).tolist()


def llm_of(family: str, kind: str = "medusa") -> LLM:
    """A tiny model with untrained heads."""
    return LLM.from_model(tiny_model(family), heads=random_heads(kind, 48, VOCAB))


def runs(draft: Any) -> list[tuple[str, dict[str, Any]]]:
    """Every strategy in every form, over partial caches that are smaller than the text."""
    return [
        ("tokenswift", {"tree": (1, 3, 3), "ngrams": 4, "draft": "partial", **SMALL}),
        ("tokenswift", {"tree": (2, 2), "draft": "partial", "cache": "partial", **SMALL}),
        ("medusa", {"tree": (3, 2, 2)}),
        ("medusa", {"tree": (1, 1), "candidates": "probability"}),
        ("magicdec", {"gamma": 3, "kv": "snapkv", **SMALL}),
        ("magicdec", {"gamma": 2, "kv": "streaming", "candidates": "probability", **SMALL}),
        ("magicdec", {"gamma": 4, "kv": "streaming", "draft_model": draft, **SMALL}),
        ("magicdec", {"gamma": 1, "kv": "snapkv", "draft_model": draft, **SMALL}),
        ("triforce", {"gamma": 4, "draft_model": draft, "chunk": 4, "draft_budget": 12, **SMALL}),
        ("triforce", {"gamma": 3, "inner_gamma": 3, "draft_model": draft, "refresh": 0, **SMALL}),
    ]


def draft_for(family: str) -> Any:
    """A draft model with one set of angles, and without states."""
    others = ("olmo3", "gemma3", *RECURRENT)
    return tiny_model("llama" if family in others else family, seed=1)


BASIC = ("llama", "qwen2", "qwen3", "mistral")  # the others differ in their positions or windows


@pytest.mark.parametrize(
    "family", [name if name in ("llama", "gemma3") else rare(name) for name in FAMILIES]
)
def test_tiny_models_of_every_family(family: str) -> None:
    """Each strategy, both samplings, two seeds; the forms of a strategy take turns with the
    seeds."""
    llm = llm_of(family)
    draft = draft_for(family)
    longest: dict[str, float] = {}
    new = 150 if family in BASIC else 60
    for seed in (0, 1):
        for params in (
            SamplingParams(greedy=True, repetition_penalty=1.0, seed=seed),
            SamplingParams(seed=seed, **PAPER),
        ):
            prompt = PROMPT[seed:]
            plain = llm.generate(prompt, new, "autoregressive", sampling=params, ignore_eos=True)
            for strategy, options in runs(draft)[seed::2]:
                got = llm.generate(prompt, new, strategy, options, params, ignore_eos=True)
                assert same(plain, got), (strategy, options, params)
                longest[strategy] = max(
                    longest.get(strategy, 0), got.metrics.mean_acceptance_length
                )
    assert len(longest) == len(STRATEGIES) - 2
    assert all(length > 1.1 for length in longest.values()), longest


@pytest.mark.parametrize("length", [1, 2, 25])
def test_short_prompts(length: int) -> None:
    """Prompts without prefill, shorter than the sinks, and as long as the partial cache."""
    llm = llm_of("llama")
    draft = tiny_model("llama", seed=1)
    plain = llm.generate(PROMPT[:length], 40, "autoregressive", ignore_eos=True)
    for strategy, options in runs(draft):
        assert same(plain, llm.generate(PROMPT[:length], 40, strategy, options, ignore_eos=True)), (
            options
        )


@pytest.mark.parametrize("params", [SamplingParams(greedy=True), SamplingParams(seed=3)])
def test_a_drafter_that_sees_everything_is_always_right(params: SamplingParams) -> None:
    """The whole context inside the budget, or the target as its own draft model: all drafts
    accepted."""
    llm = llm_of("qwen3")
    wide = {"budget": 200, "sinks": 3}
    twin = tiny_model("qwen3")
    for strategy, options in (
        ("magicdec", {"gamma": 4, "kv": "snapkv", **wide}),
        ("magicdec", {"gamma": 4, "kv": "streaming", **wide}),
        ("magicdec", {"gamma": 4, "kv": "streaming", "draft_model": twin, **wide}),
        ("magicdec", {"gamma": 4, "kv": "snapkv", "draft_model": twin, **wide}),
        ("triforce", {"gamma": 5, "draft_model": twin, "draft_budget": 200, **wide}),
    ):
        got = llm.generate(
            PROMPT, 105, strategy, options, params, ignore_eos=True
        )  # whole steps of 5 and 7
        assert got.metrics.acceptance_rate == 1.0, (strategy, options, got.metrics)
        drafted = options["gamma"] + 1
        assert got.metrics.mean_acceptance_length >= 0.9 * drafted


def test_probability_candidates_are_right_less_often() -> None:
    """Coupling is what the accepted length of a perfect drafter comes from."""
    llm = llm_of("llama")
    lengths = [
        llm.generate(
            PROMPT,
            100,
            "magicdec",
            {"gamma": 3, "budget": 200, "candidates": candidates},
            SamplingParams(seed=2, temperature=2.0, min_p=0.0),
            ignore_eos=True,
        ).metrics.mean_acceptance_length
        for candidates in ("coupled", "probability")
    ]
    assert lengths[0] > 3.8, lengths
    assert lengths[1] < 0.75 * lengths[0], lengths


@pytest.mark.parametrize("strategy", ["medusa", "triforce", "magicdec"])
def test_joint_distribution_of_three_tokens(strategy: str) -> None:
    """All processors at once; TokenSwift's is in test_rules.py."""
    llm = toy.toy_llm(tiny_model("llama"), strategy)
    params = toy.CASES["all"]
    seen = list(toy.outcomes(llm, strategy, params, 300))
    assert chi_square(seen, toy.toy_distribution(llm.model, params)) > 1e-4


class Positions(NativeTarget):
    """A model that notes the positions that it is run at."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[int] = []

    def _run(self, segments: Any, keep_queries: bool = True) -> Any:
        self.seen += [at for segment in segments for at in segment.positions.tolist()]
        return super()._run(segments, keep_queries)


def streaming(budget: int, sinks: int, longest: int) -> tuple[ModelContext, Any]:
    model = tiny_model("llama", seed=1)
    draft = Positions(model, backend_for(), rotary_of(model))
    return ModelContext(draft, draft.vocab_size, "streaming", budget, sinks, longest), draft


def chain(context: ModelContext, text: list[int], length: int) -> list[int]:
    """The draft model's likeliest tokens after a text, as many as it has positions for."""
    drafted: list[int] = []
    for _ in range(min(length, context.passes(text))):
        drafted.append(int(context.row(text, drafted).argmax()))
    return drafted


@pytest.mark.parametrize(
    ("budget", "sinks", "longest"), [(16, 4, 3), (40, 0, 8), (9, 2, 3), (4, 1, 1)]
)
@pytest.mark.parametrize("prompt", [1, 5, 60])
def test_positions_of_a_streaming_draft_model_stay_within_its_budget(
    budget: int, sinks: int, longest: int, prompt: int
) -> None:
    drafter, draft = streaming(budget, sinks, longest)
    text = PROMPT[:prompt]
    drafter.begin(text)
    for step in range(150):
        drafted = chain(drafter, text, longest)
        text = [
            *text,
            *drafted[: step % (longest + 1)],
            step % VOCAB,
        ]  # 0 to all of them, and another
        drafter.observe(text)
    assert max(draft.seen) < budget <= max(draft.seen) + longest + 2


def test_the_streaming_window_moves_with_its_sinks() -> None:
    """Layer 0, whose keys depend on tokens and positions alone: each key is the one that its token
    would have at its place in the window, the sinks just before; through many turns of the
    window."""
    drafter, draft = streaming(32, 4, 3)
    text = list(PROMPT)
    drafter.begin(text)
    cache = drafter.cache
    assert cache is not None
    assert cache.filled == drafter.slots == 24
    assert drafter.room == 3
    shifts = set()
    for _ in range(40):
        text += chain(drafter, text, 3)[:2]
        drafter.observe(text)
        assert drafter._known == len(text) - 1
        shifts.add(drafter._shift)
        gap = drafter._known - drafter._shift - 24
        assert 0 <= gap <= drafter.room
        fresh = draft.new_cache(24)
        tokens = PROMPT[:4] + text[drafter._known - 20 : drafter._known]
        draft.forward(torch.tensor(tokens), torch.arange(gap, gap + 24), fresh)
        places = cache.positions[0, 0, 4:]
        held = torch.cat([cache.data[0, :, :4], cache.data[0, :, 4:24][:, places.argsort()]], dim=1)
        torch.testing.assert_close(held, fresh.data[0], rtol=1e-4, atol=1e-4)
        assert sorted(places.tolist()) == list(range(drafter._known - 20, drafter._known))
    assert len(shifts) > 10


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("magicdec", {"gamma": 0}, "gamma is 0; valid: an integer from 1 to 32"),
        ("triforce", {"inner_gamma": 0}, "inner_gamma is 0"),
        ("magicdec", {"budget": 16}, "budget is 16; valid: more than the 16 sink tokens"),
        ("triforce", {"draft_budget": 9}, "draft_budget is 9; valid: more than the 16 sink tokens"),
        ("magicdec", {"kv": "h2o"}, "kv is 'h2o'; valid: snapkv, streaming"),
        (
            "triforce",
            {},
            "draft_model is not given; valid: a causal LM with the target's tokenizer",
        ),
        ("triforce", {"draft_model": "no/such"}, "no/such"),
        ("medusa", {"budget": 64}, "'budget' is not an option of strategy medusa"),
        ("medusa", {"tree": (200,)}, "tree is '200'; valid: widths up to 97"),
    ],
)
def test_bad_options(
    strategy: str, options: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"^[^\n]*$") as caught:
        llm_of("llama").generate(PROMPT, 4, strategy, options)
    assert words in str(caught.value)


def test_a_draft_model_with_another_vocabulary() -> None:
    with pytest.raises(InputError, match="vocabulary of 90 tokens, the target one of 97"):
        other = tiny_model("llama", vocab_size=90)
        llm_of("llama").generate(PROMPT, 4, "triforce", {"draft_model": other})


def test_medusa_needs_medusa_heads() -> None:
    with pytest.raises(InputError, match="needs heads of kind medusa"):
        llm_of("llama", "conditioned").generate(PROMPT, 4, "medusa")


# ---- the default model ---------------------------------------------------------------------------

DEFAULT_RUNS: list[tuple[str, dict[str, object]]] = [
    ("tokenswift", {"tree": (1, 3, 3, 3), "ngrams": 20, "budget": 128, "draft": "partial"}),
    ("medusa", {"tree": (1, 3, 3)}),
    ("magicdec", {"budget": 128, "kv": "snapkv"}),
    ("magicdec", {"budget": 128, "kv": "streaming", "draft_model": "smollm2-135m-draft"}),
    ("triforce", {"budget": 128, "draft_budget": 64}),
]
DEFAULT_SAMPLING = {"greedy": {"greedy": True, "repetition_penalty": 1.0}, "paper": {}}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("sampling", DEFAULT_SAMPLING)
def test_default_model(embedded: str, sampling: str, seed: int) -> None:
    """In the fast suite the runs of `test_frozen` stand for these."""
    params = SamplingParams(seed=seed, **DEFAULT_SAMPLING[sampling])
    llm = default_llm()
    prompt = prompt_of("observatory", 1500)
    new = 150
    plain = llm.generate(prompt, new, "autoregressive", sampling=params, ignore_eos=True)
    for strategy, options in DEFAULT_RUNS:
        got = llm.generate(prompt, new, strategy, options, params, ignore_eos=True)
        assert same(plain, got), (strategy, options)
        print(sampling, seed, strategy, f"{got.metrics.mean_acceptance_length:.2f} tokens a step")
