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
    setrlimit(RLIMIT_AS, (1 << 32, 1 << 32))
    setrlimit(RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):  # Windows has none, others have lower ones or another form
    pass
sys.path.append(sys.argv[1])
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
text = sys.stdin.buffer.read().decode("utf-8")
LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=LLParserLimits(**{LIMITS})).compute_bitmask()
"""


@lru_cache(maxsize=64)
def trial(text: str) -> str:
    """Compile a grammar and make its first mask, over bytes and elsewhere.

    Args:
        text: as llguidance takes it.
    Returns:
        Why it must not be compiled here; "" if it may be. An error that llguidance tells of is none.
    """
    import llguidance

    command = [sys.executable, "-I", "-c", _CODE, str(Path(llguidance.__file__).parents[1])]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"its compilation takes more than {SECONDS} seconds"
    except OSError as error:
        return f"no process can be started to try it: {error}"
    if done.returncode < 0:
        return "llguidance crashes on it"
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"it cannot be tried: {said}" if done.returncode else ""
