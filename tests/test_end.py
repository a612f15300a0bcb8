"""The end of a process that has imported the package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
import atexit, gc
# called last
atexit.register(lambda: print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000))
import tokenswift
from tokenswift.runs import journal
"""


def test_nothing_is_collected_when_the_interpreter_ends() -> None:
    """msgspec's types can end the process by a signal in such a collection."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done


LEFT = """
import sys
from tokenswift import LLM
stream = LLM(sys.argv[1]).stream([1, 2, 3], 50, strategy="autoregressive")
kept = iter(stream)
next(kept)
"""


def test_a_stream_left_unfinished_says_nothing(tiny_folder: Callable[..., Path]) -> None:
    """The interpreter closes what is left of it, after it has taken torch's names away."""
    command = [sys.executable, "-c", LEFT, str(tiny_folder())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done
    assert "Exception" not in done.stderr
