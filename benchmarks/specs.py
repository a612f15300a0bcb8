"""Specs: one TOML file for each table or figure.

::

    title, kind, claim, differs   what it shows; how its rows are measured (`row.KINDS`); the
    paper's claim;
                                  how this measurement differs from the paper's
    rows_of, where                instead of variants: show rows of other specs, those with these
        values
    methods                       ways to run TokenSwift, by their names in methods.toml: variants
    before its
                                  own, with the settings there under those here
    [settings]                    values of `settings.DEFAULTS`, of sampling parameters, of strategy
    options;
                                  several values of one setting make rows for each
    [[variants]]                  name, and settings of its own: what is compared
    [presets.smoke], .cpu, .gpu   settings over both; only = names of variants;
                                  [presets.P.variants.NAME] for one
    group                         "paper", or a name under which specs of our own are asked for
    together [table]                       by: settings that tell lines apart; figures: names of
        settings.toml; or, in
                                  specs of our own, columns, sort and best: see `tables`
    [plot]                        x: a setting or "point"; y: figures; series: settings that tell
    lines apart;
                                  where: as above
    [published]                   columns and rows of the paper's numbers; note
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.needs import METHODS, of_model
from benchmarks.settings import DEFAULTS, KINDS, TAKEN, axes, check_keys, resolve
from tokenswift.checks import check_choice, check_integer, shown
from tokenswift.types import InputError

FOLDER = Path(__file__).parent / "specs"
PRESETS = ("smoke", "cpu", "gpu")


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
    def variants(self) -> list[Mapping[str, Any]]:
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

    def rows(self, preset: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The configurations of all rows.

        Args:
            preset: one of :data:`PRESETS`.
            given: settings that go over everything but the ``prompts`` of a variant that has its
                own.
        Raises:
            InputError: naming the setting and what is valid.
        """
        check_choice("preset", preset, PRESETS)
        chosen = self.data.get("presets", {}).get(preset, {})
        own = {key: value for key, value in chosen.items() if key not in ("only", "variants")}
        made: list[dict[str, Any]] = []
        for variant in self.variants:
            name = variant["name"]
            if "only" in chosen and name not in chosen["only"]:
                continue
            method = METHODS[name] if name in self.data.get("methods", ()) else {}
            mine = {key: value for key, value in variant.items() if key != "name"}
            more = chosen.get("variants", {}).get(name, {})
            over = {**self.data.get("settings", {}), **mine, **own, **more, **given}
            check_keys(over, f"spec {self.name}")
            if "prompts" in mine:  # a kind of text that is what the line is about
                over["prompts"] = mine["prompts"]
            if (
                self.with_eagle and name not in self.with_eagle
            ):  # the drafter is for those lines alone
                over.pop("eagle", None)
            made += self._rows_of(name, {**method, **over}, preset)
        return made

    def _rows_of(
        self, variant: str, settings: Mapping[str, Any], preset: str
    ) -> list[dict[str, Any]]:
        strategy = settings.get("strategy", DEFAULTS["strategy"])
        others = {name for names in TAKEN.values() for name in names}.difference(
            TAKEN.get(strategy, ())
        )
        used = {k: v for k, v in settings.items() if k not in others}
        if used.get("reach") == "text":
            used["points"] = [[point] for point in used.get("points", DEFAULTS["points"])]
        several = [
            *axes(used),
            *([("points", used["points"])] if used.get("reach") == "text" else []),
        ]
        made = []
        for values in product(*(values for _, values in several)):
            one = {**used, **{key: value for (key, _), value in zip(several, values, strict=True)}}
            named = preset == "gpu" and self.kind in ("decode", "text")
            one = of_model(one.get("model", DEFAULTS["model"]), strategy, one, named)
            counts = [
                one.get(k, DEFAULTS[k]) if self.kind in KINDS[:2] else 1 for k in ("texts", "seeds")
            ]
            for count in counts:
                check_integer("texts and seeds", count, 1)
            for text, seed in product(*map(range, counts)):
                made.append(resolve(variant, one, text, seed, self.kind))
        return made


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
    own = name.endswith(".toml")
    if not own and name not in names():
        raise InputError(f"spec is {shown(name)}; valid: {', '.join(names())}, or a TOML file")
    path = Path(name).expanduser() if own else FOLDER / f"{name}.toml"
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


def chosen(wanted: Sequence[str]) -> list[Spec]:
    """The specs of these names or groups; of none, the paper's."""
    every = [load(name) for name in names()]
    found: list[Spec] = []
    for name in wanted or ("paper",):
        found += [spec for spec in every if spec.group == name] or [load(name)]
    return found
