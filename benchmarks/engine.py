"""The engine against the machine's limits and against transformers: passes, prefill, memory, bookkeeping, the
n-gram table, what a machine could do at best (Table 2), and what a draft model is (Table 11).

Contexts of passes hold random keys (what they hold costs nothing); prefill runs on real text.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

from benchmarks.common import Trial, options_of
from tokenswift.engine.llm import LLM
from tokenswift.loader.find import locate
from tokenswift.loader.load import load_tokenizer
from tokenswift.roofline.machine import arithmetic, bandwidth, least
from tokenswift.roofline.sizes import sizes_of_target
from tokenswift.roofline.timer import median, once, times
from tokenswift.spec.drafters.lookup import NgramTable
from tokenswift.types import InputError

ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 41, 64)
REAL = 40  # tokens of a long context that a prefill really runs on
SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices multiplied to measure arithmetic
NGRAM_STEP = 4  # tokens appended between lookups, as in decoding
NGRAM_DELAY, NGRAM_WORDS, NGRAM_REPEATS = 1024, 49_152, 3  # of the repeats the best counts


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


@torch.inference_mode()
def prefill(trial: Trial) -> dict[str, Any]:
    """Seconds of a prompt's prefill, ours and transformers' in turn."""
    model, target, ids = trial.llm.model, trial.llm.target, trial.prompt().ids
    length = len(ids)
    given = torch.tensor([ids], device=target.device)
    ours, theirs = [], []
    for _ in range(trial.rounds):
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
    operations = 2 * sum(sizes_of_target(target).weights.values()) + attention
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


def zipf_text(length: int, vocab: int, seed: int = 0) -> list[int]:
    """Tokens of Zipf's law; one in four stretches of 8 is copied from earlier, as in long outputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64)
    text = torch.multinomial(weights, length, replacement=True, generator=generator)
    for start in range(64, length - 8, 32):
        source = int(torch.randint(0, start - 8, (1,), generator=generator))
        text[start : start + 8] = text[source : source + 8].clone()
    return text.tolist()


def ngram_costs(text: list[int], k: int) -> dict[str, float]:
    """Microseconds per appended token and per lookup; the lookups of the last tenth apart."""
    table, whole = NgramTable(NGRAM_DELAY), NgramTable(NGRAM_DELAY)
    append, lookups = [], []
    for start in range(0, len(text), NGRAM_STEP):
        chunk = text[start : start + NGRAM_STEP]
        append.append(once(lambda: table.extend(chunk)))  # noqa: B023
        lookups.append(once(lambda: table.lookup(chunk[-1], k)))  # noqa: B023
    tail = lookups[int(0.9 * len(lookups)) :]
    return {
        "append_us": 1e3 * sum(append) / len(text),
        "append_bulk_us": 1e3 * once(lambda: whole.extend(text)) / len(text),
        "lookup_us": 1e3 * sum(lookups) / len(lookups),
        "lookup_last_tenth_us": 1e3 * sum(tail) / len(tail),
        "lookup_worst_us": 1e3 * max(lookups),
    }


def ngram(config: dict[str, Any]) -> dict[str, Any]:
    """Cost of the n-gram table against the length of the text, on Zipf-like text, at each of ``points``."""
    text = zipf_text(config["points"][-1], NGRAM_WORDS)
    figures = {}
    for size in config["points"]:
        runs = [ngram_costs(text[:size], config["options"]["ngrams"]) for _ in range(NGRAM_REPEATS)]
        figures[str(size)] = {name: round(min(run[name] for run in runs), 3) for name in runs[0]}
    return {"figures": figures}
