"""A tokenizer without transformers: texts, ids and the chat template, from ``tokenizer.json`` as it
stands.

transformers' tokenizer of most checkpoints is that file and nothing else. :func:`read` makes it
where that is sure: for classes that load the file, and configs that change nothing of it
(`CHANGES`). All else is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenswift.files import MOST_CONFIG, MOST_TOKENIZER, read_small
from tokenswift.loader.errors import refused_as
from tokenswift.types import InputError

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast


FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
#: files and folders that say more
MORE = ("tekken.json", "additional_chat_templates")
#: files that say more of added tokens, where the config names none
MORE_TOKENS = ("added_tokens.json", "special_tokens_map.json")
#: special tokens with names, as transformers has them
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: fields of a tokenizer's config that change ids in a way that is not known here
CHANGES = ("add_prefix_space", "fix_mistral_regex", "from_slow", "split_special_tokens")
#: Qwen's classes, which name special tokens themselves
QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
#: classes that load the file, and the families where they do
FAMILIES = {
    "TokenizersBackend": ("llama", "mistral", "qwen3"),
    "PreTrainedTokenizerFast": ("llama", "mistral", "qwen3"),
    "Qwen2Tokenizer": ("qwen2", "qwen3"),
    "Qwen2TokenizerFast": ("qwen2", "qwen3"),
}
#: what Qwen's classes take for special tokens that a file leaves out
QWEN_END = "<|endoftext|>"
QWEN_DEFAULTS = {"unk_token": QWEN_END, "eos_token": QWEN_END, "pad_token": QWEN_END}
#: fields of an added token that is nothing but a special one
PLAIN_SPECIAL = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


class PlainTokenizer:
    """What prompts and the engine ask of a tokenizer (`tokenizer.Tokenizer`), without transformers;
    the names are those of transformers' own.

    Args:
        backend: the tokenizer as its library has it.
        special: special tokens by name (``bos_token``, …).
        template: the chat template, or None.
        infill_names: marks for filling in that the model's file names (`infill_marks`).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: Mapping[str, str],
        template: str | None,
        infill_names: Mapping[str, str] | None = None,
    ) -> None:
        ids = {name: backend.token_to_id(token) for name, token in special.items()}
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special)
        self.infill_names = dict(infill_names or {})
        self.chat_template = template
        self.bos_token = special.get("bos_token")
        self.bos_token_id = ids.get("bos_token")
        self.eos_token_id = ids.get("eos_token")

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text, under "input_ids"."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids}

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


class _Files(NamedTuple):
    """What the files of a tokenizer say.

    Attributes:
        text: the tokenizer's own file.
        template: the chat template, or None.
        special: special tokens by name; None: the files say more than is known here.
        added: names of added tokens.
    """

    text: str
    template: str | None
    special: dict[str, str] | None
    added: list[str]


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
        files = _files(folder, family)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # transformers says what is wrong
    if files is None:
        return None
    check_lengths(files.added, f"tokenizer {folder / FILE}")
    with refused_as(f"tokenizer {folder / FILE} cannot be read"):
        backend = Tokenizer.from_str(files.text)
    if files.special is None or backend.truncation is not None or backend.padding is not None:
        return None
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing("$A:0", "$A:0 $B:1", [])
    return PlainTokenizer(backend, files.special, files.template)


def _files(folder: Path, family: str) -> _Files | None:
    """What the files of a folder say; None where transformers makes another class of them.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError: they are not what
            they should be.
    """
    config = json.loads(read_small(folder / CONFIG, MOST_CONFIG))
    text = read_small(folder / FILE, MOST_TOKENIZER).decode()
    template = config.get("chat_template")
    if (folder / TEMPLATE).exists():
        template = read_small(folder / TEMPLATE, MOST_TOKENIZER).decode()
    added = json.loads(text)["added_tokens"]
    names = [str(token["content"]) for token in added]
    special = _special(folder, config, added)
    if family not in FAMILIES.get(config["tokenizer_class"], ()):
        return None
    if not isinstance(template, str | None):
        return None
    return _Files(text, template, special, names)


def _special(
    folder: Path, config: Mapping[str, Any], added: Sequence[Mapping[str, Any]]
) -> dict[str, str] | None:
    """Special tokens by name, of a config and the added tokens of the tokenizer's own file; None
    where the two say different things, or the config more than is known here."""
    if any(config.get(name) for name in CHANGES):
        return None
    if "added_tokens_decoder" in config:
        decoder = config["added_tokens_decoder"]
        if [{"id": int(number), **token} for number, token in decoder.items()] != added:
            return None
    elif any((folder / name).exists() for name in MORE_TOKENS):
        return None
    stated: dict[str, Any] = {}
    if config["tokenizer_class"] in QWEN:
        stated.update(QWEN_DEFAULTS)
    for name in NAMED:
        if name in config:
            token = config[name]
            stated[name] = token["content"] if isinstance(token, dict) else token
    special = {name: token for name, token in stated.items() if token is not None}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    if not isinstance(extra, list):
        return None
    plain = {token["content"] for token in added if {**token, **PLAIN_SPECIAL} == token}
    return special if plain.issuperset([*special.values(), *extra]) else None


#: characters of a token, of which real ones have a few hundred, and of all tokens, a few million:
#: the merges of a vocabulary are found by cutting each token at every place
LONGEST_TOKEN = 1 << 10
MOST_CHARACTERS = 1 << 22


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


def wrapped(tokenizer: PlainTokenizer) -> PreTrainedTokenizerFast:
    """The same as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    )
