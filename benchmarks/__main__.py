"""``python -m benchmarks``: measure rows, list what can be measured, report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import runner, specs
from benchmarks.fetch import fetched
from benchmarks.needs import FETCHED, MODELS, needs
from benchmarks.roofline import CARDS
from benchmarks.runner import Job, read_rows
from benchmarks.settings import DEFAULTS, KINDS, LATER, parse, value_of
from benchmarks.words import shown
from tokenswift.checks import check_choice
from tokenswift.cli import options
from tokenswift.cli.declare import Parser, add_options, option
from tokenswift.cli.main import main
from tokenswift.cli.output import STDOUT, check_record, write_text
from tokenswift.cli.terminal import Stages, duration, table
from tokenswift.types import InputError, RunError


@dataclass(frozen=True)
class Specs:
    """Which tables and figures.

    Attributes:
        specs: names or groups that list shows; default: paper, all tables and figures of it
    """

    specs: list[str] = option((), "SPEC", place=True, nargs="*")


@dataclass(frozen=True)
class Settings:
    """What goes over a spec and its preset; each has a default there.

    Attributes:
        preset: sizes: smoke (minutes in all, nothing else needed), cpu (up to an hour a table) or gpu (the
            paper's)
        model: alias, folder or hub id; default: the preset's
        dtype: auto, float32, bfloat16 or float16; default: the preset's
        device: auto, cpu or cuda; default: auto
        heads: draft heads: a file, auto, none, or ours by kind; default: the variant's
        threads: CPU threads; default: torch's own
        prompts: texts to go on from: a folder of .txt files, pg19 (from the hub) or shipped; lines about a
            kind of text, such as program code, keep theirs; default: the preset's
        set: a setting over spec and preset, such as texts=2, seeds=3, points=100,200, reach=text or
            budget=256; values with commas make rows for each; may be given several times
        variant: only this variant of what a table compares, such as auto; may be given several times;
            default: all
    """

    preset: str = option("smoke", "P")
    model: str | None = option(None, "M")
    dtype: str | None = option(None, "T")
    device: str | None = option(None, "D")
    heads: str | None = option(None, "PATH")
    threads: int | None = option(None, least=1)
    prompts: str | None = option(None, "FOLDER")
    set: list[str] = option((), "KEY=VALUE", action="append")
    variant: list[str] = option((), "NAME", action="append")


@dataclass(frozen=True)
class Ahead:
    """What is said instead of measuring.

    Attributes:
        dry_run: say which rows would be measured and what they need, and end
        card: with --dry-run, the least memory and time of each row on a card by its maker's figures: h100,
            h200, a100, 4090 or l40s; default: a100 with the preset gpu, else none
    """

    dry_run: bool = option(False)
    card: str | None = option(None, "CARD")


@dataclass(frozen=True)
class Results:
    """Where rows are.

    Attributes:
        results: rows are read from there
    """

    results: str = option("bench-results", "FOLDER")


@dataclass(frozen=True)
class Page:
    """What a report is.

    Attributes:
        out: the report goes there; default: beside the rows
        title: what stands at its top
        no_plots: tables alone (no matplotlib needed)
    """

    out: str | None = option(None, "FOLDER")
    title: str = option("Results", "TEXT")
    no_plots: bool = option(False)


def build_parser(argv: Sequence[str] = ()) -> Parser:
    """The parser; ``argv`` does not matter."""
    parser = Parser(
        prog="python -m benchmarks",
        description="The paper's tables and figures on your own model and machine, and benchmarks of our own "
        "(speed, drafts, engine): measure rows, then make a report of them with the published "
        "figures beside.",
    )
    parser.add_argument("-h", "--help", action="help", help="show this, and exit")
    parts = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    words = "list what can be measured"
    listing = parts.add_parser("list", help=words, description=f"{words.capitalize()}.")
    add_options(listing, options.Record, ("json",))
    running = parts.add_parser(
        "run",
        help="measure rows",
        description="Measure the rows of tables and figures that the folder of results does not hold yet. "
        "Each row runs in a process of its own, beside plain decoding. A runner that was stopped goes on "
        "where it was.",
    )
    there = "rows go there, and those there already are not measured again"
    for kind in (Specs, Settings, Results, Ahead, options.Quiet):
        add_options(running, kind, texts={"results": there} if kind is Results else None)
    reporting = parts.add_parser(
        "report",
        help="make a report",
        description="Make a report of the rows: report.md, report.html, and plots as SVG and PNG.",
    )
    for kind in (Specs, Results, Page):
        add_options(reporting, kind)
    for name, run in (("list", run_list), ("run", run_rows), ("report", run_report)):
        parts.choices[name].set_defaults(run=run)
        parts.choices[name].complete()
    return parser


def run_list(args: argparse.Namespace) -> int:
    """Names, titles and how many rows each preset has."""
    target = check_record(args.json)
    records = []
    for spec in map(specs.load, specs.names()):
        rows = {preset: len(spec.rows(preset, {})) for preset in specs.PRESETS}
        about = {"name": spec.name, "title": spec.title, "group": spec.group}
        records.append(about | {"rows_of": list(spec.sources[1:]), "rows": rows})
    if target is not None:
        write_text(target, json.dumps(records, ensure_ascii=False) + "\n")
    if target != STDOUT:
        lines = []
        for one in records:
            counts = ", ".join(map(str, one["rows"].values()))
            if any(one["rows_of"]):
                counts = f"rows of {', '.join(one['rows_of'])}"
            lines.append((one["name"], one["title"], one["group"], counts))
        print(table(lines, ("name", "what it shows", "group", f"rows ({', '.join(specs.PRESETS)})")))
    return 0


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The rows that a command asks for, everything checked that can be without a model.

    Raises:
        InputError: an unknown spec, preset, setting, strategy, model or place.
    """
    given: dict[str, Any] = dict(parse(text) for text in args.set)
    for name in ("model", "dtype", "device", "heads", "threads", "prompts"):
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    made: dict[str, Job] = {}
    variants: set[str] = set()
    chosen = specs.chosen(args.specs)
    for source in (found for spec in chosen for found in (spec, *map(specs.load, spec.sources[1:]))):
        for config in source.rows(args.preset, given):
            variants.add(config["variant"])
            if not args.variant or config["variant"] in args.variant:
                job = Job(source.name, source.kind, args.preset, config, _label(source, config))
                made.setdefault(job.key, job)
    for name in args.variant:
        if name not in variants:
            raise InputError(f"variant is {name!r}; valid: {', '.join(sorted(variants))}")
    return list(made.values())


def _label(spec: specs.Spec, config: dict[str, Any]) -> str:
    """What tells a row from the spec's other rows, in words."""
    parts = [(key, value_of(config, key)) for key in spec.told_apart]
    if config["model"] in MODELS and "model" not in spec.told_apart:
        parts.append(("model", config["model"]))
    return ", ".join(
        shown(value) if key == "variant" else f"{key} {shown(value)}"
        for key, value in parts
        if spec.of_paper or value is not None
    )


def check_packages(*names: str) -> None:
    """Raise :class:`InputError` where a package is missing."""
    for name in names:
        if find_spec(name) is None:
            other = ", or --no-plots" if name == "matplotlib" else ""
            raise InputError(f"{name} is missing; pip install -e '.[bench]'{other}")


def check_jobs(jobs: list[Job]) -> None:
    """See that models, devices, heads and prompts are there (the default model is fetched).

    Raises:
        InputError: naming what is not.
    """
    from benchmarks.prompts import check_source
    from tokenswift.config import LoadConfig
    from tokenswift.loader.find import check_eagle, locate
    from tokenswift.loader.load import check_place

    for place in sorted({(job.config["dtype"], job.config["device"]) for job in jobs}):
        check_place(LoadConfig(*place))
    for job in jobs:
        LoadConfig(**{key: job.config.get(key, DEFAULTS[key]) for key in LATER})
    for heads in sorted({str(job.config["heads"]) for job in jobs}):
        options.check_heads(heads)
    for eagle in sorted({job.config["eagle"] for job in jobs if "eagle" in job.config}):
        check_eagle(eagle)
    for source in sorted({job.config["prompts"] for job in jobs if job.kind in KINDS[:2]}):
        check_source(source)
    for model in sorted({job.config["model"] for job in jobs}):
        locate(model)


def run_rows(args: argparse.Namespace) -> int:
    """Measure."""
    if args.model in FETCHED and not args.dry_run:
        args.model = str(fetched(args.model))
    jobs = jobs_of(args)
    folder = Path(args.results).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"results is {args.results!r}: it is not a folder; valid: a new or a results folder")
    if args.card is not None:
        check_choice("card", args.card, tuple(CARDS))
    if args.dry_run:
        say_ahead(jobs, folder, args.card or ("a100" if args.preset == "gpu" else None))
        return 0
    check_packages("pandas")
    check_jobs([job for job in jobs if not any(need.command for need in needs(job.config))])
    watcher = Rows(args.quiet)
    try:
        outcome = runner.run(jobs, folder, watcher)
    except KeyboardInterrupt:
        watcher.clear()
        raise KeyboardInterrupt(f"rows measured so far are in {folder}; the same command goes on") from None
    if not args.quiet:
        left = f", {len(outcome.unfit)} left out" if outcome.unfit else ""
        said = f"{outcome.done} rows measured, {outcome.before} were there{left}: {folder}"
        print(said, file=sys.stderr)
    if outcome.failed:
        job, why = outcome.failed[0]
        raise RunError(
            f"{len(outcome.failed)} rows failed, the first is {job} ({why}); the others are in {folder}"
        )
    return 0


