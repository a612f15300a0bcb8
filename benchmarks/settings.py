"""Settings of an experiment: names, how a command line writes them, one row's full
configuration."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from tokenswift.checks import check_choice, check_flag, check_integer, shown
from tokenswift.config.sampling import CONTINUED, NEUTRAL, SamplingParams, settings_of
from tokenswift.config.strategies import OPTIONS, build_options
from tokenswift.types import InputError

#: settings by name, as TOML files and command lines have them
Settings = Mapping[str, Any]


class Config(TypedDict):
    """The full configuration of one row, as the row has it.

    `settings.toml` says what each setting is. Rows name some settings only where they differ from
    the defaults; `rounds` and `schemas` are those of some kinds of measurements.
    """

    variant: str
    strategy: str
    options: dict[str, Any]
    model: str
    dtype: str
    device: str
    heads: str
    rope_scaling: str
    threads: int
    prompts: str
    prefill: int
    sampler: str
    weights: NotRequired[str]
    kv_cache_dtype: NotRequired[str]
    backend: NotRequired[str]
    eagle: NotRequired[str]
    sampling: dict[str, Any]
    points: list[int]
    reach: str
    measured: NotRequired[int]
    timed: NotRequired[bool]
    text: int
    seed: int
    rounds: NotRequired[int]
    schemas: NotRequired[int]


#: the paper's samplers, of its models (Table 10) and those that it compares (Tables 6 and 12), and
#: ours for texts that are continued
SAMPLERS: dict[str, Mapping[str, object]] = {
    "llama3.1-8b": {"min_p": 0.1, "repetition_penalty": 1.2},
    "yarn-llama2-7b-128k": {"top_p": 0.9, "repetition_penalty": 1.15},
    "qwen2.5-1.5b": {"top_p": 0.9, "repetition_penalty": 1.15},
    "qwen2.5-7b": {"min_p": 0.05, "repetition_penalty": 1.15},
    "qwen2.5-14b": {"min_p": 0.05, "repetition_penalty": 1.13},
    "top-p": {"top_p": 0.9, "repetition_penalty": 1.2},
    "min-p": {"min_p": 0.1, "repetition_penalty": 1.2},
    "eta": {"eta_cutoff": 2e-4, "repetition_penalty": 1.2},
    "continued": {key: value for key, value in settings_of(CONTINUED).items() if key != "seed"},
}
#: what a sampler's setting may name
FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name != "seed")
#: see the file
FILE = tomllib.loads((Path(__file__).parent / "settings.toml").read_text(encoding="utf-8"))
DEFAULTS: Settings = FILE["defaults"]
#: kind of measurement → the settings that it alone has
SETTINGS_OF_KIND: Mapping[str, Settings] = FILE["kinds"]
KINDS = tuple(SETTINGS_OF_KIND)
#: kinds of measurements that have a row for each prompt and seed
KINDS_BY_PROMPT = ("decode", "text")
#: options of loading that rows name where they are not the defaults
LOADING_OPTIONS = ("weights", "kv_cache_dtype", "backend")
#: strategy → names of its options
OPTION_NAMES = {
    name: tuple(field.name for field in fields(options)) for name, options in OPTIONS.items()
}
#: names of all settings
KEYS = tuple(
    dict.fromkeys(
        [
            *DEFAULTS,
            *FIELDS,
            *(name for names in OPTION_NAMES.values() for name in names),
            *(name for settings in SETTINGS_OF_KIND.values() for name in settings),
        ]
    )
)
#: settings that may name a file or folder
_PLACES = ("model", "heads", "eagle", "prompts", "draft_model")


def parse(text: str) -> tuple[str, object]:
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


def _value(text: str) -> object:
    """A value as JSON, or the text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_keys(settings: Mapping[str, object], source: str) -> None:
    """Raise :class:`InputError` for a name that is no setting; ``source`` says who names it."""
    for key in settings:
        if key not in KEYS:
            raise InputError(f"{source}: {shown(key)} is not a setting; valid: {', '.join(KEYS)}")


def axes(settings: Settings) -> list[tuple[str, list[Any]]]:
    """The settings that have several values: a row for each (of points, all are one value)."""
    return [
        (key, value)
        for key, value in settings.items()
        if isinstance(value, list) and key != "points"
    ]


