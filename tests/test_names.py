"""Names that people find by themselves: what ``dir`` and ``repr`` show, what editors complete, and what is
said of a name that is none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import tokenswift
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tests.tiny import byte_model
from tokenswift import LLM, InputError, SamplingParams, TokenSwiftOptions, words
from tokenswift.cli.main import build_parser, subparsers_of
from tokenswift.engine import llm as module
from tokenswift.engine.request import GenerateOptions
from tokenswift.method_options import OPTIONS
from tokenswift.spec.methods.about import ABOUT

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_model(tiny_model(), chat_tokenizer(), heads=None) as made:
        yield made


def test_dir_shows_what_is_public(llm: LLM) -> None:
    assert dir(tokenswift) == sorted(tokenswift.__all__)
    assert all(hasattr(tokenswift, name) for name in dir(tokenswift))
    shown = dir(llm)
    assert all(hasattr(llm, name) for name in shown) and not any(name.startswith("_") for name in shown)
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    described = re.findall(r"        - (\w+)", page.partition("::: tokenswift.LLM")[2].partition(":::")[0])
    assert set(described) <= set(shown) and {"generate", "name", "tokenizer"} <= set(shown)


def test_repr_says_which_model_and_where(llm: LLM, tiny_folder: Callable[..., Path]) -> None:
    assert repr(llm) == "LLM('LlamaForCausalLM', dtype='float32', device='cpu')"
    with LLM(tiny_folder(), dtype="bfloat16", device="cpu") as other:
        assert repr(other) == f"LLM({str(tiny_folder())!r}, dtype='bfloat16', device='cpu')"
    assert repr(other) == f"LLM({str(tiny_folder())!r}, closed)"
    assert repr(LLM.__new__(LLM)) == "LLM('', closed)"


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("n_ctx", "; a text may take all of the model's positions, and rope_scaling makes more of them"),
        ("torch_dtype", "; did you mean dtype?"),
        ("thread", "; did you mean threads?"),
        ("colour", "backend, cuda_graphs, eagle"),
    ],
)
def test_arguments_that_are_none(name: str, ends: str) -> None:
    makers: list[Any] = [lambda **given: LLM("./none", **given)]
    if name in ("n_ctx", "colour"):
        makers.append(lambda **given: LLM.from_model(byte_model("llama"), **given))
    for make in makers:
        with pytest.raises(InputError) as caught:
            make(**{name: 1})
        line = str(caught.value)
        assert line.startswith(f"{name!r} is no argument; valid: model, ") and line.endswith(ends), line
        assert caught.value.field == name


def test_what_was_probably_meant(llm: LLM) -> None:
    generate: Any = llm.generate
    sampling: Any = SamplingParams
    resume: Any = tokenswift.resume
    for call, ends in (
        (lambda: generate("x", max_tokens=3), "did you mean max_new_tokens?"),
        (lambda: generate("x", temp=0.5), "did you mean temperature?"),
        (lambda: generate("x", strategy="magicdek"), "did you mean magicdec?"),
        (lambda: generate("x", on_loop="stpo"), "valid: report, stop; did you mean stop?"),
        (lambda: generate("x", strategy_options={"ngram": 3}), "did you mean ngrams?"),
        (lambda: sampling(top=0.5), "did you mean top_k?"),
        (lambda: sampling(colour=0.5), list(SamplingParams.__dataclass_fields__)[-1]),
        (lambda: resume("x", max_tokens=3), "did you mean max_new_tokens?"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).endswith(ends), caught.value


# ---- words ------------------------------------------------------------------------------------------------


def words_of(hint: Any) -> tuple[str, ...]:
    """The words among what an argument may be."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in words_of(part))


def test_editors_can_complete_every_word() -> None:
    """And the words are those that are valid: each is taken, and refusals list them."""
    assert words.words(words.Strategy) == tuple(OPTIONS) == tuple(ABOUT)
    hints = get_type_hints(LLM.__init__, dict(vars(module)))
    for name in ("dtype", "device", "weights", "activations", "backend", "cuda_graphs"):
        given: Any = {name: "nonsense"}
        with pytest.raises(InputError) as caught:
            LLM("./none", **given)
        assert f"valid: {', '.join(words_of(hints[name]))}" in str(caught.value)
    assert set(words_of(hints["heads"])) == {"auto", "none", "linear", "conditioned", "medusa"}
    for method in (LLM.generate, LLM.stream, LLM.generate_many):
        assert words_of(get_type_hints(method, dict(vars(module)))["strategy"]) == tuple(OPTIONS)
    assert words_of(get_type_hints(GenerateOptions)["on_loop"]) == ("report", "stop")


@pytest.mark.parametrize("kind", [*OPTIONS.values()])
def test_words_of_options(kind: type) -> None:
    hints = get_type_hints(kind)
    for one in fields(kind):
        if not isinstance(one.default, str):
            continue
        valid = words_of(hints[one.name])
        assert one.default in valid
        for word in valid:
            assert getattr(kind(**{one.name: word}), one.name) == word
        with pytest.raises(InputError, match=f"{one.name} is 'x'; valid: {', '.join(valid)}$"):
            kind(**{one.name: "x"})


def test_signatures_are_still_there() -> None:
    assert list(inspect.signature(LLM).parameters)[:2] == ["model", "dtype"]
    assert "run_dir" in inspect.signature(tokenswift.resume).parameters
    assert TokenSwiftOptions(cache="full").cache == "full"


# ---- the command line -------------------------------------------------------------------------------------


def test_short_options_mean_the_same_everywhere() -> None:
    short = {"-m": "--model", "-n": "--max-new-tokens", "-s": "--seed", "-t": "--temperature"}
    commands = subparsers_of(build_parser()[0])
    for command, parser in commands.items():
        for action in parser._actions:
            for name, long in short.items():
                if {name, long} & {*action.option_strings}:
                    assert action.option_strings == [name, long], command
    for command in ("generate", "chat", "plan"):
        names = {name for action in commands[command]._actions for name in action.option_strings}
        assert short.keys() <= names, command
