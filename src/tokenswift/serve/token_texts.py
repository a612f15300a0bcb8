"""What single tokens are in a text: its bytes, whatever they are alone."""

from __future__ import annotations

import re
from functools import lru_cache

from tokenswift.tokenizer import Tokenizer, backend_of

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what sentencepiece writes for a space
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
FIRST_STAND_IN = 0x100  # letters from here on stand for bytes that are no visible character
VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_letters() -> dict[str, int]:
    """The letters by which a byte-level vocabulary writes bytes: those that are visible stand for
    themselves, the others are numbered."""
    letters = {chr(byte): byte for byte in VISIBLE}
    hidden = [byte for byte in range(0x100) if byte not in VISIBLE]
    letters.update((chr(FIRST_STAND_IN + number), byte) for number, byte in enumerate(hidden))
    return letters


class TokenTexts:
    """The bytes of single tokens.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = backend_of(tokenizer)
        decoder = None if backend is None else backend.decoder
        self._tokenizer = tokenizer
        self._letters = byte_letters()
        self._is_byte_level = decoder is not None and decoder.decode(["\u0120"]) == " "
        self._has_pieces = decoder is not None and SPACE not in decoder.decode(["a", SPACE])
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; of a control token its name."""
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""
        if self._is_byte_level and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        if self._has_pieces:
            byte = BYTE.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else name.replace(SPACE, " ").encode()
        return self._tokenizer.decode([token]).encode()

    def text_of(self, token: int) -> str:
        """The same as text; where it is no whole characters, as ``bytes:\\xe4``, which OpenAI's
        interface has for it."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@lru_cache(2)  # of the model that is served: an answer each asks for it
def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """`TokenTexts` of a tokenizer."""
    return TokenTexts(tokenizer)
