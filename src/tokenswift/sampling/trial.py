"""Grammars are tried in a process of their own before this one compiles them: in llguidance some run for
hours or overflow its stack, and nothing stops that within a process. Others have a first mask, but nothing
comes of it, or every mask takes long: the beginning of a text is written, too."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

SECONDS = 10
MEMORY = 1 << 32  # bytes of its address space
CHOICES = 16  # made in the text that is written
FORCED = 1 << 14  # bytes of text without a choice: llguidance goes through all of them for each mask
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # of about 2 KB each
_CODE = """
import json, random, sys
try:
    from resource import RLIMIT_AS, RLIMIT_CORE, setrlimit
    setrlimit(RLIMIT_CORE, (0, 0))
    setrlimit(RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
except (ImportError, ValueError, OSError):  # Windows has none, others have lower ones or another form
    pass
sys.path.append(sys.argv[2])
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
choices, most, limits, special, size, text = json.load(sys.stdin)
class Bytes:
    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([one]) for one in range(256)), b"<end>", *(name.encode() for name in special)]
    special_token_ids = [*range(256, len(tokens))]
    tokens += [b""] * (size - len(tokens))
    def __call__(self, text):
        return list(text)
tokenizer, limits = LLTokenizer(TokenizerWrapper(Bytes())), LLParserLimits(**limits)
matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
draw, wrong = random.Random(0), ""
for _ in range(choices):
    bits = matcher.compute_bitmask()
    may = [byte for byte in range(255) if bits[byte // 8] >> byte % 8 & 1]  # 255 marks special ones
    if len(forced := matcher.compute_ff_bytes()) > most:
        wrong = f"{len(forced):,} bytes have to come in a row, of at most {most:,}"
    tokens = matcher.compute_ff_tokens() or draw.sample(may, min(1, len(may)))
    if wrong or matcher.is_error() or not tokens or not matcher.consume_tokens(tokens):
        break
print(json.dumps(wrong or matcher.get_error()))
"""


class TrialError(Exception):
    """A grammar cannot be compiled, must not be in this process, or no text can be written by it."""


@lru_cache(maxsize=64)  # of those that may: another failure may come of a busy machine
def trial(text: str, special: tuple[str, ...], vocab_size: int) -> None:
    """Compile a grammar and write the beginning of a text by it, over bytes and in another process.

    Args:
        text: as llguidance takes it.
        special: names of tokens that it may speak of.
        vocab_size: V, the number of ids that it may speak of.
    Raises:
        TrialError: with the reason.
    """
    import llguidance

    folder = str(Path(llguidance.__file__).parents[1])
    given = json.dumps([CHOICES, FORCED, LIMITS, special, vocab_size, text]).encode()
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
    if wrong := json.loads(done.stdout):
        raise TrialError(wrong)
