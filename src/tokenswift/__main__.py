"""``python -m tokenswift``: the command line."""

from __future__ import annotations

import sys

from tokenswift.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
