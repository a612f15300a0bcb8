"""Which tokens a grammar allows after a context: llguidance's masks, along the paths of a drafted tree.

A mask is a processor of the target's distribution: tokens that the grammar does not allow get -inf before
anything else looks at the row, which is the same as after penalties and temperature, since both work on
every token for itself; filters see what is left. A matcher stands at one place of a text. For another path
of the same tree it is rolled back to where the two part, so a row's mask is that of its own path.

Grammars are compiled in a process of their own before this one compiles them (`sandbox` says why).
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from threading import Lock
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tokenswift.grammar import CLOSE, OPEN, TITLES, Grammar, closed
from tokenswift.sandbox import Process
from tokenswift.types import InputError, RunError

_KEPT = 8  # compiled grammars of a model
#: JSON as Python writes it: where a small model may choose among spaces, it may write them for ever
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


LEFT = "the text leaves the grammar"
SPOILT = "another text of this grammar reached llguidance's limits"

SECONDS, MEMORY = 10, 1 << 32  # processor time of a trial, and bytes of its address space
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}  # of about 2 KB each


class NoMask(RunError):
    """A grammar gives no mask; its arguments are the position and the reason: llguidance's, which the grammar
    is to blame for, or `LEFT`, which is a fault of ours."""

    def __str__(self) -> str:
        position, reason = self.args
        return f"the grammar gives no mask for position {position} ({reason})"


@dataclass(slots=True)
class Compiled:
    """A grammar for one model.

    Attributes:
        matcher: an `llguidance.LLMatcher` that has consumed nothing.
        spoilt: it reached llguidance's limits somewhere. Copies share automata, so that another text
            would fail at its first token.
    """

    matcher: Any
    spoilt: bool = False


class Grammars:
    """Compiles grammars for one model, and keeps the latest ones.

    Args:
        codec: the tokenizer; None: there is none.
        vocab_size: V, the width of the logits.
        ends: gives the ids of the tokens that end a text.
    """

    def __init__(self, codec: Any, vocab_size: int, ends: Callable[[], Collection[int]]) -> None:
        self._codec, self._vocab_size, self._ends = codec, vocab_size, ends
        self._lock = Lock()
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._compiled: OrderedDict[tuple[Grammar, tuple[int, ...]], Compiled] = OrderedDict()

    def masks(self, grammar: Grammar, start: int) -> Masks:
        """The masks of one text; compiles the grammar, so not to be called where texts are decoded.

        Args:
            start: tokens of the prompt, which the grammar says nothing of.
        Raises:
            InputError: the grammar cannot be compiled, no text of it is possible, or there is no tokenizer
                for it.
        """
        ends = tuple(sorted(self._ends()))
        key = grammar, ends
        try:
            special = tuple(special_tokens(self._codec))
            text = tried(_source(grammar, special), special, self._vocab_size)  # others need not wait for it
            with self._lock:
                tokenizer = self._tokenizer(ends)
                found = self._compiled.get(key)
                if found is None or found.spoilt:
                    found = self._compiled[key] = Compiled(_matcher(text, tokenizer))
                    if len(self._compiled) > _KEPT:
                        self._compiled.popitem(last=False)
                self._compiled.move_to_end(key)
                return Masks(found, tokenizer, start, ends)
        except Exception as error:  # two libraries raise plain ones
            why = f"the {TITLES[grammar.kind]} cannot be compiled ({_line(error)})"
            valid = "a schema or grammar that llguidance knows (see docs/grammars.md)"
            raise InputError(f"{why}; valid: {valid}", "grammar") from error

    def _tokenizer(self, ends: tuple[int, ...]) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        if ends in self._tokenizers:
            return self._tokenizers[ends]
        inner = getattr(self._codec, "backend_tokenizer", None)
        if inner is None or not ends:
            raise ValueError(f"the model has no {'tokenizer.json' if inner is None else 'end-of-text token'}")
        read = LLTokenizer(inner.to_str(), n_vocab=self._vocab_size, eos_token=list(ends))
        vocabulary = TokenizerWrapper(Vocabulary(read, inner, ends))
        made = LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=list(ends))
        self._tokenizers = {ends: made}
        return made


def _matcher(text: str, tokenizer: Any) -> Any:
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
    """A vocabulary as llguidance is to see it. It takes every added token that is written ``<…>`` for a
    special one, and encodes text that holds a special token's name as that token: no text could hold it then,
    since its matcher takes special tokens for no text. Here those alone are special that the tokenizer says
    so of, and text is encoded as text.

    Args:
        read: llguidance's own reading of the tokenizer, an `LLTokenizer`.
        inner: the ``tokenizers.Tokenizer``.
        ends: ids of the tokens that end a text.
    """

    def __init__(self, read: Any, inner: Any, ends: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = ends[0], None
        known = set(inner.get_vocab(with_added_tokens=True).values())
        self.tokens = [read.decode_bytes([i]) if i in known else b"" for i in range(read.vocab_size)]
        added = inner.get_added_tokens_decoder()
        self.special_token_ids = sorted({i for i, token in added.items() if token.special}.union(ends))
        names = sorted((self.tokens[i].decode() for i in self.special_token_ids), key=len, reverse=True)
        self._named = re.compile(f"({'|'.join(map(re.escape, names))})")
        self._read = read

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, none of them special."""
        parts = self._named.split(text)
        encode = self._read.tokenize_str, self._read.greedy_tokenize
        return [token for i, part in enumerate(parts) for token in encode[i % 2](part)]


