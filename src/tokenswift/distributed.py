"""Many texts on many machines, by Ray Data: `Generator` is an actor class for ``map_batches``.

Ray schedules, starts dead actors anew and retries their rows; an actor writes each row's text into
a run's folder, and goes on inside it where a dead actor left it. Every node needs this package, and
the model.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.config.loading import ModelOptions
from tokenswift.config.sampling import SamplingParams, sampling_over
from tokenswift.engine.json_records import FIELDS, parse_prompt_record
from tokenswift.engine.request import SAMPLING, Request
from tokenswift.runs.folder import Busy
from tokenswift.types import InputError

if TYPE_CHECKING:
    from pyarrow import Table

    from tokenswift.chat.prompts import Prompt
    from tokenswift.engine.ticket import Ticket

#: seconds that an actor waits for a folder: a file server lets go of a dead node's locks after
#: about 90
PATIENCE = 150.0
#: columns that are added to a row
COLUMNS = {"text": "string", "finish_reason": "string", "new_tokens": "int64", "error": "string"}


class Generator:
    """Writes the text of each row; made by Ray Data, once an actor::

        rows = ray.data.read_json("prompts.jsonl").repartition(target_num_rows_per_block=1)
        texts = rows.map_batches(
            Generator,
            fn_constructor_kwargs={"out": "/shared/texts", "max_new_tokens": 50_000},
            num_cpus=16,
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=8,
                # both as ``at_once``: no row waits at an actor while another has room
                max_tasks_in_flight_per_actor=4,
                max_concurrent_calls_per_actor=4,
                enable_true_multi_threading=True,
            ),
        )

    A row has ``prompt`` (text, continued as it is) or ``messages`` (a chat, answered), an ``id``
    that no other row has, and settings of its own where it has such columns (``seed``,
    ``max_new_tokens``, …; a null is none). Added to it are ``text``, ``finish_reason``,
    ``new_tokens`` and ``error`` (what made it fail, else null).
    The text is, token by token, that of ``LLM.generate``.

    A folder is written by one actor at a time: another waits until the first lets go of it, as the
    system does for a process that dies.

    Args:
        out: a folder that all nodes see, with a run's folder for each row. Where Ray has one node
            it is made; where it has several it must be there, so that none makes one of its own.
        model: as for ``LLM``.
        loading: other arguments of ``LLM``.
        at_once: concurrent sequences.
        sampling: `SamplingParams`; None, and fields of it among the settings, as for
            ``LLM.generate``.
        settings: other arguments of ``LLM.generate``, for every row.
    Raises:
        InputError: naming what is wrong.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        model: str = "smollm2-135m",
        *,
        loading: ModelOptions | None = None,
        at_once: int = 4,
        sampling: SamplingParams | None = None,
        **settings: Any,
    ) -> None:
        from tokenswift.engine.llm import LLM
        from tokenswift.engine.scheduler import Scheduler

        _make_folder(Path(out))
        self._llm = LLM(model, **(loading or ModelOptions()))
        self._sampling_fields = {key: settings.pop(key) for key in SAMPLING if key in settings}
        self._sampling = sampling
        self._settings = settings
        self._default_sampling("")  # its errors are those of the job, and not of every row
        self._out = Path(out)
        self._scheduler = Scheduler(self._llm, at_once)

    def _default_sampling(self, prompt: Prompt) -> SamplingParams:
        """The sampling of a prompt, but for settings of its row."""
        if self._sampling is not None:
            return self._sampling
        return sampling_over(self._llm.default_sampling(prompt), self._sampling_fields)

    def __call__(self, batch: Table) -> Table:
        """The rows with their texts."""
        import pyarrow

        tickets = [self._begin(row) for row in batch.to_pylist()]
        columns = [self._end(ticket) for ticket in tickets]
        for name, kind in COLUMNS.items():
            values = [row_columns.get(name) for row_columns in columns]
            batch = batch.append_column(name, pyarrow.array(values, kind))
        return batch

    def _begin(self, row: Mapping[str, object]) -> Ticket | Exception:
        """The ticket of a row's text, or the exception that says what is wrong with the row."""
        try:
            record = {
                key: value for key, value in row.items() if key in FIELDS and value is not None
            }
            if "id" not in record:
                raise InputError(
                    "a row has no id; valid: a column id, with a value of its own in each row"
                )
            prompt = parse_prompt_record(record, "")
            default_sampling = self._default_sampling(prompt.prompt)
            return self._submit(
                prompt.request(self._settings, default_sampling, self._out / prompt.name)
            )
        except Exception as error:  # of this row: the others go on
            return error

    def _submit(self, request: Request) -> Ticket:
        """Have it run, as soon as nobody else writes its folder."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return self._scheduler.submit(request)
            except Busy:
                if time.monotonic() > end:
                    raise
            time.sleep(1.0)

    def _end(self, ticket: Ticket | Exception) -> dict[str, object]:
        """The columns of a row, once its text has ended."""
        try:
            if isinstance(ticket, Exception):
                raise ticket
            ticket.wait()
            result = ticket.result
        except Exception as error:
            return {"error": " ".join(str(error).split()) or type(error).__name__}
        return {
            "text": result.text,
            "finish_reason": result.finish_reason,
            "new_tokens": len(result.token_ids),
        }


def _make_folder(out: Path) -> None:
    """Make the folder of all runs, where this node is the only one.

    Raises:
        InputError: it is not there, and another node may not see what is made here; or it cannot
            be made.
    """
    if out.is_dir():
        return
    line = f"out is {str(out)!r}: "
    count = _node_count()
    if count > 1:
        node = socket.gethostname()
        raise InputError(
            f"{line}node {node} of {count} does not see it; valid: a folder that all nodes share "
            f"and that is there (mkdir -p {shlex.quote(str(out))} on one of them)"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        text = f"{line}it cannot be made ({reason})"
        raise InputError(f"{text}; valid: a writable folder") from error


def _node_count() -> int:
    """Nodes that are alive in the cluster of this process; 1 where there is no cluster."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 1
    return sum(bool(node["Alive"]) for node in ray.nodes())
