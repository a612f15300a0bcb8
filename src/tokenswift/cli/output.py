"""What a run leaves behind: the text as it comes, and one JSON record at the end."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tokenswift.cli.terminal import one_place, say, shown_on
from tokenswift.types import Generation, InputError, RunError
from tokenswift.words import counted

#: what ``--json -`` stands for
STDOUT = Path("-")
#: finish reason → in words
ENDINGS = {
    "length": "ended at the length asked for",
    "eos": "the model ended the text",
    "stop": "ended at a stop text",
    "loop": "stopped, it began to repeat itself",
}
#: source of tokens (`spec.drafters.base`) → in words
DRAFTERS = {
    "head": "heads",
    "ngram": "n-grams",
    "chain": "drafted chains",
    "eagle": "EAGLE-3",
    "recycle": "recycled rankings",
}
READING_SECONDS = 1.0  # that a prompt takes to be worth a word
logger = logging.getLogger("tokenswift")


@contextmanager
def _tried(option: str, name: str | Path, what: str) -> Iterator[None]:
    """Have what fails while entered said as a refusal."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{option} {name} cannot be written ({reason}); valid: a writable {what}") from error


def check_writable(option: str, name: str | Path | None, renamed: bool = False) -> Path | None:
    """The path behind ``name``, after making sure that a file can be written there (nothing is left).

    Args:
        renamed: the file is made beside its place and takes it by a rename: only a regular file (or
            nothing) may be there. Otherwise a pipe or a character device will do.
    Raises:
        InputError: naming the option, the path and the reason; its folder may be missing, which is not made.
    """
    if name is None:
        return None
    path = Path(name).expanduser()
    with _tried(option, name, "file"):
        kind = kind_of(path)
        if kind == "folder" or not path.name or str(name).endswith("/"):
            raise IsADirectoryError(0, "it is a folder")
        if kind not in ("", "file") and (renamed or kind not in ("pipe", "device")):
            raise OSError(0, f"it is a {kind}")
        if kind and not os.access(path, os.W_OK):
            raise PermissionError(0, "no right to write")
        place = Path(os.path.realpath(path)).parent
        if not place.exists():
            folder = place if path.parent.exists() else path.parent
            raise FileNotFoundError(0, f"there is no folder {folder}")
        if kind in ("", "file"):
            _try_to_write(place)
    return path


def check_folder(option: str, name: str | Path) -> Path:
    """The folder behind ``name``, after making sure that files can be written to it, or that it can be made.

    Raises:
        InputError: naming the option, the path and the reason.
    """
    path = Path(name).expanduser()
    with _tried(option, name, "folder"):
        place = Path(os.path.realpath(path))
        while not place.exists() and place != place.parent:
            place = place.parent
        if not str(name) or not place.is_dir():
            raise NotADirectoryError(0, f"{place} is not a folder" if str(name) else "it is empty")
        _try_to_write(place)
    return path


def _try_to_write(folder: Path) -> None:
    """Write a small file without a name's ever being taken; OSError where that fails."""
    with tempfile.TemporaryFile(dir=folder) as trial:
        trial.write(b"x" * 4096)
        trial.flush()


KINDS = {
    "file": Path.is_file,
    "folder": Path.is_dir,
    "pipe": Path.is_fifo,
    "device": Path.is_char_device,
    "block device": Path.is_block_device,
}


def kind_of(path: Path) -> str:
    """One of :data:`KINDS` ("device": by characters), or "socket"; "" for nothing."""
    return next((kind for kind, test in KINDS.items() if test(path)), "socket" if path.exists() else "")


