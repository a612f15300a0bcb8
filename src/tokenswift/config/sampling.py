"""How the next token is chosen: `SamplingParams`, its presets, and how records name one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec
from msgspec import Meta

from tokenswift.checks import check_choice, check_text, keep_field, shown
from tokenswift.config.fields import SHOWN, AtLeast, Between, Option, Rule, check_fields
from tokenswift.grammar import Grammar
from tokenswift.types import InputError

Texts: TypeAlias = Sequence[str | Sequence[int]]  # each as text, or as token ids; kept as tuples
Biases: TypeAlias = (
    Mapping[int, float] | Sequence[tuple[int, float]]
)  # by token id; kept as sorted pairs
MOST_TEXTS = 1024
MOST_LETTERS = 1024  # of each text, or token ids
MOST_BIASES = 16_384
Token: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Whole = Meta(min_length=1, max_length=MOST_LETTERS)
KeptTexts = Annotated[
    tuple[Annotated[str, Whole] | Annotated[tuple[Token, ...], Whole], ...],
    Meta(max_length=MOST_TEXTS),
]
KeptBiases = Annotated[
    dict[Token, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MOST_BIASES)
]
BREAKERS: Texts = ("\n", ":", '"', "*")  # llama.cpp's

TEMPERATURE = Rule(
    "0 (greedy decoding), or from 1e-30 to 1e30", lambda t: t == 0 or 1e-30 <= t <= 1e30
)
BELOW_ONE = Rule("in [0, 1)", lambda p: 0 <= p < 1)
SEED = AtLeast(0, "an integer from 0 to 2^63 - 1")
FROM_MINUS_2_TO_2 = Between(-2, 2, "from -2 to 2 (0 is off)")
DRY_RANGE = Rule("an integer of at least 1, or -1 for all", lambda n: n == -1 or n > 0)


def parse_text(text: str) -> list[str]:
    """One text of several options, as the command line has it; "none" is no text."""
    return [] if text == "none" else [text]


def parse_biases(text: str) -> list[tuple[int, float]]:
    """Biases of logits as the command line has them: ``198=-5,11=2``, or "none".

    Raises:
        ValueError: it is something else.
    """
    if text == "none":
        return []
    pairs = [part.split("=") for part in text.split(",")]
    return [(int(token), float(bias)) for token, bias in pairs]


TEXTS_OPTION = Option("TEXT", read=parse_text, adds_up=True)
BIASES_OPTION = Option(
    "ID=X,…",
    read=parse_biases,
    valid="token ids with a bias each, such as 198=-5,11=2, or none",
    adds_up=True,
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are the paper's setting for LLaMA3.1-8b (Table
    10); where no sampling is given, `LLM.default_sampling` says what is taken.

    What is on takes effect in the order of `sampling.sampler`.

    Attributes:
        temperature: logits are divided by it, from 1e-30 to 1e30; 0 is greedy decoding
        top_k: keep the k likeliest tokens (0: all)
        top_p: keep the smallest set of tokens with this probability; in (0, 1], 1 keeps all
        min_p: drop tokens less likely than this share of the best; in [0, 1), 0 keeps all
        eta_cutoff: in [0, 1): epsilon of eta sampling; 0 is off
        repetition_penalty: penalty of the newest tokens (see penalty_window), from 1 to 1e30; 1 is
            off
        penalty_window: newest tokens that penalties look at, at least 1
        seed: 0 or more; the same seed gives the same text, whatever the strategy
        greedy: take the likeliest token; after the penalty, with no noise and no filter, whatever
            else is given
        presence_penalty: from -2 to 2, subtracted from the logit of every token that is among the
            newest ones (see penalty_window); 0 is off
        frequency_penalty: from -2 to 2, the same for each time that the token occurs there; 0 is
            off
        dry_multiplier: DRY: penalty of the token that would make a repeated sequence longer, from 0
            (off) to 1e6: multiplier times base to the power of the repeated tokens beyond the
            allowed length
        dry_base: base of the DRY penalty, from 1 to 1e6
        dry_allowed_length: tokens that may be repeated without a DRY penalty for the next one, 1 to
            4,096
        dry_range: newest tokens in which DRY looks for repetitions, those of the prompt included;
            -1: all
        dry_breakers: DRY sees no repetition across tokens that contain one of these texts; default:
            line break, colon, quotation mark, asterisk (none for continued text)
        xtc_probability: XTC: how often, from 0 (never) to 1, the likeliest tokens are dropped after
            the filters: of those with a probability of at least xtc_threshold, only the least
            likely stays
        xtc_threshold: probability from which on XTC counts a token as likely, over 0, at most 1;
            beyond 0.5 XTC has no effect
        logit_bias: token ids and what is added to their logits, -100 to 100; default: none
        min_tokens: new tokens before an end-of-text token or a stop text may end the text; commands
            that continue a text with -n of at least 1,000, and without a stop text, take all of
            them
        bad_words: texts, or lists of token ids; their usual tokens are never chosen; default: none
        grammar: what the text has to be like, a `Grammar`: no token that it does not allow is
            chosen, and the text ends where it does; None is any text
    """

    temperature: Annotated[float, TEMPERATURE, Option(shown=True, short="-t")] = 1.0
    top_k: Annotated[int, AtLeast(0, "an integer of at least 1, or 0 for all tokens"), SHOWN] = 0
    top_p: Annotated[float, Rule("in (0, 1]", lambda p: 0 < p <= 1), SHOWN] = 1.0
    min_p: Annotated[float, BELOW_ONE, SHOWN] = 0.1
    eta_cutoff: Annotated[float, BELOW_ONE] = 0.0
    repetition_penalty: Annotated[
        float, Between(1, 1e30, "at least 1 (1 is off), at most 1e30")
    ] = 1.2
    penalty_window: Annotated[int, AtLeast(1)] = 1024
    seed: Annotated[int, SEED, Option(shown=True, short="-s")] = 0
    greedy: Annotated[bool, SHOWN] = False
    presence_penalty: Annotated[float, FROM_MINUS_2_TO_2] = 0.0
    frequency_penalty: Annotated[float, FROM_MINUS_2_TO_2] = 0.0
    dry_multiplier: Annotated[float, Between(0, 1e6, "from 0 (off) to 1e6")] = 0.0
    dry_base: Annotated[float, Between(1, 1e6, "from 1 to 1e6")] = 1.75
    dry_allowed_length: Annotated[int, Between(1, 4096)] = 2
    dry_range: Annotated[int, DRY_RANGE] = -1
    dry_breakers: Annotated[Texts, TEXTS_OPTION] = BREAKERS
    xtc_probability: Annotated[float, Between(0, 1, "from 0 (off) to 1")] = 0.0
    xtc_threshold: Annotated[float, Rule("in (0, 1]", lambda p: 0 < p <= 1)] = 0.1
    logit_bias: Annotated[Biases, BIASES_OPTION] = ()
    min_tokens: Annotated[int, AtLeast(0), SHOWN] = 0
    bad_words: Annotated[Texts, TEXTS_OPTION] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("dry_breakers", "bad_words"):
            keep_field(self, name, check_texts(name, getattr(self, name)))
        keep_field(self, "logit_bias", check_biases(self.logit_bias))
        keep_field(self, "grammar", Grammar.of(self.grammar))  # a journal has its record
        # greedy decoding has one form: nothing divides by zero, and equal settings are equal
        if self.temperature == 0:
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
        """Whether anything of `sampling.penalties` is on."""
        counted = self.presence_penalty or self.frequency_penalty or self.dry_multiplier
        return bool(counted or self.logit_bias or self.min_tokens or self.bad_words)


