"""What a run leaves behind: its text, records, summary."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tokenswift.checks import counted
from tokenswift.cli.terminal import say
from tokenswift.files import line_of, replacing
from tokenswift.types import Generation, InputError, Metrics, RunError

#: what ``--json -`` stands for
STDOUT = Path("-")
#: finish reason → in words
ENDINGS = {
    "length": "stopped at its maximum length; {length_setting} sets another",
    "eos": "the model ended the text",
    "stop": "ended at a stop text",
    "loop": "stopped, because it repeats itself",
}
LENGTH_OPTION = "--max-new-tokens"
#: source of tokens (`types.SOURCES`) → what drafted them, in words
DRAFTED_BY = {
    "head": "draft heads",
    "ngram": "earlier text",
    "chain": "a draft model",
    "grammar": "the grammar",
    "eagle": "the trained drafter",
    "recycle": "earlier choices",
}
TOKENS_FOR_RATIO = 300  # tokens of a text whose speed-up is more than noise
READING_SECONDS = 1.0  # that a prompt takes to be worth a word


def check_writable(option: str, name: str | Path, kind: str = "file") -> Path:
    """The path behind ``name``, after making sure that it can be written (nothing is left).

    Args:
        kind: "file" (a pipe, a character device or :data:`STDOUT` will do), "regular file" (whose
            place another takes), or "folder" (which need not be there yet).
    Raises:
        InputError: naming the option, the path and the reason; a file's folder may be missing,
            which is not made.
    """
    path = Path(name).expanduser()
    if path == STDOUT:
        return path
    try:
        if not str(name):
            raise OSError(0, "it is empty")
        if kind == "folder":
            parents = (path, *path.absolute().parents)
            TemporaryFile(dir=next(parent for parent in parents if parent.exists())).close()
        elif kind == "regular file" or not (path.is_fifo() or path.is_char_device()):
            if path.exists() and not path.is_file():
                raise OSError(0, "it is not a regular file")
            TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
            if path.exists():
                path.open("ab").close()
    except (OSError, ValueError) as error:
        why = f"{line_of(error)}); valid: a writable {kind}"
        raise InputError(f"{option} {name} cannot be written ({why}") from error
    return path


def check_record(name: str | None, option: str = "--json") -> Path | None:
    """The path of --json, writable, if there is one."""
    return None if name is None else check_writable(option, name)


class TextSink:
    """Writes the text to standard output and to a file as it comes; the file is opened at the first
    write.

    Args:
        path: the file, if there is to be one.
        echo: write to standard output too.

    Attributes:
        text: all text so far.
        location: where it is, in words.
    """

    def __init__(self, path: Path | None, echo: bool = True) -> None:
        self.text = ""
        self.location = "the text so far is on standard output" if echo else "no text was kept"
        self._path = path
        self._echo = echo
        self._last_echoed = "\n"
        self._file: IO[str] | None = None

    def write(self, text: str, again: bool = False) -> None:
        """Pass on a piece of text, flushed.

        Args:
            again: an earlier session has shown it: for the file alone.
        Raises:
            RunError: the file cannot be written any more (no space left, say).
            BrokenPipeError: as :func:`say`.
        """
        self.text += text
        if self._path is not None:
            self._append(self._path, text)
        shown = self.shown(text)
        if shown and self._echo and not again:
            self._last_echoed = "\n"  # until it is written
            say(shown)
            self._last_echoed = shown

    def shown(self, text: str) -> str:
        """What standard output gets of a piece of text."""
        return text

    def _append(self, path: Path, text: str) -> None:
        try:
            if self._file is None:
                self._file = path.open("w", encoding="utf-8", newline="")
                self.location = f"the text so far is in {path}"
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"writing {path} failed ({line_of(error)}); what fitted in it was kept"
            ) from error

    def close(self) -> None:
        """End the last line on standard output and close the file."""
        if self._file is not None:
            self._file.close()
        if not self._last_echoed.endswith("\n"):
            self._last_echoed = "\n"
            say("\n")


def write_results(path: Path | None, record: Mapping[str, object], text: str) -> None:
    """Write a record where the command line wants one, and the text unless the record takes its
    place.

    Args:
        path: of the record; None: there is to be none.
    Raises: as :func:`write_json`.
    """
    if path is not None:
        write_json(path, record)
    if path != STDOUT:
        say(text + "\n")


def write_json(path: Path, *records: Mapping[str, object]) -> None:
    """Write records, a line each; a file gets all of them or stays as it was.

    Raises:
        RunError: no space left or no right to write; what was on standard output stays there.
        BrokenPipeError: as :func:`say`.
    """
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    write_text(path, "".join(lines))


def write_text(path: Path, text: str) -> None:
    """Write a text: to standard output, into a pipe or a device, or over a regular file or
    none.

    Raises: as :func:`write_json`.
    """
    if path == STDOUT:
        say(text)
        return
    try:
        if path.is_fifo() or path.is_char_device():
            path.write_text(text, "utf-8", "replace", "")
            return
        with replacing(path) as part:
            part.write_text(text, "utf-8", "replace", "")
    except OSError as error:
        raise RunError(
            f"writing {path} failed ({line_of(error)}); what was there before was kept"
        ) from error


def drafting_summary(result: Generation) -> str:
    """Tokens a step, how many times as fast as without drafts that was, where the text is long
    enough to tell, and what drafted, most first; "" where no draft was accepted."""
    most_first = sorted(result.token_sources.items(), key=lambda source: -source[1])
    names = [DRAFTED_BY[name] for name, count in most_first if count and name != "target"]
    if not names:
        return ""
    text = f"; {result.metrics.mean_acceptance_length:.1f} tokens a step"
    gain = (result.drafting or {}).get("gain")
    if gain is not None and len(result.token_ids) >= TOKENS_FOR_RATIO:
        text += f"; {gain:.1f} times as fast as without drafts"
    return f"{text}; drafts from {enumeration(list(dict.fromkeys(names)))}"


def enumeration(names: Sequence[str]) -> str:
    """Names in a sentence: "a, b and c"."""
    return " and ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])


def ending(reason: str, length_setting: str = LENGTH_OPTION) -> str:
    """Why a text ended, in words.

    Args:
        length_setting: what sets another maximum length.
    """
    return ENDINGS[reason].format(length_setting=length_setting)


def place_of_loop(metrics: Metrics) -> str:
    """Where a text repeats itself, and how much of it; "" where it does not."""
    if metrics.loop is None:
        return ""
    pattern = f"{counted(metrics.loop.size, 'token')} again and again"
    return f" from token {metrics.loop.start} on ({pattern})"


def summary(result: Generation, verbose: bool = False, length_setting: str = LENGTH_OPTION) -> str:
    """One line about a finished run: tokens, seconds, why it ended; says so when it was not
    lossless.

    Args:
        verbose: prefill, passes, acceptance and why it was drafted so, too.
        length_setting: as of :func:`ending`.
    """
    metrics = result.metrics
    text = counted(len(result.token_ids), "token")
    text += f" in {metrics.seconds:.1f} s ({metrics.tokens_per_second:.1f} tokens/s)"
    if verbose or metrics.prefill_seconds >= READING_SECONDS:
        prompt = counted(result.prompt_tokens, "token")
        text += f", after {metrics.prefill_seconds:.1f} s for a prompt of {prompt}"
    stopped_by_loop = result.finish_reason == "loop" and metrics.loop is not None
    text += f"; {ending(result.finish_reason, length_setting)}"
    if stopped_by_loop:
        text += place_of_loop(metrics)
    text += drafting_summary(result)
    if verbose:
        text += f"; {counted(metrics.steps, 'pass', 'passes')}"
        text += f", acceptance rate {metrics.acceptance_rate:.2f} "
        text += f"(n-grams {metrics.ngram_acceptance_rate:.2f})"
        if result.drafting is not None:
            text += f"; {result.drafting['summary']}"
    if metrics.loop is not None and not stopped_by_loop:
        text += f"; the text repeats itself{place_of_loop(metrics)}"
    if metrics.litany is not None and not stopped_by_loop:
        text += f"; from token {metrics.litany.start} on it has few new words, and its sentences"
        text += f' have one form ("{metrics.litany.opening} …")'
    return text if result.lossless else f"{text}; NOT LOSSLESS (published acceptance rule)"
