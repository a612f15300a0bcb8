"""Settings of an experiment: names, how a command line writes them, one row's full
configuration."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenswift.checks import check_choice, check_integer, shown
from tokenswift.config.sampling import NEUTRAL, SamplingParams, settings_of
from tokenswift.config.strategies import OPTIONS, build_options
from tokenswift.types import InputError

#: the paper's samplers: of its models (Table 10), and those that it compares (Tables 6 and 12)
SAMPLERS: dict[str, dict[str, float]] = {
    "llama3.1-8b": {"min_p": 0.1, "repetition_penalty": 1.2},
    "yarn-llama2-7b-128k": {"top_p": 0.9, "repetition_penalty": 1.15},
    "qwen2.5-1.5b": {"top_p": 0.9, "repetition_penalty": 1.15},
    "qwen2.5-7b": {"min_p": 0.05, "repetition_penalty": 1.15},
    "qwen2.5-14b": {"min_p": 0.05, "repetition_penalty": 1.13},
    "top-p": {"top_p": 0.9, "repetition_penalty": 1.2},
    "min-p": {"min_p": 0.1, "repetition_penalty": 1.2},
    "eta": {"eta_cutoff": 2e-4, "repetition_penalty": 1.2},
}
#: what a sampler's setting may name
FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name != "seed")
#: see the file
FILE = tomllib.loads((Path(__file__).parent / "settings.toml").read_text(encoding="utf-8"))
DEFAULTS: dict[str, Any] = FILE["defaults"]
OWN: dict[str, dict[str, Any]] = FILE["kinds"]
KINDS = tuple(OWN)
#: settings that rows name where they are not the usual ones
LATER = ("weights", "kv_cache_dtype", "backend")
#: strategy → names of its options
TAKEN = {name: tuple(field.name for field in fields(kind)) for name, kind in OPTIONS.items()}
_ALL = [
    *DEFAULTS,
    *FIELDS,
    *sum(TAKEN.values(), ()),
    *(name for own in OWN.values() for name in own),
]
KEYS = tuple(dict.fromkeys(_ALL))
#: settings that may name a file or folder
_PLACES = ("model", "heads", "eagle", "prompts", "draft_model")


def parse(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` as a setting; values with commas between them are a list (but for trees).

    Raises:
        InputError: no such key.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"set is {shown(text)}; valid: KEY=VALUE")
    check_keys({key: value}, "set")
    if key == "tree" or (key == "model" and "," not in value):
        return key, value
    parts = [_value(part) for part in value.split(",")]
    return key, parts if len(parts) > 1 or key == "points" else parts[0]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_keys(given: Mapping[str, Any], where: str) -> None:
    """Raise :class:`InputError` for a name that is no setting."""
    for key in given:
        if key not in KEYS:
            raise InputError(f"{where}: {shown(key)} is not a setting; valid: {', '.join(KEYS)}")


def axes(settings: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """The settings that have several values: a row for each (of points, all are one value)."""
    return [
        (key, value)
        for key, value in settings.items()
        if isinstance(value, list) and key != "points"
    ]


def resolve(
    variant: str, settings: Mapping[str, Any], text: int, seed: int, kind: str = "decode"
) -> dict[str, Any]:
    """The full configuration of one row.

    Args:
        variant: its name in tables.
        settings: one value a key; what a strategy has no use for is left out.
        text: which of the prompts, from 0.
        kind: how it is measured.
    Raises:
        InputError: naming the setting and what is valid.
    """
    merged = {**DEFAULTS, **OWN[kind], **settings}
    check_choice("strategy", merged["strategy"], tuple(OPTIONS))
    check_choice("reach", merged["reach"], ("generate", "text"))
    for key in ("texts", "seeds", "prefill", "measured", *OWN[kind]):
        check_integer(key, merged[key], 1)
    check_integer("threads", merged["threads"], 0)
    points = merged["points"] if isinstance(merged["points"], list) else [merged["points"]]
    for point in points:
        check_integer("points", point, 1)
    if not points or points != sorted(set(points)):
        raise InputError(f"points is {shown(points)}; valid: rising numbers of new tokens")
    check_choice("sampler", merged["sampler"], tuple(SAMPLERS))
    sampling = {
        **NEUTRAL,
        **SAMPLERS[merged["sampler"]],
        **{k: merged[k] for k in FIELDS if k in merged},
    }
    options = _options(merged)
    named = (
        "model",
        "dtype",
        "device",
        "heads",
        "rope_scaling",
        "threads",
        "prompts",
        "prefill",
        "sampler",
    )
    return {
        "variant": variant,
        "strategy": merged["strategy"],
        "options": {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
        **{k: merged[k] for k in named},
        **{k: merged[k] for k in LATER if merged[k] != DEFAULTS[k]},
        **(
            {"eagle": merged["eagle"]}
            if merged["strategy"] == "auto" and merged["eagle"] != "none"
            else {}
        ),
        "sampling": settings_of(SamplingParams(**sampling, seed=seed)),
        "points": points,
        "reach": merged["reach"],
        **({"measured": merged["measured"]} if merged["reach"] == "text" else {}),
        "text": text,
        "seed": seed,
        **{key: merged[key] for key in OWN[kind]},
    }


def _options(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the strategy's options that are set."""
    strategy = merged["strategy"]
    options = {k: merged[k] for k in TAKEN[strategy] if k in merged}
    if "tree" in options:
        try:
            options["tree"] = tuple(int(width) for width in str(options["tree"]).split(","))
        except ValueError:
            raise InputError(
                f"tree is {shown(options['tree'])}; valid: integers such as 1,3,3,3"
            ) from None
    build_options(strategy, options)
    return options


def public(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the places of files on this machine: their names alone."""
    made = {**config, "options": dict(config["options"])}
    for part in (made, made["options"]):
        for key in _PLACES:
            if part.get(key) and Path(part[key]).exists():
                part[key] = Path(part[key]).resolve().name
    return made


def key_of(spec: str, config: Mapping[str, Any]) -> str:
    """What names a row: rows of equal key are the same measurement."""
    text = json.dumps([spec, public(config)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """A setting of a row's configuration, wherever it stands."""
    for part in (config, config["options"], config["sampling"]):
        if key in part:
            return part[key]
    return None
