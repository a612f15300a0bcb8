"""Settings of an experiment: names, how a command line writes them, one row's full configuration."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from tokenswift.checks import check_choice, check_integer
from tokenswift.config import OPTIONS, SamplingParams, build_options, preset, settings_of, shown
from tokenswift.types import InputError

#: what a sampler's setting may name
FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name != "seed")
REACHES = ("generate", "text")
#: see the file
FILE = tomllib.loads((Path(__file__).parent / "settings.toml").read_text(encoding="utf-8"))
DEFAULTS: dict[str, Any] = FILE["defaults"]
OWN: dict[str, dict[str, Any]] = FILE["kinds"]
KINDS = tuple(OWN)
#: settings that rows name where they are not the usual ones
LATER = ("weights", "activations", "kv_cache_dtype", "backend", "cuda_graphs")
#: strategy option → the strategies that have it
OPTION: dict[str, dict[str, Field[Any]]] = {}
for _name, _kind in OPTIONS.items():
    for _field in fields(_kind):
        OPTION.setdefault(_field.name, {})[_name] = _field
_SAMPLING = {f.name: f.default for f in fields(SamplingParams)}
_OWN = {key: default for own in OWN.values() for key, default in own.items()}
KEYS = tuple(dict.fromkeys((*DEFAULTS, *FIELDS, *OPTION, *_OWN)))
_LISTS = ("points", "contexts")  # a list here is one value, not one row each


def parse(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` as a setting; values with commas between them are a list (but for trees).

    Raises:
        InputError: no such key, or no such value.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"set is {shown(text)}; valid: KEY=VALUE")
    check_keys({key: value}, "set")
    if key == "tree" or (key == "model" and "," not in value):
        return key, value
    parts = [_number(part, key) for part in value.split(",")]
    return key, parts if len(parts) > 1 or key in _LISTS else parts[0]


def _number(text: str, key: str) -> Any:
    default = {**_OWN, **_SAMPLING, **DEFAULTS}.get(key)
    kind: Any = type(default[0] if isinstance(default, list) else default)
    if key in OPTION:
        kind = int if str(next(iter(OPTION[key].values())).type).startswith("int") else str
    if kind is bool:
        check_choice(key, text, ("true", "false"))
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        what = {int: "an integer", float: "a number"}[kind]
        raise InputError(f"{key} is {shown(text)}; valid: {what}") from None


def check_keys(given: Mapping[str, Any], where: str) -> None:
    """Raise :class:`InputError` for a name that is no setting."""
    for key in given:
        if key not in KEYS:
            raise InputError(f"{where}: {shown(key)} is not a setting; valid: {', '.join(KEYS)}")


def axes(settings: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """The settings that have several values: a row for each."""
    return [(key, value) for key, value in settings.items() if isinstance(value, list) and key not in _LISTS]


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
    merged = {**DEFAULTS, **settings}
    check_choice("strategy", merged["strategy"], tuple(OPTIONS))
    check_choice("reach", merged["reach"], REACHES)
    for key in ("texts", "seeds", "prefill", "measured"):
        check_integer(key, merged[key], 1)
    check_integer("threads", merged["threads"], 0)
    own = {key: merged.get(key, default) for key, default in OWN.get(kind, {}).items()}
    for key, default in OWN.get(kind, {}).items():
        if isinstance(default, int):
            check_integer(key, own[key], 1)
    points = merged["points"] if isinstance(merged["points"], list) else [merged["points"]]
    if not points:
        raise InputError("points is []; valid: at least one number of new tokens")
    for point in points:
        check_integer("points", point, 1)
    if points != sorted(set(points)):
        raise InputError(f"points is {shown(points)}; valid: rising numbers of new tokens")
    sampling = {**preset(merged["sampler"]), **{k: merged[k] for k in FIELDS if k in merged}}
    params = SamplingParams(**sampling, seed=seed)
    options = _options(merged)
    named = ("model", "dtype", "device", "heads", "rope_scaling", "threads", "prompts", "prefill", "sampler")
    return {
        "variant": variant,
        "strategy": merged["strategy"],
        "options": {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
        **{k: merged[k] for k in named},
        **{k: merged[k] for k in LATER if merged[k] != DEFAULTS[k]},
        **({"eagle": merged["eagle"]} if merged["strategy"] == "auto" and merged["eagle"] != "none" else {}),
        "sampling": settings_of(params),
        "points": list(points),
        "reach": merged["reach"],
        **({"measured": merged["measured"]} if merged["reach"] == "text" else {}),
        "text": text,
        "seed": seed,
        **own,
    }


def takes(strategy: str, option: str) -> bool:
    """Whether a strategy has an option."""
    return strategy in OPTION[option]


def _options(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the strategy's options that are set."""
    strategy = merged["strategy"]
    options = {k: merged[k] for k in OPTION if k in merged and takes(strategy, k)}
    if "tree" in options:
        options["tree"] = _tree(options["tree"])
    build_options(OPTIONS[strategy], strategy, options)
    return options


def _tree(text: Any) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in str(text).split(","))
    except ValueError:
        raise InputError(f"tree is {shown(text)}; valid: integers such as 1,3,3,3") from None


#: settings that may name a file or folder
_PLACES = ("model", "heads", "eagle", "prompts", "draft_model", "gguf")


def public(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the places of files on this machine: a folder's or file's name, and what tells
    it from another of that name."""
    made = {**config, "options": dict(config["options"])}
    for part in (made, made["options"]):
        for key in _PLACES:
            named, path = part.get(key), Path(str(part.get(key) or ""))
            a_name = not path.is_absolute() and len(path.parts) == 1 and not path.is_dir()
            if named and path.exists() and not a_name:
                part[key] = f"{path.resolve().name} ({_sign(path)})"
    return made


def _sign(path: Path) -> str:
    """A few letters that change with a folder's config or its files' names and sizes."""
    made = hashlib.sha256()
    found = path / "config.json"
    if found.is_file():
        made.update(found.read_bytes())
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            made.update(f"{file.name} {file.stat().st_size}\n".encode())
    return made.hexdigest()[:8]


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
