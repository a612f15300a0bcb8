"""Many texts on many machines, by Ray Data: `Generator` is an actor class for ``map_batches``.

Ray schedules, starts dead actors anew and retries their rows; what is here writes each row's text into a
run's folder, and goes on inside it where a dead actor left it. Every node needs this package, and the model.
Below it is what ``generate --ray`` does around Ray Data: a cluster, its nodes, and a data set of prompts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from tokenswift.checks import check_integer
from tokenswift.config import SamplingParams, sampling_over
from tokenswift.engine.request import FIELDS, SAMPLING, asked, record_of
from tokenswift.files import is_address
from tokenswift.loader.prompts import is_chat
from tokenswift.runs import folder as folders
from tokenswift.runs.remote import Copies, open_address
from tokenswift.types import InputError, RunError, Step

if TYPE_CHECKING:
    from tokenswift.engine.request import Request
    from tokenswift.engine.scheduler import Ticket

__all__ = ["Generator", "pool"]
#: seconds that an actor waits for a folder: a file server lets go of a dead node's locks after about 90
PATIENCE = 150.0
TOLD = 1.0  # seconds between two words about how far the texts are
VALID = "valid: local, auto (the cluster that this machine belongs to), or HOST:PORT of its head node"
MOST = 16  # rows at once of an actor
SHARED = "valid: a folder that all nodes share, or an address of fsspec"
BLOCKS = 4096  # of a data set; more than so many prompts share some
CONNECT_SECONDS, TALLY_SECONDS = 3.0, 5.0


@dataclass(frozen=True, slots=True)
class _Begun:
    """A row whose text is written: its name, what was asked for, the text that will be, and how many tokens
    its journal had before."""

    name: str
    request: Request
    ticket: Ticket
    known: int


def pool(actors: int = 1, cores: int = 1, gpus: float = 0, at_once: int = 4) -> dict[str, Any]:
    """Arguments of ``map_batches`` for :class:`Generator`.

    Args:
        actors: how many.
        cores: of each.
        gpus: of each.
        at_once: rows that each takes at once; give the constructor the same number.
    """
    from ray.data import ActorPoolStrategy

    check_integer("at_once", at_once, 1)
    compute = ActorPoolStrategy(
        size=check_integer("actors", actors, 1),
        max_tasks_in_flight_per_actor=at_once,  # none waits at an actor while another has nothing to do
        max_concurrent_calls_per_actor=at_once,
        enable_true_multi_threading=True,
    )
    made = {"compute": compute, "num_cpus": cores, "batch_size": None, "batch_format": "pyarrow"}
    return made | ({"num_gpus": gpus} if gpus else {})


class Generator:
    """Writes the text of each row; made by Ray Data, once an actor::

        rows = ray.data.read_json("prompts.jsonl").repartition(target_num_rows_per_block=1)
        texts = rows.map_batches(
            Generator,
            fn_constructor_kwargs={"out": "/shared/texts", "max_new_tokens": 50_000},
            **pool(actors=8, cores=16),
        )

    A row has ``prompt`` (text, continued as it is) or ``messages`` (a chat, answered), an ``id`` that no
    other row has, and settings of its own where it has such columns (``seed``, ``max_new_tokens``, …; a null
    is none). Added to it are ``text``, ``finish_reason``, ``new_tokens``, ``went_on_at`` (tokens that its
    journal had when this actor took it up), ``node`` (where), and ``error`` (what made it fail, else null).
    The text is, token by token, that of ``LLM.generate``.

    A folder is written by one actor at a time: another waits until it is let go of, as the system does when
    a process dies.

    Args:
        out: a folder that all nodes see, with a run's folder for each row; or an fsspec address, such as
            ``s3://bucket/texts``: journals are written on the node and copied there as they grow, at most
            every ten seconds; what a lost node had not copied is written again, the same.
        model: as for ``LLM``.
        loading: other arguments of ``LLM``.
        at_once: concurrent sequences.
        sampling: `SamplingParams`; None, and fields of it among the settings, as for ``LLM.generate``;
            "model": those of the model's generation_config.json, the fields over them.
        answers: `SamplingParams` of chats, where these are not ``sampling``.
        tally: an actor whose ``tell`` is told how many tokens each text has.
        records: add a column ``record``, the JSON record of ``generate --json``.
        mark: a file that is in ``out``, if every node sees the same one; None: nobody looks.
        settings: other arguments of ``LLM.generate``, for every row.
    Raises:
        InputError: naming what is wrong.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        model: str = "smollm2-135m",
        *,
        loading: Mapping[str, Any] | None = None,
        at_once: int = 4,
        sampling: SamplingParams | str | None = None,
        answers: SamplingParams | None = None,
        tally: Any = None,
        records: bool = False,
        mark: str | None = None,
        **settings: Any,
    ) -> None:
        from tokenswift.engine.llm import LLM
        from tokenswift.engine.scheduler import Scheduler

        self._node, cores = _place()
        if mark is not None:
            fs, path = open_address(f"{out}/{mark}")
            if not fs.exists(path):
                raise InputError(f"out is {str(out)!r}: node {self._node} does not see it; {SHARED}")
        self._llm = LLM(model, **{"threads": cores, **(loading or {})})
        fields = {key: settings.pop(key) for key in SAMPLING if key in settings}
        if sampling == "model":
            self._sampling = self._answers = self._llm.model_sampling(**fields)
        elif isinstance(sampling, SamplingParams):
            self._sampling, self._answers = sampling, answers or sampling
        else:
            usual = ("", [{"role": "user", "content": ""}])  # a text, and a chat
            self._sampling, self._answers = (
                sampling_over(self._llm.default_sampling(one), fields) for one in usual
            )
        self._settings = settings
        self._copies = Copies(str(out)) if is_address(out) else None
        self._out = Path(out) if self._copies is None else self._copies.folder
        self._tally, self._records = tally, records
        self._tokens: dict[str, int] = {}  # of texts, as far as nobody was told
        self._told = 0.0
        self._scheduler = Scheduler(self._llm, at_once)

    def __call__(self, batch: Any) -> Any:
        """The rows with their texts; both are tables of pyarrow."""
        import pyarrow

        made = [self._end(one) for one in [self._begin(row) for row in batch.to_pylist()]]
        kinds = {"text": "string", "finish_reason": "string", "new_tokens": "int64"}
        kinds |= {"went_on_at": "int64", "node": "string", "error": "string"}
        for name, kind in (kinds | ({"record": "string"} if self._records else {})).items():
            batch = batch.append_column(name, pyarrow.array([one.get(name) for one in made], kind))
        return batch

    def _begin(self, row: Mapping[str, Any]) -> _Begun | Exception:
        """Have a row's text written; or what is wrong with it."""
        try:
            record = {key: value for key, value in row.items() if key in FIELDS and value is not None}
            if isinstance(row.get("request"), str):  # the command's
                record = json.loads(row["request"])
            if "id" not in record:
                raise InputError("a row has no id; valid: a column id, with a value of its own in each row")
            one = asked(record, "")
            folder = self._out / one.name
            usual = self._answers if is_chat(one.prompt) else self._sampling
            begun = self._submit(one.name, one.request(self._settings, usual, folder))
        except Exception as error:  # of this row: the others go on
            return error
        total = begun.known

        def told(event: Step | Exception | None) -> None:
            nonlocal total
            if isinstance(event, Step):
                total += len(event.token_ids)
            self._tell(begun.name, total, event is None)

        begun.ticket.on_event(told)
        return begun

    def _submit(self, name: str, request: Request) -> _Begun:
        """Have it run, as soon as nobody else writes its folder."""
        folder = self._out / name
        end = time.monotonic() + PATIENCE
        while True:
            if self._copies is not None:
                self._copies.begin(name)
            known = len(folders.load(folder)[1].tokens) if folders.has_run(folder) else 0
            try:
                return _Begun(name, request, self._scheduler.submit(request), known)
            except folders.Busy:
                if time.monotonic() > end:
                    raise
            time.sleep(1.0)

    def _end(self, begun: _Begun | Exception) -> dict[str, Any]:
        """The columns of a row, once its text is over."""
        made: dict[str, Any] = {"node": self._node}
        try:
            if isinstance(begun, Exception):
                raise begun
            begun.ticket.wait()
            result = begun.ticket.result
            if self._copies is not None:
                self._copies.end(begun.name, result.text)
        except Exception as error:
            return made | {"error": " ".join(str(error).split()) or type(error).__name__}
        made |= {"text": result.text, "finish_reason": result.finish_reason}
        made |= {"new_tokens": len(result.token_ids), "went_on_at": begun.known}
        if self._records:
            request = begun.request
            record = record_of(self._llm, result, request.strategy, request.given, request.sampling)
            made["record"] = json.dumps(record, ensure_ascii=False, allow_nan=False)
        return made

    def _tell(self, name: str, tokens: int, over: bool) -> None:
        """Tell how far a text is, once a second for all of them, and when one is over."""
        if self._tally is None:
            return
        self._tokens[name] = tokens
        now = time.monotonic()
        if over or now - self._told >= TOLD:
            self._told, told, self._tokens = now, self._tokens, {}
            self._tally.tell.remote(told)


