"""``LLM``, the public object: turns the arguments of a call into a `Request`, and runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tokenswift.chat import Calls, Reply, Tools, thought_of, tools_of
from tokenswift.chat.prompts import Prompt, is_chat, several_ids
from tokenswift.checks import check_callback, meant
from tokenswift.config.loading import Backend, Device, Dtype, HeadKind, LoadArguments, LoadConfig
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import Strategy
from tokenswift.engine.detokenize import begins_turn
from tokenswift.engine.many import run_all
from tokenswift.engine.prefix_cache import PrefixCache
from tokenswift.engine.prompts import default_sampling, encode
from tokenswift.engine.request import Request
from tokenswift.engine.run_journal import chat_digest
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.sequence import Sequence as TextSequence
from tokenswift.engine.stream import Prefilled, Stream
from tokenswift.loader.chat_template import has_template
from tokenswift.memory import default_length
from tokenswift.models.source import Source, open_model, wrap_model
from tokenswift.models.target import Target
from tokenswift.speculation.eagle.config import EagleWeights
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.resources import Resources
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import Generation, InputError, OnProgress, Step


class LLM(AbstractContextManager["LLM"]):
    """A language model that writes long text, exactly as plain decoding would.

    Args:
        model: an alias (``"smollm2-135m"``), a folder or a hub id of a transformers checkpoint, a
            GGUF file, a folder with one, or one of the hub (``"owner/name:file.gguf"``).
        dtype: what is computed in: "auto", "int8", "float32", "bfloat16", "float16", or one of
            these of torch. "auto" is the checkpoint's; for quantized weights int8 on a CPU,
            bfloat16 on CUDA. "int8": products of quantized weights, and keys and values; the rest
                in float32.
        device: "auto" (CUDA where there is one), "cpu", "cuda", or a device of torch.
        heads: "auto" (shipped heads that fit the model, else none), "none" or None, shipped ones by
            kind ("conditioned", "linear", "medusa"), a heads file, the folder or hub id of a
            published checkpoint with heads, or the heads themselves.
        eagle: an EAGLE-3 drafter for the model: folder, GGUF file, hub id or "shipped"; "auto": the
            one that `tokenswift train` made for it, if it did; None: none.
        on_progress: told how far loading is: ``on_progress(stage, done, total)`` with the stages
            "load" (tensors) and "pack" (layers).

    Keyword Args:
        rope_scaling (str | None): None, "yarn:4" (four times the model's positions) or "yarn" (room
            for 131,072), for texts beyond the model's positions.
        threads (int | None): CPU threads of the whole process, as ``torch.set_num_threads`` sets
            them; None leaves them.
        weights (str): what they are stored as: "stored" (as the files hold them), "float32",
            "bfloat16", or quantized at loading: "q8_0", "q4_0", "q4_1".
        kv_cache_dtype (str): of keys and values: "auto" (as the rest; in int8, keys are integers of
            16 bits in the layers where 8 bits would move attention), "float32", "bfloat16", "int8"
            (half the memory of bfloat16) or "int16" (keys of 16 bits in all layers, values in
            int8).
        backend (str): what computes: "auto" (the device's kernels, or torch where they do not
            work), "cpu" or "cuda" (those kernels, or an error), or "torch", for diagnosis.

    An ``LLM`` is a context manager; `close` lets go of everything it made.

    Raises:
        InputError: naming the argument and what is valid.
    """

    _name = ""
    _resources: Resources | None = None

    def __init__(
        self,
        model: str | os.PathLike[str],
        dtype: Dtype | str | torch.dtype = "auto",
        device: Device | str | torch.device = "auto",
        heads: Literal["auto", "none"] | HeadKind | str | Path | Heads | None = "auto",
        eagle: str | Path | EagleWeights | None = "auto",
        on_progress: OnProgress | None = None,
        **loading: Any,
    ) -> None:
        known = [one.name for one in fields(LoadConfig)]
        for option in loading:
            if option not in known:
                valid = ", ".join(("heads", "eagle", "on_progress", *known)) + meant(option, known)
                raise InputError(f"{option!r} is not an argument of LLM; valid: {valid}", option)
        how = LoadConfig(dtype, device, **loading)  # type: ignore[arg-type]  # torch's own become names
        source = open_model(model, how, on_progress)
        self._name = str(model)
        arguments = LoadArguments(
            model=str(Path(model).expanduser().absolute()) if Path(model).exists() else self._name,
            dtype=how.dtype,
            device=how.device,
            heads=str(heads) if isinstance(heads, str | Path) else None,
            eagle=str(eagle) if isinstance(eagle, str | Path) else None,
            rope_scaling=how.rope_scaling,
            weights=how.weights,
            kv_cache_dtype=how.kv_cache_dtype,
            backend=how.backend,
        )
        self._resources = Resources(source, self._name, heads, how, on_progress, eagle, arguments)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Tokenizer | None = None,
        heads: Literal["auto", "none"] | HeadKind | str | Path | Heads | None = "auto",
        rope_scaling: str | None = None,
        backend: Backend | str = "auto",
        eagle: str | Path | EagleWeights | None = "auto",
    ) -> LLM:
        """Wrap a loaded transformers model, whose layers may lie on several devices (its
        ``device_map``); the object itself stays as it is.

        On the CPU a supported family's weights are copied in packed form:
        ``llm.target.copied_bytes``.

        Args:
            model: a causal LM of transformers.
            tokenizer: its tokenizer; None: prompts are token ids, and texts are empty.
            heads: as for ``LLM``; shipped heads are found by the model's weights.
            rope_scaling, backend, eagle: as for ``LLM``.
        """
        how = LoadConfig(rope_scaling=rope_scaling, backend=backend)
        source, llm = wrap_model(model, tokenizer, how), cls.__new__(cls)
        llm._name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        llm._resources = Resources(source, llm._name, heads, how, eagle=eagle)
        return llm

    @property
    def name(self) -> str:
        """The model's name as it was given."""
        return self._name

    @property
    def resources(self) -> Resources:
        """The model ready to run, and what drafts for it.

        Raises:
            InputError: the ``LLM`` is closed.
        """
        if self._resources is None:
            raise InputError("the LLM is closed; valid: one that was not closed")
        return self._resources

    @property
    def loading(self) -> LoadArguments | None:
        """The arguments that load the model again; None: it came from a program."""
        return self.resources.loading

    @property
    def target(self) -> Target:
        """The model ready to run."""
        return self.resources.target

    @property
    def source(self) -> Source:
        """What the model was made from."""
        return self.resources.source

    @property
    def model(self) -> Any:
        """The transformers model, loaded at the first use of this where the weights came straight
        from its files, which then take twice the memory."""
        with self.resources.lock:
            return self.source.model

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None: there is none."""
        with self.resources.lock:
            return self.source.transformers_tokenizer

    def close(self) -> None:
        """Let go of packed weights and draft models; the ``LLM`` cannot be used any more. A model
        given to `from_model` is as it was before."""
        if self._resources is not None:
            self._resources.is_closed = True
        self._resources = None

    def __repr__(self) -> str:
        if self._resources is None:
            return f"LLM({self._name!r}, closed)"
        return f"LLM({self._name!r}, dtype={self.dtype!r}, device={self.device!r})"

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def dtype(self) -> str:
        """What is computed in, e.g. "float32"; "int8" where products and attention are."""
        return self.target.computes

    @property
    def device(self) -> str:
        """The model's device, e.g. "cpu"."""
        return str(self.target.device)

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts can be chat messages."""
        return has_template(self.source.tokenizer)

    def encode(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a prompt as `generate` takes it: of a text with the tokenizer's special
        tokens, of chat messages by the model's template, up to where the answer begins; ``tools``
        and ``template_options`` are given to it."""
        check_not_prefilled(prompt)
        known = tools_of(tools)
        forms = None if known is None else known.forms
        return encode(self.resources, prompt, template_options, forms)

    def default_sampling(self, prompt: Prompt) -> SamplingParams:
        """The sampling of a prompt for which none is given: the paper's for text and token ids,
        which are gone on from. Answers to chat messages have what the model itself names, else
        temperature 0.7 and min-p 0.05 without a penalty."""
        return default_sampling(self.resources, prompt)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        *,
        on_step: Callable[[Step], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Generate up to ``max_new_tokens`` tokens.

        Args:
            prompt: text, which is continued as it is; token ids; or chat messages, which are
                answered: ``[{"role": "user", "content": "What is the capital of France?"}]``.
            max_new_tokens: default: 200 of a continued text; an answer ends where the model ends
                it, or with its positions (see `memory.default_length`).
            strategy: how to draft, by name; it never changes the tokens. "auto" is adaptive
                drafting, "tokenswift" the paper's method.
            strategy_options: a dict of its options, such as ``{"tree": (1, 3)}``
                (`config.strategies.MethodOptions`).
            sampling: how tokens are chosen; default: what `default_sampling` gives for the prompt.
                Instead of it, its fields as keywords, the others as by default:
                ``llm.generate(prompt, temperature=0.7, seed=3)``.
            on_step: called with each step as it happens.
            options: ``ignore_eos=True`` goes on after an end-of-text token (default False);
                ``stop="…"``, or a list of strings, ends the text, which is cut before the first to
                appear (default none); ``on_loop="stop"`` ends a text that repeats itself (default
                "report": `Metrics.loop` says so); ``run_dir=DIR`` keeps a journal of the run there,
                and goes on with it when DIR holds this very run already (see docs/runs.md);
                ``logprobs=N`` tells each new token's log-probability and those of the N likeliest,
                0 to 20 (`Logprob`, kept by no journal); ``response_format=…``, in OpenAI's form, or
                a `Grammar`, says what the text has to be like (the sampling's ``grammar``; see
                docs/grammars.md); ``template_options={"enable_thinking": False}`` are variables of
                the chat template; ``on_progress(stage, done, total)`` is called during the prefill
                (stage "prompt", in tokens).
        Raises:
            InputError: naming the argument, its value and what is valid.
            RunError: the run failed on its way; the line says what was kept.
        """
        how = (max_new_tokens, strategy, strategy_options, sampling)
        return self.stream(prompt, *how, **options).finish(on_step)

    def stream(self, prompt: Prompt, *args: Any, **options: Any) -> Stream:
        """The steps of `generate`, with its arguments, as they happen; their ``text`` holds
        complete characters only. After the last one ``stream.result`` is what `generate` would have
        returned (see `Stream`)."""
        check_not_prefilled(prompt)
        return self.start(Request.of(prompt, self.default_sampling, *args, **options))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *args: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        on_step: Callable[[Step], None] | None = None,
        **options: Any,
    ) -> Reply:
        """Answer a conversation, in which functions may be called.

        Arguments of calls are always valid by their schemas, whatever the model: a grammar sees to
        it. To go on, append ``reply.message`` and a result of each call to the messages
        (docs/tools.md).

        Args:
            messages: in the form of OpenAI's interface: ``{"role": …, "content": …}``, those with
                ``tool_calls`` and of the role "tool" too.
            tools: functions as OpenAI's interface has them: ``{"type": "function", "function":
                {"name": …, "description": …, "parameters": JSON schema}}``.
            tool_choice: "auto" (default; the model may call), "none", "required" (it has to), or
                ``{"type": "function", "function": {"name": …}}`` (that one).
            parallel_tool_calls: whether an answer may hold several calls.

        The others are `generate`'s. Raises as it does.
        """
        asked = tools_of(tools, tool_choice, parallel_tool_calls)
        request, calls = self.chat_request(messages, asked, *args, **options)
        made = self.start(request).finish(on_step)
        # seeds the ids of calls: the same for the same run
        key = f"{request.prompt} {made.token_ids}"
        text, called, thought = calls.read(made.text, key)
        return Reply(text, called, made, thought)

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        *how: Any,
        name: str = "messages",
        **options: Any,
    ) -> tuple[Request, Calls]:
        """The request of a chat, and the parser of its answer.

        Args:
            messages: the conversation.
            tools: that may be called.
            how, options: arguments of `generate`, from ``max_new_tokens`` on.
            name: of the messages, in errors.
        Raises:
            InputError: naming what is wrong.
        """
        check_not_prefilled(messages, name)
        if not is_chat(messages):
            valid = "[{'role': 'user', 'content': 'Hello'}]"
            raise InputError(f"messages is not a list of messages; valid: {valid}")
        template, tokenizer = options.get("template_options"), self.source.tokenizer
        forms = None if tools is None else tools.forms
        ids = encode(self.resources, messages, template, forms, name)
        calls = Calls.of(tools, tokenizer, thought_of(tokenizer, ids))
        made = self.request(messages, ids, *how, **options)
        asked = chat_digest(messages, tools, template)
        return replace(made, sampling=calls.bound(made.sampling), asked=asked), calls

    def request(
        self,
        prompt: Prompt,
        ids: list[int],
        max_new_tokens: int | None = None,
        *how: Any,
        **options: Any,
    ) -> Request:
        """A request for a prompt with these token ids, with the defaults of length and sampling for
        it."""
        if max_new_tokens is None:
            max_new_tokens = default_length(self.target, is_chat(prompt), len(ids))
        request = Request.of(
            ids, lambda _: self.default_sampling(prompt), max_new_tokens, *how, **options
        )
        return replace(request, new_turn=begins_turn(prompt, request.template_options))

    def start(self, request: Request, prefixes: PrefixCache | None = None) -> Stream:
        """Run a request as `stream` does.

        Args:
            request: the checked request.
            prefixes: a prefix cache, from which a shared prefix is copied instead of prefilled.
        """
        return Stream(TextSequence(self.resources, request, prefixes))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *args: Any,
        at_once: int | Literal["auto"] = "auto",
        on_result: Callable[[int, Generation], None] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Generate after several prompts, concurrently; the results are in the order of the
        prompts.

        Each result is, token by token, what `generate` returns for its prompt alone. All are
        checked first.

        Args:
            prompts: a list, each entry as `generate` takes it (a chat is a list of messages).
            at_once: concurrent texts at most; "auto": as many as the memory holds, and pay.
            on_result: called after each prompt with its index and its result, in the order in which
                they end, for progress::

                    llm.generate_many(prompts, on_result=lambda i, r: print("done:", prompts[i]))

        The others are `generate`'s, fields of `SamplingParams` too, the same for all prompts; no
        ``run_dir``, which keeps one run. Times of a result are those of its own steps, which it
        shared with others. Where one fails, its error is raised and the others end.
        """
        if "run_dir" in options:
            raise InputError(
                "run_dir is not an argument of generate_many; valid: generate, one run a folder"
            )
        check_callback("on_result", on_result)
        check_not_prefilled(prompts, "prompts")
        for i, prompt in enumerate(prompts if isinstance(prompts, list | tuple) else ()):
            check_not_prefilled(prompt, f"prompts[{i}]")
        ids = several_ids(
            prompts, self.source.tokenizer, self.target.vocab_size, options.get("template_options")
        )
        pairs = zip(prompts, ids, strict=True)
        requests = [self.request(prompt, own, *args, **options) for prompt, own in pairs]
        if not requests:
            return []
        TextSequence(
            self.resources, max(requests, key=lambda one: len(one.prompt))
        )  # if it fits, the others do
        results: dict[int, Generation] = {}
        with Scheduler(self, at_once) as scheduler:
            for i, result in run_all(scheduler, requests):
                if isinstance(result, Exception):
                    raise result
                results[i] = result
                if on_result is not None:
                    on_result(i, result)
        return [results[i] for i in range(len(requests))]

    def prefill(self, prompt: Prompt) -> Prefilled:
        """Run a prompt once; ``.generate(…)`` and ``.stream(…)`` of the result go on from copies of
        it, with the arguments of this object's (but for the prompt) and the same tokens.

        Raises:
            InputError: naming the prompt's fault and what is valid.
        """
        return Prefilled(self, prompt)


def check_not_prefilled(prompt: object, name: str = "prompt") -> None:
    """Refuse what `LLM.prefill` made where a prompt is wanted.

    Args:
        name: of the argument, for the message.
    Raises:
        InputError: saying what to call.
    """
    if isinstance(prompt, Prefilled):
        valid = "prefilled.generate(max_new_tokens, …) of the result itself, or its prompt here"
        raise InputError(f"{name} is a result of LLM.prefill; valid: {valid}", name)
