"""Progress and summary of a run, on standard error.

By where the streams go: a live line when standard error is a terminal of its own; the terminal's title
when text and progress share one terminal, so that the text is not disturbed; a plain line every ten
seconds when standard error is no terminal. With ``NO_COLOR`` set or ``TERM=dumb`` nothing is written but
plain lines. Nothing is written into a text that goes to the same place.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from threading import Event, RLock, Thread
from typing import IO

from tokenswift.cli.escapes import one_place
from tokenswift.types import Generation, Loop, Step
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
PLAIN_SECONDS, LIVE_SECONDS = 10.0, 0.25
#: stage (`types.OnProgress`) → what is done, the unit, and how many of what is counted make one of it
STAGES = {
    "fetch": ("fetching", "MB", 1_000_000),
    "load": ("loading", "tensors", 1),
    "quantize": ("quantizing", "MB", 1_000_000),
    "pack": ("packing weights", "layers", 1),
    "prompt": ("prefill", "tokens", 1),
    "states": ("hidden states", "tokens", 1),
    "features": ("features", "tokens", 1),
    "train": ("training", "steps", 1),
    "text": ("measuring on the text", "places", 1),
    "write": ("the model writes", "tokens", 1),
    "own": ("measuring on the model's own text", "places", 1),
    "generate": ("generating", "tokens", 1),
    "texts": ("generating", "texts", 1),
}
#: finish reason → in words
ENDINGS = {
    "length": "ended at the length asked for",
    "eos": "the model ended the text",
    "stop": "ended at a stop text",
    "loop": "stopped, it began to repeat itself",
}
#: source of tokens (`spec.drafters.registry`) → in words
DRAFTERS = {"head": "heads", "ngram": "n-grams", "chain": "drafted chains", "eagle": "EAGLE-3"}
READING_SECONDS = 1.0  # that a prompt takes to be worth a word
MEASURING_SECONDS = 0.05  # that measuring takes to be worth one, among the details
BAR = 16  # columns of a live line's bar
PAUSES = {"plain": PLAIN_SECONDS, "live": LIVE_SECONDS, "title": LIVE_SECONDS}
TITLE, PUSH_TITLE, POP_TITLE = "\x1b]2;{}\x07", "\x1b[22;2t", "\x1b[23;2t"


class Line:
    """One line on standard error that says how far something is, and changes as it goes on.

    Args:
        mode: "live" (a bar and the line, over the line before), "title" (of the terminal), "plain" (a new
            line, every ten seconds) or "none".
    """

    def __init__(self, mode: str) -> None:
        self.mode, self._out = mode, sys.stderr
        self._on_screen = False
        self.begin()

    def begin(self) -> None:
        """Something begins: worth a line at once, or a plain one in ten seconds."""
        self._shown = time.monotonic() if self.mode == "plain" else 0.0

    def due(self, now: float) -> bool:
        """Whether the line is old enough for another; whoever asks shows it then."""
        if self.mode == "none" or now - self._shown < PAUSES[self.mode]:
            return False
        self._shown = now
        return True

    def show(self, text: str, share: float | None) -> None:
        """Show a line; ``share`` of all is done (None: nobody knows)."""
        if self.mode == "live":
            self._draw(text, share)
        elif self.mode == "title":
            self._out.write(("" if self._on_screen else PUSH_TITLE) + TITLE.format(text))
        else:
            self._out.write(text + "\n")
        self._on_screen = self.mode != "plain"
        self._out.flush()

    def _draw(self, text: str, share: float | None) -> None:
        from rich.console import Console
        from rich.control import Control
        from rich.live_render import LiveRender
        from rich.progress_bar import ProgressBar
        from rich.segment import ControlType
        from rich.table import Table
        from rich.text import Text

        console = Console(file=self._out, highlight=False)
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(None if share is None else 1.0, share or 0.0, width=BAR, pulse=share is None)
        line.add_row(bar, Text(text, no_wrap=True, overflow="ellipsis"))
        over = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
        console.print(over, LiveRender(line), end="")

    def clear(self) -> None:
        """Take the live line or the title away (also after an error)."""
        if self._on_screen:
            with suppress(OSError):  # the terminal may be gone
                self._out.write("\r\x1b[K" if self.mode == "live" else POP_TITLE)
                self._out.flush()
        self._on_screen = False


class Stages:
    """Shows how far the work before the first token is; called as `types.OnProgress` says.

    A live line goes away when its stage ends. Elsewhere a stage is shown when it has taken ten seconds.
    Between `start` and `stop`, as in a ``with`` block, a thread keeps the live line moving; where no stage is
    told of it shows ``doing`` and the seconds.

    Args:
        quiet: show nothing.
        doing: what is done in between.
    """

    def __init__(self, quiet: bool = False, doing: str = "working") -> None:
        self._line = Line("none" if quiet else "live" if is_live(sys.stderr) else "plain")
        self._doing = doing
        self._stage = ""
        self._started = 0.0
        self._first = self._done = self._total = 0
        self._lock, self._over = RLock(), Event()
        self._thread: Thread | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        with self._lock:
            if stage != self._stage:
                self.end()
                self._stage, self._started, self._first = stage, now, done
                self._line.begin()
            self._done, self._total = done, total
            if done >= total:
                self.end()
            elif self._line.due(now):
                self._line.show(self.line(stage, done, total, now), done / total)

    def _move(self, begun: float) -> None:
        """Draw the line again and again, until the block ends."""
        while not self._over.wait(LIVE_SECONDS):
            now = time.monotonic()
            with self._lock, suppress(OSError):  # the terminal may be gone
                if self._over.is_set():
                    return
                if self._stage:
                    text = self.line(self._stage, self._done, self._total, now)
                    self._line.show(text, self._done / self._total)
                else:
                    self._line.show(f"{self._doing}, {now - begun:.0f} s", None)

    def _alone(self, record: logging.LogRecord) -> bool:
        """A filter of log records, which begin a line of their own."""
        with self._lock:
            self._line.clear()
        return True

    def line(self, stage: str, done: int, total: int, now: float) -> str:
        """What is done and the time left, on one line."""
        what, unit, size = STAGES.get(stage, (stage, "", 1))
        rate = (done - self._first) / max(now - self._started, 1e-9)
        left = duration((total - done) / rate) if rate > 0 else "?"
        return f"{what}: {done // size:,} of {_units(total // size, unit)}, ETA {left}"

    def end(self) -> None:
        """Take the live line away; what is told next is a new stage."""
        with self._lock:
            self._line.clear()
            self._stage = ""

    def start(self) -> Stages:
        """Keep a live line moving from now on."""
        if self._line.mode == "live":
            logger.addFilter(self._alone)
            self._thread = Thread(target=self._move, args=(time.monotonic(),), daemon=True)
            self._thread.start()
        return self

    def stop(self, *exception: object) -> None:
        """Take the line away, for good."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            logger.removeFilter(self._alone)
        self.end()

    __enter__, __exit__ = start, stop


