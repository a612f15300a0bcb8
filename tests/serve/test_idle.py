"""A drafter is trained beside a server while nobody waits for an answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.chats import chat_tokenizer
from tests.cli.conftest import Call
from tests.serve.conftest import Process, until
from tests.serve.eager_child import NICE
from tests.tiny import byte_model
from tokenswift import LLM
from tokenswift.cli import idle_training
from tokenswift.loader.default_model import cache_dir
from tokenswift.memory import Memory
from tokenswift.serve import idle
from tokenswift.serve.idle import IdleProgram

PROGRAM = "tests.serve.counting"
ENDLESS = "100000"
TEXT: dict[str, object] = {"prompt": "hello", "max_tokens": 24, "seed": 5, "ignore_eos": True}


# ---- a program -----------------------------------------------------------------------------------


class Watched:
    """A program, and whether somebody waits."""

    def __init__(self, *arguments: str, on_done: Callable[[], None] = lambda: None) -> None:
        self.program = IdleProgram([PROGRAM, *arguments], "counting", on_done=on_done)
        self.is_busy = False

    def status(self) -> str:
        """What the system says of its process; "" before there is one."""
        pid = self.program.pid
        return "" if pid is None else psutil.Process(pid).status()

    @property
    def share(self) -> float:
        return self.program.progress["share"]

    async def until(self, true: Callable[[], bool]) -> bool:
        """Wait on the event loop until something is true; whether it is."""
        end = time.monotonic() + 30
        while not true() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return true()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(idle, "LOOK", 0.01)
    monkeypatch.setenv("TOKENSWIFT_SHAPES", "0")


@pytest.mark.usefixtures("quick")
def test_a_program_runs_while_nobody_waits() -> None:
    """It is stopped by the system, wherever it is, as long as somebody waits."""

    async def go() -> None:
        one = Watched(ENDLESS)
        one.is_busy = True
        watching = asyncio.create_task(one.program.watch(lambda: one.is_busy))
        await asyncio.sleep(0.2)
        assert one.status() == ""  # it has not begun
        one.is_busy = False
        assert await one.until(lambda: one.share > 0)
        with one.program.held():
            assert await one.until(lambda: one.status() == psutil.STATUS_STOPPED)
            assert one.program.progress["paused"]
            share = one.share
            await asyncio.sleep(0.3)
            assert one.share == share
        assert await one.until(lambda: one.share > share)
        one.is_busy = True
        assert await one.until(lambda: one.status() == psutil.STATUS_STOPPED)
        pid = one.program.pid
        assert pid is not None
        one.program.close()  # stopped as it is
        assert not psutil.pid_exists(pid)
        watching.cancel()

    asyncio.run(go())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("end", "stage"), [("3", "done"), ("-3", "failed")])
def test_the_end_of_a_program(caplog: pytest.LogCaptureFixture, end: str, stage: str) -> None:
    """What is done is taken once nobody waits; what failed says why, and the server goes on."""
    taken: list[str] = []

    async def go() -> None:
        one = Watched(end, on_done=lambda: taken.append("it"))
        await asyncio.wait_for(one.program.watch(lambda: False), 30)
        assert one.program.progress["stage"] == stage
        assert not one.program.progress["paused"]
        one.program.close()

    with caplog.at_level(logging.INFO, "tokenswift"):
        asyncio.run(go())
    assert taken == ["it"] * (stage == "done")
    assert (stage == "done") == ("counting: done" in caplog.messages)
    failed = "counting: it failed (no more); the server goes on without"
    assert (stage == "failed") == (failed in caplog.messages)


# ---- a training ----------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a tiny Llama with layers enough for a drafter, and a cache folder of the
    test's own."""
    cache = tmp_path / "cache"
    cache.mkdir()
    kernels = cache_dir() / "kernels"  # which are not compiled once more
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(kernels)
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(cache))
    monkeypatch.setenv("TOKENSWIFT_SHAPES", "0")  # for the processes
    folder = tmp_path / "deep"
    byte_model(
        num_hidden_layers=7, tie_word_embeddings=False, max_position_embeddings=1024
    ).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


Train = Callable[..., Process]


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Iterator[Train]:
    """``train("--train-tokens", "1500")`` → a server of it that trains."""
    processes: list[Process] = []

    def begin(*argv: str) -> Process:
        processes.append(Process(model, tmp_path / "answers", "--train-when-idle", *argv))
        return processes[-1]

    yield begin
    for process in processes:
        if process.is_running():
            process.end()


def training(server: Process) -> idle.Progress:
    """How far its training is."""
    return httpx.get(f"{server.url}/health").json()["training"]


