"""Tokens to text, in complete characters, with stop strings.

The text of a token can depend on the tokens before it (a character's bytes may be split over
tokens, and some tokenizers drop the first space). So a token is decoded together with the few
before it, at first the last ones of the prompt, and the new text is what it adds: the cost of a
token does not grow with the length of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenswift.chat.prompts import Prompt, is_chat
from tokenswift.tokenizer import Decoder
from tokenswift.types import InputError

REPLACEMENT = "\ufffd"  # stands for bytes that are no complete character (yet)
LONGEST = 4  # bytes of a character at most, and so the tokens that it can be split over
CONTEXT = 8  # tokens of a prompt that new text is decoded behind, and tokens of a window


def begins_turn(prompt: Prompt, options: Mapping[str, object] | None) -> bool:
    """Whether the text that follows a prompt is a new turn of a conversation, rather than more of
    the prompt's own text.

    Args:
        options: of the chat template, among them ``continue_final_message``.
    """
    if not is_chat(prompt):
        return False
    last = prompt[-1]
    if not isinstance(last, Mapping):
        return False
    is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
    is_empty = last.get("content") == "" and len(prompt) > 1
    wanted = (options or {}).get("continue_final_message")
    return not is_answer or wanted is False or (is_empty and not wanted)


def context_of(tokenizer: Decoder | None, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt, as far as new text is decoded behind them: those behind its last
    control token. A text that follows a control token begins as if nothing were before it."""
    context: list[int] = []
    if tokenizer is None:
        return context
    for token in reversed(prompt[-CONTEXT - LONGEST :]):
        if tokenizer.decode([token]) and not tokenizer.decode([token], skip_special_tokens=True):
            break
        context.insert(0, token)
    return context


class TextStream:
    """Turns tokens into text as they come; stops at the first stop string.

    Args:
        tokenizer: a transformers tokenizer; None makes all text "".
        stop: strings that end the text. The text is cut before the one that is completed first.
        context: tokens before the first one (see `context_of`); their text is no part of the
            stream's, which is what more tokens add to it.
    Raises:
        InputError: stop strings without a tokenizer.

    Attributes:
        stop: the stop strings.
        may_stop: whether a stop string may end the text yet.
        stopped: True once a stop string was completed.
    """

    def __init__(
        self, tokenizer: Decoder | None, stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        if stop and tokenizer is None:
            raise InputError(
                f"stop is {stop[0]!r}, but the model came without a tokenizer; valid: none"
            )
        self._tokenizer = tokenizer
        self.stop = tuple(stop)
        # newest tokens: some whose text is released, then those still waiting
        self._window: list[int] = []
        self._shown = ""  # the released part of the window's text
        self._waiting = 0  # tokens at the end of the window that may be parts of a character
        # U+FFFD at the end of the context's text, which new text does not repeat
        self._repeated = 0
        self._held = ""  # text that may be the beginning of a stop string
        self.may_stop = True
        self.stopped = False
        if tokenizer is not None and context:
            self._follow(context)

    def _follow(self, context: Sequence[int]) -> None:
        """Begin behind some tokens."""
        for extra in range(LONGEST):  # one that is cut off within a character looks broken
            self._window = []
            self._shown = ""
            self._waiting = 0
            texts = [self._decode(token) for token in context[-CONTEXT - extra :]]
            if REPLACEMENT not in "".join(texts):
                break
        if self._waiting:
            self._repeated = len(self._text(self._window)) - len(self._shown)

    def push(self, token: int) -> str:
        """Add a token; returns the text that it releases: complete characters that cannot belong to
        a stop string. After a stop string, always ""."""
        if self.stopped or self._tokenizer is None:
            return ""
        return self._release(self._decode(token))

    def finish(self) -> str:
        """Returns the text still held back at the end, without an incomplete character."""
        if self.stopped or self._tokenizer is None:
            return ""
        unreleased = self._text(self._window)[len(self._shown) :]
        if self._waiting:
            unreleased = unreleased.rstrip(REPLACEMENT)
        text = self._held + unreleased
        self._held = ""
        place = self._find(text)
        if place is not None:
            self.stopped = True
            text = text[:place]
        return text

    def _decode(self, token: int) -> str:
        """The new complete characters with ``token``."""
        self._window.append(token)
        self._waiting += 1
        text = self._text(self._window)
        if not text.startswith(self._shown):  # what is released is spoilt by bytes behind it
            self._window = self._window[-self._waiting :]
            self._shown = ""
            text = self._text(self._window)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        complete = text.rstrip(REPLACEMENT)
        if len(complete) > len(self._shown):
            new = self._advance(complete)
            self._waiting = 1
        elif self._waiting >= LONGEST:
            new = self._give_up(text)
        else:
            new = ""
        if len(self._window) > CONTEXT + LONGEST:
            self._shorten(text, LONGEST)
        return new

    def _settle(self, text: str) -> str:
        """Release all text of the window, and keep of it what the next token's can depend on."""
        if self._waiting == 1 and text == self._shown and len(self._window) > 1:
            del self._window[-1]  # a token without text
            self._waiting = 0
            return ""
        new = self._advance(text)
        for size in (self._waiting, self._waiting + 1):  # a token may have no text by itself
            if newest := self._text(self._window[-size:]):
                self._window = self._window[-size:]
                self._shown = newest
                break
        self._waiting = 0
        return new

    def _give_up(self, text: str) -> str:
        """Release what is before the newest tokens, as many as can be parts of a character: it can
        become none any more."""
        settled = self._text(self._window[: 1 - LONGEST])
        new = self._advance(text[: max(len(settled), len(self._shown))])
        self._shorten(text, LONGEST - 1)
        self._waiting = LONGEST - 1
        return new

    def _advance(self, text: str) -> str:
        """The part of the window's text that is not released yet; it is, now."""
        new = text[len(self._shown) :]
        self._shown = text
        broken = len(new) - len(new.lstrip(REPLACEMENT))
        repeated = min(self._repeated, broken)
        self._repeated = self._repeated - repeated if repeated == len(new) else 0
        return new[repeated:]

    def _shorten(self, text: str, size: int) -> None:
        """Keep the newest tokens of the window alone.

        Args:
            text: of the whole window.
            size: tokens, so many that the text which is not released is theirs.
        """
        unreleased = len(text) - len(self._shown)
        self._window = self._window[-size:]
        newest = self._text(self._window)
        self._shown = newest[: max(0, len(newest) - unreleased)]

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _find(self, text: str) -> int | None:
        """Where the stop string that is completed first begins; None: there is none, or none may
        end the text."""
        if not self.may_stop:
            return None
        first: int | None = None
        first_end = len(text) + 1
        for stop in self.stop:
            begin = text.find(stop)
            end = begin + len(stop)
            if begin >= 0 and (end, begin) < (first_end, first or 0):
                first = begin
                first_end = end
        return first

    def _release(self, new: str) -> str:
        """Release the text that cannot belong to a stop string any more."""
        if not self.stop:
            return new
        text = self._held + new
        place = self._find(text)
        if place is not None:
            self.stopped = True
            self._held = ""
            return text[:place]
        keep = 0
        for length in range(1, min(len(text), max(map(len, self.stop)) - 1) + 1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                keep = length
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]
