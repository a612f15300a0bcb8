"""Specs: one TOML file for each table or figure.

::

    title      what it shows
    kind       how its rows are measured (`row.KINDS`)
    claim      the paper's claim
    differs    how this measurement differs from the paper's
    group      "paper", or a name under which specs of our own are chosen together
    rows_of    instead of variants: show the rows of these specs, too
    where      of all rows show those alone that have these values
    methods    ways to run TokenSwift, by their names in methods.toml: variants before its own,
               with the settings there under those here
    [settings]
               values of `settings.DEFAULTS`, of sampling parameters, of strategy options;
               several values of one setting make rows for each
    [[variants]]
               name, and settings of its own: what is compared
    [presets.smoke], [presets.cpu], [presets.real], [presets.gpu]
               settings over both; only = names of variants; [presets.P.variants.NAME] for one;
               a spec without the preset real has no rows of it
    [table]    by: settings that tell lines apart; figures: names of settings.toml; or, in specs
               of our own, columns, sort and best: see `tables`
    [plot]     x: a setting or "point"; y: figures; series: settings that tell lines apart;
               where: as above; together: one panel of this title for all figures
    [published]
               columns and rows of the paper's numbers; note
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.needs import METHODS, with_model
from benchmarks.settings import (
    DEFAULTS,
    KINDS,
    KINDS_BY_PROMPT,
    OPTION_NAMES,
    Config,
    Settings,
    axes,
    check_keys,
    resolve,
)
from tokenswift.checks import check_choice, check_integer, shown
from tokenswift.types import InputError

FOLDER = Path(__file__).parent / "specs"
PRESETS = ("smoke", "cpu", "real", "gpu")
REAL = "real"  # the preset of real models: only of specs that say which
HEADS_NAMED = (REAL, "gpu")  # presets in which heads are named by kind


@dataclass(frozen=True, slots=True)
class Spec:
    """A table or figure.

    Attributes:
        name: of its file, such as "table3".
        data: the file, see the module.
    """

    name: str
    data: Mapping[str, Any] = field(repr=False)

    @property
    def title(self) -> str:
        """What it shows."""
        return self.data["title"]

    @property
    def kind(self) -> str:
        """How its rows are measured."""
        return self.data.get("kind", "decode")

    @property
    def variants(self) -> list[Settings]:
        """What it compares, by name: methods, then variants of its own."""
        return [
            *({"name": name} for name in self.data.get("methods", ())),
            *self.data.get("variants", ()),
        ]

    @property
    def with_eagle(self) -> list[str]:
        """Names of variants that are about an EAGLE-3 drafter."""
        return [variant["name"] for variant in self.variants if "eagle" in variant]

    @property
    def by(self) -> list[str]:
        """The settings that tell its lines apart, the length aside."""
        return list(self.data.get("table", {}).get("by", ["variant"]))

    @property
    def sources(self) -> tuple[str, ...]:
        """The specs whose rows it shows, its own first."""
        return (self.name, *self.data.get("rows_of", ()))

    @property
    def group(self) -> str:
        """What it belongs to: "paper", or what of ours it measures, such as "engine"."""
        return self.data.get("group", "paper")

    @property
    def of_paper(self) -> bool:
        """Whether it is set up as the paper's tables are, rather than by columns of its own."""
        return "columns" not in self.data.get("table", {})

    @property
    def figures(self) -> list[str]:
        """The figures of its table."""
        return list(self.data.get("table", {}).get("figures", ["alpha", "speedup"]))

    @property
    def label(self) -> str:
        """Its name in the paper: "Table 3"."""
        kind = "Table" if self.name.startswith("table") else "Figure"
        digits = (
            self.name.removeprefix("table").removeprefix("figure").lstrip("-").replace("-", " and ")
        )
        if not self.name.startswith(("table", "figure")):
            return self.name
        return f"{kind}{'s' if ' and ' in digits else ''} {digits}"

    def rows(self, preset: str, overrides: Settings) -> list[Config]:
        """The configurations of all rows.

        Args:
            preset: one of :data:`PRESETS`.
            overrides: settings that go over everything but the ``prompts`` of a variant that has
                its own.
        Raises:
            InputError: naming the setting and what is valid.
        """
        check_choice("preset", preset, PRESETS)
        if preset == REAL and not self._preset(preset):
            return []
        only = self._preset(preset).get("only")
        configs: list[Config] = []
        for variant in self.variants:
            name = variant["name"]
            if only is None or name in only:
                settings = self._settings(variant, preset, overrides)
                configs += self._rows_of(name, settings, preset)
        return configs

    def _preset(self, preset: str) -> Settings:
        return self.data.get("presets", {}).get(preset, {})

    def _settings(self, variant: Settings, preset: str, overrides: Settings) -> Settings:
        """A variant's settings, from what goes under to what goes over."""
        name = variant["name"]
        method = METHODS[name] if name in self.data.get("methods", ()) else {}
        in_preset = self._preset(preset)
        of_variant = in_preset.get("variants", {}).get(name, {})
        settings: dict[str, Any] = {
            **self.data.get("settings", {}),
            **{key: value for key, value in variant.items() if key != "name"},
            **{key: value for key, value in in_preset.items() if key not in ("only", "variants")},
            **of_variant,
            **overrides,
        }
        check_keys(settings, f"spec {self.name}")
        if "prompts" in variant:  # a kind of text that is what the line is about
            settings["prompts"] = variant["prompts"]
        with_drafter = name in self.with_eagle or "eagle" in of_variant
        if self.with_eagle and not with_drafter:  # the drafter is for those lines alone
            settings.pop("eagle", None)
        return {**method, **settings}

    def _rows_of(self, variant: str, settings: Settings, preset: str) -> list[Config]:
        """A row for each of several values, each prompt and each seed."""
        strategy = settings.get("strategy", DEFAULTS["strategy"])
        all_options = {name for names in OPTION_NAMES.values() for name in names}
        unused = all_options.difference(OPTION_NAMES.get(strategy, ()))
        used = {key: value for key, value in settings.items() if key not in unused}
        several = axes(used)
        if used.get("reach") == "text":
            points = used.get("points", DEFAULTS["points"])
            several.append(("points", [[point] for point in points]))
        keys = [key for key, _ in several]
        by_prompt = self.kind in KINDS_BY_PROMPT
        configs = []
        for values in product(*(values for _, values in several)):
            single = {**used, **dict(zip(keys, values, strict=True))}
            model = single.get("model", DEFAULTS["model"])
            named = preset in HEADS_NAMED and by_prompt
            single = with_model(single, model, strategy, named)
            texts = single.get("texts", DEFAULTS["texts"]) if by_prompt else 1
            seeds = single.get("seeds", DEFAULTS["seeds"]) if by_prompt else 1
            for count in (texts, seeds):
                check_integer("texts and seeds", count, 1)
            for text, seed in product(range(texts), range(seeds)):
                configs.append(resolve(variant, single, text, seed, self.kind))
        return configs


