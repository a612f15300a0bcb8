"""``LLM``, the public object: ties a model, a strategy and the decode loop together."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Unpack

import torch

from tokenswift.chat.reply import Reply
from tokenswift.checks import named_arguments
from tokenswift.config import ANSWERS, SamplingParams, sampling_by
from tokenswift.engine.chat import chat_request, reply_of
from tokenswift.engine.prefill import Prefilled
from tokenswift.engine.prefixes import Prefixes
from tokenswift.engine.request import (
    GenerateOptions,
    Request,
    SamplingFields,
    check_callback,
    check_loaded,
    check_name,
    check_prompt,
)
from tokenswift.engine.run import Run
from tokenswift.engine.scheduler import Scheduler, check_at_once, run_all
from tokenswift.engine.source import FromModel, Source, open_model
from tokenswift.engine.stream import Stream
from tokenswift.interfaces import LowBit
from tokenswift.load_config import LoadConfig, check_backend
from tokenswift.loader.find import cache_dir
from tokenswift.loader.load import check_place
from tokenswift.loader.own_sampling import check_named
from tokenswift.loader.placed import tp_of
from tokenswift.loader.prompts import Prompt, default_sampling, has_template, is_chat, prompt_ids, several_ids
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.draft_models import Drafters
from tokenswift.models.low_bit import LowBitTarget, low_bit
from tokenswift.models.target import Target, backend_for
from tokenswift.ranks import Ranks
from tokenswift.sampling.masks import Grammars
from tokenswift.spec.adaptive.cost import Table, keep_table, kept_table, measure
from tokenswift.spec.drafters.heads import level_of
from tokenswift.spec.heads.modules import Heads
from tokenswift.spec.heads.resolve import packaged_kinds, read_packaged, resolve_heads
from tokenswift.types import Generation, InputError, OnProgress, Step
from tokenswift.words import (
    Activations,
    Backend,
    CudaGraphs,
    Device,
    Dtype,
    HeadKind,
    KvCacheDtype,
    Strategy,
    Weights,
)

logger = logging.getLogger("tokenswift")
WITHOUT_HEADS = (
    "no draft heads fit %s, so little speed is gained; train some with: tokenswift train-heads --model %s "
    "--data self --out heads.safetensors (then --heads heads.safetensors), or try --strategy magicdec"
)
#: arguments of other libraries → what there is instead
INSTEAD: dict[str, str] = dict.fromkeys(
    ("n_ctx", "max_model_len", "max_seq_len", "max_seq_length", "context_length", "num_ctx"),
    "a text may take all of the model's positions, and rope_scaling makes more of them",
)
#: what ``dir`` shows of an `LLM`
PUBLIC = (
    "chat",
    "close",
    "default_sampling",
    "device",
    "dtype",
    "encode",
    "from_model",
    "generate",
    "generate_many",
    "generation_config",
    "has_chat_template",
    "model",
    "model_sampling",
    "name",
    "numerics",
    "prefill",
    "stream",
    "tokenizer",
)


class LLM:
    """A language model that writes long text, exactly as plain decoding would.

    Args:
        model: an alias (``"smollm2-135m"``), a folder or a hub id of a transformers checkpoint, a GGUF file,
            a folder with one, or one of the hub (``"owner/name:file.gguf"``).
        dtype: what is computed in: "auto", "int8", "float32", "bfloat16", "float16", or one of these of
            torch. "auto" is the checkpoint's; for quantized weights int8 on a CPU, bfloat16 on CUDA. "int8":
            products of quantized weights, and keys and values; the rest in float32.
        device: "auto" (CUDA where there is one), "cpu", "cuda", or a device of torch.
        heads: "auto" (shipped heads that fit the model, else none), "none" or None, shipped ones by kind
            ("conditioned", "linear", "medusa"), an adapter file, or the heads themselves.
        rope_scaling: None, "yarn:4" (four times the model's positions) or "yarn" (room for 131,072), for
            texts beyond the model's positions.
        on_progress: told how far loading is: ``on_progress(stage, done, total)`` with the stages "fetch"
            (bytes), "load" (tensors) and "pack" (layers).
        threads: CPU threads of the whole process, as ``torch.set_num_threads`` sets them; None leaves them.
        weights: what they are stored as: "stored" (as the files hold them), "float32", "bfloat16", or
            quantized at loading: "q8_0", "q4_0", "q4_1".
        activations: "float", or "int8": products alone in int8, keys and values in floats.
        kv_cache_dtype: of keys and values: "auto" (as the rest), "float32", "bfloat16" or "int8" (half the
            memory of bfloat16, for long texts).
        device_map: where layers lie: None (all on ``device``), "auto" (accelerate's placing: over cards, then
            memory, then disk), or a place for each module: ``{"model.layers.0": 0, …, "lm_head": "cpu"}``.
        tp: processes that compute the model together, by transformers' tensor-parallel plan; each of them,
            started by torchrun, makes its ``LLM`` and the same calls.
        backend: what computes: "auto" (the device's kernels, or torch where they do not work), "cpu" or
            "cuda" (those kernels, or an error), or "torch", for diagnosis.
        cuda_graphs: "auto" (passes on a card are captured as graphs), or "off", for diagnosis.

    An ``LLM`` is a context manager; `close` lets go of everything it made.

    Raises:
        InputError: naming the argument and what is valid.
    """

    ranks: Ranks | None = None  # the processes that compute it together, where there are several

    @named_arguments(INSTEAD)
    def __init__(
        self,
        model: str | os.PathLike[str],
        dtype: Dtype | str | torch.dtype = "auto",
        device: Device | str | torch.device = "auto",
        heads: Literal["auto", "none"] | HeadKind | str | Path | Heads | None = "auto",
        rope_scaling: str | None = None,
        on_progress: OnProgress | None = None,
        threads: int | None = None,
        weights: Weights | str = "stored",
        activations: Activations | str = "float",
        kv_cache_dtype: KvCacheDtype | str = "auto",
        device_map: str | Mapping[str, str | int] | None = None,
        tp: int = 1,
        backend: Backend | str = "auto",
        cuda_graphs: CudaGraphs | str = "auto",
    ) -> None:
        check_name(model)
        heads = str(heads) if isinstance(heads, Path) else heads
        check_callback("on_progress", on_progress)
        how = LoadConfig(
            dtype=dtype,  # type: ignore[arg-type]  # torch's own become names
            device=device,  # type: ignore[arg-type]
            rope_scaling=rope_scaling,
            threads=threads,
            weights=weights,
            activations=activations,
            kv_cache_dtype=kv_cache_dtype,
            device_map=device_map,
            tp=tp,
            backend=backend,
            cuda_graphs=cuda_graphs,
        )
        if how.threads is not None:
            torch.set_num_threads(how.threads)
        if how.tp > 1:
            self.ranks = Ranks(how.tp, check_place(how))
        self._set_up(open_model(str(model), how, on_progress), str(model), heads, how, on_progress)
        said = {f.name: getattr(how, f.name) for f in fields(how) if f.name not in ("threads", "tp")}
        self.loading = {
            "model": str(Path(model).expanduser().absolute()) if Path(model).exists() else str(model),
            "heads": heads if heads is None or isinstance(heads, str) else None,
            **said,
        }
        self._quantize(how)

    def _quantize(self, how: LoadConfig) -> None:
        """Compute in int8, and keep keys and values as they are asked for.

        Raises:
            InputError: the model or its backend cannot.
        """
        dtype, activations, kv_cache_dtype = how.dtype, how.activations, how.kv_cache_dtype
        if dtype == "auto" and activations == "float" and isinstance(self.target, NativeTarget):
            dtype = "int8" if self.target.has_int8 and self.target.backend.prefers_int8 else dtype
        option = "dtype" if dtype == "int8" else "activations" if activations == "int8" else "kv_cache_dtype"
        kept = "int8" if dtype == "int8" and kv_cache_dtype == "auto" else kv_cache_dtype
        if option == "kv_cache_dtype" and kept == "auto":
            return
        if not isinstance(self.target, NativeTarget):
            given, instead = {
                "dtype": (dtype, "auto, float32, bfloat16, float16"),
                "activations": (activations, "float"),
                "kv_cache_dtype": (kept, "auto"),
            }[option]
            raise InputError(
                f"{option} is {given!r}, but {self.name} runs through transformers' own model; "
                f"valid: {instead}",
                option,
            )
        if option != "kv_cache_dtype":
            self.target.take_int8(option)
        if kept != "auto":
            self.target.take_keys(
                getattr(torch, kept), option if kv_cache_dtype == "auto" else "kv_cache_dtype"
            )

    @classmethod
    @named_arguments(INSTEAD)
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        heads: Literal["auto", "none"] | HeadKind | str | Path | Heads | None = "auto",
        rope_scaling: str | None = None,
        backend: Backend | str = "auto",
        cuda_graphs: CudaGraphs | str = "auto",
    ) -> LLM:
        """Wrap a loaded transformers model; the object itself stays as it is.

        On the CPU a supported family's weights are copied in packed form: ``llm.target.copied_bytes``.

        Args:
            model: a causal LM of transformers.
            tokenizer: its tokenizer; None: prompts are token ids, and texts are empty.
            heads: as for ``LLM``; shipped heads are found by the model's weights.
            rope_scaling: as for ``LLM``.
            backend: as for ``LLM``.
            cuda_graphs: as for ``LLM``.
        """
        check_loaded(model, tokenizer)
        if (ranks := tp_of(model)) > 1:
            raise InputError(f"the model is spread over {ranks} ranks; valid: LLM(name, tp={ranks})")
        how = LoadConfig(rope_scaling=rope_scaling, backend=backend, cuda_graphs=cuda_graphs)
        llm = cls.__new__(cls)
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        device = model.lm_head.weight.device
        check_backend(backend, str(device))
        computes = backend_for(device, backend, cuda_graphs == "auto")
        source = FromModel(model, tokenizer, how.scaling, take=False, backend=computes)
        llm._set_up(source, name, heads, how)
        return llm

    def _set_up(
        self,
        source: Source,
        name: str,
        heads: str | Path | Heads | None,
        how: LoadConfig,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.rope_scaling = how.scaling
        self.source = source
        self.name = name
        self.loading: dict[str, Any] | None = None  # what makes the same ``LLM`` again; None: nobody knows
        self.heads = resolve_heads(heads, source.host)
        packaged = packaged_kinds(source.host)
        automatic = isinstance(heads, str) and heads == "auto"
        self._packaged = packaged if automatic else {}
        self._misses_heads = automatic and self.heads is None  # until it was said
        self._said_unusable = False
        self._shipped: dict[str, Heads] = {}  # those of them that were asked for
        self._lock = Lock()
        self._costs: dict[tuple[int, int], Table] = {}
        self._low: dict[str, LowBitTarget | None] = {}
        self.target: Target = source.target(on_progress)
        self._drafters = Drafters(self.target, source.codec, is_default=bool(packaged))
        self.grammars = Grammars(source.codec, self.target.vocab_size, source.end_tokens)

    @property
    def model(self) -> Any:
        """The transformers model, loaded at the first use of this where the weights came straight from its
        files. Where its weights were packed for the CPU they are unpacked again. Either way they take twice
        the memory from then on."""
        self._check_open()
        with self._lock:
            self.target.give_back()
            return self.source.model

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None: there is none."""
        self._check_open()
        with self._lock:
            return self.source.tokenizer

    def close(self) -> None:
        """Let go of packed weights and draft models; the ``LLM`` cannot be used any more. A model given to
        `from_model` is as it was before."""
        self._shipped, self._packaged, self._low = {}, {}, {}
        for name in ("target", "heads", "source", "_drafters", "grammars"):
            self.__dict__.pop(name, None)

    def _check_open(self) -> None:
        if "target" not in self.__dict__:
            raise InputError("the LLM is closed; valid: one that was not closed")

    def __dir__(self) -> list[str]:
        return list(PUBLIC)

    def __repr__(self) -> str:
        if "target" not in self.__dict__:
            return f"LLM({self.__dict__.get('name', '')!r}, closed)"
        return f"LLM({self.name!r}, dtype={self.dtype!r}, device={self.device!r})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def dtype(self) -> str:
        """What is computed in, e.g. "float32"; "int8" where products and attention are."""
        self._check_open()
        if self.target.whole and self.target.keys == torch.int8:
            return "int8"
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The model's device, e.g. "cpu"."""
        self._check_open()
        return str(self.target.device)

    def costs(self, low: LowBit | None = None) -> Table:
        """Times of passes of this model here, for automatic drafting: measured the first time (about two
        seconds), corrected by what steps take, and kept in the cache folder, by model, device, type and
        threads. With ``low``, of its quantized passes, too."""
        self._check_open()
        with self._lock:
            key, more = self._costs_of(low)
            if key not in self._costs:
                made = partial(measure, self.target, level_of(self.target, self.heads), low=low)
                if self.ranks is not None:  # measured in step, by one clock
                    self._costs[key] = self.ranks.shared(made(clock=self.ranks.clock))
                else:
                    self._costs[key] = kept_table(self.target, cache_dir() / "costs", made, more)
            return self._costs[key]

    def learn_costs(self, table: Table, low: LowBit | None = None) -> None:
        """Take what a run has made of the table that `costs` gave it, for the next runs."""
        if self.ranks is not None or "target" not in self.__dict__:  # every rank keeps what they agreed on
            return
        with self._lock:
            key, more = self._costs_of(low)
            self._costs[key] = table
            keep_table(self.target, cache_dir() / "costs", table, more)

    def _costs_of(self, low: LowBit | None) -> tuple[tuple[int, int], object]:
        """What tells tables of this model apart, in this process and in the cache folder."""
        few = 0 if low is None else low.weight_bytes
        more = (few, self.target.whole) if few or self.target.whole else None
        return (torch.get_num_threads(), few), more

    def low_bit(self, wanted: str = "auto") -> LowBitTarget | None:
        """The quantized target, made at the first call.

        Args:
            wanted: format of a copy of weights that are not stored quantized; "auto": q8_0, where the
                memory is there; "none": no such passes.
        Raises:
            InputError: the model cannot be had in that format.
        """
        self._check_open()
        with self._lock:
            if wanted not in self._low:
                self._low[wanted] = low_bit(self.target, wanted)
            return self._low[wanted]

    def heads_of(self, kind: str) -> Heads | None:
        """Heads of a kind for this model: those it was given, or, with ``heads="auto"``, shipped ones."""
        self._check_open()
        if self.heads is not None and self.heads.kind == kind:
            return self.heads
        with self._lock:
            if kind in self._packaged and kind not in self._shipped:
                heads = read_packaged(self._packaged[kind])
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
        return self._drafters.get(wanted)

    def draft_name(self, wanted: Any = None) -> str:
        """The name of that draft model, as records give it."""
        return self._drafters.name(wanted)

    def warn_without_heads(self) -> None:
        """Say once, on the logger "tokenswift", that no heads fit the model, and what can be done."""
        self._misses_heads, misses = False, self._misses_heads
        if misses:
            logger.warning(WITHOUT_HEADS, self.name, shlex.quote(self.name))

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts can be chat messages."""
        return has_template(self.source.codec)

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a prompt as `generate` takes it: of a text with the tokenizer's special tokens, of
        chat messages by the model's template, up to where the answer begins; ``tools`` are given to it."""
        self._check_open()
        check_prompt(prompt)
        return prompt_ids(prompt, self.source.codec, self.target.vocab_size, tools=tools)

    @property
    def generation_config(self) -> Any:
        """The model's transformers ``GenerationConfig``; None where it has none. It is the model's own: the
        model is loaded for it, if need be."""
        self._check_open()
        with self._lock:
            return getattr(self.source.model, "generation_config", None)

    def model_sampling(self, **given: Unpack[SamplingFields]) -> SamplingParams:
        """Sampling as the model's ``generation_config.json`` says (what it does not name is off).

        Args:
            given: fields of `SamplingParams` that win over the file's, e.g. ``seed=7``.
        Raises:
            InputError: the file names no sampling setting, or a field is out of its range.
        """
        return sampling_by(check_named(self.named_sampling(), self.name), given)

    def named_sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the model itself names: in its ``generation_config.json``, or
        in its GGUF file."""
        self._check_open()
        return self.source.named_sampling()

    def default_sampling(self, prompt: Prompt) -> SamplingParams:
        """The sampling of a prompt for which none is given: the paper's for text and token ids, which are
        gone on from. Answers to chat messages have what the model itself names, else temperature 0.7 and
        min-p 0.05 without a penalty."""
        return default_sampling(prompt, self._answers() if is_chat(prompt) else ANSWERS)

    def _answers(self) -> SamplingParams:
        named = self.named_sampling()
        try:
            return sampling_by(named, {}) if named else ANSWERS
        except InputError as error:
            if not self._said_unusable:
                self._said_unusable = True
                logger.warning("the sampling settings that %s names are left aside: %s", self.name, error)
            return ANSWERS

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 200,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, Any] | Any = None,
        sampling: SamplingParams | None = None,
        *,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Generate up to ``max_new_tokens`` tokens.

        Args:
            prompt: text, which is continued as it is; token ids; or chat messages, which are answered:
                ``[{"role": "user", "content": "What is the capital of France?"}]``.
            strategy: how to draft, by name; it never changes the tokens. "auto" is adaptive drafting,
                "tokenswift" the paper's method.
            strategy_options: a dict of options, or the strategy's ``TokenSwiftOptions(tree=(1, 3))``.
            sampling: how tokens are chosen; default: what `default_sampling` gives for the prompt. Instead of
                it, its fields as keywords, the others as by default:
                ``llm.generate(prompt, temperature=0.7, seed=3)``.
            on_step: called with each step as it happens.
            options: ``ignore_eos=True`` goes on after an end-of-text token (default False); ``stop="…"``, or
                a list of strings, ends the text, which is cut before the first to appear (default none);
                ``on_loop="stop"`` ends a text that repeats itself (default "report": `Metrics.loop` says
                so), by the sizes and counts of ``loop=LoopOptions(…)``; ``run_dir=DIR`` keeps a journal of
                the run there, and goes on with it when DIR holds this very run already (see docs/runs.md);
                ``drop_damaged=True`` does so from the last good record of a damaged journal;
                ``logprobs=N`` tells each token's log-probability and those of the N likeliest, 0 to 20
                (`Logprob`), which no journal keeps;
                ``response_format=…``, in OpenAI's form, or a `Grammar`, says what the text has to be like
                (the field ``grammar`` of the sampling; see docs/grammars.md);
                ``on_progress(stage, done, total)`` is told how far the reading of the prompt is (stage
                "prompt", in tokens).
        Raises:
            InputError: naming the argument, its value and what is valid.
            RunError: the run failed on its way; the line says what was kept.
        """
        check_callback("on_step", on_step)
        how = (max_new_tokens, strategy, strategy_options, sampling, options)
        return self.start(self._request(prompt, *how)).finish(on_step)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 200,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, Any] | Any = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """The steps of `generate`, as they happen. ``step.text`` holds complete characters only.

        After the last step ``stream.result`` is what `generate` would have returned (see `Stream`).
        """
        return self.start(
            self._request(prompt, max_new_tokens, strategy, strategy_options, sampling, options)
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, Any] | Any = None,
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Reply:
        """Answer a conversation, in which functions may be called.

        Arguments of calls are always valid by their schemas, whatever the model: a grammar sees to it. To
        go on, append ``reply.message`` and a result of each call to the messages (docs/tools.md).

        Args:
            messages: in the form of OpenAI's interface: ``{"role": …, "content": …}``, those with
                ``tool_calls`` and of the role "tool" too.
            max_new_tokens: default: 1,024, or what positions are left.
            tools: functions as OpenAI's interface has them: ``{"type": "function", "function": {"name": …,
                "description": …, "parameters": JSON schema}}``.
            tool_choice: "auto" (default; the model may call), "none", "required" (it has to), or
                ``{"type": "function", "function": {"name": …}}`` (that one).
            parallel_tool_calls: whether an answer may hold several calls.

        The others are `generate`'s. Raises as it does.
        """
        check_callback("on_step", on_step)
        how = (strategy, strategy_options, sampling)
        asked = (tools, tool_choice, parallel_tool_calls)
        request, calls = chat_request(self, messages, max_new_tokens, how, asked, options)
        return reply_of(self.start(request).finish(on_step), request, calls)

    def _request(
        self,
        prompt: Prompt,
        new: int,
        strategy: str,
        given: Any,
        sampling: SamplingParams | None,
        options: Any,
    ) -> Request:
        usual = self.default_sampling(prompt) if sampling is None else sampling
        return Request.of(prompt, usual, new, strategy, given, sampling, options)

    def start(self, request: Request, prefixes: Prefixes | None = None) -> Stream:
        """The steps of a request that was made before, as `stream` gives them.

        ``prefixes``: texts read lately; what the prompt has in common with one is not read again.
        """
        self._check_open()
        return Stream(Run(self, request, prefixes))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 200,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, Any] | Any = None,
        sampling: SamplingParams | None = None,
        *,
        at_once: int | Literal["auto"] = "auto",
        on_result: Callable[[int, Generation], None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]:
        """Generate after several prompts, concurrently; the results are in the order of the prompts.

        Each result is, token by token, what `generate` returns for its prompt alone. All prompts are
        checked before the first is run.

        Args:
            prompts: a list, each entry as `generate` takes it (a chat is a list of messages).
            at_once: concurrent texts at most; "auto": as many as the memory holds, and pay.
            on_result: called after each prompt with its index and its result, in the order in which they
                end, for progress::

                    llm.generate_many(prompts, on_result=lambda i, r: print("done:", prompts[i]))

        The others are `generate`'s, fields of `SamplingParams` too, the same for all prompts; no
        ``run_dir``, which keeps one run. Times of a result are those of its own steps, which it shared with
        others. Where one fails, its error is raised and the others end.
        """
        if "run_dir" in options:
            raise InputError("run_dir is no argument of generate_many; valid: generate, one run a folder")
        check_callback("on_result", on_result)
        check_at_once(at_once)
        self._check_open()
        for i, prompt in enumerate(prompts if isinstance(prompts, list | tuple) else ()):
            check_prompt(prompt, f"prompts[{i}]")
        ids = several_ids(prompts, self.source.codec, self.target.vocab_size)
        how = (max_new_tokens, strategy, strategy_options, sampling, options)
        requests = [
            replace(self._request(prompt, *how), prompt=tokens)
            for prompt, tokens in zip(prompts, ids, strict=True)
        ]
        for longest in sorted(requests, key=lambda request: len(request.prompt))[-1:]:
            Run(self, longest)  # it fits, so the others do
        results: dict[int, Generation] = {}
        if self.ranks is not None:  # which texts run concurrently is a matter of time
            for i, request in enumerate(requests):
                results[i] = self.start(request).finish()
                if on_result is not None:
                    on_result(i, results[i])
            return [results[i] for i in range(len(requests))]
        with Scheduler(self, at_once) as scheduler:
            for i, result in run_all(scheduler, requests):
                if isinstance(result, Exception):
                    raise result
                results[i] = result
                if on_result is not None:
                    on_result(i, result)
        return [results[i] for i in range(len(requests))]

    def prefill(self, prompt: Prompt) -> Prefilled:
        """Run a prompt once; ``.generate(…)`` and ``.stream(…)`` of the result go on from copies of it,
        with the arguments of this object's (but for the prompt) and the same tokens.

        Raises:
            InputError: naming the prompt's fault and what is valid.
        """
        self._check_open()
        ids = self.encode(prompt)
        self.check_room(len(ids) + 1)
        return Prefilled(self, ids, self.target.sampler(self.default_sampling(prompt)))

    def identity(self) -> dict[str, Any]:
        """What of this ``LLM`` decides the tokens: dtype, config, weights, adapter, positions, tokenizer."""
        factor = self.rope_scaling.factor if self.rope_scaling is not None else None
        rope = "none" if self.rope_scaling is None else "yarn" if factor is None else f"yarn:{factor:g}"
        target, made = self.target, {**self.source.identity(), "rope": rope}
        if self.dtype == "int8":
            made["dtype"] = "int8"
        elif target.whole:
            made["activations"] = "int8"
        if self.dtype != "int8" and target.keys != target.dtype:
            made["kv_cache_dtype"] = str(target.keys).removeprefix("torch.")
        return made

    def numerics(self) -> dict[str, Any]:
        """How passes are computed, and whether prefill, decoding and trees agree in every bit."""
        return self.target.numerics()

    def check_room(self, tokens: int) -> None:
        """See that ``tokens`` positions are within the model's."""
        limit = self.target.rotary.limit
        if limit is not None and tokens > limit:
            raise InputError(
                f"prompt and new tokens are {tokens} tokens; valid: up to the model's {limit} positions, "
                f"or more with rope_scaling yarn"
            )
