"""Tokenizer files and chat templates that are wrong in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.malformed.folder_bytes import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    Folder,
    base,
    json_files,
    places,
)

Change = Callable[[Folder], Any]
#: a template → what it does
TEMPLATES = {
    "a product": "{{ 'a' * 10**10 }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "center": "{{ 'a'.center(10**10) }}",
    "percent": "{{ '%10000000000d' % 5 }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "power": "{{ 9**(9**9) }}",
    "a long loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over max_tokens": "{% for i in range(max_tokens | default(10**5)) %}{{ 'x' * 1000 }}{% endfor %}",
    "a macro of itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a list": "{{ [messages] * 10**9 }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "no end": "{% for m in messages %}",
    "zeros": "\0{{ 1 }}",
    "a surrogate": r"{{ '\ud800' }}",
    "nothing": "",
    "blanks": "   \n ",
    "specials": "{{ '</s>' * 200 }}",
    "two million letters": "x" * 2_000_000,
    "a million letters in an error": "{{ raise_exception('x\n' * 10**6) }}",
}


def cases() -> Iterator[tuple[Callable[[Path], Path], str, str]]:
    """What to write, names, and the kind."""
    for name, change in _named():
        yield partial(_write, change), name, "tokenizer"


def _write(change: Change, folder: Path) -> Path:
    made = base()
    change(made)
    return made.write(folder)


def _named() -> Iterator[tuple[str, Change]]:
    whole = base()
    for file in (TOKENIZER, TOKENIZER_CONFIG):
        for what, content in json_files(whole.files[file]).items():
            yield f"{file} {what}", lambda f, n=file, c=content: f.files.update({n: c()})
        for what, change in places(file).items():
            yield f"{file} {what}", change
    for what, at in {"260": 260, "2^31": 1 << 31, "-1": -1, "a text": "7", "null": None}.items():
        yield f"a token with the id {what}", _model(vocab={"more": at})
    for what, fields in MODELS.items():
        yield what, _model(**fields)
    for name, steps in STEPS.items():
        for what, step in steps.items():
            yield f"{name} {what}", lambda f, n=name, s=step: f.set(TOKENIZER, **{n: s})
    for what, at in {"260": 260, "2^32": 1 << 32, "-1": -1}.items():
        added = {"id": at, "content": "<new>", "special": True, **dict.fromkeys(FLAGS, False)}
        yield f"an added token of the id {what}", lambda f, t=added: f.set(TOKENIZER, added_tokens=[t])
    for name, value in {"added_tokens.json": {"a": 10**9}, "vocab.json": [], "merges.txt": 5}.items():
        yield f"{name} besides", lambda f, n=name, v=value: f.say(n, v)
        yield f"{name} alone", lambda f, n=name, v=value: (f.say(n, v), f.files.pop(TOKENIZER))
    for key, values in CONFIGS.items():
        for value in values:
            yield (
                f"{TOKENIZER_CONFIG}: {key} is {str(value)[:30]!r}",
                lambda f, k=key, v=value: f.set(TOKENIZER_CONFIG, **{k: v}),
            )
    for what, template in TEMPLATES.items():
        for file in (TOKENIZER_CONFIG, "chat_template.jinja"):
            yield f"template in {file}: {what}", partial(_put, file=file, template=template)
    for what, content, times in (("no UTF-8", b"\xff\xfe{{ 1 }}", 1), ("300 MB", b"x", 300 << 20)):
        yield (
            f"a template file of {what}",
            lambda f, c=content, n=times: f.files.update({"chat_template.jinja": c * n}),
        )


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
MODELS: dict[str, dict[str, Any]] = {
    "an empty vocabulary": {"vocab": {}},
    "no vocabulary": {"vocab": None},
    "merges of unknown tokens": {"merges": [["qq", "ww"]]},
    "merges whose union is not a token": {"merges": [["a", "b"]]},
    "merges of one": {"merges": [["a"]]},
    "an unk_token that is not a token": {"unk_token": "nothing"},
    "a dropout of 7": {"dropout": 7.0},
    "a model of an unknown kind": {"type": "Nothing"},
}
#: a part of tokenizer.json → what it may be that no honest program writes
STEPS: dict[str, dict[str, Any]] = {
    "normalizer": {"of an unknown kind": {"type": "Nothing"}, "that is a number": 5},
    "pre_tokenizer": {
        "with a delimiter that is none": {"type": "CharDelimiterSplit", "delimiter": ""},
    },
    "decoder": {"of an unknown kind": {"type": "Nothing"}, "that is null": None},
    "post_processor": {
        "with ids beyond": {"type": "BertProcessing", "sep": ["a", 1 << 31], "cls": ["b", 300]},
    },
}
CONFIGS: dict[str, list[Any]] = {
    "tokenizer_class": ["Nothing", 5, None, "BertTokenizer", "../x", "AutoTokenizer"],
    "auto_map": [{"AutoTokenizer": ["code.T", "code.T"]}],
    "added_tokens_decoder": [5, {"300": {"content": "<n>"}}, {"97": 5}],
    "extra_special_tokens": [5, {"a": "b"}],
    "bos_token": [5, "<n>", "\ud800"],
    "eos_token": [5, "<n>"],
    "vocab_file": ["/etc/passwd", "../x"],
    "tokenizer_file": ["/etc/passwd"],
    "chat_template": [5, {"default": 5}, [{"name": 5}]],
}


def _model(**fields: Any) -> Change:
    def make(folder: Folder) -> None:
        said = folder.said(TOKENIZER)
        vocabulary = said["model"]["vocab"]
        said["model"].update(fields)
        if fields.get("vocab"):
            said["model"]["vocab"] = vocabulary | fields["vocab"]
        folder.say(TOKENIZER, said)

    return make


def _put(folder: Folder, file: str, template: str) -> None:
    folder.files.pop("chat_template.jinja", None)
    if file == TOKENIZER_CONFIG:
        folder.set(file, chat_template=template)
    else:
        folder.files[file] = template.encode("utf-8", "surrogatepass")
