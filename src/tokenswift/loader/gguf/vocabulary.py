"""What a GGUF file says of a tokenizer of transformers: the way back from `gguf_tokenizer`.

Whatever the reader there would not read back alike is refused. Byte-level BPE needs a rule of `CUTS` that
cuts texts as the tokenizer does. BPE as sentencepiece has it needs scores: those that give its merges in
their order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenswift.loader.gguf.tokenizer import BYTE, CONTROL, CUTS, NAMED, UNKNOWN, USER_DEFINED, build
from tokenswift.types import InputError

NORMAL, UNUSED = 1, 5
#: texts that the tokenizer and what is read back of it must cut alike
TRIED = (
    "Hello, world! It's 12345 o'clock; WE'LL see.",
    "  spaces   and\n\nlines\t\r\n end  ",
    "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f600 n\u0303 \u00bd x\u00b2 3.14159 1000000",
    "def f(x):\n    return x**2  # ok",
)


def vocabulary(tokenizer: Any, rows: int, name: str) -> dict[str, Any]:
    """Keys and values that describe a tokenizer, its chat template included.

    Args:
        tokenizer: of transformers.
        rows: of the embedding; ids that the tokenizer has no token for get names of their own.
        name: the model's, for messages.
    Raises:
        InputError: it would not be read back as it is.
    """
    own = getattr(tokenizer, "backend_tokenizer", None)
    if own is None:
        raise _refusal(name, "it is not of the tokenizers library")
    said = json.loads(own.to_str())
    model = said["model"]
    if model.get("type") != "BPE" or any(
        model.get(part) for part in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        raise _refusal(name, f"its model is {model.get('type')}, or has more parts")
    found = _tokens(said, own.get_vocab(with_added_tokens=True), rows, name)
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    if model.get("byte_fallback"):
        found |= _by_scores(found, model, merges)
    elif merges:
        found["merges"] = [" ".join(pair) for pair in merges]
    ids = {theirs: getattr(tokenizer, f"{ours}_token_id", None) for ours, theirs in NAMED.items()}
    found |= {f"{theirs}_token_id": at for theirs, at in ids.items() if at is not None}
    found |= _around(tokenizer, name)
    found |= _rule(said, name)
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    made = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    if template:
        made["tokenizer.chat_template"] = template
    _check(tokenizer, said, merges, made, name)
    return made


def _refusal(name: str, reason: str) -> InputError:
    return InputError(
        f"model {name}: its tokenizer would not be read back alike from a GGUF file ({reason}); valid: "
        f"byte-level BPE that cuts texts as {', '.join(CUTS)} do, or BPE of sentencepiece"
    )


def _tokens(said: dict[str, Any], there: dict[str, int], rows: int, name: str) -> dict[str, Any]:
    """Tokens by their ids, and their kinds."""
    if there and max(there.values()) >= rows:
        raise _refusal(name, f"it has {max(there.values()) + 1} ids for {rows} rows of the embedding")
    tokens, kinds = [f"[PAD{at}]" for at in range(rows)], [UNUSED] * rows
    for token, at in there.items():
        tokens[at], kinds[at] = token, NORMAL
    if len(set(tokens)) < rows:
        raise _refusal(name, "two ids would have one name")
    for token in said["added_tokens"]:
        if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise _refusal(name, f"its token {token['content']!r} takes spaces beside it or whole words")
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    model = said["model"]
    if model.get("byte_fallback"):
        for at, token in enumerate(tokens):
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                kinds[at] = BYTE
            elif token == model.get("unk_token"):
                kinds[at] = UNKNOWN
    return {"tokens": tokens, "token_type": kinds}


def _by_scores(
    found: dict[str, Any], model: dict[str, Any], merges: list[tuple[str, ...]]
) -> dict[str, list[float]]:
    """Scores by which unions of tokens come in the order of their merges; others are below them."""
    order: dict[str, int] = {}
    for pair in merges:
        order.setdefault("".join(pair), len(order))
    below = len(order)
    scores = [
        0.0 if kind in (CONTROL, UNKNOWN, BYTE) else -float(order.get(token, below + at))
        for at, (token, kind) in enumerate(zip(found["tokens"], found["token_type"], strict=True))
    ]
    return {"scores": scores}


def _around(tokenizer: Any, name: str) -> dict[str, bool]:
    """Which special tokens go around each text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for bos in (False, True):
        for eos in (False, True):
            before = [tokenizer.bos_token_id] if bos else []
            if whole == [*before, *bare, *([tokenizer.eos_token_id] if eos else [])]:
                return {"add_bos_token": bos, "add_eos_token": eos}
    raise _refusal(name, "other tokens than one for the begin and one for the end go around a text")


def _rule(said: dict[str, Any], name: str) -> dict[str, Any]:
    """The kind of a tokenizer, and the rule by which it cuts texts."""
    forms: list[dict[str, Any]]
    if said["model"].get("byte_fallback"):
        pre = {"model": "llama", "pre": "default", "scores": []}
        forms = [{**pre, "add_space_prefix": prefixed} for prefixed in (True, False)]
    else:
        forms = [{"model": "gpt2", "pre": rule} for rule in CUTS]
    wanted = _form(said)
    for form in forms:
        meant = {
            f"tokenizer.ggml.{key}": value for key, value in {**form, "tokens": [], "token_type": []}.items()
        }
        if _form(json.loads(build(meant, Path(name)).to_str())) == wanted:
            form.pop("scores", None)
            return form
    plain = [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
    if not said["model"]["merges"] and wanted["pre_tokenizer"] == plain and not wanted["ignore_merges"]:
        return forms[0]  # where nothing is joined, cuts make no difference
    parts = [part["type"] for part in (*wanted["normalizer"], *wanted["pre_tokenizer"])]
    raise _refusal(name, f"no known rule cuts texts as it does: {', '.join(parts) or 'nothing'}")


def _form(said: dict[str, Any]) -> dict[str, Any]:
    """What of a tokenizer is the same for all vocabularies."""

    def parts(value: Any) -> list[dict[str, Any]]:
        if not value:
            return []
        if value["type"] == "Sequence":
            key = next(key for key in value if key != "type")
            return [part for one in value[key] for part in parts(one)]
        return [{key: found for key, found in value.items() if key != "trim_offsets"}]

    decoder = [
        part if part["type"] != "ByteLevel" else {"type": "ByteLevel"} for part in parts(said["decoder"])
    ]
    joined = bool(said["model"].get("byte_fallback"))
    return {
        "normalizer": parts(said["normalizer"]),
        "pre_tokenizer": parts(said["pre_tokenizer"]),
        "decoder": decoder,
        "ignore_merges": bool(said["model"].get("ignore_merges")),
        "fuse_unk": joined and bool(said["model"].get("fuse_unk")),
    }


def _check(
    tokenizer: Any, said: dict[str, Any], merges: list[tuple[str, ...]], made: dict[str, Any], name: str
) -> None:
    """See that what is read back is the tokenizer."""
    try:
        back = build(made, Path(name))
    except InputError as error:
        raise _refusal(name, str(error).partition(": ")[2]) from error
    read = json.loads(back.to_str())
    if [tuple(pair) for pair in read["model"]["merges"]] != merges:
        raise _refusal(name, "its merges are not in the order of scores")
    if read["model"]["vocab"].items() < said["model"]["vocab"].items():
        raise _refusal(name, "its tokens are not those that are read back")
    for text in TRIED:
        if back.encode(text).ids != tokenizer(text)["input_ids"]:
            raise _refusal(name, f"{text[:20]!r} would be cut otherwise")
