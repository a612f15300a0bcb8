"""Grammar masks: the tokens that a grammar allows after a context, from llguidance, along paths of
a draft tree.

A mask sets the logits of forbidden tokens to -inf before all other processing. (After penalties and
temperature would be the same, since these treat every token by itself; the filters see what is
left.) A matcher stands at one place of a text. For another path of the tree it is rolled back to
where the two paths part, so that each row gets the mask of its own path.

A grammar is first compiled in a limited process, because hostile ones can take any time or memory
(`sandbox`).
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from tokenswift.grammar import CLOSE, OPEN, TITLES, Grammar
from tokenswift.json_schema import (
    Digits,
    closed,
    compilable,
    lark_of_numbers,
    lark_parts,
    lark_with,
    multiples,
)
from tokenswift.sandbox import Process
from tokenswift.types import InputError, RunError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 8  # compiled grammars kept for a model
#: JSON spaced as Python writes it: with free spacing, a small model may write spaces for ever
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


LEFT = "the text leaves the grammar"
SPOILT = "another text of this grammar reached llguidance's limits"
TOO_SLOW = "its masks take too long"
TOO_LONG = "a number would be too long"

SECONDS, MEMORY = 10, 1 << 32  # processor time and address space of a trial compilation, in bytes
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}  # of about 2 KB each

#: processor time in seconds that a text's masks may take: at first, and for each of its tokens.
#: Hundreds of times what usual grammars take; some ambiguous ones take seconds a mask
TEXT_SECONDS, TOKEN_SECONDS = 5.0, 0.05
SLOW_SECONDS = 0.2  # a step's masks that took longer are slow: others do not wait for the next one
_SMALL_VOCABULARY = 512  # bytes, and room for special tokens
_NUMBER_TOKENS = 3  # tokens that show whether a text ends within a number
_IN_NUMBER = re.compile(rb"[0-9](\.|[eE][+-]?)?\Z")


class NoMask(RunError):
    """There is no mask. The arguments are the position and the reason: llguidance's, because of the
    grammar, or `LEFT`, an error of this library."""

    def __str__(self) -> str:
        position, reason = self.args
        return f"the grammar gives no mask for position {position} ({reason})"


@dataclass(slots=True)
class Compiled:
    """A grammar for one model.

    Attributes:
        matcher: an `llguidance.LLMatcher` at the start of a text.
        compile: makes another one, which shares nothing with it.
        numbers: the grammar that bounds the digits of JSON numbers; None: it holds no JSON.
        spoilt: whether llguidance's limits were reached. Copies share automata, so that another
            text would fail at its first token.
    """

    matcher: LLMatcher
    compile: Callable[[], LLMatcher]
    numbers: Compiled | None = None
    spoilt: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar in llguidance's form.

    Attributes:
        text: the grammar.
        numbers: the grammar that bounds the digits of JSON numbers in it; "": it holds no JSON.
        multiples: grammars of the numbers in it that are multiples of others.
    """

    text: str
    numbers: str = ""
    multiples: tuple[str, ...] = ()


