"""Models over several devices from the command line: places by a file, ranks by torchrun, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.test_ranks import free_port
from tokenswift import LLM, resume
from tokenswift.cli.main import main

DISK = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
DISK |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
IDS = list(range(40, 60))
ASKED = ["--prompt-ids", ",".join(map(str, IDS)), "--ignore-eos", "--heads", "none", "--greedy"]


@pytest.fixture
def folder(tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder("llama", max_position_embeddings=1024))


@pytest.fixture
def places(tmp_path: Path) -> str:
    path = tmp_path / "places.json"
    path.write_text(json.dumps(DISK))
    return str(path)


def test_a_file_of_places(
    folder: str, places: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = LLM(folder, heads=None).generate(IDS, 16, greedy=True, ignore_eos=True).token_ids
    run, record = str(tmp_path / "run"), tmp_path / "record.json"
    plain = ["--strategy", "autoregressive"]
    left = ["--run-dir", run, "--max-new-tokens", "8", "--device-map", places]
    assert main(["generate", "--model", folder, *ASKED, *plain, *left]) == 0
    assert "layers are placed by device_map: transformers' own forward is used" in capfd.readouterr().err
    assert main(["resume", run, "--max-new-tokens", "12", "--json", str(record)]) == 0
    assert json.loads(record.read_text())["token_ids"] == expected[:12]
    assert main(["resume", run, "--max-new-tokens", "16", "--device-map", "auto", "--json", str(record)]) == 0
    assert json.loads(record.read_text())["token_ids"] == expected


@pytest.mark.parametrize(
    "options, variables, line",
    [
        (
            ["--tp", "2"],
            {},
            "--tp is 2, but torchrun did not start this process; valid: 1, or torchrun --nproc",
        ),
        (["--tp", "3"], {"WORLD_SIZE": "2"}, "--tp is 3, but torchrun started 2 processes; valid: 2"),
        ([], {"WORLD_SIZE": "2"}, "--tp is 1, but torchrun started 2 processes; valid: 2"),
        (["--tp", "0"], {}, "--tp is 0; valid: an integer of at least 1"),
        (["--device-map", "nowhere.json"], {}, "--device-map nowhere.json cannot be read"),
        (
            ["--device-map", "auto", "--device", "cpu"],
            {},
            "--device is 'cpu' beside --device-map; valid: auto",
        ),
        (
            ["--prompts", "a.jsonl", "--tp", "2"],
            {"WORLD_SIZE": "2"},
            "--tp is 2 beside --prompts; valid: one",
        ),
    ],
)
def test_what_is_refused(
    folder: str,
    options: list[str],
    variables: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", "--model", folder, *ASKED, *options]) == 2
    errors = [text for text in capfd.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {line}")


@pytest.mark.parametrize("content", ["[1]", "{", '{"": "tape"}'])
def test_files_that_place_nothing(
    folder: str, content: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "places.json"
    path.write_text(content)
    assert main(["generate", "--model", folder, *ASKED, "--device-map", str(path)]) == 2
    assert capfd.readouterr().err.count("error: --device-map ") == 1


# ---- by torchrun --------------------------------------------------------------------------------


def torchrun(count: int, arguments: list[str]) -> subprocess.Popen[str]:
    """The command in so many processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    launcher += ["--master-port", free_port(), "-m", "tokenswift"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launcher, *arguments], **pipes, errors="replace", env=os.environ)


def lines(err: str) -> list[str]:
    """The lines of errors, those of torchrun left out."""
    return [line for line in err.splitlines() if line.startswith("error: ")]


