"""``LLM``, the public object: turns the arguments of a call into a `Request`, and runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Unpack

from tokenswift.chat import Reply, tools_of
from tokenswift.chat.prompts import Prompt
from tokenswift.checks import check_callback, check_integer
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import Strategy
from tokenswift.engine.arguments import GenerationArguments, SharedArguments, shows
from tokenswift.engine.infill import Infill, infill_request
from tokenswift.engine.many import generate_all
from tokenswift.engine.opened_model import OpenedModel
from tokenswift.engine.prefix_cache import PrefixCache
from tokenswift.engine.prompts import (
    chat_request,
    default_sampling,
    encode,
    encode_all,
    request_for,
)
from tokenswift.engine.request import Request
from tokenswift.engine.sequence import Sequence as TextSequence
from tokenswift.engine.stream import Prefilled, Stream, check_not_prefilled
from tokenswift.types import Generation, InputError, Step


class LLM(OpenedModel):
    """A language model that writes long text, exactly as plain decoding would.

    Args:
        model: a name that `tokenswift models` lists (``"smollm2-135m"``,
            ``"qwen2.5-coder-1.5b"``), a folder or a hub id of a transformers checkpoint, a GGUF
            file, a folder with one, or one of the hub (``"owner/name:file.gguf"``).
        dtype: what is computed in: "auto", "int8", "float32", "bfloat16", "float16", or one of
            these of torch. "auto" is the checkpoint's; for quantized weights int8 on a CPU,
            bfloat16 on CUDA. "int8": products of quantized weights, and keys and values; the rest
                in float32.
        device: "auto" (CUDA where there is one), "cpu", "cuda", or a device of torch.
        heads: "auto" (shipped heads that fit the model, else none), "none" or None, shipped ones by
            kind ("conditioned", "linear", "medusa"), a heads file, the folder or hub id of a
            published checkpoint with heads, or the heads themselves.
        eagle: an EAGLE-3 drafter for the model: folder, GGUF file, hub id or "shipped"; "auto": the
            one that was trained for it, where there is one; None: none.
        on_progress: told how far loading is: ``on_progress(stage, done, total)`` with the stages
            "fetch" (megabytes), "compile" (parts of the kernels), "load" (tensors) and "pack"
            (layers).

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

    def encode(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a prompt as `generate` takes it: of a text with the tokenizer's special
        tokens, of chat messages by the model's template, up to where the answer begins; ``tools``
        and ``template_options`` are given to it."""
        check_not_prefilled(prompt)
        known = tools_of(tools)
        forms = None if known is None else known.forms
        return encode(self.resources, prompt, template_options, forms)

    def default_sampling(self, prompt: Prompt) -> SamplingParams:
        """The sampling of a prompt for which none is given. Text and token ids, which are
        continued, have temperature 1, min-p 0.02 and DRY 0.8. Answers to chat messages have what
        the model itself names, else temperature 0.7 and min-p 0.05 without a penalty."""
        return default_sampling(self.resources, prompt)

    @shows(GenerationArguments)
    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        *,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[GenerationArguments],
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

        Keyword Args:
            ignore_eos (bool): go on after an end-of-text token (default False).
            stop (str | Sequence): a text, or several, of which the first to appear ends the text,
                which is cut before it (default none).
            on_loop (str): "stop" ends a text that repeats itself, "copies" does so only for
                exact copies in a row; "report" (default): `Metrics.loop` and `Metrics.litany` say
                so.
            run_dir (str | Path): keeps a journal of the run there, and goes on with it when the
                folder holds this very run already (see docs/runs.md).
            logprobs (int): tell each new token's log-probability and those of so many of the
                likeliest, 0 to 20 (`Logprob`, kept by no journal).
            prompt_logprobs (int): the same of the prompt's tokens, as the model itself has them, in
                ``result.prompt_logprobs``; None for the first token. No prefilled prompt is used.
            response_format (dict | Grammar): what the text has to be like, in OpenAI's form, or a
                `Grammar` (the sampling's ``grammar``; see docs/grammars.md).
            template_options (dict): variables of the chat template, such as
                ``{"enable_thinking": False}``.
            on_progress (Callable): ``on_progress(stage, done, total)`` is called during the prefill
                (stage "prompt", in tokens).
        Raises:
            InputError: naming the argument, its value and what is valid.
            RunError: the run failed on its way; the line says what was kept.
        """
        stream = self.stream(
            prompt, max_new_tokens, strategy, strategy_options, sampling, **options
        )
        return stream.finish(on_step)

    @shows(GenerationArguments)
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerationArguments],
    ) -> Stream:
        """The steps of `generate`, with its arguments, as they happen; their ``text`` holds
        complete characters only. After the last one ``stream.result`` is what `generate` would have
        returned (see `Stream`)."""
        check_not_prefilled(prompt)
        request = Request.of(
            prompt,
            self.default_sampling,
            max_new_tokens,
            strategy,
            strategy_options,
            sampling,
            **options,
        )
        return self.start(request)

    @shows(GenerationArguments)
    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool = True,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[GenerationArguments],
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
        check_not_prefilled(messages, "messages")
        request, calls = chat_request(
            self.resources,
            messages,
            tools_of(tools, tool_choice, parallel_tool_calls),
            max_new_tokens,
            strategy,
            strategy_options,
            sampling,
            **options,
        )
        generation = self.start(request).finish(on_step)
        # seeds the ids of calls: the same for the same run
        key = f"{request.prompt} {generation.token_ids}"
        text, tool_calls, reasoning = calls.read(generation.text, key)
        return Reply(text, tool_calls, generation, reasoning)

    @shows(GenerationArguments)
    def infill(
        self,
        prefix: str,
        suffix: str,
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        *,
        extra: Sequence[tuple[str, str]] = (),
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[GenerationArguments],
    ) -> Generation:
        """Write what stands between two texts, as editors do where the cursor is; for models that
        were trained to, such as Qwen2.5-Coder, StarCoder, DeepSeek-Coder and Granite's for code.

        Args:
            prefix: the text before the gap.
            suffix: the text behind it.
            max_new_tokens: default: 256; the model ends the text where it meets the suffix.
            sampling: default: the likeliest token each time, without penalties.
            extra: other files that may help, as names and texts, the nearest last.

        The others are `generate`'s. Raises as it does, and where the model has no marks for this.
        """
        request = infill_request(
            self.resources,
            Infill(prefix, suffix, extra),
            max_new_tokens,
            strategy,
            strategy_options,
            sampling,
            **options,
        )
        return self.start(request).finish(on_step)

    def start(self, request: Request, prefixes: PrefixCache | None = None) -> Stream:
        """Run a request as `stream` does.

        Args:
            request: the checked request.
            prefixes: a prefix cache, from which a shared prefix is copied instead of prefilled.
        """
        return Stream(TextSequence(self.resources, request, prefixes))

    @shows(SharedArguments)
    def generate_many(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        *,
        at_once: int | Literal["auto"] = "auto",
        n: int = 1,
        on_result: Callable[[int, Generation], None] | None = None,
        **options: Unpack[SharedArguments],
    ) -> list[Generation]:
        """Generate after several prompts, concurrently; the results are in the order of the
        prompts.

        Each result is, token by token, what `generate` returns for its prompt and seed alone. All
        are checked first.

        Args:
            prompts: a list, each entry as `generate` takes it (a chat is a list of messages).
            at_once: concurrent texts at most; "auto": as many as the memory holds, and pay.
            n: texts of each prompt, which stand together in the results: the first with the seed of
                the sampling, the next with the seed after it, and so on.
            on_result: called after each text with its index and its result, in the order in which
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
        resources = self.resources
        encoded = encode_all(resources, prompts, options.get("template_options"))
        requests = [
            request_for(
                resources,
                prompt,
                ids,
                max_new_tokens,
                strategy,
                strategy_options,
                sampling,
                **options,
            )
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]
        check_integer("n", n, 1)
        requests = [request.with_sample(number) for request in requests for number in range(n)]
        return generate_all(resources, requests, at_once, on_result)

    def prefill(self, prompt: Prompt) -> Prefilled:
        """Run a prompt once; ``.generate(…)`` and ``.stream(…)`` of the result go on from copies of
        it, with the arguments of this object's (but for the prompt) and the same tokens.

        Raises:
            InputError: naming the prompt's fault and what is valid.
        """
        check_not_prefilled(prompt)
        return Prefilled(self.resources, prompt)