class Grammars:
    """Compiles grammars for one model, and keeps the most recent ones.

    Args:
        codec: the tokenizer, or None.
        vocab_size: V, the width of the logits.
        ends: returns the ids of end-of-text tokens.
    """

    def __init__(self, codec: Any, vocab_size: int, ends: Callable[[], Collection[int]]) -> None:
        self._codec, self._vocab_size, self._ends = codec, vocab_size, ends
        self._lock = Lock()
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[Grammar, tuple[int, ...]], Compiled] = OrderedDict()

    def masks(self, grammar: Grammar, start: int) -> Masks:
        """The masks of one sequence. Compiles the grammar, which takes time: not for the
        scheduler's thread.

        Args:
            start: length of the prompt, to which the grammar does not apply.
        Raises:
            InputError: the grammar cannot be compiled, no text of it is possible, or there is no
                tokenizer for it.
        """
        ends = tuple(sorted(self._ends()))
        key = grammar, ends
        try:
            special = tuple(special_tokens(self._codec))
            source = _source(grammar, special)
            tried(source, special, self._vocab_size)  # outside the lock
            with self._lock:
                tokenizer = self._tokenizer(ends)
                found = self._compiled.get(key)
                if found is None or found.spoilt:
                    found = self._compiled[key] = _compiled(source, tokenizer)
                    if len(self._compiled) > _KEPT:
                        self._compiled.popitem(last=False)
                self._compiled.move_to_end(key)
                return Masks(found, tokenizer, start, ends)
        except Exception as error:  # the libraries raise various types
            why = f"the {TITLES[grammar.kind]} cannot be compiled ({_line(error)})"
            valid = "a schema or grammar that llguidance knows (see docs/grammars.md)"
            raise InputError(f"{why}; valid: {valid}", "grammar") from error

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if ends in self._tokenizers:
            return self._tokenizers[ends]
        inner = getattr(self._codec, "backend_tokenizer", None)
        if inner is None or not ends:
            raise ValueError(
                f"the model has no {'tokenizer.json' if inner is None else 'end-of-text token'}"
            )
        read = LLTokenizer(inner.to_str(), n_vocab=self._vocab_size, eos_token=list(ends))
        vocabulary = TokenizerWrapper(Vocabulary(read, inner, ends))
        made = LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=list(ends))
        self._tokenizers = {ends: made}
        return made


def _compiled(source: Source, tokenizer: LLTokenizer) -> Compiled:
    compile_text = partial(_matcher, source.text, tokenizer)
    compile_numbers = partial(_matcher, source.numbers, tokenizer)
    numbers = Compiled(compile_numbers(), compile_numbers) if source.numbers else None
    return Compiled(compile_text(), compile_text, numbers)


