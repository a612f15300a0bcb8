"""A program for `serve.idle`: it counts up, and says so. It ends at a number; below 0
it fails there."""

from __future__ import annotations

import json
import sys
import time

from tokenswift.cli.idle_child import tie_to
from tokenswift.serve.idle import READY

MOST = 10_000

if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    print(READY, flush=True)
    end = int(sys.argv[2])
    for number in range(MOST):
        if number == abs(end):
            sys.exit("error: no more" if end < 0 else 0)
        print(json.dumps({"stage": "count", "share": number / MOST}), flush=True)
        time.sleep(0.01)
