"""``python -m benchmarks``: measure rows, list what can be measured, report."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from benchmarks import runner, specs
from benchmarks.fetch import fetched
from benchmarks.needs import FETCHED, missing
from benchmarks.runner import Job, read_rows
from benchmarks.settings import (
    DEFAULTS,
    KINDS_BY_PROMPT,
    LOADING_OPTIONS,
    Config,
    parse,
    value_of,
)
from benchmarks.words import shown
from tokenswift.checks import check_choice
from tokenswift.types import InputError, RunError

#: settings that have an option of their own
SETTING_OPTIONS = ("model", "dtype", "device", "heads", "threads", "prompts")


class Parser(argparse.ArgumentParser):
    """Bad words are bad input like any other: one line."""

    def error(self, message: str) -> NoReturn:
        """Raise :class:`InputError`."""
        raise InputError(message)


def build_parser() -> Parser:
    """Commands and options."""
    parser = Parser(
        prog="python -m benchmarks",
        allow_abbrev=False,
        description="The paper's tables and figures on your own model and machine, and "
        "benchmarks of our own "
        "(speed, drafts, engine): measure rows, then make a report of them with the published "
        "figures below.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="names, titles and groups of what can be measured")
    listing.set_defaults(run=run_list)
    running = commands.add_parser(
        "run", help="measure the rows that are not there yet, a process each"
    )
    add_run_options(running)
    reporting = commands.add_parser("report", help="tables and pictures of the rows")
    add_report_options(reporting)
    for command in (running, reporting):
        command.add_argument(
            "--results", type=Path, default=Path("bench-results"), help="folder of rows"
        )
    return parser


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``run``."""
    parser.set_defaults(run=run_rows)
    add = parser.add_argument
    add("specs", nargs="*", metavar="SPEC", help="names or groups that list shows; default: paper")
    add(
        "--preset",
        default="smoke",
        help="sizes: smoke, cpu (an hour a table at most), real (two models) or gpu (the paper's)",
    )
    add("--model", help="alias, folder, file or hub id; default: the preset's")
    add("--dtype", help="auto, float32, bfloat16, float16 or int8; default: the preset's")
    add("--device", help="auto, cpu or cuda")
    add("--heads", help="draft heads: a file, auto, none, or ours by kind; default: the variant's")
    add("--threads", type=int, help="CPU threads; default: torch's own")
    add(
        "--prompts",
        help="a folder of .txt files, pg19 (from the hub) or shipped; default: the preset's",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="such as points=100,200 or budget=256",
    )
    add("--variant", action="append", default=[], help="only this one of what a table compares")
    add(
        "--dry-run", action="store_true", help="say which rows would be measured and what they lack"
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``report``."""
    parser.set_defaults(run=run_report)
    add = parser.add_argument
    add("specs", nargs="*", metavar="SPEC", help="names or groups that list shows; default: paper")
    add("--out", type=Path, help="folder of the report; default: beside the rows")
    add("--title", default="Results", help="what stands at its top")
    add("--no-plots", action="store_true", help="tables alone (no matplotlib needed)")


def run_list(args: argparse.Namespace) -> None:
    """A line for each spec: its name, group, title and how many rows each preset has."""
    for spec in map(specs.load, specs.names()):
        counts = ", ".join(f"{preset} {len(spec.rows(preset, {}))}" for preset in specs.PRESETS)
        sources = f"rows of {', '.join(spec.sources[1:])}" if spec.sources[1:] else counts
        print(f"{spec.name:12} {spec.group:9} {spec.title} ({sources})")


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The rows that a command asks for.

    Raises:
        InputError: an unknown spec, preset, setting, variant, strategy or place of files.
    """
    settings = dict(parse(text) for text in args.set)
    for name in SETTING_OPTIONS:
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    rows = [
        (source, config)
        for spec in specs.chosen(args.specs)
        for source in (spec, *map(specs.load, spec.sources[1:]))
        for config in source.rows(args.preset, settings)
    ]
    valid = tuple(sorted({config["variant"] for _, config in rows}))
    for name in args.variant:
        check_choice("variant", name, valid)
    jobs = [
        Job(
            spec=spec.name,
            kind=spec.kind,
            preset=args.preset,
            config=config,
            label=label_of(spec, config),
        )
        for spec, config in rows
        if not args.variant or config["variant"] in args.variant
    ]
    return list({job.key: job for job in jobs}.values())


def label_of(spec: specs.Spec, config: Config) -> str:
    """What tells a row from the spec's other rows, in words."""
    keys = [*spec.by, *spec.data.get("table", {}).get("tried", ())]
    values = {key: value_of(config, key) for key in keys if key != "variant"}
    parts = [f"{key} {shown(value)}" for key, value in values.items() if value is not None]
    return ", ".join([config["variant"], *parts])


def check_jobs(jobs: list[Job]) -> None:
    """See that models, devices, heads and prompts are there (the default model is fetched).

    Raises:
        InputError: naming what is not.
    """
    from benchmarks.prompts import check_source
    from tokenswift.cli.options import check_heads
    from tokenswift.config.loading import LoadConfig
    from tokenswift.loader.find import check_name, locate
    from tokenswift.loader.load import check_place

    for config in {job.key: job.config for job in jobs}.values():
        options = {key: config.get(key, DEFAULTS[key]) for key in LOADING_OPTIONS}
        check_place(LoadConfig(config["dtype"], config["device"], **options))
        check_heads(str(config["heads"]))
        check_name(config.get("eagle", "none"), "eagle")
    for source in sorted({job.config["prompts"] for job in jobs if job.kind in KINDS_BY_PROMPT}):
        check_source(source)
    for model in sorted({job.config["model"] for job in jobs}):
        locate(model)


def run_rows(args: argparse.Namespace) -> None:
    """Measure."""
    if args.model in FETCHED and not args.dry_run:
        args.model = str(fetched(args.model))
    jobs = jobs_of(args)
    folder = args.results.expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"results is {str(folder)!r}: it is not a folder; valid: a new or a results folder"
        )
    if args.dry_run:
        there = {row["key"] for row in read_rows(folder)}
        for job in jobs:
            print(plan_of(job, job.key in there))
        return
    check_jobs([job for job in jobs if not missing(job.config)])
    try:
        counts = runner.run(jobs, folder)
    except KeyboardInterrupt:
        raise RunError(f"interrupted; the same command goes on with the rows in {folder}") from None
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"rows in {folder}: {summary}", file=sys.stderr)
    if counts["failed"]:
        raise RunError(f"{counts['failed']} rows failed; the others are in {folder}")


