"""What rows and their figures are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.settings import FILE, value_of
from tokenswift.loader.default_model import DEFAULT, DRAFT

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


def about(rows: Sequence[Row]) -> str:
    """The conditions that rows of one table were measured under."""

    def several(name: str) -> str:
        found = (row.get(name, value_of(row["config"], name)) for row in rows)
        return ", ".join(sorted({str(value) for value in found if value is not None}))

    parts = {f"preset {several('preset')}": True, model_words(rows): True}
    parts |= {several(name): True for name in ("dtype", "machine")}
    for words, name in (
        ("sampler", "sampler"),
        ("prompts", "prompts"),
        ("lengths reached", "reached"),
    ):
        parts[f"{words} {several(name)}"] = rows[0]["kind"] in ("decode", "text")
    parts[f"RoPE scaling {several('rope_scaling')}"] = several("rope_scaling") not in ("", "none")
    parts[f"commit {several('commit')}"] = True
    return "; ".join(words for words, said in parts.items() if said)


def model_words(rows: Sequence[Row]) -> str:
    """The models of rows; of the default one what its weights are, whoever reads its figures."""
    models = dict.fromkeys(row["config"]["model"] for row in rows)
    return " and ".join(DEFAULT_WORDS if name == DEFAULT else name for name in models)


def drafter_words(row: Row) -> str:
    """The heads, the EAGLE-3 drafter or the draft model that a row used; "none" where it had
    none."""
    heads, small, eagle = row.get("heads"), row.get("draft_model"), row.get("eagle")
    if small or row["config"].get("strategy") == "triforce":
        return f"draft model {small['name'] if small else DRAFT}"
    if eagle:
        return f"EAGLE-3 drafter {eagle['name']}"
    return f"{heads['count']} {heads['kind']} heads" if heads else "none"
