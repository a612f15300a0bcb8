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
from typing import TYPE_CHECKING

from tokenswift.grammar import CLOSE, OPEN, SPACING, TITLES, Grammar
from tokenswift.json_schema import Digits, closed, compilable, multiples
from tokenswift.lark import lark_of_numbers, lark_parts, lark_with
from tokenswift.sampling.masks import Compiled, Masks, one_line
from tokenswift.sandbox import Process
from tokenswift.tokenizer import backend_of
from tokenswift.types import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

MOST_KEPT = 8  # compiled grammars that are kept for a model

SECONDS = 10  # processor time of a trial compilation
MEMORY = 1 << 32  # bytes of its address space
MOST_LEXER_STATES = 50_000  # of about 2 KB each


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
        tokenizer: the model's; None: it has none.
        vocab_size: V, the width of the logits.
        ends: returns the ids of end-of-text tokens.
    """

    def __init__(
        self, tokenizer: object, vocab_size: int, ends: Callable[[], Collection[int]]
    ) -> None:
        self._backend = backend_of(tokenizer)
        self._vocab_size = vocab_size
        self._ends = ends
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
        key = (grammar, ends)
        try:
            source = self._tried_source(grammar)  # outside the lock
            with self._lock:
                tokenizer = self._tokenizer(ends)
                compiled = self._compiled.get(key)
                if compiled is None or compiled.spoilt:
                    compiled = _compiled(source, tokenizer)
                    self._compiled[key] = compiled
                    if len(self._compiled) > MOST_KEPT:
                        self._compiled.popitem(last=False)
                self._compiled.move_to_end(key)
                return Masks(compiled, tokenizer, start, ends)
        except Exception as error:  # the libraries raise various types
            raise InputError(
                f"the {TITLES[grammar.kind]} cannot be compiled ({one_line(error)}); "
                "valid: a schema or grammar that llguidance knows (see docs/grammars.md)",
                "grammar",
            ) from error

    def reason_not_held(self, schema: Mapping[str, object] | bool) -> str | None:
        """Why texts cannot be held to a JSON schema, in one line; None: they can be.

        For a request of several schemas, such as a chat's tools, of which one that cannot be held
        should not refuse the others. The compiled grammars that are kept stay as they are. It takes
        the time of a compilation: not for the scheduler's thread.

        Args:
            schema: an object, or True: any JSON.
        """
        try:
            source = self._tried_source(Grammar.json_schema(schema))
            with self._lock:
                tokenizer = self._tokenizer(tuple(sorted(self._ends())))
            _compiled(source, tokenizer)
        except Exception as error:  # the libraries raise various types
            return one_line(error)
        return None

    def _tried_source(self, grammar: Grammar) -> Source:
        """A grammar in llguidance's form, compiled as a trial.

        Raises:
            ValueError: the reason why it failed.
        """
        special = tuple(special_tokens(self._backend))
        source = _source(grammar, special)
        try_to_compile(source, special, self._vocab_size)
        return source

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if ends in self._tokenizers:
            return self._tokenizers[ends]
        if self._backend is None:
            raise ValueError("the model has no tokenizer.json")
        if not ends:
            raise ValueError("the model has no end-of-text token")
        size = self._vocab_size
        plain = LLTokenizer(self._backend.to_str(), n_vocab=size, eos_token=list(ends))
        vocabulary = TokenizerWrapper(Vocabulary(plain, self._backend, ends))
        tokenizer = LLTokenizer(vocabulary, n_vocab=size, eos_token=list(ends))
        self._tokenizers = {ends: tokenizer}
        return tokenizer


def _compiled(source: Source, tokenizer: LLTokenizer) -> Compiled:
    compile_text = partial(_matcher, source.text, tokenizer)
    compile_numbers = partial(_matcher, source.numbers, tokenizer)
    numbers = Compiled(compile_numbers(), compile_numbers) if source.numbers else None
    return Compiled(compile_text(), compile_text, numbers)


def _matcher(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    error = matcher.get_error()
    if error:
        raise ValueError(error)
    first = matcher.deep_copy()
    bits = first.compute_bitmask()
    error = first.get_error()
    if error:
        raise ValueError(error)
    if not any(bits):
        raise ValueError("no text is possible")
    return matcher


class Vocabulary:
    """A tokenizer for llguidance in which only the tokens that the tokenizer marks as special are
    special.

    By itself, llguidance takes every added token of the form ``<…>`` as special, and encodes text
    with such a name as that token. As its matcher accepts no special token as text, no text could
    hold the name.

    Args:
        plain: llguidance's own tokenizer, whose encoding takes such names as tokens.
        backend: the tokenizer of the library ``tokenizers``.
        ends: ids of end-of-text tokens.

    Attributes:
        eos_token_id, bos_token_id, tokens, special_token_ids: what llguidance reads.
    """

    def __init__(self, plain: LLTokenizer, backend: Tokenizer, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        named_ids = set(backend.get_vocab(with_added_tokens=True).values())
        self.tokens = [
            plain.decode_bytes([token]) if token in named_ids else b""
            for token in range(plain.vocab_size)
        ]
        added = backend.get_added_tokens_decoder()
        special = {token for token, entry in added.items() if entry.special}
        self.special_token_ids = sorted(special.union(ends))
        names = [self.tokens[token].decode() for token in self.special_token_ids]
        alternatives = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        self._names = re.compile(f"({alternatives})")
        self._plain = plain

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text, none of them special."""
        tokens: list[int] = []
        for number, part in enumerate(self._names.split(text)):
            is_name = number % 2 == 1
            encode = self._plain.greedy_tokenize if is_name else self._plain.tokenize_str
            tokens += encode(part)
        return tokens