def has_written(server: Process, share: float) -> bool:
    """Whether the model has written that share of what is learnt from."""
    progress = training(server)
    return progress["stage"] == "write" and progress["share"] > share


def trainer_of(server: Process) -> psutil.Process:
    """The process that trains."""
    children = psutil.Process(server.pid).children()
    return next(child for child in children if "tests.serve.eager_child" in child.cmdline())


def text_from(server: Process) -> str:
    reply = httpx.post(f"{server.url}/v1/completions", json=TEXT, timeout=60)
    return reply.json()["choices"][0]["text"]


def test_a_training_makes_way_and_ends_with_its_server(train: Train, model: Path) -> None:
    """A request has the machine at once, and its tokens; a server that is killed leaves no process;
    the next one goes on where this one was."""
    server = train("--train-tokens", "400000")
    assert until(lambda: has_written(server, 0.003), 60)
    child = trainer_of(server)
    assert child.nice() == psutil.Process(server.pid).nice() + NICE
    wanted = LLM(model).generate("hello", 24, "autoregressive", seed=5, ignore_eos=True)
    assert text_from(server) == wanted.text
    assert child.status() == psutil.STATUS_STOPPED
    before = training(server)
    assert before["paused"]
    assert before["stage"] == "write"
    assert until(lambda: child.status() != psutil.STATUS_STOPPED, 10)
    assert text_from(server) == wanted.text
    assert child.status() == psutil.STATUS_STOPPED
    server.end()
    assert until(lambda: not child.is_running(), 10)
    again = train("--train-tokens", "400000")
    assert until(lambda: has_written(again, 0), 60)
    assert training(again)["share"] >= before["share"]
    metrics = httpx.get(f"{again.url}/metrics").text
    assert 'tokenswift_training_share{stage="write"}' in metrics


def test_a_trained_drafter_drafts_at_once_and_at_the_next_start(
    train: Train, model: Path, tmp_path: Path
) -> None:
    wanted = LLM(model).generate("hello", 24, "autoregressive", seed=5, ignore_eos=True)
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "text.txt").write_text("a text that somebody had written. " * 200)
    options = ("--train-tokens", "1500", "--train-from-runs", str(runs))
    server = train(*options)
    assert until(lambda: training(server)["stage"] == "done", 90), server.log.read_text()
    assert until(lambda: "from now on" in server.log.read_text(), 10)
    assert text_from(server) == wanted.text
    assert "the drafter names the next token at" in server.log.read_text()
    server.end()
    drafters = tmp_path / "cache" / "drafters"
    assert (drafters / "deep.gguf").is_file()
    assert not (drafters / "deep.gguf.texts").exists()
    again = train()
    assert "training" not in httpx.get(f"{again.url}/health").json()
    assert "--train-more N goes on from one that was trained" in again.log.read_text()
    assert text_from(again) == wanted.text


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--train-tokens", 1000], "--train-tokens is given without --train-when-idle"),
        (["--train-when-idle", "--weights", "q8_0"], "valid: weights stored"),
        (["--train-when-idle", "--eagle", "none"], "valid: eagle auto"),
        (["--train-when-idle", "--train-more", 1000], "is not there to go on from"),
        (["--train-when-idle", "--train-from-runs", "."], "holds no text"),
    ],
)
def test_options_that_do_not_go_together(
    cli: Call, model: Path, options: list[object], error: str
) -> None:
    outcome = cli("serve", "-m", model, "--port", 0, *options)
    assert outcome.code == 2
    assert error in outcome.error


def test_too_little_memory_is_said_in_figures(
    cli: Call, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = Memory(1_000_000_000, 8_000_000_000)
    monkeypatch.setattr("tokenswift.memory.memory_of", lambda device: little)
    outcome = cli("serve", "-m", model, "--port", 0, "--train-when-idle")
    assert outcome.code == 2
    assert "bytes of memory beside the model that is served" in outcome.err
    assert "1,000,000,000 bytes are available" in outcome.err


def test_texts_of_runs_stay_as_they_were(tmp_path: Path) -> None:
    """A training that goes on after a restart learns from the texts that it began with."""
    runs = tmp_path / "runs"
    (runs / "a").mkdir(parents=True)
    (runs / "a" / "text.txt").write_text("one")
    place = tmp_path / "copy"
    assert idle_training.copied_texts(str(runs), place) == place
    (runs / "a" / "text.txt").write_text("another")
    idle_training.copied_texts(str(runs), place)
    assert [file.read_text() for file in place.iterdir()] == ["one"]
