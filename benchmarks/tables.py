"""From rows to the lines of a table: mean and spread over prompts and seeds, the paper's figures beside."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.needs import METHODS, MODELS
from benchmarks.settings import value_of
from benchmarks.specs import Spec
from tokenswift.config import NEUTRAL
from tokenswift.loader import draft, embedded

#: figure → its head in tables, and digits after the point
NAMES: dict[str, tuple[str, int]] = {
    "alpha": ("α", 2),
    "beta": ("β", 2),
    "length": ("tokens a step", 2),
    "nodes": ("drafted a step", 1),
    "speedup": ("×", 2),
    "plain_ms": ("plain, ms a token", 1),
    "ms": ("ms a token", 1),
    "step_ms": ("ms a step", 1),
    "price": ("price of a step", 2),
    "plain_minutes": ("plain, minutes", 2),
    "minutes": ("minutes", 2),
    "d1": ("Distinct-1", 2),
    "d2": ("Distinct-2", 2),
    "d3": ("Distinct-3", 2),
    "d4": ("Distinct-4", 2),
    "distinct": ("Distinct, average", 2),
    "bandwidth": ("read, GB/s", 1),
    "gflops": ("GFLOP/s", 0),
    "weights_gb": ("weights, GB", 2),
    "weights_ms": ("loading weights, ms", 2),
    "kv_gb": ("keys and values, GB", 2),
    "kv_ms": ("loading keys and values, ms", 2),
    "operations": ("operations, G", 2),
    "compute_ms": ("computing, ms", 2),
    "pass_ms": ("a pass takes, ms", 2),
}
#: setting → its head in tables
HEADS = {
    "variant": "strategy",
    "point": "new tokens",
    "prefill": "prefill",
    "ngrams": "k",
    "repetition_penalty": "θ",
    "penalty_window": "W",
    "tree": "tree",
    "temperature": "temperature",
    "sampler": "sampler",
}
Row = dict[str, Any]
#: the default model in words
DEFAULT_WORDS = "SmolLM2-135M-Instruct (weights of a Q4_1 file)"


@dataclass(frozen=True, slots=True)
class Table:
    """What is written as Markdown or HTML: heads, lines of cells, and a sentence below ("" for none)."""

    head: list[str]
    body: list[list[str]]
    below: str = ""

    def markdown(self) -> str:
        """As Markdown."""
        rows = [self.head, ["---"] * len(self.head), *self.body] if self.head else []
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows]
        return "".join(lines) + "\n" * bool(rows and self.below) + (f"{self.below}\n" if self.below else "")


@dataclass(slots=True)
class Line:
    """A line of a table: one configuration at one length.

    Attributes:
        labels: what tells it from other lines, by setting ("point" too).
        values: figure → its values over prompts and seeds.
        identical: whether all texts were plain decoding's; None where they need not be (published rule).
        lossless: whether the exact rule was used.
        texts, seeds: how many.
    """

    labels: dict[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)
    identical: bool = True
    lossless: bool = True
    texts: set[int] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)

    def mean(self, figure: str) -> float | None:
        """The mean; None where there is no value."""
        found = self.values.get(figure)
        return statistics.mean(found) if found else None

    def spread(self, figure: str) -> float | None:
        """Standard deviation (of a sample); None with fewer than two values."""
        found = self.values.get(figure, [])
        return statistics.stdev(found) if len(found) > 1 else None

    def reach(self, figure: str) -> tuple[float, float]:
        """How far below and above the mean a plot's bar reaches: to the least and most of all runs where rows
        say them of a speed-up, else a standard deviation."""
        if figure == "speedup" and "least" in self.values:
            mean = statistics.mean(self.values[figure])
            return mean - min(self.values["least"]), max(self.values["most"]) - mean
        spread = self.spread(figure) or 0.0
        return spread, spread


@dataclass(slots=True)
class Group:
    """The rows of a spec that were measured under the same conditions.

    Attributes:
        preset, model, dtype, machine: the conditions.
        rows: in the order in which they were measured.
        lines: their table.
    """

    preset: str
    model: str
    dtype: str
    machine: str
    rows: list[Row]
    lines: list[Line]

    @property
    def about(self) -> str:
        """The conditions in words."""
        commits = sorted({str(row["commit"]) for row in self.rows if row["commit"]})
        samplers = list(dict.fromkeys(sampler_words(row["config"]["sampling"]) for row in self.rows))
        drafters = list(dict.fromkeys(filter(None, map(drafter_words, self.rows))))
        prompts = sorted({str(row["config"]["prompts"]) for row in self.rows})
        reached = sorted({row["reached"] for row in self.rows if "reached" in row})
        scaled = sorted({str(row["config"].get("rope_scaling", "none")) for row in self.rows})
        parts = [
            f"preset {self.preset}",
            model_words(self.model, self.rows),
            self.dtype,
            self.machine,
            *([f"heads and draft models: {'; '.join(drafters)}"] if drafters and self.lines else []),
            *([f"sampler: {samplers[0]}"] if len(samplers) == 1 and self.lines else []),
            *([lengths_words(self.rows, self.lines)] if self.lines else []),
            *(
                [f"prompts: {', '.join(prompts)}", f"lengths reached {' and '.join(reached)}"]
                if reached
                else []
            ),
            *([f"RoPE scaling: {', '.join(scaled)}"] if scaled != ["none"] else []),
            *([f"commit {', '.join(commits)}"] if commits else []),
        ]
        return "; ".join(parts)


def model_words(model: str, rows: Sequence[Row]) -> str:
    """A model in words; of the default one what its weights are, whoever reads its figures."""
    words = DEFAULT_WORDS if model == embedded.NAME else model
    types = sorted({kind for row in rows for kind in row.get("stored", {}).get("types", ())})
    return words + (f", read as {' and '.join(types)}" if types else "")


def drafter_words(row: Row) -> str:
    """The heads or the draft model that a row used, with what they were trained on; "" where it had none."""
    heads, small = row.get("heads"), row.get("draft_model")
    wanted = value_of(row["config"], "draft_model")
    if small is None and (wanted or row["config"].get("strategy") == "triforce"):  # of earlier versions
        small = {"name": wanted or draft.NAME}
    if small is not None:
        words, trained = f"draft model {small['name']}", small
    elif heads:
        words, trained = f"{heads['count']} {heads['kind']} heads", heads
    else:
        return ""
    return words + "".join(f", {trained[name]:,} {name}" for name in ("tokens", "steps") if name in trained)


def sampler_words(sampling: Mapping[str, Any]) -> str:
    """How tokens are chosen, in words: what is not neutral."""
    if sampling.get("greedy"):
        words = ["greedy"]
    else:
        names = {"temperature": "temperature", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}
        names["eta_cutoff"] = "η"
        off = NEUTRAL | {"temperature": None}
        words = [
            f"{word} {sampling[k]:g}" for k, word in names.items() if k in sampling and sampling[k] != off[k]
        ]
    theta = sampling.get("repetition_penalty", 1.0)
    window = f" over {sampling['penalty_window']:,} tokens" if "penalty_window" in sampling else ""
    return ", ".join([*words, *([f"θ {theta:g}{window}"] if theta != 1 else [])])


def lengths_words(rows: Sequence[Row], lines: Sequence[Line]) -> str:
    """Lengths of prompts and of what was written, and how many texts, in words."""

    def among(numbers: Iterable[int]) -> str:
        found = sorted(set(numbers))
        return " to ".join(f"{n:,}" for n in dict.fromkeys((found[0], found[-1])))

    prompts = among(row["config"]["prefill"] for row in rows)
    new = among(line.labels["point"] for line in lines)
    texts = {(row["config"]["text"], row.get("prompt", {}).get("name")) for row in rows}
    seeds = {row["config"]["seed"] for row in rows}
    several = (
        f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((len(texts), "text"), (len(seeds), "seed"))
    )
    return f"prompts of {prompts} tokens, {new} new ones; {', '.join(several)}"


def mine(spec: Spec, rows: Iterable[Row]) -> list[Row]:
    """The rows that a spec shows."""
    where = spec.data.get("where", {})
    found = [row for row in rows if row["spec"] in spec.sources]
    return [row for row in found if all(_fits(value_of(row["config"], k), v) for k, v in where.items())]


def _fits(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list) else value == wanted


def groups(spec: Spec, rows: Iterable[Row]) -> list[Group]:
    """A spec's rows by their conditions, each with its table."""
    found: dict[tuple[str, ...], list[Row]] = {}
    several = "model" in spec.by
    for row in mine(spec, rows):
        model = "" if several else row["config"]["model"]
        key = (row["preset"], model, row["dtype"], row["machine"], row.get("reached", ""))
        found.setdefault(key, []).append(row)
    return [
        Group(preset, model or _model_of(part), dtype, machine, part, lines(spec, part))
        for (preset, model, dtype, machine, _), part in found.items()
    ]


