"""Which answers there are: in memory, and on the disk, where they are read again when somebody asks for them.

All on the event loop, but for what the disk does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from functools import cache, partial
from typing import Any

from tokenswift.chat.calls import calls_of
from tokenswift.engine.text import token_bytes
from tokenswift.serve.answer import Answer
from tokenswift.serve.schemas import KINDS
from tokenswift.serve.store import IDS, Record, Store, brief
from tokenswift.types import RunError

logger = logging.getLogger("tokenswift")
KEPT = 64  # answers in memory besides those under way and those that somebody reads


class Shelf:
    """All answers of a server.

    Args:
        store: where answers are kept; None: in memory alone.
        tokenizer: of the model.

    Attributes:
        answers: those in memory, by id, the one asked for last at the end.
    """

    def __init__(self, store: Store | None, tokenizer: Any) -> None:
        self._store, self._tokenizer = store, tokenizer
        self._spell = cache(partial(token_bytes, tokenizer))  # as large as the vocabulary at most
        self.answers: OrderedDict[str, Answer] = OrderedDict()

    @property
    def disk(self) -> Store:
        """Where answers are kept; for those that are."""
        assert self._store is not None
        return self._store

    def keeps(self, answer: Answer) -> bool:
        """Whether an answer has a folder: no journal holds log-probabilities, or an echo."""
        body = answer.body
        plain = body.likely is None and body.prompt_likely is None and not body.echoes
        return self._store is not None and plain and getattr(body, "store", None) is not False

    async def left(self) -> list[Answer]:
        """Answers of the background that an earlier server left."""
        found: list[Answer] = []
        if self._store is None:
            return found
        for record in await asyncio.to_thread(lambda store: list(store.records()), self._store):
            if record.state == "open" and record.body.get("background"):
                answer = await self._read(record)
                found += [] if answer is None else [answer]
        return found

    def add(self, answer: Answer) -> None:
        """A new answer."""
        answer.spell, answer.kept = self._spell, self.keeps(answer)
        self.answers[answer.id] = answer

    def know(self, answer: Answer) -> None:
        """See how an answer is read."""
        answer.calls = calls_of(answer.body.tools_asked(), self._tokenizer, answer.record.thought)

    async def get(self, name: str) -> Answer | None:
        """An answer by its id; None where there is none."""
        if name in self.answers:
            self.answers.move_to_end(name)
            return self.answers[name]
        if self._store is None or not IDS.fullmatch(name):
            return None
        record = await asyncio.to_thread(self._store.read, name)
        if name in self.answers:  # somebody else was faster
            return self.answers[name]
        return None if record is None else await self._read(record)

    async def _read(self, record: Record) -> Answer | None:
        """An answer of the store, as its journals have it; it is not begun."""
        try:
            answer = Answer(record, KINDS[record.kind][0].model_validate(record.body))
            self.know(answer)
            answer.kept = True
            for part in answer.parts:
                part.rewind(await asyncio.to_thread(self.disk.state, record.id, part.index))
                part.over = True
            answer.begun = True
        except (KeyError, ValueError) as error:  # pydantic's and ours
            why = " ".join(str(error).split())[:300]
            logger.warning("%s cannot be resumed: %s", brief(record.id), why)
            return None
        answer = self.answers.setdefault(record.id, answer)
        self.shed()
        return answer

    async def write(self, answer: Answer) -> None:
        """Keep a new answer's record, where it is kept.

        Raises:
            RunError: the disk says no.
        """
        if self.keeps(answer):
            await asyncio.to_thread(self.disk.write, answer.record)

    async def settle(self, answer: Answer) -> None:
        """Keep how an answer ended; where the disk says no it stays open there, and the next server finds it
        whole."""
        try:
            await self.write(answer)
        except RunError as failed:
            logger.warning("%s", failed)

    def forget(self, answer: Answer) -> None:
        """Let go of an answer, but for its folder."""
        self.answers.pop(answer.id, None)

    async def remove(self, answer: Answer) -> None:
        """Let go of an answer and of its folder."""
        self.forget(answer)
        if self.keeps(answer):
            await asyncio.to_thread(self.disk.remove, answer.id)

    def shed(self) -> None:
        """Let go of the oldest answers that nobody reads."""
        idle = [a for a in self.answers.values() if not a.readers and not a.running and not a.lock.locked()]
        for answer in idle[: max(0, len(self.answers) - KEPT)]:
            if self.keeps(answer):
                self.answers.pop(answer.id)
            else:
                self.forget(answer)
