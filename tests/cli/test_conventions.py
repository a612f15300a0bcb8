"""Conventions of the field: greedy by temperature, the model's own sampling, --json -, line ends, names."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GenerationConfig

from tests.cli.conftest import Call
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, InputError, SamplingParams
from tokenswift.cli.errors import at_most, is_out_of_memory, with_option_name
from tokenswift.cli.main import build_parser, subparsers_of

SHORT = ("--max-new-tokens", "6", "--ignore-eos", "--raw")


def record(cli: Call, *argv: object, stdin: Path | None = None) -> dict[str, object]:
    """The JSON record of a short run, from standard output (which holds nothing else)."""
    done = cli("generate", *argv, *SHORT, "--json", "-", "--quiet", stdin=stdin)
    assert done.code == 0 and done.err == "" and done.out.count("\n") == 1, done
    return json.loads(done.out)


# ---- sampling ---------------------------------------------------------------------------------------------


def test_temperature_zero_is_greedy(cli: Call, tiny: Path) -> None:
    assert SamplingParams(temperature=0) == SamplingParams(temperature=0.0) == SamplingParams(greedy=True)
    zero = record(cli, "hello", "--model", tiny, "--temperature", "0")
    greedy = record(cli, "hello", "--model", tiny, "--greedy")
    sampled = record(cli, "hello", "--model", tiny)
    assert zero["token_ids"] == greedy["token_ids"] != sampled["token_ids"]
    assert zero["sampling"] == greedy["sampling"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--temperature", "0", "--top-p", "0.9"), "--top-p without effect"),
        (("--greedy", "--temperature", "0.7", "--top-k", "5"), "--temperature and --top-k without effect"),
        (("--greedy", "--top-p", "1", "--min-p", "0", "--repetition-penalty", "1.1"), ""),
        (("--top-p", "0.9"), ""),
    ],
)
def test_filters_of_greedy_decoding_are_named(
    cli: Call, tiny: Path, argv: tuple[str, ...], words: str
) -> None:
    done = cli("generate", "hello", "--model", tiny, *SHORT, *argv)
    assert done.code == 0 and ("without effect" in done.err) == bool(words) and words in done.err


@pytest.fixture
def with_settings(tmp_path: Path) -> Path:
    """A tiny model with a generation_config.json that names sampling settings."""
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5, top_k=7)
    model.save_pretrained(tmp_path / "own")
    tiny_tokenizer().save_pretrained(tmp_path / "own")
    return tmp_path / "own"


def test_the_models_own_sampling(cli: Call, with_settings: Path, tiny: Path) -> None:
    argv = ("generate", "hello", "--model", with_settings, "--sampling", "model", *SHORT, "--json", "j")
    done = cli(*argv, "--top-k", "3", "--seed", "5")
    assert done.code == 0
    assert "generation_config.json: temperature 0.5; the rest is off" in done.err
    made = json.loads(Path("j").read_text())["sampling"]
    assert made == {
        "temperature": 0.5, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "eta_cutoff": 0.0,
        "repetition_penalty": 1.0, "penalty_window": 1024, "seed": 5, "greedy": False,
    }  # fmt: skip
    llm = LLM(with_settings)
    assert llm.model_sampling(seed=5, top_k=3) == SamplingParams(**made)
    refused = cli("generate", "hello", "--model", tiny, "--sampling", "model", *SHORT)
    assert refused.code == 2 and "names no setting of it; valid: default" in refused.err
    with pytest.raises(InputError, match="names no setting"):
        LLM(tiny).model_sampling()


# ---- input ------------------------------------------------------------------------------------------------


def test_line_ends_of_prompts(cli: Call, tiny: Path, tmp_path: Path) -> None:
    """CRLF is LF; the one line end that shells and editors add is no part of the prompt; a second one is."""

    def tokens(content: bytes) -> tuple[object, object]:
        (tmp_path / "p").write_bytes(content)
        from_file = record(cli, "--model", tiny, "--prompt-file", tmp_path / "p")
        from_input = record(cli, "-", "--model", tiny, stdin=tmp_path / "p")
        assert from_file["token_ids"] == from_input["token_ids"]
        return from_file["prompt_tokens"], from_file["token_ids"]

    plain = tokens(b"one\ntwo")
    assert plain[0] == len("one\ntwo")
    assert plain == tokens(b"one\ntwo\n") == tokens(b"one\r\ntwo\r\n") == tokens(b"\xef\xbb\xbfone\ntwo")
    assert tokens(b"one\ntwo\n\n")[0] == len("one\ntwo\n")
    assert tokens(b"one\rtwo")[0] == len("one\rtwo")


# ---- output -----------------------------------------------------------------------------------------------


def test_json_on_standard_output(cli: Call, tiny: Path) -> None:
    made = record(cli, "hello", "--model", tiny)
    assert made["prompt_tokens"] == 5
    shown = cli("models", "--known", "--json", "-").out
    assert json.loads(shown)["known"][0]["name"]
    assert cli("models", "--known", "--json").out == shown
    done = cli("models", "--known", "--json", "s.json")
    assert done.out.startswith("model ") and Path("s.json").read_text() == shown


@pytest.mark.slow
def test_closed_streams(tiny: Path) -> None:
    command = f"{sys.executable} -m tokenswift generate hi --model {tiny} --max-new-tokens 2 --raw --quiet"
    closed = "error: standard output is closed; nothing was begun\n"
    for how, expected in (
        (">&-", (1, closed)),
        ("2>&-", (0, "")),
        ("</dev/null >&- 2>&-", (1, "")),
        (f"--output {tiny / 't'} >&-", (1, closed)),
    ):
        done = subprocess.run(f"{command} {how}", shell=True, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == expected, how
    assert not (tiny / "t").exists()
    done = subprocess.run(
        f"{sys.executable} -m tokenswift generate - <&-",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "standard input is closed" in done.stderr
    pipe = f"({sys.executable} -m tokenswift models --known; echo code $? >&2) | true"
    done = subprocess.run(pipe, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() in (
        ["error: standard output was closed", "code 1"],
        ["code 0"],  # all of it was in the pipe before it was closed
    )


def test_bytes_that_are_no_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenswift", "generate", b"caf\xe9"], capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.decode() == "error: the argument 'caf?' is not UTF-8; valid: UTF-8 text\n"


# ---- words ------------------------------------------------------------------------------------------------


def test_memory_that_ran_out() -> None:
    errors = (
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ValueError("Unable to allocate 7.45 TiB for an array"),
    )
    assert all(map(is_out_of_memory, errors)) and not is_out_of_memory(ValueError("a shape"))
    words = at_most(argparse.Namespace(batch=4, window=128, quiet=True))
    assert words == "; valid: a smaller --batch or --window"


def test_out_of_memory_is_one_line(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 10^15 bytes\nat line 3")

    monkeypatch.setattr("tokenswift.cli.models.run", run)
    assert cli("models").err == "error: out of memory\n"


def test_messages_name_options() -> None:
    options = {"max_new_tokens": "--max-new-tokens", "tree": "--tree", "dtype": "--dtype"}
    assert with_option_name("max_new_tokens is 9; valid: max_new_tokens up to 4", options) == (
        "--max-new-tokens is 9; valid: --max-new-tokens up to 4"
    )
    assert with_option_name("a tree in a dtype of two bytes", options) == "a tree in a dtype of two bytes"
    assert with_option_name("x/max_new_tokens.txt is old", options) == "x/max_new_tokens.txt is old"
    assert with_option_name("'gamma' is not an option of strategy medusa; valid: tree, b", options) == (
        "'gamma' is not an option of strategy medusa; valid: tree, b"
    )


MEANT = [
    ("generate hi --max-tokens 5", "unknown option --max-tokens; did you mean --max-new-tokens?"),
    ("chat --temprature=1", "unknown option --temprature; did you mean --temperature?"),
    ("resume run --max-new 5", "unknown option --max-new; did you mean --max-new-tokens?"),
    ("genrate hi", "; did you mean generate?"),
    ("trainheads", "; did you mean train-heads?"),
    ("--versio", "unknown option --versio; did you mean --version?"),
    ("generate hi --model smollm-135m", "; did you mean smollm2-135m?"),
    ("generate hi --strategy tokenswfit", "; did you mean tokenswift?"),
    ("generate hi --strategy majicdec", "; did you mean magicdec?"),
    ("generate hi --dtype bf16", "; did you mean bfloat16?"),
    ("generate hi --strategy medusa --vocab full", "unknown option --vocab; did you mean --vocabulary?"),
    ("generate hi there --temprature 1", "unknown option --temprature; did you mean --temperature?"),
    ("generate hi -n x", "--max-new-tokens is 'x'; valid: an integer"),
    ("generate hi -m smollm-135m", "; did you mean smollm2-135m?"),
    ("generate hi -t -1", "--temperature is -1.0; valid: 0 (greedy decoding), or from 1e-30 to 1e30"),
    ("generate hi --on-loop stpo", "--on-loop is 'stpo'; valid: report, stop; did you mean stop?"),
    ("generate hi --wrong", "unknown option --wrong"),
    ("generate --modle x hi", "unknown option --modle; did you mean --model?"),
    ("--modle x hi", "unknown option --modle; options follow a command, as in tokenswift generate --modle"),
    ("generate hi there", "unexpected argument 'there'; valid: quotes around a text of several words"),
    ("generate hi --strategy best", "medusa, triforce, magicdec"),
]


@pytest.mark.parametrize(("argv", "ends"), MEANT)
def test_what_was_meant(cli: Call, argv: str, ends: str) -> None:
    done = cli(*argv.split())
    assert done.code == 2 and done.error.endswith(ends), done.err
    assert done.error.count("did you mean") == ends.count("did you mean")


def test_the_command_alone_says_how_to_begin(cli: Call) -> None:
    done = cli()
    assert done.code == 0 and done.err == "" and done.out == cli("--help").out
    examples = [line for line in done.out.splitlines() if line.startswith("  tokenswift ")]
    assert len(examples) == 3
    parser = build_parser()[0]
    for line in examples:
        parser.parse_args(shlex.split(line.partition("   ")[0])[1:])


def test_an_option_means_one_thing_in_every_command() -> None:
    """By placeholder and number of values; what an option is for cannot be told by a program."""
    parser, _ = build_parser()
    seen: dict[str, tuple[str, object, object]] = {}
    for command, subparser in subparsers_of(parser).items():
        for action in subparser._actions:
            if action.help == argparse.SUPPRESS:
                continue
            for name in action.option_strings:
                kind = (action.metavar or "", action.nargs)
                first = seen.setdefault(name, (command, *kind))
                assert first[1:] == kind or name == "--out", (
                    f"{name} of {command} is {kind}, of {first[0]} {first[1:]}"
                )


def test_settings_are_told_as_options(cli: Call, tiny: Path) -> None:
    done = cli("generate", "hi", "--model", tiny, "--preset", "eta", *SHORT)
    assert done.code == 0 and done.err.startswith("preset eta: --min-p 0.0, --eta-cutoff "), done.err
    assert with_option_name("valid: a smaller model, or dtype bfloat16", {"dtype": "--dtype"}).endswith(
        "or --dtype bfloat16"
    )
