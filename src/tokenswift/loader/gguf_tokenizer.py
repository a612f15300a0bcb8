"""The tokenizer that a GGUF file describes.

:func:`gguf_tokenizer` makes the one that a GGUF file describes (:class:`Words`). Two kinds are
known. Byte-level BPE ("gpt2") comes with its merges, and the name of the rule by which a text is
cut before (``tokenizer.ggml.pre``). BPE as sentencepiece has it ("llama") comes with scores
instead: of two neighbours those are joined first whose union scores best. Whatever else a file asks
for is refused: a nearly right rule gives nearly right texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tokenswift.checks import counted
from tokenswift.loader import harmony
from tokenswift.loader.cuts import RULES, SAME, Rule, rule_of
from tokenswift.loader.errors import refused_as
from tokenswift.loader.infill_marks import GGUF_NAMES
from tokenswift.loader.plain_tokenizer import PlainTokenizer, check_lengths
from tokenswift.loader.schema import converted, refusal
from tokenswift.types import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what sentencepiece writes for a space
#: kinds of tokens
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
#: tokens that end a text besides those that the file numbers, of whatever kind it says they are
ENDS = {
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    harmony.END,
    harmony.CALL,
    harmony.RETURN,
    "<turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
}
#: and those that may be ordinary text otherwise (``</s>`` is a tag of HTML)
CONTROL_ENDS = ("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]")
#: names of special tokens: ours, the file's
SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
#: ids that become tokens of a text, or end it
NUMBERED = ("bos", "eos", "eot", "eom", "unknown")
#: what the keys of a tokenizer begin with, but for that of the chat template
PREFIX = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
#: kinds of tokenizers
BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"


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
    fim_pre_token_id: int | None = None
    fim_suf_token_id: int | None = None
    fim_mid_token_id: int | None = None
    fim_pad_token_id: int | None = None
    fim_rep_token_id: int | None = None
    fim_sep_token_id: int | None = None
    prefix_token_id: int | None = None
    suffix_token_id: int | None = None
    middle_token_id: int | None = None
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
        special: dict[str, str] = {}
        for name, theirs in SPECIAL_NAMES.items():
            token_id = getattr(self, f"{theirs}_token_id")
            if token_id is not None and 0 <= token_id < len(tokens):
                special[f"{name}_token"] = tokens[token_id]
        return special

    def infill_names(self) -> dict[str, str]:
        """The marks for filling in that the file numbers, by the fields of `Marks`."""
        names: dict[str, str] = {}
        tokens = self.tokens or []
        for field, theirs in GGUF_NAMES.items():
            for name in theirs:
                token_id = getattr(self, f"{name}_token_id")
                if token_id is not None and 0 <= token_id < len(tokens):
                    names.setdefault(field, tokens[token_id])
        return names

    def vocabulary(self) -> dict[str, int]:
        """Tokens and their ids, without those that fill up a padded embedding."""
        return {token: number for number, (token, kind) in enumerate(self.typed) if kind != UNUSED}

    def of_kind(self, kind: int) -> list[str]:
        """The tokens of a kind, in order."""
        return [token for token, its_kind in self.typed if its_kind == kind]

    def before_texts(self) -> list[str]:
        """The special token that goes before each text, if one does."""
        adds = self.add_bos_token
        if adds is None:
            by_rule = self.rule is not None and self.rule.adds_bos
            adds = self.model == SENTENCEPIECE or by_rule
        return self._token(self.bos_token_id) if adds else []

    def behind_texts(self) -> list[str]:
        """The special token that goes behind each text, if one does."""
        return self._token(self.eos_token_id) if self.add_eos_token else []

    def _token(self, token_id: int | None) -> list[str]:
        return [] if token_id is None else [(self.tokens or [])[token_id]]

    def ends(self) -> list[int]:
        """The ids that end a text, in order: those that the file numbers, and the well-known
        ones."""
        ends = {self.eos_token_id, self.eot_token_id, self.eom_token_id}
        for number, (token, kind) in enumerate(self.typed):
            if token in ENDS or (kind == CONTROL and token in CONTROL_ENDS):
                ends.add(number)
        tokens = self.tokens or []
        if harmony.speaks_harmony(tokens) and harmony.END in tokens:
            ends.discard(tokens.index(harmony.END))
        return sorted(end for end in ends if end is not None)


def words_of(metadata: Mapping[str, object], path: Path, rows: int | None = None) -> Words:
    """What a GGUF file says of its tokenizer, its lists as long as each other.

    Args:
        path: of the file, for messages.
        rows: of the embedding, V: ids and tokens are held against it.
    Raises:
        InputError: naming the value, and what is valid.
    """
    where = f"model file {path}"
    fields: dict[str, object] = {}
    for key, value in metadata.items():
        if key.startswith(PREFIX):
            fields[key.removeprefix(PREFIX)] = value
    file_names = {name: PREFIX + name for name in fields}
    fields["chat_template"] = metadata.get(TEMPLATE_KEY)
    file_names["chat_template"] = TEMPLATE_KEY
    words = converted(fields, Words, where, file_names)
    tokens = words.tokens or ()
    most = len(tokens) if rows is None else rows
    for name in NUMBERED:
        token_id = getattr(words, f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < most:
            valid = f"0 to {most - 1}, a row of the embedding"
            raise refusal(where, f"{PREFIX}{name}_token_id", token_id, valid)
    if words.tokens is not None and not 0 < len(tokens) <= most:
        count = counted(len(tokens), "token")
        valid = f"1 to {most:,}, the rows of the embedding"
        raise InputError(f"{where}: {PREFIX}tokens has {count}; valid: {valid}")
    check_lengths(tokens, f"{where}: {PREFIX}tokens")
    _check_count("token_type", words.token_type, len(tokens), where)
    _check_count("scores", words.scores, len(tokens), where)
    return words


def _check_count(name: str, values: Sequence[float] | None, count: int, where: str) -> None:
    """Refuse a list of another length than that of tokens."""
    if values and len(values) != count:
        raise InputError(f"{where}: {PREFIX}{name} has {len(values):,} values; valid: {count:,}")


def build(words: Words, path: Path) -> Tokenizer:
    """The tokenizer as its library has it; without transformers.

    Args:
        path: of the file, for messages.
    Raises:
        InputError: it is of another kind than those above, or incomplete.
    """
    from tokenizers import AddedToken, processors

    _check_complete(words, path)
    with refused_as(f"model file {path}: its tokenizer cannot be built"):
        tokenizer = _byte_level(words, path) if words.model == BYTE_LEVEL else _sentencepiece(words)
        ends = [words.typed[end][0] for end in words.ends()]
        special = dict.fromkeys([*words.of_kind(CONTROL), *words.special().values(), *ends])
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special]
        )
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False)
                for token in words.of_kind(USER_DEFINED)
                if token not in special
            ]
        )
        before = words.before_texts()
        behind = words.behind_texts()
    ids = [(token, tokenizer.token_to_id(token)) for token in {*before, *behind}]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *behind], special_tokens=ids
    )
    return tokenizer


def _check_complete(words: Words, path: Path) -> None:
    """Refuse a tokenizer of a kind that is not known, or one of which a list is missing."""
    if words.model not in (BYTE_LEVEL, SENTENCEPIECE):
        raise refusal(f"model file {path}", f"{PREFIX}model", words.model, "gpt2, llama")
    needed = ["tokens"]
    if words.model == SENTENCEPIECE:
        needed = ["tokens", "scores", "token_type"]
    else:
        normal = words.of_kind(NORMAL)
        longer = sum(len(token) > 1 for token in normal)
        if 2 * longer > len(normal):
            needed.append("merges")  # no other way leads to such tokens
    for name in needed:
        if getattr(words, name) is None:
            raise InputError(
                f"model file {path} lacks {PREFIX}{name}; valid: a file with its tokenizer"
            )


def gguf_tokenizer(metadata: Mapping[str, object], path: Path) -> PlainTokenizer:
    """The tokenizer of a GGUF file with its special tokens and chat template.

    Raises:
        InputError: as of :func:`build`.
    """
    words = words_of(metadata, path)
    special = words.special()
    return PlainTokenizer(build(words, path), special, words.chat_template, words.infill_names())


def _byte_level(words: Words, path: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models

    rule = words.rule
    if rule is None:
        names = ", ".join((*RULES, *SAME))
        raise refusal(f"model file {path}", f"{PREFIX}pre", words.pre, names)
    merges: list[tuple[str, str]] = []
    for line in words.merges or ():
        left, right = line.split(" ")
        merges.append((left, right))
    model = models.BPE(vocab=words.vocabulary(), merges=merges, ignore_merges=rule.ignores_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.normalizer = rule.normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(words: Words) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = words.unknown_token_id
    model = models.BPE(
        vocab=words.vocabulary(),
        merges=_merges(words),
        unk_token=None if unknown is None else words.typed[unknown][0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    normal: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    decoding: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if words.add_space_prefix is not False:
        normal.insert(0, normalizers.Prepend(SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


class _Merge(NamedTuple):
    """Two tokens whose union is a token; in the order in which they are joined."""

    minus_score: float
    left_id: int
    right_id: int
    left: str
    right: str


def _merges(words: Words) -> list[tuple[str, str]]:
    """Pairs of tokens whose union is a token, those with the best score first."""
    ids = words.vocabulary()
    plain = {token for token, kind in words.typed if kind not in (UNKNOWN, CONTROL, UNUSED, BYTE)}
    merges: list[_Merge] = []
    for (token, _), score in zip(words.typed, words.scores or (), strict=True):
        if token not in plain:
            continue
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in plain and right in plain:
                merges.append(_Merge(-score, ids[left], ids[right], left, right))
    return [(merge.left, merge.right) for merge in sorted(merges)]
