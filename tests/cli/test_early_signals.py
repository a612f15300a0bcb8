"""Ctrl-C while modules are imported: one line, exit code 130, no traceback."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

#: runs ``python -m tokenswift --help`` and sends itself SIGINT where the named module is looked for
DRIVER = """
import os, runpy, signal, sys

class Gate:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

module, sys.argv = sys.argv[1], ["tokenswift", "--help"]
sys.meta_path.insert(0, Gate())
runpy.run_module("tokenswift", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["tokenswift.cli.main", "tokenswift.cli.measure"])
def test_ctrl_c_during_imports(module: str) -> None:
    command = [sys.executable, "-c", DRIVER, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_the_package_and_its_command_are_light() -> None:
    """What is imported before anything listens for Ctrl-C: this package's own start, and no more of
    it."""
    script = (
        "import sys; before = {*sys.modules}; import tokenswift.__main__; found = {*sys.modules} "
        "- before; "
        "print(*[m for m in found if m.split('.')[0] not in sys.stdlib_module_names], len(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    *others, count = sorted(done.stdout.split(), reverse=True)
    assert others == ["tokenswift.version", "tokenswift.__main__", "tokenswift"], done
    assert int(count) < 40  # with those of the standard library
    project = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert project["project"]["scripts"] == {"tokenswift": "tokenswift.__main__:main"}


#: runs the command line and ends it where it begins to import something heavy
LIGHT = """
import os, sys
class Gate:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "numpy", "safetensors", "jaxtyping"):
            os._exit(9)
sys.meta_path.insert(0, Gate())
from tokenswift.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_help_and_version_need_nothing_heavy() -> None:
    for argv, words in (
        ("--version", "tokenswift 0.1.0 (torch "),
        ("--help", "usage: tokenswift COMMAND"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", LIGHT, argv], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done
        assert done.stdout.startswith(words)
