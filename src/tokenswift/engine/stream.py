"""The steps of a generation as they come, with its result in the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from tokenswift.types import Generation, InputError, Step


class Steps(Protocol):
    """A generation that can be run once; see `engine.run.Run`."""

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None until then."""
        ...

    def __iter__(self) -> Generator[Step]: ...

    def result(self) -> Generation:
        """The finished generation."""
        ...


class Stream(Iterator[Step]):
    """The steps of a generation, as they happen; afterwards its result.

    ::

        stream = llm.stream("Once upon a time")
        for step in stream:
            print(step.text, end="", flush=True)
        print(stream.result.finish_reason, stream.result.metrics.tokens_per_second)

    The result is the iterator's return value too (``result = yield from stream``). A stream is a context
    manager: leaving it early lets go of the run's memory and closes its journal, as `close` does.
    """

    def __init__(self, run: Steps) -> None:
        self._run, self._steps = run, iter(run)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Step:
        try:
            return next(self._steps)
        except StopIteration:
            if self._run.finish_reason is None:
                raise
            raise StopIteration(self._run.result()) from None

    @property
    def result(self) -> Generation:
        """The finished generation: all tokens, the text, ``finish_reason``, ``metrics``.

        Raises:
            InputError: the last step has not been taken.
        """
        if self._run.finish_reason is None:
            raise InputError("stream.result is not available before the end; valid: after the last step")
        return self._run.result()

    def finish(self, on_step: Callable[[Step], None] | None = None) -> Generation:
        """Take the steps that are left, and return the result; ``on_step`` is called with each. Whatever it
        raises, the run's journal is closed."""
        with self:
            for step in self:
                if on_step is not None:
                    on_step(step)
            return self.result

    def close(self) -> None:
        """End the generation here; what was kept of it is kept."""
        self._steps.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
