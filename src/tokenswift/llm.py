"""``LLM``, the public object: ties a model, a strategy and the decode loop together."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any

from torch import get_num_threads

from tokenswift.config import NEUTRAL, SamplingParams
from tokenswift.drafting.costs import Table, kept_table, measure
from tokenswift.drafting.heads import level_of
from tokenswift.generation import Call, Run
from tokenswift.heads.checkpoint import packaged_kinds, read_heads, resolve_heads
from tokenswift.heads.modules import Heads
from tokenswift.kernels.build import processor
from tokenswift.kernels.native import NativeKernels
from tokenswift.models.decoder import LeanTarget
from tokenswift.models.load import cache_dir, load, sampling_of
from tokenswift.models.rope import parse_rope_scaling
from tokenswift.models.target import Target, check_model, make_target
from tokenswift.runs.identity import identity_of, tokenizer_digest
from tokenswift.strategies.table import STRATEGIES
from tokenswift.types import Generation, InputError, OnProgress, Step

__all__ = ["LLM", "STRATEGIES"]

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
        on_progress: told how far loading is: ``on_progress(stage, done, total)`` with the stages "fetch"
            (bytes), "load" (tensors) and "pack" (layers).

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
        on_progress: OnProgress | None = None,
    ) -> None:
        parse_rope_scaling(rope_scaling or "none")
        loaded = load(str(model), dtype=dtype, device=device, on_progress=on_progress)
        self._set_up(
            loaded.model,
            loaded.tokenizer,
            loaded.name,
            heads,
            rope_scaling,
            take=True,
            on_progress=on_progress,
        )
        self.loading = {
            "model": str(Path(model).expanduser().absolute()) if Path(model).is_dir() else str(model),
            "dtype": dtype,
            "device": device,
            "heads": heads if heads is None or isinstance(heads, str) else None,
            "rope_scaling": rope_scaling,
        }

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
        on_progress: OnProgress | None = None,
    ) -> None:
        self.rope_scaling = parse_rope_scaling(rope_scaling or "none")
        check_model(model)
        self._hf = model
        self.tokenizer = tokenizer
        self.name = name
        self.loading: dict[str, Any] | None = None  # what makes the same ``LLM`` again; None: nobody knows
        self.heads = resolve_heads(heads, model)
        packaged = packaged_kinds(model)
        self._packaged = packaged if isinstance(heads, str) and heads == "auto" else {}
        self._shipped: dict[str, Heads] = {}  # those of them that were asked for
        self._is_default = bool(packaged)
        self._identity = identity_of(model)
        self._drafts: dict[str, Target] = {}
        self._lent: list[Any] = []
        self._lock = Lock()
        self._costs: dict[int, Table] = {}
        self.target: Target = make_target(model, self.rope_scaling, take, on_progress)

    @property
    def model(self) -> Any:
        """The transformers model. Where its weights were packed for the CPU they are unpacked again at the
        first use of this: from then on they take twice the memory."""
        self._check_open()
        with self._lock:
            self.target.give_back()
        return self._hf

    def close(self) -> None:
        """Let go of packed weights and draft models; the ``LLM`` cannot be used any more. A model given to
        :meth:`from_model` is as it was before."""
        self._drafts, self._shipped, self._packaged = {}, {}, {}
        for name in ("target", "heads", "_hf"):
            self.__dict__.pop(name, None)

    def _check_open(self) -> None:
        if "target" not in self.__dict__:
            raise InputError("the LLM is closed; valid: one that was not closed")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def dtype(self) -> str:
        """The model's dtype, e.g. "float32"."""
        self._check_open()
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The model's device, e.g. "cpu"."""
        self._check_open()
        return str(self.target.device)

    def costs(self) -> Table:
        """Measured times of passes of this model here, for automatic drafting: made at the first call (about
        two seconds) and kept in the cache folder, by model, device, type and threads."""
        self._check_open()
        with self._lock:
            threads = get_num_threads()
            if threads not in self._costs:
                self._costs[threads] = kept_table(
                    self.target,
                    cache_dir() / "costs",
                    lambda: measure(self.target, level_of(self.target, self.heads)),
                )
            return self._costs[threads]

    def heads_of(self, kind: str) -> Heads | None:
        """Heads of a kind for this model: those it was given, or, with ``heads="auto"``, shipped ones."""
        self._check_open()
        if self.heads is not None and self.heads.kind == kind:
            return self.heads
        with self._lock:
            if kind in self._packaged and kind not in self._shipped:
                with resources.as_file(self._packaged[kind]) as path:
                    heads, _, _ = read_heads(path)  # that they fit was checked before weights were packed
                self._shipped[kind] = heads.to(dtype=self.target.dtype, device=self.target.device)
            return self._shipped.get(kind)

    def draft_model(self, wanted: Any = None) -> Target:
        """A draft model for this target, loaded once.

        Args:
            wanted: alias, folder, hub id or a loaded transformers model; None takes the one that is
                shipped for the default model.
        Raises:
            InputError: there is none, it cannot be loaded, or its vocabulary is another one.
        """
        self._check_open()
        if wanted is None and not self._is_default:
            raise InputError(
                "draft_model is not given; valid: a causal LM with the target's tokenizer, such as a folder "
                "of train-draft"
            )
        with self._lock:
            if wanted is None or isinstance(wanted, str | Path):
                name = DEFAULT_DRAFT if wanted is None else str(wanted)
                if name not in self._drafts:
                    try:
                        loaded = load(name, dtype=self.dtype, device=self.device)
                    except InputError as error:
                        raise InputError(re.sub("^model", "draft_model", str(error))) from error
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

    @property
    def generation_config(self) -> Any:
        """The model's transformers ``GenerationConfig``; None where it has none."""
        self._check_open()
        return getattr(self._hf, "generation_config", None)

    def model_sampling(self, **given: Any) -> SamplingParams:
        """Sampling as the model's ``generation_config.json`` says (what it does not name is off).

        Args:
            given: fields of `SamplingParams` that win over the file's, e.g. ``seed=7``.
        Raises:
            InputError: the file names no sampling setting, or a field is out of its range.
        """
        taken = sampling_of(self.generation_config, self.name)
        return SamplingParams(**{**NEUTRAL, **taken, **given})

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
        **run: Any,
    ) -> Generation:
        """Generate up to ``max_new_tokens`` tokens.

        Args:
            prompt: text or token ids.
            strategy, strategy_options: how to draft (never changes the tokens), see `config`.
            sampling: how tokens are chosen; default `SamplingParams()`.
            ignore_eos: go on after an end-of-text token.
            stop: strings that end the text; the text is cut before the first to appear.
            on_step: called with each step as it happens.
            run: ``on_loop="stop"`` ends a text that repeats itself (default "report": `Metrics.loop` says
                so), by the sizes and counts of ``loop=LoopOptions(…)``; ``run_dir=DIR`` keeps a journal of
                the run there, and goes on with it when DIR holds this very run already (see docs/runs.md);
                ``drop_damaged=True`` does so from the last good record of a damaged journal;
                ``on_progress(stage, done, total)`` is told how far the reading of the prompt is (stage
                "prompt", in tokens).
        Raises:
            InputError: naming the argument, its value and what is valid.
            RunError: the run failed on its way; the line says what was kept.
        """
        made = self._run(
            prompt, max_new_tokens, strategy, strategy_options, sampling, ignore_eos, stop, **run
        )
        with closing(made.__iter__()) as steps:  # whatever on_step raises, the journal is closed
            for step in steps:
                if on_step is not None:
                    on_step(step)
        return made.result()

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 200,
        strategy: str = "tokenswift",
        strategy_options: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
        **run: Any,
    ) -> Iterator[Step]:
        """The steps of `generate`, as they happen. ``step.text`` holds complete characters only."""
        made = self._run(
            prompt, max_new_tokens, strategy, strategy_options, sampling, ignore_eos, stop, **run
        )
        return iter(made)

    def _run(self, *call: Any, **run: Any) -> Run:
        self._check_open()
        try:
            return Run(self, Call(*call, **run))
        except TypeError as error:
            if "unexpected keyword argument" in str(error) and "Call" in str(error):
                name = str(error).rsplit("'", 2)[-2]
                raise InputError(
                    f"{name!r} is no argument; valid: on_loop, loop, run_dir, drop_damaged, on_progress"
                ) from error
            raise

    def identity(self) -> dict[str, Any]:
        """What of this ``LLM`` decides the tokens: dtype, config, weights, adapter, positions, tokenizer."""
        if "tokenizer" not in self._identity:
            self._identity["tokenizer"] = tokenizer_digest(self.tokenizer)
        factor = self.rope_scaling.factor if self.rope_scaling is not None else None
        rope = "none" if self.rope_scaling is None else "yarn" if factor is None else f"yarn:{factor:g}"
        return {**self._identity, "rope": rope}

    def numerics(self) -> dict[str, Any]:
        """How passes are computed, and whether prefill, decoding and trees agree in every bit."""
        lean = isinstance(self.target, LeanTarget)
        compiled = isinstance(self.target.kernels, NativeKernels)
        how = "compiled kernels" if compiled else "torch"
        return {
            "equal_bits": lean and compiled,
            "how": how if lean else f"transformers' own forward, attention by {how}",
            "device": self.target.device.type,
            "processor": hashlib.sha256(processor().encode()).hexdigest()[:16],
        }

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
