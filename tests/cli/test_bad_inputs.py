"""Bad inputs of every command and of the Python API: one line, exit code 2, no model, nothing touched."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import BertConfig

from tests.cli.conftest import Call
from tokenswift.cli import options
from tokenswift.cli.main import COMMANDS
from tokenswift.loader import load as load_module

OLD = "an old text"


@pytest.fixture
def place(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder with all sorts of things in it; loading a model fails the test."""
    folder = tmp_path / "cwd"
    for name in ("prompt.txt", "heads.st", "old.json", "old.gguf"):
        (folder / name).write_text(OLD)
    (folder / "link.txt").symlink_to("prompt.txt")
    os.link(folder / "prompt.txt", folder / "hard.txt")
    (folder / "null").symlink_to("/dev/null")
    os.mkfifo(folder / "pipe")
    (folder / "full").mkdir()
    (folder / "folder.gguf").mkdir()
    (folder / "full" / "mine").write_text(OLD)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "sized").mkdir()
    (folder / "sized" / "config.json").write_text('{"hidden_size": 64, "vocab_size": 260}')
    (folder / "run").mkdir()
    (folder / "run" / "journal").write_text(OLD)
    bound = socket.socket(socket.AF_UNIX)
    bound.bind("socket")  # a short name: there is a limit

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(options, "load_model", load)
    monkeypatch.setattr(load_module, "load", load)
    yield folder
    bound.close()


def seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every name below a folder with its kind and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else b""
        found[str(path.relative_to(folder))] = (mode, content)
    return found


