"""A stand-in for a transformers tokenizer, without importing transformers: a second at every start.

It knows what generating needs: texts and ids in both directions, and the chat template, which
`loader.prompts` renders. :func:`describe` makes one beside the tokenizer and compares the two: what they do
not do alike, transformers does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenswift.types import InputError

FILE = "tokenizer.json"
#: methods of a tokenizer class that the stand-in takes to be transformers' usual ones
USUAL = (
    "__call__",
    "_encode_plus",
    "encode",
    "decode",
    "_decode",
    "apply_chat_template",
    "get_chat_template",
)


class StandIn:
    """What `loader.prompts` and `text` ask of a tokenizer, from ``tokenizer.json`` alone.

    Args:
        source: the model's folder, or its tokenizer as `tokenizers` has it.
        special: the special tokens by name (``bos_token``, …), as transformers reads them.
        template: the chat template, or None.
    Raises:
        InputError: the file cannot be read, or says that texts are to be cut or filled.
    """

    def __init__(self, source: Any, special: dict[str, str], template: str | None) -> None:
        self._tokenizer: Any = _read(source) if isinstance(source, Path) else source
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            raise InputError(f"tokenizer {source} cuts or fills texts; valid: one that does not")
        self.special_tokens_map, self.chat_template = special, template
        self.bos_token = special.get("bos_token")
        self.bos_token_id = None if self.bos_token is None else self._tokenizer.token_to_id(self.bos_token)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text, under "input_ids"."""
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self, tokens: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of some ids."""
        if clean_up_tokenization_spaces:
            raise ValueError("clean_up_tokenization_spaces is True; valid: False")
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The name of an id in the vocabulary."""
        return self._tokenizer.id_to_token(token)

    def get_vocab(self) -> dict[str, int]:
        """Tokens and their ids."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def to_str(self) -> str:
        """The tokenizer as its library writes it."""
        return self._tokenizer.to_str()


def _read(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / FILE))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise InputError(f"tokenizer {folder / FILE} cannot be read ({error})") from error


def describe(tokenizer: Any, source: Any) -> dict[str, Any] | None:
    """What a :class:`StandIn` for a tokenizer of transformers is made from (``special`` and ``template``);
    None where it would do anything else than the tokenizer itself.

    Args:
        source: as of :class:`StandIn`.
    """
    from transformers import PreTrainedTokenizerFast

    usual: Any = PreTrainedTokenizerFast
    if not isinstance(tokenizer, usual) or (isinstance(source, Path) and not (source / FILE).is_file()):
        return None
    own = type(tokenizer).__mro__[: type(tokenizer).__mro__.index(usual)]
    if any(name in vars(kind) for kind in own for name in USUAL) or tokenizer.split_special_tokens:
        return None
    special, template = dict(tokenizer.special_tokens_map), tokenizer.chat_template
    if not (template is None or isinstance(template, str)):
        return None
    try:
        made = StandIn(source, special, template)
    except InputError:
        return None
    same = (
        made.to_str() == tokenizer.backend_tokenizer.to_str()
        and made.bos_token_id == tokenizer.bos_token_id
        and made.get_vocab() == tokenizer.get_vocab()
    )
    return {"special": special, "template": template} if same else None
