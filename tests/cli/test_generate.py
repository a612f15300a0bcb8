"""What `generate` and `demo` print, write and keep."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, Outcome, chatty_model
from tokenswift.cli import measure
from tokenswift.cli.results import write_json
from tokenswift.engine.llm import LLM
from tokenswift.engine.stream import Stream
from tokenswift.types import RunError, Step

RECORD_FIELDS = """model strategy seed sampling prompt_tokens token_ids text finish_reason steps
acceptance_rate ngram_acceptance_rate mean_acceptance_length tokens_per_second seconds distinct
versions device"""
TREE = ("--strategy", "tokenswift", "--tree", "1,2", "--ngrams", "2")
LAST_WORDS = " tokens/s); stopped at its maximum length"


@pytest.fixture
def hello(cli: Call, tiny: Path) -> Callable[..., Outcome]:
    """Runs ``generate`` for 12 tokens, with more options."""
    argv = ("hello", "--model", tiny, "--max-new-tokens", "12", "--ignore-eos", "--seed", "5")
    return lambda *options: cli("generate", *argv, *options)


def test_the_text_is_on_standard_output_in_the_file_and_in_the_record(
    hello: Callable[..., Outcome],
) -> None:
    done = hello("--json", "j", "--output", "t", *TREE)
    assert done.code == 0
    assert done.files == ["j", "t"]
    text = Path("t").read_text()
    assert json.loads(Path("j").read_text())["text"] == text
    assert done.out == (text if text.endswith("\n") else text + "\n")
    last_line = done.err.splitlines()[-1]
    assert last_line.startswith("12 tokens in ")
    assert LAST_WORDS in last_line


def test_the_fields_of_a_record(hello: Callable[..., Outcome], tiny: Path) -> None:
    hello("--json", "j", *TREE)
    record = json.loads(Path("j").read_text())
    assert set(RECORD_FIELDS.split()) <= set(record)
    expected = {"model": str(tiny), "strategy": "tokenswift", "seed": 5, "prompt_tokens": 5}
    expected |= {"strategy_options": {"tree": [1, 2], "ngrams": 2}, "device": "cpu"}
    expected |= {"finish_reason": "length", "lossless": True}
    assert {name: record[name] for name in expected} == expected
    assert len(record["token_ids"]) == 12
    assert len(record["distinct"]) == 4
    assert record["sampling"]["dry_multiplier"] == 0.8


def test_verbose_summaries_have_figures_of_drafting(hello: Callable[..., Outcome]) -> None:
    last_line = hello("-v").err.splitlines()[-1]
    assert last_line.startswith("12 tokens in ")
    assert "passes, acceptance rate " in last_line


def test_plain_decoding_writes_the_same(hello: Callable[..., Outcome]) -> None:
    drafted = hello("--json", "drafted", *TREE)
    plain = hello("--json", "plain", "--strategy", "autoregressive", "--quiet")
    assert plain.err == ""
    assert plain.out == drafted.out
    records = [json.loads(Path(name).read_text()) for name in ("drafted", "plain")]
    assert records[0]["token_ids"] == records[1]["token_ids"]
    assert records[1]["strategy"] == "autoregressive"


def test_penalties_biases_and_ends(cli: Call, tiny: Path) -> None:
    argv = (
        "--presence-penalty 1 --logit-bias 7=-100,9=8 --logit-bias 11=2.5 --bad-words x "
        "--bad-words yz "
    )
    argv += (
        "--min-tokens 4 --dry-breakers none --stop-ids 9 --stop-ids 11,12 --stop never --stop no"
    )
    how = ("generate", "hello", "--model", tiny, "-n", "30", "--json", "--continue", "--quiet")
    record = json.loads(cli(*how, *argv.split()).out)
    expected = {"presence_penalty": 1, "dry_multiplier": 0.8, "min_tokens": 4, "dry_breakers": []}
    expected |= {"bad_words": ["x", "yz"], "logit_bias": [[7, -100], [9, 8], [11, 2.5]]}
    assert expected.items() <= record["sampling"].items()
    assert "frequency_penalty" not in record["sampling"]
    assert len(record["token_ids"]) > 4
    assert record["finish_reason"] == "stop"
    assert record["token_ids"][-1] == 9
    assert not {9, 7} & {*record["token_ids"][:-1]}
    bad = cli(*how, "--logit-bias", "99999=1")
    assert bad.code == 2
    assert "--logit-bias: token id is 99999; valid: 0 to " in bad.err


def test_published_is_labelled(cli: Call, tiny: Path, tmp_path: Path) -> None:
    argv = (
        "generate",
        "hello",
        "--model",
        tiny,
        "--max-new-tokens",
        "6",
        "--strategy",
        "tokenswift",
    )
    done = cli(*argv, "--acceptance", "published", "--json", "j")
    assert done.code == 0
    assert json.loads((tmp_path / "cwd" / "j").read_text())["lossless"] is False
    assert "not lossless" in done.err.splitlines()[0]
    assert "NOT LOSSLESS" in done.err.splitlines()[-1]


FAILURES: list[tuple[BaseException, int, str]] = [
    (KeyboardInterrupt(), 130, "interrupted; 3 tokens were written, the text so far is in t"),
    (
        RuntimeError("CUDA out of memory.\nTried"),
        1,
        "out of memory; 3 tokens were written, the text so far",
    ),
    (
        RuntimeError("odd\nerror"),
        1,
        "the run failed (RuntimeError: odd error); --debug shows where; 3 tokens",
    ),
    (OSError(28, "No space left on device"), 1, "No space left on device"),
    (RunError("writing in run failed; 3 tokens are kept in run"), 1, "3 tokens are kept in run"),
]


@pytest.mark.parametrize(("error", "code", "words"), FAILURES)
def test_failures_keep_the_text(
    cli: Call,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: Any,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    real_next = Stream.__next__
    steps = 0

    def step_or_failure(self: Stream) -> Step:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise error
        return replace(real_next(self), text="x")

    monkeypatch.setattr(Stream, "__next__", step_or_failure)
    argv = ("generate", "hello", "--model", tiny, "--strategy", "autoregressive", "--ignore-eos")
    done = cli(*argv, "--output", "t", "--json", "j", "--quiet")
    assert done.code == code
    assert words in done.error
    assert done.out == "xxx\n"
    assert (tmp_path / "cwd" / "t").read_text() == "xxx"
    assert done.files == ["t"]


def test_a_file_of_json_is_complete_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "r.json"
    link = tmp_path / "link.json"
    link.symlink_to(target)
    write_json(link, {"a": "日本"})
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": "日本"}
    assert link.is_symlink()

    def fail(source: object, destination: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunError, match="No space left"):
        write_json(target, {"a": "new"})
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": "日本"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "r.json"]


def test_adaptive_drafting_and_the_papers_method(cli: Call, tiny: Path) -> None:
    """What is named is what runs; a tree without ``--strategy tokenswift`` is an error that names
    it."""
    model = (
        "--model",
        tiny,
        "--heads",
        "none",
        "--max-new-tokens",
        "12",
        "--ignore-eos",
        "--json",
        "-",
    )
    paper = ("--strategy", "tokenswift", "--tree")
    for argv in ((), (*paper, "auto"), (*paper, "1,2")):
        got = cli("generate", "hello there", *model, *argv)
        assert got.code == 0, got.err
        record = json.loads(got.out)
        assert record["strategy"] == (argv[1] if argv else "auto")
        assert (record["drafting"] is None) == bool(
            argv
        )  # adaptive drafting alone gives an account
    for argv, words in (
        (("--tree", "2"), "strategy tokenswift"),
        (("--strategy", "triforce"), "--draft-model is not given"),
        (("--strategy", "medusa"), "medusa needs heads of kind medusa"),
    ):
        refused = cli("generate", "hello there", *model, *argv)
        assert refused.code == 2, refused
        assert refused.out == ""
        assert words in refused.err.splitlines()[-1]


# ---- demo ----------------------------------------------------------------------------------------


@pytest.fixture
def roomy(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(max_position_embeddings=8192)


def test_demo(cli: Call, roomy: Path) -> None:
    done = cli("demo", "--model", roomy, "-n", "16", "--json", "r.json")
    assert done.code == 0, done
    assert done.files == ["r.json"]
    record = json.loads(Path("r.json").read_text())
    assert [*record] == ["prose", "list"]
    assert all(measurement["identical"] for measurement in record.values())
    with LLM(roomy) as llm:
        goods = llm.encode(measure.repeating_list(measure.LIST_TOKENS))
        prompt = goods[: record["list"]["context"]]
        text = llm.generate(prompt, 16, "autoregressive", greedy=True, ignore_eos=True).text
    assert text in done.out
    rows = [line.split() for line in done.out.splitlines()]
    rows = [row for row in rows if row[1:2] in (["prose"], ["list"])]
    assert [row[0] for row in rows] == ["plain", "adaptive"] * 2
    assert all(row[3:] == ["1.00", "1.00"] for row in rows[::2])
    assert done.out.endswith("\nidentical: yes\n")


def test_a_demo_of_a_chat_model_answers_first(cli: Call, tmp_path: Path) -> None:
    chatty = chatty_model(tmp_path / "chatty", 512)
    done = cli("demo", "--model", chatty, "-n", "8", "--json", "r.json")
    assert done.code == 0, done
    record = json.loads(Path("r.json").read_text())
    assert [*record] == ["answer", "prose", "list"]


def test_demo_fits_the_model_and_three_minutes(cli: Call, tiny: Path) -> None:
    """A model with few positions, and one that is slow: fewer tokens are read and written."""
    lengths: list[int] = []
    real_measure = measure.measure

    def note_length(llm: LLM, prompt: list[int], max_new_tokens: int, **more: Any) -> Any:
        lengths.append(max_new_tokens)
        return real_measure(llm, prompt, max_new_tokens, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "measure", note_length)
        for limit in (measure.PREFILL_SECONDS, 1e-9):
            patch.setattr(measure, "PREFILL_SECONDS", limit)
            patch.setattr(measure, "TEXT_SECONDS", limit)
            done = cli("demo", "--model", tiny, "--json", "r.json")
            assert done.code == 0, done
            assert "identical: yes" in done.out
            context = json.loads(Path("r.json").read_text())["list"]["context"]
            assert context == (128 if limit > 1 else measure.TRIAL_PROMPT)
            assert lengths[-1] == (128 if limit > 1 else measure.TRIAL_TOKENS)


@pytest.mark.model
def test_default_model(cli: Call, tmp_path: Path, embedded: str) -> None:
    argv = (
        "generate",
        "The lamp was",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--max-new-tokens",
        "6",
    )
    done = cli(*argv, "--json", "a", "--quiet")
    assert (done.code, done.err) == (0, "")
    record = json.loads((tmp_path / "cwd" / "a").read_text())
    assert record["model"] == "smollm2-135m"
    assert done.out.rstrip("\n") == record["text"].rstrip("\n")


def test_a_text_that_is_cut_before_its_schema_ends_it_says_so(cli: Call, tiny: Path) -> None:
    argv = ("generate", "hi", "--model", tiny, "--continue")
    schema = ("--json-schema", '{"enum": ["a long word"]}')
    line = "the text may be incomplete: its schema or grammar had not ended it"
    assert line in cli(*argv, *schema, "-n", 1).err
    assert line not in cli(*argv, *schema, "-n", 200).err
    assert line not in cli(*argv, "-n", 1).err
