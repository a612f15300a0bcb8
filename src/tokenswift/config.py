"""Options as frozen dataclasses: every field checked, every error names the field and the value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

from tokenswift.checks import (
    check_flag,
    check_number,
    check_text,
    check_whole,
    finite,
    integer_of,
    keep_field,
    named_errors,
    shown,
)
from tokenswift.grammar import Grammar
from tokenswift.types import InputError
from tokenswift.words import OnLoop, words

Texts: TypeAlias = Sequence[str | Sequence[int]]  # each as text, or as token ids; kept as tuples
Biases: TypeAlias = Mapping[int, float] | Sequence[tuple[int, float]]  # by token id; kept as sorted pairs
MOST_TEXTS, MOST_LETTERS, MOST_BIASES = 1024, 1024, 16_384
BREAKERS: Texts = ("\n", ":", '"', "*")  # llama.cpp's

API_KEY = "TOKENSWIFT_API_KEY"


def environment_key() -> str | None:
    """The key that clients of a server have to show, by the environment; None where it is not set."""
    return os.environ.get(API_KEY) or None


def check_threads(value: object) -> int:
    """A number of CPU threads: from 1 to four for each core, and up to 16 on any machine.

    Raises:
        InputError: another value.
    """
    cores = os.cpu_count() or 1
    most = max(16, 4 * cores)
    threads = integer_of(value)
    if threads is None or not 1 <= threads <= most:
        valid = f"1 to {most} (this machine has {cores} cores)"
        raise InputError(f"threads is {shown(value)}; valid: {valid}", "threads")
    return threads


@named_errors
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are the paper's setting for LLaMA3.1-8b (Table 10); where no
    sampling is given, `LLM.default_sampling` says what is taken.

    What is on takes effect in the order of `sampling.choice`.

    Attributes:
        temperature: logits are divided by it, from 1e-30 to 1e30; 0 is greedy decoding
        top_k: keep the k likeliest tokens; 0 keeps all
        top_p: in (0, 1]: keep the smallest set of tokens with this probability; 1 keeps all
        min_p: in [0, 1): drop tokens less likely than this share of the best; 0 keeps all
        eta_cutoff: in [0, 1): epsilon of eta sampling; 0 is off
        repetition_penalty: theta, from 1 to 1e30: penalty of tokens in the window; 1 is off
        penalty_window: W, at least 1: newest tokens that the penalty looks at
        seed: 0 or more: same seed, same text, whatever the strategy; the noise is a pure function of it, the
            position and the token
        greedy: take the likeliest token, after the penalty; no noise, and no filter, whatever else is given
        presence_penalty: from -2 to 2, subtracted from the logit of every new token among the last
            penalty_window ones; 0 is off
        frequency_penalty: from -2 to 2, the same for each time that the token is there; 0 is off
        dry_multiplier: DRY: penalty of the token that would make a repeated sequence longer, from 0 (off) to
            1e6: multiplier times base to the power of the repeated tokens beyond the allowed length
        dry_base: base of the DRY penalty, from 1 to 1e6
        dry_allowed_length: tokens that may be repeated without a DRY penalty for the next one, 1 to 4,096
        dry_range: newest tokens in which DRY looks for repetitions, those of the prompt included; -1: all
        dry_breakers: DRY sees no repetition across tokens that contain one of these texts
        logit_bias: token id and bias (-100 to 100), which is added to the token's logit
        min_tokens: new tokens before an end-of-text token or a stop text may end the text
        bad_words: texts, or lists of token ids, that are never written in these tokens
        grammar: what the text has to be like, a `Grammar`: no token that it does not allow is chosen, and the
            text ends where it does; None is any text
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.1
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.2
    penalty_window: int = 1024
    seed: int = 0
    greedy: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = -1
    dry_breakers: Texts = BREAKERS
    logit_bias: Biases = ()
    min_tokens: int = 0
    bad_words: Texts = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        about = "0 (greedy decoding), or from 1e-30 to 1e30"
        for name, valid, fits in (
            ("temperature", about, lambda t: t == 0 or 1e-30 <= t <= 1e30),
            ("top_p", "in (0, 1]", lambda p: 0 < p <= 1),
            ("min_p", "in [0, 1)", lambda p: 0 <= p < 1),
            ("eta_cutoff", "in [0, 1)", lambda p: 0 <= p < 1),
            ("repetition_penalty", "at least 1 (1 is off), at most 1e30", lambda r: 1 <= r <= 1e30),
            ("presence_penalty", "from -2 to 2 (0 is off)", lambda p: -2 <= p <= 2),
            ("frequency_penalty", "from -2 to 2 (0 is off)", lambda p: -2 <= p <= 2),
            ("dry_multiplier", "from 0 (off) to 1e6", lambda m: 0 <= m <= 1e6),
            ("dry_base", "from 1 to 1e6", lambda b: 1 <= b <= 1e6),
        ):
            value = getattr(self, name)
            keep_field(self, name, check_number(name, value, valid, fits(finite(value))))
        check_whole(self, "top_k", 0, "an integer of at least 1, or 0 for all tokens")
        check_whole(self, "penalty_window", 1)
        check_whole(self, "seed", 0, "an integer from 0 to 2^63 - 1")
        check_whole(self, "dry_allowed_length", 1, most=4096)
        check_whole(self, "dry_range", -1, "an integer of at least 1, or -1 for all of the text")
        if self.dry_range == 0:
            raise InputError("dry_range is 0; valid: an integer of at least 1, or -1 for all of the text")
        check_whole(self, "min_tokens", 0)
        for name in ("dry_breakers", "bad_words"):
            keep_field(self, name, check_texts(name, getattr(self, name)))
        keep_field(self, "logit_bias", check_biases(self.logit_bias))
        keep_field(self, "greedy", check_flag("greedy", self.greedy))
        keep_field(self, "grammar", Grammar.of(self.grammar))  # a journal has its record
        if self.temperature == 0:  # one way to say it: nothing divides by zero, and equal settings are equal
            keep_field(self, "greedy", True)
            keep_field(self, "temperature", 1.0)

    @property
    def window(self) -> int:
        """The penalty window in tokens; 0 when the penalty is off."""
        return self.penalty_window if self.repetition_penalty != 1.0 else 0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The biases of logits, in the order of their token ids."""
        return self.logit_bias  # type: ignore[return-value]  # since it was checked

    @property
    def adjusts(self) -> bool:
        """Whether anything of `sampling.adjust` is on."""
        counted = self.presence_penalty or self.frequency_penalty or self.dry_multiplier
        return bool(counted or self.logit_bias or self.min_tokens or self.bad_words)


