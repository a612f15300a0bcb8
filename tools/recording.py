"""Record a command in a terminal, and draw the recording as an animated SVG.

    python tools/recording.py record docs/demo.cast tokenswift demo
    python tools/recording.py render docs/demo.cast docs/demo.svg

The recording is an asciicast (version 2): what the command wrote, and when. The SVG shows the last
screen for `POSTER` seconds, then plays the recording once, as fast as it was, except that waits
longer than `LONGEST_WAIT` are cut to that, and stays at the last screen. So renderers that take the
first picture, renderers without animation and readers who want no motion all see how it ended: the
last screen stands in attributes, and only animations show anything else. The window's title is the
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
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLUMNS = 80
ROWS = 26
LONGEST_WAIT = 1.0  # seconds
POSTER = 3.0  # seconds for which the last screen is shown before the recording is played
FRAME = 0.3  # seconds between two pictures
# in pixels: widths of a character and of one in the title, heights of a line and of the title's bar
CHAR = 8.4
TITLE_CHAR = 7.2
LINE = 18
BAR = 34
EDGE = 14  # around the text
FIRST = 13  # from the top to the first line's foot
CODES = re.compile(r"\x1b\]\d;(.*?)(?:\x07|\x1b\\)|\x1b\[([\d;?]*)([A-Za-z])|(\r|\n)")


def record(file: Path, command: list[str]) -> int:
    """Run a command in a terminal of our size; write what it says, and when, to ``file``; its exit
    code."""
    start = time.monotonic()
    lines: list[list[object]] = []
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


@dataclass(frozen=True, slots=True)
class Shot:
    """The screen at a time.

    Attributes:
        second: of the recording, long waits cut.
        lines: since the beginning.
        title: of the window.
    """

    second: float
    lines: list[str]
    title: str


def shots_of(file: Path) -> list[Shot]:
    """The screens of a recording, none closer to the next than a frame."""
    screen = Screen()
    shots: list[Shot] = []
    clock = 0.0
    before = 0.0
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        second, _, text = json.loads(line)
        clock += min(second - before, LONGEST_WAIT)
        before = second
        screen.write(text)
        shown_at = clock
        if shots and clock - shots[-1].second < FRAME:
            shown_at = shots.pop().second
        shots.append(Shot(shown_at, list(screen.lines), screen.title))
    return shots


@dataclass(frozen=True, slots=True)
class Span:
    """How long a line says something.

    Attributes:
        text: what it says.
        start: second at which it begins to.
        end: second at which it says something else; None: it does so for good.
    """

    text: str
    start: float
    end: float | None


def spans(values: list[tuple[float, str]], end: float) -> list[Span]:
    """What a line says, from (second, text), before an end; nothing of when it is empty."""
    changes = [
        (second, text)
        for i, (second, text) in enumerate(values)
        if i == 0 or values[i - 1][1] != text
    ]
    ends = [second for second, _ in changes[1:]]
    return [
        Span(text, second, until)
        for (second, text), until in zip(changes, [*ends, None], strict=True)
        if text.strip() and second < end
    ]


def element(span: Span, x: float, y: float, kind: str) -> str:
    """A line of text that is visible for its span."""
    width = TITLE_CHAR if kind == "title" else CHAR
    if span.end is None:  # of the last screen: hidden from the poster's end until it is written
        animation = f"h {span.start:.2f}s {POSTER:.2f}s"
        hidden = ""
    else:
        animation = f"s {span.end - span.start:.2f}s {POSTER + span.start:.2f}s"
        hidden = ' visibility="hidden"'
    text = span.text.strip()
    indent = len(span.text) - len(span.text.lstrip())
    return (
        f'<text class="{kind}" x="{x + width * indent:.1f}" y="{y}" '
        f'textLength="{width * len(text):.1f}" '
        f'style="animation:{animation} step-end"{hidden}>{escape(text)}</text>\n'
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


def text_elements(shots: list[Shot], command: str) -> str:
    """All lines that the terminal ever shows, below the command."""
    end = shots[-1].second + 1
    elements = [element(Span(command, 0, None), 0, FIRST, "head")]
    for number in range(len(shots[-1].lines)):
        values = [(shot.second, shot.lines[number]) for shot in shots if number < len(shot.lines)]
        y = FIRST + LINE * (number + 1)
        elements += [element(span, 0, y, kind_of(span.text)) for span in spans(values, end)]
    return "".join(elements)


def title_elements(shots: list[Shot]) -> str:
    """The window's titles."""
    values = [(shot.second, shot.title[:84]) for shot in shots]
    return "".join(element(span, 76, 22, "title") for span in spans(values, shots[-1].second + 1))


def scroll_stops(shots: list[Shot]) -> list[tuple[float, int]]:
    """When the text moves up, and how far it is up then, in pixels."""
    stops: list[tuple[float, int]] = []
    for shot in shots:
        up = max(0, len(shot.lines) + 1 - ROWS) * LINE
        if not stops or stops[-1][1] != up:
            stops.append((shot.second, up))
    return stops


def render(file: Path, out: Path) -> None:
    """Draw a recording."""
    head = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    shots = shots_of(file)
    total = shots[-1].second + FRAME
    stops = scroll_stops(shots)
    scroll = "".join(
        f"{100 * second / total:.2f}%{{transform:translateY({-up}px)}}" for second, up in stops
    )
    width = 2 * EDGE + CHAR * COLUMNS
    height = BAR + EDGE + LINE * ROWS
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
{title_elements(shots)}\
<svg x="{EDGE}" y="{BAR}" width="{width - 2 * EDGE:.0f}" height="{LINE * ROWS}">
<g id="lines" transform="translate(0 {-final})">
{text_elements(shots, "$ " + head["command"])}</g>
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
