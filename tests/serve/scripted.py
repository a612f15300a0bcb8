"""A server of the page whose answers are scripted: what a model might write, in pieces, as the real
server streams it."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tokenswift.serve.page import page_of


@dataclass
class Script:
    """An answer.

    Attributes:
        text: of the answer.
        thought: before it.
        ended_by: why it ends.
        size: characters of a piece.
        gate: what the end waits for.
    """

    text: str
    thought: str = ""
    ended_by: str = "eos"
    size: int = 7
    gate: threading.Event | None = None

    def events(self, seed: int) -> list[dict[str, Any]]:
        """The events of the stream, numbered."""
        events: list[dict[str, Any]] = [{"type": "response.created"}]
        for kind, text in (("reasoning_text", self.thought), ("output_text", self.text)):
            for start in range(0, len(text), self.size):
                piece = text[start : start + self.size]
                events.append({"type": f"response.{kind}.delta", "delta": piece})
        is_cut = self.ended_by == "length"
        response = {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {"output_tokens": len(events) - 1},
            "tokenswift": {"seed": seed, "steps": 2, "ended_by": self.ended_by},
        }
        kind = "incomplete" if is_cut else "completed"
        events.append({"type": f"response.{kind}", "response": response})
        return [{**event, "sequence_number": number} for number, event in enumerate(events)]


class ScriptedServer:
    """Answers each request with the next script.

    Attributes:
        scripts: of answers that are still to come.
        bodies: of the requests for answers so far.
        paths: of all requests so far.
        url: of the page.
    """

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def handler_of(owner: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    """What answers the requests of a server."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            owner.paths.append(self.path)
            if self.path == "/":
                self.reply("text/html; charset=utf-8", page_of(("magicdec",)))
            elif self.path == "/v1/models":
                self.reply("application/json", json.dumps({"data": [{"id": "scripted"}]}))
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            owner.paths.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "{}")
            if self.path != "/v1/responses":
                self.reply("application/json", "{}")
                return
            owner.bodies.append(body)
            self.stream(owner.scripts.pop(0), body.get("seed", 7))

        def reply(self, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def stream(self, script: Script, seed: int) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("x-answer-id", f"resp_{len(owner.bodies)}")
            self.end_headers()
            *events, last = script.events(seed)
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            if script.gate is not None:
                script.gate.wait(60)
            self.wfile.write(b"data: " + json.dumps(last).encode() + b"\n\n")

    return Handler
