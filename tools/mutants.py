"""Changes to what decides tokens that no test notices, made by mutmut ([tool.mutmut] in
pyproject.toml).

    python tools/mutants.py [PROCESSES]

Those of tools/survivors.txt are known and not tried; other ones are printed, and end this with 1.
The list has a line for each: where, and the line as it was changed. `mutmut show NAME` shows one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

KNOWN = Path(__file__).with_name("survivors.txt")
MISSED = ("survived", "no tests", "not checked", "skipped")  # a test that does not end notices, too
SURVIVED = 0


def shown(name: str, path: Path) -> str:
    """A mutant's function and the line that it changed."""
    module, _, function = name.removeprefix("tokenswift.").rpartition(".")
    function = (
        re.sub(r"__mutmut_\d+$", "", function)
        .removeprefix("x_")
        .replace("xǁ", "")
        .replace("ǁ", ".")
    )
    lines = get_diff_for_mutant(name, path=path).splitlines()[3:]
    return f"{module} {function}: {' '.join(line[1:].strip() for line in lines if line[0] == '+')}"


def results() -> Iterator[tuple[Path, dict[str, Any], dict[str, str]]]:
    """mutmut's file of each module, with its content and what no test noticed yet: what it is → its
    name."""
    for file in sorted(Path("mutants/src").rglob("*.meta")):
        path = file.relative_to("mutants").with_suffix("")
        content = json.loads(file.read_text(encoding="utf-8"))
        codes = content["exit_code_by_key"].items()
        yield (
            file,
            content,
            {shown(n, path): n for n, code in codes if status_by_exit_code[code] in MISSED},
        )


def mutmut(*arguments: str) -> None:
    """Run it; what it prints is in build/mutants.log."""
    with open("build/mutants.log", "a", encoding="utf-8") as log:
        if subprocess.run(
            [sys.executable, "-m", "mutmut", *arguments], stdout=log, stderr=log
        ).returncode:
            sys.exit("mutmut failed; build/mutants.log has why")


def main(processes: str = "2") -> int:
    """Make the mutants, run the tests of those that are not known, and say which of them no test
    notices."""
    shutil.rmtree("mutants", ignore_errors=True)
    Path("build").mkdir(exist_ok=True)
    known = {*KNOWN.read_text(encoding="utf-8").splitlines()}
    mutmut(
        "run", "--max-children", processes, "tokenswift.tree.x_check_tree*"
    )  # which makes them all
    for file, content, missed in results():
        content["exit_code_by_key"] |= {missed[what]: SURVIVED for what in missed if what in known}
        file.write_text(json.dumps(content), encoding="utf-8")
    mutmut("run", "--max-children", processes)
    failed = 0
    for file, content, missed in results():
        new = [what for what in missed if what not in known]
        failed += len(new)
        total = len(content["exit_code_by_key"])
        print(f"{file.stem}: {total} changes, {len(missed)} of them not noticed")
        print(*(f"not known: {what} ({missed[what]})\n" for what in new), sep="", end="")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
