"""The program that trains beside a server, with a priority at which it gets somewhere on a busy
machine, a small drafter and short texts. It fails where it imports transformers, which takes
seconds."""

from __future__ import annotations

import sys

from tokenswift.cli import idle_child

NICE = 1
SMALL = "--hidden 64 --epochs 1 --held-out 0.2 --sequence-length 96 --prose-length 96"

if __name__ == "__main__":
    idle_child.NICE = NICE
    sys.argv += [*SMALL.split(), "--write-batch", "4"]
    code = idle_child.main()
    if "transformers" in sys.modules:
        sys.exit("error: transformers was imported")
    sys.exit(code)
