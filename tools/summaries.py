"""Tables of the docs that no spec makes: a real model beside llama.cpp, and the paper's in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import tables
from benchmarks.json_lines import rows_of
from benchmarks.report import Part
from benchmarks.tables import Table
from benchmarks.words import Row
from tokenswift.cli.results import enumeration
from tokenswift.config.sampling import CONTINUED, NEUTRAL, SamplingParams, settings_of
from tools import cards

NO_CLAIM = "none at hand as numbers"  # of specs
#: ways of drafting that most of the paper's tables have a line of
WAYS = ("paper, published rule", "paper, exact rule", "ours, fixed tree", "auto")
QUALITY = Path(__file__).parents[1] / "benchmarks" / "results" / "quality.jsonl"
PEER_KIND = "llama.cpp, f16 keys"
REAL = Path(__file__).parents[1] / "benchmarks" / "results" / "real.jsonl"
REAL_MACHINE = "EPYC"  # the kind of processor whose rows README shows
#: AMD's number of Zen 5; rows without a family, of lengths and of long texts, came from Zen 4
ZEN_5 = "EPYC family 26"
NEWER_MACHINE = "EPYC, Zen 5"  # the kind whose rows the picture of lengths shows
LONG_TEXT = Path(__file__).parents[1] / "benchmarks" / "results" / "long-text.jsonl"
LONG_TEXT_MODEL = "qwen2.5-coder-1.5b-q4_k_m"
RUN_MEMORY = Path(__file__).parents[1] / "benchmarks" / "results" / "run-memory.jsonl"
LONG_RUN = Path(__file__).parents[1] / "benchmarks" / "results" / "long-run.jsonl"
RECURRENT = Path(__file__).parents[1] / "benchmarks" / "results" / "recurrent.jsonl"
LENGTHS = Path(__file__).parents[1] / "benchmarks" / "results" / "lengths.jsonl"
SAMPLERS = Path(__file__).parents[1] / "benchmarks" / "results" / "samplers.jsonl"
AGREEMENT = Path(__file__).parents[1] / "benchmarks" / "results" / "agreement.jsonl"
MIXTURES = Path(__file__).parents[1] / "benchmarks" / "results" / "mixtures.jsonl"
COMMAND = (
    "python -m benchmarks.real qwen2.5-coder-1.5b-q4_k_m --peer PYTHON "
    "--out benchmarks/results/real.jsonl"
)


def real(machine: str) -> Table:
    """A real model beside llama.cpp on the same file, on a kind of machine: automatic and plain
    decoding of each task."""
    lines = tasks(machine)
    body = [
        [
            line["task"],
            f"{line['llama']:.1f}",
            f"{line['plain']:.1f}",
            f"**{line['auto']:.1f}**",
            f"**{line['auto_over_plain']:.2f}** "
            f"({min(line['ratios']):.2f}–{max(line['ratios']):.2f})",
            f"**{line['auto_over_llama']:.2f}**",
            f"{line['tokens_a_step']:.2f}",
            _drafters(line["sources"]),
            "yes" if line["identical"] else "**no**",
        ]
        for line in lines
    ]
    head = ["task", "llama.cpp, tokens/s", "plain, tokens/s", "with drafts, tokens/s"]
    head += ["÷ plain", "÷ llama.cpp"]
    return Table([*head, "tokens a step", "drafts accepted from", "identical"], body, _from(lines))


def tasks(machine: str) -> list[Row]:
    """The newest row of each task of a real model, on a kind of machine."""
    return [row for row in _real(machine) if "task" in row]


def contexts(machine: str) -> Table:
    """The same model's prompt and plain decoding by length of the context, beside llama.cpp."""
    lines = [row for row in _real(machine) if "context" in row]
    body = [
        [
            f"{line['context']:,}",
            *(
                cell
                for what in ("writing", "reading")
                for cell in (
                    f"{line[f'llama_{what}']:.0f}",
                    f"{line[what]:.0f}",
                    f"**{line[f'{what}_over_llama']:.2f}**",
                )
            ),
        ]
        for line in lines
    ]
    head = ["context, tokens", "llama.cpp, tokens/s", "plain, tokens/s", "over llama.cpp"]
    return Table(
        [*head, "prompt, llama.cpp", "prompt, tokenswift", "over llama.cpp"], body, _from(lines)
    )


