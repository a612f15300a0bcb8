"""The commands ``tokenswift`` and ``python -m tokenswift``: light, so that Ctrl-C is heard from the start."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run the command line; the exit code. Ctrl-C while modules are imported is one line and 130 too."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody ignores it
    if heard:
        signal.signal(signal.SIGINT, lambda *_: _leave())
    from tokenswift.cli.main import main as run

    try:
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
        if heard:  # all is said and written: only the interpreter's end is still to come
            signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    except KeyboardInterrupt:
        return _leave()
    return code


def _leave() -> int:
    """End at once, in the words of `tokenswift.cli.main`."""
    try:
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
