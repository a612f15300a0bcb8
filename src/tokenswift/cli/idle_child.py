"""The program that trains a drafter beside a server (`serve.idle`): ``tokenswift train`` at the
lowest priority, which says on standard output how far it is, and ends with the server."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from threading import Thread

PARENT_DEATH = 1  # prctl's: a signal to be had when the parent ends
NICE = 19
FIRST_TO_END = "1000"  # of all processes, where memory runs short
EACH = 0.5  # seconds between two lines about a stage


def tie_to(server: int) -> None:
    """End when the server ends. On Linux the system sees to that, also while this process is
    stopped; anywhere its end of a pipe is closed."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_TO_END, encoding="ascii")
    if os.getppid() != server:
        os._exit(1)
    Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    """Wait until standard input is closed."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def train(argv: list[str]) -> int:
    """Run ``tokenswift train`` with these arguments; its exit code."""
    from tokenswift.cli.main import parsed, report_error
    from tokenswift.cli.progress import Stages
    from tokenswift.cli.terminal import LogHandler
    from tokenswift.cli.train import trained

    class Lines(Stages):
        """Progress as lines of JSON."""

        last = ("", 0.0)  # stage, and time of its newest line

        def __call__(self, stage: str, done: int, total: int | None) -> None:
            now = time.monotonic()
            share = done / total if total else 0.0
            if self.last[0] == stage and now - self.last[1] < EACH and share < 1:
                return
            self.last = (stage, now)
            print(json.dumps({"stage": stage, "share": share}), flush=True)

    logger = logging.getLogger("tokenswift")
    logger.addHandler(LogHandler())
    logger.setLevel(logging.INFO)
    try:
        return trained(parsed(["train", *argv]), Lines(quiet=True))
    except (KeyboardInterrupt, Exception) as error:
        return report_error(error, None)


def main() -> int:
    """Train beside the server whose number is the first argument."""
    from tokenswift.serve.idle import READY

    tie_to(int(sys.argv[1]))
    os.nice(NICE)
    print(READY, flush=True)
    return train(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
