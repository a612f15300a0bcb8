"""The end of a process that has imported the package."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, gc
# called last
atexit.register(lambda: print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000))
import tokenswift
from tokenswift.runs import schema
"""


def test_nothing_is_collected_when_the_interpreter_ends() -> None:
    """msgspec's types can end the process by a signal in such a collection."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done
