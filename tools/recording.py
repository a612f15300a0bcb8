"""Record a command in a terminal, and draw the recording as an animated SVG.

    python tools/recording.py record docs/demo.cast tokenswift demo
    python tools/recording.py render docs/demo.cast docs/demo.svg

The recording is an asciicast (version 2): what the command wrote, and when. The SVG shows the last
    screen for
`POSTER` seconds, then plays the recording once, as fast as it was, except that waits longer than
`LONGEST_WAIT` are cut to that, and stays at the last screen. So renderers that take the first
picture, renderers without animation and readers who want no motion all see how it ended: the last
screen stands in attributes, and only animations show anything else. The window's title is the
command's.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from html import escape
from pathlib import Path

COLUMNS, ROWS = 80, 26
LONGEST_WAIT = 1.0  # seconds
POSTER = 3.0  # seconds for which the last screen is shown before the recording is played
FRAME = 0.3  # seconds between two pictures
CHAR, TITLE_CHAR, LINE, EDGE, BAR = 8.4, 7.2, 18, 14, 34  # pixels
FIRST = 13  # pixels from the top to the first line's foot
CODES = re.compile(r"\x1b\]\d;(.*?)(?:\x07|\x1b\\)|\x1b\[([\d;?]*)([A-Za-z])|(\r|\n)")


def record(file: Path, command: list[str]) -> int:
    """Run a command in a terminal of our size; write what it says, and when, to ``file``; its exit
    code."""
    start, lines = time.monotonic(), []
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    pending = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the terminal is closed
            break
        if not data:
            break
        pending += data
        text = pending.decode("utf-8", errors="ignore")
        pending = pending[len(text.encode()) :]  # a character that has not come whole
        lines.append([round(time.monotonic() - start, 3), "o", text])
        sys.stdout.write(text)
        sys.stdout.flush()
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "command": " ".join(command)}
    file.write_text(
        "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in (head, *lines)), "utf-8"
    )
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Screen:
    """As much of a terminal as our programs use: text, line ends, erasing a line, titles."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self.column = 0
        self.title = ""

    def write(self, text: str) -> None:
        """Take what a program wrote."""
        place = 0
        for code in CODES.finditer(text):
            self._put(text[place : code.start()])
            place = code.end()
            if code[1] is not None:
                self.title = code[1]
            elif code[3] == "K":
                self.lines[-1] = "" if code[2] == "2" else self.lines[-1][: self.column]
            elif (
                code[3] == "A" and len(self.lines) > 1
            ):  # a line up, of which there is nothing below
                self.lines.pop()
            elif code[3] == "t" and (code[2] or "").startswith(
                "23"
            ):  # the title that was there before
                self.title = ""
            elif code[4] == "\r":
                self.column = 0
            elif code[4] == "\n":
                self.lines.append("")
        self._put(text[place:])

    def _put(self, text: str) -> None:
        for letter in text:
            if self.column == COLUMNS:
                self.lines.append("")
                self.column = 0
            line = self.lines[-1].ljust(self.column)
            self.lines[-1] = line[: self.column] + letter + line[self.column + 1 :]
            self.column += 1


def pictures(file: Path) -> list[tuple[float, list[str], str]]:
    """(second, lines since the beginning, title) of a recording, long waits cut."""
    screen, shown, clock, before = Screen(), [], 0.0, 0.0
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        second, _, text = json.loads(line)
        clock += min(second - before, LONGEST_WAIT)
        before = second
        screen.write(text)
        if shown and clock - shown[-1][0] < FRAME:
            clock_shown = shown.pop()[0]
        else:
            clock_shown = clock
        shown.append((clock_shown, list(screen.lines), screen.title))
    return shown


def spans(values: list[tuple[float, str]], end: float) -> list[tuple[str, float, float | None]]:
    """(value, from, until) of a thing that changes; until is None for the last value."""
    found: list[tuple[str, float, float | None]] = []
    for second, value in values:
        if found and found[-1][0] == value:
            continue
        if found:
            found[-1] = (found[-1][0], found[-1][1], second)
        found.append((value, second, None))
    return [x for x in found if x[0].strip() and x[1] < end]


