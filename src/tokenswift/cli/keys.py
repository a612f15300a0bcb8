"""The keyboard of a chat: an editor for messages, and what is typed while an answer is written."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROMPT, MORE = "\n> ", "  "
BLOCK = 4096  # bytes that a terminal keeps for its reader
QUOTES = '"""'
logger = logging.getLogger("tokenswift")


def is_open(text: str) -> bool:
    """Whether a message, or the text of a command, has begun with three quotes and goes on."""
    begun = re.match(rf"\s*(?:/[a-z]+\s+)?{QUOTES}(.*)", text, re.DOTALL)
    return begun is not None and not begun[1].rstrip().endswith(QUOTES)


def unquoted(text: str) -> str:
    """What stands between three quotes; a text that does not begin with them as it is."""
    if not text.startswith(QUOTES):
        return text
    return text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n")


class Editor:
    """Reads messages from the terminal.

    Args:
        history: the file that keeps typed lines, None for the usual one, "none" for none.
    """

    def __init__(self, history: str | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        keys = KeyBindings()

        @keys.add("c-j")
        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        def several() -> bool:
            return is_open(get_app().current_buffer.text)

        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            key_bindings=keys,
            prompt_continuation=MORE,
            multiline=Condition(several),
            include_default_pygments_style=False,
        )

    def __call__(self) -> str:
        """The next message."""
        return self._session.prompt(PROMPT).encode("utf-8", "replace").decode("utf-8")

    def typed(self, keys: bytes) -> None:
        """Take keys that were pressed before: they are typed into the next messages."""
        from prompt_toolkit.input.typeahead import store_typeahead
        from prompt_toolkit.input.vt100_parser import Vt100Parser

        pressed: list[Any] = []
        parser = Vt100Parser(pressed.append)
        parser.feed(keys.decode("utf-8", "surrogateescape"))
        parser.flush()
        store_typeahead(self._session.input, pressed)


class Typed:
    """What is typed during an answer is not shown in the middle of it, and not lost.

    Args:
        editor: gets the keys afterwards; None leaves whole lines to whoever reads standard input.
    """

    def __init__(self, editor: Editor | None = None) -> None:
        self._editor = editor
        self._keys = b""
        self._listening = False
        self._made = False  # whether line ends that wait to be read were made of Enter

    @contextmanager
    def plain_enter(self) -> Iterator[None]:
        """While entered, the terminal does not make Ctrl-J of Enter, whoever reads it; what was typed before
        is taken with :meth:`silent`, its line ends as Enter."""
        if not sys.stdin.isatty():
            yield
            return
        import termios

        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        termios.tcsetattr(handle, termios.TCSANOW, [before[0] & ~termios.ICRNL, *before[1:]])
        self._made = True
        try:
            yield
        finally:
            termios.tcsetattr(handle, termios.TCSANOW, before)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """While entered, the terminal shows no keys; Ctrl-C stays a signal, and throws no line away."""
        if not sys.stdin.isatty():
            yield
            return
        import termios

        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        mode = [*before[:6], [*before[6]]]
        mode[3] = mode[3] & ~termios.ECHO | termios.NOFLSH
        if self._editor is not None:  # its keys one by one, as many as there are, none waited for
            mode[3] &= ~termios.ICANON
            mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0
        try:
            termios.tcsetattr(handle, termios.TCSANOW, mode)
            self._listening = self._editor is not None
            if self._made:
                self.listen()
                self._keys, self._made = self._keys.replace(b"\n", b"\r"), False
            yield
        finally:
            self.listen()
            self._listening = False
            termios.tcsetattr(handle, termios.TCSANOW, before)
            if self._editor is not None and self._keys:
                self._editor.typed(self._keys)
                self._keys = b""

    def listen(self) -> None:
        """Take the keys that are there, so that the terminal has room for more; called after each step."""
        with suppress(OSError):  # the terminal may be gone: a signal says so
            while self._listening and (block := os.read(sys.stdin.fileno(), BLOCK)):
                self._keys += block


def _history(name: str | None) -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from tokenswift.loader.find import cache_dir

    if name == "none":
        return InMemoryHistory()
    path = cache_dir() / "chat-history" if name is None else Path(name).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))  # nobody else reads it
        return FileHistory(str(path))
    except OSError as error:
        logger.warning("the input history is not saved: %s (%s)", path, error.strerror or error)
        return InMemoryHistory()
