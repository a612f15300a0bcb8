"""The engine against the machine's limits and against transformers: passes, memory, bookkeeping,
what a machine could do at best (Table 2), and what a draft model is (Table 11).

Contexts of passes hold random keys (what they hold costs nothing).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any

import psutil
import torch

from benchmarks.clock import median, times
from benchmarks.common import Trial, options_of
from benchmarks.roofline import arithmetic, bandwidth, least, weights_of
from tokenswift.engine.llm import LLM
from tokenswift.loader.find import locate
from tokenswift.loader.load import load_tokenizer
from tokenswift.models.target import backend_for
from tokenswift.types import InputError

ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 41, 64)
#: of a draft model in Table 11: name → field of its config
SHAPE = {
    **{"hidden size": "hidden_size", "activation": "hidden_act", "inner size": "intermediate_size"},
    **{"layers": "num_hidden_layers", "positions": "max_position_embeddings", "vocabulary": "vocab_size"},
    **{"attention heads": "num_attention_heads", "key/value heads": "num_key_value_heads"},
}
REAL = 40  # tokens of a long context that a prefill really runs on
SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices multiplied to measure arithmetic


def passes(trial: Trial) -> dict[str, Any]:
    """A pass of n rows, its LM head, and attention of one layer, with the read bandwidth around them; in
    turns, so that what drifts drifts for all.

    Raises:
        InputError: the model does not run on our own layers.
    """
    target: Any = trial.llm.target
    backend, context = target.backend, trial.config["prefill"]
    if target.layout is None:
        model = trial.config["model"]
        raise InputError(f"passes are measured with our own layers, which {model} does not run on")
    cache = target.new_cache(context + max(ROWS))
    cache.fill_random()
    cache.commit(tuple(range(context)))
    device = target.device
    block = torch.ones(1 << 28, dtype=torch.float32, device=device)

    def reading() -> float:
        return block.numel() * 4 / min(times(block.sum, least=1.0)) / 1e6

    near = [reading()]
    query = torch.randn(
        target.config.num_attention_heads, max(ROWS), target.head_dim, dtype=torch.float32, device=device
    )
    query = query.to(target.body.shape.active)
    taken: dict[int, list[list[float]]] = {n: [[], [], []] for n in ROWS}
    for _ in range(trial.rounds):
        for n in ROWS:
            parents = [-1, *(i // 3 for i in range(n - 1))]  # three children a node
            tokens = torch.arange(n, device=device)
            positions = torch.full((n,), context, device=device)
            hidden, rows = target.forward(tokens, positions, cache, parents).hidden, query[:, :n].contiguous()
            works: tuple[Callable[[], object], ...] = (
                lambda: target.forward(tokens, positions, cache, parents),  # noqa: B023
                lambda: target.logits(hidden),  # noqa: B023
                lambda: [backend.attend(rows, i, cache, parents, 0.1) for i in range(target.layers)],  # noqa: B023
            )
            for found, work in zip(taken[n], works, strict=True):
                found += times(work, 3)
        near.append(reading())
    layer = target.kv_bytes / target.layers * context
    figures: dict[str, dict[str, float]] = {}
    for n in ROWS:
        body, head, attention = (median(kind) for kind in taken[n])
        rate = layer / (attention / target.layers) / 1e6
        figures[str(n)] = {
            "body_ms": body,
            "head_ms": head,
            "pass_ms": round(body + head, 4),
            "over_one_row": round((body + head) / (median(taken[1][0]) + median(taken[1][1])), 3),
            "attention_ms_a_layer": round(attention / target.layers, 4),
            "attention_gb_s": round(rate, 2),
            "bandwidth_gb_s": median(near),
            "share_of_bandwidth": round(rate / median(near), 3),
            "runs": len(taken[n][0]),
        }
    return {"figures": figures}


def _memory() -> tuple[int, int]:
    """The process's own memory, and with mapped files, which the system can drop; in bytes."""
    info: Any = psutil.Process().memory_info()
    return info.rss - info.shared, info.rss


