"""How often rounding flips a choice, source by source, and what ``--numerics stable`` costs.

    python bench/flips.py flips   flips per 10,000 teacher-forced tokens, by source of the difference
    python bench/flips.py rows    which rows of a matrix product keep their bits when there are more rows
    python bench/flips.py cost    time of a step with --numerics stable over the default, in pairs

A fixed text is computed by one-row passes, as plain decoding does, and again with one thing changed: the
rows of its matrix products, the layout of its attention sums, both (a tree pass), or the chunks of its
prefill. A flip is a position where the choice (temperature 1, min-p 0.1, penalty 1.2) differs, for one seed
of the noise. Every way that real passes can take is first compared with them, bit by bit (``layouts.py``).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common import PROMPTS, median, row, run, save
from layouts import CHUNK, Layout, laid_out_rows, real_rows, row_count
from tokenswift import LLM, SamplingParams
from tokenswift.models.numerics import PRESETS, Numerics
from tokenswift.models.target import HFTarget
from tokenswift.sampling import Sampler

PAPER_TREE = {"tree": (1, 3, 3, 3), "ngrams": 0, "draft": "hidden"}
PLAIN = "one row a pass"
MEASURES = PRESETS | {"float64 attention": Numerics(attention=torch.float64)}


def ways(
    numerics: str, shapes: list[tuple[int, ...]], chunks: list[int], whole: bool
) -> dict[tuple[str, str], Layout]:
    """(source, shape) → layout, the reference first."""
    measures = MEASURES[numerics]
    found = {("none", PLAIN): Layout((), (), measures, whole=whole)}
    for shape in shapes:
        name = "[" + ",".join(map(str, shape)) + f"], {row_count(shape)} rows"
        found["tree pass", name] = Layout(shape, shape, measures, whole=whole)
        if not whole:  # else the tree pass is its attention
            found["rows of products", name] = Layout(shape, (), measures)
            found["attention layout", name] = Layout((), shape, measures)
    for chunk in chunks:
        found["prefill chunks", f"{chunk} against {CHUNK}"] = Layout((), (), measures, chunk, whole)
    return found


@dataclass(slots=True)
class Tally:
    """What one way came to, over all texts: per position the share of seeds that flip, and greedy flips."""

    flips: list[float] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    far: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Per 10,000 tokens. The standard error is over positions: seeds of one position share its logits."""
        shares = torch.tensor(self.flips, dtype=torch.float64)
        error = float(shares.std() / len(shares) ** 0.5) if len(shares) > 1 else float("nan")
        return {
            "positions": len(self.flips),
            "flips_per_10000": round(1e4 * float(shares.mean()), 1),
            "standard_error": round(1e4 * error, 1),
            "greedy_flips_per_10000": round(1e4 * sum(self.greedy) / len(self.greedy), 1),
            "identical_rows": sum(value == 0 for value in self.far),
            "mean_difference": round(sum(self.far) / len(self.far), 4),
            "greatest_difference": round(max(self.far), 4),
            "seconds": round(self.seconds, 1),
        }


class Chooser:
    """Choices for several seeds, and the greedy one."""

    def __init__(self, llm: LLM, seeds: int) -> None:
        size, device = llm.target.vocab_size, llm.target.device
        self.samplers = [Sampler(SamplingParams(seed=seed), size, device) for seed in range(seeds)]
        self.samplers.append(Sampler(SamplingParams(greedy=True), size, device))

    def __call__(self, logits: Tensor, context: list[int]) -> list[int]:
        """One token a seed, the greedy one last."""
        return [s.choose(logits.float()[None], context, [[]])[0] for s in self.samplers]


def texts_of(llm: LLM, folders: list[Path], least: int, most: int) -> list[tuple[str, list[int]]]:
    """The beginnings of all texts, front matter of books skipped."""
    found = []
    for file in (f for folder in folders for f in sorted(folder.glob("*.txt"))):
        text = file.read_text(encoding="utf-8")
        begin = 0 if len(text) < 40_000 else text.index("\n\n", 20_000) + 2
        ids = llm.encode(text[begin : begin + 12 * most])[:most]
        if len(ids) >= least:
            found.append((file.stem, ids))
    return found


def verify(llm: LLM, text: list[int], start: int, layout: Layout, count: int) -> None:
    """Raise unless real passes give the same bits at the first ``count`` positions."""
    text = text[: start + count]
    real, laid = real_rows(llm, text, start, layout), laid_out_rows(llm, text, start, layout).float()
    if not torch.equal(real, laid):
        same = int((real == laid).all(-1).sum())
        raise SystemExit(f"error: {same} of {count} rows equal those of real passes ({layout})")