class Masks:
    """The tokens that a grammar allows after each context of one text, which only grows.

    Args:
        compiled: the grammar.
        tokenizer: its `llguidance.LLTokenizer`.
        start: tokens of the prompt.
        ends: tokens that end a text, whatever the grammar; no matcher consumes one.

    Attributes:
        tokenizer, ends: as given.
    """

    def __init__(self, compiled: Compiled, tokenizer: Any, start: int, ends: Sequence[int]) -> None:
        self._compiled, self.tokenizer, self.ends = compiled, tokenizer, ends
        self._matcher = compiled.matcher.deep_copy()
        self._lost: NoMask | None = None  # why no matcher can follow the text any more
        self._start = self._at = start  # tokens of the text that are committed: up to `_at`
        self._after: list[int] = []  # what the matcher has consumed behind them
        self._made: dict[tuple[int, ...], Tensor | NoMask | None] = {}  # by path

    def allowed(self, history: list[int], path: Sequence[int]) -> Int[Tensor, " w"] | None:
        """The tokens that may follow ``history + path``, a bit each (`choice.allowed_tokens`), on the CPU;
        None where the path leaves the grammar or the text has ended.

        Raises:
            NoMask: llguidance's limits are reached there, or ``history`` leaves the grammar.
        """
        self._commit(history)
        key = tuple(path)
        if key not in self._made:
            bits = self._matcher.compute_bitmask() if self._go_to(path) else None
            words = -(-self.tokenizer.vocab_size // 32)  # there may be one more
            self._made[key] = self._error(history) or (
                None if bits is None else torch.frombuffer(bytearray(bits), dtype=torch.int32, count=words)
            )
        found = self._made[key]
        if isinstance(found, NoMask):
            raise found
        return found

    def reach(self, history: list[int], path: Sequence[int]) -> int:
        """How many tokens of a path the grammar allows behind ``history``, one after the other."""
        self._commit(history)
        self._go_to(path)
        reached = len(self._after)
        if reached < len(path) and path[reached] in self.ends:
            reached += self._matcher.is_accepting()
        return 0 if self._error(history) is not None else reached

    def forced(self, history: list[int]) -> tuple[list[int], int]:
        """Tokens of the text that has to come after ``history``, and how many of them are certain: the others
        may be written in other tokens. With the end of the text, where it ends there."""
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
        """The masks of rows, whose places are told as in `choice.LogitRows`. None for a row whose context is
        not known or whose path leaves the grammar: no text comes of it.

        Raises:
            NoMask: see :meth:`allowed`.
        """
        known = [len(history) + len(path) for path in paths]
        return [
            self.allowed(history, path) if at == end else None
            for path, at, end in zip(paths, positions or known, known, strict=True)
        ]

    def _commit(self, history: list[int]) -> None:
        """Take in what came since the last call.

        Raises:
            NoMask: it leaves the grammar, or nothing can follow it.
        """
        if self._lost is not None:
            raise self._lost
        new = history[self._at :]
        if not new:
            return
        if not self._go_to(new):
            place = self._at + len(self._after)
            why = self._matcher.get_error() or (SPOILT if self._compiled.spoilt else LEFT)
            self._lost, self._compiled.spoilt = NoMask(place, _line(why)), True
            raise self._lost
        self._at += len(new)
        self._after, self._made = [], {}

    def _go_to(self, path: Sequence[int]) -> bool:
        """Bring the matcher behind the committed text and a path, as far as that stays in the grammar;
        whether it does to the end."""
        pairs = enumerate(zip(self._after, path, strict=False))
        common = next((i for i, (ours, wanted) in pairs if ours != wanted), min(len(self._after), len(path)))
        if back := len(self._after) - common:
            self._matcher.rollback(back)
            del self._after[common:]
        # nothing consumes an end, and nothing comes after it
        rest = [*takewhile(lambda token: token not in self.ends, path[common:])]
        took = self._matcher.try_consume_tokens(rest) if rest else 0
        self._after += rest[:took]
        return len(self._after) == len(path)

    def _error(self, history: list[int]) -> NoMask | None:
        """What keeps the matcher from going on, if anything does. One like that is spoilt: another one takes
        its place, since the path may be a draft that no text follows."""
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
    """Names of tokens that no text is made of."""
    made = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if made is None else made.get_added_tokens_decoder()
    return [token.content for token in added.values() if token.special]


def _source(grammar: Grammar, special: Collection[str]) -> str:
    """A grammar as llguidance takes it; ``special``: the vocabulary's special tokens."""
    text = _bare_source(grammar)
    if not grammar.thought:
        return text
    made = json.loads(text) if text.startswith("{") else {"grammars": [{"lark_grammar": text}]}
    made["grammars"][0]["name"] = "answer"
    opening = OPEN if OPEN in special else f'"{OPEN}"'
    before = "thought SPACE" if grammar.thought == "begun" else f"({opening} thought SPACE)?"
    end = f"thought: TEXT {CLOSE}" if CLOSE in special else f'thought[lazy]: TEXT "{CLOSE}"'
    text = f"start: {before} @answer\n{end}\nTEXT: /(.|\\n)*/\nSPACE: /\\n{{0,2}}/\n"
    made["grammars"].insert(0, {"lark_grammar": text})
    return json.dumps(made)


def _bare_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        schema = json.dumps(closed(json.loads(grammar.text)), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(schema, defaults=SPACING)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _line(said: object) -> str:
    """The first lines of what a library says, as a piece of a line."""
    text = str(said).partition("\n<state>")[0].replace("<non-verbose/>", "")
    text = " ".join(text.split()).replace("NoExtensionBias", "no text is possible")
    text = text or (type(said).__name__ if isinstance(said, Exception) else "")
    return text if len(text) <= 240 else f"{text[:239]}…"


@lru_cache(maxsize=64)  # of those that may be compiled: another failure may come of a busy machine
def tried(text: str, special: tuple[str, ...], vocab_size: int) -> str:
    """A grammar that a process of its own could compile over bytes.

    Args:
        text: as llguidance takes it.
        special: names of tokens that it may speak of.
        vocab_size: V, the number of ids that it may speak of.
    Raises:
        ValueError: with the reason why it could not.
    """
    process = Process()
    try:
        answer = process.ask("compile", SECONDS, MEMORY, LIMITS, special, vocab_size, text)
    finally:
        process.close()
    if wrong := answer.get("limit") or answer.get("error"):
        raise ValueError(wrong)
    return text
