"""What the commands of ``tokenswift chat`` do, and conversations that go on from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call, Outcome, chatty_model
from tokenswift.chat.saved import MOST_BYTES
from tokenswift.cli.settings import Settings
from tokenswift.config.sampling import ANSWERS
from tokenswift.engine.llm import LLM
from tokenswift.types import InputError

Talk = Callable[..., Outcome]
QUESTION = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Good day."}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_model(tmp_path_factory.mktemp("chatty"), 1024)


@pytest.fixture
def talk(cli: Call, chatty: Path, tmp_path: Path) -> Talk:
    """``talk("line", "line", options=(…))``: the lines go to ``tokenswift chat``."""

    def call(*lines: str, options: tuple[object, ...] = ()) -> Outcome:
        (tmp_path / "in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        rest = ("--model", chatty, "--max-new-tokens", "6", "--seed", "0", *options)
        return cli("chat", *rest, stdin=tmp_path / "in")

    return call


def saved(name: str) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = json.loads(Path(name).read_text(encoding="utf-8"))
    return messages


def written(content: object, name: str = "c.json") -> str:
    Path(name).write_text(json.dumps(content), encoding="utf-8")
    return name


def contents(name: str) -> list[str]:
    return [message["content"] for message in saved(name)]


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["--resume", "/load"])
def test_a_saved_conversation_goes_on_as_if_it_had_never_ended(talk: Talk, way: str) -> None:
    assert talk("Hello", "And then?", "/save whole.json").code == 0
    assert talk("Hello", "/save half.json").code == 0
    if way == "/load":
        done = talk("/load half.json", "And then?", "/save joined.json")
    else:
        done = talk("And then?", "/save joined.json", options=("--resume", "half.json"))
    assert done.code == 0, done
    assert "2 messages read from half.json" in done.err
    assert saved("joined.json") == saved("whole.json")


def test_save_alone_writes_where_the_conversation_came_from(talk: Talk) -> None:
    name = written([QUESTION, ANSWER])
    assert talk("And then?", "/save", options=("--resume", name)).code == 0
    assert contents(name)[:3] == ["Hello", "Good day.", "And then?"]


def test_a_conversation_saved_twice_is_there_once_and_complete(talk: Talk) -> None:
    assert talk("Hello", "/save c.json", "And then?", "/save").code == 0
    assert len(saved("c.json")) == 4


def test_a_new_conversation_does_not_overwrite_the_one_before(talk: Talk) -> None:
    done = talk("Hello", "/save c.json", "/clear", "Hi", "/save", options=("--quiet",))
    assert done.code == 2
    assert done.error == "/save cannot be written (no file is named yet); valid: a new file"
    assert contents("c.json")[0] == "Hello"


@pytest.mark.parametrize("shape", ["list", "object", "with a byte order mark", "parts"])
def test_what_a_conversation_may_look_like(talk: Talk, shape: str) -> None:
    name = "c.json"
    if shape == "list":
        written([QUESTION, ANSWER])
    elif shape == "object":
        written({"messages": [QUESTION, ANSWER], "id": 3})
    elif shape == "parts":
        written([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, ANSWER])
    else:
        Path(name).write_text(json.dumps([QUESTION, ANSWER]), encoding="utf-8-sig")
    assert talk(f"/load {name}", "/save d.json").code == 0
    assert contents("d.json") == ["Hello", "Good day."]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "Expecting value"),
        ("[", "Expecting value"),
        ("[]", "it holds no messages"),
        ('{"a": 1}', "it holds no messages"),
        ("3", "it holds no messages"),
        ("[" * 70 + "]" * 70, "more than 64 deep"),
        ("[" * 99_999, "cannot be read ("),
        ("\udcff", "utf-8"),
    ],
)
def test_files_that_hold_no_conversation(cli: Call, chatty: Path, content: str, words: str) -> None:
    """They are refused before the model is loaded."""
    Path("c.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    done = cli("chat", "--model", chatty, "--resume", "c.json")
    assert done.code == 2
    assert "loading" not in done.err
    assert done.error.startswith("--resume c.json cannot be read (")
    assert words in done.error
    assert done.error.endswith("valid: a conversation that /save wrote, a list of messages in JSON")


def test_files_that_are_none_or_too_large(cli: Call, chatty: Path) -> None:
    with Path("large.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    for name in ("large.json", "none.json", "."):
        done = cli("chat", "--model", chatty, "--resume", name)
        assert done.code == 2
        assert done.error.startswith(f"--resume {name} cannot be read (")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Hello", "messages[0] is 'Hello'; valid: a message such as"),
        ({"role": "king", "content": ""}, "messages[0]['role'] is 'king'; valid: system, "),
        ({"role": "user", "content": 3}, "messages[0]['content'] is 3; valid: text"),
    ],
)
def test_messages_that_are_none(talk: Talk, message: object, words: str) -> None:
    written([message])
    done = talk("/load c.json", options=("--quiet",))
    assert done.code == 2
    assert done.error.startswith(f"/load c.json: {words}")


# ---- questions -----------------------------------------------------------------------------------


def test_retry_answers_the_last_question_again_with_another_seed(talk: Talk, chatty: Path) -> None:
    done = talk("Hello", "/save a.json", "/retry", "/clear", "Hello", "/save b.json")
    assert done.code == 0, done
    with LLM(chatty) as llm:
        for name, seed in (("a.json", 0), ("b.json", 1)):
            assert contents(name)[1] == llm.generate([QUESTION], 6, seed=seed).text


def test_retry_replaces_the_answer(talk: Talk) -> None:
    assert talk("Hello", "/retry", "/save c.json").code == 0
    assert [message["role"] for message in saved("c.json")] == ["user", "assistant"]


def test_retry_answers_a_question_that_a_file_ends_with(talk: Talk) -> None:
    name = written([QUESTION])
    assert talk("/retry", "/save d.json", options=("--resume", name)).code == 0
    assert [message["role"] for message in saved("d.json")] == ["user", "assistant"]


def test_retry_says_that_greedy_decoding_repeats_the_answer(talk: Talk) -> None:
    done = talk("Hello", "/retry", options=("--greedy",))
    assert "greedy decoding gives the same answer" in done.err
    assert done.out == done.out[: len(done.out) // 2] * 2 != ""


def test_undo_takes_a_question_and_its_answer_back(talk: Talk) -> None:
    done = talk("Hello", "And then?", "/undo", "/save c.json", options=("--system", "Be brief."))
    assert "taken back: And then?" in done.err
    assert contents("c.json")[:2] == ["Be brief.", "Hello"]
    assert len(saved("c.json")) == 3


@pytest.mark.parametrize("command", ["/retry", "/undo"])
def test_without_a_question_there_is_nothing_to_take_back(talk: Talk, command: str) -> None:
    done = talk(command, options=("--quiet", "--system", "Be brief."))
    assert done.code == 2
    assert done.error == f"{command} needs a question, and there is none yet; valid: ask one"


# ---- the system prompt ---------------------------------------------------------------------------


def test_the_system_prompt_is_set_shown_and_taken_away(talk: Talk) -> None:
    done = talk(
        "Hello",
        "/system Be brief.",
        "/save a.json",
        "/system Be long.",
        "/system",
        "/clear",
        "/save b.json",
        "/system none",
        "/system",
        "/save c.json",
    )
    assert done.code == 0, done
    assert contents("a.json")[:2] == ["Be brief.", "Hello"]
    assert contents("b.json") == ["Be long."]
    assert saved("c.json") == []
    assert done.err.count("system prompt: Be long.") == 2
    assert done.err.count("system prompt: the model's own") == 2


def test_the_system_prompt_of_a_file_stays_unless_the_command_has_one(talk: Talk) -> None:
    name = written([{"role": "system", "content": "Be brief."}, QUESTION, ANSWER])
    assert talk("/clear", "/save a.json", options=("--resume", name)).code == 0
    assert contents("a.json") == ["Be brief."]
    more = ("--resume", name, "--system", "Be long.")
    assert talk("/save b.json", options=more).code == 0
    assert contents("b.json") == ["Be long.", "Hello", "Good day."]


# ---- settings ------------------------------------------------------------------------------------


def test_a_setting_changes_the_answers_that_follow(talk: Talk, chatty: Path) -> None:
    done = talk("/set temperature .3", "/set seed 5", "Hello", "/save c.json")
    assert done.code == 0, done
    assert "temperature is 0.3" in done.err
    with LLM(chatty) as llm:
        assert contents("c.json")[1] == llm.generate([QUESTION], 6, temperature=0.3, seed=5).text


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("temperature .3", "temperature", 0.3),
        ("temperature=.3", "temperature", 0.3),
        ("--top-p 0.5", "top_p", 0.5),
        ("top_k = 4", "top_k", 4),
        ("greedy on", "greedy", True),
        ("temperature 0", "greedy", True),
        ("bad_words foo", "bad_words", ("foo",)),
        ("logit-bias 65=-5,66=2", "logit_bias", ((65, -5.0), (66, 2.0))),
        ("temperature default", "temperature", ANSWERS.temperature),
    ],
)
def test_every_field_of_the_sampling_can_be_set(text: str, name: str, value: object) -> None:
    settings = Settings(ANSWERS, None)
    settings.change(text)
    assert getattr(settings.sampling, name) == value


def test_a_temperature_ends_greedy_decoding() -> None:
    settings = Settings(ANSWERS, None)
    settings.change("greedy on")
    settings.change("temperature .5")
    assert not settings.sampling.greedy


def test_the_length_can_be_set_and_set_back() -> None:
    settings = Settings(ANSWERS, None)
    assert settings.change("max-new-tokens 50") == "max_new_tokens is 50"
    assert settings.max_new_tokens == 50
    settings.change("max_new_tokens default")
    assert settings.max_new_tokens is None


def test_all_settings_are_listed(talk: Talk) -> None:
    done = talk("/set min_p .25", "/set")
    rows = [line.split() for line in done.err.splitlines()]
    assert ["min_p", "0.25"] in rows
    assert ["max_new_tokens", "6"] in rows
    assert ["seed", "0"] in rows
    assert ["greedy", "off"] in rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temperature", "/set temperature has no value; valid: a name and a value, such as"),
        ("temprature 1", "/set temprature is no setting; valid: temperature, top-k, "),
        ("temprature 1", "did you mean temperature?"),
        ("temperature warm", "/set temperature is 'warm'; valid: a number"),
        ("temperature -1", "/set temperature is -1.0; valid: 0 (greedy decoding), or from"),
        ("temperature nan", "/set temperature is nan; valid: 0 (greedy decoding), or from"),
        ("top_p 3", "/set top-p is 3.0; valid: in (0, 1]"),
        ("top_k 1.5", "/set top-k is '1.5'; valid: an integer of at least 1, or 0 for all"),
        ("greedy maybe", "/set greedy is 'maybe'; valid: on, off"),
        ("logit_bias 3", "/set logit-bias is 3; valid: token ids with a bias each"),
        ("max_new_tokens 0", "/set max-new-tokens is 0; valid: an integer of at least 1"),
        ("grammar x", "/set grammar is no setting; valid: "),
    ],
)
def test_settings_that_are_refused(text: str, words: str) -> None:
    settings = Settings(ANSWERS, None)
    with pytest.raises(InputError) as caught:
        settings.change(text)
    assert words in str(caught.value)
    assert settings.sampling == ANSWERS


# ---- loops ---------------------------------------------------------------------------------------


def test_a_loop_is_told_once_and_leaves_one_copy_in_the_conversation(talk: Talk) -> None:
    options = ("-n", 400, "--logit-bias", "65=100", "--repetition-penalty", 1)
    done = talk("Hello", "/save c.json", options=options)
    assert done.code == 0, done
    assert done.err.count("repeats itself") == 1
    assert (
        "stopped, because it repeats itself from token 0 on (1 token again and again)" in done.err
    )
    assert "the conversation keeps one copy" in done.err
    assert len(done.out.strip()) > 100  # what was shown stays shown
    assert contents("c.json") == ["Hello", "b"]  # token 65


# ---- help ----------------------------------------------------------------------------------------


def test_help_lists_every_command(talk: Talk) -> None:
    done = talk("/help")
    for name in ("clear", "exit", "help", "load", "retry", "save", "set", "system", "undo"):
        assert f"\n/{name} " in done.err
    assert "\n/load FILE " in done.err
    shown = done.err[done.err.index("command ") :]
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_an_answer_that_is_cut_says_what_the_chat_can_do(talk: Talk) -> None:
    done = talk("Hello", "/set max-new-tokens default")
    assert "maximum length; /set max-new-tokens sets another" in done.err
    assert done.err.count("max_new_tokens is 6") == 1


def test_no_limit_of_an_answer_is_said_in_words() -> None:
    settings = Settings(ANSWERS, None)
    settings.change("max-new-tokens 20")
    assert settings.change("max-new-tokens default") == "max_new_tokens has no limit"


def test_the_help_of_the_command_shows_resume(cli: Call) -> None:
    assert "--resume FILE" in cli("chat", "--help").out