def resolve(variant: str, settings: Settings, text: int, seed: int, kind: str = "decode") -> Config:
    """The full configuration of one row.

    Args:
        variant: its name in tables.
        settings: one value a key; what a strategy has no use for is left out.
        text: which of the prompts, from 0.
        kind: how it is measured.
    Raises:
        InputError: naming the setting and what is valid.
    """
    merged = {**DEFAULTS, **SETTINGS_OF_KIND[kind], **settings}
    check_choice("strategy", merged["strategy"], tuple(OPTIONS))
    check_choice("reach", merged["reach"], ("generate", "text"))
    for key in ("texts", "seeds", "prefill", "measured", *SETTINGS_OF_KIND[kind]):
        check_integer(key, merged[key], 1)
    check_integer("threads", merged["threads"], 0)
    check_flag("timed", merged["timed"])
    check_choice("sampler", merged["sampler"], tuple(SAMPLERS))
    config: Config = {
        "variant": variant,
        "strategy": merged["strategy"],
        "options": _options(merged),
        "model": merged["model"],
        "dtype": merged["dtype"],
        "device": merged["device"],
        "heads": merged["heads"],
        "rope_scaling": merged["rope_scaling"],
        "threads": merged["threads"],
        "prompts": merged["prompts"],
        "prefill": merged["prefill"],
        "sampler": merged["sampler"],
        "sampling": _sampling(merged, seed),
        "points": _points(merged),
        "reach": merged["reach"],
        "text": text,
        "seed": seed,
    }
    if merged["strategy"] == "auto" and merged["eagle"] != "none":
        config["eagle"] = merged["eagle"]
    if merged["reach"] == "text":
        config["measured"] = merged["measured"]
    if not merged["timed"]:
        config["timed"] = False
    optional = [key for key in LOADING_OPTIONS if merged[key] != DEFAULTS[key]]
    for key in (*optional, *SETTINGS_OF_KIND[kind]):
        config[key] = merged[key]
    return config


def _points(merged: Settings) -> list[int]:
    """The numbers of new tokens at which figures are taken."""
    points = merged["points"] if isinstance(merged["points"], list) else [merged["points"]]
    for point in points:
        check_integer("points", point, 1)
    if not points or points != sorted(set(points)):
        raise InputError(f"points is {shown(points)}; valid: rising numbers of new tokens")
    return points


def _sampling(merged: Settings, seed: int) -> dict[str, Any]:
    """The sampling parameters: the sampler's, and those that are settings of their own."""
    single = {key: merged[key] for key in FIELDS if key in merged}
    params = SamplingParams(**{**NEUTRAL, **SAMPLERS[merged["sampler"]], **single}, seed=seed)
    return settings_of(params)


def _options(merged: Settings) -> dict[str, Any]:
    """Those of the strategy's options that are set, with lists for tuples."""
    strategy = merged["strategy"]
    options = {name: merged[name] for name in OPTION_NAMES[strategy] if name in merged}
    if "tree" in options:
        try:
            options["tree"] = tuple(int(width) for width in str(options["tree"]).split(","))
        except ValueError:
            raise InputError(
                f"tree is {shown(options['tree'])}; valid: integers such as 1,3,3,3"
            ) from None
    build_options(strategy, options)
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }


def public(config: Config) -> dict[str, Any]:
    """A configuration without the places of files on this machine: their names alone."""
    return {**_without_folders(config), "options": _without_folders(config["options"])}


def _without_folders(settings: Mapping[str, object]) -> dict[str, object]:
    return {
        key: Path(str(value)).resolve().name
        if key in _PLACES and value and Path(str(value)).exists()
        else value
        for key, value in settings.items()
    }


def key_of(spec: str, config: Config) -> str:
    """What names a row: rows of equal key are the same measurement."""
    text = json.dumps([spec, public(config)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def value_of(config: Config, key: str) -> Any:
    """A setting of a row's configuration, wherever it stands; None where it is not there."""
    parts: tuple[Settings, ...] = (config, config["options"], config["sampling"])
    return next((part[key] for part in parts if key in part), None)
