"""Options as frozen dataclasses: every field checked, every error names the field and the value.

How the next token is chosen, what counts as a loop, how a model is loaded, and what each method
takes. The command line makes its options from these fields and from what their docstrings say.
Light: no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tokenswift.grammar import Grammar
from tokenswift.types import (
    LARGEST,
    InputError,
    check_choice,
    check_flag,
    check_text,
    finite,
    integer_of,
    keep_field,
    meant,
    shown,
)

# ---- words that arguments take: editors complete them, and checks take the valid ones from them --

#: how to draft; it never changes the tokens
Strategy: TypeAlias = Literal[
    "auto", "autoregressive", "tokenswift", "medusa", "triforce", "magicdec"
]

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KvCacheDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
#: what weights are stored as in memory: as their files hold them, as floats, or in a quantized
#: format
Weights: TypeAlias = Literal["stored", "float32", "bfloat16", "q8_0", "q4_0", "q4_1"]
#: kernel backend: the kernels of the device where they work, those of one kind of device, or torch
Backend: TypeAlias = Literal["auto", "cpu", "cuda", "torch"]

#: kinds of draft heads; as ``heads`` each names the shipped ones of its kind
HeadKind: TypeAlias = Literal["linear", "conditioned", "medusa"]

OnLoop: TypeAlias = Literal["report", "stop"]

Cache: TypeAlias = Literal["full", "partial", "dynamic"]
Candidates: TypeAlias = Literal["coupled", "probability"]
Draft: TypeAlias = Literal["auto", "partial", "hidden"]
Vocabulary: TypeAlias = Literal["frequent", "full"]
Acceptance: TypeAlias = Literal["exact", "published"]
Kv: TypeAlias = Literal["snapkv", "streaming"]

# ---- numbers and texts ----

Texts: TypeAlias = Sequence[str | Sequence[int]]  # each as text, or as token ids; kept as tuples
Biases: TypeAlias = (
    Mapping[int, float] | Sequence[tuple[int, float]]
)  # by token id; kept as sorted pairs
MOST_TEXTS, MOST_LETTERS, MOST_BIASES = 1024, 1024, 16_384
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
MAX_NODES = 4096  # of a tree, its root included
MAX_GAMMA = 32  # tokens of a drafted chain, each of which takes a pass or more
API_KEY = "TOKENSWIFT_API_KEY"


def environment_key() -> str | None:
    """The key that clients of a server have to show, by the environment; None where it is not
    set."""
    return os.environ.get(API_KEY) or None


# ---- numbers and words of fields -----------------------------------------------------------------

CORES = os.cpu_count() or 1
THREADS = max(16, 4 * CORES)  # at most
Rule = tuple[str, str, Callable[[float], bool]]
#: fields of classes of options that are numbers; what is valid, in words; whether a number is
RULES: tuple[Rule, ...] = (
    (
        "temperature",
        "0 (greedy decoding), or from 1e-30 to 1e30",
        lambda t: t == 0 or 1e-30 <= t <= 1e30,
    ),
    ("top_k", "an integer of at least 1, or 0 for all tokens", lambda k: k >= 0),
    ("top_p", "in (0, 1]", lambda p: 0 < p <= 1),
    ("min_p eta_cutoff", "in [0, 1)", lambda p: 0 <= p < 1),
    ("repetition_penalty", "at least 1 (1 is off), at most 1e30", lambda r: 1 <= r <= 1e30),
    ("presence_penalty frequency_penalty", "from -2 to 2 (0 is off)", lambda p: -2 <= p <= 2),
    ("dry_multiplier", "from 0 (off) to 1e6", lambda m: 0 <= m <= 1e6),
    ("dry_base", "from 1 to 1e6", lambda b: 1 <= b <= 1e6),
    ("dry_allowed_length", "an integer from 1 to 4,096", lambda n: 1 <= n <= 4096),
    ("dry_range", "an integer of at least 1, or -1 for all", lambda n: n == -1 or n > 0),
    ("seed", "an integer from 0 to 2^63 - 1", lambda n: n >= 0),
    ("threads", f"1 to {THREADS} (this machine has {CORES} cores)", lambda n: 1 <= n <= THREADS),
    ("gamma inner_gamma", f"an integer from 1 to {MAX_GAMMA}", lambda n: 1 <= n <= MAX_GAMMA),
    (
        "ngrams",
        f"an integer from 0 to {MAX_NODES // 4:,}",
        lambda n: 0 <= n <= MAX_NODES // 4,
    ),  # of 4 tokens
    ("min_tokens sinks refresh queue", "an integer of at least 0", lambda n: n >= 0),
    ("steps warmup loss_vocabulary", "an integer of at least 0", lambda n: n >= 0),
    ("tokens", "an integer of at least 256", lambda n: n >= 256),
    ("sequence_length", "an integer of at least 32", lambda n: n >= 32),
    ("window", "an integer of at least 16", lambda n: n >= 16),
    ("epochs weight_decay", "from 0 to 1e6", lambda x: 0 <= x <= 1e6),
    ("held_out", "from 0 to 0.5", lambda x: 0 <= x <= 0.5),
    ("lr beta2", "between 0 and 1", lambda x: 0 < x < 1),
    ("port", "an integer from 0 (any that is free) to 65535", lambda n: 0 <= n <= 65_535),
    (
        "logprobs",
        "an integer from 0 to 20, or None",
        lambda n: 0 <= n <= 20,
    ),  # as OpenAI's interface
)
USUAL = ("an integer of at least 1", lambda n: n > 0)  # of the other numbers
RULE_OF = {name: (valid, fits) for names, valid, fits in RULES for name in names.split()}
hints_of = cache(get_type_hints)


def check_fields(options: object) -> None:
    """Check the fields of a dataclass whose types list words, or are truth values or numbers (which
    become Python's own). None passes where the type has it.

    Raises:
        InputError: naming the first that is wrong.
    """
    for name, hint in hints_of(type(options)).items():
        value = getattr(options, name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), None)
        if value is None and NoneType in kinds:
            continue
        if choices is not None:
            check_choice(name, value, choices)
        elif bool in kinds:
            keep_field(options, name, check_flag(name, value))
        elif int in kinds or float in kinds:
            valid, fits = RULE_OF.get(name, USUAL)
            number = finite(value) if float in kinds else integer_of(value)
            wrong = number is None or not fits(number) or (int in kinds and number > LARGEST)
            refuse(wrong, options, name, f"; valid: {valid}")
            keep_field(options, name, value if isinstance(value, int | float) else number)


def refuse(when: bool, options: object, name: str, rest: str) -> None:
    """Raise :class:`InputError` for a field, where ``when`` holds: its value and the rest of the
    line."""
    if when:
        raise InputError(f"{name} is {shown(getattr(options, name))}{rest}", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are the paper's setting for LLaMA3.1-8b (Table
    10); where no sampling is given, `LLM.default_sampling` says what is taken.

    What is on takes effect in the order of `sampling.choice`.

    Attributes:
        temperature: logits are divided by it, from 1e-30 to 1e30; 0 is greedy decoding
        top_k: keep the k likeliest tokens; 0 keeps all
        top_p: keep the smallest set of tokens with this probability; in (0, 1], 1 keeps all
        min_p: drop tokens less likely than this share of the best; in [0, 1), 0 keeps all
        eta_cutoff: in [0, 1): epsilon of eta sampling; 0 is off
        repetition_penalty: penalty of the newest tokens (see penalty_window), from 1 to 1e30; 1 is
            off
        penalty_window: newest tokens that penalties look at, at least 1
        seed: 0 or more; the same seed gives the same text, whatever the strategy
        greedy: take the likeliest token, after the penalty; no noise, and no filter, whatever else
            is given
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
        logit_bias: token ids and what is added to their logits, -100 to 100; default: none
        min_tokens: new tokens before an end-of-text token or a stop text may end the text
        bad_words: texts, or lists of token ids, that are never written in these tokens; default:
            none
        grammar: what the text has to be like, a `Grammar`: no token that it does not allow is
            chosen, and the text ends where it does; None is any text
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
        check_fields(self)
        for name in ("dry_breakers", "bad_words"):
            keep_field(self, name, check_texts(name, getattr(self, name)))
        keep_field(self, "logit_bias", check_biases(self.logit_bias))
        keep_field(self, "grammar", Grammar.of(self.grammar))  # a journal has its record
        if (
            self.temperature == 0
        ):  # one way to say it: nothing divides by zero, and equal settings are equal
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
        made = msgspec.convert((value,) if isinstance(value, str) else value, KeptTexts)
    except msgspec.ValidationError:
        raise InputError(
            f"{name} is {shown(value)}; valid: up to {MOST_TEXTS:,} texts, or lists of token "
            f"ids, of up "
            f"to {MOST_LETTERS:,} letters or ids, none of them empty",
            name,
        ) from None
    for one in made:
        if isinstance(one, str):
            check_text(name, one)
    return made


def check_biases(value: object) -> tuple[tuple[int, float], ...]:
    """Biases of logits, as pairs in the order of their token ids.

    Args:
        value: a mapping, whose keys may be texts as in JSON, or pairs.
    Raises:
        InputError: something else, or too many.
    """
    try:
        pairs: Any = value.items() if isinstance(value, Mapping) else value
        made = msgspec.convert(dict(pairs), KeptBiases, strict=False)
    except (msgspec.ValidationError, TypeError, ValueError):
        raise InputError(
            f"logit_bias is {shown(value)}; valid: up to {MOST_BIASES:,} token ids, with a bias "
            f"from -100 to "
            "100, such as {198: -5}",
            "logit_bias",
        ) from None
    return tuple(sorted(made.items()))


#: sampling without any filter or penalty, by the fields that are numbers
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "eta_cutoff": 0.0,
}
NEUTRAL |= {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
}
PAPER = {
    **NEUTRAL,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
}  # of `SamplingParams` all but seed and greedy


def preset(name: str) -> dict[str, Any]:
    """The fields of a sampling by its name.

    Raises:
        InputError: an unknown name.
    """
    check_choice("preset", name, ("paper",))
    return PAPER


#: fields that go by more of a text than the contextual penalty; named only where they are not off
ADJUSTING = tuple(one.name for one in fields(SamplingParams))[9:]
CONTINUED_LENGTH = 200  # new tokens of a continued text, where no number is given
#: of texts that are continued, where no sampling is given: what kept its sense longest
#: (docs/benchmarks.md)
CONTINUED = SamplingParams(min_p=0.02, repetition_penalty=1.0, dry_multiplier=0.8, dry_breakers=())
#: of answers, where no sampling is given and the model names none: a penalty would break what has
#: to be repeated, such as JSON, code and names
ANSWERS = SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.0)


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """What a sampling is named by in journals and records: its fields without those of `ADJUSTING`
    that are off; ``SamplingParams(**it)`` is the sampling. The values are JSON's."""
    off = SamplingParams()
    made = asdict(params)
    return {k: listed(v) for k, v in made.items() if k not in ADJUSTING or v != getattr(off, k)}


def listed(value: Any) -> Any:
    """A value with lists for its tuples, as JSON has it."""
    return [listed(one) for one in value] if isinstance(value, tuple) else value


def sampling_over(usual: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """A sampling with the given fields over it.

    Raises:
        InputError: one of them is out of its range.
    """
    if given.get("temperature"):  # whoever gives one wants no greedy decoding, whatever is usual
        given = {"greedy": False, **given}
    return replace(usual, **given)


#: what ``rope_scaling="yarn"`` without a factor makes room for
STATED_POSITIONS = 131_072


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A wish for YaRN.

    Attributes:
        factor: how many times the model's positions; None is the smallest power of two that makes
            room for :data:`STATED_POSITIONS`. Never a function of one run's length: a longer run
            continues a shorter.
    """

    factor: float | None

    def __str__(self) -> str:
        return "yarn" if self.factor is None else f"yarn:{self.factor:g}"


def parse_rope_scaling(text: str | None) -> RopeScaling | None:
    """Read ``"none"`` (→ None, as None), ``"yarn"`` or ``"yarn:FACTOR"``.

    Raises:
        InputError: for anything else, or a factor below 1.
    """
    if text in ("none", None):
        return None
    found = re.fullmatch(r"yarn(:\d{1,6}(\.\d+)?)?", text) if isinstance(text, str) else None
    factor = float(found[1][1:]) if found and found[1] else None
    if found is None or (factor is not None and factor < 1):
        raise InputError(
            f"rope_scaling is {shown(text)}; valid: none, yarn, or yarn:FACTOR of at least 1, "
            f"such as yarn:4",
            "rope_scaling",
        )
    return RopeScaling(factor)


def check_backend(backend: str, device: str) -> None:
    """Raise :class:`InputError` for a backend that does not run on a device ("cpu", "cuda",
    "cuda:N")."""
    kind = device.partition(":")[0]
    if backend not in ("auto", "torch", kind):
        raise InputError(
            f"backend is {backend!r}, and the device is {device!r}; valid: auto, {kind}, torch",
            "backend",
        )


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is loaded, and what computes it: the arguments of `LLM`.

    Objects of torch become names here, and everything that can be said without torch is checked;
    what hardware there is, `loader.load.check_place` looks at.

    Attributes:
        dtype: compute dtype: float32, bfloat16, float16, int8 or auto; auto is the checkpoint's (of
            quantized weights int8 on a CPU, bfloat16 on CUDA)
        device: auto (CUDA where there is one), cpu or cuda
        rope_scaling: for texts beyond the model's positions: yarn (131,072 tokens), yarn:4 (four
            times the model's) or none
        threads: CPU threads, at least 1; default: torch's choice, at most one a usable processor
        weights: number format of the weights in memory: stored (as in the files), float32,
            bfloat16, or quantized at loading, which makes another model: q8_0, q4_0, q4_1
        kv_cache_dtype: dtype of the KV cache: auto (the compute dtype), float32, bfloat16, or int8,
            half the memory of bfloat16
        backend: kernel backend: auto (the device's own; torch where that does not work), cpu, cuda
            or torch

    Raises:
        InputError: naming the field, its value and what is valid.
    """

    dtype: Dtype | str = "auto"
    device: str = "auto"
    rope_scaling: str | None = None
    threads: int | None = None
    weights: Weights | str = "stored"
    kv_cache_dtype: KvCacheDtype | str = "auto"
    backend: Backend | str = "auto"

    def __post_init__(self) -> None:
        for name in ("dtype", "device"):
            value: Any = getattr(self, name)
            if type(value).__module__ == "torch":  # one of its own types or devices
                keep_field(self, name, str(value).removeprefix("torch."))
        check_fields(self)
        devices = ", ".join(get_args(Device))
        known = self.device in devices.split(", ") or re.fullmatch(r"cuda:\d+", str(self.device))
        refuse(not known, self, "device", f"; valid: {devices}")
        if self.device != "auto":
            check_backend(str(self.backend), self.device)
        parse_rope_scaling(self.rope_scaling)

    @property
    def scaling(self) -> RopeScaling | None:
        """The wish for YaRN."""
        return parse_rope_scaling(self.rope_scaling)

    @property
    def floats(self) -> Any:
        """The torch.dtype of float arithmetic; None: the checkpoint's."""
        import torch

        name = "float32" if self.dtype == "int8" else self.dtype
        return None if name == "auto" else getattr(torch, name)

    @property
    def keys(self) -> Any:
        """The torch.dtype of keys and values that is asked for; None: none is."""
        import torch

        return None if self.kv_cache_dtype == "auto" else getattr(torch, self.kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Options of a decoding method; each has those that it names, plain decoding none.

    Attributes:
        tree: auto, or candidates per level, integers of at least 1
        ngrams: n-gram branches beside the tree; 0: no repeats of earlier text are drafted
        ngram_count: draft n-grams seen this often, at least 1
        budget: tokens in the partial KV cache, more than sinks
        sinks: first tokens that partial caches always hold, 0 or more
        cache: KV cache of drafting: dynamic, partial (selected once) or full
        candidates: ranked coupled (with the target's own noise) or by probability
        draft: what heads draft from: partial (a pass over the partial cache), hidden (no extra
            pass) or auto
        vocabulary: tokens that can be drafted: frequent (and the prompt's) or full
        acceptance: acceptance rule: exact, or published (the paper's: NOT lossless, the text
            differs)
        draft_model: causal LM with the target's tokenizer: alias, folder or hub id; default: none,
            or for triforce and the default model the shipped one
        gamma: tokens of a drafted chain, 1 to 32
        kv: sparse cache: snapkv (pooled attention at prefill) or streaming
        inner_gamma: tokens the draft model drafts for the partial cache, 1 to 32
        chunk: tokens of a retrieved chunk, at least 1
        refresh: new tokens after which retrieval is repeated; 0: only at prefill
        draft_budget: tokens in the draft model's KV cache, more than sinks
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if hasattr(self, "tree"):
            check_widths(self)
        for name in ("budget", "draft_budget"):
            sinks, size = getattr(self, "sinks", 0), getattr(self, name, None)
            small = size is not None and size <= sinks
            refuse(small, self, name, f"; valid: more than the {sinks} sink tokens")


@dataclass(frozen=True, slots=True)
class AutoOptions(MethodOptions):
    """Options of ``auto``, adaptive drafting; None chooses by device. See `MethodOptions`."""

    ngrams: int | None = None
    budget: int | None = None
    sinks: int = 16
    cache: Cache = "dynamic"
    candidates: Candidates = "coupled"
    draft: Draft = "auto"
    vocabulary: Vocabulary = "frequent"
    draft_model: Any = None


@dataclass(frozen=True, slots=True)
class TokenSwiftOptions(MethodOptions):
    """Options of ``tokenswift``, the paper's method; the defaults are the paper's. See
    `MethodOptions`."""

    tree: tuple[int, ...] = (1, 3, 3, 3)
    ngrams: int = 20
    ngram_count: int = 1
    budget: int = 4096
    sinks: int = 16
    cache: Cache = "dynamic"
    candidates: Candidates = "coupled"
    draft: Draft = "auto"
    vocabulary: Vocabulary = "frequent"
    acceptance: Acceptance = "exact"


@dataclass(frozen=True, slots=True)
class MedusaOptions(MethodOptions):
    """Options of the ``medusa`` strategy. See `MethodOptions`."""

    tree: tuple[int, ...] = (1, 3, 3, 3)
    candidates: Candidates = "coupled"
    acceptance: Acceptance = "exact"
    vocabulary: Vocabulary = "frequent"


@dataclass(frozen=True, slots=True)
class MagicDecOptions(MethodOptions):
    """Options of the ``magicdec`` strategy; without a draft model the target drafts for itself. See
    `MethodOptions`."""

    gamma: int = 3
    kv: Kv = "snapkv"
    budget: int = 4096
    sinks: int = 16
    draft_model: Any = None
    candidates: Candidates = "coupled"


@dataclass(frozen=True, slots=True)
class TriForceOptions(MethodOptions):
    """Options of the ``triforce`` strategy. See `MethodOptions`."""

    gamma: int = 6
    inner_gamma: int = 2
    budget: int = 4096
    sinks: int = 16
    chunk: int = 8
    refresh: int = 64
    draft_model: Any = None
    draft_budget: int = 256
    candidates: Candidates = "coupled"


#: kinds of draft heads; as ``heads`` each names the shipped ones of its kind
HEAD_KINDS = get_args(HeadKind)
#: strategy → kind of its options
OPTIONS: dict[str, type] = {
    "auto": AutoOptions,
    "autoregressive": MethodOptions,
    "tokenswift": TokenSwiftOptions,
    "medusa": MedusaOptions,
    "triforce": TriForceOptions,
    "magicdec": MagicDecOptions,
}


def check_widths(options: Any) -> None:
    """Check ``options.tree`` and make it a tuple."""
    given = options.tree if isinstance(options.tree, tuple | list) else ()
    tree = tuple(integer_of(width) or 0 for width in given)
    valid = "; valid: integers of at least 1, such as 1,3,3,3"
    refuse(not tree or not all(0 < width <= LARGEST for width in tree), options, "tree", valid)
    if len(tree) > MAX_NODES or tree_nodes(tree) > MAX_NODES:
        text = shown(",".join(map(str, tree)))
        raise InputError(
            f"tree is {text}; valid: at most {MAX_NODES} nodes in all, the root included", "tree"
        )
    keep_field(options, "tree", tree)


def tree_nodes(widths: Sequence[int]) -> int:
    """Nodes of the full product of these widths, the root included."""
    level, nodes = 1, 1
    for width in widths:
        level *= width
        nodes += level
    return nodes


def names_of(strategy: str) -> list[str]:
    """The names of a strategy's options."""
    return [f.name for f in fields(OPTIONS[strategy])]


def build_options(strategy: str, values: Mapping[str, Any] | None) -> Any:
    """Make a strategy's options.

    Args:
        values: names and values; None for the defaults.
    Raises:
        InputError: an unknown name, or a bad value.
    """
    if values is not None and not isinstance(values, Mapping):
        valid = f"a dict of options of strategy {strategy}"
        raise InputError(f"strategy_options is {shown(values)}; valid: {valid}")
    known = names_of(strategy)
    name = next((name for name in values or {} if name not in known), None)
    if name is not None:
        having = [other for other in OPTIONS if name in names_of(other)]
        owners = f" (strategy {' or '.join(having)} has it)" if having else ""
        valid = f"{', '.join(known) or 'none'}{meant(name, known)}{owners}"
        raise InputError(f"{shown(name)} is not an option of strategy {strategy}; valid: {valid}")
    return OPTIONS[strategy](**(values or {}))