def by_rank(launched: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The processes that torchrun has started."""
    found = psutil.Process(launched.pid).children()
    return {int(one.environ()["RANK"]): one for one in found if "RANK" in one.environ()}


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_others_with_one_line(folder: str, tmp_path: Path, killed: int) -> None:
    run = str(tmp_path / "run")
    more = ["--tp", "2", "--max-new-tokens", "900", "--run-dir", run, "--strategy", "autoregressive"]
    launched = torchrun(2, ["generate", "--model", folder, *ASKED, *more])
    assert launched.stdout is not None and launched.stdout.read(40)
    ranks = by_rank(launched)
    ranks[killed].kill()
    begun = time.monotonic()
    psutil.wait_procs([ranks[1 - killed]], timeout=60)
    assert time.monotonic() - begun < 10
    _, err = launched.communicate(timeout=60)
    assert launched.returncode == 1
    assert len(lines(err)) == 1 and f"continue with: tokenswift resume {run}" in lines(err)[0]
    expected = LLM(folder, heads=None, device_map="auto").generate(IDS, 900, greedy=True, ignore_eos=True)
    assert resume(run).token_ids == expected.token_ids


@pytest.mark.slow
def test_a_rank_that_waits_for_ever_hears_a_signal(folder: str) -> None:
    more = ["--tp", "2", "--max-new-tokens", "900", "--strategy", "autoregressive"]
    launched = torchrun(2, ["generate", "--model", folder, *ASKED, *more])
    assert launched.stdout is not None and launched.stdout.read(40)
    ranks = by_rank(launched)
    ranks[1].suspend()
    time.sleep(1)
    ranks[0].send_signal(signal.SIGTERM)
    begun = time.monotonic()
    psutil.wait_procs([ranks[0]], timeout=60)
    assert time.monotonic() - begun < 10
    ranks[1].resume()
    _, err = launched.communicate(timeout=60)
    assert lines(err) == ["error: terminated; another rank did not answer"]


@pytest.mark.slow
def test_bad_input_is_one_line_of_all_ranks(tiny_folder: Callable[..., Path], folder: str) -> None:
    odd = str(tiny_folder("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=48))
    for arguments, line in (
        (["--model", odd, "--tp", "2"], f"error: --tp is 2, but model {odd} has 6 heads of queries and 3 of"),
        (["--model", folder, "--tp", "3"], "error: --tp is 3, but torchrun started 2 processes; valid: 2"),
        (["--model", folder], "error: --tp is 1, but torchrun started 2 processes; valid: 2"),
    ):
        _, err = torchrun(2, ["generate", *ASKED, *arguments]).communicate(timeout=120)
        assert len(lines(err)) == 1 and lines(err)[0].startswith(line)
        assert "exitcode  : 2" in err


@pytest.mark.slow
def test_the_audit_over_two_ranks(folder: str, tmp_path: Path) -> None:
    record = tmp_path / "audit.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The harbour lay still, and the boats with it. The harbour lay still, and")
    options = ["--max-new-tokens", "16", "--prompts", str(prompts), "--json", str(record)]
    launched = torchrun(2, ["audit", "--model", folder, "--heads", "none", "--tp", "2", *options])
    out, err = launched.communicate(timeout=300)
    assert launched.returncode == 0, err
    assert json.loads(record.read_text())["failures"] == [] and out.count("Audit of ") == 1


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_over_three_ranks(tmp_path: Path) -> None:
    """Its 9 heads of queries and 3 of keys are shared out among three."""
    whole = LLM("smollm2-135m", dtype="float32", device_map="auto")
    prompt = "The history of the lighthouse begins"
    for sampling in (["--greedy"], ["--seed", "5"]):
        how: dict[str, Any] = {"greedy": True} if sampling == ["--greedy"] else {"seed": 5}
        expected = whole.generate(prompt, 500, "autoregressive", ignore_eos=True, **how).token_ids
        for strategy in (["--strategy", "autoregressive"], ["--strategy", "tokenswift", "--tree", "1,3,3,3"]):
            record = tmp_path / "record.json"
            more = ["--raw", "--dtype", "float32", "--tp", "3", "--max-new-tokens", "500", "--ignore-eos"]
            launched = torchrun(3, ["generate", prompt, *more, *sampling, *strategy, "--json", str(record)])
            _, err = launched.communicate(timeout=3000)
            assert launched.returncode == 0, err
            assert json.loads(record.read_text())["token_ids"] == expected
