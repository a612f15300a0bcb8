"""What a server is started with. Light: neither torch nor FastAPI in here."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Thread
from typing import Any

from tokenswift.config import API_KEY, environment_key
from tokenswift.types import InputError, check_integer, check_number, shown

KEY = 16  # characters of a key at least


def _option(default: Any, metavar: str, least: int | None = None, **more: Any) -> Any:
    """A field with the placeholder of its value, and its least number."""
    least_one = {} if least is None else {"least": least}
    return field(default=default, metadata={"metavar": metavar, **least_one, **more})


@dataclass(frozen=True)
class Settings:
    """Where the server listens, who may ask, and how much.

    Attributes:
        host: address to listen at; another than this machine's own needs a key
        port: port to listen at, 0 for any that is free
        api_key_file: file with the keys of clients, one a line; default: none is asked for
        api_key: another key; everybody on this machine sees it in the list of processes, so the environment
            variable TOKENSWIFT_API_KEY is safer
        cors: another site whose pages may send requests, such as https://example.org; may be given several
            times
        served_model_name: the model's name for clients; default: that of its folder or file
        run_dir: keep a journal of every answer there; a server that is started again on the same folder
            resumes what was under way
        max_concurrent: sequences written concurrently; default: as many as fit in memory, 16 at most
        queue: answers that may wait for their turn; the next one is refused with status 429
        max_tokens: new tokens of one text at most
        max_prompt: tokens of one prompt at most; default: the model's positions
        share_prefixes: share cached prompt prefixes among all keys; the time to the first token then tells a
            client what others have asked
        max_body: bytes of a request at most
        max_connections: connections at once; the next one is refused with status 503
        ping: seconds without text after which a stream gets a comment, which keeps the connection open
    """

    host: str = _option("127.0.0.1", "ADDRESS")
    port: int = _option(8000, "N", 0)
    api_key_file: str | None = _option(None, "F")
    api_key: str | None = _option(None, "KEY")
    cors: tuple[str, ...] = _option((), "ORIGIN", action="append")
    served_model_name: str | None = _option(None, "NAME")
    run_dir: str | None = _option(None, "DIR")
    max_concurrent: int | None = _option(None, "N", 1, names=("--max-num-seqs",))
    queue: int = _option(64, "N", 0)
    max_tokens: int = _option(32_768, "N", 1)
    max_prompt: int | None = _option(None, "N", 1)
    share_prefixes: bool = False
    max_body: int = _option(8 << 20, "N", 1)
    max_connections: int = _option(256, "N", 1)
    ping: float = _option(15.0, "SECONDS")

    def __post_init__(self) -> None:
        for one in fields(self):
            if "least" in one.metadata and getattr(self, one.name) is not None:
                check_integer(one.name, getattr(self, one.name), one.metadata["least"])
        check_number("ping", self.ping, "seconds, from 0.01 to 3600", 0.01 <= self.ping <= 3600)
        object.__setattr__(self, "cors", tuple(origin.lower().rstrip("/") for origin in self.cors))
        if wrong := [origin for origin in self.cors if "://" not in origin or "*" in origin]:
            raise InputError(f"cors is {shown(wrong[0])}; valid: a site such as https://a.example", "cors")
        if not self.is_local and not (self.api_key_file or self.api_key or environment_key()):
            valid = f"with --api-key-file or {API_KEY}, or 127.0.0.1"
            raise InputError(f"host is {self.host!r}, for other machines; valid: {valid}", "host")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def keys(self) -> list[str]:
        """The keys that clients may show; [] where none is asked for.

        Raises:
            InputError: the file cannot be read, or holds no key or a short one; or another one is short.
        """
        found = [key for key in (self.api_key, environment_key()) if key is not None]
        if self.api_key_file is not None:
            try:
                found += Path(self.api_key_file).expanduser().read_text(encoding="ascii").split() or [""]
            except (OSError, ValueError) as error:
                given = f"api_key_file {self.api_key_file} cannot be read ({error})"
                raise InputError(f"{given}; valid: a file of keys, of ASCII", "api_key_file") from error
        for key in found:
            if len(key) < KEY or not key.isascii() or not key.isprintable() or " " in key:
                given = f"a key has {len(key)} characters"  # perhaps nearly a right one: not shown
                raise InputError(f"{given}; valid: at least {KEY}, of ASCII, without spaces")
        return found


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
    except (OSError, OverflowError) as error:
        made.close()
        why = getattr(error, "strerror", None) or error
        given = f"port is {settings.port}: it cannot be opened on {settings.host} ({why})"
        raise InputError(f"{given}; valid: a free one, or 0 for any", "port") from error
    return made


async def _loading(scope: Any, receive: Any, send: Any) -> None:
    """Whatever is asked, the model is being loaded."""
    text = "the model is being loaded; valid: another try in a moment"
    error = {"message": text, "type": "server_error", "param": None, "code": "loading"}
    body = json.dumps({"status": "loading", "error": error}).encode()
    head = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": head})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def loading(taken: socket.socket) -> Iterator[None]:
    """Answer at a socket, while entered, that the model is being loaded; who takes it afterwards finds those
    that nobody has answered."""
    import uvicorn

    how: Any = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none", "http": "h11"}
    server = uvicorn.Server(uvicorn.Config(_loading, **how))
    thread = Thread(target=server.run, args=([taken.dup()],), name="tokenswift-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
