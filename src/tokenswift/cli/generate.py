"""``tokenswift generate``: one text, streamed."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.output import TextSink, check_outputs, record_of, write_json
from tokenswift.cli.progress import Progress
from tokenswift.config import check_integer
from tokenswift.models.rope import parse_rope_scaling
from tokenswift.types import Generation, InputError, RunError, Step

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="write a text",
        description="Write a text. It streams to standard output; progress and summary go to standard error.",
        epilog="Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted (text so far is kept).",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text to go on from; - reads standard input"
    )
    parser.add_argument(
        "--prompt-file", metavar="F", help="UTF-8 file with the prompt; - reads standard input"
    )
    parser.add_argument(
        "--prompt-ids",
        type=options.token_ids,
        metavar="1,2,3",
        help="token ids instead of text, 0 or more each",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=options.integer,
        default=200,
        metavar="N",
        help="tokens to write at most, at least 1; default: %(default)s",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text, which is left out; may be given several times; default: none",
    )
    parser.add_argument(
        "--rope-scaling",
        default="none",
        metavar="R",
        help="for texts beyond the model's positions: yarn (room for 131,072 tokens), yarn:4 (four times "
        "the positions) or none; default: %(default)s",
    )
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    options.add_sampling_options(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--output", metavar="FILE", help="write the text there too, as it comes")
    group.add_argument(
        "--json", metavar="FILE", help="write one record there: tokens, text, figures, versions"
    )
    group.add_argument("--quiet", action="store_true", help="nothing on standard error except errors")


def run(args: argparse.Namespace) -> int:
    """Generate; cheap checks come before the model is loaded."""
    prompt = options.prompt_from(args)
    check_integer("max_new_tokens", args.max_new_tokens, 1)
    sampling = options.sampling_from(args)
    parse_rope_scaling(args.rope_scaling)
    if "" in args.stop:
        raise InputError("stop is ''; valid: text of at least one character")
    options.check_model_options(args)
    output, record = check_outputs(args.output, args.json)
    strategy_options = options.strategy_options_from(args)
    if strategy_options.get("acceptance") == "published":
        logger.warning("the published acceptance rule is not lossless: the text differs from plain decoding")
    llm = options.load_model(args, args.rope_scaling)
    logger.info("%s, %s on %s, %s", llm.name, llm.dtype, llm.device, args.strategy)

    sink = TextSink(output)
    result = stream(
        llm,
        prompt,
        sink,
        Progress(args.max_new_tokens, args.quiet),
        max_new_tokens=args.max_new_tokens,
        strategy=args.strategy,
        strategy_options=strategy_options,
        sampling=sampling,
        ignore_eos=args.ignore_eos,
        stop=tuple(args.stop),
    )
    if record is not None:
        write_json(record, record_of(llm, result, args.strategy, strategy_options, sampling))
    return 0


def stream(llm: Any, prompt: str | list[int], sink: TextSink, progress: Progress, **call: Any) -> Generation:
    """``llm.generate(prompt, **call)`` with its text and progress shown; the summary at the end.

    Raises:
        KeyboardInterrupt, RunError: saying what was kept of the text.
    """

    def on_step(step: Step) -> None:
        sink.write(step.text)
        progress.update(step)

    try:
        result = llm.generate(prompt, **call, on_step=on_step)
        sink.write("")  # makes the file even when there was no text
    except KeyboardInterrupt:
        progress.end()
        raise KeyboardInterrupt(f"{progress.tokens} tokens were written, {sink.kept}") from None
    except (InputError, RunError, OSError):
        progress.end()
        raise
    except Exception as error:
        progress.end()
        what = " ".join(str(error).split())[:200]
        raise RunError(
            f"the run failed after {progress.tokens} tokens ({type(error).__name__}: {what}); {sink.kept}"
        ) from error
    finally:
        sink.close()
    progress.end()
    progress.summary(result)
    return result
