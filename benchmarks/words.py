"""What rows and their figures are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.settings import FILE, value_of
from tokenswift.loader.default_model import DEFAULT, DRAFT

#: a row of a benchmark, as its file has it
Row = dict[str, Any]
#: what a row says beside its configuration: values that JSON can hold
Measured = dict[str, object]
#: figure → its head in tables, and digits after the point
NAMES: dict[str, tuple[str, int]] = FILE["figures"]
#: the default model in words
DEFAULT_WORDS = "SmolLM2-135M-Instruct (weights of a Q4_1 file)"


def head_of(key: str) -> str:
    """A setting's head in tables."""
    return FILE["heads"].get(key, key.replace("_", " "))


def shown(value: object) -> str:
    """A label."""
    if value is None:
        return "auto"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def number(figure: str, value: float) -> str:
    """A figure's value with its digits."""
    return f"{value:.{NAMES[figure][1]}f}"


def about(rows: Sequence[Row]) -> str:
    """The conditions that rows of one table were measured under."""

    def several(name: str) -> str:
        values = (row.get(name, value_of(row["config"], name)) for row in rows)
        return ", ".join(sorted({str(value) for value in values if value is not None}))

    parts = [f"preset {several('preset')}", model_words(rows), several("dtype"), several("machine")]
    if rows[0]["kind"] in ("decode", "text"):
        parts += [
            f"sampler {several('sampler')}",
            f"prompts {several('prompts')}",
            f"lengths reached {several('reached')}",
        ]
    if several("rope_scaling") not in ("", "none"):
        parts.append(f"RoPE scaling {several('rope_scaling')}")
    parts.append(f"commit {several('commit')}")
    return "; ".join(parts)


def model_words(rows: Sequence[Row]) -> str:
    """The models of rows; of the default one what its weights are, whoever reads its figures."""
    models = dict.fromkeys(row["config"]["model"] for row in rows)
    return " and ".join(DEFAULT_WORDS if name == DEFAULT else name for name in models)


def drafter_words(row: Row) -> str:
    """The heads, the EAGLE-3 drafter or the draft model that a row used; "none" where it had
    none."""
    draft_model = row.get("draft_model")
    if draft_model:
        return f"draft model {draft_model['name']}"
    if row["config"].get("strategy") == "triforce":
        return f"draft model {DRAFT}"
    if eagle := row.get("eagle"):
        return f"EAGLE-3 drafter {eagle['name']}"
    if heads := row.get("heads"):
        return f"{heads['count']} {heads['kind']} heads"
    return "none"
