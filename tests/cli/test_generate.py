"""What `generate` and `demo` print, write and keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Call, Stream
from tokenswift.cli import demo
from tokenswift.cli import output as output_module
from tokenswift.cli.output import TextSink, check_writable, write_json
from tokenswift.cli.progress import Progress, duration, mode_of, summary
from tokenswift.engine import stream
from tokenswift.engine.run import Run
from tokenswift.types import Generation, InputError, Metrics, RunError, Step

STEP = Step(token_ids=(1, 2), drafted=3, accepted=1, ngram_accepted=0, gamma=2, text="ab")
METRICS = Metrics(95, 0, 0.37, 0.1, 2.1, 0.2, 24.7, 8.1, 0.4, (0.9, 1.0, 1.0, 1.0), {"draft": 0.1})
RESULT = Generation([1, 2], "ab", "length", METRICS, 3)


def test_record_text_and_output(cli: Call, tiny: Path, tmp_path: Path) -> None:
    argv = ("generate", "hello", "--model", tiny, "--max-new-tokens", "12", "--ignore-eos", "--seed", "5")
    tree = ("--strategy", "tokenswift", "--tree", "1,2", "--ngrams", "2")
    done = cli(*argv, "--json", "j", "--output", "t", *tree)
    assert done.code == 0 and done.files == ["j", "t"]
    record = json.loads((tmp_path / "cwd" / "j").read_text())
    text = (tmp_path / "cwd" / "t").read_text()
    assert record["text"] == text == done.out.removesuffix("\n" if not text.endswith("\n") else "")
    named = "model strategy seed sampling prompt_tokens token_ids text finish_reason steps acceptance_rate "
    named += "ngram_acceptance_rate mean_acceptance_length tokens_per_second seconds distinct versions device"
    assert set(named.split()) <= set(record)
    assert record["model"] == str(tiny) and record["strategy"] == "tokenswift" and record["seed"] == 5
    assert record["strategy_options"] == {"tree": [1, 2], "ngrams": 2}
    assert record["prompt_tokens"] == 5 and len(record["token_ids"]) == 12 and len(record["distinct"]) == 4
    assert record["finish_reason"] == "length" and record["lossless"] is True
    assert record["sampling"]["dry_multiplier"] == 0.8 and record["device"] == "cpu"
    last = done.err.splitlines()[-1]
    assert last.startswith("12 tokens in ") and " tokens/s); ended at the length asked for" in last
    verbose = cli(*argv, "-v").err.splitlines()[-1]
    assert verbose.startswith("12 tokens in ") and "passes, acceptance rate " in verbose
    plain = cli(*argv, "--json", "j", "--strategy", "autoregressive", "--quiet")
    assert plain.err == "" and plain.out == done.out
    again = json.loads((tmp_path / "cwd" / "j").read_text())
    assert again["token_ids"] == record["token_ids"] and again["strategy"] == "autoregressive"


def test_penalties_biases_and_ends(cli: Call, tiny: Path, tmp_path: Path) -> None:
    argv = ("generate", "hello", "--model", tiny, "-n", "30", "--json", "j", "--continue", "--quiet")
    how = ("--presence-penalty", "1", "--dry-multiplier", "0.8", "--logit-bias", "7=-100,9=8")
    how += ("--logit-bias", "11=2.5", "--bad-words", "x", "--bad-words", "yz", "--min-tokens", "4")
    how += (
        "--dry-breakers",
        "none",
        "--stop-ids",
        "9",
        "--stop-ids",
        "11,12",
        "--stop",
        "never",
        "--stop",
        "no",
    )
    done = cli(*argv, *how)
    assert done.code == 0
    record = json.loads((tmp_path / "cwd" / "j").read_text())
    expected = {"presence_penalty": 1, "dry_multiplier": 0.8, "min_tokens": 4, "dry_breakers": []}
    expected |= {"bad_words": ["x", "yz"], "logit_bias": [[7, -100], [9, 8], [11, 2.5]]}
    assert expected.items() <= record["sampling"].items() and "frequency_penalty" not in record["sampling"]
    assert len(record["token_ids"]) > 4 and record["finish_reason"] == "stop"
    assert record["token_ids"][-1] == 9 and not {9, 7} & {*record["token_ids"][:-1]}
    for option, value, words in (
        ("--logit-bias", "9", "--logit-bias is '9'; valid: token ids with a bias each"),
        ("--logit-bias", "99999=1", "--logit-bias: token id is 99999; valid: 0 to "),
        ("--presence-penalty", "3", "--presence-penalty is 3.0; valid: from -2 to 2"),
        ("--dry-range", "0", "--dry-range is 0; valid: "),
        ("--bad-words", "", "--bad-words is ['']; valid: "),
    ):
        bad = cli(*argv, option, value)
        assert bad.code == 2 and words in bad.err.splitlines()[-1] and bad.out == "", (bad.err, words)


def test_the_ways_to_give_a_prompt(cli: Call, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("über", encoding="utf-8")
    rest = ("--model", tiny, "--max-new-tokens", "8", "--greedy", "--quiet")
    outcomes = [
        cli("generate", "über", *rest),
        cli("generate", "-", *rest, stdin=tmp_path / "p"),
        cli("generate", "--prompt-file", tmp_path / "p", *rest),
        cli("generate", "--prompt-file", "-", *rest, stdin=tmp_path / "p"),
    ]
    assert {(o.code, o.err) for o in outcomes} == {(0, "")}
    assert len({o.out for o in outcomes}) == 1
    assert cli("generate", "--prompt-ids", "1, 2,3", *rest).code == 0


def test_published_is_labelled(cli: Call, tiny: Path, tmp_path: Path) -> None:
    argv = ("generate", "hello", "--model", tiny, "--max-new-tokens", "6", "--strategy", "tokenswift")
    done = cli(*argv, "--acceptance", "published", "--json", "j")
    assert done.code == 0
    assert json.loads((tmp_path / "cwd" / "j").read_text())["lossless"] is False
    assert "not lossless" in done.err.splitlines()[0] and "NOT LOSSLESS" in done.err.splitlines()[-1]


def test_rope_scaling_makes_room(cli: Call, tiny: Path) -> None:
    argv = ("generate", "x" * 250, "--model", tiny, "--max-new-tokens", "8", "--quiet", "--ignore-eos")
    assert cli(*argv).code == 2
    assert cli(*argv, "--rope-scaling", "yarn").code == 0
    assert cli(*argv, "--rope-scaling", "yarn:2").code == 0


def test_stop(cli: Call, tiny: Path) -> None:
    argv = ("generate", "hello", "--model", tiny, "--max-new-tokens", "40", "--quiet", "--ignore-eos")
    text = cli(*argv).out
    letter = next(c for c in text[5:] if c.isprintable() and c.isascii())
    assert cli(*argv, "--stop", letter).out.rstrip("\n") == text[: text.index(letter)].rstrip("\n")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted; 3 tokens were written, the text so far is in t"),
        (
            RuntimeError("CUDA out of memory.\nTried"),
            1,
            "out of memory; 3 tokens were written, the text so far",
        ),
        (
            RuntimeError("odd\nerror"),
            1,
            "the run failed (RuntimeError: odd error); 3 tokens were written",
        ),
        (RunError("the journal is full"), 1, "the journal is full"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
    ],
)
def test_failures_keep_the_text(
    cli: Call,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    real, left = stream.Stream.__next__, [3]

    def step_or_failure(self: stream.Stream) -> Step:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return replace(real(self), text="x")

    monkeypatch.setattr(stream.Stream, "__next__", step_or_failure)
    argv = ("generate", "hello", "--model", tiny, "--strategy", "autoregressive", "--ignore-eos")
    done = cli(*argv, "--output", "t", "--json", "j", "--quiet")
    assert done.code == code and words in done.error
    assert done.out == "xxx\n" and (tmp_path / "cwd" / "t").read_text() == "xxx"
    assert done.files == ["t"]


def test_debug_shows_the_traceback(cli: Call) -> None:
    done = cli("generate", "x", "--top-p", "2", "--debug")
    assert (
        done.code == 2 and "Traceback" in done.err and done.err.splitlines()[-1].startswith("error: --top-p")
    )


def test_a_full_disk() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.raises(RunError, match="writing /dev/full failed .No space left"):
        TextSink(Path("/dev/full")).write("text")
    with pytest.raises(RunError, match="writing /dev/full failed .No space left"):
        write_json(Path("/dev/full"), {"a": 1})


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "r.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_json(link, {"a": "日本"})
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": "日本"} and link.is_symlink()

    def fail(source: object, destination: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_module.os, "replace", fail)
    with pytest.raises(RunError, match="No space left"):
        write_json(target, {"a": "new"})
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": "日本"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "r.json"]


def test_check_writable_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_writable("--json", str(tmp_path / "new")) == tmp_path / "new"
    assert list(tmp_path.iterdir()) == []
    assert check_writable("--json", "/dev/null") == Path("/dev/null")
    assert check_writable("--json", None) is None
    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(output_module.os, "access", lambda *_: False)
    with pytest.raises(InputError, match="--json .*old cannot be written .no right"):
        check_writable("--json", str(tmp_path / "old"))


# ---- progress ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("err", "out", "expected"), [(0, 0, "plain"), (0, 1, "plain"), (1, 0, "live"), (1, 1, "title")]
)
def test_progress_by_place(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], err: int, out: int, expected: str
) -> None:
    stderr, stdout = Stream(bool(err)), Stream(bool(out))
    assert mode_of(stderr, stdout) == expected  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setattr(sys, "stdout", stdout)
        progress = Progress(total=100)
    for _ in range(24):
        progress.update(STEP)
        clock[0] += 1
    line = "24 of 100 tokens, 2.0 tokens/s, ETA 0:38"
    shown = line.replace("24 of 100", "22 of 100").replace("0:38", "0:39")
    if expected == "plain":
        assert stderr.text.splitlines() == [shown, shown.replace("22 of", "42 of").replace("0:39", "0:29")]
    else:
        assert ("\x1b]2;" in stderr.text) == (expected == "title")
        assert stderr.text.count("\n") == 0 and shown in stderr.text
        progress.end()
        assert stderr.text.endswith("\x1b[23;2t" if expected == "title" else "\r\x1b[K")
    assert stdout.text == ""


def test_progress_in_figures(clock: list[float]) -> None:
    progress = Progress(100, verbose=True)
    for _ in range(11):
        progress.update(STEP)
        clock[0] += 1
    shown = progress.line(clock[0])
    assert shown == "22 of 100 tokens, 1.8 tokens/s, 2.00 tokens a pass, α 0.50, ETA 0:43"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    progress = Progress(100, quiet=True)
    for _ in range(30):
        progress.update(STEP)
        clock[0] += 1
    progress.end()
    progress.summary(RESULT)
    assert capsys.readouterr() == ("", "")


def test_summary_and_duration() -> None:
    assert summary(RESULT) == "2 tokens in 8.1 s (24.7 tokens/s); ended at the length asked for"
    slow = replace(RESULT, metrics=replace(METRICS, prefill_seconds=3.0), finish_reason="eos")
    assert summary(slow) == (
        "2 tokens in 8.1 s (24.7 tokens/s), after 3.0 s for a prompt of 3 tokens; the model ended the text"
    )
    detailed = summary(RESULT, verbose=True)
    assert "; 95 passes, acceptance rate 0.37 (n-grams 0.10)" in detailed
    assert "prompt of 3 tokens" in detailed and "LOSSLESS" not in detailed
    one = replace(RESULT, token_ids=[1], prompt_tokens=1, metrics=replace(METRICS, steps=1))
    assert summary(one, verbose=True).startswith(
        "1 token in 8.1 s (24.7 tokens/s), after 0.4 s for a prompt of 1 token; ended at the length asked "
        "for; 1 pass, acceptance"
    )
    assert summary(replace(RESULT, lossless=False)).endswith("NOT LOSSLESS (published acceptance rule)")
    drafted = replace(RESULT, token_sources={"target": 9, "head": 3, "ngram": 8, "eagle": 0})
    assert summary(drafted).endswith(
        "; n-grams and heads: 2.1 tokens a pass"
    )  # nothing says what plain takes
    timed = replace(drafted, drafting={"summary": "", "gain": 1.2249})
    assert summary(timed).endswith("; n-grams and heads: 2.1 tokens a pass, 1.22 × plain")
    assert "a pass" not in summary(replace(timed, token_sources={"target": 20}))  # no draft was accepted
    assert [duration(s) for s in (0, 59.6, 3599, 3600, 36061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "10:01:01",
    ]


def test_heads_are_advised_once_a_model(
    cli: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their price, once there is a speed to reckon with; not where they are not wanted."""
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path / "cache"))
    argv = ("generate", "hello", "--model", tiny, "--ignore-eos", "--continue")
    for more in (("-n", "20"), ("--heads", "none"), ("--strategy", "autoregressive")):
        assert "train-heads" not in cli(*argv, *more).err
    first = cli(*argv)
    line = first.err.splitlines()[-1]
    assert f"tokenswift train-heads --model {tiny} --data self --out heads.safetensors (about " in line
    assert int(line.split("(about ")[1].split(" hours here)")[0].replace(",", "")) >= 1
    assert "train-heads" not in cli(*argv).err


