"""A cluster, its nodes, and a data set of prompts: what ``generate --ray`` does around Ray Data."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from tokenswift.distributed.generator import Generator, pool
from tokenswift.files import is_address
from tokenswift.runs import folder as folders
from tokenswift.runs.remote import open_address
from tokenswift.types import InputError, RunError

VALID = "valid: local, auto (the cluster that this machine belongs to), or HOST:PORT of its head node"
MOST = 16  # rows at once of an actor
BLOCKS = 4096  # of a data set; more than so many prompts share some
CONNECT_SECONDS, LOOK_SECONDS, TALLY_SECONDS, STOP_SECONDS = 3.0, 120.0, 5.0, 20.0
#: HTTP/2's first bytes and an empty SETTINGS frame, which a gRPC server answers with a frame of that type
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A cluster, while entered: the one at an address, or one of this machine alone for "local".

    Raises:
        InputError: there is none; found out within seconds.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # no call of Ray starts it anew after an interrupt
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what its C++ parts write to standard error
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address not in ("local", "auto"):
        check_listens(address)
    import ray
    import ray.data

    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors come as exceptions, too
    try:
        with _silent():
            if address == "local":
                ray.init(address="local", include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"ray is {address!r}: no cluster can be used there ({reason}); {VALID}") from error
    try:
        with open(os.devnull, "w") as null, redirect_stdout(null):  # it prints there what it tries anew
            yield
    finally:
        ray.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what is no Python of Ray from standard error: it says there which level its log has."""
    null, kept = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def check_listens(address: str) -> None:
    """See that a gRPC server is at HOST:PORT; Ray itself would try for minutes.

    Raises:
        InputError: there is none.
    """
    found = re.fullmatch(r"\[?([^\[\]/]+)\]?:(\d{1,5})", address)
    if found is None:
        raise InputError(f"ray is {address!r}; {VALID}")
    try:
        with socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS) as connection:
            connection.settimeout(CONNECT_SECONDS)
            connection.sendall(PREFACE)
            if connection.recv(9)[3:4] != b"\x04":
                raise ValueError("what listens there is no Ray")
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"ray is {address!r}: no Ray answers there ({reason}); {VALID}") from error


def nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that are there."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def check_shared(out: str) -> None:
    """See that all nodes see one folder: each writes a file there, and each sees all of them, and that this
    process holds a lock, where it is a path.

    Raises:
        InputError: naming the node that does not, or what is wrong with the folder.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = f"{out.rstrip('/')}/.probe-{secrets.token_hex(8)}"
    found = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})" for node in nodes()}
    ask = ray.remote(num_cpus=0, max_retries=0)(look)

    def all_of(names: Sequence[str], writes: bool) -> dict[str, str]:
        asked = {
            node: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                probe, node if writes else None, names
            )
            for node in found
        }
        answers = {}
        for node, answer in asked.items():
            try:
                answers[node] = ray.get(answer, timeout=LOOK_SECONDS)
            except RayError as error:
                reason = " ".join(str(error).split())[-300:]
                raise InputError(
                    f"node {found[node]} cannot look at --out ({reason}); valid: nodes that have tokenswift"
                ) from error
        return answers

    lock = None
    try:
        wrong = look(probe, "driver", ())
        if not wrong and not is_address(out):
            lock = folders.Lock(Path(probe))
        answers = all_of((), True) if not wrong else {}
        names = ["driver", *found]
        answers = answers if any(answers.values()) or wrong else all_of(names, False)
        for node, answer in answers.items():
            if answer:
                raise InputError(_unshared(out, f"node {found[node]}", answer))
        if wrong or (wrong := look(probe, None, names[1:], locks=False)):
            raise InputError(_unshared(out, "this machine", wrong))
    finally:
        if lock is not None:
            lock.release()
        fs, path = open_address(probe)
        with suppress(OSError):
            fs.rm(path, recursive=True)


def _unshared(out: str, node: str, what: str) -> str:
    return (
        f"out is {out!r}: {node} {what}; valid: a folder that all nodes share, with its locks, or an "
        f"address of fsspec (file://… for a shared folder without locks)"
    )


def look(probe: str, writes: str | None, names: Sequence[str], locks: bool = True) -> str:
    """What is wrong with a folder, seen from where this is called; "" for nothing.

    Args:
        probe: a folder, or an address.
        writes: the name of a file to write there.
        names: of files that have to be there.
        locks: whether a lock is held there, if it is a path.
    """
    fs, path = open_address(probe)
    try:
        if writes is not None:
            fs.makedirs(path, exist_ok=True)
            fs.pipe_file(f"{path}/{writes}", writes.encode())
        for name in names:
            if not fs.exists(f"{path}/{name}") or fs.cat_file(f"{path}/{name}") != name.encode():
                return "does not see what another node wrote there"
    except OSError as error:
        return f"cannot write or read there ({error.strerror or error})"
    if names and locks and not is_address(probe) and not folders.is_locked(Path(path)):
        return "does not see a lock that another node holds there"
    return ""


class Tally:
    """An actor that is told how many tokens each text has."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def tell(self, tokens: Mapping[str, int]) -> None:
        """Take figures of some texts."""
        self._tokens.update(tokens)

    def read(self) -> int:
        """Tokens of all texts."""
        return sum(self._tokens.values())


