"""Control tokens in another spelling.

A tokenizer may normalise a text (full-width letters, capitals, accents, spaces) before it looks for
them, so that what nobody marked becomes one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tokenswift.tokenizer import Tokenizer, backend_of

Encode = Callable[[str], list[int]]


def unknown_id(tokenizer: Tokenizer, controls: Mapping[str, int]) -> int | None:
    """The token for what a vocabulary lacks, which any text may become; None: there is none.

    Args:
        controls: the control tokens' names and ids.
    """
    backend = backend_of(tokenizer)
    model = None if backend is None else backend.model
    name = tokenizer.special_tokens_map.get("unk_token") or getattr(model, "unk_token", None)
    return controls.get(str(name))


def without_forgeries(
    encode: Encode, controls: Mapping[str, int], unknown: int | None, apart: Encode
) -> Encode:
    """An encoder that makes control tokens of their own names alone, whatever the tokenizer does.

    Args:
        encode: encodes a text as the tokenizer does.
        controls: the control tokens' names and ids.
        unknown: see `unknown_id`.
        apart: encodes a text such that only names become control tokens, or raises.
    """
    names = sorted(controls, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names)))
    watched = frozenset(controls.values()) - {unknown}

    def guarded(text: str) -> list[int]:
        ids = encode(text)
        named = [controls[name] for name in pattern.findall(text)] if names else []
        expected = [token for token in named if token in watched]
        encoded = [token for token in ids if token in watched]
        return ids if encoded == expected else apart(text)

    return guarded
