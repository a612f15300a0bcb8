"""Memory of training heads for an 8B base, from the code itself, without the memory and without a GPU.

The library's functions run on tensors that have shapes but no data (torch's FakeTensorMode), with
Llama-3.1-8B's config in bfloat16; every allocation is followed, and the peak of the live bytes is the figure.
Not in it: the CUDA context, kernels' own workspaces, and what the allocator loses to fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from tokenswift.config import SamplingParams
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.train import loss
from tokenswift.train.loss import Distillation, FrozenBase
from tokenswift.train.selftext import Backbone, BatchCache, chances

LLAMA_31_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}


class Live(TorchDispatchMode):
    """Follows the bytes of all storages made while it is on, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, int] = {}
        self.peak = 0

    def now(self) -> int:
        """Live bytes."""
        self.known = {ref: size for ref, size in self.known.items() if not ref.expired()}
        return sum(self.known.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):  # what was there before is not counted, nor its views
                self.known.setdefault(StorageWeakRef(leaf.untyped_storage()), 0)
        out = func(*args, **(kwargs or {}))
        fresh = False
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                ref = StorageWeakRef(leaf.untyped_storage())
                if ref not in self.known:
                    self.known[ref] = leaf.untyped_storage().nbytes()
                    fresh = True
        if fresh:
            self.peak = max(self.peak, self.now())
        return out


def peak_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Peak of what ``work`` allocates beyond what was there, in GB (1e9 bytes), and its result."""
    with Live() as live:
        result = work()
    return live.peak / 1e9, result


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """The stages of training ``count`` heads with texts of ``block`` tokens, ``batch`` together."""
    figures: dict[str, float] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model: Any
        try:
            weights, model = peak_of(lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_31_8B)).eval())
        finally:
            torch.set_default_dtype(usual)
        figures = {"weights_gb": weights, **collecting(model, config["block"], config["batch"])}
        figures |= training(model, config["count"])
    made = {key: round(value, 2) for key, value in figures.items()}
    heads = {"kind": "conditioned", "count": config["count"]}
    return {"dtype": "bfloat16", "heads": heads, "figures": {str(config["batch"]): made}}


def collecting(model: Any, block: int, batch: int) -> dict[str, float]:
    """Hidden states of given text, and text that the model writes."""
    backbone = Backbone(model)
    texts = torch.zeros(batch, block, dtype=torch.long)
    given, hidden = peak_of(lambda: backbone.hidden(texts))
    state = hidden[:, :1].clone()
    cache = BatchCache(block)
    sampling = SamplingParams()
    prefill, _ = peak_of(lambda: backbone.hidden(texts[:, :256], cache))
    cached = sum(x.nbytes for pair in cache.layers.values() for x in pair) / 1e9
    cache.length = block - 1

    def step() -> None:
        newest = backbone.hidden(texts[:, :1], cache)
        chances(backbone.logits(newest[:, -1]), texts[:, -sampling.penalty_window :], sampling).cumsum(-1)

    one_step, _ = peak_of(step)
    # A batch's states, and once more to put them together.
    states = 2 * block * state.nbytes / 1e9
    return {
        "given_text_gb": given,
        "own_text_cache_gb": cached,
        "own_text_states_gb": states,
        "own_text_pass_gb": max(prefill - cached, one_step),
    }


def training(model: Any, count: int) -> dict[str, float]:
    """The frozen base's copies, the heads with their optimiser, and a step over the whole vocabulary."""
    vocab, width = LLAMA_31_8B["vocab_size"], LLAMA_31_8B["hidden_size"]
    loss.most_kept = lambda scores: 64  # shapes without data: how many tokens min-p 0.1 leaves
    copies, base = peak_of(lambda: FrozenBase(model, torch.arange(vocab)))
    heads = Heads(HeadsConfig("conditioned", count, width, vocab, 1024))
    weights = sum(p.nbytes for p in heads.parameters()) / 1e9
    objective = Distillation(heads, base, SamplingParams())
    rows, context = 128, SamplingParams().penalty_window
    batch = {
        "tokens": torch.zeros(4, context + rows + count, dtype=torch.long),
        "hidden": torch.zeros(4, rows + count, width, dtype=torch.bfloat16),
        "valid": torch.ones(4, rows, dtype=torch.bool),
    }

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = objective(**batch)["loss"]
        loss.backward()

    step_gb, _ = peak_of(step)
    return {"frozen_copies_gb": copies, "heads_and_adam_gb": 3 * weights, "step_gb": step_gb}
