"""Conventions of the field: greedy by temperature, the model's own sampling, --json -, line ends,
names."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from tests.cli.conftest import Call
from tokenswift import SamplingParams
from tokenswift.cli.main import parsed
from tokenswift.config.sampling import CONTINUED, PAPER, sampling_over, settings_of

SHORT = ("--max-new-tokens", "6", "--ignore-eos", "--continue")


def record(cli: Call, *argv: object, stdin: Path | None = None) -> dict[str, object]:
    """The JSON record of a short run, from standard output (which holds nothing else)."""
    done = cli("generate", *argv, *SHORT, "--json", "-", "--quiet", stdin=stdin)
    assert done.code == 0, done
    assert done.err == ""
    assert done.out.count("\n") == 1
    return json.loads(done.out)


# ---- sampling ------------------------------------------------------------------------------------


def test_temperature_zero_is_greedy(cli: Call, tiny: Path) -> None:
    assert (
        SamplingParams(temperature=0)
        == SamplingParams(temperature=0.0)
        == SamplingParams(greedy=True)
    )
    zero = record(cli, "hello", "--model", tiny, "--temperature", "0")
    greedy = record(cli, "hello", "--model", tiny, "--greedy")
    sampled = record(cli, "hello", "--model", tiny)
    assert zero["token_ids"] == greedy["token_ids"] != sampled["token_ids"]
    assert zero["sampling"] == greedy["sampling"]


def test_a_preset_is_what_the_record_says(cli: Call, tiny: Path) -> None:
    """What is named goes over it."""
    sampling = sampling_over(CONTINUED, PAPER)
    written = record(cli, "hello", "--model", tiny, "--preset", "paper", "--top-p", "0.5")
    assert written["sampling"] == settings_of(replace(sampling, top_p=0.5))


# ---- input ---------------------------------------------------------------------------------------


def test_line_ends_of_prompts(cli: Call, tiny: Path, tmp_path: Path) -> None:
    """CRLF is LF; the one line end that shells and editors add is no part of the prompt; a second
    one is."""

    def tokens(content: bytes) -> tuple[object, object]:
        (tmp_path / "p").write_bytes(content)
        from_file = record(cli, "--model", tiny, "--prompt-file", tmp_path / "p")
        from_input = record(cli, "-", "--model", tiny, stdin=tmp_path / "p")
        assert from_file["token_ids"] == from_input["token_ids"]
        return from_file["prompt_tokens"], from_file["token_ids"]

    plain = tokens(b"one\ntwo")
    assert plain[0] == len("one\ntwo")
    assert (
        plain
        == tokens(b"one\ntwo\n")
        == tokens(b"one\r\ntwo\r\n")
        == tokens(b"\xef\xbb\xbfone\ntwo")
    )
    assert tokens(b"one\ntwo\n\n")[0] == len("one\ntwo\n")
    assert tokens(b"one\rtwo")[0] == len("one\rtwo")


# ---- words ---------------------------------------------------------------------------------------


def test_the_command_alone_says_how_to_begin(cli: Call) -> None:
    done = cli()
    assert done.code == 0
    assert done.err == ""
    assert done.out == cli("--help").out
    examples = [line for line in done.out.splitlines() if line.startswith("  tokenswift ")]
    assert len(examples) == 3
    for line in examples:
        parsed(shlex.split(line.partition("   ")[0])[1:])
