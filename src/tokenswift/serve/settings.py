"""What a server is started with. Light: neither torch nor FastAPI in here."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from tokenswift.checks import shown
from tokenswift.config.environment import API_KEY, environment_key
from tokenswift.config.fields import SHOWN, AtLeast, Between, Option, check_fields
from tokenswift.engine.request import SHARED_STRATEGIES
from tokenswift.types import InputError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tokenswift.runs.folder import Lock

SHORTEST_KEY = 16  # characters
PORT = Between(0, 65_535, "an integer from 0 (any that is free) to 65535")
HOST_NAME = re.compile(r"[a-z0-9._-]+")


def is_host(name: str) -> bool:
    """Whether something is the name or the address of a machine, without a port."""
    if HOST_NAME.fullmatch(name):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def host_of(site: str) -> str:
    """The name of a site's machine; "" where there is none."""
    try:
        return urlsplit(site).hostname or ""
    except ValueError:
        return ""


@dataclass(frozen=True)
class Settings:
    """Where the server listens, who may ask, and how much.

    Attributes:
        host: address to listen at; other machines can only be admitted with a key
        port: port to listen at, 0 for any that is free
        api_key_file: file with the keys of clients, one a line; default: no key is needed
        api_key: another key; everybody on this machine sees it in the list of processes, so the
            environment variable TOKENSWIFT_API_KEY is safer
        cors: another site whose pages may send requests, such as https://example.org; may be given
            several times
        allowed_host: another name by which clients reach this machine, through a proxy or from a
            container (host.docker.internal); may be given several times; names of cors count too
        served_model_name: the model's name for clients; default: that of its folder or file
        run_dir: keep a journal of every answer in this folder; a server that is started again on
            the same folder resumes what was under way
        max_concurrent: sequences written concurrently; default: as many as fit in memory, 16 at
            most
        queue: answers that may wait for their turn; the next one is refused with status 429
        max_tokens: new tokens of one text at most
        max_prompt: tokens of one prompt at most; default: the model's positions
        allow_strategies: let clients choose any strategy; without it they may choose auto and
            autoregressive, because the others may cost all other texts most of their speed
        share_prefixes: share cached prompt prefixes among all keys; the time to the first token
            then tells a client what others have asked
        max_body: bytes of a request at most
        max_connections: requests at once; the next one is refused with status 503. As many more
            connections may wait until they have sent one
        max_connections_per_address: connections at once from one address; default: half of
            max_connections
        train_when_idle: train a drafter for the model while nobody waits for an answer, see
            tokenswift train; it is kept across restarts, and drafts once it is done
        train_tokens: tokens that it learns from; default: as tokenswift train has it
        train_more: go on from the drafter that is there already, with so many tokens of new texts
        train_from_runs: folder of runs, such as run_dir, of whose texts the model also continues
            passages; they are copied when the training begins
    """

    host: Annotated[str, SHOWN] = "127.0.0.1"
    port: Annotated[int, PORT, SHOWN] = 8000
    api_key_file: Annotated[str | None, Option("FILE", shown=True)] = None
    api_key: Annotated[str | None, Option("KEY")] = None
    cors: Annotated[tuple[str, ...], Option("ORIGIN", repeatable=True)] = ()
    allowed_host: Annotated[tuple[str, ...], Option("NAME", repeatable=True)] = ()
    served_model_name: Annotated[str | None, SHOWN] = None
    run_dir: Annotated[str | None, Option("DIR", shown=True)] = None
    max_concurrent: Annotated[
        int | None, AtLeast(1), Option(names=("--max-num-seqs",), shown=True)
    ] = None
    queue: Annotated[int, AtLeast(0), SHOWN] = 64
    max_tokens: Annotated[int, AtLeast(1), SHOWN] = 32_768
    max_prompt: Annotated[int | None, AtLeast(1), SHOWN] = None
    allow_strategies: bool = False
    share_prefixes: bool = False
    max_body: Annotated[int, AtLeast(1)] = 2 << 20
    max_connections: Annotated[int, AtLeast(1)] = 256
    max_connections_per_address: Annotated[int | None, AtLeast(1)] = None
    train_when_idle: Annotated[bool, SHOWN] = False
    train_tokens: Annotated[int | None, AtLeast(256)] = None
    train_more: Annotated[int | None, AtLeast(256), Option("N")] = None
    train_from_runs: Annotated[str | None, Option("DIR")] = None

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "cors", tuple(origin.lower().rstrip("/") for origin in self.cors))
        for site in self.cors:
            if "*" in site or not host_of(site):
                valid = "a site such as https://a.example"
                raise InputError(f"cors is {shown(site)}; valid: {valid}", "cors")
        object.__setattr__(self, "allowed_host", tuple(name.lower() for name in self.allowed_host))
        for name in self.allowed_host:
            if not is_host(name):
                valid = "a name or address without a port, such as host.docker.internal"
                raise InputError(f"allowed_host is {shown(name)}; valid: {valid}", "allowed_host")
        for name in ("train_tokens", "train_more", "train_from_runs"):
            if getattr(self, name) is not None and not self.train_when_idle:
                text = f"{name} is given without train_when_idle"
                raise InputError(f"{text}; valid: both, or neither", name)
        if not self.is_local and not (self.api_key_file or self.api_key or environment_key()):
            valid = f"with a key (--api-key-file or {API_KEY}), or 127.0.0.1"
            line = f"host is {self.host!r}, which other machines reach"
            raise InputError(f"{line}; valid: {valid}", "host")

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Names of this machine that are given, those of ``cors`` among them."""
        return (*self.allowed_host, *map(host_of, self.cors))

    @property
    def most_per_address(self) -> int:
        """Connections that one address may have."""
        if self.max_connections_per_address is not None:
            return self.max_connections_per_address
        return max(1, self.max_connections // 2)

    def check_strategy(self, strategy: object) -> None:
        """Check that a client may ask for a strategy; None: it does not.

        Raises:
            InputError: it may not.
        """
        if strategy is None or self.allow_strategies or strategy in SHARED_STRATEGIES:
            return
        valid = f"{', '.join(SHARED_STRATEGIES)} (others with tokenswift serve --allow-strategies)"
        raise InputError(f"strategy is {shown(strategy)}; valid: {valid}", "strategy")

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
        """The keys that clients may show; [] where they need none.

        Raises:
            InputError: the file cannot be read, or holds no key or a short one; or another one is
                short.
        """
        keys = [key for key in (self.api_key, environment_key()) if key is not None]
        if self.api_key_file is not None:
            keys += read_keys(self.api_key_file)
        for key in keys:
            if len(key) < SHORTEST_KEY or not is_plain(key):
                text = f"a key has {len(key)} characters"  # perhaps nearly a right one: not shown
                valid = f"at least {SHORTEST_KEY}, of ASCII, without spaces"
                raise InputError(f"{text}; valid: {valid}")
        return keys


def read_keys(name: str) -> list[str]:
    """The keys in a file; one of no characters, which is none, where it is empty.

    Raises:
        InputError: it cannot be read.
    """
    try:
        text = Path(name).expanduser().read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        reason = f"api_key_file {name} cannot be read ({error})"
        raise InputError(f"{reason}; valid: a file of keys, of ASCII", "api_key_file") from error
    return text.split() or [""]


def is_plain(key: str) -> bool:
    """Whether a key has no characters but those that a header can hold."""
    return key.isascii() and key.isprintable() and " " not in key


@contextmanager
def held(settings: Settings) -> Iterator[socket.socket]:
    """A socket at the address; the answers' folder is this process's alone, too, while entered.

    Raises:
        InputError: one of them cannot be had.
    """
    kind = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # "::" is all addresses of either kind
    of_both_kinds = kind == socket.AF_INET6 and socket.has_dualstack_ipv6()
    address = (settings.host, settings.port)
    try:
        listener = socket.create_server(address, family=kind, dualstack_ipv6=of_both_kinds)
    except OSError as error:
        reason = error.strerror or error
        text = f"port is {settings.port}: it cannot be opened on {settings.host} ({reason})"
        raise InputError(f"{text}; valid: a free one, or 0 for any", "port") from error
    with listener, ExitStack() as stack:
        if settings.folder is not None:
            stack.callback(_locked(settings.folder).release)
        yield listener


def _locked(folder: Path) -> Lock:
    from tokenswift.runs.folder import Lock

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Lock(folder)
    except OSError as error:
        text = f"run_dir {folder} cannot be written ({error.strerror or error})"
        raise InputError(f"{text}; valid: a writable folder", "run_dir") from error


async def _answer_loading(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer any request that the model is being loaded."""
    text = "the model is being loaded; valid: another try in a moment"
    error = {"message": text, "type": "server_error", "param": None, "code": "loading"}
    body = json.dumps({"status": "loading", "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def loading(listener: socket.socket, settings: Settings) -> Iterator[None]:
    """Answer at a socket, while entered, that the model is being loaded; who takes it afterwards
    finds those that nobody has answered."""
    import uvicorn

    from tokenswift.serve.connections import protocol_of

    config = uvicorn.Config(
        _answer_loading,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=protocol_of(settings),
    )
    server = uvicorn.Server(config)
    sockets = [listener.dup()]
    thread = Thread(target=server.run, args=(sockets,), name="tokenswift-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
