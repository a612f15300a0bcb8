"""Grammars of one model, compiled by llguidance.

A grammar is first compiled in a limited process, because hostile ones can take any time or memory
(`sandbox`).
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from tokenswift.grammar import CLOSE, OPEN, TITLES, Grammar
from tokenswift.json_schema import Digits, closed, compilable, multiples
from tokenswift.lark import lark_of_numbers, lark_parts, lark_with
from tokenswift.sampling.masks import Compiled, Masks, one_line
from tokenswift.sandbox import Process
from tokenswift.types import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 8  # compiled grammars kept for a model
#: JSON spaced as Python writes it: with free spacing, a small model may write spaces for ever
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

SECONDS, MEMORY = 10, 1 << 32  # processor time and address space of a trial compilation, in bytes
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}  # of about 2 KB each
_SMALL_VOCABULARY = 512  # bytes, and room for special tokens


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
            why = f"the {TITLES[grammar.kind]} cannot be compiled ({one_line(error)})"
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
        return one_line(error)
    return None
