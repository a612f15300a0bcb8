"""Chat templates and grammars of strangers, run by a process under limits of processor time and
memory.

This file is two programs. Imported, :class:`Process` starts a process and asks it; run as a script,
it is that process. A template can ask for any amount of work in one expression (``"a" * 10 **
10``); some grammars overflow llguidance's stack, and intersections of expressions (``&``, ``allOf``
with patterns, ``multipleOf``) can take it hours within one step of an automaton, which neither its
limits nor anything else in a process stops. So what bounds them is the system: an address space,
and a timer of processor time that ends the process. A request is a line of JSON, and so is its
answer.
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
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from threading import Lock
from typing import Any

from tokenswift.types import RunError

SECONDS_EACH, MEMORY_EACH = 2.0**-20, 32  # come to the limits for each byte of a request
TEXT, TEXT_EACH = 2**18, 4  # characters that a template may write, and those for each byte
SHOWN = 2000  # characters of an error that are passed on


class Process:
    """The process, started when it is asked; one question at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.running: subprocess.Popen[bytes] | None = None
        self.owner = 0  # the process that started it; a fork of that one starts its own

    def ask(self, task: str, seconds: float, memory: int, *given: Any) -> dict[str, Any]:
        """What a task comes to: ``made``, ``error`` (in words), or ``limit``: what it did against
        one.

        Args:
            task: "render" or "compile"; ``given``: its arguments, as JSON has them.
            seconds, memory: of processor time, and bytes of address space, for a short request.
        Raises:
            TypeError, ValueError, RecursionError: arguments are not JSON.
            RunError: no process can be started.
        """
        request = json.dumps([task, seconds, memory, *given]).encode() + b"\n"
        with self.lock:
            running: Any = self.started()
            answer: dict[str, Any] = {}
            try:
                running.stdin.write(request)
                running.stdin.flush()
                answer = json.loads(running.stdout.readline())
            except (OSError, ValueError):  # it ended
                code = running.wait()
                how = f"ends the process that tries it (code {code})"
                answer = {"limit": "takes too long" if code == -signal.SIGPROF else how}
            finally:
                if answer.keys().isdisjoint(
                    {"made", "error"}
                ):  # it goes; or somebody ends this process
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
                raise RunError(f"a process with limits cannot be started ({error})") from error
        return self.running

    def close(self) -> None:
        """End the process."""
        running, self.running = self.running, None
        if running is not None and self.owner == os.getpid():
            running.kill()
            with suppress(OSError):  # what was not written goes nowhere
                running.communicate()


#: the one of chat templates, which is kept
templates = Process()
atexit.register(templates.close)


# ---- the process itself --------------------------------------------------------------------------


#: marks what the model wrote; here it is a block like any other, with a scope of its own
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


@lru_cache(4)
def _compiled(template: str) -> Any:
    """A template with what transformers gives to templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return made.from_string(
        GENERATION.sub(lambda tag: f"{tag[1]}{tag[2] or ''}with{tag[3]}", template)
    )


def _rendered(size: int, template: str, given: dict[str, Any]) -> str:
    """The text that a template makes of what it is given."""
    text = _compiled(template).render(**given)
    if len(text) > TEXT + TEXT_EACH * size:
        raise ValueError("it writes too much text")
    return text


def _compile(
    _: int, limits: dict[str, Any], special: list[str], vocab_size: int, text: str
) -> None:
    """Compile a grammar over bytes; see `sampling.masks`."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    class Bytes:
        eos_token_id, bos_token_id = 256, None
        tokens = [
            *(bytes([one]) for one in range(256)),
            b"<end>",
            *(name.encode() for name in special),
        ]
        special_token_ids = [*range(256, 257 + len(special))]

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    Bytes.tokens += [b""] * (vocab_size - len(Bytes.tokens))
    tokenizer: Any = LLTokenizer(TokenizerWrapper(Bytes()))
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**limits))
    matcher.compute_bitmask()
    if wrong := matcher.get_error():
        raise ValueError(wrong)


def _answer(line: bytes) -> dict[str, Any]:
    """What a request comes to."""
    task, seconds, memory, *given = json.loads(line)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory += MEMORY_EACH * len(line)
    _limit_memory(memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard)
    signal.setitimer(signal.ITIMER_PROF, seconds + SECONDS_EACH * len(line))
    try:
        return {"made": {"render": _rendered, "compile": _compile}[task](len(line), *given)}
    except MemoryError:
        return {"limit": "takes too much memory"}
    except Exception as error:  # whatever a template's own code raises
        return {"error": str(error)[:SHOWN] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(hard, hard)


def _limit_memory(most: int, hard: int) -> None:
    """Bound the address space, but for macOS, which has no such bound and may refuse to set one:
    there what bounds memory is the processor time that filling it takes."""
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def main() -> None:
    """Answer until no request comes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while line := requests.readline():
        answers.write(json.dumps(_answer(line)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
