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
from typing import TYPE_CHECKING, Any, TypedDict

from tokenswift.types import RunError

if TYPE_CHECKING:
    from jinja2 import Template
    from llguidance import LLMatcher, LLTokenizer

# what each byte of a request adds to its limits
SECONDS_A_BYTE = 2.0**-20
MEMORY_A_BYTE = 32
# characters that a template may write, and those for each byte of a request
MOST_TEXT = 2**18
TEXT_A_BYTE = 4
LONG_NUMBER = 20  # digits of a number that is tried
SHOWN = 2000  # characters of an error that are passed on


class Answer(TypedDict, total=False):
    """What a request comes to: one of these.

    Attributes:
        text: the result of its task.
        error: why it failed, in words.
        limit: what it did against a limit, in words.
    """

    text: str
    error: str
    limit: str


class Process:
    """The process, which its first request starts; one request at a time.

    Attributes:
        owner: number of the process that started it; a fork of that one starts its own.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.running: subprocess.Popen[bytes] | None = None
        self.owner = 0

    def ask(self, task: str, seconds: float, memory: int, *arguments: object) -> Answer:
        """What a task comes to.

        Args:
            task: "render" or "compile".
            seconds, memory: of processor time, and bytes of address space, for a short request.
            arguments: the task's, as JSON has them.
        Raises:
            TypeError, ValueError, RecursionError: arguments are not JSON.
            RunError: no process can be started.
        """
        request = json.dumps([task, seconds, memory, *arguments]).encode() + b"\n"
        with self.lock:
            running = self.ensure_process()
            answer: Answer = {}
            try:
                answer = _exchange(running, request)
            except (OSError, ValueError):  # it ended
                code = running.wait()
                answer["limit"] = f"ends the process that tries it (code {code})"
                if code == -signal.SIGPROF:
                    answer["limit"] = "takes too long"
            finally:
                # it is over with this process; or somebody ends the one that asks
                if "text" not in answer and "error" not in answer:
                    self.close()
            return answer

    def ensure_process(self) -> subprocess.Popen[bytes]:
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
        running = self.running
        self.running = None
        if running is not None and self.owner == os.getpid():
            running.kill()
            with suppress(OSError):  # what was not written goes nowhere
                running.communicate()


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> Answer:
    """Write a request and read its answer.

    Raises:
        OSError, ValueError: the process has ended.
    """
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process has no pipes")
    process.stdin.write(request)
    process.stdin.flush()
    return json.loads(process.stdout.readline())


#: the one of chat templates, which goes on from one to the next
templates = Process()
atexit.register(templates.close)


# ---- the process itself --------------------------------------------------------------------------


#: marks what the model wrote; here it is a block like any other, with a scope of its own
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


@lru_cache(4)
def _compiled_template(template: str) -> Template:
    """A template with what transformers gives to templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: object, ensure_ascii: bool = False, indent: int | None = None, **more: Any
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(
        GENERATION.sub(lambda tag: f"{tag[1]}{tag[2] or ''}with{tag[3]}", template)
    )


def _render(request_size: int, template: str, variables: dict[str, object]) -> str:
    """The text that a template makes of its variables."""
    text = _compiled_template(template).render(**variables)
    if len(text) > MOST_TEXT + TEXT_A_BYTE * request_size:
        raise ValueError("it writes too much text")
    return text


def _compile(
    request_size: int,
    limits: dict[str, Any],
    special: list[str],
    vocab_size: int,
    texts: list[str],
    numbers: list[str],
) -> str:
    """Why llguidance refuses grammars over bytes, "" where it does not.

    Args:
        limits: of `llguidance.LLParserLimits`.
        special: names of the tokens beyond the bytes and the end.
        vocab_size: V.
        texts, numbers: grammars; some numbers are written by the latter, too (`sampling.masks`).
    """
    from llguidance import LLMatcher, LLParserLimits

    tokenizer = _byte_tokenizer(special, vocab_size)
    for text in [*texts, *numbers]:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**limits))
        matcher.compute_bitmask()
        matchers = [matcher]
        for first_digit in range(9 if text in numbers else 0):
            matchers.append(matcher.deep_copy())
            _write_number(matchers[-1], first_digit)
        for matcher in matchers:
            error = matcher.get_error()
            if error:
                return str(error)[:SHOWN]
    return ""


def _byte_tokenizer(special: list[str], vocab_size: int) -> LLTokenizer:
    """A tokenizer of 256 bytes, an end, special tokens, and empty ones up to V."""
    from llguidance import LLTokenizer, TokenizerWrapper

    class Bytes:
        eos_token_id = 256
        bos_token_id = None
        tokens = [
            *(bytes([byte]) for byte in range(256)),
            b"<end>",
            *(name.encode() for name in special),
        ]
        special_token_ids = [*range(256, 257 + len(special))]

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    Bytes.tokens += [b""] * (vocab_size - len(Bytes.tokens))
    return LLTokenizer(TokenizerWrapper(Bytes()))  # type: ignore[arg-type]  # its type is missing


def _write_number(matcher: LLMatcher, first_digit: int) -> None:
    """Write a number that a grammar allows; ``first_digit`` changes all its digits."""
    for position in range(LONG_NUMBER):
        bits = matcher.compute_bitmask()
        digits = [digit for digit in b"1234567890" if bits[digit >> 3] >> (digit & 7) & 1]
        if not digits:
            return
        if not matcher.consume_token(digits[(first_digit + 7 * position) % len(digits)]):
            return


def _answer(line: bytes) -> Answer:
    """What a request comes to."""
    task, seconds, memory, *arguments = json.loads(line)
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory += MEMORY_A_BYTE * len(line)
    if hard_limit != resource.RLIM_INFINITY:
        memory = min(memory, hard_limit)
    _limit_memory(memory, hard_limit)
    signal.setitimer(signal.ITIMER_PROF, seconds + SECONDS_A_BYTE * len(line))
    tasks = {"render": _render, "compile": _compile}
    try:
        return {"text": tasks[task](len(line), *arguments)}
    except MemoryError:
        return {"limit": "takes too much memory"}
    except Exception as error:  # whatever a template's own code raises
        return {"error": str(error)[:SHOWN] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(hard_limit, hard_limit)


def _limit_memory(most: int, hard_limit: int) -> None:
    """Bound the address space, but for macOS, which has no such bound and may refuse to set one:
    there what bounds memory is the processor time that filling it takes."""
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (most, hard_limit))


def main() -> None:
    """Answer until no request comes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = sys.stdout.buffer
    for line in iter(sys.stdin.buffer.readline, b""):
        answers.write(json.dumps(_answer(line)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
