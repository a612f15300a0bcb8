"""Proof of exactness that a user can run: tokens of every strategy against plain decoding's, logits
of passes over one row and over trees against transformers' own pass in float32, and what int8 costs
a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from itertools import product
from statistics import median
from typing import Any, TypeGuard

import msgspec
import torch
from torch import Tensor

from tokenswift.config.loading import LoadConfig
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import names_of
from tokenswift.engine.llm import LLM
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.generic import shared_copy
from tokenswift.models.quality import Quality, compared, judged
from tokenswift.models.target import Target
from tokenswift.speculation.methods import STRATEGIES
from tokenswift.tree import CandidateTree
from tokenswift.types import LARGEST, InputError, Step, counted

BASELINE = "autoregressive"
#: What is audited where no options are given: partial caches that are smaller than the text.
SMALL: dict[str, dict[str, Any]] = {
    "tokenswift": {"budget": 64, "draft": "partial"},
    "triforce": {"budget": 64, "draft_budget": 64},
    "magicdec": {"budget": 64},
}
BEFORE = 60  # characters of text shown before a difference
ONE_ROW: tuple[int, ...] = ()
TREE = (1, 3, 3, 3)  # of the passes that are looked at: siblings at each depth after the root
PLACES = 48  # new tokens whose logits are compared, at most
#: How far the furthest logit of half of the positions may be from the reference's, as a share of
#: the standard deviation of the reference's logits. Seen at most: 1.3e-5, .0028, .047; planted
#: errors from .9 on. A model in int8 is held against it in float32, and by its quality.
BOUNDS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.2}
WORST = 4.0  # times that, at any position
DEFAULT = LoadConfig()
IN_FLOATS = LoadConfig(dtype="float32", kv_cache_dtype="float32")
READ = 1024  # tokens of the text over which int8 is held against float32
MOST_RATIO = 1.005  # of perplexities in int8 and in float32
STANDARD_ERRORS = 2  # by which the ratio must be above that, to be surely above it


# ---- logits --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitError:
    """How far passes that should agree differ.

    Attributes:
        positions: that were compared, over the whole vocabulary.
        error: the furthest logit of one-row passes (plain decoding) from tree passes; 0: equal bit
            for bit.
        one_row, tree: the furthest logit from transformers' own pass in float32 over the whole
            text: of any position, and of half of them; infinite where one is NaN.
        allowed: what these may be, for the model's dtype.
    """

    positions: int
    error: float
    one_row: tuple[float, float]
    tree: tuple[float, float]
    allowed: tuple[float, float]

    @property
    def sound(self) -> bool:
        """Both kinds of pass compute what transformers' pass computes, in this dtype."""
        return all(
            max(pair) <= most
            for *pair, most in zip(self.one_row, self.tree, self.allowed, strict=True)
        )

    def __str__(self) -> str:
        far = [
            "{:.1e} (median {:.1e})".format(*pair)
            for pair in (self.one_row, self.tree, self.allowed)
        ]
        return (
            f"one-row passes are off transformers' pass in float32 by {far[0]}, tree passes by "
            f"{far[1]}, "
            f"each other by {self.error:.1e}; valid: at most {far[2]}"
        )


@torch.inference_mode()
def reference_logits(llm: LLM, text: Sequence[int], count: int) -> Tensor:
    """(count, V): logits at the last places of a text by transformers' own code, in float32, in one
    pass."""
    model = llm.model
    if llm.source.scaling is not None:
        model = shared_copy(model, rotary_of(model, llm.source.scaling))
    if model.dtype != torch.float32:
        model = deepcopy(model).float()
    ids = torch.tensor([list(text)], device=llm.target.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0]


