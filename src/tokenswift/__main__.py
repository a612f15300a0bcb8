"""The commands ``tokenswift`` and ``python -m tokenswift``: light, so that Ctrl-C is heard from the
start."""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    """Run the command line; the exit code. Ctrl-C while modules are imported is one line and 130
    too."""
    gc.set_threshold(
        50_000
    )  # imports and vocabularies make objects by the hundred thousand, which stay
    try:
        from tokenswift.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        os.write(2, b"error: interrupted\n")
        os._exit(130)  # what is half imported cannot be taken down


if __name__ == "__main__":
    sys.exit(main())