def check_texts(name: str, value: object) -> tuple[str | tuple[int, ...], ...]:
    """Texts or lists of token ids, as tuples; a single text is one.

    Raises:
        InputError: something else, an empty one, or too many or too long ones.
    """
    given = (value,) if isinstance(value, str) else value
    made: list[str | tuple[int, ...]] = []
    for one in given if isinstance(given, list | tuple) else (None,):
        if isinstance(one, list | tuple):
            ids = [integer_of(token) for token in one]
            one = tuple(-1 if token is None else token for token in ids)
            fits = all(0 <= token < 2**31 for token in one)
        else:
            fits = isinstance(one, str)
        if not fits or not 0 < len(one) <= MOST_LETTERS or len(made) == MOST_TEXTS:  # type: ignore[arg-type]
            raise InputError(
                f"{name} is {shown(value)}; valid: up to {MOST_TEXTS:,} texts, or lists of token ids, of up "
                f"to {MOST_LETTERS:,} letters or ids, none of them empty",
                name,
            )
        made.append(check_text(name, one) if isinstance(one, str) else one)  # type: ignore[arg-type]
    return tuple(made)


def check_biases(value: object) -> tuple[tuple[int, float], ...]:
    """Biases of logits, as pairs in the order of their token ids.

    Args:
        value: a mapping, whose keys may be texts as in JSON, or pairs.
    Raises:
        InputError: something else, a token twice, or too many.
    """
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    made: dict[int, float] = {}
    wrong: object = None  # the entry that is, where it is one
    fits = isinstance(pairs, list | tuple) and len(pairs) <= MOST_BIASES
    for pair in pairs if fits else ():  # type: ignore[union-attr]
        token, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 11:
            token = int(token)
        number = integer_of(token)
        fits = number is not None and 0 <= number < 2**31 and number not in made
        if not fits or not -100 <= finite(bias) <= 100:
            fits, wrong = False, (pair,) if token is None else {token: bias}
            break
        made[number] = finite(bias)  # type: ignore[index]
    if not fits:
        given = f"is {shown(value)}" if wrong is None else f"holds {shown(wrong)}"
        raise InputError(
            f"logit_bias {given}; valid: up to {MOST_BIASES:,} token ids, each once, with a bias "
            "from -100 to 100, such as {198: -5}",
            "logit_bias",
        )
    return tuple(sorted(made.items()))


