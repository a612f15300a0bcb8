"""Tokenizer files and chat templates that are wrong in one way."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
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
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
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
    yield from _of_models()
    yield from _of_steps()
    yield from _of_added()
    yield from _of_configs()
    yield from _of_templates()


def _model(**fields: Any) -> Change:
    def make(folder: Folder) -> None:
        said = folder.said(TOKENIZER)
        said["model"].update(fields)
        folder.say(TOKENIZER, said)

    return make


def _vocabulary(change: Callable[[dict[str, Any]], Any]) -> Change:
    def make(folder: Folder) -> None:
        said = folder.said(TOKENIZER)
        change(said["model"]["vocab"])
        folder.say(TOKENIZER, said)

    return make


def _said(**fields: Any) -> Change:
    return lambda folder: folder.set(TOKENIZER, **fields)


def _of_models() -> Iterator[tuple[str, Change]]:
    for what, at in {
        "260": 260,
        "300": 300,
        "2^31": 1 << 31,
        "2^32 - 1": (1 << 32) - 1,
        "2^32": 1 << 32,
        "-1": -1,
        "1.5": 1.5,
        "a text": "7",
        "null": None,
        "one that another has": 5,
    }.items():
        yield f"a token with the id {what}", _vocabulary(lambda v, a=at: v.update(more=a))
    yield "all ids are 0", _vocabulary(lambda v: v.update(dict.fromkeys(v, 0)))
    yield "ids in other order", _vocabulary(lambda v: v.update({k: 259 - i for k, i in v.items()}))
    yield (
        "half of the ids are missing",
        _vocabulary(lambda v: [v.pop(k) for k in list(v) if v[k] % 2 and v[k] < 256]),
    )
    yield "an empty vocabulary", _model(vocab={})
    yield "no vocabulary", _model(vocab=None)
    yield "a vocabulary that is a list", _model(vocab=[["a", 0.0]])
    yield "10^6 tokens", _vocabulary(lambda v: v.update({f"t{i}": 260 + i for i in range(10**6)}))
    yield (
        "10^6 tokens of few ids",
        _vocabulary(lambda v: v.update({f"t{i}": i % 260 for i in range(10**6)})),
    )
    yield "a token of 10^6 letters", _vocabulary(lambda v: v.update({"a" * 10**6: 97}))
    yield (
        "200 tokens of 59,800 letters",
        _vocabulary(lambda v: v.update({"a" * (59_800 + i): i for i in range(200)})),
    )
    yield "an empty token", _vocabulary(lambda v: v.update({"": 97}))
    yield "a token of zeros", _vocabulary(lambda v: v.update({"\0": 97}))
    for what, merges in {
        "of unknown tokens": [["qq", "ww"]],
        "whose union is no token": [["a", "b"]],
        "of three": [["a", "b", "c"]],
        "of one": [["a"]],
        "as texts": ["a b"],
        "as texts without a space": ["ab"],
        "of numbers": [[1, 2]],
        "of nothing": [["", ""]],
        "a text": "a b",
        "null": None,
        "10^6 times the same": [["a", "a"]] * 10**6,
    }.items():
        yield f"merges {what}", _model(merges=merges)

    def joined(folder: Folder, count: int) -> None:
        said = folder.said(TOKENIZER)
        made = ["a" * (1 << i) for i in range(count)]
        said["model"]["vocab"].update({word: 97 for word in made})
        said["model"]["merges"] = [[word, word] for word in made[:-1]]
        folder.say(TOKENIZER, said)

    yield "merges that double 18 times", partial(joined, count=18)
    for what, fields in {
        "unk_token that is no token": {"unk_token": "nothing"},
        "unk_token that is a number": {"unk_token": 5},
        "dropout of 1": {"dropout": 1.0},
        "dropout of 0.5": {"dropout": 0.5},
        "dropout of 7": {"dropout": 7.0},
        "dropout of NaN": {"dropout": math.nan},
        "fuse_unk that is a text": {"fuse_unk": "x"},
        "byte_fallback": {"byte_fallback": True},
        "ignore_merges": {"ignore_merges": True},
        "a suffix of 10^6 letters": {"end_of_word_suffix": "x" * 10**6},
        "a prefix of 10^6 letters": {"continuing_subword_prefix": "x" * 10**6},
    }.items():
        yield what, _model(**fields)
    vocabulary = base().said(TOKENIZER)["model"]["vocab"]
    pieces = [[token, -float(at)] for token, at in vocabulary.items()]
    models: dict[str, Any] = {
        "of no kind": {},
        "of an unknown kind": {"type": "Nothing", "vocab": vocabulary},
        "null": None,
        "a list": [],
        "WordLevel": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        "WordLevel without its unknown token": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "no"},
        "WordLevel with ids beyond": {"type": "WordLevel", "vocab": {"ab": 1 << 31}, "unk_token": "ab"},
        "WordPiece": {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "<unk>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        "WordPiece of 2^63 letters": {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "no",
            "continuing_subword_prefix": "##" * 10**6,
            "max_input_chars_per_word": (1 << 63) - 1,
        },
        "Unigram": {"type": "Unigram", "unk_id": 258, "vocab": pieces, "byte_fallback": False},
        "Unigram without an unknown": {"type": "Unigram", "unk_id": None, "vocab": pieces[300:]},
        "Unigram with an unknown beyond": {"type": "Unigram", "unk_id": 10**9, "vocab": pieces},
        "Unigram with NaN": {"type": "Unigram", "unk_id": 0, "vocab": [[t, math.nan] for t, _ in pieces]},
        "Unigram with infinite scores": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["a", float("inf")]] * 260,
        },
        "Unigram of one token 260 times": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0]] * 260},
        "Unigram that is empty": {"type": "Unigram", "unk_id": 0, "vocab": []},
        "Unigram with more tokens than rows": {"type": "Unigram", "unk_id": 0, "vocab": [["b", -1.0]] * 300},
    }
    for what, model in models.items():
        yield f"the model is {what}", _said(model=model)
        yield f"the model is {what}, nothing added", _said(model=model, added_tokens=[])


def _nested(depth: int, last: Any, name: str) -> Any:
    for _ in range(depth):
        last = {"type": "Sequence", name: [last]}
    return last


def _of_steps() -> Iterator[tuple[str, Change]]:
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    wide = {"type": "Prepend", "prepend": "a" * 10**6}
    normal: dict[str, Any] = {
        "of an unknown kind": {"type": "Nothing"},
        "a number": 5,
        "a list": [],
        "sequences in sequences": _nested(60, {"type": "NFC"}, "normalizers"),
        "sequences 5,000 deep": _Raw(
            '{"type": "Sequence", "normalizers": [' * 5000 + '{"type": "NFC"}' + "]}" * 5000
        ),
        "100,000 steps": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100_000},
        "a replacement by 1000 letters": grow,
        "replacements by 1000 letters, 6 times": {"type": "Sequence", "normalizers": [grow] * 6},
        "doubling, 60 times": {"type": "Sequence", "normalizers": [{**grow, "content": "aa"}] * 60},
        "a prefix of 10^6 letters, 100 times": {"type": "Sequence", "normalizers": [wide] * 100},
        "a replacement of nothing": {**grow, "pattern": {"String": ""}},
        "a pattern for nothing": {**grow, "pattern": {"Regex": ""}},
        "a pattern that is none": {**grow, "pattern": {"Regex": "(["}},
        "a pattern of a number": {**grow, "pattern": 5},
        "a precompiled map that is none": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "a precompiled map of zeros": {"type": "Precompiled", "precompiled_charsmap": "A" * 4000},
        "a precompiled map of ones": {"type": "Precompiled", "precompiled_charsmap": "////" * 1000},
        "a precompiled map that is null": {"type": "Precompiled", "precompiled_charsmap": None},
    }
    for what, step in normal.items():
        yield f"normalizer: {what}", _step("normalizer", step)
    bombs = {
        "(a|a)*$": "(a|a)*b$",
        "(a+)+$": "(a+)+$",
        "(.*)*x": "(.*)*x",
        "a thousand times a thousand": "((a{1,1000}){1,1000}){1,1000}",
        "lookbehinds": "(?<=(a|b){1,100})x",
        "parentheses in parentheses": "(" * 20_000 + "a" + ")" * 20_000,
        "back references": r"(a*)*\1\1\1x",
        "recursion": r"(?<x>a\g<x>?b|a\g<x>)",
        "2^16 branches": "|".join(f"a{i}" for i in range(1 << 16)),
        "all of Unicode": r"[\p{L}\p{N}\p{P}\p{S}\p{Z}\p{C}]{1,100000}",
        "no pattern": "(?<",
        "nothing": "",
    }
    for what, pattern in bombs.items():
        cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        yield (
            f"pre-tokenizer: the pattern {what}",
            _step("pre_tokenizer", {"type": "Sequence", "pretokenizers": [cut, BYTE_LEVEL]}),
        )
    cuts: dict[str, Any] = {
        "of an unknown kind": {"type": "Nothing"},
        "null": None,
        "sequences 5,000 deep": _Raw(
            '{"type": "Sequence", "pretokenizers": [' * 5000 + json.dumps(BYTE_LEVEL) + "]}" * 5000
        ),
        "100,000 steps": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 100_000},
        "bytes of bytes, 40 times": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40},
        "a blank of two letters": {"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always"},
        "pieces of no letters": {"type": "FixedLength", "length": 0},
        "a delimiter that is none": {"type": "CharDelimiterSplit", "delimiter": ""},
        "a prefix in front of each": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    }
    for what, step in cuts.items():
        yield f"pre-tokenizer: {what}", _step("pre_tokenizer", step)
    back: dict[str, Any] = {
        "of an unknown kind": {"type": "Nothing"},
        "null": None,
        "sequences 5,000 deep": _Raw(
            '{"type": "Sequence", "decoders": [' * 5000 + '{"type": "Fuse"}' + "]}" * 5000
        ),
        "replacements by 1000 letters, 6 times": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 1000}] * 6,
        },
        "doubling, 60 times": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}] * 60,
        },
        "stripping 2^63 letters": {"type": "Strip", "content": "a", "start": (1 << 63) - 1, "stop": 10**9},
        "stripping no letter": {"type": "Strip", "content": "", "start": 1, "stop": 0},
        "BPE": {"type": "BPEDecoder", "suffix": ""},
        "bytes as text": {"type": "ByteFallback"},
        "CTC": {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    }
    for what, step in back.items():
        yield f"decoder: {what}", _step("decoder", step)

    def template(ids: list[int], parts: int = 1, **more: Any) -> Any:
        special = {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids), **more}
        single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * parts
        return {
            "type": "TemplateProcessing",
            "single": [*single, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": special},
        }

    after: dict[str, Any] = {
        "of an unknown kind": {"type": "Nothing"},
        "with an id beyond": template([10**6]),
        "with an id of 2^32 - 1": template([(1 << 32) - 1]),
        "with an id of -1": template([-1]),
        "with 10^6 ids": template([256] * 10**6),
        "with a token 10^5 times": template([256], 10**5),
        "with 1000 ids 1000 times": template([256] * 1000, 1000),
        "without its tokens": {**template([256]), "special_tokens": {}},
        "without the text": {**template([256]), "single": []},
        "with no ids": template([]),
        "of the kind of Bert, ids beyond": {
            "type": "BertProcessing",
            "sep": ["a", 1 << 31],
            "cls": ["b", 300],
        },
        "sequences 5,000 deep": _Raw(
            '{"type": "Sequence", "processors": [' * 5000
            + '{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}'
            + "]}" * 5000
        ),
    }
    for what, step in after.items():
        yield f"post-processor: {what}", _step("post_processor", step)
    cutting = {"direction": "Right", "strategy": "LongestFirst", "stride": 0}
    filling = {"direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "<s>"}
    for what, fields in {
        "cut to 0 tokens": {"truncation": {**cutting, "max_length": 0}},
        "cut to 1 token": {"truncation": {**cutting, "max_length": 1}},
        "cut with a stride of 2^40": {"truncation": {**cutting, "max_length": 5, "stride": 1 << 40}},
        "filled to 10^9 tokens": {"padding": {**filling, "pad_id": 1, "strategy": {"Fixed": 10**9}}},
        "filled to 100 tokens": {"padding": {**filling, "pad_id": 1, "strategy": {"Fixed": 100}}},
        "filled to a multiple of 10^9": {
            "padding": {**filling, "pad_id": 1, "strategy": "BatchLongest", "pad_to_multiple_of": 10**9}
        },
        "filled with 2^31": {"padding": {**filling, "pad_id": 1 << 31, "strategy": {"Fixed": 9}}},
        "of version 7": {"version": "7.0"},
        "of no version": {"version": None},
    }.items():
        yield f"texts {what}", _said(**fields)


class _Raw:
    """JSON that Python would not write."""

    def __init__(self, text: str) -> None:
        self.text = text


def _step(name: str, step: Any) -> Change:
    def make(folder: Folder) -> None:
        if not isinstance(step, _Raw):
            folder.set(TOKENIZER, **{name: step})
            return
        folder.set(TOKENIZER, **{name: "@@"})
        folder.files[TOKENIZER] = folder.files[TOKENIZER].replace(b'"@@"', step.text.encode())

    return make


def _of_added() -> Iterator[tuple[str, Change]]:
    def token(at: Any, content: Any = "<new>", **more: Any) -> dict[str, Any]:
        usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"id": at, "content": content, "special": True, **usual, **more}

    for what, tokens in {
        "of the id 260": [token(260)],
        "of the id 2^31": [token(1 << 31)],
        "of the id 2^32": [token(1 << 32)],
        "of the id -1": [token(-1)],
        "of the id 97": [token(97)],
        "without letters": [token(97, "")],
        "that is a number": [token(97, 5)],
        "of 10^6 letters": [token(97, "x" * 10**6)],
        "for the letter a, beyond": [token(300, "a")],
        "for the letters ab, beyond": [token(10**6, "ab")],
        "twice": [token(97), token(98)],
        "65,000 times": range(65_000),
        "300,000 times": range(300_000),
        "that takes all blanks": [token(97, " ", lstrip=True, rstrip=True)],
        "without an id": [{"content": "x"}],
        "that is null": [None],
    }.items():
        for alone in (True, False):

            def make(folder: Folder, tokens: Any = tokens, alone: bool = alone) -> None:
                before = [] if alone else folder.said(TOKENIZER)["added_tokens"]
                more = [token(260 + i, f"<{i}>") for i in tokens] if isinstance(tokens, range) else tokens
                folder.set(TOKENIZER, added_tokens=[*before, *more])

            yield f"an added token {what}{'' if alone else ', besides'}", make
    yield "added tokens that are an object", _said(added_tokens={})
    for name, said in {
        "added_tokens.json": [{"<new>": 300}, {"<new>": -1}, {"a": 10**9}, {"<new>": "x"}, [], 5],
        "special_tokens_map.json": [{"bos_token": 5}, {"bos_token": "<nothing>"}, {"pad_token": {}}, [], 5],
        "vocab.json": [{"a": 10**9}, [], 5],
        "tokenizer.model": [5],
        "merges.txt": [5],
        "vocab.txt": [5],
    }.items():
        for number, value in enumerate(said):
            yield f"{name} besides, {number}", lambda f, n=name, v=value: f.say(n, v)
            yield (
                f"{name} instead of {TOKENIZER}, {number}",
                lambda f, n=name, v=value: (f.say(n, v), f.files.pop(TOKENIZER)),
            )
    letters = [bytes([at]) for at in range(256)]
    for what, more in {
        "as it should be": lambda: [b"ab"],
        "of 10^6 tokens": lambda: (b"ab%d" % at for at in range(10**6)),
        "of tokens of 3,000 letters": lambda: (b"a" * at for at in range(2, 3000)),
        "of a token of 59,800 letters": lambda: [b"a" * 59_800],
    }.items():
        yield f"tokenizer.model in tiktoken's form, {what}", partial(_ranks, letters, more)


def _ranks(letters: list[bytes], more: Callable[[], Iterable[bytes]], folder: Folder) -> None:
    """A vocabulary in tiktoken's form instead of a tokenizer.json."""
    lines = (b"%s %d\n" % (b64encode(token), at) for at, token in enumerate((*letters, *more())))
    folder.files["tokenizer.model"] = b"".join(lines)
    folder.files.pop(TOKENIZER)


