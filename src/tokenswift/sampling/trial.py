"""Grammars are compiled in a process of their own before this one compiles them. Some overflow llguidance's
stack, and intersections of expressions (``&``, ``allOf`` with patterns, ``multipleOf``) can take it hours
within one step of an automaton, which neither its limits nor anything else in a process stops."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

SECONDS = 10
MEMORY = 1 << 32  # bytes of its address space
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # of about 2 KB each
_CODE = """
import json, sys
try:
    from resource import RLIMIT_AS, RLIMIT_CORE, setrlimit
    setrlimit(RLIMIT_CORE, (0, 0))
    setrlimit(RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
except (ImportError, ValueError, OSError):  # Windows has none, others have lower ones or another form
    pass
sys.path.append(sys.argv[2])
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
limits, special, size, texts = json.load(sys.stdin)
class Bytes:
    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([one]) for one in range(256)), b"<end>", *(name.encode() for name in special)]
    special_token_ids = [*range(256, len(tokens))]
    tokens += [b""] * (size - len(tokens))
    def __call__(self, text):
        return list(text)
tokenizer, limits = LLTokenizer(TokenizerWrapper(Bytes())), LLParserLimits(**limits)
matchers = [LLMatcher(tokenizer, text, log_level=0, limits=limits) for text in texts]
for matcher in matchers:
    matcher.compute_bitmask()
print(json.dumps([matcher.get_error() for matcher in matchers]))
"""


class TrialError(Exception):
    """A grammar must not be compiled in this process."""


@lru_cache(maxsize=64)  # of those that may: another failure may come of a busy machine
def trial(texts: tuple[str, ...], special: tuple[str, ...] = (), vocab_size: int = 0) -> list[str]:
    """Compile grammars over bytes in another process.

    Args:
        texts: as llguidance takes them.
        special: names of tokens that they may speak of.
        vocab_size: V, the number of ids that they may speak of.
    Returns:
        What is wrong with each, "" where nothing is.
    Raises:
        TrialError: with the reason.
    """
    import llguidance

    folder = str(Path(llguidance.__file__).parents[1])
    given = json.dumps([LIMITS, special, vocab_size, texts]).encode()
    command = [sys.executable, "-I", "-c", _CODE, str(MEMORY), folder]
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise TrialError(f"its compilation takes more than {SECONDS} seconds") from None
    except OSError as error:
        raise TrialError(f"no process can be started to try it: {error}") from error
    if done.returncode < 0:
        raise TrialError("llguidance crashes on it")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise TrialError(f"it cannot be tried: {said}")
    return json.loads(done.stdout)
