"""What is added to logits by what a text holds: biases, presence and frequency penalties, DRY, and tokens
that may not come (bad words; ends before ``min_tokens``).

:class:`Adjustments` does it in numpy and torch for rows on any device; `kernels.cpu.ranker` has the same in
C, to the bit: what is subtracted is rounded once to float32. Each row goes by its own context, so a drafted
path is treated as plain decoding would treat it. Where tokens between a path and the position are unknown,
what goes by the newest tokens (DRY, words of several tokens) is left out.

DRY ("don't repeat yourself") is a penalty of the token that would make a repeated sequence longer, in
llama.cpp's form. Let n be the number of tokens at the end of the text that also stand somewhere before it,
followed by token v; of several places the longest counts. With n at least the allowed length A, the logit of
v loses multiplier · base^(n - A). A *breaker* is a token that contains one of some texts: no repetition is
seen across it, and it is never penalised itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tokenswift.checks import check_tokens, shown
from tokenswift.config import SamplingParams, Texts
from tokenswift.types import InputError

_MOST = 512  # repeated tokens beyond the allowed length that still add to the penalty
_LARGEST = 3e38  # float32 holds it
_WITH: WeakKeyDictionary[Any, dict[tuple[str, ...], tuple[int, ...]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class TextRules:
    """What the processors have to know of a text, as token ids.

    Attributes:
        start: the first new token's place: the length of the prompt.
        ends: tokens that end the text, which may not come before ``min_tokens``.
        breakers: tokens that DRY sees no repetition across.
        words: sequences that may not be written.
    """

    start: int = 0
    ends: tuple[int, ...] = ()
    breakers: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()


NO_RULES = TextRules()  # of a text of which nothing is known


def rules_of(
    params: SamplingParams, codec: Any, vocab_size: int, start: int = 0, ends: Collection[int] = ()
) -> TextRules:
    """The rules of a text.

    Args:
        codec: the tokenizer; None: there is none.
        vocab_size: V.
        start, ends: see :class:`TextRules`.
    Raises:
        InputError: a token id that the model does not have, words as texts without a tokenizer, or
            nothing that may be written.
    """
    for token, _ in params.biases:
        _check("logit_bias", (token,), vocab_size)
    if not params.adjusts:
        return TextRules(start)
    breakers: tuple[int, ...] = ()
    if params.dry_multiplier:
        breakers = _containing(params.dry_breakers, codec, vocab_size)
    words = tuple(dict.fromkeys(_sequences("bad_words", params.bad_words, codec, vocab_size)))
    never = {word[0] for word in words if len(word) == 1} | {end for end in ends if params.min_tokens}
    if len(never) >= vocab_size:
        raise InputError("bad_words leave no token that may be written; valid: fewer", "bad_words")
    return TextRules(start, tuple(sorted(ends)) if params.min_tokens else (), breakers, words)


def _check(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    try:
        check_tokens(tokens, vocab_size)
    except InputError as error:
        raise InputError(f"{name}: {error}", name) from None


def _sequences(name: str, texts: Texts, codec: Any, vocab_size: int) -> Iterable[tuple[int, ...]]:
    """Texts as tokens: as a text of their own, and as after a space."""
    for text in texts:
        if not isinstance(text, str):
            _check(name, text, vocab_size)
            yield tuple(text)
            continue
        if codec is None:
            given = f"{name} holds {shown(text)}, but the model came without a tokenizer"
            raise InputError(f"{given}; valid: lists of ids", name)
        for form in dict.fromkeys((text, f" {text.lstrip(' ')}")):
            ids = tuple(codec(form, add_special_tokens=False)["input_ids"])
            if ids and max(ids) < vocab_size:
                yield ids


def _containing(texts: Texts, codec: Any, vocab_size: int) -> tuple[int, ...]:
    """Tokens whose text contains one of some texts, and those that are given as one id."""
    given = {text[0] for text in texts if not isinstance(text, str) and len(text) == 1}
    _check("dry_breakers", sorted(given), vocab_size)
    wanted = tuple(text for text in texts if isinstance(text, str))
    if codec is None or not wanted:
        return tuple(sorted(given))
    kept = _WITH.setdefault(codec, {})
    if wanted not in kept:
        known = sorted(token for token in set(codec.get_vocab().values()) if token < vocab_size)
        kept[wanted] = tuple(token for token in known if _holds(codec, token, wanted))
    return tuple(sorted({*kept[wanted], *given}))


def _holds(codec: Any, token: int, texts: Sequence[str]) -> bool:
    said = codec.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(text in said for text in texts)


class KnownText:
    """The tokens of a text as int32, kept from call to call: a text that is decoded only grows."""

    def __init__(self) -> None:
        self._array: NDArray[np.int32] = np.zeros(1024, np.int32)
        self._size = 0
        self._source: list[int] | None = None

    def take(self, tokens: list[int], room: int, vocab_size: int) -> NDArray[np.int32]:
        """All of the tokens in the beginning of an array with room for others behind them.

        Args:
            tokens: the text; the same list as before where it is the same text.
            room: places that are needed behind.
            vocab_size: V.
        Raises:
            InputError: an id that is not below V.
        """
        known, size = self._size, len(tokens)
        grown = tokens is self._source and known <= size
        if not grown or self._array[max(0, known - 8) : known].tolist() != tokens[max(0, known - 8) : known]:
            known = 0
        if size + room > len(self._array):
            self._array = np.concatenate([self._array[:known], np.zeros(2 * (size + room) - known, np.int32)])
        check_tokens(tokens[known:] if known else tokens, vocab_size)
        self._array[known:size] = tokens[known:] if known else tokens
        self._source, self._size = tokens, size
        return self._array


class Adjustments:
    """The adjustments of one text.

    Args:
        params: what is on.
        rules: of the text.
        vocab_size: V.
        device: where the logits are.
    """

    def __init__(
        self, params: SamplingParams, rules: TextRules, vocab_size: int, device: torch.device
    ) -> None:
        self.params, self.rules, self.vocab_size, self.device = params, rules, vocab_size, device
        self._known = KnownText()
        self._dry = dry_penalties(params)
        self._breakers = breaker_marks(rules, vocab_size)
        self._bias = [torch.tensor(part, device=device) for part in zip(*params.biases, strict=True)]

    def biased(self, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Logits with the biases: what comes before the contextual penalty."""
        if not self._bias:
            return logits
        tokens, values = self._bias
        return logits.index_add(1, tokens, values.to(logits.dtype).expand(len(logits), -1))

    def adjusted(
        self,
        scores: Float[Tensor, "n V"],
        history: list[int],
        paths: list[list[int]],
        positions: list[int] | None,
    ) -> Float[Tensor, "n V"]:
        """All else, which comes after it; arguments as of `sampling.choice.Sampler.scores`."""
        text = self._known.take(history, max(map(len, paths)), self.vocab_size)
        scores = scores.clone()
        for row, path in enumerate(paths):
            check_tokens(path, self.vocab_size)
            end = len(history) + len(path)
            text[len(history) : end] = path
            position = end if positions is None else positions[row]
            for tokens, values in self._losses(text[:end], position):
                places = torch.from_numpy(tokens).to(self.device)
                scores[row, places] -= torch.from_numpy(values).to(self.device)
            banned = self._banned(text[:end], position)
            if banned:
                scores[row, torch.tensor(banned, device=self.device)] = -math.inf
        return scores

    def _losses(
        self, text: NDArray[np.int32], position: int
    ) -> Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """What tokens lose by each of the penalties."""
        p = self.params
        if p.presence_penalty or p.frequency_penalty:
            window = text[max(self.rules.start, position - p.penalty_window) :]
            tokens, counts = np.unique(window, return_counts=True)
            yield (
                tokens.astype(np.int64),
                (p.presence_penalty + p.frequency_penalty * counts).astype(np.float32),
            )
        if len(self._dry) and position == len(text):
            seen = text if p.dry_range < 0 else text[-p.dry_range :]
            most = p.dry_allowed_length + len(self._dry) - 1
            tokens, lengths = repeated(seen, self._breakers, most)
            long = lengths >= p.dry_allowed_length
            yield tokens[long], self._dry[lengths[long] - p.dry_allowed_length]

    def _banned(self, text: NDArray[np.int32], position: int) -> list[int]:
        """Tokens that may not come."""
        found = [word[-1] for word in self.rules.words if _goes_on(text, word[:-1], position)]
        if position - self.rules.start < self.params.min_tokens:
            found += self.rules.ends
        return found