def check_texts(name: str, value: object) -> tuple[str | tuple[int, ...], ...]:
    """Texts or lists of token ids, as tuples; a single text is one.

    Raises:
        InputError: something else, an empty one, or too many or too long ones.
    """
    try:
        texts = msgspec.convert((value,) if isinstance(value, str) else value, KeptTexts)
    except msgspec.ValidationError:
        raise InputError(
            f"{name} is {shown(value)}; valid: up to {MOST_TEXTS:,} texts, or lists of token "
            f"ids, of up to {MOST_LETTERS:,} letters or ids, none of them empty",
            name,
        ) from None
    for text in texts:
        if isinstance(text, str):
            check_text(name, text)
    return texts


def check_biases(value: object) -> tuple[tuple[int, float], ...]:
    """Biases of logits, as pairs in the order of their token ids.

    Args:
        value: a mapping, whose keys may be texts as in JSON, or pairs.
    Raises:
        InputError: something else, or too many.
    """
    try:
        biases = msgspec.convert(as_dict(value), KeptBiases, strict=False)
    except (msgspec.ValidationError, TypeError, ValueError):
        raise InputError(
            f"logit_bias is {shown(value)}; valid: up to {MOST_BIASES:,} token ids, with a bias "
            "from -100 to 100, such as {198: -5}",
            "logit_bias",
        ) from None
    return tuple(sorted(biases.items()))