def say_ahead(jobs: list[Job], folder: Path, card: str | None) -> None:
    """A line for each row: whether it is there, what it needs and has not, what it takes on a card at the
    least, and its configuration."""
    there = {row["key"] for row in read_rows(folder)}
    for job in jobs:
        found = needs(job.config)
        missing = any(need.command for need in found)
        word = "there" if job.key in there else "unfit" if missing else "to do"
        parts = [str(need) for need in found]
        if card is not None and job.kind in ("decode", "text"):
            from benchmarks.estimate import estimate

            nbytes, seconds = estimate(job.config, CARDS[card])
            size, hours = f"{nbytes / 1e9:.1f} GB", f"{seconds / 3600:.2f} hours"
            parts.append(f"at least {size} and {hours} on {CARDS[card].name}")
        print(f"{word}  {'; '.join([str(job), *parts])}  {json.dumps(job.config)}")


def run_report(args: argparse.Namespace) -> int:
    """Make the report."""
    check_packages("pandas", *([] if args.no_plots else ["matplotlib"]))
    from benchmarks import plots, report

    folder = Path(args.results).expanduser()
    if not folder.is_dir():
        raise InputError(f"results is {args.results!r}: no such folder; valid: one that run made")
    chosen = specs.chosen(args.specs)
    made = report.make(chosen, read_rows(folder), report.notes(folder), None if args.no_plots else plots.plot)
    for file in report.write(made, Path(args.out).expanduser() if args.out else folder, args.title)[:2]:
        print(file)
    return 0


class Rows:
    """Progress on standard error: a line for each row, and below it, on a terminal, how far the row is.

    Args:
        quiet: say nothing.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._line = Stages(quiet)
        self._head = ""
        self.clear = self._line.end  # takes the live line away

    def begin(self, job: Job, number: int, total: int, left: float | None) -> None:
        """A row begins."""
        eta = "" if left is None else f", ETA {duration(left)}"
        self._head = f"[{number}/{total}{eta}] {job}"
        self.progress(0.0)

    def progress(self, share: float) -> None:
        """So much of it is done."""
        self._line(self._head, round(100 * share), 100)

    def end(self, job: Job, word: str, seconds: float) -> None:
        """A row has ended."""
        self.clear()
        if not self.quiet:
            print(f"{self._head}: {word}, {seconds:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(build=build_parser))