#: what is typed, and what the error has to name: field, value, and a list of what is valid; … is any words
GENERATE: list[tuple[str, str]] = [
    ("hi --output socket", "--output socket"),
    ("hi --output -", "--output is -; valid: a file"),
    ("--prompt-file prompt.txt --output prompt.txt", "--output prompt.txt … --prompt-file"),
    ("--prompt-file prompt.txt --output hard.txt", "--output hard.txt … --prompt-file"),
    ("hi --heads heads.st --json heads.st", "--json heads.st … --heads"),
    ("hi --output o --json ./o", "--output and --json … ./o"),
    ("hi --run-dir run --output run/journal", "--output run/journal"),
    ("hi --run-dir prompt.txt", "--run-dir is 'prompt.txt'"),
    ("hi --sampling own", "--sampling is 'own'; valid: default, model"),
    ("hi --temperature -0.5", "--temperature is -0.5; valid: 0 (greedy decoding)"),
    ("hi --tree 0", "--tree is '0'; valid: integers of at least 1"),
    (
        "hi --strategy medusa --ngram-count 2",
        "--ngram-count is not an option of strategy medusa; valid: tree",
    ),
    ("hi --model prompt.txt", "--model prompt.txt is a file"),
    ("--prompt-file none.txt", "--prompt-file none.txt"),
    ("caf\udce9", "the argument 'caf?' is not UTF-8"),
    ("hi --threads 100000", "--threads is 100000; valid: 1 to "),
    ("hi --backend fast", "--backend is 'fast'; valid: auto, cpu, cuda, torch"),
    (
        "hi --backend cuda --device cpu",
        "--backend is 'cuda', and the device is 'cpu'; valid: auto, cpu, torch",
    ),
    ("hi --strategy tokenswift --tree 1" + ",1" * 5000, "valid: at most 4096 nodes in all"),
    ("hi --run-dir /proc/run", "--run-dir /proc/run"),
    ("hi --explain same --json same", "--explain and --json are both same; valid: two different files"),
    ("hi --eagle no/such/place", "--eagle is 'no/such/place': no such folder or file; valid: "),
    ("hi --json-schema prompt.txt", "--json-schema prompt.txt: the JSON schema is not JSON"),
    ("hi --regex a --grammar prompt.txt", "--regex and --grammar given; valid: one of them"),
]
TRAIN: list[tuple[str, str]] = [
    ("--out new", "--data or --states is needed"),
    ("--out prompt.txt/x --data prompt.txt", "--out prompt.txt/x"),
    ("--out new --data prompt.txt --work prompt.txt", "--work prompt.txt"),
    ("--out new --data self --tokens 7", "--tokens is 7; valid: an integer of at least 256"),
    ("--out new --data full --continued --prompt-lengths 900", "--prompt-lengths is 900"),
]
OTHERS: dict[str, list[tuple[str, str]]] = {
    "generate": GENERATE,
    "chat": [
        ("--max-new-tokens 0", "--max-new-tokens is 0"),
        ("--model full", "--model folder full"),
        ("--threads 5000", "--threads is 5000; valid: 1 to "),
        ("--explain no/where", "--explain no/where"),
    ],
    "plan": [
        ("", "no prompt given"),
        ("hi --json full", "--json full"),
        ("--prompt-file prompt.txt --json prompt.txt", "--json prompt.txt … --prompt-file"),
    ],
    "resume": [
        ("full", "full"),
        ("none", "none"),
        ("run --json run/journal", "--json run/journal"),
        ("full --json full", "--json full"),
        ("full --max-new-tokens 0", "--max-new-tokens is 0"),
        ("full --threads 5000", "--threads is 5000; valid: 1 to "),
    ],
    "runs": [("none", "no such folder"), ("--json full .", "--json full")],
    "models": [
        ("lost", "action is 'lost'; valid: list"),
        ("show", "action is 'show' without a name; valid: show NAME"),
        ("list full", "action is 'list' with a name; valid: list alone"),
        ("list --yes", "--yes is given with list; valid: with remove"),
        ("show ./none", "model is './none': no such folder"),
        ("remove ../full --yes", "name is '../full'; valid: "),
        ("--json full", "--json full"),
    ],
    "report": [("full", "full"), ("none", "none")],
    "text": [("none", "none"), ("full", "full")],
    "demo": [
        ("--out prompt.txt", "--out prompt.txt"),
        ("--max-new-tokens 0", "--max-new-tokens is 0"),
        ("--dtype int4", "--dtype is 'int4'"),
    ],
    "audit": [
        ("--prompts none.txt", "--prompts none.txt"),
        ("--prompts prompt.txt --json prompt.txt", "--json prompt.txt … --prompts"),
        ("--json socket", "--json socket"),
        ("--max-new-tokens x", "--max-new-tokens is 'x'"),
    ],
    "train": [
        *TRAIN,
        *((f"{argv} --kind draft", words) for argv, words in TRAIN),
        *((f"{argv} --kind eagle", words) for argv, words in TRAIN),
        ("--data self", "arguments are required: --out"),
        ("--data self --out full", "--out full"),
        ("--data self --out null", "--out null"),
        ("--data self --out /dev/null", "--out /dev/null"),
        ("--data self --out pipe", "--out pipe"),
        ("--data prompt.txt --out hard.txt", "--out hard.txt … --data"),
        ("--data self --out new --num-heads 0", "--num-heads is 0"),
        ("--data self --out new --kind medusas", "--kind is 'medusas'; valid: … did you mean medusa?"),
        ("--data self --out prompt.txt --kind draft", "--out prompt.txt"),
        ("--data self --out full --kind draft", "--out full"),
        ("--data self --out model --kind draft", "--out model"),
        ("--data self --out new --kind draft --layers 0", "--layers is 0"),
        ("--data self --out prompt.txt --kind eagle", "--out prompt.txt"),
        ("--data self --out model --kind eagle", "--out model"),
        ("--data self --out new --kind eagle --depths 0", "--depths is 0"),
    ],
    "serve": [
        ("--port 70000", "--port is 70000; valid: 0 to 65535"),
        ("--queue -1", "--queue is -1; valid: an integer of at least 0"),
        ("--max-concurrent 0", "--max-num-seqs is '0'; valid: auto, or an integer of at least 1"),
        ("--ping nan", "--ping is nan; valid: seconds, from 0.01 to 3600"),
        ("--host 0.0.0.0", "--host is '0.0.0.0' … --api-key-file"),
        ("--api-key-file none.txt", "--api-key-file none.txt"),
        ("--api-key-file prompt.txt", "--api-key-file prompt.txt"),
        ("--run-dir prompt.txt", "--run-dir prompt.txt"),
        ("--rope-scaling x", "--rope-scaling is 'x'"),
        ("--model ./none", "--model is './none'"),
    ],
    "bench": [
        ("--contexts 64,x", "--contexts is '64,x'; valid: integers"),
        ("--contexts 1", "--contexts is 1; valid: an integer of at least 2"),
        ("--repeats 0", "--repeats is 0; valid: an integer of at least 1"),
        ("-n 0", "--max-new-tokens is 0; valid: an integer of at least 1"),
        ("--prompt-file none.txt", "--prompt-file none.txt cannot be read"),
        ("--json full", "--json full cannot be written (it is a folder)"),
    ],
}
CASES = [(command, argv, words) for command, cases in OTHERS.items() for argv, words in cases]