def flips(llm: LLM, args: argparse.Namespace) -> None:
    """Flips per 10,000 tokens by source."""
    shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes.split(";") if shape]
    chunks = [int(chunk) for chunk in args.chunks.split(",") if chunk]
    chosen = ways(args.numerics, shapes, chunks, args.whole)
    texts = texts_of(llm, args.texts or [PROMPTS], args.start + 100, args.start + args.tokens)
    chooser, tallies = Chooser(llm, args.seeds), {way: Tally() for way in chosen}
    began, done = time.monotonic(), []
    for layout in chosen.values():
        if layout.products == layout.attention:
            verify(llm, texts[0][1], args.start, layout, args.verify)
    print(f"real passes of every such way: the same bits at {args.verify} positions", flush=True)
    for name, text in texts:
        if done and args.minutes and time.monotonic() - began > 60 * args.minutes:
            break
        plain, told = torch.empty(0), []
        for way, layout in chosen.items():
            since = time.monotonic()
            rows = laid_out_rows(llm, text, args.start, layout)
            tallies[way].seconds += time.monotonic() - since
            if way[0] == "none":
                plain = rows
                told = [chooser(r, text[: args.start + i]) for i, r in enumerate(rows)]
                continue
            for i, (one, other) in enumerate(zip(plain, rows, strict=True)):
                far = float((one.float() - other.float()).abs().max())
                new = chooser(other, text[: args.start + i]) if far else told[i]
                differ = [a != b for a, b in zip(told[i], new, strict=True)]
                tallies[way].flips.append(sum(differ[:-1]) / args.seeds)
                tallies[way].greedy.append(int(differ[-1]))
                tallies[way].far.append(far)
            share = 1e4 * sum(tallies[way].flips) / len(tallies[way].flips)
            took = time.monotonic() - since
            print(f"{name}: {way}: {share:.0f} per 10,000 so far, {took:.0f} s", flush=True)
        done.append(name)
    for (source, shape), tally in tallies.items():
        if tally.flips:
            head = {"numerics": args.numerics, "source": source, "shape": shape, "dtype": llm.dtype}
            tail = {"seeds": args.seeds, "prompt_tokens": args.start, "texts": done}
            save([row("flips", **head, **tally.figures(), **tail)], args.results)