@dataclass(frozen=True)
class Actors:
    """How actors are laid out.

    Attributes:
        actors: how many.
        cores, gpus: of each.
        at_once: texts that each writes at once.
    """

    actors: int
    cores: int
    gpus: int
    at_once: int


def laid_out(
    prompts: int, actors: int | None, cores: int | None, gpus: int | None, at_once: int | None
) -> Actors:
    """Actors for the cluster's nodes: by default one for each GPU, and where there is none one for each node
    with all of its cores; no more than there are prompts.

    Raises:
        InputError: no node has that much.
    """
    have = [node["Resources"] for node in nodes()]
    if gpus is None:
        gpus = int(any(one.get("GPU", 0) >= 1 for one in have))
    fit = [one for one in have if one.get("CPU", 0) >= (cores or 1) and one.get("GPU", 0) >= gpus]
    if not fit:
        most = max((int(one.get("CPU", 0)) for one in have), default=0)
        raise InputError(
            f"no node has {cores or 1} cores and {gpus} GPUs; valid: up to {most} cores, and a node's GPUs"
        )
    if cores is None:  # of a node, shared among its GPUs
        shares = [one["CPU"] / max(1, one.get("GPU", 0) // gpus if gpus else 1) for one in fit]
        cores = max(1, int(min(shares)))
    room = [min(one["CPU"] // cores, one.get("GPU", 0) // gpus if gpus else math.inf) for one in fit]
    actors = min(actors or max(1, int(sum(room))), prompts)
    return Actors(actors, cores, gpus, at_once or min(MOST, math.ceil(prompts / actors)))


def write(
    requests: Mapping[str, dict[str, Any]], out: str, how: Actors, settings: Mapping[str, Any]
) -> Iterator[dict[str, Any] | int]:
    """Have texts written.

    Args:
        requests: by name, records as `engine.records` has them.
        out: a folder, or an address.
        how: the actors.
        settings: of :class:`Generator`.
    Yields:
        a row with its text, as each is done; between them, about every second, how many tokens there are.
    Raises:
        RunError: Ray gave up.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    context: Any = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.custom_execution_callback_classes = [Stopper]
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(Tally)
    tally = actor.options(scheduling_strategy=here).remote()
    items = [{"name": name, "request": json.dumps(one)} for name, one in requests.items()]
    rows = ray.data.from_items(items, override_num_blocks=min(len(items), BLOCKS)).map_batches(
        Generator,
        fn_constructor_kwargs={"out": out, "at_once": how.at_once, "tally": tally, **settings},
        **pool(how.actors, how.cores, how.gpus, how.at_once),
    )
    done: SimpleQueue[dict[str, Any] | Exception | None] = SimpleQueue()
    thread = Thread(target=_rows, args=(rows, done), name="tokenswift-rows", daemon=True)
    _stopping.clear()
    thread.start()
    try:
        while True:
            try:
                row = done.get(timeout=1.0)
            except Empty:
                with suppress(RayError):  # it is started anew, if need be
                    yield ray.get(tally.read.remote(), timeout=TALLY_SECONDS)
                continue
            if row is None:
                return
            if isinstance(row, Exception):
                reason = " ".join(str(row).split())
                raise RunError(f"Ray gave up ({type(row).__name__}: {reason[-400:]})") from row
            yield row
    finally:
        _stopping.set()
        thread.join(STOP_SECONDS)


def _rows(rows: Any, done: SimpleQueue[dict[str, Any] | Exception | None]) -> None:
    """Put the rows as they come; a signal finds the main thread waiting for a queue, and no call of Ray."""
    try:
        for row in rows.iter_rows():
            done.put(row)
        done.put(None)
    except Exception as error:
        done.put(error)


_stopping = Event()


class Stopper:
    """A callback of Ray Data: ends an execution from within, so that no thread of it outlives the cluster."""

    def before_execution_starts(self, executor: Any) -> None:
        """Nothing to do."""

    def on_execution_step(self, executor: Any) -> None:
        """Called ten times a second and more.

        Raises:
            RunError: it is to stop.
        """
        if _stopping.is_set():
            raise RunError("it was stopped")

    def after_execution_succeeds(self, executor: Any) -> None:
        """Nothing to do."""

    def after_execution_fails(self, executor: Any, error: Exception) -> None:
        """Nothing to do."""
