"""`tokenswift quantize`: a model as a GGUF file of few bits, which llama.cpp reads too."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, option
from tokenswift.cli.output import add_json_option, check_apart, check_record, check_writable, write_json
from tokenswift.cli.progress import Stages
from tokenswift.cli.signals import Signals
from tokenswift.config import check_choice
from tokenswift.loader.load import check_name
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
KINDS = ("q8_0", "q4_0", "q4_1")
MEGA = 1_000_000


@dataclass(frozen=True)
class Quantisation:
    """What is written.

    Attributes:
        src: alias, folder or hub id of a Llama, Qwen2, Qwen3 or Mistral checkpoint in safetensors files, a
            GGUF file, or owner/name:file.gguf of the hub
        dst: file to write, in a folder that is there; its name ends in .gguf
        weights: what the projections are stored as: q8_0, q4_0 or q4_1
        head_weights: what the embedding and the LM head are stored as, which suffer most from few bits: q8_0,
            q4_0 or q4_1
        force: replace a file that is there
    """

    src: str = option(metavar="SRC", place=True)
    dst: str = option(metavar="DST", place=True)
    weights: str = option("q8_0", "W")
    head_weights: str = option("q8_0", "W")
    force: bool = option(False)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a model as a GGUF file of few bits",
        description="Writes a GGUF file for --model and for llama.cpp: matrices in 8 or 4 bits (the "
        "embedding and the LM head in q8_0 unless --head-weights says otherwise), norms and biases in "
        "float32, with config, tokenizer and chat template. It is another model, which writes other texts.",
    )
    add_options(parser, Quantisation)
    add_json_option(parser)
    add_options(parser, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Check, write, and say what was written."""
    check_choice("weights", args.weights, KINDS)
    check_choice("head_weights", args.head_weights, KINDS)
    check_name(args.src)
    if not args.dst.lower().endswith(".gguf"):
        raise InputError(f"DST is {args.dst!r}; valid: a file name that ends in .gguf")
    path = check_writable("DST", args.dst, renamed=True)
    assert path is not None
    check_apart({"DST": path, "--json": args.json}, _files_of(args.src))
    if path.exists() and not args.force:
        raise InputError(f"DST {args.dst} exists; valid: another name, or --force")
    record = check_record(args.json, _files_of(args.src))
    logger.info("reading %s", args.src)

    from tokenswift.loader.gguf.write import quantize

    started = time.monotonic()
    with Signals(), Stages(args.quiet) as stages:
        done = quantize(args.src, path, args.weights, args.head_weights, stages)
    seconds = time.monotonic() - started
    for note in done.notes:
        logger.warning("%s", note)
    kinds = dict.fromkeys((args.weights, args.head_weights))
    logger.info(
        "wrote %s: %s, %s MB of %s MB, in %.1f s",
        args.dst,
        " and ".join(kinds),
        f"{done.bytes_out / MEGA:,.1f}",
        f"{done.bytes_in / MEGA:,.1f}",
        seconds,
    )
    if record is not None:
        found = {
            "model": args.src,
            "file": str(path),
            "weights": args.weights,
            "head_weights": args.head_weights,
            "tensors": done.tensors,
            "bytes_in": done.bytes_in,
            "bytes_out": done.bytes_out,
            "seconds": seconds,
            "notes": list(done.notes),
        }
        write_json(record, found)
    return 0


def _files_of(src: str) -> dict[str, Path]:
    """The files of a model on this machine, as far as its name tells."""
    path = Path(src).expanduser()
    if path.is_dir():
        return {f"SRC, {file.name}": file for file in sorted(path.iterdir()) if file.is_file()}
    return {"SRC": path} if path.is_file() else {}
