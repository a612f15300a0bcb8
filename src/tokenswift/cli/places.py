"""No output of a command may be one of its inputs, or another output: looked at before anything is
loaded or written.

Files are the same where the system says so (a link, a hard link, another way to write the path),
and also where their resolved paths are the same, as of a journal that is not there yet.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenswift.loader.default_model import cache_dir, shipped_files, trained_files
from tokenswift.loader.find import GGUF_FILE, HEADS, HUB_ID, cached
from tokenswift.loader.named_models import NAMED_MODELS
from tokenswift.types import InputError

#: options that name a file, or a folder of files, that is read
READ = (
    *("prompt_file", "prompts", "json_schema", "grammar", "api_key_file", "data"),
    *("model", "heads", "eagle", "draft_model"),
)
#: options that name a file that is written, and folders that files are written in
WRITTEN = ("output", "json", "text", "out")
FOLDERS = ("run_dir", "work", "out")
#: files of a run that hold its text; all are the run's own
OF_A_RUN = ("journal", "lock", "text.txt", "text.old")
#: words that stand for files of the package, and of what was trained
SHIPPED = {"heads": HEADS, "eagle": ".gguf"}
MOST_FILES = 10_000  # of a folder that is read


@dataclass(frozen=True)
class Input:
    """What a command reads.

    Attributes:
        option: that names it, as it is typed.
        path: a file, or a folder.
    """

    option: str
    path: Path

    def files(self) -> Iterator[Path]:
        """The file, or those of the folder."""
        if not os.path.isdir(self.path):
            yield self.path
            return
        pattern = "*.txt" if self.option == "--data" else "*"
        yield from islice(self.path.rglob(pattern), MOST_FILES)


@dataclass(frozen=True)
class Output:
    """A file that a command writes.

    Attributes:
        option: that names it.
        path: of the file.
        typed: the path as the command line has it.
    """

    option: str
    path: Path
    typed: str


def check_apart(args: argparse.Namespace) -> None:
    """See that a command writes over nothing that it reads, and nothing twice.

    Args:
        args: options of any command, before it runs.
    Raises:
        InputError: naming both options and the file.
    """
    outputs = list(_outputs(args))
    folders = list(_folders(args))
    if not outputs and not folders:
        return
    inputs = list(_inputs(args))
    for number, output in enumerate(outputs):
        for source in inputs:
            _check_file(output, source)
        for other in outputs[:number]:
            if is_same(output.path, other.path):
                both = f"{other.option} and {output.option} are both {output.typed}"
                raise InputError(f"{both}; valid: two different files")
    for folder in folders:
        for source in inputs:
            if source.option in ("--model", "--heads", "--eagle") and is_same(
                folder.path, source.path
            ):
                both = f"{source.option} and {folder.option} are both {folder.typed}"
                raise InputError(f"{both}; valid: two different folders")


def check_written_apart(args: argparse.Namespace, inputs: Iterable[Input]) -> None:
    """See that a command writes over none of the inputs that are known late: those of a journal.

    Raises:
        InputError: naming both.
    """
    for source in inputs:
        for output in _outputs(args):
            _check_file(output, source)


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file or folder, there or not."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return os.path.realpath(one) == os.path.realpath(other)


def _check_file(output: Output, source: Input) -> None:
    """Refuse an output that is an input, or one of its files."""
    if is_same(output.path, source.path):
        both = f"{source.option} and {output.option} are both {output.typed}"
        raise InputError(f"{both}; valid: two different files")
    if os.path.exists(output.path) and any(is_same(output.path, file) for file in source.files()):
        raise InputError(
            f"{output.option} {output.typed} is a file of {source.option} {source.path}; "
            f"valid: another file"
        )


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _path(args: argparse.Namespace, name: str) -> Path | None:
    """The path that an option names; None where it names none."""
    value = getattr(args, name, None)
    if not isinstance(value, str | Path) or str(value) in ("", "-") or "\0" in str(value):
        return None
    return Path(os.path.expanduser(value))


def _passes(path: Path) -> bool:
    """Whether what is written there overwrites nothing: a pipe or a device."""
    return path == Path("-") or (
        os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    )


def _outputs(args: argparse.Namespace) -> Iterator[Output]:
    """The files that a command writes."""
    for name in WRITTEN:
        path = _path(args, name)
        if path is not None and not _passes(path) and not os.path.isdir(path):
            yield Output(_dashed(name), path, str(getattr(args, name)))


def _folders(args: argparse.Namespace) -> Iterator[Output]:
    """The folders that a command writes files in, as far as they are there."""
    for name in FOLDERS:
        path = _path(args, name)
        if path is not None and os.path.isdir(path):
            yield Output(_dashed(name), path, str(getattr(args, name)))


def _inputs(args: argparse.Namespace) -> Iterator[Input]:
    """What a command reads, by option; files of a cache too."""
    for name in READ:
        option = _dashed(name)
        path = _path(args, name)
        if path is None:
            continue
        if os.path.exists(path):
            yield Input(option, path)
        else:
            yield from _in_caches(args, name, str(path))
    yield from _redirected()
    for name in ("run_dir", "folder"):  # a run's own files, those to come too
        yield from _of_runs(args, name)


def _in_caches(args: argparse.Namespace, name: str, word: str) -> Iterator[Input]:
    """The files that a word, an alias or a hub id stands for. They are looked for only where an
    output would replace a file."""
    if not any(os.path.exists(output.path) for output in _outputs(args)):
        return
    option = _dashed(name)
    if word in NAMED_MODELS:
        yield Input(option, cache_dir() / word)
    elif name in SHIPPED and word != "none" and not HUB_ID.fullmatch(word):
        for file in (*shipped_files(SHIPPED[name]), *trained_files(SHIPPED[name])):
            yield Input(option, file)
    elif HUB_ID.fullmatch(word) or GGUF_FILE.fullmatch(word):
        folder = cached(word)
        if folder is not None:
            yield Input(option, folder)


def _redirected() -> Iterator[Input]:
    """A file at standard input."""
    path = Path("/dev/stdin")
    if os.path.isfile(path):
        yield Input("standard input", path)


def _of_runs(args: argparse.Namespace, name: str) -> Iterator[Input]:
    """The files of the run that an option names, or of those in a folder."""
    folder = _path(args, name)
    if folder is None:
        return
    option = "--run-dir" if name == "run_dir" else "the run"
    for file in OF_A_RUN:
        # `runs DIR --text DIR/text.txt` writes what the run itself would
        if name == "run_dir" or file in ("journal", "lock"):
            yield Input(option, folder / file)
    if name == "folder" and os.path.isdir(folder):
        for journal in islice(folder.glob("*/journal"), MOST_FILES):
            yield Input(option, journal)
