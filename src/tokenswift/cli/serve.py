"""``tokenswift serve``: an HTTP server with OpenAI's interface."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields
from importlib.util import find_spec
from signal import SIGINT, SIGTERM

from tokenswift.cli import options
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.idle_training import check_training, idle_training
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
    a page for the browser at /. It listens on this machine only, unless --host and --api-key-file
    are given. Ctrl-C or SIGTERM stops it between two steps, with exit code 0; a second one stops it
    at once."""
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    for name in ("fastapi", "uvicorn"):
        if find_spec(name) is None:
            raise InputError(
                f"{name} is not installed; valid: pip install 'tokenswift-exact[serve]'"
            )
    settings.keys()
    if settings.run_dir is not None:
        check_writable("--run-dir", settings.run_dir, "folder")
    options.check_model_options(args)
    check_training(args, settings)

    with held(settings) as address:  # one that cannot be had is refused before the model is loaded
        with loading(address, settings):
            llm = options.load_model(args)
            from tokenswift.serve.server import Server

            # compiles what the first client would wait for
            llm.generate([0, 0], 2, ignore_eos=True)
            idle = idle_training(args, settings, llm)
        server = Server(llm, settings, address, idle)
        server.run()
    answers = unfinished_answers(server.answers.left, settings.run_dir)
    if server.number not in (0, SIGTERM, SIGINT):
        raise Interrupted(server.number, answers)
    if server.number:  # the usual ends of a server, and no error
        logger.info("ended%s", f"; {answers}" if answers else "")
    return 0 if server.started else 1


def unfinished_answers(count: int, folder: str | None) -> str:
    """How the answers that are kept unfinished go on, in words; "" where there are none."""
    if not count:
        return ""
    answers = "1 answer is" if count == 1 else f"{count} answers are"
    return f"{answers} unfinished; continue with: tokenswift serve --run-dir {folder}"