class Progress:
    """Counts the steps of one run and shows where it stands.

    Args:
        total: the most new tokens there can be; None: the text ends where the model ends it.
        quiet: show nothing.
        label: put before every line, e.g. the strategy.
        done: tokens that an earlier session has written.
        verbose: show figures of drafting too.
        at_length: as of :func:`summary`.

    Attributes:
        stages: shows the prefill, until the first :meth:`update`.
    """

    def __init__(
        self,
        total: int | None,
        quiet: bool = False,
        label: str = "",
        done: int = 0,
        verbose: bool = False,
        at_length: str | None = None,
    ) -> None:
        self._verbose, self._quiet, self._at_length = verbose, quiet, at_length
        self._total, self._label = total, f"{label}: " if label else ""
        self._line = Line("none" if quiet else mode_of(sys.stderr, sys.stdout))
        self.stages = Stages(quiet, "starting").start()
        self._started = time.monotonic()
        self._first = 0
        self.tokens = self._done = done
        self.steps = self.accepted = self.gamma = 0

    def update(self, step: Step) -> None:
        """Count a step; show a line when the last one is old enough."""
        now = time.monotonic()
        if not self.steps:  # the prompt's prefill ends here: the rate starts now
            self.stages.stop()
            self._started, self._first = now, self.tokens + len(step.token_ids)
        self.steps += 1
        self.tokens += len(step.token_ids)
        self.accepted += step.accepted
        self.gamma += step.gamma
        if self._line.due(now):
            self._line.show(self.line(now), self.tokens / self._total if self._total else None)

    def line(self, now: float) -> str:
        """Tokens, rate and the time left, on one line; tokens a pass and acceptance when verbose."""
        seconds = now - self._started
        rate = (self.tokens - self._first) / seconds if seconds > 0 else 0.0
        more = ""
        if self._verbose:
            more = (
                f"{(self.tokens - self._done) / max(self.steps, 1):.2f} tokens a pass, "
                f"α {self.accepted / max(self.gamma, 1):.2f}, "
            )
        if self._total is None:
            return f"{self._label}{counted(self.tokens, 'token')}, {more}{rate:.1f} tokens/s"
        left = duration((self._total - self.tokens) / rate) if rate > 0 else "?"
        done = f"{self._label}{self.tokens:,} of {counted(self._total, 'token')}"
        return f"{done}, {rate:.1f} tokens/s, {more}ETA {left}"

    def end(self) -> None:
        """Take the live line or the title away (also after an error)."""
        self.stages.stop()
        self._line.clear()

    def summary(self, result: Generation) -> None:
        """Print the figures of a finished run."""
        if not self._quiet:
            print(self._label + summary(result, self._verbose, self._at_length), file=sys.stderr, flush=True)