def check_apart(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """See that no output is another output, or a file that is read.

    Args:
        outputs, inputs: option → path, or None where it is not given.
    Raises:
        InputError: naming both options.
    """
    seen: dict[str, Path] = {}
    for option, name in outputs.items():
        if name is None or str(name) == str(STDOUT):
            continue
        path = Path(name).expanduser()
        for other, taken in seen.items():
            if same_file(path, taken):
                raise InputError(f"{other} and {option} are both {name}; valid: two different files")
        for other, read in inputs.items():
            if read is not None and same_file(path, Path(str(read)).expanduser()):
                raise InputError(f"{option} {name} is the file of {other}; valid: another file")
        seen[option] = path


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths lead to one file, which need not be there yet (devices and pipes are no files)."""
    try:
        if kind_of(a) not in ("", "file", "folder"):
            return False
        return os.path.realpath(a) == os.path.realpath(b) or os.path.samefile(a, b)
    except (OSError, ValueError):
        return False


def files_of_run(folder: str | None) -> dict[str, Path]:
    """The files that a run's folder has or is about to have, for :func:`check_apart`."""
    if not folder:
        return {}
    place = Path(folder).expanduser()
    names = {"journal", "lock", "text.txt", "text.unfinished.txt"}
    names |= {path.name for pattern in ("journal.*", "text.*.txt") for path in place.glob(pattern)}
    return {f"the run's {name}": place / name for name in sorted(names)}


def check_record(
    name: str | None, inputs: Mapping[str, Any] | None = None, others: Mapping[str, Any] | None = None
) -> Path | None:
    """The path of --json, writable; :data:`STDOUT` for standard output.

    Args:
        inputs, others: files that are read and written besides, by option (see :func:`check_apart`).
    """
    path = STDOUT if name == str(STDOUT) else check_writable("--json", name)
    check_apart({**(others or {}), "--json": name}, inputs or {})
    return path


class TextSink:
    """Writes the text to standard output and to a file as it comes; the file is opened at the first write.

    Args:
        path: the file, if there is to be one.
        echo: write to standard output too.
        raw: let control characters reach a terminal.

    Attributes:
        kept: where the text so far is, in words.
        written: characters that it has seen, those of :meth:`repeat` included.
    """

    def __init__(self, path: Path | None, echo: bool = True, raw: bool = False) -> None:
        self.written = 0
        self.kept = "the text so far is on standard output" if echo else "no text was kept"
        self._path, self._echo, self._raw = path, echo, raw
        self._file: IO[str] | None = None
        self._last = "\n"

    def write(self, text: str) -> None:
        """Pass on a piece of text, flushed.

        Raises:
            RunError: the file cannot be written any more (no space left, say).
            OSError: as :func:`say`.
        """
        self.repeat(text)
        if text and self._echo:
            if self._last.endswith("\n") and one_place(sys.stdout, sys.stderr):
                logger.addFilter(self._on_a_line_of_its_own)
            self._show(shown_on(sys.stdout, text, self._raw))

    def repeat(self, text: str) -> None:
        """Write text of an earlier session: into the file alone."""
        self.written += len(text)
        if self._path is None:
            return
        try:
            if self._file is None:
                self._file = self._path.open("w", encoding="utf-8", newline="")
                self.kept = f"the text so far is in {self._path}"
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is still in its buffer cannot be written either
                if self._file is not None:
                    self._file.close()
            name, self._path, self._file = self._path, None, None
            reason = error.strerror or error
            raise RunError(f"writing {name} failed ({reason}); what fitted in it was kept") from error

    def _show(self, text: str) -> None:
        self._last = text
        try:
            say(text)
        except OSError:
            self._last = "\n"
            if self._file is None:
                self.kept = "what fitted of the text is on standard output"
            raise

    def _on_a_line_of_its_own(self, record: logging.LogRecord) -> bool:
        """A filter of log records that go where the text goes: they begin a line."""
        if not self._last.endswith("\n"):
            self._show("\n")
        return True

    def close(self) -> None:
        """End the last line on standard output and close the file."""
        logger.removeFilter(self._on_a_line_of_its_own)
        if self._file is not None:
            self._file.close()
        if not self._last.endswith("\n"):
            self._show("\n")


def give(record: Path | None, made: Mapping[str, Any], text: str) -> None:
    """Write a record where one is asked for, and the text unless the record takes its place.

    Raises: as :func:`write_json`.
    """
    if record is not None:
        write_json(record, made)
    if record != STDOUT:
        say(text + "\n")


def write_json(path: Path, *records: Mapping[str, Any]) -> None:
    """Write records, a line each; into a file whole or not at all.

    Raises:
        RunError: no space left or no right to write; what was on standard output stays there.
        OSError: as :func:`say`.
    """
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    write_text(path, "".join(lines))


def write_text(path: Path, text: str) -> None:
    """Write a whole text: to standard output, into a pipe or a device, or over a regular file or none.

    Raises: as :func:`write_json`.
    """
    if path == STDOUT:
        say(shown_on(sys.stdout, text))  # JSON in every case: it stays the same JSON
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if kind_of(target) not in ("", "file"):
            target.write_text(text, encoding="utf-8")
            return
        try:
            with partial.open("w", encoding="utf-8", newline="") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"writing {path} failed ({error.strerror or error}); what was there before was kept"
        ) from error


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
        verbose: prefill, passes, acceptance and why it was drafted so, too.
        at_length: what is said of an end at the length; None: that it was asked for.
    """
    m = result.metrics
    text = counted(len(result.token_ids), "token")
    text += f" in {m.seconds:.1f} s ({m.tokens_per_second:.1f} tokens/s)"
    if verbose or m.prefill_seconds >= READING_SECONDS:
        text += f", after {m.prefill_seconds:.1f} s for a prompt of {counted(result.prompt_tokens, 'token')}"
    endings = ENDINGS | ({} if at_length is None else {"length": at_length})
    text += f"; {endings.get(result.finish_reason, result.finish_reason)}{drafted(result)}"
    if verbose:
        text += f"; {counted(m.steps, 'pass', 'passes')}, acceptance rate {m.acceptance_rate:.2f} "
        text += f"(n-grams {m.ngram_acceptance_rate:.2f})"
        if result.drafting is not None:
            text += f"; {result.drafting['summary']}"
    if m.loop is not None:
        pattern = f"{counted(m.loop.size, 'token')} again and again"
        how = pattern if m.loop.sign == "pattern" else "its n-grams are nearly always accepted"
        text += f"; the text repeats itself from token {m.loop.start} on ({how})"
    return text if result.lossless else f"{text}; NOT LOSSLESS (published acceptance rule)"