def _place() -> tuple[str, int | None]:
    """The node's name, and how many cores Ray gave the actor; None: this is no actor."""
    import ray

    if not ray.is_initialized():
        return socket.gethostname(), None
    context = ray.get_runtime_context()
    cores = context.get_assigned_resources().get("CPU", 0)
    return f"{socket.gethostname()}, {context.get_node_id()[:6]}", max(1, int(cores)) if cores else None


# ---- what ``generate --ray`` does -----------------------------------------------------------------


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A cluster, while entered: the one at an address, or one of this machine alone for "local".

    Raises:
        InputError: there is none; found out within seconds.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # no call of Ray starts it anew after an interrupt
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what its C++ parts write to standard error
    if address not in ("local", "auto"):
        _check_listens(address)
    import ray
    import ray.data

    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors come as exceptions, too
    more: Any = {"include_dashboard": False} if address == "local" else {}
    try:
        with _silent():
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **more)
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
    kept = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _check_listens(address: str) -> None:
    """See that something listens at HOST:PORT; Ray itself would try for minutes."""
    found = re.fullmatch(r"\[?([^\[\]/]+)\]?:(\d{1,5})", address)
    if found is None:
        raise InputError(f"ray is {address!r}; {VALID}")
    try:
        socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"ray is {address!r}: nothing answers there ({reason}); {VALID}") from error


def nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that are there."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


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
    have = [(one["Resources"].get("CPU", 0), one["Resources"].get("GPU", 0)) for one in nodes()]
    if gpus is None:
        gpus = int(any(have_gpus >= 1 for _, have_gpus in have))
    fit = [(cpus, there) for cpus, there in have if cpus >= (cores or 1) and there >= gpus]
    if not fit:
        most = int(max((cpus for cpus, _ in have), default=0))
        raise InputError(
            f"no node has {cores or 1} cores and {gpus} GPUs; valid: up to {most} cores, and a node's GPUs"
        )
    if cores is None:  # of a node, shared among its GPUs
        cores = max(1, int(min(cpus / max(1, there // gpus if gpus else 1) for cpus, there in fit)))
    room = sum(min(cpus // cores, there // gpus if gpus else math.inf) for cpus, there in fit)
    actors = min(actors or max(1, int(room)), prompts)
    return Actors(actors, cores, gpus, at_once or min(MOST, math.ceil(prompts / actors)))


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


@contextmanager
def _marked(out: str) -> Iterator[str]:
    """A file in a folder, while entered, by which actors see that theirs is the same one; its name."""
    name = f".ray-{secrets.token_hex(8)}"
    fs, path = open_address(f"{out.rstrip('/')}/{name}")
    try:
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path, b"")
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"out is {out!r}: nothing can be written there ({reason}); {SHARED}") from error
    try:
        yield name
    finally:
        with suppress(OSError):
            fs.rm(path)


def write(
    requests: Mapping[str, dict[str, Any]], out: str, how: Actors, settings: Mapping[str, Any]
) -> Iterator[dict[str, Any] | int]:
    """Have texts written.

    Args:
        requests: by name, records as `engine.request` has them.
        out: a folder, or an address.
        how: the actors.
        settings: of :class:`Generator`.
    Yields:
        a row with its text, as each is done; between them, about every second, how many tokens there are.
    Raises:
        InputError: a node does not see the folder, or the settings are wrong.
        RunError: Ray gave up.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    context: Any = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(Tally)
    tally = actor.options(scheduling_strategy=here).remote()
    items = [{"name": name, "request": json.dumps(one)} for name, one in requests.items()]
    done: SimpleQueue[dict[str, Any] | Exception | None] = SimpleQueue()
    with _marked(out) as mark:
        given = {"out": out, "at_once": how.at_once, "tally": tally, "mark": mark, **settings}
        rows = ray.data.from_items(items, override_num_blocks=min(len(items), BLOCKS)).map_batches(
            Generator, fn_constructor_kwargs=given, **pool(how.actors, how.cores, how.gpus, how.at_once)
        )
        Thread(target=_rows, args=(rows, done), name="tokenswift-rows", daemon=True).start()
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
                if (wrong := reason.rpartition("InputError: "))[1]:
                    raise InputError(wrong[2]) from row
                raise RunError(f"Ray gave up ({type(row).__name__}: {reason[-400:]})") from row
            yield row


def _rows(rows: Any, done: SimpleQueue[dict[str, Any] | Exception | None]) -> None:
    """Put the rows as they come; a signal finds the main thread waiting for a queue, and no call of Ray."""
    try:
        for row in rows.iter_rows():
            done.put(row)
        done.put(None)
    except Exception as error:
        done.put(error)