def element(value: str, start: float, until: float | None, x: float, y: float, kind: str) -> str:
    """A line of text that is visible from ``start`` until ``until``, or for good."""
    width = TITLE_CHAR if kind == "title" else CHAR
    if until is None:  # a line of the last screen: hidden from the poster's end until it is written
        when, hidden = f"h {start:.2f}s {POSTER:.2f}s", ""
    else:
        when, hidden = f"s {until - start:.2f}s {POSTER + start:.2f}s", ' visibility="hidden"'
    text = value.rstrip()
    indent = len(text) - len(text.lstrip())
    text = text.lstrip()
    return (
        f'<text class="{kind}" x="{x + width * indent:.1f}" y="{y}" '
        f'textLength="{width * len(text):.1f}" '
        f'style="animation:{when} step-end"{hidden}>{escape(text)}</text>\n'
    )


def kind_of(line: str) -> str:
    """How a line is coloured: the program's own words apart from the model's text."""
    if line.startswith("identical: yes"):
        return "good"
    if line.startswith("--- ") or line.startswith("strategy  "):
        return "head"
    if re.match(r"(autoregressive|tokenswift|transformers generate) {3,}", line):
        return "row"
    return "text"


def render(file: Path, out: Path) -> None:
    """Draw a recording."""
    head = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    shots = pictures(file)
    last, lines, _ = shots[-1]
    command = f"$ {head['command']}"
    body = [element(command, 0, None, 0, FIRST, "head")]
    for number in range(len(lines)):
        values = [(second, found[number]) for second, found, _ in shots if number < len(found)]
        for value, start, until in spans(values, last + 1):
            body.append(
                element(value, start, until, 0, FIRST + LINE * (number + 1), kind_of(value))
            )
    titles = [
        element(value, start, until, 76, 22, "title")
        for value, start, until in spans(
            [(second, title[:84]) for second, _, title in shots], last + 1
        )
    ]
    total = last + FRAME
    stops = []
    for second, found, _ in shots:
        up = max(0, len(found) + 1 - ROWS) * LINE
        if not stops or stops[-1][1] != up:
            stops.append((second, up))
    scroll = "".join(f"{100 * s / total:.2f}%{{transform:translateY({-up}px)}}" for s, up in stops)
    width, height = 2 * EDGE + CHAR * COLUMNS, BAR + EDGE + LINE * ROWS
    final = stops[-1][1]
    out.write_text(
        f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" \
xml:space="preserve">
<title>Terminal recording of {escape(head["command"])}</title>
<style>
text{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}}
text{{font-size:14px;white-space:pre;fill:#d5dae3}}
.head{{fill:#7cc7ff}} .row{{fill:#ffd479}} .good{{fill:#7ee787;font-weight:bold}}
.title{{font-size:12px;fill:#9aa3b2}}
@keyframes h{{from,to{{visibility:hidden}}}} @keyframes s{{from,to{{visibility:visible}}}}
@keyframes up{{0%{{transform:translateY(0)}}{scroll}}}
#lines{{animation:up {total:.2f}s {POSTER:.2f}s step-end}}
@media (prefers-reduced-motion:reduce){{*{{animation:none!important}}}}
</style>
<rect width="{width:.0f}" height="{height}" rx="9" fill="#14181f"/>
<g><circle cx="20" cy="18" r="5.5" fill="#ff5f57"/><circle cx="38" cy="18" r="5.5" fill="#febc2e"/>\
<circle cx="56" cy="18" r="5.5" fill="#28c840"/></g>
{"".join(titles)}<svg x="{EDGE}" y="{BAR}" width="{width - 2 * EDGE:.0f}" height="{LINE * ROWS}">
<g id="lines" transform="translate(0 {-final})">
{"".join(body)}</g>
</svg>
</svg>
""",
        encoding="utf-8",
    )


def main() -> int:
    """``record FILE COMMAND…`` or ``render FILE SVG``."""
    if len(sys.argv) > 3 and sys.argv[1] == "record":
        return record(Path(sys.argv[2]), sys.argv[3:])
    if len(sys.argv) == 4 and sys.argv[1] == "render":
        render(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
