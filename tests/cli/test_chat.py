"""Prompts that are answered or continued, and ``tokenswift chat``."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chats import TEMPLATE, chat_tokenizer
from tests.cli.conftest import Call, Outcome, chatty_model, interrupted
from tokenswift.config.sampling import ANSWERS, SamplingParams, settings_of
from tokenswift.config.sampling import CONTINUED as CONTINUED_SAMPLING
from tokenswift.engine.llm import LLM
from tokenswift.models.base import BaseTarget
from tokenswift.runs import folder as folders

ANSWERED = "prompt: answered, through the model's chat template"
CONTINUED = "prompt: continued as it is"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_model(tmp_path_factory.mktemp("chatty"), 512)


@pytest.fixture
def generate(cli: Call, chatty: Path) -> Callable[..., tuple[str, dict[str, object]]]:
    """Runs ``generate``; the line about the prompt, and the record."""

    def call(*argv: object, model: Path = chatty, **more: Any) -> tuple[str, dict[str, Any]]:
        rest = ("--model", model, "--max-new-tokens", "6", "--ignore-eos", "--json", "j")
        done = cli("generate", *argv, *rest, **more)
        assert done.code == 0, done
        (line,) = [line for line in done.err.splitlines() if line.startswith("prompt:")]
        return line, json.loads(Path("j").read_text(encoding="utf-8"))

    return call


def template_tokens(*messages: tuple[str, str]) -> int:
    """Tokens of a chat by the template: bytes, and one ``<s>``."""
    chat = [{"role": role, "content": content} for role, content in messages]
    text = chat_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return len(str(text)) - len("<s>") + 1


# ---- generate ------------------------------------------------------------------------------------


def test_the_same_words_are_treated_the_same_however_they_come(
    generate: Callable[..., tuple[str, dict[str, object]]], tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p"
    file.write_text("Hi", encoding="utf-8")
    question = template_tokens(("user", "Hi"))
    with_system = template_tokens(("system", "Be brief."), ("user", "Hi"))
    both = template_tokens(("user", "Hi\n\nWhy?"))
    answers = settings_of(ANSWERS)
    warm = settings_of(replace(ANSWERS, temperature=0.9))
    paper = settings_of(SamplingParams())
    continued = settings_of(CONTINUED_SAMPLING)
    for argv, more, begins, tokens, sampling in (
        (("Hi",), {}, ANSWERED, question, answers),
        (("Hi", "-t", "0.9"), {}, ANSWERED, question, warm),
        (("Hi", "--greedy"), {}, ANSWERED, question, settings_of(replace(ANSWERS, greedy=True))),
        (("Hi", "--system", "Be brief."), {}, ANSWERED, with_system, answers),
        (("Hi", "--preset", "paper"), {}, ANSWERED, question, paper),
        (("Hi", "--continue"), {}, CONTINUED, 3, continued),
        ((), {"stdin": file}, ANSWERED, question, answers),
        (("-", "--continue"), {"stdin": file}, CONTINUED, 3, continued),
        (("Why?",), {"stdin": file}, ANSWERED, both, answers),
        (("Why?", "--continue"), {"stdin": file}, CONTINUED, len("Hi\n\nWhy?") + 1, continued),
        (("--prompt-file", file), {}, ANSWERED, question, answers),
        (("--prompt-ids", "5,6"), {}, "prompt: token ids", 2, continued),
        (("Hi",), {"model": tiny}, f"{CONTINUED} (the model has no chat template)", 2, continued),
    ):
        line, record = generate(*argv, **more)
        assert line.startswith(begins), (argv, line)
        assert record["prompt_tokens"] == tokens, argv
        assert record["sampling"] == sampling, argv


def test_options_of_the_template(cli: Call, tmp_path: Path) -> None:
    """They reach the template of ``generate`` and of ``chat``."""
    model = chatty_model(tmp_path / "m", 512)
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = TEMPLATE + "{% if enable_thinking is false %}quick {{ mood }}{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    options = ("--template-options", '{"enable_thinking": false, "mood": "so so"}')
    how = ("--model", model, "--max-new-tokens", 6, "--greedy")
    done = cli("generate", "Hi", *how, *options, "--run-dir", "run")
    assert done.code == 0, done
    with LLM(model) as llm:
        prompt = llm.tokenizer.decode(folders.load(Path("run"))[1].header.prompt)
        messages = [{"role": "user", "content": "Hi"}]
        variables = {"enable_thinking": False, "mood": "so so"}
        expected = llm.generate(messages, 6, greedy=True, template_options=variables).text
    assert prompt.endswith("assistant:quick so so")
    Path("lines").write_text("Hi\n", encoding="utf-8")
    assert cli("chat", *how, *options, stdin=Path("lines")).out.strip() == expected.strip()


def test_a_chat_without_a_template_is_refused(cli: Call, tiny: Path) -> None:
    for argv in (("generate", "Hi", "--system", "x"), ("chat",)):
        done = cli(*argv, "--model", tiny, "--quiet")
        assert done.code == 2, done
        assert f"needs a chat template, and the model {tiny} has none" in done.error
        assert done.out == ""


# ---- chat, piped ---------------------------------------------------------------------------------


@pytest.fixture
def talk(cli: Call, chatty: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """``talk(b"lines", options…)``: the lines go to ``tokenswift chat`` through standard input."""

    def call(lines: bytes, *argv: object, seed: tuple[str, ...] = ("--seed", "0")) -> Outcome:
        (tmp_path / "in").write_bytes(lines)
        rest = ("--model", chatty, "--max-new-tokens", "6", *seed, *argv)
        return cli("chat", *rest, stdin=tmp_path / "in")

    return call


def messages_of(name: str = "c.json") -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in json.loads(Path(name).read_text(encoding="utf-8"))]


def test_a_conversation_from_a_pipe(talk: Callable[..., Outcome], chatty: Path) -> None:
    done = talk(
        b"\xef\xbb\xbfHello\r\n\n  \nAnd then?\n/save c.json\n/clear\nHello\n/save d.json\n"
    )
    assert done.code == 0, done
    messages = messages_of()
    assert [role for role, _ in messages] == ["user", "assistant"] * 2
    assert messages[0][1] == "Hello"
    assert messages[2][1] == "And then?"
    with LLM(chatty) as llm:  # the whole conversation is the prompt
        for turn in (1, 3):
            chat = [{"role": role, "content": content} for role, content in messages[:turn]]
            assert llm.generate(chat, 6).text == messages[turn][1]
    assert messages_of("d.json") == messages[:2]  # the same question, nothing before it
    answers = [messages[1][1], messages[3][1], messages[1][1]]
    assert done.out == "".join(text if text.endswith("\n") else text + "\n" for text in answers)
    assert "4 messages written to c.json" in done.err
    assert "stopped at its maximum length" in done.err


def test_an_answers_prefill_is_of_new_text_alone(
    talk: Callable[..., Outcome], monkeypatch: Any
) -> None:
    """The beginning of the conversation is copied, but for the rows that drafting starts from."""
    lengths: list[int] = []
    real_prefill = BaseTarget.prefill

    def note_length(self: BaseTarget, tokens: list[int], *args: Any, **more: Any) -> Any:
        lengths.append(len(tokens))
        return real_prefill(self, tokens, *args, **more)

    monkeypatch.setattr(BaseTarget, "prefill", note_length)
    assert talk(b"Hello there, how are you?\nAnd now?\n", "--strategy", "autoregressive").code == 0
    assert 0 < lengths[-1] < lengths[-2], lengths


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            b"/sytem Hi\n",
            "/sytem is not a command; valid: /clear, /exit, /help, /load, /retry, /save, /set, "
            "/system, /undo; did you mean /system?",
        ),
        (b"/save\n", "/save cannot be written ("),
        (
            b"/save no/such/folder.json\n",
            "/save no/such/folder.json cannot be written (No such file",
        ),
        (b"ok\n\xff\n", "a line of standard input is not UTF-8"),
        (
            b"x" * 600 + b"\n",
            "prompt and new tokens are 619 tokens; valid: up to the model's 512 positions",
        ),
    ],
)
def test_what_ends_a_piped_chat(talk: Callable[..., Outcome], lines: bytes, words: str) -> None:
    done = talk(lines, "--quiet")
    assert done.code == 2, done
    assert words in done.error


def test_an_answer_is_as_long_as_there_is_room(cli: Call, chatty: Path) -> None:
    """And does not end after the 200 tokens of a continued text."""
    Path("in").write_text("Hello\n")
    done = cli("chat", "--model", chatty, "--seed", 3, "--logit-bias", "257=-100", stdin=Path("in"))
    assert re.search(r"\n.[3-5]\d\d tokens in ", done.err), done


def test_no_file_is_replaced(talk: Callable[..., Outcome]) -> None:
    Path("mine.json").write_text("mine")
    done = talk(b"/save mine.json\n", "--quiet")
    assert done.code == 2
    assert done.error.startswith("/save mine.json cannot be written (File exists)")
    assert Path("mine.json").read_text() == "mine"


def test_the_system_text_stays(talk: Callable[..., Outcome]) -> None:
    done = talk(b"Hello\n/save a.json\n/clear\n/save b.json\n", "--system", "Be brief.")
    assert done.code == 0, done
    assert "1 message written to b.json\n" in done.err
    assert messages_of("a.json")[:2] == [("system", "Be brief."), ("user", "Hello")]
    assert messages_of("b.json") == [("system", "Be brief.")]


# ---- chat, interrupted ---------------------------------------------------------------------------


def test_ctrl_c_stops_an_answer_and_keeps_it(
    talk: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = talk(b"Hello\n", "-n", 40, "--strategy", "autoregressive").out
    interrupted(monkeypatch, 3)
    done = talk(b"Hello\n/save c.json\n", "-n", 40, "--strategy", "autoregressive")
    (_, question), (role, answer) = messages_of()
    assert done.code == 0, done
    assert "(stopped)" in done.err
    assert (question, role) == ("Hello", "assistant")
    assert done.out == answer + "\n"
    assert 0 < len(answer) < len(uninterrupted)
    assert uninterrupted.startswith(answer)


# ---- chat, in a terminal -------------------------------------------------------------------------


class TypedChat:
    """``tokenswift chat`` at a terminal of its own.

    Attributes:
        process: the program.
        handle: this side of the terminal.
    """

    def __init__(self, model: Path, folder: Path, cache: Path) -> None:
        self.handle, slave = pty.openpty()
        self.settings = termios.tcgetattr(self.handle)
        self._screen = b""
        # some seeds end the answer at once, and then there is none to be saved
        argv = ["chat", "--model", str(model), "-n", "4", "--device", "cpu", "--seed", "0"]
        env = {
            **os.environ,
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "TOKENSWIFT_CACHE": str(cache),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenswift", *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=env,
        )
        os.close(slave)

    def wait_for(self, words: bytes) -> None:
        """Read until there are these words; a busy machine needs most of the time to load the
        model."""
        end = time.monotonic() + 100
        while words not in self._screen:
            assert time.monotonic() < end, repr(self._screen)
            if select.select([self.handle], [], [], 0.1)[0]:
                self._screen += os.read(self.handle, 1 << 16)
        self._screen = self._screen.partition(words)[2]

    def type(self, keys: bytes, words: bytes) -> None:
        """Type, once the chat waits for a line, and wait for words."""
        self.wait_for(b"\x1b[?2004h")
        os.write(self.handle, keys)
        self.wait_for(words)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.handle)


@pytest.mark.parametrize("end", [b"\x04", pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_keys_of_a_real_terminal(chatty: Path, tmp_path: Path, own_cache: Path, end: Any) -> None:
    """Ctrl-J is a line end in a message; the terminal is left as it was, whatever ends the chat."""
    typed_chat = TypedChat(chatty, tmp_path, own_cache)
    try:
        typed_chat.type(b"Hel\x7flo\nyou\r", b"tokens/s")
        typed_chat.type(b"/nope\r", b"/nope is not a command")  # the chat goes on
        typed_chat.type(b"/save c.json\r", b"2 messages written")
        typed_chat.wait_for(b"\x1b[?2004h")
        if isinstance(end, bytes):
            os.write(typed_chat.handle, end)
        else:
            typed_chat.process.send_signal(end)
        assert typed_chat.process.wait(100) == (0 if isinstance(end, bytes) else 143)
        assert termios.tcgetattr(typed_chat.handle) == typed_chat.settings
    finally:
        typed_chat.close()
    messages = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert messages[0]["content"] == "Helo\nyou"
