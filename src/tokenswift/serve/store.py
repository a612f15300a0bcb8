"""Responses on the disk: a folder each, with what was asked for and the journal of the text.

====================  =============================================================
``ID/answer.json``    a `Record`: body, seed, state
``ID/0``              the run of its text, which ``tokenswift resume`` knows as well
====================  =============================================================

Names come from the server alone: an id that is not of its form is no answer's.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.journal import RunState, read_regular
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")
IDS = re.compile(r"resp_[0-9a-f]{32}")
RECORD = "answer.json"


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """What makes an answer again.

    Attributes:
        id: ``resp_…``.
        created: Unix time.
        body: of the request, as JSON values.
        seed: where the body names none.
        prompt_tokens: of its prompt.
        state: "open", "done", "failed" or "cancelled".
        error: of a failed one.
        client: digest of the client's key, who alone may read it; "" where none was asked for.
        before: messages of earlier responses that it goes on from.
        thought: where its thought begins, of `chat.thought_of`.
    """

    id: str
    created: int
    body: dict[str, Any]
    seed: int
    prompt_tokens: int = 0
    state: str = "open"
    error: str = ""
    client: str = ""
    before: list[dict[str, Any]] = []
    thought: str = ""


class Store:
    """The folder of all responses, where there is one; else there are none, and none may be written.

    Raises:
        InputError: it cannot be made or written.
    """

    def __init__(self, run_dir: str | None) -> None:
        self._root, self._lock = Path(run_dir or "").expanduser(), None
        self.folder = folder = None if run_dir is None else self._root
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = folders.Lock(folder)
        except OSError as error:
            given = f"run_dir {folder} cannot be written ({error.strerror or error})"
            raise InputError(f"{given}; valid: a writable folder", "run_dir") from error

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.release()

    def run_dir(self, name: str) -> Path:
        """The folder of an answer's run."""
        return self._root / name / "0"

    def write(self, record: Record) -> None:
        """Keep a record, whole or not at all.

        Raises:
            RunError: the disk says no.
        """
        folder = self._root / record.id
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            journal.write_whole(folder / RECORD, msgspec.json.encode(record))
        except OSError as error:
            raise RunError(f"writing in {folder} failed ({error.strerror or error})") from error

    def remove(self, name: str) -> None:
        """Forget an answer that was never begun."""
        shutil.rmtree(self._root / name, ignore_errors=True)

    def read(self, name: str) -> Record | None:
        """A record by its id; None where there is none that can be read."""
        if self.folder is None or not IDS.fullmatch(name):
            return None
        path = self._root / name / RECORD
        try:
            record = msgspec.json.decode(read_regular(path), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, InputError, msgspec.DecodeError) as error:
            logger.warning("%s cannot be read (%s); it is left alone", path, " ".join(str(error).split()))
            return None
        return record if record.id == name else None

    def records(self) -> Iterator[Record]:
        """All of them, the oldest first."""
        names = [] if self.folder is None else os.listdir(self.folder)
        found = [record for name in names if (record := self.read(name)) is not None]
        yield from sorted(found, key=lambda record: record.created)

    def state(self, name: str) -> RunState | None:
        """What the journal of an answer holds; None before there is one.

        Raises:
            InputError: it is damaged.
        """
        folder = self.run_dir(name)
        return folders.load_whole(folder) if folders.has_run(folder) else None
