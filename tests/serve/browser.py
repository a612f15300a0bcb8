"""A browser without a window, led by the few words of its DevTools protocol that tests need."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """Where a browser is; None: nowhere."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One window; `close` has to follow.

    Attributes:
        wrong: errors that the page or the browser wrote, but for requests that failed.
    """

    def __init__(self, folder: Path) -> None:
        from websockets.sync.client import connect

        told = folder / "DevToolsActivePort"
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
        self._process = subprocess.Popen(
            [str(found()), *options, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.wrong: list[str] = []
        self._number, self._held = 0, ExitStack()
        self._socket: Any = None
        try:
            _until(lambda: told.exists() and "\n" in told.read_text())
            port = int(told.read_text().split()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                page = next(one for one in json.load(answer) if one["type"] == "page")
            self._socket = self._held.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None))
            for domain in ("Page", "Runtime", "Log"):
                self.do(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """One word of the protocol."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv(60))
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]
            if said["method"] == "Runtime.exceptionThrown":
                self.wrong.append(json.dumps(said["params"])[:500])
            if said["method"] == "Log.entryAdded" and said["params"]["entry"]["source"] != "network":
                self.wrong.append(json.dumps(said["params"]["entry"])[:500])

    def run(self, code: str) -> Any:
        """The value of an expression on the page."""
        said = self.do("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def until(self, code: str) -> None:
        """Wait until an expression is true; the page may be on its way."""
        _until(
            lambda: self.run(
                f"document.readyState === 'complete' && typeof talk !== 'undefined' && !!({code})"
            )
        )

    def go(self, url: str) -> None:
        """Load a page, and wait until the server has answered it."""
        self.do("Page.navigate", url=url)
        self.until("$('state').textContent")

    def look(self, width: int, height: int, scheme: str) -> None:
        """The size of the window, and "light" or "dark"."""
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def type(self, text: str) -> None:
        """Text where the cursor is."""
        self.do("Input.insertText", text=text)

    def press(self, key: str, code: int, shift: bool = False) -> None:
        """A key."""
        more = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.do("Input.dispatchKeyEvent", type="keyDown", **more, **({"text": "\r"} if code == 13 else {}))
        self.do("Input.dispatchKeyEvent", type="keyUp", **more)

    def close(self) -> None:
        self._held.close()
        os.killpg(self._process.pid, signal.SIGKILL)  # it has nothing to keep, and processes of its own
        self._process.wait()


def _until(true: Any) -> None:
    end = time.monotonic() + 120  # it hangs
    while not true():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)
