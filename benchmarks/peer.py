"""transformers' own ``generate`` with our model and sampling settings, for comparison of speed; also with a
static cache or prompt look-up. (llama.cpp: `llama`. The same weights on both sides: `rates`.)
"""

from __future__ import annotations

from typing import Any

from benchmarks.paired import figures, paired_run
from tokenswift.config import SamplingParams, check_choice
from tokenswift.engine.llm import LLM
from tokenswift.engine.peer import bytes_read, token_times


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
        InputError: no such peer.
    """
    name, new = config["peer"], config["points"][-1]
    check_choice("peer", name, tuple(PEERS))
    params = SamplingParams(**config["sampling"])
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}
    sides = paired_run(llm.prefill(ids), config["strategy"], options, params, [new])
    ours = figures(*sides, new)
    weights = llm.target.weight_bytes
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
        "weights_mb": weights / 1e6,
        "peer_weights_mb": bytes_read(llm.model) / 1e6,
    }
    return {"figures": {str(len(ids)): {key: round(value, 4) for key, value in found.items()}}}
