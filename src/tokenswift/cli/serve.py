"""``tokenswift serve``: an HTTP server with OpenAI's interface."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields
from importlib.util import find_spec
from signal import SIGTERM

from tokenswift.cli import options
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.results import check_writable
from tokenswift.cli.signals import Interrupted
from tokenswift.serve.settings import Settings, held, loading
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "serve", run, "serve a model over HTTP, with OpenAI's interface")
    add_options(parser.add_argument_group("server"), Settings)
    options.add_model_options(parser)
    add_options(parser, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/responses (also in the
    background; a client that was cut off resumes where it was), /v1/models, /health, /metrics, and
    a page at /. It listens on this machine only, unless --host and --api-key-file are given.
    SIGTERM or Ctrl-C stops it between two steps, a second one at once; the exit code after SIGTERM
    is 0."""
    settings = Settings(**{one.name: getattr(args, one.name) for one in fields(Settings)})
    for name in ("fastapi", "uvicorn"):
        if find_spec(name) is None:
            raise InputError(
                f"{name} is not installed; valid: pip install 'tokenswift-exact[serve]'"
            )
    settings.keys()
    if settings.run_dir is not None:
        check_writable("--run-dir", settings.run_dir, "folder")
    options.check_model_options(args)

    with held(settings) as taken:  # what cannot be had is said before the model is loaded
        with loading(taken, settings):
            llm = options.load_model(args)
            from tokenswift.serve.app import Server

            llm.generate(
                [0, 0], 2, ignore_eos=True
            )  # compiles what the first client would wait for
        server = Server(llm, settings, taken)
        server.run()
    left = server.answers.left
    they = "1 answer is kept; it goes" if left == 1 else f"{left} answers are kept; they go"
    kept = f"{they} on with: tokenswift serve --run-dir {settings.run_dir}" if left else ""
    if server.number not in (0, SIGTERM):
        raise Interrupted(server.number, kept)
    if server.number:  # the usual end of a server, and no error
        logger.info("ended%s", f"; {kept}" if kept else "")
    return 0 if server.started else 1
