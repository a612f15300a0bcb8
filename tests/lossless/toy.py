"""Whole runs on a toy model of a family, and the distribution that they must follow.

The toy is built from the model's own classes and config, shrunk to a vocabulary of 6, so that the
joint distribution of its next tokens can be enumerated: with transformers' own forward pass and
processors, a code path that shares nothing with this library. Whole runs of ``LLM.generate`` must
follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.lossless.enumeration import Distribution, Tokens, joint_distribution, processed
from tokenswift.audit.logits import LogitError, logit_error
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import OPTIONS
from tokenswift.engine.llm import LLM
from tokenswift.models.decoder import PREFILL_CHUNK
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.modules import Heads

BASELINE = "autoregressive"
VOCAB = 6
LENGTH = 3
PROMPT: Tokens = (0, 3, 1, 4, 0, 3, 1, 5, 0, 3)  # repeats itself, so that n-gram branches occur
MEASURED = 32  # new tokens that the error of logits is measured over
SPREAD = 1.5  # standard deviation of the toy's logits
WINDOW = 8  # the toy's sliding window, where the model has one
#: A prompt longer than a chunk of the prefill, and that by less than the window: the next tokens
#: see entries of both chunks, and a window hides nearly all of the prompt.
LONG_PROMPT: Tokens = tuple(
    torch.randint(VOCAB, (PREFILL_CHUNK + 5,), generator=torch.Generator().manual_seed(8)).tolist()
)

_OFF = SamplingParams(min_p=0.0, repetition_penalty=1.0)
CASES: dict[str, SamplingParams] = {
    "no processor": _OFF,
    "temperature": replace(_OFF, temperature=1.7),
    "top-k": replace(_OFF, top_k=3),
    "top-p": replace(_OFF, top_p=0.8),
    "min-p": replace(_OFF, min_p=0.2),
    "eta": replace(_OFF, eta_cutoff=0.3),
    "penalty": replace(_OFF, repetition_penalty=2.0, penalty_window=2),
    "xtc": replace(_OFF, xtc_probability=0.6, xtc_threshold=0.15),
    "all": SamplingParams(
        temperature=1.4,
        top_k=5,
        top_p=0.95,
        min_p=0.05,
        eta_cutoff=0.1,
        repetition_penalty=1.5,
        penalty_window=3,
        xtc_probability=0.4,
        xtc_threshold=0.2,
    ),
}
#: Drafting that reaches every part of the code; the runs take turns. Options a strategy lacks are
#: left out.
EXERCISES: tuple[dict[str, object], ...] = (
    {
        **{"tree": (1, 3, 3), "ngrams": 4, "budget": 5, "sinks": 1, "draft": "partial"},
        **{
            "gamma": 2,
            "inner_gamma": 1,
            "kv": "snapkv",
            "chunk": 2,
            "refresh": 1,
            "draft_budget": 4,
        },
    },
    {
        **{"tree": (3, 2), "ngrams": 2, "draft": "hidden", "candidates": "probability"},
        **{
            "gamma": 3,
            "inner_gamma": 2,
            "kv": "streaming",
            "budget": 6,
            "sinks": 1,
            "draft_budget": 6,
        },
    },
)
PUBLISHED: dict[str, object] = {
    "tree": (1, 3, 3, 3),
    "ngrams": 0,
    "draft": "partial",
    "candidates": "probability",
    "acceptance": "published",
}


def options_of(strategy: str, wanted: dict[str, object]) -> dict[str, object]:
    """The options among ``wanted`` that a strategy has."""
    known = {field.name for field in fields(OPTIONS[strategy])}
    return {name: value for name, value in wanted.items() if name in known}


def toy_model(model: Any, seed: int = 0) -> Any:
    """A random float32 model of the same classes, :data:`VOCAB` tokens, two layers, on the same
    device.

    Its sliding window, where the model has one, is :data:`WINDOW`.
    """
    config = model.config.to_dict()
    for name in (
        "quantization_config",
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "transformers_version",
    ):
        config.pop(name, None)
    layers = 2
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][0], config["layer_types"][-1]]
    if config.get("sliding_window"):
        config["sliding_window"] = WINDOW
    if config.get("max_position_embeddings"):
        config["max_position_embeddings"] = max(
            config["max_position_embeddings"], len(LONG_PROMPT) + MEASURED
        )
    rope = config.get("rope_parameters") or {}
    if rope.get("partial_rotary_factor"):  # of which a narrower head would have no pair
        config["partial_rotary_factor"] = rope["partial_rotary_factor"] = 1.0
    if rope.get("rope_type") == "longrope":  # a factor for each pair of a narrower head
        for name in ("short_factor", "long_factor"):
            rope[name] = rope[name][:2]
    config.update(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        toy = type(model)(type(model.config).from_dict(config)).float().eval().requires_grad_(False)
        for parameter in toy.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.5)
    toy = toy.to(next(model.parameters()).device)
    logits = _logits(toy, torch.tensor([PROMPT]))
    toy.lm_head.weight.mul_(SPREAD / float(logits.std()))
    return toy


def toy_llm(model: Any, strategy: str = BASELINE) -> LLM:
    """The toy with random draft heads of the strategy's kind: they draft nonsense, which must not
    matter."""
    toy = toy_model(model)
    kind = "medusa" if strategy == "medusa" else "conditioned"
    config = HeadsConfig(kind=kind, count=3, hidden_size=toy.config.hidden_size, vocab_size=VOCAB)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        heads = Heads(config)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return LLM.from_model(toy, heads=heads.eval().requires_grad_(False))


@torch.inference_mode()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits of the model's own code, without a cache, on the CPU."""
    device = next(model.parameters()).device
    return model(input_ids=tokens.to(device), use_cache=False).logits.float().cpu()


