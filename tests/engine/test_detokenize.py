"""Incremental detokenisation: whole characters, stop strings, flat cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tokenswift.engine.detokenize import TextStream


def byte_level(extra: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, plus a few merges: ids 0-255 are the bytes of GPT-2's alphabet,
    sorted."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    for left, right in extra:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(extra)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece style: words begin with ▁, the text's first space is dropped, bytes as
    <0xNN>."""
    pieces = ["▁", "▁the", "▁cat", "s", "a", "b", "!"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="s"
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TINY = byte_level((("a", "b"), ("ab", "c"), ("Ġ", "a"), ("ð", "Ł")))


def check(tokenizer: Any, tokens: list[int]) -> None:
    """The text is that of ``decode``, but for a last character that is not all there."""
    text, whole = "".join(stream_all(tokenizer, tokens)), tokenizer.decode(tokens)
    assert whole.startswith(text) and not whole[len(text) :].strip("\ufffd")


def stream_all(tokenizer: object, tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [stream.push(token) for token in tokens] + [stream.finish()]


@given(st.lists(st.integers(0, 259), max_size=60))
@settings(max_examples=400, deadline=None)
def test_any_tokens_give_the_text_of_decode(tokens: list[int]) -> None:
    check(TINY, tokens)


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_text_comes_out_in_complete_characters(text: str) -> None:
    pieces = stream_all(TINY, TINY.encode(text))
    out = "".join(pieces)
    assert text.startswith(out) and not text[len(out) :].strip("\ufffd")
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [TINY, "byte_fallback"])
def test_a_character_that_the_length_cuts_is_left_out(tokenizer: Any) -> None:
    """Of two, three and four bytes, at each place in it."""
    if tokenizer == "byte_fallback":
        tokenizer, ids = byte_fallback(), lambda letter: [7 + byte for byte in letter.encode()]
    else:
        ids = tokenizer.encode
    for letter in ("é", "日", "😀"):
        whole = ids(letter)
        for cut in range(1, len(whole)):
            assert "".join(stream_all(tokenizer, whole + whole[:cut])) == letter


def test_sentencepiece_style_keeps_spaces_and_rare_characters() -> None:
    tokenizer = byte_fallback()
    the, cat, s, a = 1, 2, 3, 4
    rare = [7 + byte for byte in "日本😀".encode()]
    tokens = [the, cat, s, *rare, the, cat, a, *rare, 6] * 20
    pieces = stream_all(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


@given(
    st.text(alphabet="abcx日", max_size=40),
    st.lists(st.text(alphabet="abc日", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_where_the_first_is_completed(text: str, stop: list[str]) -> None:
    tokens = TINY.encode(text)
    stream, out, used = TextStream(TINY, stop), "", 0
    for token in tokens:
        used += not stream.stopped
        out += stream.push(token)
        assert not any(s in out for s in stop)
    out += stream.finish()
    grown = next(
        (i for i in range(len(tokens) + 1) if any(s in TINY.decode(tokens[:i]) for s in stop)), None
    )
    assert stream.stopped == (grown is not None)
    if grown is None:
        assert (out, used) == (text, len(tokens))
    else:
        ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        assert (out, used) == (text[: min(ends)[1]], grown)