def _real(machine: str) -> list[Row]:
    """The newest row of each task and context on machines that are so called."""
    rows = [row for row in rows_of(REAL) if processor(row) == machine]
    return [*{str(row.get("task", row.get("context"))): row for row in rows}.values()]


def _drafters(sources: dict[str, int]) -> str:
    """The shares of accepted drafts by what drafted them."""
    drafted = {name: count for name, count in sources.items() if name != "target"}
    total = sum(drafted.values()) or 1
    parts = sorted(drafted.items(), key=lambda item: -item[1])
    return (
        ", ".join(f"{name} {count / total:.0%}" for name, count in parts if count / total > 0.005)
        or "–"
    )


def values_of(rows: Sequence[Row], key: str) -> str:
    """What rows have of a key, each value once."""
    return " and ".join(dict.fromkeys(str(row[key]) for row in rows))


def _from(lines: list[Row]) -> str:
    """Model, machine, peer and commits."""
    if not lines:
        return f"Not measured yet: `{COMMAND}`."

    several = partial(values_of, lines)
    return (
        f"{several('model')} ({several('dtype')}) on {several('machine')}. Each figure is the "
        "median of several rounds in which the programs took turns; brackets hold the lowest and "
        f"the highest. llama.cpp is llama-cpp-python {several('peer')}, `llama_decode` alone "
        f"without sampling; tokenswift includes sampling (commit {several('commit')}). *Identical* "
        "says whether the text with drafts is that of plain decoding."
    )


def paper(parts: Sequence[Part]) -> Table:
    """The paper's tables and figures, a line each: its claim, tokens a step by way of drafting, and
    the speed of adaptive drafting over plain decoding."""
    lines = []
    for part in parts:
        rows = part.rows
        claim = part.spec.data["claim"]
        lines.append(
            [
                f"{part.spec.label}. {part.spec.title}",
                claim if claim != NO_CLAIM else tables.MISSING,
                *(_spread(rows, way, "length") for way in WAYS),
                _spread(rows, "auto", "speedup"),
                _same_text(rows),
                str(len(rows)),
            ]
        )
    ways = [f"tokens a step: {way}" for way in WAYS]
    return Table(["", "the paper's claim", *ways, "auto, ×", "same text as plain", "rows"], lines)


def _same_text(rows: list[Row]) -> str:
    """Whether all lossless rows wrote plain decoding's text."""
    identical = [bool(row["identical"]) for row in rows if row.get("lossless")]
    if not identical:
        return tables.MISSING
    return "yes" if all(identical) else "no"


def _spread(rows: list[Row], way: str, figure: str) -> str:
    """Mean, least and most of a figure at the last point of a way's rows."""
    of_way = [row["figures"] for row in rows if row["config"]["variant"] == way]
    last = [points[max(points, key=int)] for points in of_way]
    values = [figures[figure] for figures in last if figures.get(figure) is not None]
    if not values:
        return tables.MISSING
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.2f}{spread}"


