"""What the adjustments of a sequence need to know as token ids: the ends of its text, DRY's
breakers, and forbidden words (see `sampling.penalties`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tokenswift.checks import check_tokens, shown
from tokenswift.config.sampling import SamplingParams, Texts
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError

MOST_KEPT_BREAKERS = 1 << 19  # token ids of DRY's breakers that are kept, about 2 MB


@dataclass(frozen=True, slots=True)
class TextRules:
    """What adjustments need to know about a sequence, as token ids.

    Attributes:
        start: position of the first new token, the length of the prompt.
        ends: tokens that end the text, forbidden before ``min_tokens``.
        breakers: DRY's breakers.
        words: forbidden sequences of tokens.
    """

    start: int = 0
    ends: tuple[int, ...] = ()
    breakers: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()


NO_RULES = TextRules()  # without a prompt, ends, breakers or words


class RecentBreakers:
    """The breakers of the texts that were used last, as token ids, for one tokenizer: finding them
    takes a while. May be used by several threads.

    Args:
        most: token ids that are kept at most; of more, those of the texts that were used longest
            ago go.

    Attributes:
        size: token ids that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._tokens: OrderedDict[tuple[str, ...], NDArray[np.int32]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def get(self, texts: tuple[str, ...]) -> tuple[int, ...] | None:
        """The breakers of some texts; None where they are not known."""
        with self._lock:
            tokens = self._tokens.get(texts)
            if tokens is None:
                return None
            self._tokens.move_to_end(texts)
        return tuple(tokens.tolist())

    def add(self, texts: tuple[str, ...], tokens: tuple[int, ...]) -> None:
        """Keep the breakers of some texts, unless they alone are too many."""
        with self._lock:
            if texts in self._tokens or len(tokens) >= self._most:
                return
            self._tokens[texts] = np.array(tokens, np.int32)
            self.size += 1 + len(tokens)
            while self.size > self._most:
                _, oldest = self._tokens.popitem(last=False)
                self.size -= 1 + len(oldest)


_BREAKERS: WeakKeyDictionary[object, RecentBreakers] = WeakKeyDictionary()


def recent_breakers(tokenizer: object) -> RecentBreakers:
    """The breakers that are kept for a tokenizer."""
    return _BREAKERS.setdefault(tokenizer, RecentBreakers(MOST_KEPT_BREAKERS))


def rules_of(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    start: int = 0,
    ends: Collection[int] = (),
) -> TextRules:
    """Make the rules of a sequence.

    Args:
        params: the sampling parameters.
        tokenizer: the model's; None: it has none.
        vocab_size: V.
        start: position of the first new token.
        ends: tokens that end the text.
    Raises:
        InputError: a token id that the model does not have, words as texts without a tokenizer, or
            nothing that may be written.
    """
    for token, _ in params.biases:
        _check_ids("logit_bias", (token,), vocab_size)
    if not params.adjusts:
        return TextRules(start)
    breakers: tuple[int, ...] = ()
    if params.dry_multiplier:
        breakers = _containing(params.dry_breakers, tokenizer, vocab_size)
    words = tuple(dict.fromkeys(_forbidden_words(params.bad_words, tokenizer, vocab_size)))
    early_ends: tuple[int, ...] = ()
    if params.min_tokens:
        early_ends = tuple(sorted(end for end in ends if end < vocab_size))
    forbidden = {word[0] for word in words if len(word) == 1}.union(early_ends)
    if len(forbidden) >= vocab_size:
        raise InputError("bad_words leave no token that may be written; valid: fewer", "bad_words")
    return TextRules(start, early_ends, breakers, words)


def _check_ids(option: str, tokens: Sequence[int], vocab_size: int) -> None:
    try:
        check_tokens(tokens, vocab_size)
    except InputError as error:
        raise InputError(f"{option}: {error}", option) from None


def _forbidden_words(
    words: Texts, tokenizer: Tokenizer | None, vocab_size: int
) -> Iterable[tuple[int, ...]]:
    """Each word as token ids: at the beginning of a text, and after a space."""
    for word in words:
        if not isinstance(word, str):
            _check_ids("bad_words", word, vocab_size)
            yield tuple(word)
            continue
        if tokenizer is None:
            raise InputError(
                f"bad_words holds {shown(word)}, but the model came without a tokenizer; "
                "valid: lists of ids",
                "bad_words",
            )
        for form in dict.fromkeys((word, f" {word.lstrip(' ')}")):
            ids = tuple(tokenizer(form, add_special_tokens=False)["input_ids"])
            if ids and max(ids) < vocab_size:
                yield ids


def _containing(breakers: Texts, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Tokens that are breakers by their id, or because their text contains one."""
    ids = {text[0] for text in breakers if not isinstance(text, str) and len(text) == 1}
    _check_ids("dry_breakers", sorted(ids), vocab_size)
    texts = tuple(text for text in breakers if isinstance(text, str))
    if tokenizer is None or not texts:
        return tuple(sorted(ids))
    recent = recent_breakers(tokenizer)
    tokens = recent.get(texts)
    if tokens is None:
        tokens = tuple(_tokens_with(texts, tokenizer, vocab_size))
        recent.add(texts, tokens)
    return tuple(sorted({*tokens, *ids}))


def _tokens_with(texts: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int) -> Iterable[int]:
    """The tokens whose text contains one of some texts, ascending."""
    for token in sorted(set(tokenizer.get_vocab().values())):
        if token >= vocab_size:
            return
        token_text = tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if any(text in token_text for text in texts):
            yield token