def memory(config: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of a process that loads the model and writes; libraries and tokenizer are there before.

    Raises:
        InputError: this system does not tell mapped files apart.
    """
    if not sys.platform.startswith("linux"):
        raise InputError("memory is measured without mapped files, which Linux alone tells apart")
    base = [backend_for(), load_tokenizer(config["model"], locate(config["model"]))]
    gc.collect()
    before, peaks, over = _memory()[0], [0, 0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            peaks[:] = map(max, peaks, _memory())
            sleep(0.005)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    prompt_tokens, new = config["prefill"], config["points"][-1]
    llm = LLM(config["model"], dtype=config["dtype"], device="cpu", heads=config["heads"])
    loaded = peaks[0]
    words = llm.target.vocab_size // 8
    ids = [words // 5 + i % words for i in range(prompt_tokens)]
    llm.generate(ids, new, config["strategy"], options_of(config), ignore_eos=True)
    over.set()
    watching.join()
    del base
    heads = llm.resources.heads if config["strategy"] in ("auto", "tokenswift") else None
    weights, target = llm.target.weight_bytes, llm.target
    if heads is not None and heads.frequent is not None:
        weights += sum(p.numel() * p.element_size() for p in heads.parameters())
        weights += len(heads.frequent) * target.hidden_size * target.dtype.itemsize  # rows drafts consist of
    caches = (prompt_tokens + new) * target.kv_bytes
    figures = {
        "weights_mb": round(weights / 1e6),
        "caches_mb": round(caches / 1e6),
        "peak_mb": round((peaks[0] - before) / 1e6),
        "while_loading_mb": round((loaded - before) / 1e6),
        "peak_with_mapped_files_mb": round((peaks[1] - before) / 1e6),
        "over_weights_and_caches": round((peaks[0] - before) / (weights + caches), 3),
    }
    of_heads = None if heads is None else {"kind": heads.kind, "count": heads.count}
    return {"dtype": llm.dtype, "heads": of_heads, "figures": {str(prompt_tokens + new): figures}}


def bookkeeping(trial: Trial) -> dict[str, Any]:
    """Milliseconds a step outside the model's passes, at each of ``contexts``."""
    target: Any = trial.llm.target
    contexts = trial.config["contexts"]
    spent = 0.0
    real = {name: getattr(target, name) for name in ("forward", "logits", "project", "prefill")}

    def clocked(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            since, nested = perf_counter(), spent
            try:
                return real[name](*args, **kwargs)
            finally:
                spent = nested + perf_counter() - since

        return run

    def fill(tokens: list[int], cache: Any, *more: Any, **rest: Any) -> Any:
        """Random keys instead of a prefill, and real states for the last tokens."""
        cache.fill_random()
        cache.commit(tuple(range(len(tokens) - REAL)))
        return real["prefill"](tokens[-REAL:], cache, *more, **rest)

    for name in ("forward", "logits", "project"):
        setattr(target, name, clocked(name))
    target.prefill = fill
    found: dict[int, list[float]] = {context: [] for context in contexts}
    for _ in range(trial.rounds):
        for context, gaps in found.items():
            marks: list[tuple[float, float]] = []
            trial.llm.generate(
                trial.prompt(context).ids,
                trial.new,
                trial.config["strategy"],
                trial.options,
                ignore_eos=True,
                on_step=lambda step: marks.append((perf_counter(), spent)),  # noqa: B023
            )
            gaps += [1e3 * (b[0] - a[0] - (b[1] - a[1])) for a, b in pairwise(marks)]
    figures = {str(context): {"ms": median(gaps)} for context, gaps in found.items()}
    first, last = (figures[str(contexts[at])] for at in (0, -1))
    last["ratio"] = round(last["ms"] / first["ms"], 3)
    return {"figures": figures}


@torch.inference_mode()
def machine(trial: Trial) -> dict[str, Any]:
    """Time that one token's pass must take, by bandwidth and arithmetic measured here, and what it takes.

    The context is ``prefill`` tokens (made up: only their number matters).
    """
    target, context = trial.llm.target, trial.config["prefill"]
    device, dtype = target.device, target.dtype
    reads = bandwidth(device)
    flops = arithmetic(device, dtype, SIDE[target.backend.kind])
    cache = target.new_cache(context + 1)
    cache.data.zero_()
    cache.commit(tuple(range(context)))
    token, position = torch.zeros(1, dtype=torch.long, device=device), torch.tensor([context], device=device)
    taken = least(lambda: target.logits(target.forward(token, position, cache).hidden))
    kv = context * target.kv_bytes
    heads = target.config.num_attention_heads
    attention = 4 * target.layers * heads * target.head_dim * context
    operations = 2 * weights_of(target).total() + attention
    figures = {
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
    return {"figures": {str(context): figures}}


def draft(trial: Trial) -> dict[str, Any]:
    """The shape of TriForce's draft model.

    Raises:
        InputError: there is none for this model.
    """
    model = trial.llm.resources.draft_models.get(trial.config["options"].get("draft_model"))
    there: Any = model.config
    shape = {what: getattr(there, name, None) for what, name in SHAPE.items()}
    theta = (getattr(there, "rope_parameters", None) or vars(there)).get("rope_theta")
    return {"draft": {**shape, "RoPE θ": theta, "weights, MB": round(model.weight_bytes / 1e6, 1)}}
