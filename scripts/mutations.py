"""Mutation checks: plant known defects one at a time and see that the tests catch every one.

    python scripts/mutations.py [--only WORD] [--shard K/N] [--out FILE] [--list]

Each defect is an exact replacement of text in a temporary copy of ``src``; the tests named with it run
against that copy. A replacement that no longer matches, or tests that fail without any defect, are
errors. Exit code 0 when all defects are caught, 1 when one is missed, 2 for an error. A whole run's record
is ``bench/mutations.jsonl``: a line a defect, with the test that caught it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from defects import DEFECTS, Defect

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/tokenswift")
TIMEOUT = 600


def plant(defect: Defect, copy: Path) -> None:
    """Write the defect into the copy of ``src``."""
    file = copy / ("" if defect.file.startswith("benchmarks/") else "tokenswift") / defect.file
    text = file.read_text(encoding="utf-8")
    found = text.count(defect.old)
    if found != 1:
        raise SystemExit2(f"{defect.name}: the text to replace occurs {found} times in {defect.file}")
    file.write_text(text.replace(defect.old, defect.new), encoding="utf-8")


class SystemExit2(Exception):
    """An error of the check itself."""


def environment_of(copy: Path) -> dict[str, str]:
    """The environment in which a copy is imported, and not the installed package."""
    return os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}


def check_import(copy: Path) -> None:
    """See that tests of a copy run against the copy."""
    where = subprocess.run(
        [sys.executable, "-c", "import tokenswift; print(tokenswift.__file__)"],
        cwd=copy, env=environment_of(copy), capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if not Path(where).is_relative_to(copy):
        raise SystemExit2(f"the tests would run against {where}")


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[bool, str, float]:
    """Whether the tests pass against a copy; the first failed test; seconds."""
    start = time.monotonic()
    # Fewer examples than in the suite: a defect that shows up once in a while is not the aim here.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",  # what failed here is not what failed last in the tests themselves
        "-m",
        "(not slow or defects) and not model",
        "--import-mode=append",
        *tests,
    ]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment_of(copy), capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {TIMEOUT} s", time.monotonic() - start
    if done.returncode < 0:  # a crash is noticed too
        return False, f"ended by signal {-done.returncode}", time.monotonic() - start
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failed):
        raise SystemExit2(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    first = failed[0].split(" ")[1].partition("::")[2] if failed else ""
    return done.returncode == 0, first, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="defects whose name or file contains this")
    parser.add_argument("--shard", default="1/1", metavar="K/N", help="of N parts of them, the K-th")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a line of JSON for each defect")
    parser.add_argument("--list", action="store_true", help="name the defects and stop")
    args = parser.parse_args()
    defects = [defect for defect in DEFECTS if args.only in defect.name or args.only in defect.file]
    part, parts = (int(number) for number in args.shard.split("/"))
    defects = defects[part - 1 :: parts]
    if args.list:
        print("\n".join(defect.name for defect in defects))
        return 0
    rows, missed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder) / "clean"
        for top, to, more in (("src", clean, "*.egg-info"), ("benchmarks", clean / "benchmarks", "data")):
            shutil.copytree(ROOT / top, to, ignore=shutil.ignore_patterns("__pycache__", more))
        check_import(clean)
        for defect in defects:  # all replacements are checked before anything runs
            trial = Path(folder) / "trial"
            shutil.copytree(clean, trial)
            plant(defect, trial)
            shutil.rmtree(trial)
        for defect in defects:
            copy = Path(folder) / "copy"
            shutil.copytree(clean, copy)
            plant(defect, copy)
            passed, first, seconds = run_tests(copy, defect.tests)
            shutil.rmtree(copy)
            missed += passed
            rows.append({"defect": defect.name, "file": defect.file, "caught": not passed, "by": first})
            outcome = "MISSED" if passed else "caught"
            print(f"{outcome}  {seconds:4.0f} s  {defect.name}: {first or '-'}", flush=True)
        tests = tuple(dict.fromkeys(test for defect in defects for test in defect.tests))
        passed, first, _ = run_tests(clean, tests)
        if not passed:
            raise SystemExit2(f"the tests fail without any defect: {first}")
    if args.out is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        with args.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"commit": commit, **row}) + "\n" for row in rows)
    print(f"\n{len(rows) - missed} of {len(rows)} defects caught; without a defect the tests pass")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SystemExit2 as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
