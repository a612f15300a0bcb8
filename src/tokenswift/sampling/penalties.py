"""Adjustments of logits: biases, presence and frequency penalties, DRY, and forbidden tokens (bad
words; ends of text before ``min_tokens``).

:class:`Adjustments` applies them to rows on any device; what is subtracted is rounded once to
float32. Each row has a context of its own, so a drafted path is treated as plain decoding would
treat it. Where tokens between a path and the predicted position are unknown, rules about the newest
tokens (DRY, bad words of several tokens) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling.dry import dry_penalties, repeated
from tokenswift.sampling.rows import Contexts
from tokenswift.sampling.text_rules import TextRules

_FIRST_ROOM = 1024  # tokens of a text that there is room for at first
_COMPARED = 8  # newest tokens of a text that show whether it is the text of the last call


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
        self.params = params
        self.rules = rules
        self.vocab_size = vocab_size
        self.device = device
        # the text so far as an array, reused between calls, since a text only grows
        self._text: NDArray[np.int32] = np.zeros(_FIRST_ROOM, np.int32)
        self._size = 0
        self._source: list[int] = []  # the list that `_text` is a copy of
        self._dry = dry_penalties(params)
        self._breakers = np.zeros(vocab_size, np.uint8)
        self._breakers[[*rules.breakers]] = 1
        self._bias = [
            torch.tensor(part, device=device) for part in zip(*params.biases, strict=True)
        ]
        self._single_words = [word[0] for word in rules.words if len(word) == 1]
        self._longer_words: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in rules.words:
            if len(word) > 1:
                self._longer_words.setdefault(word[-2], []).append(word)

    def biased(self, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Logits with biases added, the first adjustment."""
        if not self._bias:
            return logits
        tokens, values = self._bias
        return logits.index_add(1, tokens, values.to(logits.dtype).expand(len(logits), -1))

    def _as_array(self, tokens: list[int], room: int) -> NDArray[np.int32]:
        """The text as an array with room for further tokens; only tokens that are new in the list
        are copied."""
        known = self._size
        size = len(tokens)
        newest = slice(max(0, known - _COMPARED), known)
        is_same = tokens is self._source and known <= size
        if not is_same or self._text[newest].tolist() != tokens[newest]:
            known = 0
        if size + room > len(self._text):
            more = np.zeros(2 * (size + room) - known, np.int32)
            self._text = np.concatenate([self._text[:known], more])
        new = tokens[known:] if known else tokens
        check_tokens(new, self.vocab_size)
        self._text[known:size] = new
        self._source = tokens
        self._size = size
        return self._text

    def each_context(self, contexts: Contexts) -> Iterator[tuple[NDArray[np.int32], int]]:
        """For each row its context, an array valid until the next row, and the position that it
        predicts.

        Raises:
            InputError: an id that is not below V.
        """
        history = contexts.history
        positions = contexts.positions
        text = self._as_array(history, max(map(len, contexts.paths)))
        for row, path in enumerate(contexts.paths):
            check_tokens(path, self.vocab_size)
            end = len(history) + len(path)
            text[len(history) : end] = path
            yield text[:end], end if positions is None else positions[row]

    def adjusted(self, scores: Float[Tensor, "n V"], contexts: Contexts) -> Float[Tensor, "n V"]:
        """Scores with the adjustments that follow the contextual penalty."""
        if not self.params.adjusts:
            return scores
        scores = scores.clone()
        rows = zip(scores, self.each_context(contexts), strict=True)
        for row, (context, position) in rows:
            for tokens, losses in self._losses(context, position):
                columns = torch.from_numpy(tokens).to(self.device)
                row[columns] -= torch.from_numpy(losses).to(self.device)
        return scores

    def all_on_host(
        self, logits: Float[Tensor, "n S"], contexts: Contexts, columns: NDArray[np.int32] | None
    ) -> Float[Tensor, "n S"]:
        """Logits with all adjustments and the contextual penalty, for rows on a CPU.

        In numpy, since torch would start threads that then spin beside the kernels' own.

        Args:
            columns: (V,) the column of each token, -1 for none; None: column and token id are the
                same.
        """
        window = self.params.window
        if not window and not self.params.adjusts:
            return logits
        scores = logits.float().numpy().copy()
        with np.errstate(all="ignore"):  # for NaN and infinite logits
            rows = zip(scores, self.each_context(contexts), strict=True)
            for row, (context, position) in rows:
                if self._bias:
                    tokens, values = self._bias
                    _lower(row, tokens.numpy(), -values.float().numpy(), columns)
                if window:
                    newest = context[max(0, position - window) :]
                    self._penalise(row, newest if columns is None else columns[newest])
                if self.params.adjusts:
                    for tokens, losses in self._losses(context, position):
                        _lower(row, tokens, losses, columns)
        return torch.from_numpy(scores)

    def _penalise(self, row: NDArray[np.float32], columns: NDArray[np.int32]) -> None:
        """Apply the contextual penalty to columns of a row, once to each; -1: no column."""
        theta = self.params.repetition_penalty
        columns = columns[columns >= 0]
        values = row[columns]
        row[columns] = np.where(values < 0, values * theta, values / theta)

    def _losses(
        self, text: NDArray[np.int32], position: int
    ) -> Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Tokens and what their logits lose, for each penalty; forbidden tokens lose infinity."""
        params = self.params
        if params.presence_penalty or params.frequency_penalty:
            window = text[max(self.rules.start, position - params.penalty_window) :]
            tokens, counts = np.unique(window, return_counts=True)
            losses = params.presence_penalty + params.frequency_penalty * counts
            yield tokens.astype(np.int64), losses.astype(np.float32)
        if len(self._dry) and position == len(text):
            seen = text if params.dry_range < 0 else text[-params.dry_range :]
            most = params.dry_allowed_length + len(self._dry) - 1
            tokens, lengths = repeated(seen, self._breakers, params.dry_allowed_length, most)
            yield tokens, self._dry[lengths - params.dry_allowed_length]
        forbidden = self._forbidden(text, position)
        if forbidden:
            infinite = np.full(len(forbidden), np.inf, np.float32)
            yield np.array([*forbidden], np.int64), infinite

    def _forbidden(self, text: NDArray[np.int32], position: int) -> set[int]:
        """Tokens that may not follow: ends of bad words, and ends of a text that is too short."""
        forbidden = set(self._single_words)
        if position == len(text) and len(text):
            for word in self._longer_words.get(int(text[-1]), ()):
                begin = list(word[:-1])
                if text[-len(begin) :].tolist() == begin:
                    forbidden.add(word[-1])
        if position - self.rules.start < self.params.min_tokens:
            forbidden.update(self.rules.ends)
        return forbidden


def _lower(
    row: NDArray[np.float32],
    tokens: NDArray[np.int64],
    losses: NDArray[np.float32],
    columns: NDArray[np.int32] | None,
) -> None:
    """Subtract losses from the columns of distinct tokens."""
    if columns is None:
        row[tokens] -= losses
        return
    places = columns[tokens]
    has_column = places >= 0
    row[places[has_column]] -= losses[has_column]
