"""The tokenizer that a GGUF file describes.

:func:`gguf_tokenizer` makes the one that a GGUF file describes (:class:`Words`). Two kinds are
known. Byte-level BPE ("gpt2") comes with its merges, and the name of the rule by which a text is
cut before (``tokenizer.ggml.pre``). BPE as sentencepiece has it ("llama") comes with scores
instead: of two neighbours those are joined first whose union scores best. Whatever else a file asks
for is refused: a nearly right rule gives nearly right texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from tokenswift.checks import counted
from tokenswift.loader.cuts import RULES, SAME, Rule, rule_of
from tokenswift.loader.errors import refused_as
from tokenswift.loader.plain_tokenizer import PlainTokenizer, check_lengths
from tokenswift.loader.schema import converted, refusal
from tokenswift.types import InputError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what sentencepiece writes for a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens
#: tokens that end a text besides those that the file numbers: of whatever kind it says they are,
#: and those that may be ordinary text otherwise (``</s>`` is a tag of HTML)
ENDS = {
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<turn|>",
}
ENDS |= {"<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"}
CONTROL_ENDS = ("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]")
#: names of special tokens: ours, the file's
SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
#: ids that become tokens of a text, or end it
NUMBERED = ("bos", "eos", "eot", "eom", "unknown")


class Words(msgspec.Struct, dict=True):
    """What a GGUF file says of its tokenizer, behind ``tokenizer.ggml.``."""

    model: str | None = None
    pre: str | None = None
    tokens: list[str] | None = None
    token_type: list[int] | None = None
    scores: list[float] | None = None
    merges: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    unknown_token_id: int | None = None
    padding_token_id: int | None = None
    add_bos_token: bool | int | None = None
    add_eos_token: bool | int | None = None
    add_space_prefix: bool | int | None = None
    chat_template: str | None = None  # which has its name behind "tokenizer."

    @cached_property
    def typed(self) -> list[tuple[str, int]]:
        """Each token and its kind."""
        tokens = self.tokens or []
        return list(zip(tokens, self.token_type or [NORMAL] * len(tokens), strict=True))

    @property
    def rule(self) -> Rule | None:
        """How texts are cut; None: by a rule that is not known."""
        return rule_of(self.pre)

    def special(self) -> dict[str, str]:
        """Special tokens by transformers' names (``bos_token``, …)."""
        tokens = self.tokens or []
        named = {
            name: getattr(self, f"{theirs}_token_id") for name, theirs in SPECIAL_NAMES.items()
        }
        there = {name: at for name, at in named.items() if at is not None and 0 <= at < len(tokens)}
        return {f"{name}_token": tokens[at] for name, at in there.items()}

    def vocabulary(self) -> dict[str, int]:
        """Tokens and their ids, without those that fill up a padded embedding."""
        return {token: at for at, (token, kind) in enumerate(self.typed) if kind != UNUSED}

    def added(self, name: str) -> list[str]:
        """The special token that goes before (bos) or behind (eos) each text, if one does."""
        at, said = getattr(self, f"{name}_token_id"), getattr(self, f"add_{name}_token")
        if said is None:
            adds_bos = self.rule is not None and self.rule.adds_bos
            said = name == "bos" and (self.model == "llama" or adds_bos)
        return [(self.tokens or [])[at]] if said and at is not None else []

    def ends(self) -> list[int]:
        """The ids that end a text, in order: those that the file numbers, and the well-known
        ones."""
        found = {self.eos_token_id, self.eot_token_id, self.eom_token_id}
        for at, (token, kind) in enumerate(self.typed):
            if token in ENDS or (kind == CONTROL and token in CONTROL_ENDS):
                found.add(at)
        return sorted(at for at in found if at is not None)


