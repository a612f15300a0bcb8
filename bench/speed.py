"""Speed of every way to decode over plain decoding: same prompt, same state after it, in turns, medians.

    python bench/speed.py novel --contexts 1024,8192      automatic drafting on prose, by context
    python bench/speed.py kinds                           five prompts of different character
    python bench/speed.py rivals                          every strategy at its best options (searched)
    python bench/speed.py peers --gguf FILE               transformers' generate, also with prompt look-up;
                                                          llama.cpp where llama-cpp-python is installed
    python bench/speed.py all

Each round decodes by all ways one after another, plain decoding first and last; a ratio compares a run with
the mean of the plain ones around it. Texts are compared: a row says whether all tokens were the same.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from common import PROMPTS, decoded, median, prompts, row, save
from tokenswift import LLM, SamplingParams
from tokenswift.cli.peer import generate_rate

AUTO: tuple[str, dict[str, Any]] = ("tokenswift", {})
PAPER: tuple[str, dict[str, Any]] = ("tokenswift", {"tree": (1, 3, 3, 3), "ngrams": 20, "draft": "partial"})
GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)
#: what the search for a rival's best options tries
RIVALS: dict[str, list[dict[str, Any]]] = {
    "medusa": [{"tree": tree} for tree in ((1,), (2,), (1, 1), (2, 1), (3, 2))],
    "magicdec": [{"gamma": g, "kv": kv, "budget": 512} for g in (1, 2, 4) for kv in ("snapkv", "streaming")],
    "triforce": [{"gamma": g, "inner_gamma": i, "budget": 512} for g, i in ((2, 1), (4, 2), (6, 2))],
    "tokenswift": [
        {"tree": tree, "ngrams": 0, "draft": draft}
        for tree in ((1,), (2,), (1, 1), (2, 1), (3, 2, 1))
        for draft in ("hidden", "partial")
    ],
}


def kinds(llm: LLM, folder: Path, context: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts of different character, each with its sampling."""
    rnd = random.Random(0)
    names = [f"{a}_{b}" for a in ("load", "save", "parse", "check", "merge") for b in ("row", "table", "key")]
    code = "".join(
        f"def {name}(data, limit={i % 7}):\n    if data is None:\n        raise ValueError('no {name}')\n"
        f"    found = [entry.{name} for entry in data if entry.size > limit]\n    return sorted(found)\n\n\n"
        for i, name in enumerate(names * (1 + context // 400))
    )
    goods = ("pears", "apples", "lamps", "ropes", "coats", "nails")
    listing = "".join(f"{i}. {goods[i % 6]}: {10 + i % 6} boxes, shelf {i % 4}\n" for i in range(1, context))
    (_, novel), *_ = prompts(llm, folder, context, 1)
    vocabulary = llm.target.vocab_size
    return {
        "novel": (novel, SamplingParams()),
        "code": (llm.encode(code)[:context], GREEDY),
        "list": (llm.encode(listing)[:context], GREEDY),
        "random": ([rnd.randrange(vocabulary) for _ in range(context)], SamplingParams()),
        "hot": (novel, SamplingParams(temperature=1.5, min_p=0.0)),
    }


def compare(
    llm: LLM,
    ids: list[int],
    new: int,
    rounds: int,
    params: SamplingParams,
    ways: dict[str, tuple[str, dict[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Figures of each way against plain decoding."""
    base = llm.prefill(ids)
    found: dict[str, list[tuple[float, Any, bool, Any]]] = {name: [] for name in ways}
    for number in range(rounds):
        seeded = SamplingParams(**{**_fields(params), "seed": params.seed + number})
        plain = decoded(base, new, "autoregressive", {}, seeded)
        before, tokens = plain.metrics, plain.token_ids
        for name, (strategy, options) in ways.items():
            got = decoded(base, new, strategy, options, seeded)
            after = decoded(base, new, "autoregressive", {}, seeded).metrics
            ratio = (before.seconds + after.seconds) / 2 / got.metrics.seconds
            found[name].append((ratio, got.metrics, got.token_ids == tokens, got.drafting))
            before = after
    return {
        name: {
            "speedup": median([ratio for ratio, *_ in runs]),
            "least": round(min(ratio for ratio, *_ in runs), 3),
            "most": round(max(ratio for ratio, *_ in runs), 3),
            "tokens_a_step": round(statistics.mean(m.mean_acceptance_length for _, m, *_ in runs), 3),
            "nodes_a_step": round(statistics.mean(_nodes(m) for _, m, *_ in runs), 2),
            "phases": _shares([m for _, m, *_ in runs]),
            "identical": all(same for _, _, same, _ in runs),
            "runs": len(runs),
            **({"drafting": runs[-1][3]} if runs[-1][3] else {}),
        }
        for name, runs in found.items()
    }


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__slots__}


def _nodes(metrics: Any) -> float:
    rate = metrics.node_acceptance_rate
    return (metrics.mean_acceptance_length - 1) / rate if rate else 0.0


def _shares(runs: list[Any]) -> dict[str, float]:
    names = runs[0].phases
    total = sum(sum(m.phases.values()) for m in runs)
    return {name: round(sum(m.phases[name] for m in runs) / total, 4) for name in names}


def _save(
    args: argparse.Namespace, llm: LLM, kind: str, context: int, found: dict[str, Any], **more: Any
) -> None:
    shared = {"kind": kind, "context": context, "new_tokens": args.new_tokens, "dtype": llm.dtype}
    save(
        [row("speed", way=name, **shared, **more, **figures) for name, figures in found.items()], args.results
    )


def novel(llm: LLM, args: argparse.Namespace) -> None:
    """Automatic drafting and the paper's setting on prose."""
    ways = {"auto": AUTO} if args.quick else {"auto": AUTO, "paper": PAPER}
    for context in args.contexts:
        for text, ids in prompts(llm, args.prompts, context, args.texts):
            found = compare(llm, ids, args.new_tokens, args.rounds, SamplingParams(), ways)
            _save(args, llm, "novel", context, found, text=text)


def five(llm: LLM, args: argparse.Namespace) -> None:
    """Automatic drafting on prompts of different character."""
    for context in args.contexts:
        for kind, (ids, params) in kinds(llm, args.prompts, context).items():
            found = compare(llm, ids, args.new_tokens, args.rounds, params, {"auto": AUTO})
            _save(args, llm, kind, context, found, text=kind)


def rivals(llm: LLM, args: argparse.Namespace) -> None:
    """Each strategy's options searched in one round, its best measured with the others."""
    for context in args.contexts:
        ((text, ids),) = prompts(llm, args.prompts, context, 1)
        best: dict[str, tuple[str, dict[str, Any]]] = {"auto": AUTO}
        for strategy, tried in RIVALS.items():
            ways = {repr(options): (strategy, options) for options in tried}
            found = compare(llm, ids, args.new_tokens // 2, 1, SamplingParams(seed=9), ways)
            name = max(found, key=lambda way: found[way]["speedup"])
            best[f"{strategy}, best fixed" if strategy == "tokenswift" else strategy] = ways[name]
        found = compare(llm, ids, args.new_tokens, args.rounds, SamplingParams(), best)
        for name, (_, options) in best.items():
            found[name]["options"] = options
        _save(args, llm, "rivals", context, found, text=text)


def llama_cpp(args: argparse.Namespace) -> Any:
    """llama.cpp's model of ``--gguf``, or None. Made from the same weights in the same type by
    ``convert_hf_to_gguf.py --outtype f32`` (or ``bf16``)."""
    if args.gguf is None:
        return None
    from llama_cpp import Llama  # type: ignore[import-not-found]

    return Llama(
        str(args.gguf),
        n_ctx=max(args.contexts) + args.new_tokens + 8,
        n_threads=torch.get_num_threads(),
        n_threads_batch=torch.get_num_threads(),
        last_n_tokens_size=SamplingParams().window,
        verbose=False,
    )


def llama_rate(model: Any, ids: list[int], count: int) -> float:
    """Tokens a second of llama.cpp with the same sampling, prefill apart."""
    params = SamplingParams()
    model.reset()
    made = model.generate(
        ids,
        top_k=0,
        top_p=1.0,
        min_p=params.min_p,
        temp=params.temperature,
        repeat_penalty=params.repetition_penalty,
    )
    next(made)
    begun = perf_counter()
    for _ in range(count):
        next(made)
    return count / (perf_counter() - begun)


def peers(llm: LLM, args: argparse.Namespace) -> None:
    """transformers' generate and llama.cpp beside plain and automatic decoding."""
    params, guest = SamplingParams(), llama_cpp(args)
    for context in args.contexts:
        ((text, ids),) = prompts(llm, args.prompts, context, 1)
        rates: dict[str, list[float]] = {}
        for number in range(args.rounds):
            for name, (strategy, options) in {"plain": ("autoregressive", {}), "auto": AUTO}.items():
                got = llm.generate(
                    ids, args.new_tokens, strategy, options, SamplingParams(seed=number), ignore_eos=True
                )
                rates.setdefault(name, []).append(got.metrics.tokens_per_second)
            count = min(args.new_tokens, 100)
            rates.setdefault("transformers", []).append(generate_rate(llm, ids, count, params))
            look = generate_rate(llm, ids, count, params, prompt_lookup_num_tokens=10)
            rates.setdefault("transformers, prompt look-up", []).append(look)
            if guest is not None:
                rates.setdefault("llama.cpp", []).append(llama_rate(guest, ids, args.new_tokens))
        for name in list(rates)[2:]:
            figures = {
                "plain_over_peer": median([a / b for a, b in zip(rates["plain"], rates[name], strict=True)]),
                "auto_over_peer": median([a / b for a, b in zip(rates["auto"], rates[name], strict=True)]),
                "peer_tokens_per_second": median(rates[name]),
            }
            shared = {"peer": name, "context": context, "text": text, "dtype": llm.dtype}
            save([row("speed-peers", **shared, **figures, rounds=args.rounds)], args.results)


PARTS = {"novel": novel, "kinds": five, "rivals": rivals, "peers": peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--heads", default="auto")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of texts")
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--contexts", default="1024", help="prompt lengths in tokens")
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gguf", type=Path, help="the model in llama.cpp's format and the same type")
    parser.add_argument("--quick", action="store_true", help="automatic drafting alone")
    parser.add_argument("--results", type=Path, help="JSON lines file to append to")
    args = parser.parse_args()
    args.contexts = [int(part) for part in args.contexts.split(",")]
    long = max(args.contexts) + args.new_tokens > 8192
    llm = LLM(
        args.model,
        dtype=args.dtype,
        device=args.device,
        heads=args.heads,
        rope_scaling="yarn:8" if long else None,
    )
    for name in PARTS if args.part == "all" else (args.part,):
        PARTS[name](llm, args)


if __name__ == "__main__":
    main()