def _model_of(rows: Sequence[Row]) -> str:
    models = {row["config"]["model"] for row in rows}
    return models.pop() if len(models) == 1 else "several models"


def lines(spec: Spec, rows: Sequence[Row]) -> list[Line]:
    """The lines of a table."""
    made: dict[str, Line] = {}
    for row in rows:
        config = row["config"]
        apart = {k: v for k, v in config.items() if k not in ("text", "seed", "sampling")}
        sampling = {k: v for k, v in config["sampling"].items() if k != "seed"}
        for point, figures in row.get("figures", {}).items():
            labels = {key: value_of(config, key) for key in spec.by} | {"point": int(point)}
            labels["drafter"] = drafter_words(row)
            if config["model"] in MODELS:
                labels["called"] = MODELS[config["model"]]["called"]
            key = json.dumps([apart, sampling, point], sort_keys=True)
            line = made.setdefault(key, Line(labels))
            for name, value in figures.items():
                line.values.setdefault(name, []).append(value)
            line.identical &= row.get("identical", True)
            line.lossless &= row.get("lossless", True)
            line.texts.add(config["text"])
            line.seeds.add(config["seed"])
    return list(made.values())


def published(spec: Spec, line: Line) -> tuple[dict[str, float], dict[str, Any]] | None:
    """The paper's figures nearest to a line: the figures, and labels that differ; None if there are none.

    Names must be equal (a variant's may go on behind a comma); of numbers the nearest counts, by their ratio.
    """
    table = spec.data.get("published")
    if not table:
        return None
    best: tuple[float, dict[str, float], dict[str, Any]] | None = None
    for cells in table["rows"]:
        entry = dict(zip(table["columns"], cells, strict=True))
        far, differs, fits = 0.0, {}, True
        for key, theirs in entry.items():
            if key in NAMES:
                continue
            name = "called" if key == "model" else key
            ours: Any = line.labels.get(name)
            own = "TokenSwift" if key == "variant" and ours in METHODS else ours
            if _is_number(theirs) and _is_number(ours):
                far += abs(math.log((theirs + 1) / (ours + 1)))
            elif name in line.labels and own != theirs and not str(ours).startswith(f"{theirs},"):
                fits = False
            if ours != theirs and not str(ours).startswith("paper,"):
                differs[key] = theirs
        if fits and (best is None or far < best[0]):
            best = (far, {key: value for key, value in entry.items() if key in NAMES}, differs)
    return None if best is None else best[1:]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- cells ------------------------------------------------------------------------------------------


