"""What every part of the library asks of a tokenizer, its own (`loader.plain_tokenizer`) or one of
transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tokenizers


class Decoder(Protocol):
    """A tokenizer, as far as it makes texts of token ids."""

    def decode(
        self,
        token_ids: list[int],
        /,
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> Any:
        """The text of some ids, a string. (transformers makes a list of texts of a list of lists,
        and declares both.)"""
        ...


class Tokenizer(Decoder, Protocol):
    """Texts as token ids, and back; the names are those of transformers' tokenizers.

    Some tokenizers have more, which is looked for where it is used: ``chat_template``,
    ``bos_token`` and ``bos_token_id``, ``eos_token_id``, ``backend_tokenizer``.
    """

    @property
    def special_tokens_map(self) -> Mapping[str, object]:
        """Special tokens by name: ``bos_token``, ``unk_token``, …"""
        ...

    def __call__(self, text: str, /, *, add_special_tokens: bool = True) -> Mapping[str, list[int]]:
        """The ids of a text, under "input_ids"."""
        ...

    def convert_ids_to_tokens(self, token_id: int, /) -> object:
        """The name of an id in the vocabulary."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Tokens and their ids."""
        ...


def backend_of(tokenizer: object) -> tokenizers.Tokenizer | None:
    """The tokenizer of the library ``tokenizers`` inside another one; None: it has none."""
    return getattr(tokenizer, "backend_tokenizer", None)
