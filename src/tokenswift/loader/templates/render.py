"""The text of chat messages by a model's template, which is a program of whoever made the model's files.

It runs in a process of its own (`worker`), under limits of processor time, memory and text. The process is
started for the first chat and kept, so that a chat costs a message to it and back. What templates find there
is what transformers gives them.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any, NamedTuple

from tokenswift.types import InputError, RunError

#: limits, and what comes to them for each byte that a template is given
SECONDS, SECONDS_EACH = 2.0, 2.0**-20  # of processor time
MEMORY, MEMORY_EACH = 2**28, 32  # bytes of address space
TEXT, TEXT_EACH = 2**18, 4  # characters
HANGS = 120.0  # seconds until a process that takes no processor time is given up
#: names under which reasoning is passed, the usual one first
REASONING = ("reasoning_content", "thinking", "reasoning")
WORKER = Path(__file__).with_name("worker.py")


def rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """The text of chat messages, as transformers' ``apply_chat_template`` has it.

    Args:
        template: of the model.
        messages: each with a role, a content and whatever else JSON can hold.
        special: the tokenizer's special tokens by name.
        tools, documents: as JSON has them.
        add_generation_prompt: end where the answer begins.
        options: variables of the template.
    Raises:
        InputError: the template meets a limit, refuses the messages, or is none.
        RunError: no process can be started.
    """
    given = {
        **options,
        **special,
        "messages": [_usual(message) for message in messages],
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        lines = json.dumps(template).encode(), json.dumps(given).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"messages are not JSON ({error}); valid: texts, numbers, lists") from error
    size = len(lines[1])
    most = Limits(MEMORY + MEMORY_EACH * size, TEXT + TEXT_EACH * size, SECONDS + SECONDS_EACH * size)
    answer = _process.ask(lines, most)
    if "text" in answer:
        return answer["text"]
    if "error" in answer:
        reason = " ".join(answer["error"].split())
        raise InputError(f"the model's chat template refuses the messages ({reason[:160]})")
    raise InputError(
        f"the model's chat template {answer['limit']}; valid: up to {most.seconds:.0f} seconds of processor "
        f"time, {most.memory // 10**6:,} MB of memory and {most.text:,} characters"
    )


def prepare() -> None:
    """Start the process now, beside what else takes time; what is wrong with it the first chat says."""
    with suppress(RunError):
        _process.start()


def _usual(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it to templates: no empty fields, reasoning under the usual names."""
    made = {key: value for key, value in message.items() if value is not None}
    thought = next((made[key] for key in REASONING if key in made), None)
    return made if thought is None else {"thinking": thought, **made, REASONING[0]: thought}


class Limits(NamedTuple):
    """What a template may take: bytes of address space, characters that it writes, seconds of processor."""

    memory: int
    text: int
    seconds: float


#: the limit that an answer names → what the template does
_LIMITS = {"memory": "takes too much memory", "text": "writes too much text"}


class Process:
    """The process that renders, started when it is asked; one question at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._parents: list[subprocess.Popen[bytes] | None] = []

    def ask(self, lines: Sequence[bytes], most: Limits) -> dict[str, str]:
        """The answer to a request; ``limit`` says what the template did against the limits.

        Args:
            lines: the template, and what it is given.
            most: the limits.
        """
        with self._lock:
            running = self._started()
            assert running.stdin is not None and running.stdout is not None
            timer = Timer(HANGS, running.kill)
            timer.daemon = True
            timer.start()
            try:
                running.stdin.write(b"%d %d %g\n%s\n%s\n" % (*most, *lines))
                running.stdin.flush()
                said = running.stdout.readline()
                answer = json.loads(said) if said.endswith(b"\n") else None
            except OSError:  # it ended while it read
                answer = None
            except BaseException:  # somebody else's end, in the middle of a question
                self.close()
                raise
            finally:
                timer.cancel()
            if answer is None or "limit" in answer:
                self.close()
            if answer is None:
                return {"limit": _ended(running.returncode)}
            return answer | ({"limit": _LIMITS[answer["limit"]]} if "limit" in answer else {})

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            RunError: it cannot be started.
        """
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the process."""
        running, self._running = self._running, None
        if running is None:
            return
        running.kill()
        running.wait()
        assert running.stdin is not None and running.stdout is not None
        running.stdout.close()
        with suppress(OSError):  # what was not written goes nowhere
            running.stdin.close()

    def forget(self) -> None:
        """Leave the process to the one that this is a fork of."""
        self._lock = Lock()
        self._parents.append(self._running)  # nothing of it is to be flushed or waited for
        self._running = None

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, alive."""
        if self._running is not None and self._running.poll() is None:
            return self._running
        self.close()
        paths = [os.path.abspath(path) for path in sys.path]
        try:
            self._running = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WORKER), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a key that interrupts is not for it
            )
        except OSError as error:
            raise RunError(f"the process that renders chat templates cannot be started ({error})") from error
        return self._running


def _ended(code: int) -> str:
    """What a template did whose process ended so."""
    if code == -signal.SIGPROF:
        return "takes too long"
    how = signal.Signals(-code).name if code < 0 else f"code {code}"
    return f"ends the process that renders it ({how})"


_process = Process()
atexit.register(_process.close)
os.register_at_fork(after_in_child=_process.forget)