def distribution_after(
    model: Any, params: SamplingParams, prompt: Tokens = PROMPT
) -> Callable[[Tokens], list[float]]:
    """``after(continuation)``: the distribution of the token that follows ``prompt`` and it."""

    @cache
    def after(continuation: Tokens) -> list[float]:
        context = (*prompt, *continuation)
        return processed(_logits(model, torch.tensor([context]))[0, -1], context, params)

    return after


def toy_distribution(model: Any, params: SamplingParams, prompt: Tokens = PROMPT) -> Distribution:
    """The joint distribution of the :data:`LENGTH` tokens after ``prompt``, enumerated."""
    return joint_distribution(distribution_after(model, params, prompt), LENGTH)


def toy_error(model: Any, dtype: torch.dtype, prompt: Tokens = LONG_PROMPT) -> LogitError:
    """The error of the logits of a toy in some dtype, over :data:`MEASURED` tokens by plain
    decoding."""
    small = toy_model(model)
    for parameter in small.parameters():  # not the buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    llm = LLM.from_model(small, heads=None)
    plain = llm.generate(list(prompt), MEASURED, BASELINE, sampling=_OFF, ignore_eos=True)
    return logit_error(llm, list(prompt), plain.token_ids)


def outcomes(
    llm: LLM,
    strategy: str,
    params: SamplingParams,
    seeds: int,
    exercises: tuple[dict[str, object], ...] = EXERCISES,
    first: int = 0,
    prompt: Tokens = PROMPT,
) -> Iterator[Tokens]:
    """The new tokens after ``prompt`` in ``seeds`` whole runs, seeds ``first``, …; the exercises
    take turns.

    Where a strategy takes a draft model, another toy is one: in all runs, or in every second
        exercise
    where it can also do without.
    """
    options = [options_of(strategy, exercise) for exercise in exercises]
    if strategy in ("triforce", "magicdec"):
        draft = toy_model(llm.model, seed=1)
        for exercise in options[0 if strategy == "triforce" else 1 :]:
            exercise["draft_model"] = draft
    for seed in range(first, first + seeds):
        result = llm.generate(
            list(prompt),
            LENGTH,
            strategy,
            options[seed % len(options)],
            replace(params, seed=seed),
            ignore_eos=True,
        )
        yield tuple(result.token_ids)