@torch.inference_mode()
def logit_error(llm: LLM, prompt: list[int], tokens: list[int]) -> LogitError:
    """The error over a text that plain decoding wrote: ``tokens`` after ``prompt``."""
    tokens = tokens[:PLACES]
    reference = reference_logits(llm, [*prompt, *tokens[:-1]], len(tokens))
    rows = dict(forced_passes(llm, prompt, tokens, ONE_ROW))
    trees = list(forced_passes(llm, prompt, tokens, TREE))
    between = max(_far(rows[i], row) for i, row in trees)
    if computes_in_int8(llm.target):
        with llm.target.computing(IN_FLOATS):
            rows = dict(forced_passes(llm, prompt, tokens, ONE_ROW))
            trees = list(forced_passes(llm, prompt, tokens, TREE))
    of_rows = [_far(row, reference[i]) for i, row in rows.items()]
    of_trees = [_far(row, reference[i]) for i, row in trees]
    dtype = str(llm.target.dtype).removeprefix("torch.")
    typical = BOUNDS[dtype] * float(reference.std())
    return LogitError(
        positions=len(tokens),
        error=between,
        one_row=(max(of_rows), median(of_rows)),
        tree=(max(of_trees), median(of_trees)),
        allowed=(WORST * typical, typical),
    )


def computes_in_int8(target: Target) -> TypeGuard[NativeTarget]:
    """Whether products or attention are in int8, as the native decoder alone can have them."""
    in_int8 = target.int8 or target.kv_dtype == torch.int8
    return in_int8 and isinstance(target, NativeTarget)


def int8_quality(llm: LLM, texts: Sequence[list[int]]) -> Quality | None:
    """What int8 costs a text, beside the same weights in float32; None where int8 is not what the
    model computes in by default or by its options.

    Args:
        texts: read where there is no tokenizer for the shipped ones.
    """
    target = llm.target
    in_floats = not computes_in_int8(target)
    if not isinstance(target, NativeTarget) or (in_floats and target.dtype != torch.float32):
        return None
    if llm.tokenizer is None:
        ids = [token for text in texts for token in text]
    else:
        ids = llm.encode("\n\n".join(shipped_texts()))
    ids = ids[: min(READ, llm.target.rotary.limit or READ)]
    with target.computing(DEFAULT) if in_floats else nullcontext():
        if not computes_in_int8(target):
            return None
        in_int8 = judged(target, ids, len(ids) - 1)
    with target.computing(IN_FLOATS):
        reference = judged(target, ids, len(ids) - 1)
    return compared([in_int8], [reference])