def words_of(metadata: Mapping[str, Any], path: Path, rows: int | None = None) -> Words:
    """What a GGUF file says of its tokenizer, its lists as long as each other.

    Args:
        path: of the file, for messages.
        rows: of the embedding, V: ids and tokens are held against it.
    Raises:
        InputError: naming the value, and what is valid.
    """
    where, prefix = f"model file {path}", "tokenizer.ggml."
    said = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    called = {name: prefix + name for name in said} | {"chat_template": "tokenizer.chat_template"}
    said["chat_template"] = metadata.get("tokenizer.chat_template")
    words: Words = converted(said, Words, where, called)
    tokens = words.tokens or ()
    most = len(tokens) if rows is None else rows
    for name in NUMBERED:
        at = getattr(words, f"{name}_token_id")
        if at is not None and not 0 <= at < most:
            raise refusal(
                where, f"{prefix}{name}_token_id", at, f"0 to {most - 1}, a row of the embedding"
            )
    if words.tokens is not None and not 0 < len(tokens) <= most:
        found, valid = counted(len(tokens), "token"), f"1 to {most:,}, the rows of the embedding"
        raise InputError(f"{where}: {prefix}tokens has {found}; valid: {valid}")
    check_lengths(tokens, f"{where}: {prefix}tokens")
    for name in ("token_type", "scores"):
        if (found := getattr(words, name)) and len(found) != len(tokens):
            raise InputError(
                f"{where}: {prefix}{name} has {len(found):,} values; valid: {len(tokens):,}"
            )
    return words


def build(words: Words, path: Path) -> Any:
    """The tokenizer as its library has it, a ``tokenizers.Tokenizer``; without transformers.

    Args:
        path: of the file, for messages.
    Raises:
        InputError: it is of another kind than those above, or incomplete.
    """
    from tokenizers import AddedToken, processors

    if words.model not in ("gpt2", "llama"):
        raise refusal(f"model file {path}", "tokenizer.ggml.model", words.model, "gpt2, llama")
    longer = [len(token) > 1 for token, kind in words.typed if kind == NORMAL]
    needed = ["tokens", "scores", "token_type"] if words.model == "llama" else ["tokens"]
    if words.model == "gpt2" and 2 * sum(longer) > len(longer):
        needed.append("merges")  # no other way leads to such tokens
    if lacking := next((name for name in needed if getattr(words, name) is None), None):
        raise InputError(
            f"model file {path} lacks tokenizer.ggml.{lacking}; valid: a file with its tokenizer"
        )
    with refused_as(f"model file {path}: its tokenizer cannot be built"):
        made = _byte_level(words, path) if words.model == "gpt2" else _sentencepiece(words)
        control = [token for token, kind in words.typed if kind == CONTROL]
        ends = [words.typed[at][0] for at in words.ends()]
        special = dict.fromkeys([*control, *words.special().values(), *ends])
        own = [
            token for token, kind in words.typed if kind == USER_DEFINED and token not in special
        ]
        made.add_special_tokens(
            [AddedToken(one, special=True, normalized=False) for one in special]
        )
        made.add_tokens([AddedToken(one, normalized=False) for one in own])
        before, after = words.added("bos"), words.added("eos")
    ids = [(token, made.token_to_id(token)) for token in {*before, *after}]
    made.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=ids
    )
    return made


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> PlainTokenizer:
    """The tokenizer of a GGUF file with its special tokens and chat template.

    Raises:
        InputError: as of :func:`build`.
    """
    words = words_of(metadata, path)
    return PlainTokenizer(build(words, path), words.special(), words.chat_template)


def _byte_level(words: Words, path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models

    rule = words.rule
    if rule is None:
        names = ", ".join((*RULES, *SAME))
        raise refusal(f"model file {path}", "tokenizer.ggml.pre", words.pre, names)
    merges: Any = [tuple(line.split(" ")) for line in words.merges or ()]
    made = Tokenizer(models.BPE(vocab=words.vocabulary(), merges=merges, ignore_merges=rule.whole))
    made.pre_tokenizer = rule.pre_tokenizer()
    made.normalizer = rule.normalizer()
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(words: Words) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = words.unknown_token_id
    made = Tokenizer(
        models.BPE(
            vocab=words.vocabulary(),
            merges=_merges(words),
            unk_token=None if unknown is None else words.typed[unknown][0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = words.add_space_prefix is not False
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefixed else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    last: list[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return made


def _merges(words: Words) -> list[tuple[str, str]]:
    """Pairs of tokens whose union is a token, those with the best score first."""
    ids = words.vocabulary()
    plain = {token for token, kind in words.typed if kind not in (UNKNOWN, CONTROL, UNUSED, BYTE)}
    found: list[tuple[float, int, int, str, str]] = []
    for (token, _), score in zip(words.typed, words.scores or (), strict=True):
        if token not in plain:
            continue
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in plain and (right := token[cut:]) in plain:
                found.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
