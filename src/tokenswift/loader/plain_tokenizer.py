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
from typing import TYPE_CHECKING, Any

from tokenswift.files import MOST_CONFIG, MOST_TOKENIZER, read_small
from tokenswift.loader.errors import refused_as
from tokenswift.types import InputError

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


def wrapped(made: PlainTokenizer) -> PreTrainedTokenizerFast:
    """The same as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        chat_template=made.chat_template,
        clean_up_tokenization_spaces=False,
        **made.special_tokens_map,
    )
