"""The engine against the machine's limits and against transformers: passes, prefill, memory, bookkeeping.

Contexts of passes hold random keys (what they hold costs nothing); prefill runs on real text.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

from benchmarks.prompts import prompt
from tokenswift.engine.llm import LLM
from tokenswift.loader.load import load_tokenizer, locate
from tokenswift.roofline.timer import median, once, times
from tokenswift.types import InputError

ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 41, 64)
REAL = 40  # tokens of a long context that a prefill really runs on


def passes(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """A pass of n rows, its LM head, and attention of one layer, with the read bandwidth around them; in
    turns, so that what drifts drifts for all.

    Raises:
        InputError: the model does not run on our own layers.
    """
    target: Any = llm.target
    backend = target.backend
    if target.layout is None:
        raise InputError(f"passes are measured with our own layers, which {config['model']} does not run on")
    context = config["prefill"]
    cache = target.new_cache(context + max(ROWS))
    cache.fill_random()
    cache.commit(tuple(range(context)))
    device = target.device
    block = torch.ones(1 << 28, dtype=torch.float32, device=device)

    def bandwidth() -> float:
        return block.numel() * 4 / min(times(block.sum, least=1.0)) / 1e6

    near = [bandwidth()]
    query = torch.randn(
        target.config.num_attention_heads, max(ROWS), target.head_dim, dtype=torch.float32, device=device
    )
    query = query.to(target.body.shape.active)
    taken: dict[int, list[list[float]]] = {n: [[], [], []] for n in ROWS}
    for _ in range(config["rounds"]):
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
        near.append(bandwidth())
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


@torch.inference_mode()
def prefill(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a prompt's prefill, ours and transformers' in turn."""
    length, model, target = config["prefill"], llm.model, llm.target
    ids = prompt(config["prompts"], llm.encode, 0, length, target.vocab_size).ids
    given = torch.tensor([ids], device=target.device)
    ours, theirs = [], []
    for _ in range(config["rounds"]):
        ours.append(once(lambda: target.prefill(ids, target.new_cache(length))))
        theirs.append(once(lambda: model(given, use_cache=True, logits_to_keep=1)))
    figures = {"seconds": median(ours) / 1e3, "peer_seconds": median(theirs) / 1e3}
    figures["speedup"] = round(median(theirs) / median(ours), 3)
    return {"figures": {str(length): figures}, "runs": len(ours)}


def _memory() -> tuple[int, int]:
    """The process's own memory, and with mapped files, which the system can drop; in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    own, all_of_it = (int(re.findall(rf"{name}:\s+(\d+)", text)[0]) for name in ("RssAnon", "VmRSS"))
    return 1024 * own, 1024 * all_of_it


def memory(config: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of a process that loads the model and writes; libraries and tokenizer are there before.

    Raises:
        InputError: this system does not tell (it has no /proc).
    """
    if not Path("/proc/self/status").is_file():
        raise InputError("memory is measured by /proc/self/status, which this system does not have")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from tokenswift.models.target import make_target

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    make_target(LlamaForCausalLM(LlamaConfig(**sizes)).eval())
    base = [AutoModelForCausalLM, load_tokenizer(config["model"], *locate(config["model"]))]
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
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}
    llm.generate(ids, new, config["strategy"], options, ignore_eos=True)
    over.set()
    watching.join()
    del base
    heads = llm.heads if config["strategy"] in ("auto", "tokenswift") else None
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


def bookkeeping(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds a step outside the model's passes, at each of ``contexts``."""
    target: Any = llm.target
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
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}
    found: dict[int, list[float]] = {context: [] for context in config["contexts"]}
    for _ in range(config["rounds"]):
        for context, gaps in found.items():
            ids = prompt(config["prompts"], llm.encode, 0, context, target.vocab_size).ids
            marks: list[tuple[float, float]] = []
            llm.generate(
                ids,
                config["points"][-1],
                config["strategy"],
                options,
                ignore_eos=True,
                on_step=lambda step: marks.append((perf_counter(), spent)),  # noqa: B023
            )
            gaps += [1e3 * (b[0] - a[0] - (b[1] - a[1])) for a, b in zip(marks, marks[1:], strict=False)]
    figures = {str(context): {"ms": median(gaps)} for context, gaps in found.items()}
    first, last = (figures[str(config["contexts"][at])] for at in (0, -1))
    last["ratio"] = round(last["ms"] / first["ms"], 3)
    return {"figures": figures}
