"""Grammars are tried in a process of their own before this one compiles them: in llguidance some run for
hours or overflow its stack, and nothing stops that within a process."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

SECONDS = 10
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # of about 2 KB each
_CODE = f"""
import sys
try:
    from resource import RLIMIT_AS, RLIMIT_CORE, setrlimit
    setrlimit(RLIMIT_CORE, (0, 0))
    setrlimit(RLIMIT_AS, (1 << 32, 1 << 32))
except (ImportError, ValueError, OSError):  # Windows has none, others have lower ones or another form
    pass
sys.path.append(sys.argv[1])
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
text = sys.stdin.buffer.read().decode("utf-8")
LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=LLParserLimits(**{LIMITS})).compute_bitmask()
"""


class TrialError(Exception):
    """A grammar must not be compiled in this process; in a line."""


@lru_cache(maxsize=64)  # of those that may: another failure may come of a busy machine
def trial(text: str) -> None:
    """Compile a grammar and make its first mask, over bytes and in another process.

    Args:
        text: as llguidance takes it.
    Raises:
        TrialError: it must not be compiled here. An error that llguidance tells of is none.
    """
    import llguidance

    command = [sys.executable, "-I", "-c", _CODE, str(Path(llguidance.__file__).parents[1])]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise TrialError(f"its compilation takes more than {SECONDS} seconds") from None
    except OSError as error:
        raise TrialError(f"no process can be started to try it: {error}") from error
    if done.returncode < 0:
        raise TrialError("llguidance crashes on it")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise TrialError(f"it cannot be tried: {said}")
