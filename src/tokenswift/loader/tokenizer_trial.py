"""A tokenizer.json is tried in a process with limits before it is loaded: it may hold any number of steps and
patterns, and the library that runs them ends the whole process where memory runs out.

The module is that process's program, too. It is started with the file, the limits, and paths for imports.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # begun without the site's packages
    sys.path[:] = sys.argv[4:]

import json
import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

#: limits, and what comes to them for each byte of the file
MEMORY, MEMORY_EACH = 2**29, 8  # bytes of address space
SECONDS, SECONDS_EACH = 2.0, 2.0**-23  # of processor time
HANGS = 120  # seconds until a process that takes no processor time is given up
#: tokens of a text, and what comes to them for each of its bytes
TOKENS, TOKENS_EACH = 64, 8
#: more than any model has: tokens, those of them that were added
MOST_TOKENS, MOST_ADDED = 2**19, 2**16
#: what is encoded: what patterns and replacements meet in ordinary texts
TEXTS = (
    "",
    "a",
    "".join(map(chr, range(32, 127))),
    *(letter * 64 + "!" for letter in "aA0 \n.,-é語"),
    "The quick brown fox, 1234567 times:\n\n\tit's \N{GRINNING FACE} naïve — 東京 и Ω\r\n" * 4,
    "ab" * 64,
)
SHOWN = 200  # characters of an error that are passed on


def fault(path: Path) -> str | None:
    """What is wrong with a tokenizer's file, as a piece of a line; None where it can be loaded and used.

    Raises:
        OSError: no process can be started, or the file is not there.
    """
    size = path.stat().st_size
    memory, seconds = MEMORY + MEMORY_EACH * size, SECONDS + SECONDS_EACH * size
    paths = [os.path.abspath(each) for each in sys.path]
    words = [sys.executable, "-I", "-S", __file__, str(path), str(memory), str(seconds), *paths]
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stderr"), subprocess.DEVNULL)
    try:
        ran = subprocess.run(
            words, stdout=subprocess.PIPE, timeout=HANGS, check=False, start_new_session=True, **quiet
        )
    except subprocess.TimeoutExpired:
        return "it does not end"
    if ran.returncode == 0 and ran.stdout:
        return json.loads(ran.stdout)
    if ran.returncode == -signal.SIGPROF:
        return f"it takes more than {seconds:.0f} seconds of processor time for short texts"
    return f"it takes more than {memory >> 20:,} MB of memory, or ends the process that loads it"


def _tried(path: str) -> str | None:
    """:func:`fault` of a tokenizer that is loaded here."""
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(path)
        if (count := made.get_vocab_size()) > MOST_TOKENS:
            return f"it has {count:,} tokens; valid: up to {MOST_TOKENS:,}"
        if (count := len(made.get_added_tokens_decoder())) > MOST_ADDED:
            return f"it adds {count:,} tokens; valid: up to {MOST_ADDED:,}"
        made.no_padding()
        made.no_truncation()
        for text in TEXTS:
            ids = made.encode(text).ids
            if len(ids) > TOKENS + TOKENS_EACH * len(text.encode()):
                return f"it makes {len(ids):,} tokens of a text of {len(text.encode())} bytes"
            letters = len(made.decode(ids, skip_special_tokens=False))
            if letters > TOKENS * (1 + len(ids)):
                return f"it makes a text of {letters:,} characters of {len(ids)} tokens"
    except MemoryError:
        raise
    except BaseException as error:  # the library's panics are no Exceptions
        return " ".join(str(error).split())[:SHOWN] or type(error).__name__
    return None


def main() -> None:
    """Print what is wrong with a file, in JSON."""
    memory, seconds = int(sys.argv[2]), float(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if sys.platform != "darwin":  # there processor time alone is bounded (see templates/worker.py)
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    print(json.dumps(_tried(sys.argv[1])), flush=True)
    os._exit(0)  # without the time that taking it apart needs


if __name__ == "__main__":
    main()
