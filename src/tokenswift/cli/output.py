"""What a run leaves behind: the text as it comes, and one JSON record at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tokenswift.config import SamplingParams
from tokenswift.types import Generation, InputError, RunError


def check_writable(option: str, name: str | None) -> Path | None:
    """The path behind ``name``, after making sure that a file can be written there (nothing is left).

    Raises:
        InputError: naming the option, the path and the reason.
    """
    if name is None:
        return None
    path = Path(name).expanduser()
    trial = path.with_name(f".{path.name}.{os.getpid()}.trial") if path.name else path
    try:
        if path.is_dir() or not path.name:
            raise IsADirectoryError(0, "it is a folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(0, "no right to write")
        if not path.exists() or path.is_file():
            with trial.open("w") as handle:
                try:
                    handle.write("x" * 4096)
                    handle.flush()
                finally:
                    trial.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{option} {name} cannot be written ({reason}); valid: a writable file") from error
    return path


def check_outputs(output: str | None, record: str | None) -> tuple[Path | None, Path | None]:
    """Both paths of a run, writable and different."""
    paths = check_writable("--output", output), check_writable("--json", record)
    if paths[0] and paths[1] and paths[0].resolve() == paths[1].resolve():
        raise InputError(f"--output and --json are both {output}; valid: two different files")
    return paths


class TextSink:
    """Writes the text to standard output and to a file as it comes; the file is opened at the first write.

    Attributes:
        kept: where the text so far is, in words.
        written: characters that it has seen, those of :meth:`repeat` included.
    """

    def __init__(self, path: Path | None) -> None:
        self.written = 0
        self._path = path
        self._file: IO[str] | None = None
        self._last = "\n"

    @property
    def kept(self) -> str:
        """Where the text so far is, in words."""
        return (
            f"the text so far is in {self._path}" if self._file else "the text so far is on standard output"
        )

    def write(self, text: str) -> None:
        """Pass on a piece of text, flushed.

        Raises:
            RunError: the file cannot be written any more (no space left, say).
            BrokenPipeError: standard output was closed.
        """
        self._to_file(text)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text
        self.written += len(text)

    def repeat(self, text: str) -> None:
        """Write text of an earlier session: into the file alone."""
        if text:
            self._to_file(text)
        self.written += len(text)

    def _to_file(self, text: str) -> None:
        if self._path is not None:
            try:
                if self._file is None:
                    self._file = self._path.open("w", encoding="utf-8", newline="")
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                self._drop_file()
                reason = error.strerror or error
                raise RunError(
                    f"writing {self._path} failed ({reason}); what fitted in it was kept"
                ) from error

    def _drop_file(self) -> None:
        """Close the file after a failed write; what is still in its buffer cannot be written either."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def close(self) -> None:
        """End the last line on standard output and close the file."""
        if self._file is not None:
            self._file.close()
        if not self._last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._last = "\n"


def record_of(
    llm: Any, result: Generation, strategy: str, options: Mapping[str, Any], sampling: SamplingParams
) -> dict[str, Any]:
    """The JSON record of a run (``docs/cli.md`` describes the fields)."""
    import torch

    from tokenswift.runs.identity import versions

    metrics = asdict(result.metrics)
    return {
        "model": llm.name,
        "strategy": strategy,
        "strategy_options": {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
        "seed": sampling.seed,
        "sampling": asdict(sampling),
        "lossless": result.lossless,
        "prompt_tokens": result.prompt_tokens,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        **metrics,
        "distinct": list(result.metrics.distinct),
        "drafting": result.drafting,
        "device": llm.device,
        "dtype": llm.dtype,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole or not at all.

    Raises:
        RunError: no space left or no right to write; the text was on standard output all the same.
    """
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if target.exists() and not target.is_file():  # a pipe or a device
            target.write_text(text, encoding="utf-8")
            return
        try:
            with partial.open("w", encoding="utf-8") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"writing {path} failed ({error.strerror or error}); the text was written, the record was not"
        ) from error