def breaker_marks(rules: TextRules, vocab_size: int) -> NDArray[np.uint8]:
    """(V,) whether each token is a breaker of DRY."""
    marks = np.zeros(vocab_size, np.uint8)
    marks[list(rules.breakers)] = 1
    return marks


def _goes_on(text: NDArray[np.int32], begun: Sequence[int], position: int) -> bool:
    """Whether the next token would stand right behind some tokens."""
    if not begun:
        return True
    return position == len(text) and text[-len(begun) :].tolist() == list(begun)


def dry_penalties(params: SamplingParams) -> NDArray[np.float32]:
    """The penalty of n = A, A + 1, …; longer repetitions have that of the last. Empty where DRY is off."""
    multiplier, base = params.dry_multiplier, params.dry_base
    if not multiplier:
        return np.empty(0, np.float32)
    steps = _MOST if base == 1 else math.log(_LARGEST / multiplier) / math.log(base)
    made = [multiplier * base**n for n in range(int(min(steps, _MOST)) + 1)]
    return np.array(made, np.float32)


def repeated(
    text: NDArray[np.int32], breakers: NDArray[np.uint8], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What would make a repetition longer.

    Args:
        text: the tokens that are looked at.
        breakers: (V,) whether each token of the vocabulary is a breaker.
        most: longer repetitions count as so long.

    Returns:
        Tokens, and to each the length n of the longest repetition that it would follow; none is a breaker.
    """
    last = len(text) - 1
    none = np.empty(0, np.int64)
    if last < 1 or breakers[text[last]]:
        return none, none
    ends = np.flatnonzero(text[:last] == text[last])
    ends = ends[breakers[text[ends + 1]] == 0]
    alive, lengths = ends, np.ones(len(ends), np.int64)
    for n in range(1, min(most, last + 1)):
        wanted = text[last - n]
        if breakers[wanted]:
            break
        alive = alive[alive >= n]
        alive = alive[text[alive - n] == wanted]
        if not len(alive):
            break
        lengths[np.searchsorted(ends, alive)] += 1
    tokens, places = np.unique(text[ends + 1], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, places, lengths)
    return tokens.astype(np.int64), longest