# ---- demo -------------------------------------------------------------------------------------------------


@pytest.fixture
def roomy(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(max_position_embeddings=8192)


def test_demo(cli: Call, roomy: Path, tmp_path: Path) -> None:
    done = cli("demo", "--model", roomy, "--tokens", "16", "--out", "results")
    assert done.code == 0, done.err
    names = ["auto.json", "autoregressive.json", "list.auto.json", "list.autoregressive.json"]
    assert done.files == [*names, "results"]
    found = [json.loads((tmp_path / "cwd/results" / name).read_text()) for name in names]
    for auto, plain in (found[:2], found[2:]):
        assert auto["token_ids"] == plain["token_ids"] and len(plain["token_ids"]) == 16
        assert plain["text"] in done.out
    assert [record["sampling"]["greedy"] for record in found] == [False, False, True, True]
    assert "identical: yes" in done.out
    left = "autoregressive.json, auto.json, list.autoregressive.json, list.auto.json"
    assert done.out.endswith(f"\nleft in results: {left} (tokens, text and figures of each)\n")


def test_a_demo_that_does_not_begin_leaves_nothing(cli: Call, roomy: Path) -> None:
    done = cli("demo", "--model", "no/model", "--out", "new")
    assert done.code == 2 and done.files == [], done
    assert cli("demo", "--model", "no/model", "--out", "").code == 2
    Path("old/auto.json").mkdir(parents=True)
    done = cli("demo", "--model", roomy, "--out", "old")
    assert done.code == 2 and "--out old/auto.json cannot be written (it is a folder)" in done.error, done


def test_demo_compares_speeds(cli: Call, roomy: Path) -> None:
    """A line for each way and text, speeds over the plain line of its text."""
    done = cli("demo", "--model", roomy, "--tokens", "40")
    lines = [line.split() for line in done.out.splitlines()]
    rows = [line for line in lines if line[1:2] in (["prose"], ["list"])]
    assert [row[:2] for row in rows] == [
        [name, text] for text in ("prose", "list") for name in ("plain", "adaptive")
    ]
    for plain, adaptive in (rows[:2], rows[2:]):
        assert plain[3:] == ["1.00", "1.00"] and float(adaptive[4]) >= 1.0


def test_demo_takes_turns(cli: Call, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is always first."""
    order: list[str] = []
    real = demo.Side.run_to

    def noted(self: demo.Side, tokens: int) -> Iterator[Step]:
        order.append(self.steps._run.request.strategy)
        return real(self, tokens)

    monkeypatch.setattr(demo.Side, "run_to", noted)
    assert cli("demo", "--model", roomy, "--tokens", "32").code == 0
    plain, auto = "autoregressive", "auto"
    assert order == [plain, auto, auto, plain] * 2


def test_an_interrupted_demo_says_how_far_it_was(
    cli: Call, roomy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = demo.Side.run_to

    def stopped(self: demo.Side, tokens: int) -> Iterator[Step]:
        if tokens > 16:
            raise KeyboardInterrupt
        return real(self, tokens)

    monkeypatch.setattr(demo.Side, "run_to", stopped)
    done = cli("demo", "--model", roomy, "--tokens", "100")
    assert done.code == 130 and "error: interrupted; tokens written: 16 by plain and " in done.err


def test_demo_says_when_the_texts_differ(cli: Call, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Run.result

    def other(self: Run) -> Generation:
        result = real(self)
        if self.request.strategy == "auto":
            return replace(result, token_ids=[t ^ (i == 3) for i, t in enumerate(result.token_ids)])
        return result

    monkeypatch.setattr(Run, "result", other)
    done = cli("demo", "--model", roomy, "--tokens", "8", "--quiet")
    assert done.code == 1 and "differ from new token 3" in done.error
    assert "identical: no" in done.out and "(prose)" in done.error and len(done.files) == 5


@pytest.mark.slow
def test_closed_standard_output(tiny: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m tokenswift.cli.main generate hi --model {tiny} --quiet --ignore-eos"
    command += f" --run-dir {tmp_path / 'run'}"
    done = subprocess.run(
        f"({command}; echo code $? >&2) | true", shell=True, capture_output=True, text=True, timeout=120
    )
    assert done.stderr.splitlines() == [
        "error: standard output was closed; nothing more was generated; continue with: tokenswift resume "
        f"{tmp_path / 'run'}",
        "code 1",
    ]


@pytest.mark.model
def test_default_model(cli: Call, tmp_path: Path, embedded: str) -> None:
    argv = ("generate", "The lamp was", "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "6")
    first = cli(*argv, "--json", "a", "--quiet")
    second = cli(*argv, "--json", "b", "--quiet", "--strategy", "autoregressive")
    assert (first.code, first.err) == (second.code, second.err) == (0, "")
    records = [json.loads((tmp_path / "cwd" / name).read_text()) for name in "ab"]
    assert records[0]["token_ids"] == records[1]["token_ids"]
    assert records[0]["model"] == "smollm2-135m" and first.out.rstrip("\n") == records[0]["text"].rstrip("\n")
