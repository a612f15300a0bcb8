"""Adjustments of logits: biases, presence and frequency penalties, DRY, and forbidden tokens (bad
words; ends of text before ``min_tokens``).

:class:`Adjustments` applies them to rows on any device; what is subtracted is rounded once to
float32. Each row has a context of its own, so a drafted path is treated as plain decoding would
treat it. Where tokens between a path and the predicted position are unknown, rules about the newest
tokens (DRY, bad words of several tokens) are left out.

DRY ("don't repeat yourself") penalises the token that would lengthen a repetition, as llama.cpp
does. Let n be the length of the longest end of the text that also occurs earlier, followed by token
v. If n is at least the allowed length A, the logit of v loses multiplier · base^(n - A). A
*breaker* is a token that contains one of some texts: no repetition extends across it, and it is
    never penalised itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tokenswift.checks import check_tokens, shown
from tokenswift.config.sampling import SamplingParams, Texts
from tokenswift.types import InputError

#: history, path of each row after it, and the positions that rows predict (None: the next ones)
Places: TypeAlias = tuple[list[int], list[list[int]], list[int] | None]
_MOST = 512  # repeated tokens beyond the allowed length that still add to the penalty
_LARGEST = 3e38  # largest penalty: float32 can hold it
MOST_KEPT_BREAKERS = 1 << 19  # token ids of DRY's breakers that are kept, about 2 MB


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


def recent_breakers(codec: object) -> RecentBreakers:
    """The breakers that are kept for a tokenizer."""
    return _BREAKERS.setdefault(codec, RecentBreakers(MOST_KEPT_BREAKERS))


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


def rules_of(
    params: SamplingParams, codec: Any, vocab_size: int, start: int = 0, ends: Collection[int] = ()
) -> TextRules:
    """Make the rules of a sequence.

    Args:
        codec: the tokenizer, or None.
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
    ends = sorted(end for end in ends if end < vocab_size) if params.min_tokens else ()
    never = {word[0] for word in words if len(word) == 1}.union(ends)
    if len(never) >= vocab_size:
        raise InputError("bad_words leave no token that may be written; valid: fewer", "bad_words")
    return TextRules(start, tuple(ends), breakers, words)