def special_tokens(backend: Tokenizer | None) -> list[str]:
    """Names of a tokenizer's special tokens."""
    if backend is None:
        return []
    entries = backend.get_added_tokens_decoder().values()
    return [entry.content for entry in entries if entry.special]


def _source(grammar: Grammar, special: Collection[str]) -> Source:
    """A grammar in llguidance's form; ``special``: names of the vocabulary's special tokens."""
    source = _bare_source(grammar)
    if not grammar.thought:
        return source
    numbers = source.numbers and _after_thought(source.numbers, grammar, special)
    return replace(source, text=_after_thought(source.text, grammar, special), numbers=numbers)


def _after_thought(text: str, grammar: Grammar, special: Collection[str]) -> str:
    """A grammar with what may come before the answer."""
    source = json.loads(text) if text.startswith("{") else {"grammars": [{"lark_grammar": text}]}
    source["grammars"][0]["name"] = "answer"
    opening = OPEN if OPEN in special else f'"{OPEN}"'
    before = "thought SPACE" if grammar.thought == "begun" else f"({opening} thought SPACE)?"
    end = f"thought: TEXT {CLOSE}" if CLOSE in special else f'thought[lazy]: TEXT "{CLOSE}"'
    thought = f"start: {before} @answer\n{end}\nTEXT: /(.|\\n)*/\nSPACE: /\\n{{0,2}}/\n"
    source["grammars"].insert(0, {"lark_grammar": thought})
    return json.dumps(source)


def _bare_source(grammar: Grammar) -> Source:
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return Source(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        parts = ["start: ", ""]
        schemas = [{} if schema is True else closed(schema)]
    else:
        parts, schemas = lark_parts(grammar.text)
    if not schemas:
        return Source(LLMatcher.grammar_from_lark(grammar.text))
    digits = Digits()
    rules: list[str] = []
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


def try_to_compile(source: Source, special: tuple[str, ...], vocab_size: int) -> None:
    """Compile a grammar in a limited process, as a trial.

    Args:
        source: the grammar in llguidance's form.
        special: names of tokens that it may name.
        vocab_size: V, the number of ids that it may name.
    Raises:
        ValueError: the reason why it failed.
    """
    fault = _fault(source, special, vocab_size)
    if fault:
        raise ValueError(fault)


@lru_cache(maxsize=64)  # but for what reached a limit: that may be due to a busy machine
def _fault(source: Source, special: tuple[str, ...], vocab_size: int) -> str:
    """Why llguidance refuses a grammar; "": it does not.

    Raises:
        ValueError: a limit was reached, or the trial itself failed.
    """
    limits = {"max_lexer_states": MOST_LEXER_STATES, "verbose_errors": False}
    texts = [text for text in (source.text, source.numbers) if text]
    process = Process()
    try:
        answer = process.ask(
            "compile", SECONDS, MEMORY, limits, special, vocab_size, texts, source.multiples
        )
    finally:
        process.close()
    failure = answer.get("limit") or answer.get("error")
    if failure:
        raise ValueError(failure)
    return answer.get("text", "")
