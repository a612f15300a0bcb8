"""Bad inputs of every command and of the Python API: one line, exit code 2, no model, nothing
touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.cli import options
from tokenswift.cli.main import COMMANDS
from tokenswift.loader import load as load_module

OLD = "an old text"


@pytest.fixture
def place(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder with all sorts of things in it; loading a model fails the test."""
    folder = tmp_path / "cwd"
    for name in ("prompt.txt", "heads.st"):
        (folder / name).write_text(OLD)
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "empty").write_text('{"prompt": ""}\n')
    (folder / "p").write_text('{"prompt": "a"}\n')
    os.mkfifo(folder / "pipe")
    (folder / "full").mkdir()
    (folder / "full" / "mine").write_text(OLD)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "run").mkdir()
    (folder / "run" / "journal").write_text(OLD)

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(options, "load_model", load)
    monkeypatch.setattr(load_module, "load", load)
    return folder


def seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every name below a folder with its kind and content."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else b""
        entries[str(path.relative_to(folder))] = (mode, content)
    return entries


#: what is typed, and what the error has to name: field, value, and a list of what is valid; … is
#: any words
OTHERS: dict[str, list[tuple[str, str]]] = {
    "generate": [
        # prompts
        ("", "no prompt given; valid: one of PROMPT, --prompt-file"),
        ("hi --prompt-ids 1", "PROMPT and --prompt-ids given"),
        ("--prompt-ids 1,b", "--prompt-ids is '1,b'; valid: integers"),
        ("--prompt-file none.txt", "--prompt-file none.txt cannot be read (No such"),
        ("--prompt-file latin.txt", "--prompt-file latin.txt is not UTF-8 (byte 3)"),
        ("--prompt-ids 1 --system x", "--system and --prompt-ids given; valid: one of them"),
        (
            "two words",
            "unknown argument words; valid: the options of --help-all, and quotes around",
        ),
        ("hi --temprature 1", "unknown argument --temprature; … did you mean --temperature?"),
        # files
        ("hi --output -", "--output is -; valid: a file"),
        ("--prompt-file prompt.txt --output ./prompt.txt", "--output are both ./prompt.txt"),
        ("hi --run-dir run --output run/journal", "--run-dir and --output are both run/journal"),
        ("hi --run-dir prompt.txt", "--run-dir prompt.txt cannot be written (Not a directory)"),
        # models
        ("hi --model prompt.txt", "--model prompt.txt is a file"),
        (
            "hi --model gpt-nine",
            "--model is 'gpt-nine': no such folder or file; valid: smollm2-135m",
        ),
        ("hi --eagle no/such/place", "--eagle is 'no/such/place': no such folder or file; valid: "),
        # sampling and length
        ("hi --temperature hot", "--temperature is 'hot'; valid: a number"),
        ("hi --top-p nan", "--top-p is nan; valid: in (0, 1]"),
        ("hi --logit-bias 9", "--logit-bias is 9; valid: token ids with a bias each"),
        ("hi --template-options x", "--template-options is 'x'; valid: a JSON object"),
        (
            "hi --template-options 3",
            "--template-options is 3; valid: a dict of the template's variables",
        ),
        (
            "hi --json-schema prompt.txt",
            "--json-schema prompt.txt: the JSON schema is … valid: JSON",
        ),
        ("hi --regex a --grammar prompt.txt", "--regex and --grammar given; valid: one of them"),
        ("hi --presence-penalty 3", "--presence-penalty is 3.0; valid: from -2 to 2"),
        ("hi --temperature -1", "--temperature is -1.0; valid: 0 (greedy decoding), or from 1e-30"),
        ("hi --temperature 1e-40", "--temperature is 1e-40; valid: 0 (greedy decoding)"),
        ("hi --repetition-penalty 1e300", "--repetition-penalty is 1e+300; valid: at least 1"),
        ("hi --logit-bias 9=200", "--logit-bias is [(9, 200.0)]; valid: … from -100 to 100"),
        (
            "hi --ignore-eos --regex a",
            "--ignore-eos is True together with a grammar; valid: one of",
        ),
        ("hi --min-tokens 5 --regex a", "--min-tokens is 5 together with a grammar; valid: 0"),
        ("hi --stop=", "--stop is ('',); valid: … none of them empty"),
        ("hi --preset none", "--preset is 'none'; valid: paper"),
        # loading
        ("hi --heads none.safetensors", "--heads is 'none.safetensors': no such file; valid: auto"),
        ("hi --backend cuda --device cpu", "--backend is 'cuda', and the device is 'cpu'; valid: "),
        ("hi --threads 0", "--threads is 0; valid: 1 to "),
        ("hi --threads 100000", "--threads is 100000; valid: 1 to "),
        ("hi --rope-scaling yarn:x", "--rope-scaling is 'yarn:x'; valid: none, yarn, or yarn:FA"),
        ("hi --weights q9", "--weights is 'q9'; valid: stored, float32, bfloat16, q8_0"),
        ("hi --kv-cache-dtype x", "--kv-cache-dtype is 'x'; valid: auto, float32, bfloat16, int8"),
        # methods
        ("hi --strategy hydra", "--strategy is 'hydra'; valid: auto, autoregressive, tokenswift"),
        ("hi --gamma 3", "--gamma is not an option of strategy auto; valid: ngrams"),
        ("hi --cache dynamc", "--cache is 'dynamc'; valid: full … did you mean dynamic?"),
        ("hi --strategy tokenswift --tree 0", "--tree is '0'; valid: integers of at least 1"),
        ("hi --strategy magicdec --gamma 99", "--gamma is 99; valid: an integer from 1 to 32"),
        ("hi --tree 1,x", "--tree is '1,x'; valid: auto, or integers of at least 1"),
        # many prompts
        ("--prompts prompt.txt", "one of --prompts and --out given; valid: both"),
        ("hi --prompts p --out d", "prompt is given together with --prompts"),
        ("--prompts p --out d --run-dir r", "--run-dir is given together with --prompts"),
        ("--continue --prompts p --out d", "--continue is given together with --prompts"),
        ("--prompts p --out d --max-num-seqs 0", "--max-num-seqs is 0; valid: "),
        (
            "--prompts empty --out d",
            "--prompts empty, line 1: prompt is ''; valid: text of at least",
        ),
    ],
    "chat": [("--max-new-tokens 0", "--max-new-tokens is 0")],
    "plan": [("", "no prompt given"), ("hi --json full", "--json full")],
    "resume": [
        ("none", "run_dir none holds no run; valid: a folder made with --run-dir"),
        ("", "DIR is missing; valid: tokenswift resume [options] DIR"),
    ],
    "runs": [
        ("none", "folder is 'none': no such folder; valid: one with runs in it"),
        ("--json full .", "--json full"),
        *((f"{name} --text", name) for name in ("none", "full")),
    ],
    "demo": [("--json full", "--json full"), ("--dtype int4", "--dtype is 'int4'")],
    "audit": [
        (f"--seeds 2 --seed {2**63 - 1}", "--seed is 9223372036854775808; valid: "),
        ("--strategy magic", "--strategy is 'magic'; valid: auto … tokenswift"),
    ],
    "train": [
        ("--out prompt.txt/x --data prompt.txt", "--out prompt.txt/x"),
        ("--out new --data self --tokens 7", "--tokens is 7; valid: an integer of at least 256"),
        ("--data self --out pipe", "--out pipe"),
        ("--out new --hidden 65", "--hidden is 65; valid: a multiple of 64"),
        ("--out new --depths 0", "--depths is 0; valid: "),
        ("--out new --held-out 2", "--held-out is 2.0; valid: from 0 to 0.5"),
        ("--out new --lr nan", "--lr is nan; valid: between 0 and 1"),
        ("--out new --window 0", "--window is 0; valid: an integer of at least 16"),
        (
            "--out new --data none",
            "--data none holds no text; valid: self, a text file or a folder",
        ),
        (
            "--data self --out new --kind medusas",
            "--kind is 'medusas'; valid: … did you mean medusa?",
        ),
    ],
    "serve": [
        ("--queue -1", "--queue is -1; valid: an integer of at least 0"),
        ("--max-num-seqs 0", "--max-num-seqs is 0; valid: "),
        ("--host 0.0.0.0", "--host is '0.0.0.0' … --api-key-file"),
        ("--api-key-file none.txt", "--api-key-file none.txt"),
        ("--run-dir prompt.txt", "--run-dir prompt.txt"),
    ],
    "models": [("--json full", "--json full cannot be written (it is not a regular file)")],
    "bench": [
        ("--contexts 64,x", "--contexts is '64,x'; valid: integers"),
        ("--contexts 1", "--contexts is 1; valid: an integer of at least 2"),
        ("--json full", "--json full cannot be written (it is not a regular file)"),
    ],
}
CASES = [(command, argv, words) for command, cases in OTHERS.items() for argv, words in cases]