def _check(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    try:
        check_tokens(tokens, vocab_size)
    except InputError as error:
        raise InputError(f"{name}: {error}", name) from None


def _sequences(name: str, texts: Texts, codec: Any, vocab_size: int) -> Iterable[tuple[int, ...]]:
    """Texts as token ids, each at the beginning of a text and after a space."""
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
    """Tokens whose text contains one of ``texts``, and tokens given by id."""
    given = {text[0] for text in texts if not isinstance(text, str) and len(text) == 1}
    _check("dry_breakers", sorted(given), vocab_size)
    wanted = tuple(text for text in texts if isinstance(text, str))
    if codec is None or not wanted:
        return tuple(sorted(given))
    recent = recent_breakers(codec)
    breakers = recent.get(wanted)
    if breakers is None:
        known = sorted(token for token in set(codec.get_vocab().values()) if token < vocab_size)
        how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        said = ((token, codec.decode([token], **how)) for token in known)
        breakers = tuple(token for token, text in said if any(one in text for one in wanted))
        recent.add(wanted, breakers)
    return tuple(sorted({*breakers, *given}))


class Adjustments:
    """The adjustments of one sequence.

    Args:
        params: the sampling parameters.
        rules: the sequence's rules.
        vocab_size: V.
        device: where the logits are.
    """

    def __init__(
        self, params: SamplingParams, rules: TextRules, vocab_size: int, device: torch.device
    ) -> None:
        self.params, self.rules, self.vocab_size, self.device = params, rules, vocab_size, device
        self._text: NDArray[np.int32] = np.zeros(1024, np.int32)  # reused, as a text only grows
        self._size, self._source = 0, list[int]()
        self._dry = dry_penalties(params)
        self._breakers = np.zeros(vocab_size, np.uint8)
        self._breakers[[*rules.breakers]] = 1
        self._bias = [
            torch.tensor(part, device=device) for part in zip(*params.biases, strict=True)
        ]
        self._words: dict[
            int, list[tuple[int, ...]]
        ] = {}  # by the token before the last; -1: there is none
        for word in rules.words:
            self._words.setdefault(word[-2] if len(word) > 1 else -1, []).append(word)

    def biased(self, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Logits with biases added, the first adjustment."""
        if not self._bias:
            return logits
        tokens, values = self._bias
        return logits.index_add(1, tokens, values.to(logits.dtype).expand(len(logits), -1))

    def _known(self, tokens: list[int], room: int) -> NDArray[np.int32]:
        """The text as an array with room for further tokens; only tokens that are new in the list
        are copied."""
        known, size = self._size, len(tokens)
        last = slice(max(0, known - 8), known)
        if tokens is not self._source or known > size or self._text[last].tolist() != tokens[last]:
            known = 0
        if size + room > len(self._text):
            self._text = np.concatenate(
                [self._text[:known], np.zeros(2 * (size + room) - known, np.int32)]
            )
        new = tokens[known:] if known else tokens
        check_tokens(new, self.vocab_size)
        self._text[known:size] = new
        self._source, self._size = tokens, size
        return self._text

    def contexts(self, places: Places) -> Iterator[tuple[NDArray[np.int32], int]]:
        """For each row its context, an array valid until the next row, and the position that it
        predicts.

        Raises:
            InputError: an id that is not below V.
        """
        history, paths, positions = places
        text = self._known(history, max(map(len, paths)))
        for row, path in enumerate(paths):
            check_tokens(path, self.vocab_size)
            end = len(history) + len(path)
            text[len(history) : end] = path
            yield text[:end], end if positions is None else positions[row]

    def adjusted(self, scores: Float[Tensor, "n V"], places: Places) -> Float[Tensor, "n V"]:
        """Scores with the adjustments that follow the contextual penalty."""
        if not self.params.adjusts:
            return scores
        scores = scores.clone()
        for row, (context, position) in zip(scores, self.contexts(places), strict=True):
            for tokens, values in self._losses(context, position):
                row[torch.from_numpy(tokens).to(self.device)] -= torch.from_numpy(values).to(
                    self.device
                )
        return scores

    def all_on_host(
        self, logits: Float[Tensor, "n S"], places: Places, columns: NDArray[np.int32] | None
    ) -> Float[Tensor, "n S"]:
        """Logits with all adjustments and the contextual penalty, for rows on a CPU.

        In numpy, since torch would start threads that then spin beside the kernels' own.

        Args:
            columns: (V,) the column of each token, -1 for none; None: column and token id are the
                same.
        """
        window, theta = self.params.window, self.params.repetition_penalty
        if not window and not self.params.adjusts:
            return logits
        scores = logits.float().numpy().copy()
        with np.errstate(all="ignore"):  # for NaN and infinite logits
            for row, (context, position) in zip(scores, self.contexts(places), strict=True):
                if self._bias:
                    _lower(row, self._bias[0].numpy(), -self._bias[1].float().numpy(), columns)
                if window:
                    at = context[max(0, position - window) :]
                    at = at if columns is None else columns[at]
                    values = row[at := at[at >= 0]]
                    row[at] = np.where(values < 0, values * theta, values / theta)
                for tokens, values in (
                    self._losses(context, position) if self.params.adjusts else ()
                ):
                    _lower(row, tokens, values, columns)
        return torch.from_numpy(scores)

    def _losses(
        self, text: NDArray[np.int32], position: int
    ) -> Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Tokens and what their logits lose, for each penalty; forbidden tokens lose infinity."""
        p = self.params
        if p.presence_penalty or p.frequency_penalty:
            window = text[max(self.rules.start, position - p.penalty_window) :]
            tokens, counts = np.unique(window, return_counts=True)
            losses = p.presence_penalty + p.frequency_penalty * counts
            yield tokens.astype(np.int64), losses.astype(np.float32)
        if len(self._dry) and position == len(text):
            seen = text if p.dry_range < 0 else text[-p.dry_range :]
            most = p.dry_allowed_length + len(self._dry) - 1
            tokens, lengths = repeated(seen, self._breakers, p.dry_allowed_length, most)
            yield tokens, self._dry[lengths - p.dry_allowed_length]
        never = [*self._words.get(-1, ())]
        if position == len(text) and len(text):
            begun = (
                word for word in self._words.get(int(text[-1]), ()) if len(word) <= len(text) + 1
            )
            never += [word for word in begun if text[1 - len(word) :].tolist() == list(word[:-1])]
        banned = {word[-1] for word in never}
        if position - self.rules.start < p.min_tokens:
            banned.update(self.rules.ends)
        if banned:
            yield np.array([*banned], np.int64), np.full(len(banned), np.inf, np.float32)


def _lower(
    row: NDArray[np.float32], tokens: NDArray[Any], values: Any, columns: NDArray[np.int32] | None
) -> None:
    """Subtract values from the columns of distinct tokens."""
    if columns is not None:
        tokens = columns[tokens]
        values, tokens = values[tokens >= 0], tokens[tokens >= 0]
    row[tokens] -= values


def dry_penalties(params: SamplingParams) -> NDArray[np.float32]:
    """Penalties for n = A, A + 1, …; the last one is for all longer repetitions. Empty without
    DRY."""
    multiplier, base = params.dry_multiplier, params.dry_base
    if not multiplier:
        return np.empty(0, np.float32)
    steps = _MOST if base == 1 else math.log(_LARGEST / multiplier) / math.log(base)
    made = [multiplier * base**n for n in range(int(min(steps, _MOST)) + 1)]
    return np.array(made, np.float32)


def repeated(
    text: NDArray[np.int32], breakers: NDArray[np.uint8], least: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens that would lengthen a repetition at the end of a text.

    Args:
        text: the tokens.
        breakers: (V,) whether each token of the vocabulary is a breaker.
        least, most: repetitions shorter than ``least`` do not count, longer than ``most`` count as
            ``most``.

    Returns:
        Distinct tokens, and for each the length n of the longest repetition that it would lengthen.
    """
    last = len(text) - 1
    none = np.empty(0, np.int64)
    if last < 1 or breakers[text[last]]:
        return none, none
    ends = np.flatnonzero(text[:last] == text[last])
    alive, lengths = ends, np.ones(len(ends), np.int64)
    for n in range(1, min(most, last + 1)):
        wanted = text[last - n]
        if breakers[wanted]:
            break
        # those before the text's start wrap around, and the next line cuts them off
        alive = alive[text[alive - n] == wanted]
        alive = alive[np.searchsorted(alive, n) :]
        if not len(alive):
            break
        if n < least:  # those that ended before are too short
            ends, lengths = alive, np.full(len(alive), n + 1)
        else:
            lengths[np.searchsorted(ends, alive)] += 1
    if not len(ends) or lengths[0] < least:
        return none, none
    after = text[ends + 1]
    kept = breakers[after] == 0
    tokens, places = np.unique(after[kept], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, places, lengths[kept])
    return tokens.astype(np.int64), longest
