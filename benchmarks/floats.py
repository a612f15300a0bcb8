"""Beside transformers' ``generate``: plain decoding with the very weights that it has, and with
those of the file."""

from __future__ import annotations

from copy import deepcopy
from time import perf_counter

import torch
from transformers import DynamicCache

from benchmarks.common import PLAIN, Side, Trial, in_turns, ratios, spread
from benchmarks.words import Measured
from tokenswift.checks import check_choice
from tokenswift.engine.llm import LLM

FLOATS = ("float32", "bfloat16", "float16")  # what transformers computes in
PEER = "peer"
WARM = 64  # tokens of a prompt that is read before
#: sampling parameters that transformers has, too
SHARED_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Clock:
    """A streamer of transformers that notes when tokens come.

    Attributes:
        times: of the prompt, then of each token.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with every token."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Called at the end."""


class Peer:
    """transformers' ``generate`` after a prompt that is in its cache already.

    Its repetition penalty looks at the whole text, and its text is not ours.

    Args:
        llm: the model, run by transformers.
        ids: the prompt.
        trial: how many tokens to write, and how they are chosen.

    Attributes:
        prompt_speed: tokens of the prompt a second.
    """

    def __init__(self, llm: LLM, ids: list[int], trial: Trial) -> None:
        self._model = llm.model
        self._ids = torch.tensor([ids], device=self._model.device)
        self._cache = DynamicCache(config=self._model.config)
        self._new_tokens = trial.new_tokens
        self._params = trial.params
        with torch.inference_mode():
            self._model(self._ids[:, :WARM], use_cache=True, logits_to_keep=1)
            start = perf_counter()
            self._model(
                self._ids[:, :-1], past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            self.prompt_speed = len(ids) / (perf_counter() - start)

    def speed(self) -> float:
        """Tokens a second of one text."""
        params = self._params
        sampling = {name: getattr(params, name) for name in SHARED_SAMPLING}
        clock = Clock()
        torch.manual_seed(params.seed)
        with torch.inference_mode():
            self._model.generate(
                self._ids,
                past_key_values=deepcopy(self._cache),
                streamer=clock,
                max_new_tokens=self._new_tokens,
                min_new_tokens=self._new_tokens,
                do_sample=not params.greedy,
                pad_token_id=0,
                eos_token_id=None,
                attention_mask=torch.ones_like(self._ids),
                **({} if params.greedy else sampling),
            )
        return (self._new_tokens - 1) / (clock.times[-1] - clock.times[1])

    @property
    def weight_bytes(self) -> int:
        """Of all parameters."""
        parameters = self._model.parameters()
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def speed(trial: Trial) -> Measured:
    """Tokens a second of each, in turns, with the bytes of weights that a token reads.

    Raises:
        InputError: a dtype that transformers does not compute in.
    """
    llm = trial.llm
    check_choice("dtype", llm.dtype, FLOATS)
    prompt = trial.prompt()

    def load() -> LLM:
        return LLM(
            trial.config["model"],
            dtype=llm.dtype,
            device=llm.device,
            weights=llm.dtype,
            heads="none",
        )

    peer = Peer(load(), prompt.ids, trial)
    figures = {
        "peer_weights_mb": peer.weight_bytes / 1e6,
        "peer_prompt": peer.prompt_speed,
    }
    sides: dict[str, Side] = {PEER: peer.speed}
    for name, form in {"float": load(), "stored": llm}.items():
        form.prefill(prompt.ids[:WARM])
        state = form.prefill(prompt.ids)
        figures[f"{name}_prompt"] = len(prompt.ids) / state.seconds
        figures[f"{name}_weights_mb"] = form.target.weight_bytes / 1e6
        sides[name] = lambda state=state: trial.generate(state, PLAIN).metrics.tokens_per_second
    speeds = in_turns(sides, trial.rounds)
    for name, values in speeds.items():
        figures |= spread(name, values)
        figures |= spread(f"{name}_over_peer", ratios(values, speeds[PEER]))
    return trial.row(figures, prompt)