def figures_of(spec: Spec) -> list[str]:
    """The figures of a spec's table."""
    return list(spec.data.get("table", {}).get("figures", ["alpha", "speedup"]))


def head(spec: Spec) -> list[str]:
    """The heads of a spec's table, with its published figures where there are any."""
    labels = [HEADS.get(key, key.replace("_", " ")) for key in _labels(spec)]
    theirs = ["published"] if spec.kind != "machine" and spec.data.get("published") else []
    more = ["prompts × seeds", "same text as plain", "heads or draft model"]
    more = [] if spec.kind == "machine" else more
    return [*labels, *(NAMES[figure][0] for figure in figures_of(spec)), *theirs, *more]


def _labels(spec: Spec) -> list[str]:
    length = "context" if spec.kind == "machine" else "point"
    return [*spec.by, length]


def cells(spec: Spec, line: Line) -> list[str]:
    """A line's cells under :func:`head`."""
    made = [shown(line.labels.get(key if key != "context" else "point")) for key in _labels(spec)]
    made += [_cell(line, figure) for figure in figures_of(spec)]
    if spec.kind != "machine":
        made += [_theirs(spec, line)] if spec.data.get("published") else []
        same = ("yes" if line.identical else "no") if line.lossless else "not lossless"
        made += [f"{len(line.texts)} × {len(line.seeds)}", same, line.labels.get("drafter") or "none"]
    return made


def published_cells(spec: Spec) -> list[list[str]]:
    """The paper's own lines under :func:`head`, where they stand below ours instead of beside."""
    table = spec.data.get("published")
    if spec.kind != "machine" or not table:
        return []
    entries = [dict(zip(table["columns"], cells, strict=True)) for cells in table["rows"]]
    return [
        [
            *("published", shown(entry["point"])),
            *(f"{entry[f]:.{NAMES[f][1]}f}" if f in entry else "–" for f in figures_of(spec)),
        ]
        for entry in entries
    ]


def shown(value: Any) -> str:
    """A label."""
    if value is None:
        return "auto"
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _cell(line: Line, figure: str) -> str:
    mean, spread, digits = line.mean(figure), line.spread(figure), NAMES[figure][1]
    if mean is None:
        return "–"
    return f"{mean:.{digits}f}" + (
        "" if spread is None else f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{spread:.{digits}f}"
    )


def _theirs(spec: Spec, line: Line) -> str:
    found = published(spec, line)
    if found is None:
        return "–"
    figures, differs = found
    text = " / ".join(f"{value:.{NAMES[key][1]}f}" for key, value in figures.items())
    short = {"point": "at ", "model": ""}
    names = {key: short[key] if key in short else f"{HEADS.get(key, key)} " for key in differs}
    apart = ", ".join(names[key] + shown(value) for key, value in differs.items())
    return text + (f" ({apart})" if apart else "")


def theirs_head(spec: Spec) -> str:
    """What the figures in the column "published" are, in order."""
    columns: Mapping[str, Any] = spec.data["published"]
    return " / ".join(NAMES[key][0] for key in columns["columns"] if key in NAMES)