def quality() -> Table:
    """What number types write, beside float32 and llama.cpp, by model and length of the context."""
    rows = rows_of(QUALITY)
    newest = {(row["model"], row["context"], row["kind"]): row for row in rows}
    body = []
    for (model, context, kind), row in newest.items():
        peer = newest.get((model, context, PEER_KIND))
        over_peer = f"{row['perplexity'] / peer['perplexity']:.4f}" if peer else tables.MISSING
        layers = row["int16_layers"]
        body.append(
            [
                model,
                f"{context:,}",
                f"**{kind}**" if kind == "int8" else kind,
                f"{row['perplexity']:.2f}",
                f"{row['ratio']:.4f} ± {row['error']:.4f}",
                over_peer,
                f"{row['same_choice']:.1%}",
                f"{row['worst']:.2f}",
                ", ".join(map(str, layers)) if kind == "int8" else "",
                f"{row['tokens']:,}",
            ]
        )
    head = ["model", "context", "type", "perplexity", "over float32", "over llama.cpp"]
    more = [
        "same most probable token",
        "worst place, nats",
        "layers with keys of 16 bits",
        "tokens",
    ]
    machines = " and ".join(dict.fromkeys(row["machine"] for row in newest.values()))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in newest.values()))
    note = f"The last tokens of each text, after all before them. {machines}; commits {commits}."
    return Table([*head, *more], body, note if body else "")


def newest_text(rows: Sequence[Row]) -> list[Row]:
    """The newest of several texts, each of which has a row for each part, then one for the whole;
    [] without any."""
    ends = [number for number, row in enumerate(rows) if "part" not in row]
    if not ends:
        return []
    start = ends[-2] + 1 if len(ends) > 1 else 0
    return list(rows[start : ends[-1] + 1])


def labels_of(rows: Sequence[Row]) -> list[str]:
    """What the lines of a text are called: its parts, then the whole."""
    *parts, total = rows
    return [f"to {row['part']:,}" for row in parts] + [f"**all {total['tokens']:,}**"]


def litany_of(total: Row) -> str:
    """Where a text becomes a litany, in words."""
    litany = total["litany"]
    return "no litany" if litany is None else f"the first litany begins at token {litany:,}"


def long_text_rows(
    model: str, kind: str = REAL_MACHINE, beside_llama: bool = False, xtc: bool = False
) -> list[Row]:
    """The rows of the newest long text of a model on a kind of processor: its parts, then the
    whole; [] without any.

    Args:
        beside_llama: only texts that llama.cpp ran, too.
        xtc: whether the text was sampled with XTC.
    """
    rows = [row for row in rows_of(LONG_TEXT) if "llama" in row or not beside_llama]
    rows = [row for row in rows if ("xtc_probability" in row.get("sampling", {})) == xtc]
    return newest_text([row for row in rows if row["model"] == model and processor(row) == kind])


def long_text(model: str, kind: str = REAL_MACHINE, xtc: bool = False) -> Table:
    """The newest long text of a model on a kind of processor, by its parts, with the whole in the
    last line; see `long_text_rows`."""
    rows = long_text_rows(model, kind, xtc=xtc)
    if not rows:
        return Table([], [], f"Not measured yet: `python -m benchmarks.long_text {model} BOOK`.")
    total = rows[-1]
    body = [
        [
            label,
            f"{row['plain']:.1f}",
            f"**{row['auto']:.1f}**",
            f"**{row['auto_over_plain']:.2f}**",
            f"{row['tokens_a_step']:.2f}",
            f"{row['distinct_4']:.0%}",
        ]
        for label, row in zip(labels_of(rows), rows, strict=True)
    ]
    head = ["new tokens", "plain, tokens/s", "automatic, tokens/s", "over plain", "tokens a step"]
    head += ["different runs of four tokens"]
    below = (
        f"{total['model']} ({total['dtype']}) on {total['machine']}: {total['prompt']:,} tokens of "
        f"{total['book']}, continued by {total['tokens']:,}, in {total['auto_seconds'] / 60:.1f} "
        f"minutes instead of {total['plain_seconds'] / 60:.1f}; the same text: "
        f"{'yes' if total['identical'] else '**no**'}; {litany_of(total)}; "
        f"commit {total['commit']}."
    )
    if "llama" in total:
        head += ["llama.cpp, tokens/s", "over llama.cpp"]
        for cells, row in zip(body, rows, strict=True):
            cells += [f"{row['llama']:.1f}", f"**{row['auto'] / row['llama']:.2f}**"]
        below += (
            f" llama.cpp ({total['llama_version']}) ran the same tokens without sampling: 50 in "
            "the middle of each part one after another, the others in batches. At these speeds the "
            f"text would take it {total['llama_seconds'] / 60:.1f} minutes; it held "
            f"{total['llama_peak'] / 1e9:.1f} GB at most."
        )
    return Table(head, body, below)