def _of_configs() -> Iterator[tuple[str, Change]]:
    for key, values in {
        "tokenizer_class": [
            *("Nothing", 5, None, "", "BertTokenizer", "LlamaTokenizer", "GPT2Tokenizer", "T5Tokenizer"),
            *("PreTrainedTokenizer", "Qwen2TokenizerFast", "../x", "AutoTokenizer", "WhisperTokenizer"),
        ],
        "auto_map": [{"AutoTokenizer": ["code.T", "code.T"]}, 5],
        "model_max_length": [0, -1, 1 << 70, "x", None, 1e400, 1.5],
        "added_tokens_decoder": [
            *(5, [], {"a": {}}, {"300": {"content": "<n>"}}, {"-1": {"content": "<n>"}}),
            *({"97": {"content": 5}}, {"97": 5}, {"97": {}}, {str(10**30): {"content": "<n>"}}),
            {str(260 + i): {"content": f"<{i}>", "special": True} for i in range(20_000)},
        ],
        "extra_special_tokens": [5, "x", {"a": "b"}, ["<n>"] * 1000, [f"<n{i}>" for i in range(20_000)], [5]],
        "additional_special_tokens": [5, "x", {"a": "b"}, [5], ["<n>"]],
        "bos_token": [5, None, "", "<n>", {}, {"content": "<n>"}, "x" * 10**6, ["a"], "\ud800", True],
        "eos_token": [5, None, "", "<n>", {"content": "<n>", "__type": "AddedToken"}, "a"],
        "unk_token": [5, "<n>"],
        "pad_token": [5, "<n>", "a"],
        "clean_up_tokenization_spaces": [True, 5, "x"],
        "split_special_tokens": [True, 5],
        "add_bos_token": [True, 5, "x"],
        "padding_side": ["nothing", 5],
        "truncation_side": ["nothing", 5],
        "model_input_names": [[], ["nothing"], 5, [5]],
        "backend": ["nothing", 5],
        "is_local": ["x"],
        "name_or_path": [5],
        "vocab_file": ["/etc/passwd", "../x", 5],
        "tokenizer_file": ["/etc/passwd", "../x", 5],
        "fix_mistral_regex": [True],
        "self": [5],
        "kwargs": [5],
        "tokenizer_object": [5, None],
        "gguf_file": ["x"],
        "chat_template": [
            *(5, [], {}, {"default": 5}, {"other": "x"}, [{"name": "default", "template": 5}], [{"name": 5}]),
            *([{"name": "default", "template": "{{ 'a' * 10**10 }}"}], [5], True),
        ],
    }.items():
        for number, value in enumerate(values):
            shown = str(value)[:30]
            yield (
                f"{TOKENIZER_CONFIG}: {key} is wrong, {number}: {shown!r}",
                lambda f, k=key, v=value: f.set(TOKENIZER_CONFIG, **{k: v}),
            )


def _of_templates() -> Iterator[tuple[str, Change]]:
    def put(folder: Folder, file: str, template: str) -> None:
        folder.files.pop("chat_template.jinja", None)
        if file == TOKENIZER_CONFIG:
            folder.set(file, chat_template=template)
        elif file == "chat_template.json":
            folder.say(file, {"chat_template": template})
        else:
            folder.files[file] = template.encode("utf-8", "surrogatepass")

    for what, template in TEMPLATES.items():
        for file in (TOKENIZER_CONFIG, "chat_template.jinja"):
            yield f"template in {file}: {what}", partial(put, file=file, template=template)
    for file in ("chat_template.json", "additional_chat_templates/x.jinja"):
        yield f"template in {file}", partial(put, file=file, template=TEMPLATES["a product"])
    for what, content, times in (("no UTF-8", b"\xff\xfe{{ 1 }}", 1), ("300 MB", b"x", 300 << 20)):
        yield (
            f"a template file of {what}",
            lambda f, c=content, n=times: f.files.update({"chat_template.jinja": c * n}),
        )
    for what, change in places("chat_template.jinja").items():
        yield f"the template file {what}", change
