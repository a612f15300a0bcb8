"""What a machine could do at best (Table 2), and what a draft model is (Table 11)."""

from __future__ import annotations

from typing import Any

import torch

from tokenswift.engine.llm import LLM
from tokenswift.roofline.machine import arithmetic, bandwidth, least
from tokenswift.roofline.sizes import sizes_of_target

SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices multiplied to measure arithmetic


@torch.inference_mode()
def measure(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """Time that one token's pass must take, by bandwidth and arithmetic measured here, and what it takes.

    The context is ``config["prefill"]`` tokens (made up: only their number matters).
    """
    target, context = llm.target, config["prefill"]
    device, dtype = target.device, target.dtype
    reads = bandwidth(device)
    flops = arithmetic(device, dtype, SIDE[target.backend.kind])
    cache = target.new_cache(context + 1)
    cache.data.zero_()
    cache.commit(tuple(range(context)))
    token, position = torch.zeros(1, dtype=torch.long, device=device), torch.tensor([context], device=device)
    taken = least(lambda: target.logits(target.forward(token, position, cache).hidden))
    kv = context * target.kv_bytes
    heads = llm.target.config.num_attention_heads
    attention = 4 * target.layers * heads * target.head_dim * context
    operations = 2 * sum(sizes_of_target(target).weights.values()) + attention
    return {
        "figures": {
            str(context): {
                "bandwidth": round(reads / 1e9, 1),
                "gflops": round(flops / 1e9, 1),
                "weights_gb": round(target.weight_bytes / 1e9, 3),
                "weights_ms": round(1000 * target.weight_bytes / reads, 3),
                "kv_gb": round(kv / 1e9, 3),
                "kv_ms": round(1000 * kv / reads, 3),
                "operations": round(operations / 1e9, 3),
                "compute_ms": round(1000 * operations / flops, 3),
                "pass_ms": round(1000 * taken, 3),
            }
        }
    }


def draft(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """The shape of TriForce's draft model.

    Raises:
        InputError: there is none for this model.
    """
    model = llm.draft_model(config["options"].get("draft_model"))
    there: Any = model.config
    rope = getattr(there, "rope_parameters", None) or {}
    shape = {
        "hidden size": there.hidden_size,
        "activation": there.hidden_act,
        "inner size": there.intermediate_size,
        "layers": there.num_hidden_layers,
        "positions": there.max_position_embeddings,
        "attention heads": there.num_attention_heads,
        "key/value heads": model.kv_heads,
        "RoPE θ": rope.get("rope_theta", getattr(there, "rope_theta", None)),
        "vocabulary": model.vocab_size,
        "weights, MB": round(model.weight_bytes / 1e6, 1),
    }
    return {"draft": shape}