#: sampling without any filter or penalty
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
}
#: fields that go by more of a text than the contextual penalty; named only where they are not off
ADJUSTING = (
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_range",
    "dry_breakers",
    "logit_bias",
    "min_tokens",
    "bad_words",
    "grammar",
)
CONTINUED_LENGTH = 200  # new tokens of a continued text, where no number is given
#: of texts that are continued, where no sampling is given: what kept its sense longest (docs/benchmarks.md)
CONTINUED = SamplingParams(min_p=0.02, repetition_penalty=1.0, dry_multiplier=0.8, dry_breakers=())
#: of answers, where no sampling is given and the model names none: a penalty would break what has to be
#: repeated, such as JSON, code and names
ANSWERS = SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.0)


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """What a sampling is named by in journals and records: its fields without those of `ADJUSTING` that are
    off; ``SamplingParams(**it)`` is the sampling. The values are JSON's."""
    off = SamplingParams()
    made = asdict(params)
    return {k: _listed(v) for k, v in made.items() if k not in ADJUSTING or v != getattr(off, k)}


def _listed(value: Any) -> Any:
    return [_listed(one) for one in value] if isinstance(value, tuple) else value


def sampling_over(usual: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """A sampling with the given fields over it.

    Raises:
        InputError: one of them is out of its range.
    """
    return replace(usual, **_warm(given))


def sampling_by(named: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """The sampling that a model names, the given fields over it; what neither names is off.

    Raises:
        InputError: a field is out of its range.
    """
    return SamplingParams(**{**NEUTRAL, **named, **_warm(given)})


def _warm(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields; whoever gives a temperature wants no greedy decoding, whatever is usual."""
    return {"greedy": False, **given} if given.get("temperature") else dict(given)


ON_LOOP = words(OnLoop)
MOST_PATTERN = 65_536  # tokens of a repeated pattern


@named_errors
@dataclass(frozen=True, slots=True)
class LoopOptions:
    """When a text counts as looping.

    Attributes:
        min_pattern_size, max_pattern_size: tokens of a pattern.
        min_count: copies of it, at least 2.
        min_tokens: tokens that the copies make up together.
    """

    min_pattern_size: int = 1
    max_pattern_size: int = 512
    min_count: int = 3
    min_tokens: int = 160

    def __post_init__(self) -> None:
        for name in ("min_pattern_size", "max_pattern_size", "min_tokens"):
            check_whole(self, name, 1)
        check_whole(self, "min_count", 2)
        if not self.min_pattern_size <= self.max_pattern_size <= MOST_PATTERN:
            raise InputError(
                f"max_pattern_size is {self.max_pattern_size}; valid: {self.min_pattern_size} "
                f"(min_pattern_size) to {MOST_PATTERN}"
            )

    @property
    def reach(self) -> int:
        """Tokens that decide whether the next one ends a loop."""
        return self.max_pattern_size + max(self.min_tokens, self.max_pattern_size * self.min_count)


def given_options(options: Any) -> dict[str, Any]:
    """The fields of a dataclass of options that differ from their defaults."""
    return {f.name: value for f in fields(options) if (value := getattr(options, f.name)) != f.default}
