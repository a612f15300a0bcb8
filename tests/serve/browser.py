"""A Chromium without a window, driven through its own protocol by a pair of pipes: no package is
needed, and no port is open."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: puts the pipes where the browser looks for them, as file descriptors 3 and 4
PLACING = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(handle), fcntl.F_DUPFD, 10) for handle in sys.argv[1:3]]
for handle, place in zip(ends, (3, 4)):
    os.dup2(handle, place)
    os.set_inheritable(place, True)
os.execv(sys.argv[3], sys.argv[3:])
"""
SECONDS = 60.0


def program() -> str | None:
    """The path of a Chromium; None: there is none."""
    named = os.environ.get("TOKENSWIFT_CHROMIUM")
    found = (shutil.which(name) for name in ((named,) if named else PROGRAMS))
    return next((path for path in found if path), None)


class Browser:
    """A browser with one page.

    Args:
        folder: for its files.
        width, height: of the page, in pixels.
    """

    def __init__(self, folder: Path, width: int = 1000, height: int = 800) -> None:
        path = program()
        assert path is not None
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        options = (
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            f"--window-size={width},{height}",
            f"--user-data-dir={folder}",
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", PLACING, str(commands), str(events), path, *options],
            pass_fds=(commands, events),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(events)
        self._numbers = count(1)
        self._rest = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")
        self.resize(width, height)

    def call(self, method: str, **params: object) -> Any:
        """Do a command of the protocol; returns its result."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = os.read(self._events, 1 << 16)
            assert block, "the browser has ended"
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)})")
        self.wait_for("document.readyState === 'complete'")

    def reload(self) -> None:
        """Load the page again."""
        self.run("window.isOld = true")
        self.call("Page.reload")
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, after its promise."""
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"{condition}: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click the last element that a selector names."""
        self.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).click()")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def ask(self, text: str) -> None:
        """Send a message."""
        self.run("document.querySelector('#prompt').focus()")
        self.type(text)
        self.press("Enter", 13, "\r")

    def text(self, selector: str) -> str:
        """What a person reads in the last element that a selector names."""
        value: str = self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).innerText"
        )
        return value

    def resize(self, width: int, height: int) -> None:
        """Give the page another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def dark(self, on: bool = True) -> None:
        """Prefer dark colours, or light ones."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        """Write a picture of the page, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._commands)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._events)