def test_every_command_has_bad_inputs() -> None:
    assert {name.replace("_", "-") for name in COMMANDS} <= set(OTHERS)
    assert len(CASES) >= 40


@pytest.mark.parametrize(("command", "argv", "words"), CASES, ids=lambda value: repr(value)[:60])
def test_one_line_and_nothing_touched(cli: Call, place: Path, command: str, argv: str, words: str) -> None:
    before = seen(place)
    done = cli(command, *argv.split())
    assert done.code == 2 and done.out == "", done
    assert done.err.count("\n") == 1 and done.err.startswith("error: "), done.err
    assert all(part in done.err for part in words.split(" … ")), done.err
    assert seen(place) == before
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


# ---- generate, on a model where only it can tell ------------------------------------------------


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


#: option, values as they are shown (of which those in quotes are no numbers at all), and what is valid
VALUES = [
    ("--temperature", "1e-40 -1 nan inf", "0 (greedy decoding)"),
    ("--temperature", "'hot'", "a number"),
    ("--top-p", "0 1.1 nan", "(0, 1]"),
    ("--top-k", "'1.5'", "an integer"),
    ("--repetition-penalty", "0.9 nan", "at least 1"),
    ("--penalty-window", "'nan'", "an integer"),
    ("--seed", f"-1 {2**63}", "an integer from 0"),
    ("--max-new-tokens", "0 -3", "at least 1"),
    ("--tree", "'1,x' '1,,3' '²' '1,2.5' '1,0' '' 'nan'", "1,3,3,3"),
    ("--budget", "16", "more than the 16 sink"),
    ("--threads", "0", "1 to "),
]


@pytest.mark.parametrize(("option", "values", "valid"), VALUES)
def test_values_of_options(
    refuse: Callable[..., str], no_model: None, option: str, values: str, valid: str
) -> None:
    for value in values.split():
        line = refuse(option, value.strip("'"))
        assert line.startswith(f"{option} is {value}") and valid in line.partition("; valid: ")[2], line


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


def test_models(refuse: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refuse("--model", "gpt-nine").startswith(
        "--model is 'gpt-nine': unknown name; valid: smollm2-135m"
    )
    assert "no such folder" in refuse("--model", "./absent")
    assert refuse("--device", "cuda:97").startswith("--device is 'cuda:97'")
    for name in ("absent.gguf", "models/absent.gguf", "./absent.gguf"):
        assert f"--model is '{name}': no such file; valid: " in refuse("--model", name)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refuse("--model", empty).startswith(f"--model folder {empty} has no config.json")
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(empty)
    assert "is not a causal language model" in refuse("--model", empty)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refuse("--model", "someone/some-model")
    assert "cannot be reached" in line and "folder" in line


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenswift.cli.main", "generate", "x", "--top-p", "2", "--json", "j"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --top-p is 2.0; valid: in (0, 1]\n"
    assert list(tmp_path.iterdir()) == []