@torch.inference_mode()
def forced_passes(
    llm: LLM, prompt: list[int], tokens: list[int], widths: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """Teacher-force ``tokens`` through passes of a shape: (i, logits that choose ``tokens[i]``).

    The true tokens stand last among their siblings, so that every commit has to compact the cache.
    """
    target = llm.target
    vocab = target.vocab_size
    cache = target.new_cache(len(prompt) + len(tokens) + 1 + sum(widths))
    if len(prompt) > 1:
        target.prefill(prompt[:-1], cache)
    text, done = list(prompt), 0
    while done < len(tokens):
        builder, walk = CandidateTree(text[-1]), [0]
        for depth, width in enumerate(widths, done):
            true = tokens[depth] if depth < len(tokens) else 0
            for k in range(1, width):
                builder.add(walk[-1], (true + k) % vocab)
            walk.append(builder.add(walk[-1], true))
        tree = builder.build()
        positions = torch.tensor(tree.depths, device=target.device) + len(text) - 1
        nodes = torch.tensor(tree.tokens, device=target.device)
        logits = target.logits(target.forward(nodes, positions, cache, tree.parents).hidden)
        for i, node in enumerate(walk[: len(tokens) - done], done):
            yield i, logits[node].clone()
        # all but the last node: a step also ends with a token that is not cached yet
        taken = walk[: max(1, min(len(widths), len(tokens) - done))]
        cache.commit(tuple(taken))
        text += tokens[done : done + len(taken)]
        done += len(taken)


def _far(one: Tensor, other: Tensor) -> float:
    """Greatest absolute difference of a logit, tokens that are left out aside; infinite where it is
    NaN."""
    other = other.to(one.device)
    chosen = (one != -torch.inf) & (other != -torch.inf)
    return float((one.float() - other.float())[chosen].abs().nan_to_num(torch.inf).max())


# ---- what was found ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """One text by one strategy against plain decoding.

    Attributes:
        prompt: its number, from 1.
        tokens: new tokens compared, up to the first difference.
        difference: where the first token differs, the text before it, and both tokens with the
            scores that plain decoding gives them; None for equal texts.
        drafted: tokens drafted and checked; a strategy that drafted none in any text counts as not
            run.
    """

    strategy: str
    prompt: int
    sampling: str
    seed: int
    tokens: int
    difference: str | None
    drafted: int


@dataclass(slots=True)
class Report:
    """Everything that an audit found.

    Attributes:
        errors: of logits, by prompt.
        skipped: strategy → why it could not run here, or did not draft. It counts as not run,
            whatever it did before.
        quality: of int8 beside float32; None for a model in floats.
    """

    model: str
    dtype: str
    device: str
    errors: list[LogitError] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    quality: Quality | None = None

    def leave_unused(self) -> None:
        """A strategy that drafted nothing ran the passes of plain decoding, so its tokens say
        nothing of it: it counts as not run."""
        idle = {c.strategy for c in self.comparisons} - {BASELINE, *self.skipped}
        idle -= {c.strategy for c in self.comparisons if c.drafted}
        self.skipped |= dict.fromkeys(sorted(idle), "it drafted nothing on these texts")

    @property
    def failures(self) -> list[str]:
        """What is wrong, a sentence each; empty when the audit passed."""
        found = [
            f"{c.strategy} differs from plain decoding (prompt {c.prompt}, {c.sampling}, seed "
            f"{c.seed}, "
            f"{c.difference})"
            for c in self.comparisons
            if c.difference is not None
        ]
        found += [f"logits of prompt {n}: {e}" for n, e in enumerate(self.errors, 1) if not e.sound]
        if all(c.strategy in self.skipped for c in self.comparisons):
            found.append("nothing was compared")
        if self.quality is not None and surely_worse(self.quality):
            found.append(
                f"int8 writes worse: {self.quality}; valid: at most {MOST_RATIO} times. "
                "--kv-cache-dtype bfloat16, or --dtype float32, keeps more"
            )
        return found

    @property
    def headline(self) -> str:
        """The verdict in a few words, with everything that qualifies it."""
        if self.failures:
            return "NOT EXACT"
        return f"exact; not run: {', '.join(self.skipped)}" if self.skipped else "exact"

    def record(self) -> dict[str, Any]:
        """The report as JSON-ready values; what is infinite is None."""
        told: dict[str, Any] = asdict(self) | {"verdict": self.headline, "failures": self.failures}
        told |= {"errors": [{**asdict(error), "sound": error.sound} for error in self.errors]}
        return msgspec.json.decode(msgspec.json.encode(told | {"exact": not self.failures}))

    def text(self) -> str:
        """Findings and verdict for people."""
        lines = [f"Audit of {self.model}, {self.dtype} on {self.device}, against plain decoding:"]
        for key in dict.fromkeys((c.strategy, c.sampling) for c in self.comparisons):
            group = [c for c in self.comparisons if (c.strategy, c.sampling) == key]
            equal, drafted = sum(c.tokens for c in group), sum(c.drafted for c in group)
            texts = (
                f"{counted(len(group), 'text')}, {counted(equal, 'token')} equal, "
                f"{drafted:,} drafted"
            )
            lines.append(f"  {', '.join(key)}: {texts}")
        lines += [f"  logits of prompt {n}: {e}" for n, e in enumerate(self.errors, 1)]
        if self.quality is not None:
            lines.append(f"  int8: {self.quality}")
        lines += [f"  not run: {name} ({why})" for name, why in self.skipped.items()]
        return "\n".join([*lines, f"Verdict: {'; '.join([self.headline, *self.failures])}."])


def surely_worse(quality: Quality) -> bool:
    """Whether perplexity has risen by more than it may, whatever the text."""
    least = quality.ratio - STANDARD_ERRORS * quality.error
    return not least <= MOST_RATIO  # NaN, too


# ---- the audit -----------------------------------------------------------------------------------


def variants(strategy: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by strategy, of one or "all". Without options partial caches are smaller than the
    text."""
    names = [name for name in STRATEGIES if name != BASELINE] if strategy == "all" else [strategy]
    given = {name: {k: options[k] for k in options if k in names_of(name)} for name in names}
    return given if options else {name: SMALL.get(name, {}) for name in names}


def shipped_prompts() -> list[str]:
    """A story, a list of instructions, and a piece of program."""
    data = resources.files("tokenswift").joinpath("data")
    texts = [
        data.joinpath(name).read_text("utf-8") for name in ("demo_prompt.txt", "audit_prompts.txt")
    ]
    return [part.strip() for text in texts for part in text.split("\n---\n")]


def shipped_texts() -> list[str]:
    """Four short texts, enough to judge a number type by."""
    folder = resources.files("tokenswift").joinpath("data", "prompts")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return [file.read_text("utf-8") for file in files if file.name.endswith(".txt")]


def difference(
    llm: LLM, ids: list[int], plain: list[int], others: list[int], params: SamplingParams
) -> tuple[int, str | None]:
    """How many tokens after a prompt are plain decoding's, and what is next where they are not all:
    a score is plain decoding's, processed and with the noise, minus infinity where a filter took
    the token."""
    place = next(
        (i for i, pair in enumerate(zip(plain, others, strict=True)) if len({*pair}) > 1), None
    )
    if place is None:
        return len(plain), None
    text = [*ids, *plain[:place]]
    _, logits = next(forced_passes(llm, text, [0], ONE_ROW))
    scores = llm.target.sampler(params).perturbed(logits[None], text, [[]])[0]
    shown = (
        llm.tokenizer.decode if llm.tokenizer is not None else lambda ids: " ".join(map(str, ids))
    )
    own, other = (
        f"{shown([one])!r} ({one}), score {float(scores[one]):.6g}"
        for one in (plain[place], others[place])
    )
    return place, f"new token {place}: {other} instead of {own}, after …{shown(text)[-BEFORE:]!r}"


def audit(
    llm: LLM,
    variants: dict[str, dict[str, Any]],
    prompts: Sequence[str | list[int]],
    samplings: dict[str, SamplingParams],
    tokens: int = 64,
    seeds: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Audit a model.

    Args:
        variants: options by strategy; of several, one that cannot run here is skipped.
        prompts: text or token ids.
        samplings: name → parameters.
        tokens: new tokens per text.
        seeds: texts per prompt and sampling (one for greedy decoding), from the sampling's seed on.
        say: gets a line of progress now and then.
    Raises:
        InputError: a prompt, a number of new tokens or a strategy that the model cannot run.
    """
    report, texts = Report(llm.name, llm.dtype, llm.device), _fitting(llm, prompts, tokens, say)
    say("int8 beside float32")
    report.quality = int8_quality(llm, texts)
    for (number, ids), (name, params), n in product(
        enumerate(texts, 1), samplings.items(), range(seeds)
    ):
        if params.greedy and n:
            continue
        params = replace(params, seed=params.seed + n)
        where = f"prompt {number} of {len(texts)}, {name}, seed {params.seed}"
        say(f"{where}: plain decoding")
        plain = llm.generate(ids, tokens, BASELINE, sampling=params, ignore_eos=True).token_ids
        if len(report.errors) < number:
            say(f"{where}: logits")
            report.errors.append(logit_error(llm, ids, plain))
        for strategy in [one for one in variants if one not in report.skipped]:
            say(f"{where}: {strategy}")
            steps: list[Step] = []
            how = (strategy, variants[strategy], params)
            try:
                got = llm.generate(ids, len(plain), *how, ignore_eos=True, on_step=steps.append)
            except InputError as refused:
                if len(variants) == 1:
                    raise
                report.skipped[strategy] = str(refused)
                continue
            found = difference(llm, ids, plain, got.token_ids, params)
            drafted = sum(step.drafted for step in steps)
            report.comparisons.append(
                Comparison(strategy, number, name, params.seed, *found, drafted)
            )
    report.leave_unused()
    return report


def _fitting(
    llm: LLM, prompts: Sequence[str | list[int]], tokens: int, say: Callable[[str], None]
) -> list[list[int]]:
    """The prompts as token ids, each cut to what leaves room for the new tokens in the model's
    positions; says whether some were."""
    limit = llm.target.rotary.limit or LARGEST
    if limit <= tokens:
        valid = f"at most {limit - 1} (the model has {limit} positions)"
        raise InputError(f"max_new_tokens is {tokens}; valid: {valid}", "max_new_tokens")
    found = [llm.encode(one) for one in prompts]
    if max(map(len, found)) > limit - tokens:
        say(
            f"prompts are cut to their first {limit - tokens} tokens (the model has {limit} "
            f"positions)"
        )
    return [ids[: limit - tokens] for ids in found]
