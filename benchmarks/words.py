"""What rows and their figures are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.settings import FILE, value_of
from tokenswift.config import NEUTRAL
from tokenswift.loader import default_model

Row = dict[str, Any]
#: figure → its head in tables, and digits after the point
NAMES: dict[str, tuple[str, int]] = FILE["figures"]
#: the default model in words
DEFAULT_WORDS = "SmolLM2-135M-Instruct (weights of a Q4_1 file)"


def head_of(key: str) -> str:
    """A setting's head in tables."""
    return FILE["heads"].get(key, key.replace("_", " "))


def shown(value: Any) -> str:
    """A label."""
    if value is None:
        return "auto"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def number(figure: str, value: float) -> str:
    """A figure's value with its digits."""
    return f"{value:.{NAMES[figure][1]}f}"


def about(rows: Sequence[Row], model: str, points: Iterable[int]) -> str:
    """The conditions that rows of one table were measured under.

    Args:
        points: new tokens of its lines; none: it has no lines.
    """
    first, points = rows[0], list(points)

    def several(values: Iterable[Any]) -> str:
        return ", ".join(sorted({str(value) for value in values}))

    samplers = set(sampler_words(row["config"]["sampling"]) for row in rows)
    drafters = list(dict.fromkeys(filter(None, map(drafter_words, rows))))
    reached = sorted({row["reached"] for row in rows if "reached" in row})
    scaled = several(row["config"].get("rope_scaling", "none") for row in rows)
    commits = several(row["commit"] for row in rows if row["commit"])
    parts = {
        f"preset {first['preset']}": True,
        model_words(model, rows): True,
        first["dtype"]: True,
        first["machine"]: True,
        f"heads and draft models: {'; '.join(drafters)}": drafters and points,
        f"sampler: {min(samplers)}": len(samplers) == 1 and points,
        lengths_words(rows, points): points,
        f"prompts: {several(row['config'].get('prompts') for row in rows)}": reached,
        f"lengths reached {' and '.join(reached)}": reached,
        f"RoPE scaling: {scaled}": scaled != "none",
        f"commit {commits}": commits,
    }
    return "; ".join(words for words, said in parts.items() if said)


def model_words(model: str, rows: Sequence[Row]) -> str:
    """A model in words; of the default one what its weights are, whoever reads its figures."""
    words = DEFAULT_WORDS if model == default_model.NAME else model
    types = sorted({kind for row in rows for kind in row.get("stored", {}).get("types", ())})
    return words + (f", read as {' and '.join(types)}" if types else "")


def drafter_words(row: Row) -> str:
    """The heads, the EAGLE-3 drafter or the draft model that a row used, with what they were trained on; ""
    where it had none."""
    heads, small = row.get("heads"), row.get("draft_model")
    wanted = value_of(row["config"], "draft_model")
    if small is None and (wanted or row["config"].get("strategy") == "triforce"):  # of earlier versions
        small = {"name": wanted or default_model.DRAFT}
    if small is not None:
        words, trained = f"draft model {small['name']}", small
    elif row.get("eagle"):
        words, trained = f"EAGLE-3 drafter {row['eagle']['name']}", row["eagle"]
    elif heads:
        words, trained = f"{heads['count']} {heads['kind']} heads", heads
    else:
        return ""
    return words + "".join(f", {trained[name]:,} {name}" for name in ("tokens", "steps") if name in trained)


def sampler_words(sampling: Mapping[str, Any]) -> str:
    """How tokens are chosen, in words: what is not neutral."""
    words = ["greedy"] if sampling.get("greedy") else []
    if not words:
        names = {"temperature": "temperature", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}
        names["eta_cutoff"] = "η"
        off = NEUTRAL | {"temperature": None}
        words = [f"{w} {sampling[k]:g}" for k, w in names.items() if k in sampling and sampling[k] != off[k]]
    theta = sampling.get("repetition_penalty", 1.0)
    window = f" over {sampling['penalty_window']:,} tokens" if "penalty_window" in sampling else ""
    return ", ".join([*words, *([f"θ {theta:g}{window}"] if theta != 1 else [])])


def lengths_words(rows: Sequence[Row], points: Sequence[int]) -> str:
    """Lengths of prompts and of what was written, and how many texts, in words; "" without lengths."""
    if not points:
        return ""

    def among(numbers: Iterable[int]) -> str:
        found = sorted(set(numbers))
        return " to ".join(f"{n:,}" for n in dict.fromkeys((found[0], found[-1])))

    texts = {(row["config"]["text"], row.get("prompt", {}).get("name")) for row in rows}
    seeds = {row["config"]["seed"] for row in rows}
    several = ((len(texts), "text"), (len(seeds), "seed"))
    counted = ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for n, what in several)
    prompts = among(row["config"]["prefill"] for row in rows)
    return f"prompts of {prompts} tokens, {among(points)} new ones; {counted}"
