"""``tokenswift audit``: verdict and exit code on sound and broken ground, the record, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.cli import options

SHORT = ("-n", "12")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("It was a dark and stormy night\n---\n\ndef f(x):\n", encoding="utf-8")
    return file


def test_an_exact_model_passes(cli: Call, tiny: Path, prompts: Path) -> None:
    done = cli("audit", "--model", tiny, "--prompts", prompts, "--seeds", "2", "--json", "a.json", *SHORT)
    assert done.code == 0, done
    assert "Verdict: exact; not run: medusa, triforce" in done.out and "distribution" not in done.out
    assert "prompt 2 of 2" in done.err
    record = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert record["exact"] and record["failures"] == []
    rows = record["comparisons"]
    sure = {"tokenswift", "magicdec"}
    drafted = {row["strategy"] for row in rows if row["drafted"]}  # adaptive drafting may find that none pays
    assert sure <= drafted <= sure | {"auto"}
    assert set(record["skipped"]) == {"medusa", "triforce", "auto"} - drafted
    assert record["verdict"] == f"exact; not run: {', '.join(record['skipped'])}"
    assert all(row["sound"] for row in record["errors"])
    labels = {row["strategy"] for row in record["comparisons"]}
    assert {"auto", "tokenswift"} <= labels
    texts = [row for row in record["comparisons"] if row["strategy"] == "tokenswift"]
    assert len(texts) == 2 * (2 + 1)  # two seeds with sampling and one greedy text, two prompts
    assert all(row["tokens"] == 12 for row in texts)
    assert record["distributions"] == []
    assert record["dtype"] == "float32" and record["versions"]["torch"]


def test_quickly(cli: Call, tiny: Path, prompts: Path) -> None:
    quick = ("audit", "--quick", "--model", tiny, "--prompts", prompts, "--strategy", "tokenswift")
    for given, length in (((), 8), (("-n", "3"), 3)):
        done = cli(*quick, *given, "--json", "a.json")
        assert done.code == 0 and "Verdict: exact" in done.out and "prompt 1 of 1" in done.err, done
        rows = json.loads(Path("a.json").read_text(encoding="utf-8"))["comparisons"]
        assert {(row["prompt"], row["tokens"]) for row in rows} == {(1, length)}


def test_the_distribution_where_asked(cli: Call, tiny: Path, prompts: Path) -> None:
    arguments = ("-n", "4", "--strategy", "magicdec", "--distribution", "100", "--json", "a.json")
    done = cli("audit", "--model", tiny, "--prompts", prompts, "--top-k", "4", *arguments)
    assert done.code == 0 and "distribution of two tokens" in done.out, done
    rows = json.loads(Path("a.json").read_text(encoding="utf-8"))["distributions"]
    assert [(row["strategy"], row["same"]) for row in rows] == [("autoregressive", 100), ("magicdec", 100)]
    assert all(row["p"] > 1e-5 for row in rows)


def test_the_published_rule_fails_the_audit(cli: Call, tiny: Path, prompts: Path) -> None:
    arguments = ("--tree", "1,3,3,3", "--draft", "partial", "--acceptance", "published")
    done = cli(
        "audit",
        "--model",
        tiny,
        "--prompts",
        prompts,
        "-n",
        "12",
        "--strategy",
        "tokenswift",
        *arguments,
    )
    assert done.code == 1
    assert "Verdict: NOT EXACT; tokenswift differs" in done.out
    last = done.err.splitlines()[-1]
    assert last.startswith("error: not exact: tokenswift differs") and "new token" in last


def test_bfloat16_is_exact(cli: Call, tiny: Path, prompts: Path) -> None:
    done = cli("audit", "--model", tiny, "--prompts", prompts, "--dtype", "bfloat16", "--quiet")
    assert done.code == 0 and done.err == "", done
    assert "bfloat16" in done.out and "Verdict: exact" in done.out


def test_bfloat16_and_self_speculation_are_no_false_alarm(cli: Call, tiny: Path, prompts: Path) -> None:
    """However near one-row passes come to transformers' own: here some equal it bit for bit."""
    arguments = ("--dtype", "bfloat16", "-n", "100", "--strategy", "magicdec")
    done = cli("audit", "--model", tiny, "--prompts", prompts, *arguments)
    assert done.code == 0 and "Verdict: exact" in done.out, done


WINDOWS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", WINDOWS)
def test_small_windows_are_exact(
    cli: Call, tiny_folder: Callable[..., Path], prompts: Path, family: str, dtype: str
) -> None:
    model = tiny_folder(family, **WINDOWS[family])
    arguments = ("--dtype", dtype, "-n", "40", "--json", "a.json")
    done = cli("audit", "--model", model, "--prompts", prompts, *arguments)
    assert done.code == 0 and "Verdict: exact" in done.out, done
    record = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert len(record["errors"]) == 2 and all(row["sound"] for row in record["errors"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--max-new-tokens", "0"), ("--max-new-tokens is 0",)),
        (("a text", "--prompts", "f"), ("PROMPT and --prompts given; valid: one of them",)),
        ((" ",), ("PROMPT is ' '; valid: a text",)),
        (("-n", "x"), ("--max-new-tokens is 'x'", "integer")),
        (("--seeds", "0"), ("--seeds is 0",)),
        (("--seeds", "2", "--seed", str(2**63 - 1)), ("--seeds is 2",)),
        (("--distribution", "-1"), ("--distribution is -1",)),
        (("--distribution", "5"), ("--distribution is 5", "from 100 to 10000, or 0")),
        (("--distribution", "10001"), ("--distribution is 10001",)),
        (("--strategy", "magic"), ("--strategy is 'magic'", "all", "tokenswift")),
        (("--strategy", "autoregressive", "--tree", "1,1"), ("--tree", "autoregressive")),
        (("--budget", "3"), ("--budget is 3",)),
        (("--temperature", "-1"), ("--temperature is -1",)),
        (("--prompts", "nowhere.txt"), ("--prompts nowhere.txt", "cannot be read")),
        (("--json", "no/such/folder.json"), ("--json no/such/folder.json",)),
        (("--heads", "nowhere"), ("--heads is 'nowhere'",)),
    ],
)
def test_bad_input_is_one_line(
    cli: Call, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    def load(*args: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(options, "load_model", load)
    done = cli("audit", *argv)
    assert done.code == 2 and done.out == ""
    for word in words:
        assert word in done.error


def test_prompts_are_shortened_to_the_models_positions(cli: Call, tiny: Path) -> None:
    """The shipped prompts are longer than a small model's positions; that is said before anything runs."""
    done = cli(
        "audit", "--model", tiny, "--strategy", "magicdec", "--max-new-tokens", "8", "--json", "a.json"
    )
    assert done.code == 0, done
    short = [line for line in done.err.splitlines() if "shortened to its first 248 tokens" in line]
    assert short and "the model has 256 positions" in short[0]
    assert done.err.index(short[-1]) < done.err.index("plain decoding")
    assert json.loads(Path("a.json").read_text(encoding="utf-8"))["exact"]


def test_more_tokens_than_positions_are_refused_before_the_start(
    cli: Call, tiny: Path, prompts: Path
) -> None:
    done = cli("audit", "--model", tiny, "--prompts", prompts, "--max-new-tokens", "256")
    assert done.code == 2 and "plain decoding" not in done.err, done
    assert done.err.endswith(
        "error: --max-new-tokens is 256; valid: at most 255 (the model has 256 positions)\n"
    )
