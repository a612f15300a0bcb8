"""Every bad input is one line that names the option and the value, exit code 2, and nothing written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig

from tests.cli.conftest import Call
from tokenswift.cli import options


@pytest.fixture
def refuse(cli: Call, tiny: Path) -> Callable[..., str]:
    """Runs ``generate`` on the tiny model with results asked for; the error line of a refusal."""

    def call(*argv: object, prompt: tuple[str, ...] = ("hello",), **more: Path) -> str:
        model = () if "--model" in argv else ("--model", tiny)
        results = () if {"--output", "--json"} & set(map(str, argv)) else ("--output", "t", "--json", "j")
        outcome = cli("generate", *prompt, *model, *results, "--max-new-tokens", "4", *argv, **more)
        assert outcome.code == 2, outcome
        assert outcome.out == "" and not {"t", "j"} & set(outcome.files)
        return (
            outcome.err.strip().splitlines()[-1].removeprefix("error: ")
            if _started(outcome.err)
            else outcome.error
        )

    return call


def _started(err: str) -> bool:
    """True when the model was loaded first, which leaves three more lines on standard error."""
    lines = err.splitlines()
    told = (
        len(lines) == 4
        and lines[1].endswith(("on cpu, auto", "on cpu, tokenswift"))
        and lines[2].startswith("prompt: ")
    )
    return told and lines[3].startswith("error: ")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cheap checks come before the model: loading fails the test."""

    def load(*args: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(options, "load_model", load)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--temperature", "1e-40"), ("--temperature is 1e-40", "0 (greedy decoding)")),
        (("--temperature", "-1"), ("--temperature is -1", "0 (greedy decoding)")),
        (("--temperature", "nan"), ("--temperature is nan",)),
        (("--temperature", "inf"), ("--temperature is inf",)),
        (("--temperature", "hot"), ("--temperature is 'hot'", "a number")),
        (("--top-p", "0"), ("--top-p is 0", "(0, 1]")),
        (("--top-p", "1.1"), ("--top-p is 1.1", "(0, 1]")),
        (("--top-p", "nan"), ("--top-p is nan",)),
        (("--top-k", "-1"), ("--top-k is -1",)),
        (("--top-k", "1.5"), ("--top-k is '1.5'", "an integer")),
        (("--min-p", "1"), ("--min-p is 1", "[0, 1)")),
        (("--min-p", "-0.1"), ("--min-p is -0.1",)),
        (("--min-p", "nan"), ("--min-p is nan",)),
        (("--eta-cutoff", "1"), ("--eta-cutoff is 1",)),
        (("--eta-cutoff", "nan"), ("--eta-cutoff is nan",)),
        (("--repetition-penalty", "0.9"), ("--repetition-penalty is 0.9", "at least 1")),
        (("--repetition-penalty", "nan"), ("--repetition-penalty is nan",)),
        (("--penalty-window", "0"), ("--penalty-window is 0", "at least 1")),
        (("--penalty-window", "nan"), ("--penalty-window is 'nan'",)),
        (("--seed", "-1"), ("--seed is -1",)),
        (("--seed", str(2**63)), ("--seed is 9223372036854775808",)),
        (("--max-new-tokens", "0"), ("--max-new-tokens is 0", "at least 1")),
        (("--max-new-tokens", "-3"), ("--max-new-tokens is -3",)),
        (("--max-new-tokens", "many"), ("--max-new-tokens is 'many'",)),
        (("--ngrams", "-1"), ("--ngrams is -1",)),
        (("--tree", "1,x"), ("--tree is '1,x'", "1,3,3,3")),
        (("--tree", "1,2.5"), ("--tree is '1,2.5'",)),
        (("--tree", "1,0"), ("--tree is ", "at least 1")),
        (("--tree", ""), ("--tree is ''",)),
        (("--tree", "nan"), ("--tree is 'nan'",)),
        (("--budget", "16"), ("--budget is 16", "more than the 16 sink")),
        (("--budget", "-5"), ("--budget is -5",)),
        (("--budget", "20", "--sinks", "20"), ("--budget is 20",)),
        (("--sinks", "-1"), ("--sinks is -1",)),
        (("--cache", "big"), ("--cache is 'big'", "dynamic")),
        (("--candidates", "best"), ("--candidates is 'best'", "coupled")),
        (("--draft", "deep"), ("--draft is 'deep'", "hidden")),
        (("--acceptance", "all"), ("--acceptance is 'all'", "published")),
        (("--strategy", "magic"), ("--strategy is 'magic'", "autoregressive, tokenswift")),
        (
            ("--strategy", "autoregressive", "--tree", "1,1"),
            ("--tree", "no option of strategy autoregressive"),
        ),
        (("--rope-scaling", "linear"), ("--rope-scaling is 'linear'", "yarn")),
        (("--rope-scaling", "yarn:nan"), ("--rope-scaling is 'yarn:nan'",)),
        (("--threads", "0"), ("--threads is 0",)),
        (("--stop", ""), ("--stop is ''",)),
        (("--heads", "absent.safetensors"), ("--heads is 'absent.safetensors'", "no such file")),
        (("--wrong",), ("unrecognized arguments: --wrong",)),
        (("--seed",), ("--seed: expected one argument",)),
        (("--output", "no/such/folder/x"), ("--output no/such/folder/x", "cannot be written")),
        (("--json", "/proc/x.json"), ("--json /proc/x.json", "cannot be written")),
        (("--json", "."), ("--json .", "cannot be written")),
        (("--json", "same", "--output", "./same"), ("--output and --json are both",)),
    ],
)
def test_options(
    refuse: Callable[..., str], no_model: None, argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = refuse(*argv)
    for word in words:
        assert word in line, line


def test_prompts(refuse: Callable[..., str], no_model: None, tmp_path: Path) -> None:
    assert refuse(prompt=()).startswith("no prompt given; valid: one of PROMPT, --prompt-file")
    assert refuse("--prompt-ids", "1").startswith("PROMPT and --prompt-ids given")
    assert refuse("--prompt-file", "f").startswith("PROMPT and --prompt-file given")
    assert refuse(prompt=("",)).startswith("PROMPT is empty")
    assert refuse(prompt=("-",)).startswith("PROMPT is empty")
    assert refuse("--prompt-ids", "", prompt=()).startswith("--prompt-ids is empty")
    assert refuse("--prompt-ids", "1,b", prompt=()).startswith("--prompt-ids is '1,b'; valid: integers")
    assert refuse("--prompt-ids", "1,2.0", prompt=()).startswith("--prompt-ids is '1,2.0'")
    assert "no negative ids" in refuse("--prompt-ids", "1,-2", prompt=())
    assert refuse("--prompt-file", "absent", prompt=()).startswith(
        "--prompt-file absent cannot be read (No such"
    )
    assert "Is a directory" in refuse("--prompt-file", tmp_path, prompt=())
    (tmp_path / "empty").write_text("")
    assert refuse("--prompt-file", tmp_path / "empty", prompt=()).startswith("--prompt-file is empty")
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    assert "is not UTF-8 (byte 3)" in refuse("--prompt-file", tmp_path / "latin", prompt=())
    assert "- is not UTF-8" in refuse(prompt=("-",), stdin=tmp_path / "latin")


def test_what_only_the_model_can_tell(refuse: Callable[..., str]) -> None:
    assert "260; valid: 0 to 259" in refuse("--prompt-ids", "5,260", prompt=())
    line = refuse("--tree", "1,261")
    assert line.startswith("--tree is ") and "261" in line and "260" in line
    assert "--rope-scaling yarn" in refuse("--max-new-tokens", "252")


def test_models(refuse: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refuse("--model", "gpt-nine").startswith(
        "--model is 'gpt-nine': unknown name; valid: smollm2-135m"
    )
    assert "no such folder" in refuse("--model", "./absent")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refuse("--model", empty).startswith(f"--model folder {empty} has no config.json")
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(empty)
    assert "is not a causal language model" in refuse("--model", empty)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refuse("--model", "someone/some-model")
    assert "cannot be reached" in line and "folder" in line


def test_places(refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refuse("--device", "cuda").startswith("--device is 'cuda', but no CUDA device is available")
    assert refuse("--device", "tpu").startswith("--device is 'tpu'")
    assert refuse("--dtype", "int3").startswith("--dtype is 'int3'")


def test_heads_that_are_none(refuse: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "heads.safetensors"
    file.write_bytes(b"no heads")
    assert "heads" in refuse("--heads", file)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "no command given; valid: generate, chat, resume"),
        (("compose",), "invalid choice: 'compose'"),
        (("demo", "--tokens", "0"), "--max-new-tokens is 0"),
        (("demo", "--seed", "-1"), "--seed is -1"),
        (("demo", "--out", "/proc/nowhere"), "--out is '/proc/nowhere'"),
    ],
)
def test_commands(cli: Call, no_model: None, argv: tuple[str, ...], words: str) -> None:
    outcome = cli(*argv)
    assert outcome.code == 2 and words in outcome.error and outcome.files == []


def test_existing_results_survive_bad_input(cli: Call, tiny: Path, tmp_path: Path) -> None:
    for name in ("t", "j"):
        (tmp_path / "cwd" / name).write_text("old")
    argv = ("generate", "--prompt-ids", "999", "--model", tiny, "--output", "t", "--json", "j")
    assert cli(*argv).code == 2
    assert [(tmp_path / "cwd" / name).read_text() for name in ("t", "j")] == ["old", "old"]


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenswift.cli.main", "generate", "x", "--top-p", "2", "--json", "j"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --top-p is 2.0; valid: in (0, 1]\n"
    assert list(tmp_path.iterdir()) == []


def test_help_is_fast_and_complete(cli: Call) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tokenswift.cli.main", "generate", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert " torch" not in done.stderr and " transformers" not in done.stderr
    assert "not lossless" in " ".join(done.stdout.split()).lower()
