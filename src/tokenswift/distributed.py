"""Many texts on many machines, by Ray Data: `Generator` is an actor class for ``map_batches``.

Ray schedules, starts dead actors anew and retries their rows; what is here writes each row's text into a
run's folder, and goes on inside it where a dead actor left it. Every node needs this package, and the model.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenswift.config import SamplingParams, sampling_over
from tokenswift.engine.request import FIELDS, SAMPLING, Request, asked
from tokenswift.runs import folder as folders
from tokenswift.types import InputError, check_integer

__all__ = ["Generator", "pool"]
#: seconds that an actor waits for a folder: a file server lets go of a dead node's locks after about 90
PATIENCE = 150.0
#: columns that are added to a row
COLUMNS = {"text": "string", "finish_reason": "string", "new_tokens": "int64", "went_on_at": "int64"}
COLUMNS |= {"node": "string", "error": "string"}


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
        out: a folder that is there and that all nodes see, with a run's folder for each row.
        model: as for ``LLM``.
        loading: other arguments of ``LLM``.
        at_once: concurrent sequences.
        sampling: `SamplingParams`; None, and fields of it among the settings, as for ``LLM.generate``.
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
        sampling: SamplingParams | None = None,
        **settings: Any,
    ) -> None:
        from tokenswift.engine.llm import LLM
        from tokenswift.engine.scheduler import Scheduler

        self._node, cores = _place()
        if not Path(out).is_dir():
            seen = f"out is {str(out)!r}: node {self._node} does not see it"
            raise InputError(f"{seen}; valid: a folder that all nodes share")
        self._llm = LLM(model, **{"threads": cores, **(loading or {})})
        self._fields = {key: settings.pop(key) for key in SAMPLING if key in settings}
        self._sampling, self._settings = sampling, settings
        self._usual("")  # what is wrong with it is said now
        self._out = Path(out)
        self._scheduler = Scheduler(self._llm, at_once)

    def _usual(self, prompt: Any) -> SamplingParams:
        """The sampling of a prompt, but for settings of its row."""
        if self._sampling is not None:
            return self._sampling
        return sampling_over(self._llm.default_sampling(prompt), self._fields)

    def __call__(self, batch: Any) -> Any:
        """The rows with their texts; both are tables of pyarrow."""
        import pyarrow

        made = [self._end(one) for one in [self._begin(row) for row in batch.to_pylist()]]
        for name, kind in COLUMNS.items():
            batch = batch.append_column(name, pyarrow.array([one.get(name) for one in made], kind))
        return batch

    def _begin(self, row: Mapping[str, Any]) -> tuple[Request, Any, int] | Exception:
        """Have a row's text written: what was asked for, its ticket, and how many tokens its journal had
        before; or what is wrong with it."""
        try:
            record = {key: value for key, value in row.items() if key in FIELDS and value is not None}
            if "id" not in record:
                raise InputError("a row has no id; valid: a column id, with a value of its own in each row")
            one = asked(record, "")
            folder = self._out / one.name
            request = one.request(self._settings, self._usual(one.prompt), folder)
            return request, *self._submit(request, folder)
        except Exception as error:  # of this row: the others go on
            return error

    def _submit(self, request: Request, folder: Path) -> tuple[Any, int]:
        """Have it run, as soon as nobody else writes its folder."""
        end = time.monotonic() + PATIENCE
        while True:
            known = len(folders.load(folder)[1].tokens) if folders.has_run(folder) else 0
            try:
                return self._scheduler.submit(request), known
            except folders.Busy:
                if time.monotonic() > end:
                    raise
            time.sleep(1.0)

    def _end(self, begun: tuple[Request, Any, int] | Exception) -> dict[str, Any]:
        """The columns of a row, once its text is over."""
        made: dict[str, Any] = {"node": self._node}
        try:
            if isinstance(begun, Exception):
                raise begun
            _, ticket, known = begun
            ticket.wait()
            result = ticket.result
        except Exception as error:
            return made | {"error": " ".join(str(error).split()) or type(error).__name__}
        made |= {"text": result.text, "finish_reason": result.finish_reason}
        return made | {"new_tokens": len(result.token_ids), "went_on_at": known}


def _place() -> tuple[str, int | None]:
    """The node's name, and how many cores Ray gave the actor; None: this is no actor."""
    import ray

    if not ray.is_initialized():
        return socket.gethostname(), None
    context = ray.get_runtime_context()
    cores = context.get_assigned_resources().get("CPU", 0)
    return f"{socket.gethostname()}, {context.get_node_id()[:6]}", max(1, int(cores)) if cores else None
