"""``python -m tests.serve.slow SECONDS …``: tokenswift serve with slower passes, and an event a step."""

from __future__ import annotations

import sys
import time
from typing import Any

from tokenswift.cli.main import main
from tokenswift.models.decoder import NativeTarget
from tokenswift.serve import answers


def slow_down(name: str, seconds: float) -> None:
    """Have a method of the model wait first."""
    real = getattr(NativeTarget, name)

    def slowed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **kwargs)

    setattr(NativeTarget, name, slowed)


if __name__ == "__main__":
    answers.STRETCH = 0.0  # an event a step
    for method in ("forward", "forward_all"):
        slow_down(method, float(sys.argv[1]))
    sys.exit(main(["serve", *sys.argv[2:]]))