def long_text_programs() -> Table:
    """The newest long text that llama.cpp ran, too, in a few lines: time, speed and memory, with
    and without drafts, and of llama.cpp."""
    rows = long_text_rows(LONG_TEXT_MODEL, beside_llama=True)
    if not rows:
        command = f"python -m benchmarks.long_text {LONG_TEXT_MODEL} BOOK --llama PYTHON"
        return Table([], [], f"Not measured yet: `{command}`.")
    total = rows[-1]
    runs = [
        row
        for row in rows_of(RUN_MEMORY)
        if row["model"] == LONG_TEXT_MODEL and row["context"] >= total["tokens"]
    ]
    memory = {"auto": runs[-1]["peak"] if runs else None, "llama": total["llama_peak"]}
    body: list[list[str]] = []
    for side, name in {"auto": "**with drafts**", "plain": "plain", "llama": "llama.cpp"}.items():
        peak = memory.get(side)
        body.append(
            [
                name,
                f"{total[f'{side}_seconds'] / 60:.1f}",
                f"{total[side]:.1f}",
                f"{total[side] / total['plain']:.2f}",
                f"{total[side] / total['llama']:.2f}",
                tables.MISSING if peak is None else f"{peak / 1e9:.1f}",
            ]
        )
    head = [f"{total['tokens']:,} tokens of a novel", "minutes", "tokens/s", "over plain"]
    return Table([*head, "over llama.cpp", "memory, GB"], body)


def processor(row: Row) -> str:
    """The kind of processor of a row, in a word or two."""
    machine: str = row["machine"]
    kind = next((kind for kind in ("EPYC", "Xeon") if kind in machine), machine)
    if "(AVX2" in machine:
        return f"{kind}, AVX2"
    return f"{kind}, Zen 5" if ZEN_5 in machine else kind


def long_run() -> Table:
    """The newest run that was killed on its way, by its parts."""
    rows = newest_text(rows_of(LONG_RUN))
    if not rows:
        command = "python -m benchmarks.long_run MODEL BOOK FOLDER"
        return Table([], [], f"Not measured yet: `{command}`.")
    total = rows[-1]
    body = [
        [
            label,
            f"**{row['auto']:.1f}**",
            f"{row['tokens_a_step']:.2f}",
            f"{row['distinct_4']:.0%}",
        ]
        for label, row in zip(labels_of(rows), rows, strict=True)
    ]
    head = ["new tokens", "tokens/s", "tokens a step", "different runs of four tokens"]
    kills = "was not killed"
    if total["kills"]:
        places = enumeration([f"{place:,}" for place in total["kills"]])
        resumed = total["first_token_seconds"][1:]
        minutes = enumeration([f"{seconds / 60:.1f}" for seconds in resumed])
        kills = (
            f"was killed at {places} tokens, and wrote on {minutes} minutes after it was resumed"
        )
    below = (
        f"{total['model']} ({total['dtype']}), positions scaled: {total['rope_scaling']}, on "
        f"{total['machine']}: "
        f"{total['prompt']:,} tokens of {total['book']}, continued by {total['tokens']:,} in "
        f"{total['auto_seconds'] / 60:.0f} minutes. The process {kills}. Memory: "
        f"{total['peak'] / 1e9:.1f} GB at most; journal: {total['journal_bytes'] / 1e6:.1f} MB. "
        f"The last {total['checked']:,} tokens are those of plain decoding: "
        f"{'yes' if total['identical'] else '**no**'}; {litany_of(total)}; "
        f"commit {total['commit']}."
    )
    return Table(head, body, below)


def lengths_rows() -> list[Row]:
    """The newest row of each program at each length of the context, on each kind of processor."""
    rows = rows_of(LENGTHS)
    return [*{(processor(row), row["context"], row["program"]): row for row in rows}.values()]