def is_live(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that takes escape codes."""
    plain = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
    return stream.isatty() and not plain


def mode_of(err: IO[str], out: IO[str]) -> str:
    """ "plain", "live", "title" or "none", see the module."""
    if not err.isatty():
        return "none" if one_place(out, err) else "plain"
    if not is_live(err):
        return "none" if out.isatty() else "plain"
    if not out.isatty():
        return "live"
    return "live" if one_place(out, err) is False else "title"


def duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def loop_words(loop: Loop) -> str:
    """Where a text repeats itself."""
    if loop.sign == "pattern":
        pattern = counted(loop.size, "token")
        return f"the text repeats itself from token {loop.start} on ({pattern} again and again)"
    return f"the text repeats itself from token {loop.start} on (its n-grams are nearly always accepted)"


def drafted(result: Generation) -> str:
    """What drafted, tokens a pass, and how many times as fast as passes without drafts that was, where there
    were some; "" where no draft was accepted."""
    counts = sorted(result.token_sources.items(), key=lambda source: -source[1])
    names = [DRAFTERS.get(name, name) for name, count in counts if count and name != "target"]
    if not names:
        return ""
    text = f"; {' and '.join(names)}: {result.metrics.mean_acceptance_length:.1f} tokens a pass"
    gain = (result.drafting or {}).get("gain")
    return text if gain is None else f"{text}, {gain:.2f} × plain"


def summary(result: Generation, verbose: bool = False, at_length: str | None = None) -> str:
    """One line about a finished run: tokens, seconds, why it ended; says so when it was not lossless.

    Args:
        verbose: passes, acceptance and why it was drafted so, too.
        at_length: what is said of an end at the length; None: that it was asked for.
    """
    m = result.metrics
    text = counted(len(result.token_ids), "token")
    text += f" in {m.seconds:.1f} s ({m.tokens_per_second:.1f} tokens/s)"
    if verbose or m.prefill_seconds >= READING_SECONDS:
        text += f", after {m.prefill_seconds:.1f} s for a prompt of {counted(result.prompt_tokens, 'token')}"
    if verbose and m.calibration_seconds >= MEASURING_SECONDS:
        text += f", {m.calibration_seconds:.1f} s of measuring passes (once per model)"
    endings = ENDINGS | ({} if at_length is None else {"length": at_length})
    text += f"; {endings.get(result.finish_reason, result.finish_reason)}"
    text += drafted(result)
    if verbose:
        text += (
            f"; {counted(m.steps, 'pass', 'passes')}, acceptance rate {m.acceptance_rate:.2f} "
            f"(n-grams {m.ngram_acceptance_rate:.2f})"
        )
        if result.drafting is not None:
            text += f"; {result.drafting['summary']}"
    if m.loop is not None:
        text += f"; {loop_words(m.loop)}"
    return text if result.lossless else f"{text}; NOT LOSSLESS (published acceptance rule)"


def _units(number: int, unit: str) -> str:
    """A number of a unit, which is in the plural, or MB."""
    return f"{number:,} MB" if unit == "MB" else counted(number, unit.removesuffix("s"))
