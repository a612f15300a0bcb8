"""What a server takes before its model is loaded: an address and a folder. Light: no torch in here."""

from __future__ import annotations

import socket
from pathlib import Path

from tokenswift.serve.settings import Settings
from tokenswift.serve.store import Store
from tokenswift.types import InputError


def bound(settings: Settings) -> socket.socket:
    """A socket at the address.

    Raises:
        InputError: it cannot be had.
    """
    kind = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(kind, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        raise InputError(
            f"port is {settings.port}: it cannot be opened on {settings.host} ({error.strerror or error}); "
            f"valid: a free one, or 0 for any",
            "port",
        ) from error
    return made


def store_of(settings: Settings) -> Store | None:
    """Where answers are kept; nobody else writes there from now on.

    Raises:
        InputError: the folder cannot be had.
    """
    return None if settings.run_dir is None else Store(Path(settings.run_dir).expanduser())