def lengths() -> Table:
    """Programs on one file beside one another, by length of the context."""
    rows = lengths_rows()
    if not rows:
        return Table([], [], "Not measured yet: `python -m benchmarks.lengths MODEL BOOK`.")
    body = [
        [
            processor(row),
            f"{row['context']:,}",
            f"{row['program']} {row['version'].split(' ')[0]}",
            f"{row['reading']:.0f}",
            f"{row['writing']:.1f}",
            f"**{row['drafting']:.1f}**" if "drafting" in row else "",
            f"{row['loading']:.1f}",
            f"{row['peak'] / 1e9:.1f}",
        ]
        for row in sorted(rows, key=lambda row: (processor(row), row["context"]))
    ]
    head = ["processor", "context", "program", "prompt, tokens/s", "plain, tokens/s"]
    head.append("with drafts, tokens/s")

    several = partial(values_of, rows)
    below = (
        f"{several('model')} on {several('machine')}; rounds: {several('rounds')}; "
        f"commit {several('commit')}."
    )
    return Table([*head, "loading, s", "peak of memory, GB"], body, below)


#: fields of a sampling → what a table calls them
SAMPLING_WORDS = {
    "temperature": "temperature",
    "min_p": "min-p",
    "dry_multiplier": "DRY",
    "dry_range": "DRY range",
    "presence_penalty": "presence penalty",
    "xtc_probability": "XTC",
    "xtc_threshold": "XTC threshold",
    "repetition_penalty": "θ",
}


def sampling_words(sampling: Mapping[str, object]) -> str:
    """What is set of a sampling, and whether it is the default of continued texts."""
    words = ", ".join(
        f"{name} {sampling[field]}" for field, name in SAMPLING_WORDS.items() if field in sampling
    )
    is_default = settings_of(SamplingParams(**{**NEUTRAL, **sampling})) == settings_of(CONTINUED)
    return f"**{words}** (default)" if is_default else words or "nothing"


def samplers() -> Table:
    """How long texts of real models stay readable, by sampling."""
    rows = rows_of(SAMPLERS)
    by_model = sorted(rows, key=lambda row: str(row["model"]))
    newest = {(row["model"], json.dumps(row["sampling"])): row for row in by_model}
    if not newest:
        return Table([], [], "Not measured yet: `python -m benchmarks.samplers MODEL BOOKS`.")
    body = [
        [
            model,
            sampling_words(row["sampling"]),
            f"{row['loops']} of {row['texts']}",
            f"{row['litanies']} of {row['texts']}",
            f"{median(row['readable']):,.0f}",
            f"{row['distinct_4']:.2f}",
            f"{row['perplexity']:.1f}",
            f"{row['words']:.1%}",
        ]
        for (model, _), row in newest.items()
    ]
    head = ["model", "sampling", "loops", "litanies", "readable, tokens", "distinct-4"]

    several = partial(values_of, list(newest.values()))
    below = (
        f"{several('texts')} texts of {several('tokens')} tokens for each sampling "
        f"({several('dtype')}); commit {several('commit')}."
    )
    return Table([*head, "perplexity", "words"], body, below)


def recurrent() -> Table:
    """Models with recurrent layers, of random weights, by shape and length of the context."""
    rows = rows_of(RECURRENT)
    newest = {(row["model"], row["context"], processor(row), row["program"]): row for row in rows}
    if not newest:
        return Table([], [], "Not measured yet: `python -m benchmarks.recurrent FOLDER`.")

    def price(row: dict[str, float], draft: str) -> str:
        return f"{row[draft]:.2f}" if draft in row else ""

    body = [
        [
            f"{model.removesuffix('-q4_k')}",
            f"{context:,}",
            machine,
            f"{program} {row['version'].split(' ')[0]}",
            f"{row['reading']:.0f}",
            f"{row['writing']:.1f}",
            *(price(row, draft) for draft in ("chain_4", "chain_8", "tree_8")),
            f"{row['peak'] / 1e9:.1f}",
        ]
        for (model, context, machine, program), row in sorted(newest.items())
    ]
    head = ["shape", "context", "processor", "program", "prompt, tokens/s", "plain, tokens/s"]
    machines = dict.fromkeys(row["machine"] for row in newest.values())
    commits = dict.fromkeys(row["commit"] for row in newest.values())
    rounds = dict.fromkeys(str(row["rounds"]) for row in newest.values())
    below = (
        f"Random weights in Q4_K; {', '.join(machines)}; rounds: {', '.join(rounds)}; "
        f"commit {', '.join(commits)}."
    )
    drafts = ["verifying 4 rows", "8 rows", "a tree of 8"]
    return Table([*head, *drafts, "peak of memory, GB"], body, below)


