"""The actor: a row's text, in a run's folder that any other actor can go on with."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.checks import check_integer
from tokenswift.config import SamplingParams, sampling_over
from tokenswift.engine.records import FIELDS, asked, record_of
from tokenswift.files import is_address
from tokenswift.loader.prompts import is_chat
from tokenswift.runs import folder as folders
from tokenswift.runs.remote import Copies
from tokenswift.types import InputError, Step

if TYPE_CHECKING:
    from tokenswift.engine.request import Request
    from tokenswift.engine.scheduler import Ticket

#: seconds that an actor waits for a folder: a file server lets go of a dead node's locks after about 90
PATIENCE = 150.0
TOLD = 1.0  # seconds between two words about how far the texts are


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
        **settings: Any,
    ) -> None:
        from tokenswift.engine.llm import LLM
        from tokenswift.engine.request import SamplingFields
        from tokenswift.engine.scheduler import Scheduler

        self._node, cores = _place()
        self._llm = LLM(model, **{"threads": cores, **(loading or {})})
        fields = {key: settings.pop(key) for key in SamplingFields.__annotations__ if key in settings}
        if sampling == "model":
            self._sampling = self._answers = self._llm.model_sampling(**fields)
        elif isinstance(sampling, SamplingParams):
            self._sampling, self._answers = sampling, answers or sampling
        else:
            usual = (
                self._llm.default_sampling(""),
                self._llm.default_sampling([{"role": "user", "content": ""}]),
            )
            self._sampling, self._answers = (sampling_over(one, fields) for one in usual)
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