def plan_of(job: Job, is_there: bool) -> str:
    """A line on a row: whether it is there, can be measured, or what it lacks."""
    lacking = missing(job.config)
    word = "to do"
    if is_there:
        word = "there"
    elif lacking:
        word = "unfit"
    return "  ".join(filter(None, (word, str(job), lacking, json.dumps(job.config))))


def run_report(args: argparse.Namespace) -> None:
    """Make the report."""
    check_packages("pandas", *([] if args.no_plots else ["matplotlib"]))
    from benchmarks import plots, report

    folder = args.results.expanduser()
    if not folder.is_dir():
        raise InputError(f"results is {str(folder)!r}: no such folder; valid: one that run made")
    notes = report.notes(folder)
    plot = report.no_picture if args.no_plots else plots.plot
    parts = report.parts(specs.chosen(args.specs), read_rows(folder), notes, plot)
    out = (args.out or folder).expanduser()
    print(report.write(parts, out, args.title, notes.get("summary", "")))


def check_packages(*names: str) -> None:
    """Raise :class:`InputError` where a package is missing."""
    for name in names:
        if find_spec(name) is None:
            other = ", or --no-plots" if name == "matplotlib" else ""
            raise InputError(f"{name} is missing; pip install -e '.[bench]'{other}")


def main(words: list[str] | None = None) -> int:
    """Run a command; its exit code."""
    try:
        args = build_parser().parse_args(words)
        args.run(args)
    except (InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