@torch.inference_mode()
def product_rows(llm: LLM, args: argparse.Namespace) -> None:
    """Share of rows with the same bits when a product has more rows than one, by kind of weight."""
    layer = llm.model.model.layers[0]
    weights = {name: m for name, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    weights["lm_head"] = llm.model.lm_head
    generator = torch.Generator().manual_seed(0)
    for count in (2, 3, 4, 16, 41, CHUNK):
        equal: dict[str, float] = {}
        blocks = 0.0
        for name, module in weights.items():
            weight = module.weight
            x = torch.randn(count, weight.shape[1], generator=generator).to(weight.dtype)
            alone = torch.cat([F.linear(x[i : i + 1], weight) for i in range(count)])
            equal[name] = float((F.linear(x, weight) == alone).all(-1).float().mean())
            first = [F.linear(F.pad(x[i : i + 1], (0, 0, 0, 15)), weight)[:1] for i in range(count)]
            parts = F.pad(x, (0, 0, 0, -count % 16)).split(16)
            together = torch.cat([F.linear(part, weight) for part in parts])[:count]
            blocks += float((together == torch.cat(first)).all(-1).float().mean()) / len(weights)
        figures = {
            "rows": count,
            "dtype": llm.dtype,
            "equal_rows": round(sum(equal.values()) / len(equal), 4),
            "least_equal": round(min(equal.values()), 4),
            "least_equal_weight": min(equal, key=lambda name: equal[name]),
            "equal_rows_in_blocks": round(blocks, 4),
        }
        save([row("product-rows", **figures)], args.results)


def cost(llm: LLM, args: argparse.Namespace) -> None:
    """Milliseconds of a step with --numerics (stable if not given) over the default's, alternating."""
    measure = "stable" if args.numerics == "default" else args.numerics
    cases: dict[str, tuple[str, dict[str, Any] | None]] = {
        "plain decoding": ("autoregressive", None),
        "default tree": ("tokenswift", {}),
        "tree [1,3,3,3]": ("tokenswift", PAPER_TREE),
    }
    texts = texts_of(llm, args.texts or [PROMPTS], args.start, args.start)[: args.pairs]
    usual = llm.target
    targets = {name: HFTarget(llm.model, MEASURES[name]) for name in ("default", measure)}
    try:
        for case, (strategy, options) in cases.items():
            if args.only and args.only not in case:
                continue
            step: dict[str, list[float]] = {name: [] for name in targets}
            ratios, same = [], 0
            for pair in range(args.pairs):
                _, ids = texts[pair % len(texts)]
                written = {}
                for name in list(targets)[:: 1 if pair % 2 == 0 else -1]:
                    llm.target = targets[name]
                    got = run(llm, ids, args.new_tokens, strategy, options, SamplingParams(seed=pair))
                    step[name].append(1e3 * got.metrics.seconds / got.metrics.steps)
                    written[name] = got.token_ids
                ratios.append(step[measure][-1] / step["default"][-1])
                same += written["default"] == written[measure]
            figures = {
                "case": case,
                "numerics": measure,
                "dtype": llm.dtype,
                "prompt_tokens": args.start,
                "new_tokens": args.new_tokens,
                "pairs": args.pairs,
                "default_ms_a_step": median(step["default"]),
                "ms_a_step": median(step[measure]),
                "ratio": median(ratios),
                "least": round(min(ratios), 3),
                "most": round(max(ratios), 3),
                "same_text_in_both": same,
            }
            save([row("stable-cost", **figures)], args.results)
    finally:
        llm.target = usual


def flips_table() -> str:
    """Flips by source."""
    from tables import rows_of, source, table

    head = ["numerics", "what differs", "of which shape", "tokens", "flips in 10,000", "greedy", "rows equal"]
    rows = rows_of("flips", ("numerics", "source", "shape", "dtype", "machine"))
    lines = [
        [
            r["numerics"],
            r["source"],
            r["shape"],
            f"{r['positions']:,} × {r['seeds']}",
            f"**{r['flips_per_10000']:.0f}** ± {r['standard_error']:.0f}",
            f"{r['greedy_flips_per_10000']:.0f}",
            f"{100 * r['identical_rows'] / r['positions']:.0f}%",
            source(r),
        ]
        for r in rows
    ]
    return table([*head, "from"], lines)


def rows_table() -> str:
    """Rows of products that keep their bits."""
    from tables import rows_of, source, table

    head = ["rows of the product", "equal to one row's", "least, weight", "in blocks of 16", "from"]
    rows = rows_of("product-rows", ("rows", "dtype", "machine"))
    lines = [
        [
            str(r["rows"]),
            f"{100 * r['equal_rows']:.0f}%",
            f"{100 * r['least_equal']:.0f}%, {r['least_equal_weight']}",
            f"{100 * r['equal_rows_in_blocks']:.0f}%",
            source(r),
        ]
        for r in rows
    ]
    return table(head, lines)


def cost_table() -> str:
    """The cost of stable numerics."""
    from tables import rows_of, source, table

    head = ["decoding", "numerics", "ms a step", "default", "ratio (median)", "least–most", "pairs", "from"]
    rows = rows_of("stable-cost", ("case", "numerics", "dtype", "machine", "prompt_tokens"))
    lines = [
        [
            r["case"],
            r["numerics"],
            f"{r['ms_a_step']:.0f}",
            f"{r['default_ms_a_step']:.0f}",
            f"**{r['ratio']:.2f}**",
            f"{r['least']:.2f}–{r['most']:.2f}",
            str(r["pairs"]),
            source(r),
        ]
        for r in rows
    ]
    return table(head, lines)


TABLES = {"flips": flips_table, "product-rows": rows_table, "stable-cost": cost_table}
BENCHES = {"flips": flips, "rows": product_rows, "cost": cost}


def main() -> None:
    """Parse, load, run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("bench", nargs="?", default="flips", choices=list(BENCHES))
    add("--model", default="smollm2-135m")
    add("--dtype", default="bfloat16")
    add("--numerics", default="default", choices=list(MEASURES), help="measures against near-ties")
    add("--texts", type=Path, action="append", help="folder of .txt files; may be repeated")
    add("--start", type=int, default=200, help="tokens of prompt")
    add("--tokens", type=int, default=2500, help="flips: positions per text, at most")
    add("--seeds", type=int, default=2, help="flips: seeds of the noise at each position")
    add("--shapes", default="1,1;1,3,3,3", help="flips: trees, separated by ;")
    add("--chunks", default="1,64", help="flips: other prefill chunks")
    add("--whole", action="store_true", help="flips: products of many rows at once, where rows are equal")
    add("--verify", type=int, default=24, help="flips: positions compared with real passes")
    add("--minutes", type=float, default=0, help="flips: begin no further text after this time")
    add("--new-tokens", type=int, default=40, help="cost: tokens a run")
    add("--pairs", type=int, default=5, help="cost: pairs of runs, over as many texts as there are")
    add("--only", default="", help="cost: only cases whose name holds this")
    add("--results", type=Path, help="JSON-lines file to append to")
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, device="cpu", heads="auto" if args.bench == "cost" else "none")
    BENCHES[args.bench](llm, args)


if __name__ == "__main__":
    main()