def agreement() -> Table:
    """How often trained drafters name what their models choose, by kind of text."""
    newest = {(row["drafter"], row["kind"]): row for row in rows_of(AGREEMENT)}
    if not newest:
        return Table([], [], "Not measured yet: `python -m tools.agreement MODEL DRAFTER`.")
    body = [
        [
            drafter.removesuffix(".gguf"),
            kind,
            f"{row['places']:,}",
            *(f"{share:.3f}" for share in row["right"]),
        ]
        for (drafter, kind), row in newest.items()
    ]
    head = ["drafter of", "text", "places", "the next token", "the next two"]
    head += ["three", "four", "five"]
    return Table(head, body, f"Commit {values_of(list(newest.values()), 'commit')}.")


def mixtures() -> Table:
    """Mixtures of experts beside llama.cpp on the same files."""
    rows = rows_of(MIXTURES)
    newest = {(row["model"], row["program"]): row for row in rows}
    if not newest:
        return Table([], [], "Not measured yet: `python -m benchmarks.mixtures FOLDER`.")
    body: list[list[str]] = []
    for (model, program), row in newest.items():
        peer = newest.get((model, "llama.cpp"))
        speeds: list[str] = []
        for what in ("reading", "writing"):
            speed = f"{row[what]:.1f}"
            if peer is not None and peer is not row:
                speed += f" (**{row[what] / peer[what]:.2f}** times llama.cpp's)"
            speeds.append(speed)
        loading = f"{row['loading']:.1f}"
        peak = f"{row['peak'] / 1e9:.1f}"
        drafting = f"{row['drafting']:.1f}" if "drafting" in row else ""
        body.append([model, program, *speeds, drafting, loading, peak])
    head = ["file", "program", "prompt, tokens/s", "plain, tokens/s", "with drafts, tokens/s"]

    several = partial(values_of, list(newest.values()))
    below = (
        f"Behind {several('context')} tokens, on {several('machine')}; rounds: "
        f"{several('rounds')}; versions: {several('version')}; commit {several('commit')}."
    )
    return Table([*head, "loading, s", "peak of memory, GB"], body, below)


SUMMARIES: dict[str, Callable[[], Table]] = {
    "real-epyc": partial(real, "EPYC"),
    "real-xeon": partial(real, "Xeon"),
    "contexts-xeon": partial(contexts, "Xeon"),
}
SUMMARIES["quality"] = quality
SUMMARIES["lengths"] = lengths
SUMMARIES["samplers"] = samplers
SUMMARIES["recurrent"] = recurrent
SUMMARIES["agreement"] = agreement
SUMMARIES["long-run"] = long_run
SUMMARIES["mixtures"] = mixtures
SUMMARIES["passes-h200"] = cards.passes
SUMMARIES["real-h200"] = cards.real
SUMMARIES["long-text"] = partial(long_text, LONG_TEXT_MODEL)
SUMMARIES["long-text-xtc"] = partial(long_text, LONG_TEXT_MODEL, NEWER_MACHINE, xtc=True)
SUMMARIES["long-text-programs"] = long_text_programs
SUMMARIES["long-text-avx2"] = partial(long_text, LONG_TEXT_MODEL, "EPYC, AVX2")
