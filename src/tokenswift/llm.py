"""``LLM``, the public object: ties a model, a strategy and the decode loop together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from tokenswift.config import SamplingParams, build_options, check_integer
from tokenswift.decode import decode, prefill
from tokenswift.heads.checkpoint import packaged_heads, resolve_heads
from tokenswift.heads.modules import KINDS, Heads
from tokenswift.interfaces import Sequence as SequenceState
from tokenswift.memory import check_run
from tokenswift.metrics import Meter
from tokenswift.models.load import load
from tokenswift.models.rope import parse_rope_scaling
from tokenswift.models.target import Target, check_model, make_target
from tokenswift.sampling import Sampler
from tokenswift.strategies.table import DEFAULTS, STRATEGIES
from tokenswift.text import TextStream
from tokenswift.types import Generation, InputError, Step

__all__ = ["DEFAULTS", "LLM", "STRATEGIES"]

#: the small model that drafts for the default model
DEFAULT_DRAFT = "smollm2-135m-draft"


class LLM:
    """A language model that writes long text, exactly as plain decoding would.

    Args:
        model: an alias (``"smollm2-135m"``), a folder or a hub id of a transformers checkpoint.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        heads: "auto" (shipped heads that fit the model, else none), "none" or None, or an adapter file.
        rope_scaling: None, "yarn:4" (four times the model's positions) or "yarn" (room for 131,072), for
            texts beyond the model's positions.

    An ``LLM`` is a context manager; :meth:`close` lets go of everything it made.

    Raises:
        InputError: naming the argument and what is valid.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str = "auto",
        device: str = "auto",
        heads: str | Path | Heads | None = "auto",
        rope_scaling: str | None = None,
    ) -> None:
        parse_rope_scaling(rope_scaling or "none")
        loaded = load(str(model), dtype=dtype, device=device)
        self._set_up(loaded.model, loaded.tokenizer, loaded.name, heads, rope_scaling, take=True)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        heads: str | Path | Heads | None = None,
        rope_scaling: str | None = None,
    ) -> LLM:
        """Wrap a loaded transformers model; the object itself stays as it is.

        On the CPU a supported family's weights are copied in packed form: ``llm.target.copied_bytes``.
        """
        llm = cls.__new__(cls)
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        llm._set_up(model, tokenizer, name, heads, rope_scaling, take=False)
        return llm

    def _set_up(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        heads: str | Path | Heads | None,
        rope_scaling: str | None,
        take: bool,
    ) -> None:
        self.rope_scaling = parse_rope_scaling(rope_scaling or "none")
        check_model(model)
        self._hf = model
        self.tokenizer = tokenizer
        self.name = name
        self.heads = resolve_heads(heads, model)
        self._shipped: dict[str | None, Heads | None] = {}
        if isinstance(heads, str) and heads == "auto":
            self._shipped = {kind: packaged_heads(model, kind) for kind in (None, *KINDS)}
        self._is_default = packaged_heads(model) is not None
        self._drafts: dict[str, Target] = {}
        self._lent: list[Any] = []
        self._lock = Lock()
        self.target: Target = make_target(model, self.rope_scaling, take)

    @property
    def model(self) -> Any:
        """The transformers model. Where its weights were packed for the CPU they are unpacked again at the
        first use of this: from then on they take twice the memory."""
        with self._lock:
            self.target.give_back()
        return self._hf

    def close(self) -> None:
        """Let go of packed weights and draft models; the ``LLM`` cannot be used any more. A model given to
        :meth:`from_model` is as it was before."""
        self._drafts, self._shipped = {}, {}
        for name in ("target", "heads", "_hf"):
            self.__dict__.pop(name, None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def dtype(self) -> str:
        """The model's dtype, e.g. "float32"."""
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The model's device, e.g. "cpu"."""
        return str(self.target.device)

    def heads_of(self, kind: str) -> Heads | None:
        """Heads of a kind for this model: those it was given, or, with ``heads="auto"``, shipped ones."""
        if self.heads is not None and self.heads.kind == kind:
            return self.heads
        return self._shipped.get(kind)

    def draft_model(self, wanted: Any = None) -> Target:
        """A draft model for this target, loaded once.

        Args:
            wanted: alias, folder, hub id or a loaded transformers model; None takes the one that is
                shipped for the default model.
        Raises:
            InputError: there is none, it cannot be loaded, or its vocabulary is another one.
        """
        if wanted is None and not self._is_default:
            raise InputError(
                "draft_model is not given; valid: a causal LM with the target's tokenizer (--draft-model)"
            )
        with self._lock:
            if wanted is None or isinstance(wanted, str | Path):
                name = DEFAULT_DRAFT if wanted is None else str(wanted)
                if name not in self._drafts:
                    loaded = load(name, dtype=self.dtype, device=self.device)
                    draft = make_target(loaded.model, take=True)
                    self._drafts[name] = self._checked_draft(draft, loaded.tokenizer, name)
                return self._drafts[name]
            name = f"object {id(wanted)}"
            if name not in self._drafts:
                draft = self._checked_draft(make_target(wanted), None, type(wanted).__name__)
                if (draft.device, draft.dtype) != (self.target.device, self.target.dtype):
                    raise InputError(
                        f"draft_model is {draft.dtype} on {draft.device}; valid: as the target, "
                        f"{self.target.dtype} on {self.target.device}"
                    )
                self._drafts[name] = draft
                self._lent.append(wanted)  # while it lives, no other object has its id
            return self._drafts[name]

    def _checked_draft(self, draft: Target, tokenizer: Any, name: str) -> Target:
        mine, theirs = self.target.vocab_size, draft.vocab_size
        if mine != theirs:
            raise InputError(
                f"draft_model {name} has a vocabulary of {theirs} tokens, the target one of {mine}; "
                f"valid: a model with the target's tokenizer"
            )
        if tokenizer is not None and self.tokenizer is not None:
            if tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise InputError(
                    f"draft_model {name} has another vocabulary; valid: a model with the target's tokenizer"
                )
        return draft

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens."""
        if self.tokenizer is None:
            raise InputError("prompt is text, but the model came without a tokenizer; valid: token ids")
        return list(self.tokenizer(text)["input_ids"])

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 200,
        strategy: str = "tokenswift",
        strategy_options: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
        on_step: Callable[[Step], None] | None = None,
    ) -> Generation:
        """Generate up to ``max_new_tokens`` tokens.

        Args:
            prompt: text or token ids.
            strategy, strategy_options: how to draft (never changes the tokens), see `config`.
            sampling: how tokens are chosen; default `SamplingParams()`.
            ignore_eos: go on after an end-of-text token.
            stop: strings that end the text; the text is cut before the first to appear.
            on_step: called with each step as it happens.
        Raises:
            InputError: naming the argument, its value and what is valid.
        """
        run = _Run(self, prompt, max_new_tokens, strategy, strategy_options, sampling, ignore_eos, stop)
        for step in run:
            if on_step is not None:
                on_step(step)
        return run.result()

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 200,
        strategy: str = "tokenswift",
        strategy_options: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
    ) -> Iterator[Step]:
        """The steps of `generate`, as they happen. ``step.text`` holds complete characters only."""
        run = _Run(self, prompt, max_new_tokens, strategy, strategy_options, sampling, ignore_eos, stop)
        return iter(run)

    # ---- shared by both -------------------------------------------------------------------------

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise InputError("prompt is empty; valid: at least one token")
        for token in ids:
            if not 0 <= token < self.target.vocab_size:
                raise InputError(f"prompt token id is {token}; valid: 0 to {self.target.vocab_size - 1}")
        return ids

    def _eos(self) -> Collection[int]:
        """End-of-text ids: the generation config's, the config's and the tokenizer's."""
        found: set[int] = set()
        sources = (getattr(self._hf, "generation_config", None), self._hf.config, self.tokenizer)
        for source in sources:
            ids = getattr(source, "eos_token_id", None)
            found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
        return found

    def _check_room(self, tokens: int) -> None:
        """See that ``tokens`` positions are within the model's."""
        limit = self.target.rotary.limit
        if limit is not None and tokens > limit:
            raise InputError(
                f"prompt and new tokens are {tokens} tokens; valid: up to the model's {limit} positions, "
                f"or more with --rope-scaling yarn"
            )


class _Run:
    """One generation: everything is checked when it is made, nothing runs before it is iterated."""

    def __init__(
        self,
        llm: LLM,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        strategy: str,
        strategy_options: Mapping[str, Any] | None,
        sampling: SamplingParams | None,
        ignore_eos: bool,
        stop: Sequence[str],
    ) -> None:
        check_integer("max_new_tokens", max_new_tokens, 1)
        if strategy not in STRATEGIES:
            raise InputError(f"strategy is {strategy!r}; valid: {', '.join(STRATEGIES)}")
        entry = STRATEGIES[strategy]
        options = build_options(entry.options, strategy, strategy_options)
        self.llm = llm
        self.sampling = sampling or SamplingParams()
        self.prompt = llm._prompt_ids(prompt)
        llm._check_room(len(self.prompt) + max_new_tokens)
        self.max_new_tokens = max_new_tokens
        self.sampler = Sampler(self.sampling, llm.target.vocab_size, llm.target.device)
        self.strategy = entry.build(llm, options, self.sampler)
        check_run(llm.target, self.strategy, len(self.prompt), max_new_tokens)
        self.eos: Collection[int] = () if ignore_eos else llm._eos()
        self.stream = TextStream(llm.tokenizer, (stop,) if isinstance(stop, str) else tuple(stop))
        self.meter = Meter()
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.finish_reason = "length"
        self.draft_passes = 0

    def __iter__(self) -> Iterator[Step]:
        target = self.llm.target
        capacity = len(self.prompt) + self.max_new_tokens + self.strategy.max_nodes
        sequence = SequenceState(
            tokens=list(self.prompt),
            prompt_tokens=len(self.prompt),
            cache=target.new_cache(capacity),
            model=target,
            sampler=self.sampler,
        )
        with self.meter.phase("prefill"):
            prefill(sequence)
        steps = decode(sequence, self.strategy, self.sampler, self.max_new_tokens, self.eos, self.meter)
        for step in steps:
            ids = step.token_ids
            text = self.stream.push(ids[:-1] if ids[-1] in self.eos else ids)  # no "</s>" in the text
            if self.stream.stopped:
                ids = ids[: self.stream.used]
                self.finish_reason = "stop"
            elif ids[-1] in self.eos:
                self.finish_reason = "eos"
            self.tokens += ids
            self.draft_passes = sequence.draft_passes
            done = self.finish_reason != "length" or len(self.tokens) >= self.max_new_tokens
            if done and not self.stream.stopped:
                text += self.stream.finish()
            self.text.append(text)
            yield replace(step, token_ids=ids, sources=step.sources[: len(ids)], text=text)
            if done:
                return

    def result(self) -> Generation:
        """The finished generation."""
        return Generation(
            token_ids=self.tokens,
            text="".join(self.text),
            finish_reason=self.finish_reason,
            metrics=self.meter.finish(self.tokens, self.draft_passes),
            prompt_tokens=len(self.prompt),
            lossless=self.strategy.acceptance == "exact",
        )
