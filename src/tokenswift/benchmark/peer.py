"""Other programs with our model and sampling settings, for comparison of speed: transformers' own
``generate``, also with a static cache or prompt look-up, and llama.cpp where llama-cpp-python is installed.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenswift.config import SamplingParams, check_choice
from tokenswift.types import InputError

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM


class _Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called with the prompt, then with every token."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Called at the end."""


def settings(sampling: SamplingParams) -> dict[str, Any]:
    """Arguments of ``generate`` that mean the same (its penalty looks at the whole text)."""
    p = sampling
    given: dict[str, Any] = {"do_sample": not p.greedy, "repetition_penalty": p.repetition_penalty}
    if p.greedy:
        return given
    given |= {"temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p}
    if p.min_p:
        given["min_p"] = p.min_p
    if p.eta_cutoff:
        given["eta_cutoff"] = p.eta_cutoff
    return given


def token_times(
    model: Any, prompt: list[int], tokens: int, sampling: SamplingParams, **more: Any
) -> list[float]:
    """When each token of transformers' ``generate`` came, in seconds; the first entry is the prompt's.

    Args:
        model: a transformers causal LM.
        prompt: token ids.
        tokens: how many to write; the text is not ours (another random generator).
        more: further arguments of ``generate``; with prompt look-up an entry stands for a step.
    """
    import torch

    ids = torch.tensor([prompt], device=model.device)
    clock = _Clock()
    torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=None,
            streamer=clock,
            **settings(sampling),
            **more,
        )
    return clock.times


def generate_rate(llm: LLM, prompt: list[int], tokens: int, sampling: SamplingParams, **more: Any) -> float:
    """Tokens a second of transformers' ``generate`` on the same model, from the first new token on.

    The model's weights exist twice from then on (`LLM.model`). Arguments as of :func:`token_times`; at
    least 2 tokens.
    """
    times = token_times(llm.model, prompt, tokens, sampling, **more)
    return (tokens - 1) / (times[-1] - times[1])


#: what of transformers' ``generate`` makes a peer
PEERS: dict[str, dict[str, Any]] = {
    "generate": {},
    "static": {"cache_implementation": "static"},
    "look-up": {"prompt_lookup_num_tokens": 10},
}


def measure(llm: LLM, config: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """Plain decoding and the strategy beside it, then the peer, after the same prompt.

    Raises:
        InputError: no such peer, or llama.cpp's model or package is missing.
    """
    from tokenswift.benchmark.paired import figures, paired_run  # not at the top: torch comes with it

    name, new = config["peer"], config["points"][-1]
    check_choice("peer", name, (*PEERS, "llama.cpp"))
    params = SamplingParams(**config["sampling"])
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}
    theirs = _llama(config["gguf"], ids, new, params) if name == "llama.cpp" else None
    sides = paired_run(llm.prefill(ids), config["strategy"], options, params, [new])
    ours = figures(*sides, new)
    if theirs is None:
        if name == "look-up":  # an entry of its times stands for a step of several tokens
            theirs = generate_rate(llm, ids, new, params, **PEERS[name])
        else:
            times = token_times(llm.model, ids, new, params, **PEERS[name])[2:]  # prefill, compilation
            theirs = (len(times) - 1) / (times[-1] - times[0])
    found = {
        "plain_ms": ours["plain_ms"],
        "auto_ms": ours["ms"],
        "peer_ms": 1e3 / theirs,
        "peer_tokens_per_second": theirs,
        "plain_over_peer": 1e3 / theirs / ours["plain_ms"],
        "auto_over_peer": 1e3 / theirs / ours["ms"],
    }
    return {"figures": {str(len(ids)): {key: round(value, 4) for key, value in found.items()}}}


def _llama(file: str, ids: list[int], count: int, params: SamplingParams) -> float:
    """Tokens a second of llama.cpp with the same sampling, prefill apart. The file is made of the same
    weights in the same type by its ``convert_hf_to_gguf.py --outtype f32`` (or ``bf16``)."""
    import torch

    if not file:
        raise InputError("gguf is ''; valid for llama.cpp: the model in its format and the same type")
    try:
        from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("peer llama.cpp needs the package llama-cpp-python") from None
    threads = torch.get_num_threads()
    model = Llama(
        file,
        n_ctx=len(ids) + count + 8,
        n_threads=threads,
        n_threads_batch=threads,
        last_n_tokens_size=params.window,
        verbose=False,
    )
    made = model.generate(
        ids,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        temp=params.temperature,
        repeat_penalty=params.repetition_penalty,
    )
    next(made)
    begun = perf_counter()
    for _ in range(count):
        next(made)
    return count / (perf_counter() - begun)