def as_dict(value: object) -> dict[object, object]:
    """A mapping, or pairs, as a dict.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, Iterable):
        raise TypeError
    return dict(value)


class SamplingNumbers(TypedDict):
    """The fields of `SamplingParams` that filter tokens or change their logits, by numbers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    eta_cutoff: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    xtc_probability: float


#: sampling without any filter or penalty, by the fields that are numbers
NEUTRAL: SamplingNumbers = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
}
#: the paper's settings: all of `SamplingParams` but seed and greedy
PAPER: SamplingNumbers = {**NEUTRAL, "min_p": 0.1, "repetition_penalty": 1.2}


def preset(name: str) -> SamplingNumbers:
    """The fields of a sampling by its name.

    Raises:
        InputError: an unknown name.
    """
    check_choice("preset", name, ("paper",))
    return PAPER


#: fields that the paper's sampling does not have; named only where they are not off
ADJUSTING = (
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_range",
    "dry_breakers",
    "xtc_probability",
    "xtc_threshold",
    "logit_bias",
    "min_tokens",
    "bad_words",
    "grammar",
)
#: new tokens of a continued text from which on a command does not let the model end it earlier
LONG_TEXT = 1000
CONTINUED_LENGTH = 200  # new tokens of a continued text, where no number is given
#: of texts that are continued, where no sampling is given: what kept its sense longest
#: (docs/benchmarks.md)
CONTINUED = SamplingParams(min_p=0.02, repetition_penalty=1.0, dry_multiplier=0.8, dry_breakers=())
#: of answers, where no sampling is given and the model names none: a penalty would break what has
#: to be repeated, such as JSON, code and names
ANSWERS = SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.0)


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """A sampling as journals and records have it: its fields without those of `ADJUSTING` that are
    off. The values are JSON's; ``SamplingParams(**settings)`` is the sampling again."""
    off = SamplingParams()
    settings = {}
    for name, value in asdict(params).items():
        if name not in ADJUSTING or value != getattr(off, name):
            settings[name] = listed(value)
    return settings


def listed(value: object) -> object:
    """A value with lists for its tuples, as JSON has it."""
    return [listed(item) for item in value] if isinstance(value, tuple) else value


def sampling_over(sampling: SamplingParams, settings: Mapping[str, Any]) -> SamplingParams:
    """A sampling with other settings over its own.

    Raises:
        InputError: one of them is out of its range.
    """
    if settings.get("temperature"):  # whoever sets one wants no greedy decoding
        settings = {"greedy": False, **settings}
    return replace(sampling, **settings)