def _matcher(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    if not (wrong := matcher.get_error()):
        first = matcher.deep_copy()
        bits = first.compute_bitmask()
        wrong = first.get_error() or ("" if any(bits) else "no text is possible")
    if wrong:
        raise ValueError(wrong)
    return matcher


class Vocabulary:
    """A tokenizer for llguidance in which only the tokens that the tokenizer marks as special are
    special.

    By itself, llguidance takes every added token of the form ``<…>`` as special, and encodes text
    with such a name as that token. As its matcher accepts no special token as text, no text could
    hold the name.

    Args:
        read: llguidance's own `LLTokenizer`.
        inner: the ``tokenizers.Tokenizer``.
        ends: ids of end-of-text tokens.
    """

    def __init__(self, read: Any, inner: Any, ends: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = ends[0], None
        known = set(inner.get_vocab(with_added_tokens=True).values())
        self.tokens = [
            read.decode_bytes([i]) if i in known else b"" for i in range(read.vocab_size)
        ]
        added = inner.get_added_tokens_decoder()
        self.special_token_ids = sorted(
            {i for i, token in added.items() if token.special}.union(ends)
        )
        names = sorted(
            (self.tokens[i].decode() for i in self.special_token_ids), key=len, reverse=True
        )
        self._named = re.compile(f"({'|'.join(map(re.escape, names))})")
        self._read = read

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text, none of them special."""
        parts = self._named.split(text)
        encode = self._read.tokenize_str, self._read.greedy_tokenize
        return [token for i, part in enumerate(parts) for token in encode[i % 2](part)]


class Masks:
    """The masks of one sequence.

    Args:
        compiled: the compiled grammar.
        tokenizer: its `llguidance.LLTokenizer`.
        start: length of the prompt.
        ends: ids of end-of-text tokens, which the matcher never consumes.

    Attributes:
        tokenizer, ends: as given.
        is_slow: whether masks took so long that others should not wait for the next one, and that
            nothing is drafted: `prepare` it.
    """

    def __init__(
        self, compiled: Compiled, tokenizer: LLTokenizer, start: int, ends: Sequence[int]
    ) -> None:
        self._compiled, self.tokenizer, self.ends = compiled, tokenizer, ends
        self._matcher = compiled.matcher.deep_copy()
        self._lost: NoMask | None = None  # set once no matcher can follow the text
        self._start = self._at = start  # the text is committed up to position `_at`
        self._after: list[int] = []  # tokens that the matcher has consumed after them
        self._made: dict[tuple[int, ...], Tensor | NoMask | None] = {}  # masks by path after them
        bounds = compiled.numbers
        self._numbers = None if bounds is None else Masks(bounds, tokenizer, start, ends)
        self.is_slow = False
        self._seconds = self._step_seconds = 0.0  # processor time so far, and after the last commit

    def prepare(self, history: list[int]) -> None:
        """Make the mask after ``history``, unless it is made, and see whether masks are still slow.
        What is wrong with it, `allowed` will raise."""
        if len(history) == self._at and () in self._made:
            return
        self.is_slow, self._step_seconds = False, 0.0
        with suppress(NoMask):
            self.allowed(history, [])

    def allowed(self, history: list[int], path: Sequence[int]) -> Int[Tensor, " w"] | None:
        """The mask after ``history + path``, a bit for each token (see `choice.allowed_tokens`), on
        the CPU; None if the path leaves the grammar or the text has ended.

        Raises:
            NoMask: llguidance's limits are reached, the masks take too long, or ``history`` leaves
                the grammar.
        """
        with self._timed():
            self._commit(history)
            key = tuple(path)
            if key not in self._made:
                self._made[key] = self._mask(history, path)
        found = self._made[key]
        if isinstance(found, NoMask):
            raise found
        return found

    def _mask(self, history: list[int], path: Sequence[int]) -> Tensor | NoMask | None:
        """A mask as `allowed` returns it, or what it raises."""
        position = len(history) + len(path)
        if self._seconds > TEXT_SECONDS + TOKEN_SECONDS * (self._at - self._start):
            return NoMask(position, TOO_SLOW)
        bits = self._matcher.compute_bitmask() if self._go_to(path) else None
        if (error := self._error(history)) is not None:
            return error
        if bits is None:
            return None
        count = -(-self.tokenizer.vocab_size // 32)  # llguidance may give one more
        words = torch.frombuffer(bytearray(bits), dtype=torch.int32, count=count)
        bound = self._digits_left(history, path)
        if bound is None:
            return words
        bounded = words & bound
        return bounded if bounded.any() or not words.any() else NoMask(position, TOO_LONG)

    def _digits_left(self, history: list[int], path: Sequence[int]) -> Tensor | None:
        """The mask of what bounds a number, where the text may end within one."""
        if self._numbers is None:
            return None
        new = [*history[max(self._start, len(history) - _NUMBER_TOKENS) :], *path]
        if not _IN_NUMBER.search(self.tokenizer.decode_bytes(new[-_NUMBER_TOKENS:])):
            return None
        try:
            return self._numbers.allowed(history, path)
        except NoMask:  # it is JSON in a form that only the grammar itself knows
            return None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the processor time of a call."""
        began = thread_time()
        try:
            yield
        finally:
            seconds = thread_time() - began
            self._seconds += seconds
            self._step_seconds += seconds
            self.is_slow |= self._step_seconds > SLOW_SECONDS

    def reach(self, history: list[int], path: Sequence[int]) -> int:
        """How many tokens of a path after ``history`` the grammar allows."""
        with self._timed():
            self._commit(history)
            self._go_to(path)
        reached = len(self._after)
        if reached < len(path) and path[reached] in self.ends:
            reached += self._matcher.is_accepting()
        return 0 if self._error(history) is not None else reached

    def forced(self, history: list[int]) -> tuple[list[int], int]:
        """The tokens of the text that the grammar forces after ``history``, with the end of text if
        it ends there, and how many of them are certain: the others could be other tokens for the
            same text."""
        with self._timed():
            return self._forced(history)

    def _forced(self, history: list[int]) -> tuple[list[int], int]:
        self._commit(history)
        self._go_to([])
        matcher = self._matcher
        tokens: list[int] = matcher.compute_ff_tokens()
        forced: bytes = matcher.compute_ff_bytes()
        if self._error(history) is not None:
            return [], 0
        sure = len(tokens)
        rest = forced[len(self.tokenizer.decode_bytes(tokens)) :] if tokens else forced
        if rest:
            tokens = [*tokens, *self.tokenizer.tokenize_bytes(rest)]
        if not self._go_to(tokens):
            tokens = self._after[:]
        elif matcher.is_stopped() and len(self.ends) == 1:
            sure += sure == len(tokens)
            tokens = [*tokens, self.ends[0]]
        return tokens, sure

    def of(
        self, history: list[int], paths: list[list[int]], positions: list[int] | None = None
    ) -> list[Int[Tensor, " w"] | None]:
        """The masks of rows; arguments as in `choice.LogitRows`. None for a row whose context is
        not fully known, or whose path leaves the grammar, so that it cannot be accepted.

        Raises:
            NoMask: see :meth:`allowed`.
        """
        known = [len(history) + len(path) for path in paths]
        return [
            self.allowed(history, path) if at == end else None
            for path, at, end in zip(paths, positions or known, known, strict=True)
        ]

    def _commit(self, history: list[int]) -> None:
        """Let the matcher follow the tokens that were committed since the last call.

        Raises:
            NoMask: they leave the grammar, or nothing can follow them.
        """
        if self._lost is not None:
            raise self._lost
        new = history[self._at :]
        if not new:
            return
        if not self._go_to(new) and not self._begin_anew(history[self._start :]):
            place = self._at + len(self._after)
            why = self._matcher.get_error() or (SPOILT if self._compiled.spoilt else LEFT)
            self._lost, self._compiled.spoilt = NoMask(place, _line(why)), True
            raise self._lost
        self._at += len(new)
        self._after, self._made = [], {}
        self._step_seconds = 0.0

    def _begin_anew(self, text: list[int]) -> bool:
        """Let a matcher that is compiled anew follow the text so far; returns whether it does.

        Drafts close to llguidance's limits wear out the automata, which copies share: these refuse
        tokens that they allowed.
        """
        if self._matcher.is_error() or self._compiled.spoilt:  # why it does not follow is known
            return False
        if any(token in self.ends for token in text):
            return False
        matcher = self._compiled.compile()
        if matcher.try_consume_tokens(text) < len(text):
            return False
        self._matcher, self._after = matcher, text[self._at - self._start :]
        return True

    def _go_to(self, path: Sequence[int]) -> bool:
        """Move the matcher to the end of a path after the committed text, or to where the path
        leaves the grammar; returns whether it reached the end."""
        pairs = enumerate(zip(self._after, path, strict=False))
        common = next(
            (i for i, (ours, wanted) in pairs if ours != wanted), min(len(self._after), len(path))
        )
        if back := len(self._after) - common:
            self._matcher.rollback(back)
            del self._after[common:]
        # the matcher consumes no end of text, and nothing follows one
        rest = [*takewhile(lambda token: token not in self.ends, path[common:])]
        took = self._matcher.try_consume_tokens(rest) if rest else 0
        self._after += rest[:took]
        return len(self._after) == len(path)

    def _error(self, history: list[int]) -> NoMask | None:
        """The matcher's error, or None. A matcher with an error is replaced, since the path may be
        a draft that is never accepted."""
        if not self._matcher.is_error():
            return None
        found = NoMask(self._at + len(self._after), _line(self._matcher.get_error()))
        self._compiled.spoilt = True
        self._matcher, self._after = self._compiled.matcher.deep_copy(), []
        known = history[self._start : self._at]
        if known and self._matcher.try_consume_tokens(known) < len(known):
            self._lost = found
        return found


def special_tokens(tokenizer: Any) -> list[str]:
    """Names of a tokenizer's special tokens."""
    made = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if made is None else made.get_added_tokens_decoder()
    return [token.content for token in added.values() if token.special]


def _source(grammar: Grammar, special: Collection[str]) -> Source:
    """A grammar in llguidance's form; ``special``: names of the vocabulary's special tokens."""
    source = _bare_source(grammar)
    if not grammar.thought:
        return source
    numbers = source.numbers and _after_thought(source.numbers, grammar, special)
    return replace(source, text=_after_thought(source.text, grammar, special), numbers=numbers)


def _after_thought(text: str, grammar: Grammar, special: Collection[str]) -> str:
    """A grammar with what may come before the answer."""
    made = json.loads(text) if text.startswith("{") else {"grammars": [{"lark_grammar": text}]}
    made["grammars"][0]["name"] = "answer"
    opening = OPEN if OPEN in special else f'"{OPEN}"'
    before = "thought SPACE" if grammar.thought == "begun" else f"({opening} thought SPACE)?"
    end = f"thought: TEXT {CLOSE}" if CLOSE in special else f'thought[lazy]: TEXT "{CLOSE}"'
    text = f"start: {before} @answer\n{end}\nTEXT: /(.|\\n)*/\nSPACE: /\\n{{0,2}}/\n"
    made["grammars"].insert(0, {"lark_grammar": text})
    return json.dumps(made)


def _bare_source(grammar: Grammar) -> Source:
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return Source(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        parts, schemas = ["start: ", ""], [{} if schema is True else closed(schema)]
    else:
        parts, schemas = lark_parts(grammar.text)
    if not schemas:
        return Source(LLMatcher.grammar_from_lark(grammar.text))
    digits, rules = Digits(), list[str]()
    for schema in map(compilable, schemas):
        digits = digits.including(schema)
        rules += map(_json_source, multiples(schema))
    numbers = LLMatcher.grammar_from_lark(lark_of_numbers(parts, digits))
    if grammar.kind == "json_schema":
        return Source(_json_source(schemas[0]), numbers, tuple(rules))
    text = LLMatcher.grammar_from_lark(lark_with(parts, schemas))
    return Source(text, numbers, tuple(rules))


def _json_source(schema: Mapping[str, object]) -> str:
    from llguidance import LLMatcher

    text = json.dumps(schema, ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(text, defaults=SPACING)


def _line(said: object) -> str:
    """A library's message, shortened to one line."""
    text = str(said).partition("\n<state>")[0].replace("<non-verbose/>", "")
    text = " ".join(text.split()).replace("NoExtensionBias", "no text is possible")
    text = text or (type(said).__name__ if isinstance(said, Exception) else "")
    return text if len(text) <= 240 else f"{text[:239]}…"


def tried(source: Source, special: tuple[str, ...], vocab_size: int) -> None:
    """Compile a grammar in a limited process, as a trial.

    Args:
        source: the grammar in llguidance's form.
        special: names of tokens that it may name.
        vocab_size: V, the number of ids that it may name.
    Raises:
        ValueError: the reason why it failed.
    """
    if wrong := _fault(source, special, vocab_size):
        raise ValueError(wrong)


@lru_cache(maxsize=64)  # but for what reached a limit: that may be due to a busy machine
def _fault(source: Source, special: tuple[str, ...], vocab_size: int) -> str:
    """Why llguidance refuses a grammar; "": it does not.

    Raises:
        ValueError: a limit was reached, or the trial itself failed.
    """
    process, texts = Process(), [text for text in (source.text, source.numbers) if text]
    given = special, vocab_size, texts, source.multiples
    try:
        answer = process.ask("compile", SECONDS, MEMORY, LIMITS, *given)
    finally:
        process.close()
    if wrong := answer.get("limit") or answer.get("error"):
        raise ValueError(wrong)
    return answer["made"]


def reason_not_held(schema: Mapping[str, object] | bool) -> str | None:
    """Why texts cannot be held to a JSON schema, in one line; None: they can be.

    For a request of several schemas, such as a chat's tools, of which one that cannot be held
    should not refuse the others. It takes the time of a trial: not for the scheduler's thread.

    Args:
        schema: an object, or True: any JSON.
    """
    try:
        grammar = Grammar.json_schema(schema)
        tried(_source(grammar, ()), (), _SMALL_VOCABULARY)
    except Exception as error:  # the libraries raise various types
        return _line(error)
    return None