def test_every_command_has_bad_inputs() -> None:
    assert set(COMMANDS) == set(OTHERS)


@pytest.mark.parametrize(("command", "argv", "words"), CASES, ids=lambda value: repr(value)[:60])
def test_one_line_and_nothing_touched(
    cli: Call, place: Path, command: str, argv: str, words: str
) -> None:
    before = seen(place)
    done = cli(command, *argv.split())
    assert done.code == 2, done
    assert done.out == ""
    line = done.error if command == "audit" else done.err
    assert done.err.count("\n") == 1, done.err
    assert all(part in line for part in words.split(" … ")), line
    assert seen(place) == before
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["cat", "x"], "unknown command: cat; valid: generate, … did you mean chat?"),
        (["generat", "hi"], "unknown command: generat; … did you mean generate?"),
        (["SERVE"], "unknown command: SERVE; … did you mean serve?"),
        (["zzz"], "unknown command: zzz; valid: generate, chat, serve"),
        (["--bogus"], "unknown argument before a command: --bogus; valid: generate, "),
        (["--model", "m", "generate"], "unknown argument before a command: --model; valid: "),
        (["--versoin"], "did you mean --version?"),
        (["chat", "--sytem", "x"], "unknown argument --sytem; … did you mean --system?"),
        (["generate", "hi", "temperature", "1"], "did you mean --temperature?"),
        (["generate", "hi", "--strategy", "AUTO"], "--strategy is 'AUTO'; … did you mean auto?"),
    ],
)
def test_what_is_mistyped_is_told_with_what_is_meant(cli: Call, argv: list[str], line: str) -> None:
    done = cli(*argv)
    assert done.code == 2
    assert all(part in done.error for part in line.split(" … "))


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "caf\udce9"],
        ["generate", "hi", "--output", "caf\udce9"],
        ["caf\udce9"],
        ["generate", "hi", "--stop=caf\udce9"],
    ],
)
def test_an_argument_that_is_not_utf8_is_told_plainly(cli: Call, argv: list[str]) -> None:
    done = cli(*argv)
    assert done.code == 2
    assert "caf?' is not UTF-8; valid: UTF-8 text" in done.error
    assert "udce9" not in done.err
    assert done.files == []


def test_a_schema_is_given_as_json_or_as_a_file(cli: Call, tiny: Path) -> None:
    schema = '{"type": "boolean"}'
    Path("schema.json").write_text(schema)
    argv = ("generate", "hi", "--model", tiny, "--continue", "--quiet", "--json-schema")
    texts = [cli(*argv, given).out for given in (schema, f" {schema}", "schema.json")]
    assert texts[0].strip() in ("true", "false")
    assert len(set(texts)) == 1
    assert cli(*argv, '{"type').error.startswith("--json-schema: the JSON schema is '{")
