"""The text of chat messages by a model's template, which is a program of whoever made the model's files.

This file is two programs. Imported, :func:`rendered` asks a process that was started for the first chat and
is kept; run as a script, it is that process, which answers under limits of processor time, memory and text. A
template can ask for any amount of work in one expression (``"a" * 10 ** 10``), so what bounds it is the
system: an address space, and a timer of processor time that ends the process. What templates find there is
what transformers gives them. A request is two lines of JSON (limits and template; what it is given), an
answer is one.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # begun without the site's packages
    sys.path[:] = sys.argv[1:]

import atexit
import json
import os
import re
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from threading import Lock
from typing import Any

from tokenswift.types import InputError, RunError

#: limits, and what comes to them for each byte that a template is given
SECONDS, SECONDS_EACH = 2.0, 2.0**-20  # of processor time
MEMORY, MEMORY_EACH = 2**28, 32  # bytes of address space
TEXT, TEXT_EACH = 2**18, 4  # characters
SHOWN = 2000  # characters of an error that are passed on
#: names under which reasoning is passed, the usual one first
REASONING = ("reasoning_content", "thinking", "reasoning")


def rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, Any],
    /,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """The text of chat messages, as transformers' ``apply_chat_template`` has it.

    Args:
        template: of the model.
        messages: each with a role, a content and whatever else JSON can hold.
        special: the tokenizer's special tokens by name.
        tools: as JSON has them.
        options: variables of the template; ``add_generation_prompt``: end where the answer begins (default).
    Raises:
        InputError: the template meets a limit, refuses the messages, or is none.
        RunError: no process can be started.
    """
    usual = {"documents": None, "add_generation_prompt": True}
    turns = [_usual(message) for message in messages]
    given = {**usual, **options, **special, "messages": turns, "tools": tools}
    try:
        line = json.dumps(given).encode()
        size = len(line)
        memory, seconds = MEMORY + MEMORY_EACH * size, SECONDS + SECONDS_EACH * size
        head = json.dumps([memory, seconds, text := TEXT + TEXT_EACH * size, template]).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"messages are not JSON ({error}); valid: texts, numbers, lists") from error
    answer = _process.ask(b"%s\n%s\n" % (head, line))
    if "text" in answer:
        return answer["text"]
    if "error" in answer:
        reason = " ".join(answer["error"].split())
        raise InputError(f"the model's chat template refuses the messages ({reason[:160]})")
    raise InputError(
        f"the model's chat template {answer['limit']}; valid: up to {seconds:.0f} seconds of processor time, "
        f"{memory // 10**6:,} MB of memory and {text:,} characters"
    )


def prepare() -> None:
    """Start the process now, beside what else takes time; what is wrong with it the first chat says."""
    with suppress(RunError), _process.lock:
        _process.started()


def _usual(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it to templates: no empty fields, reasoning under the usual names."""
    made = {key: value for key, value in message.items() if value is not None}
    thought = next((made[key] for key in REASONING if key in made), None)
    return made if thought is None else {"thinking": thought, **made, REASONING[0]: thought}


class Process:
    """The process that renders, started when it is asked; one question at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.running: subprocess.Popen[bytes] | None = None
        self.owner = 0  # the process that started it; a fork of that one starts its own

    def ask(self, request: bytes) -> dict[str, str]:
        """The answer to a request: ``text``, ``error``, or ``limit``, what the template did against one."""
        with self.lock:
            running: Any = self.started()
            answer: dict[str, str] = {}
            try:
                running.stdin.write(request)
                running.stdin.flush()
                answer = json.loads(running.stdout.readline())
            except (OSError, ValueError):  # it ended
                code = running.wait()
                how = f"ends the process that renders it (code {code})"
                answer = {"limit": "takes too long" if code == -signal.SIGPROF else how}
            finally:
                if answer.keys().isdisjoint({"text", "error"}):  # it goes; or somebody ends this process
                    self.close()
            return answer

    def started(self) -> subprocess.Popen[bytes]:
        """The process, alive.

        Raises:
            RunError: it cannot be started.
        """
        if self.running is None or self.owner != os.getpid() or self.running.poll() is not None:
            self.close()
            self.owner = os.getpid()
            paths = [os.path.abspath(path) for path in sys.path]
            try:
                self.running = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, *paths],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # a key that interrupts is not for it
                )
            except OSError as error:
                raise RunError(
                    f"the process that renders chat templates cannot be started ({error})"
                ) from error
        return self.running

    def close(self) -> None:
        """End the process."""
        running, self.running = self.running, None
        if running is not None and self.owner == os.getpid():
            running.kill()
            with suppress(OSError):  # what was not written goes nowhere
                running.communicate()


_process = Process()
atexit.register(_process.close)


# ---- the process that renders ------------------------------------------------------------------------------


#: marks what the model wrote; here it is a block like any other, with a scope of its own
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


@lru_cache(4)
def _compiled(template: str) -> Any:
    """A template with what transformers gives to templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made.from_string(GENERATION.sub(lambda tag: f"{tag[1]}{tag[2] or ''}with{tag[3]}", template))


def _answer(head: bytes, given: bytes) -> dict[str, str]:
    """What a request comes to; ``limit`` says what the template did against the limit that it met."""
    memory, seconds, left, template = json.loads(head)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    _limit_memory(memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    parts: list[str] = []
    try:
        for part in _compiled(template).generate(**json.loads(given)):
            left -= len(part)
            if left < 0:
                return {"limit": "writes too much text"}
            parts.append(part)
        return {"text": "".join(parts)}
    except MemoryError:
        return {"limit": "takes too much memory"}
    except Exception as error:  # whatever the template's own code raises
        return {"error": str(error)[:SHOWN] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(hard, hard)


def _limit_memory(most: int, hard: int) -> None:
    """Bound the address space, but for macOS, which has no such bound and may refuse to set one: there what
    bounds memory is the processor time that filling it takes."""
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def main() -> None:
    """Answer until no request comes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := requests.readline():
        answers.write(json.dumps(_answer(head, requests.readline())).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