def names() -> list[str]:
    """The specs that come with the library: the paper's tables, its figures, then our own by
    name."""
    return sorted((file.stem for file in FOLDER.glob("*.toml")), key=_order)


def _order(name: str) -> tuple[int, int, str]:
    digits = re.search(r"\d+", name)
    if digits is None:
        return 2, 0, name
    return int(name.startswith("figure")), int(digits[0]), name


def load(name: str) -> Spec:
    """A spec by name, or of a TOML file.

    Raises:
        InputError: no such spec, or a file that is none.
    """
    is_file = name.endswith(".toml")
    if not is_file and name not in names():
        raise InputError(f"spec is {shown(name)}; valid: {', '.join(names())}, or a TOML file")
    path = Path(name).expanduser() if is_file else FOLDER / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"spec {name} cannot be read ({error}); valid: a TOML file") from error
    if "title" not in data:
        raise InputError(
            f"spec {name} has no title; valid: as `python -m benchmarks list` shows them"
        )
    spec = Spec(path.stem, data)
    check_choice(f"kind of spec {name}", spec.kind, KINDS)
    for method in data.get("methods", ()):
        check_choice(f"method of spec {name}", method, tuple(METHODS))
    return spec


def chosen(names_or_groups: Sequence[str]) -> list[Spec]:
    """The specs of these names or groups; of none, the paper's."""
    every = [load(name) for name in names()]
    specs: list[Spec] = []
    for name in names_or_groups or ("paper",):
        specs += [spec for spec in every if spec.group == name] or [load(name)]
    return specs
