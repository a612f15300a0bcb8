"""The program that trains beside a server, with a priority at which it gets somewhere on a busy
machine, and a small drafter."""

from __future__ import annotations

import sys

from tokenswift.cli import idle_child

NICE = 1
SMALL = "--hidden 64 --epochs 1 --held-out 0.2 --sequence-length 96 --write-batch 4"

if __name__ == "__main__":
    idle_child.NICE = NICE
    sys.argv += SMALL.split()
    sys.exit(idle_child.main())
