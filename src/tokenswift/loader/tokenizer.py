"""A tokenizer without transformers: texts, ids and the chat template, from ``tokenizer.json`` as it
stands.

transformers' tokenizer of most checkpoints is that file and nothing else. :func:`read` makes it
where that is sure: for classes that load the file, and configs that change nothing of it
(`CHANGES`). All else is left to transformers.

:func:`gguf_tokenizer` makes the one that a GGUF file describes (:class:`Words`). Two kinds are
known. Byte-level BPE ("gpt2") comes with its merges, and the name of the rule by which a text is
cut before (``tokenizer.ggml.pre``). BPE as sentencepiece has it ("llama") comes with scores
instead: of two neighbours those are joined first whose union scores best. Whatever else a file asks
for is refused: a nearly right rule gives nearly right texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenswift.files import MOST_CONFIG, MOST_TOKENIZER, read_small
from tokenswift.loader.cuts import RULES, SAME, Rule, rule_of
from tokenswift.loader.find import refused_as
from tokenswift.loader.schema import converted, refusal
from tokenswift.types import InputError, counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
#: files and folders that say more
MORE = ("tekken.json", "additional_chat_templates")
#: special tokens with names, as transformers has them
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: fields of a tokenizer's config that change ids in a way that is not known here
CHANGES = ("add_prefix_space", "fix_mistral_regex", "from_slow", "split_special_tokens")
#: classes that load the file, and the families where they do; Qwen's names its special tokens
#: itself
QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
FAMILIES = dict.fromkeys(
    ("TokenizersBackend", "PreTrainedTokenizerFast"), ("llama", "mistral", "qwen3")
)
FAMILIES |= dict.fromkeys(QWEN, ("qwen2", "qwen3"))
END = "<|endoftext|>"  # which Qwen's class takes for names that a file leaves out
_PLAIN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


class PlainTokenizer:
    """What `loader.prompts` and the engine ask of a tokenizer; names as of transformers' own.

    Args:
        made: the tokenizer as its library has it, a ``tokenizers.Tokenizer``.
        special: special tokens by name (``bos_token``, …).
        template: the chat template, or None.
    """

    def __init__(self, made: Any, special: Mapping[str, str], template: str | None) -> None:
        self.backend_tokenizer = made
        self.special_tokens_map, self.chat_template = dict(special), template
        self.bos_token = special.get("bos_token")
        ids = {name: made.token_to_id(token) for name, token in special.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text, under "input_ids"."""
        made = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": made.ids}

    def decode(
        self,
        tokens: list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of some ids."""
        return self.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The name of an id in the vocabulary."""
        return self.backend_tokenizer.id_to_token(token)

    def get_vocab(self) -> dict[str, int]:
        """Tokens and their ids."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)


def read(folder: Path, family: str) -> PlainTokenizer | None:
    """The tokenizer of a model folder, without transformers.

    Args:
        family: the model type of its config.json.
    Returns:
        None where transformers' tokenizer may be another one.
    """
    from tokenizers import Tokenizer, processors

    if any((folder / name).exists() for name in MORE) or not (folder / FILE).is_file():
        return None
    try:
        said = json.loads(read_small(folder / CONFIG, MOST_CONFIG))
        text = read_small(folder / FILE, MOST_TOKENIZER).decode()
        template = said.get("chat_template")
        if (folder / TEMPLATE).exists():
            template = read_small(folder / TEMPLATE, MOST_TOKENIZER).decode()
        added = json.loads(text)["added_tokens"]
        names = [str(token["content"]) for token in added]
        special = _special(folder, said, added)
        if family not in FAMILIES.get(said["tokenizer_class"], ()) or not isinstance(
            template, str | None
        ):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # transformers says what is wrong
    check_lengths(names, f"tokenizer {folder / FILE}")
    with refused_as(f"tokenizer {folder / FILE} cannot be read"):
        made = Tokenizer.from_str(text)
    if special is None or made.truncation is not None or made.padding is not None:
        return None
    if made.post_processor is None:
        made.post_processor = processors.TemplateProcessing("$A:0", "$A:0 $B:1", [])
    return PlainTokenizer(made, special, template)


def _special(
    folder: Path, said: Mapping[str, Any], added: list[dict[str, Any]]
) -> dict[str, str] | None:
    """Special tokens by name, of a config and the added tokens of the tokenizer's own file; None
    where the two say different things, or the config more than is known here."""
    if any(map(said.get, CHANGES)):
        return None
    if "added_tokens_decoder" in said:
        if [
            {"id": int(at), **token} for at, token in said["added_tokens_decoder"].items()
        ] != added:
            return None
    elif any((folder / file).exists() for file in ("added_tokens.json", "special_tokens_map.json")):
        return None
    named = {name: said[name] for name in NAMED if name in said}
    named = {name: one["content"] if isinstance(one, dict) else one for name, one in named.items()}
    if said["tokenizer_class"] in QWEN:
        named = dict.fromkeys(("unk_token", "eos_token", "pad_token"), END) | named
    found = {name: token for name, token in named.items() if token is not None}
    extra = said.get("additional_special_tokens") or said.get("extra_special_tokens") or []
    plain = {token["content"] for token in added if {**token, **_PLAIN} == token}
    return (
        found if isinstance(extra, list) and plain.issuperset([*found.values(), *extra]) else None
    )


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
#: characters of a token, of which real ones have a few hundred, and of all tokens, a few million:
#: the merges of a vocabulary are found by cutting each token at every place
LONGEST_TOKEN = 1 << 10
MOST_CHARACTERS = 1 << 22
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


def check_lengths(tokens: Sequence[str], where: str) -> None:
    """Refuse tokens that no vocabulary has.

    Raises:
        InputError: one is too long, or all of them together.
    """
    longest = max(map(len, tokens), default=0)
    if longest > LONGEST_TOKEN:
        raise InputError(
            f"{where} has a token of {longest:,} characters; valid: up to {LONGEST_TOKEN:,}"
        )
    total = sum(map(len, tokens))
    if total > MOST_CHARACTERS:
        raise InputError(f"{where} has {total:,} characters; valid: up to {MOST_CHARACTERS:,}")


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


def wrapped(made: PlainTokenizer) -> PreTrainedTokenizerFast:
    """The same as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        chat_template=made.chat_template,
        clean_up_tokenization_spaces=False,
        **made.special_tokens_map,
    )


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
