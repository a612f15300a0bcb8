"""The process that renders chat templates. It is started with paths for imports. A request is three lines
(the limits, the template, and what it is given, as JSON); an answer is one: ``text``, or what went wrong.

A template can ask for any amount of work in one expression (``"a" * 10 ** 10``), so what bounds it is the
system: an address space, and a timer of processor time that ends the process.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # begun without the site's packages
    sys.path[:] = sys.argv[1:]

import json
import os
import resource
import signal
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SHOWN = 2000  # characters of an error that are passed on


class OutOfText(Exception):
    """The text is longer than it may be."""


class Generation(Extension):
    """``{% generation %}`` marks what the model wrote; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as it stands inside, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class Names(Namespace):
    """``namespace(…)``, without names that begin with an underscore."""

    def __init__(*args: Any, **given: Any) -> None:  # a name may be "self"
        self, *rest = args
        made = dict(*rest, **given)
        for name in made:
            _check_name(name)
        Namespace.__init__(self, made)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Dict:
    """``dict(…)``, without the attributes of Python's own."""

    def __call__(self, *args: Any, **given: Any) -> dict[Any, Any]:
        return dict(*args, **given)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As Python's."""
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace stores no names that begin with an underscore, such as {name!r}")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(4)
def _compiled(template: str) -> Any:
    """A template with what transformers gives to templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": Dict(), "namespace": Names}
    return made.from_string(template)


def _rendered(template: str, given: dict[str, Any], most: int) -> str:
    """The text of a template, up to a number of characters."""
    parts: list[str] = []
    left = most
    for part in _compiled(template).generate(**given):
        left -= len(part)
        if left < 0:
            raise OutOfText
        parts.append(part)
    return "".join(parts)


def _answer(lines: list[bytes], memory: int, text: int, seconds: float) -> dict[str, str]:
    """What a request comes to; ``limit`` names the limit that it met.

    Args:
        lines: the template, and what it is given.
        memory, text, seconds: the limits, in bytes, characters and processor time.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    _limit_memory(most, hard)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        template, given = map(json.loads, lines)
        return {"text": _rendered(template, given, text)}
    except MemoryError:
        return {"limit": "memory"}
    except OutOfText:
        return {"limit": "text"}
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
        memory, text, seconds = head.split()
        lines = [requests.readline(), requests.readline()]
        answer = _answer(lines, int(memory), int(text), float(seconds))
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if "limit" in answer:
            os._exit(0)  # whatever is left of it goes, too


if __name__ == "__main__":
    main()
