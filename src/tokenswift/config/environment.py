"""What the environment says."""

from __future__ import annotations

import os

API_KEY = "TOKENSWIFT_API_KEY"


def environment_key() -> str | None:
    """The key that clients of a server have to show, by the environment; None where it is not
    set."""
    return os.environ.get(API_KEY) or None
