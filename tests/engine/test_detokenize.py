"""Incremental detokenisation: whole characters, stop strings, flat cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tokenswift.engine.detokenize import TextStream
from tokenswift.tokenizer import Decoder
from tokenswift.types import InputError


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


def byte_letters() -> dict[int, str]:
    """The letter of GPT-2's alphabet for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


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


# tokens that end a character and begin the next, and that no character has
BROKEN = byte_level((("ð", "Ł"), ("Ģ", "ð"), ("ð", "Ģ"), ("æ", "Ĺ"), ("¥", "æ")))


def check(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> None:
    """The text is that of ``decode``, but for a last character that is not all there."""
    text = "".join(stream_all(tokenizer, tokens))
    decoded = str(tokenizer.decode(tokens))
    assert decoded.startswith(text)
    assert not decoded[len(text) :].strip("\ufffd")


def stream_all(tokenizer: Decoder, tokens: list[int], context: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer, (), context)
    return [stream.push(token) for token in tokens] + [stream.finish()]


@given(st.lists(st.integers(0, 259), max_size=60))
@settings(max_examples=400, deadline=None)
def test_any_tokens_give_the_text_of_decode(tokens: list[int]) -> None:
    check(TINY, tokens)


UNSORTED = [0x80, 0x97, 0x98, 0x9F, 0xA5, 0xE6, 0xF0, 0x61]  # of characters, in no order


def ids_of(tokenizer: PreTrainedTokenizerFast, letters: bytes) -> list[int]:
    """The token of each byte."""
    alphabet = byte_letters()
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[alphabet[byte]] for byte in letters]


@given(
    st.lists(st.one_of(st.sampled_from(UNSORTED), st.integers(256, 260)), max_size=40),
    st.integers(0, 12),
)
@settings(max_examples=600, deadline=None)
def test_broken_characters_give_the_text_of_decode(places: list[int], split: int) -> None:
    tokens = [place if place > 255 else ids_of(BROKEN, bytes([place]))[0] for place in places]
    check(BROKEN, tokens)
    context = tokens[:split]
    new = tokens[split:]
    before = str(BROKEN.decode(context))
    text = str(BROKEN.decode(tokens))
    if text.startswith(before):
        out = "".join(stream_all(BROKEN, new, context))
        rest = text[len(before) :]
        assert rest.startswith(out)
        assert not rest[len(out) :].strip("\ufffd")


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_text_comes_out_in_complete_characters(text: str) -> None:
    pieces = stream_all(TINY, TINY.encode(text))
    out = "".join(pieces)
    assert text.startswith(out)
    assert not text[len(out) :].strip("\ufffd")
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [TINY, byte_fallback()])
def test_a_character_that_the_length_cuts_is_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    """Of two, three and four bytes, at each place in it."""
    for letter in ("é", "日", "😀"):
        fallback = [7 + byte for byte in letter.encode()]
        ids = TINY.encode(letter) if tokenizer is TINY else fallback
        for cut in range(1, len(ids)):
            assert "".join(stream_all(tokenizer, ids + ids[:cut])) == letter


def test_sentencepiece_style_keeps_spaces_and_rare_characters() -> None:
    tokenizer = byte_fallback()
    the = 1
    cat = 2
    s = 3
    a = 4
    rare = [7 + byte for byte in "日本😀".encode()]
    tokens = [the, cat, s, *rare, the, cat, a, *rare, 6] * 20
    pieces = stream_all(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.most = 0

    def decode(self, tokens: list[int], **options: bool) -> str:
        self.most = max(self.most, len(tokens))
        return str(self.tokenizer.decode(tokens, **options))


STRAY = [7 + 0x80]
HALF = [7 + 0xE6, 7 + 0x97]
SPACES = [0]


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        (BROKEN, ids_of(BROKEN, b"\x80")),
        (BROKEN, ids_of(BROKEN, b"\xe6")),
        (BROKEN, [257, *ids_of(BROKEN, b"\x9f\x98")]),
        (byte_fallback(), STRAY),
        (byte_fallback(), HALF),
        (byte_fallback(), [*STRAY, *SPACES]),
        (byte_fallback(), SPACES),
        (byte_fallback(), [10_000]),
    ],
)
def test_no_token_is_decoded_with_more_than_a_few_others(
    tokenizer: PreTrainedTokenizerFast, tokens: list[int]
) -> None:
    counting = Counting(tokenizer)
    text = "".join(stream_all(counting, tokens * 500))
    assert counting.most <= 16
    rest = str(tokenizer.decode(tokens * 500))
    assert rest.startswith(text)
    assert len(rest) - len(text) <= 3


def test_a_stray_byte_spoils_no_character_around_it() -> None:
    """Of a run of bytes with one too many, the tokenizer's own decode leaves nothing."""
    tokenizer = byte_fallback()
    rare = [7 + byte for byte in "日".encode()]
    pieces = stream_all(tokenizer, [*rare, *STRAY, *rare, 4])
    assert "".join(pieces).startswith("日\ufffd")
    assert "".join(pieces).endswith("日a")


@given(
    st.text(alphabet="abcx日", max_size=40),
    st.lists(st.text(alphabet="abc日", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_where_the_first_is_completed(text: str, stop: list[str]) -> None:
    tokens = TINY.encode(text)
    stream = TextStream(TINY, stop)
    out = ""
    used = 0
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


def test_what_only_began_a_stop_string_comes_out_in_the_end() -> None:
    stream = TextStream(TINY, ["abc!"])
    pieces = [stream.push(token) for token in TINY.encode("xabc")]
    assert "".join(pieces) == "x"
    assert stream.finish() == "abc"
    assert not stream.stopped


def test_a_stop_string_may_begin_with_the_first_space_of_a_continued_text() -> None:
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer, [" cat"], [1])
    assert [stream.push(token) for token in (2, 4)] == ["", ""]
    assert stream.stopped


def test_a_stop_string_needs_a_tokenizer() -> None:
    assert TextStream(None).push(3) == ""
    with pytest.raises(InputError, match="stop is 'x', but the model came without a tokenizer"):
        TextStream(None, ["x"])
