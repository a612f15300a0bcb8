"""What a server is started with. Light: neither torch nor FastAPI in here."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from tokenswift.config import API_KEY, check_fields, environment_key
from tokenswift.types import InputError, shown

KEY = 16  # characters of a key at least


@dataclass(frozen=True)
class Settings:
    """Where the server listens, who may ask, and how much.

    Attributes:
        host: address to listen at; another than this machine's own needs a key
        port: port to listen at, 0 for any that is free
        api_key_file: file with the keys of clients, one a line; default: none is asked for
        api_key: another key; everybody on this machine sees it in the list of processes, so the
            environment variable TOKENSWIFT_API_KEY is safer
        cors: another site whose pages may send requests, such as https://example.org; may be given
            several times
        served_model_name: the model's name for clients; default: that of its folder or file
        run_dir: keep a journal of every answer there; a server that is started again on the same
            folder resumes what was under way
        max_concurrent: sequences written concurrently; default: as many as fit in memory, 16 at
            most
        queue: answers that may wait for their turn; the next one is refused with status 429
        max_tokens: new tokens of one text at most
        max_prompt: tokens of one prompt at most; default: the model's positions
        share_prefixes: share cached prompt prefixes among all keys; the time to the first token
            then tells a client what others have asked
        max_body: bytes of a request at most
        max_connections: connections at once; the next one is refused with status 503
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = field(default=None, metadata={"metavar": "FILE"})
    api_key: str | None = field(default=None, metadata={"metavar": "KEY"})
    cors: tuple[str, ...] = field(default=(), metadata={"metavar": "ORIGIN", "action": "append"})
    served_model_name: str | None = None
    run_dir: str | None = field(default=None, metadata={"metavar": "DIR"})
    max_concurrent: int | None = field(default=None, metadata={"names": ("--max-num-seqs",)})
    queue: int = 64
    max_tokens: int = 32_768
    max_prompt: int | None = None
    share_prefixes: bool = False
    max_body: int = 8 << 20
    max_connections: int = 256

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "cors", tuple(origin.lower().rstrip("/") for origin in self.cors))
        if wrong := [origin for origin in self.cors if "://" not in origin or "*" in origin]:
            raise InputError(
                f"cors is {shown(wrong[0])}; valid: a site such as https://a.example", "cors"
            )
        if not self.is_local and not (self.api_key_file or self.api_key or environment_key()):
            valid = f"with --api-key-file or {API_KEY}, or 127.0.0.1"
            raise InputError(f"host is {self.host!r}, for other machines; valid: {valid}", "host")

    @property
    def folder(self) -> Path | None:
        """The folder of all answers' journals."""
        return None if self.run_dir is None else Path(self.run_dir).expanduser()

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
            InputError: the file cannot be read, or holds no key or a short one; or another one is
                short.
        """
        found = [key for key in (self.api_key, environment_key()) if key is not None]
        if self.api_key_file is not None:
            try:
                found += Path(self.api_key_file).expanduser().read_text(
                    encoding="ascii"
                ).split() or [""]
            except (OSError, ValueError) as error:
                given = f"api_key_file {self.api_key_file} cannot be read ({error})"
                raise InputError(
                    f"{given}; valid: a file of keys, of ASCII", "api_key_file"
                ) from error
        for key in found:
            if len(key) < KEY or not key.isascii() or not key.isprintable() or " " in key:
                given = f"a key has {len(key)} characters"  # perhaps nearly a right one: not shown
                raise InputError(f"{given}; valid: at least {KEY}, of ASCII, without spaces")
        return found


@contextmanager
def held(settings: Settings) -> Iterator[socket.socket]:
    """A socket at the address; the answers' folder is this process's alone, too, while entered.

    Raises:
        InputError: one of them cannot be had.
    """
    kind = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    both = (
        kind == socket.AF_INET6 and socket.has_dualstack_ipv6()
    )  # "::" is all addresses of either kind
    try:
        taken = socket.create_server(
            (settings.host, settings.port), family=kind, dualstack_ipv6=both
        )
    except OSError as error:
        given = (
            f"port is {settings.port}: it cannot be opened on {settings.host} "
            f"({error.strerror or error})"
        )
        raise InputError(f"{given}; valid: a free one, or 0 for any", "port") from error
    with taken, ExitStack() as kept:
        if settings.folder is not None:
            kept.callback(_locked(settings.folder).release)
        yield taken


def _locked(folder: Path) -> Any:
    from tokenswift.runs.folder import Lock

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Lock(folder)
    except OSError as error:
        given = f"run_dir {folder} cannot be written ({error.strerror or error})"
        raise InputError(f"{given}; valid: a writable folder", "run_dir") from error


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
    """Answer at a socket, while entered, that the model is being loaded; who takes it afterwards
    finds those that nobody has answered."""
    import uvicorn

    how: Any = {
        "log_config": None,
        "access_log": False,
        "lifespan": "off",
        "ws": "none",
        "http": "h11",
    }
    server = uvicorn.Server(uvicorn.Config(_loading, **how))
    thread = Thread(
        target=server.run, args=([taken.dup()],), name="tokenswift-loading", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
