"""The engine against the machine's limits and against transformers, all in one run, in turns, medians.

    python bench/engine.py passes      time of a pass by rows and context; attention alone; read bandwidth
    python bench/engine.py decoding    plain decoding against transformers' generate, same sampler
    python bench/engine.py prefill     prefill against transformers' own
    python bench/engine.py memory      peak memory of a run, over weights and caches
    python bench/engine.py bookkeeping time of a step outside the model, at 64K of context over 1K
    python bench/engine.py all         all of them

Contexts of passes hold random keys (what they hold costs nothing); decoding and prefill run on real text.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import PROMPTS, ROOT, median, row, save
from tokenswift import LLM, SamplingParams
from tokenswift.cli.peer import token_times
from tokenswift.models.load import load

ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 41, 64)
CONTEXTS = (1024, 4096, 16384, 65536)


def timed(work: Callable[[], Any], least: float, runs: int) -> list[float]:
    """Milliseconds of each of several calls: at least ``runs``, and until ``least`` seconds are over."""
    work()
    found: list[float] = []
    end = time.perf_counter() + least
    while len(found) < runs or time.perf_counter() < end:
        since = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - since))
    return found


def bandwidth() -> float:
    """GB/s that all threads read from memory: sums over a GiB, the best of several."""
    data = torch.ones(1 << 28)
    return max(data.numel() * 4 / ms / 1e6 for ms in timed(lambda: data.sum(), 1.0, 5))


def text_of(llm: LLM, folder: Path, length: int) -> list[int]:
    """``length`` tokens of the folder's texts, one after another, again from the start when they end."""
    ids = llm.encode("\n\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))))
    return (ids * (1 + length // len(ids)))[:length]


def passes(args: argparse.Namespace) -> None:
    """A pass of n rows (body and LM head), attention of one layer, and the bandwidth around them."""
    llm = LLM(args.model, dtype=args.dtype, device="cpu", heads="none", rope_scaling="yarn")
    target, kernels = llm.target, llm.target.kernels
    for context in args.contexts:
        cache = target.new_cache(context + max(ROWS))
        cache.data.normal_()
        cache._length = context
        near = [bandwidth()]
        times: dict[int, list[list[float]]] = {n: [[], [], []] for n in ROWS}
        layer_bytes = 2 * target.kv_heads * target.head_dim * target.dtype.itemsize * context
        query = torch.randn(target.config.num_attention_heads, max(ROWS), target.head_dim)
        query = query.to(target.body.shape.active)
        for _ in range(args.rounds):  # in turns: what drifts drifts for all
            for n in ROWS:
                parents = [-1, *(i // 3 for i in range(n - 1))]  # three children a node
                tokens, positions = torch.arange(n) + 1000, torch.full((n,), context)
                hidden = target.forward(tokens, positions, cache, parents).hidden
                rows = query[:, :n].contiguous()
                for kind, work in enumerate(
                    (
                        lambda: target.forward(tokens, positions, cache, parents),  # noqa: B023
                        lambda: target.logits(hidden),  # noqa: B023
                        lambda: [kernels.attend(rows, i, cache, parents, 0.1) for i in range(10)],  # noqa: B023
                    )
                ):
                    times[n][kind] += timed(work, 0.0, 3)
            near.append(bandwidth())
        one = median(times[1][0]) + median(times[1][1])
        for n in ROWS:
            body, head, attention = (median(kind) for kind in times[n])
            figures = {
                "rows": n,
                "context": context,
                "dtype": llm.dtype,
                "body_ms": body,
                "head_ms": head,
                "over_one_row": round((body + head) / one, 3),
                "attention_ms_a_layer": round(attention / 10, 4),
                "attention_gb_s": round(layer_bytes / (attention / 10) / 1e6, 2),
                "bandwidth_gb_s": median(near),
                "share_of_bandwidth": round(layer_bytes / (attention / 10) / 1e6 / median(near), 3),
                "runs": len(times[n][0]),
            }
            save([row("engine-passes", **figures)], args.results)


def _theirs(model: Any, ids: list[int], new: int, cache: str | None) -> list[float]:
    """Milliseconds between transformers' tokens; the first gaps (prefill, compilation) left out."""
    times = token_times(model, ids, new, SamplingParams(), cache_implementation=cache)
    return [1e3 * (b - a) for a, b in zip(times[2:-1], times[3:], strict=True)]


def decoding(args: argparse.Namespace) -> None:
    """Milliseconds a token: plain decoding here, transformers' generate with its default and static cache."""
    llm = LLM(args.model, dtype=args.dtype, device="cpu", heads="none")
    model = load(args.model, dtype=args.dtype, device="cpu").model
    params = SamplingParams(seed=0)
    for context in (1024, 8192 - args.new_tokens - 8):
        ids = text_of(llm, args.prompts, context)
        ours: list[float] = []
        theirs: dict[str, list[float]] = {"default": [], "static": []}
        for _ in range(args.pairs if context < 4096 else max(1, args.pairs // 2)):
            since: list[float] = []
            llm.generate(
                ids,
                args.new_tokens,
                "autoregressive",
                sampling=params,
                ignore_eos=True,
                on_step=lambda step: since.append(time.perf_counter()),  # noqa: B023
            )
            ours += [1e3 * (b - a) for a, b in zip(since[1:-1], since[2:], strict=True)]
            for name in theirs:
                theirs[name] += _theirs(model, ids, args.new_tokens, None if name == "default" else name)
        for name, gaps in theirs.items():
            figures = {
                "context": context,
                "cache": name,
                "dtype": llm.dtype,
                "plain_ms": median(ours),
                "transformers_ms": median(gaps),
                "speedup": round(median(gaps) / median(ours), 3),
                "tokens": len(ours),
            }
            save([row("engine-decoding", **figures)], args.results)


@torch.inference_mode()
def prefill(args: argparse.Namespace) -> None:
    """Seconds of a prompt's prefill, pairs in turn."""
    llm = LLM(args.model, dtype=args.dtype, device="cpu", heads="none")
    model = load(args.model, dtype=args.dtype, device="cpu").model
    for length in (1000, 8000):
        ids = text_of(llm, args.prompts, length)
        ours, theirs = [], []
        for _ in range(args.pairs if length < 4000 else max(1, args.pairs // 2)):
            since = time.perf_counter()
            llm.target.prefill(ids, llm.target.new_cache(length))
            ours.append(time.perf_counter() - since)
            since = time.perf_counter()
            model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
            theirs.append(time.perf_counter() - since)
        figures = {
            "tokens": length,
            "dtype": llm.dtype,
            "seconds": median(ours),
            "transformers_seconds": median(theirs),
            "speedup": round(median(theirs) / median(ours), 3),
            "pairs": len(ours),
        }
        save([row("engine-prefill", **figures)], args.results)


_MEMORY = """
import gc, re, sys, threading, time, torch
from pathlib import Path
import tokenswift, transformers, tokenswift.models.target
from transformers import LlamaConfig, LlamaForCausalLM
from tokenswift.models.target import make_target
small = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2)).eval()
make_target(small)
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from tokenswift.models.load import locate
tokenizer = AutoTokenizer.from_pretrained(locate(sys.argv[1])[0])  # libraries and tokenizer are the base
gc.collect()
peaks = [0, 0]
def look():  # the process's own memory, and with the checkpoint's mapped file, which the system can drop
    text = Path("/proc/self/status").read_text()
    return [1024 * int(re.search(name + r":\s+(\d+)", text)[1]) for name in ("RssAnon", "VmRSS")]
def watch():
    while True:
        peaks[:] = map(max, peaks, look())
        time.sleep(0.005)
before = look()[0]
threading.Thread(target=watch, daemon=True).start()
llm = tokenswift.LLM(sys.argv[1], dtype=sys.argv[2], device="cpu")
loaded = peaks[0]
ids = [1000 + i % 5000 for i in range(8000)]
llm.generate(ids, 150, sys.argv[3], ignore_eos=True)
peak = peaks[0]
heads = sum(p.numel() * p.element_size() for p in llm.heads.parameters()) if llm.heads else 0
if llm.heads and sys.argv[3] == "tokenswift":  # the LM head's rows that drafts may consist of
    heads += len(llm.heads.frequent) * llm.target.hidden_size * llm.target.dtype.itemsize
caches = 8150 * llm.target.kv_bytes
print(before, loaded, peak, peaks[1], llm.target.weight_bytes + heads, caches)
"""


def memory(args: argparse.Namespace) -> None:
    """Peak anonymous memory of a process that loads the model and writes at 8K of context."""
    for strategy in ("autoregressive", "tokenswift"):
        ran = subprocess.run(
            [sys.executable, "-c", _MEMORY, args.model, args.dtype, strategy], capture_output=True, text=True
        )
        if ran.returncode:
            raise SystemExit(f"error: the run failed: {ran.stderr.strip().splitlines()[-1]}")
        before, loaded, peak, mapped, weights, caches = map(int, ran.stdout.split())
        figures = {
            "strategy": strategy,
            "context": 8150,
            "dtype": args.dtype,
            "weights_mb": round(weights / 1e6),
            "caches_mb": round(caches / 1e6),
            "peak_mb": round((peak - before) / 1e6),
            "while_loading_mb": round((loaded - before) / 1e6),
            "peak_with_mapped_files_mb": round((mapped - before) / 1e6),
            "over_weights_and_caches": round((peak - before) / (weights + caches), 3),
        }
        save([row("engine-memory", **figures)], args.results)


def bookkeeping(args: argparse.Namespace) -> None:
    """Milliseconds a step outside the model's passes, at 64K of context over 1K (drafting from the state)."""
    llm = LLM(args.model, dtype=args.dtype, device="cpu", rope_scaling="yarn")
    target: Any = llm.target
    spent = {"model": 0.0, "all": 0.0}
    real = {name: getattr(target, name) for name in ("forward", "logits", "project")}

    def clocked(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            since, nested = time.perf_counter(), spent["model"]
            try:
                return real[name](*args, **kwargs)
            finally:
                spent["model"] = nested + time.perf_counter() - since

        return run

    def fill(tokens: list[int], cache: Any) -> Any:
        """Random keys instead of a prefill, and real states for the last tokens."""
        cache.data.normal_()
        cache._length = len(tokens) - 40
        return real_prefill(tokens[-40:], cache)

    real_prefill = target.prefill
    target.prefill = fill
    for name in real:
        setattr(target, name, clocked(name))
    found: dict[tuple[str, int], list[float]] = {}
    options = {"tree": (1, 3, 3, 3), "ngrams": 20, "draft": "hidden"}
    for _ in range(max(1, args.pairs // 2)):
        for context in (1024, 65536):
            ids = text_of(llm, args.prompts, context)
            for strategy in ("autoregressive", "tokenswift"):
                since: list[tuple[float, float]] = []
                llm.generate(
                    ids,
                    16,
                    strategy,
                    options if strategy == "tokenswift" else None,
                    ignore_eos=True,
                    on_step=lambda step: since.append((time.perf_counter(), spent["model"])),  # noqa: B023
                )
                gaps = [1e3 * (b[0] - a[0] - (b[1] - a[1])) for a, b in zip(since, since[1:], strict=False)]
                found.setdefault((strategy, context), []).extend(gaps)
    for strategy in ("autoregressive", "tokenswift"):
        short, long = (median(found[strategy, context]) for context in (1024, 65536))
        figures = {"strategy": strategy, "dtype": llm.dtype, "ms_at_1k": short, "ms_at_64k": long}
        save([row("engine-bookkeeping", **figures, ratio=round(long / short, 3))], args.results)


BENCHES = {
    "passes": passes,
    "decoding": decoding,
    "prefill": prefill,
    "memory": memory,
    "bookkeeping": bookkeeping,
}


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bench", nargs="?", default="all", choices=[*BENCHES, "all"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--dtype", default="all", help="float32, bfloat16, or all: both; default: %(default)s"
    )
    parser.add_argument("--contexts", type=lambda t: tuple(map(int, t.split(","))), default=CONTEXTS)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of .txt files")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="of the passes, in turns")
    parser.add_argument("--results", type=Path, default=None, help="JSON-lines file to append to")
    args = parser.parse_args()
    dtypes = ["float32", "bfloat16"] if args.dtype == "all" else [args.dtype]
    for name in BENCHES if args.bench == "all" else [args.bench]:
        for args.dtype in dtypes:
            BENCHES[name](args)


if __name__ == "__main__":
    if not ROOT.is_dir():
        raise SystemExit("error: run from a checkout")
    main()
