"""What `cpu_adjust.h` is told: the adjustments of `sampling.adjust`, in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_long, c_void_p

import torch
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.kernels.cpu.buffers import address
from tokenswift.sampling.adjust import KnownText, TextRules, breaker_marks
from tokenswift.sampling.dry import penalties


class Adjust(ctypes.Structure):
    _fields_ = [
        ("text", c_void_p),
        ("text_size", c_long),
        ("vocabulary", c_long),
        ("biased", c_void_p),
        ("bias", c_void_p),
        ("biases", c_long),
        ("start", c_long),
        ("window", c_long),
        ("presence", c_double),
        ("frequency", c_double),
        ("dry", c_void_p),
        ("dry_size", c_long),
        ("allowed", c_long),
        ("range", c_long),
        ("breakers", c_void_p),
        ("words", c_void_p),
        ("word_sizes", c_void_p),
        ("word_count", c_long),
        ("ends", c_void_p),
        ("end_count", c_long),
        ("least", c_long),
    ]


class Adjusting:
    """The adjustments of one text.

    Args:
        params: what is on.
        rules: of the text.
    """

    def __init__(self, params: SamplingParams, rules: TextRules) -> None:
        self._rules, self._known = rules, KnownText()
        self._held: list[Tensor] = []  # what C has addresses of
        biased, bias = zip(*params.biases, strict=True) if params.biases else ((), ())
        words = [token for word in rules.words for token in word]
        dry = penalties(params).tolist()
        self._made = Adjust(
            biased=self._numbers(biased, torch.int32),
            bias=self._numbers(bias, torch.float32),
            biases=len(biased),
            start=rules.start,
            window=params.penalty_window,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            dry=self._numbers(dry, torch.float32),
            dry_size=len(dry),
            allowed=params.dry_allowed_length,
            range=params.dry_range,
            words=self._numbers(words, torch.int32),
            word_sizes=self._numbers([len(word) for word in rules.words], torch.int32),
            word_count=len(rules.words),
            ends=self._numbers(rules.ends, torch.int32),
            end_count=len(rules.ends),
            least=rules.start + params.min_tokens,
        )

    def _numbers(self, values: Sequence[float], dtype: torch.dtype) -> int:
        self._held.append(torch.tensor(values, dtype=dtype))
        return address("numbers of the sampling", self._held[-1], dtype, len(values))

    def of(self, history: list[int], room: int, vocab_size: int) -> Adjust:
        """What C goes by for rows of a text.

        Args:
            history: the text.
            room: tokens of the longest path behind it.
            vocab_size: V.
        Raises:
            InputError: a token id that is not below V.
        """
        made = self._made
        if vocab_size != made.vocabulary:
            self._marks = torch.from_numpy(breaker_marks(self._rules, vocab_size))
            made.breakers = address("breakers", self._marks, torch.uint8, vocab_size)
            made.vocabulary = vocab_size
        text = torch.from_numpy(self._known.take(history, room, vocab_size))
        made.text = address("text", text, torch.int32, len(text))
        made.text_size = len(history)
        return made
