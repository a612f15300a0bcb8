"""A text goes on from its prompt's: the prompt's text and the new one are the text of all tokens,
also where the tokenizer drops the first space of what it decodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import tokenswift
from tests.serve.conftest import Running
from tests.tiny import byte_model
from tokenswift import LLM
from tokenswift.chat.prompts import Prompt
from tokenswift.engine.detokenize import TextStream, begins_turn, context_of
from tokenswift.loader.plain_tokenizer import PlainTokenizer
from tokenswift.tokenizer import Decoder

SPECIAL = ("<s>", "</s>", "[/TURN]")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁the", "▁cat", "▁and", "s", "a", ":", "!"]
PIECES = [*SPECIAL, *WORDS, *BYTES]
THE, CAT, AND, SPACE, END_OF_TURN = (
    PIECES.index(piece) for piece in ("▁the", "▁cat", "▁and", "▁", "[/TURN]")
)
#: as Llama 2's, a prompt's last token is no control token: ``▁the : … ▁cat :``
TEMPLATE = (
    "{% for message in messages %}{{ 'the:' if message.role == 'user' else 'cat:' }}"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}{{ 'cat:' }}{% endif %}"
)


def sentencepiece(
    decoder: decoders.Decoder, words: Sequence[str] = PIECES
) -> PreTrainedTokenizerFast:
    vocabulary = {piece: place for place, piece in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<s>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


def llama() -> PreTrainedTokenizerFast:
    """As of Llama 2: bytes of rare characters, and the first space is stripped."""
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return sentencepiece(decoders.Sequence(steps))


def metaspace() -> PreTrainedTokenizerFast:
    return sentencepiece(decoders.Metaspace())


def without_transformers() -> PlainTokenizer:
    return PlainTokenizer(llama().backend_tokenizer, {"bos_token": "<s>"}, TEMPLATE)


def bytes_of(text: str) -> list[int]:
    return [PIECES.index(f"<0x{byte:02X}>") for byte in text.encode()]


def continued(tokenizer: Decoder, prompt: list[int], new: list[int]) -> str:
    """The stream's text behind a prompt."""
    stream = TextStream(tokenizer, (), context_of(tokenizer, prompt))
    pieces = [stream.push(token) for token in new]
    return "".join(pieces) + stream.finish()


RARE = bytes_of("日本😀")


@pytest.mark.parametrize("make", [llama, metaspace, without_transformers])
@pytest.mark.parametrize(
    ("prompt", "new", "text"),
    [
        ([THE], [AND, THE], " and the"),
        ([THE, CAT] * 9, [AND], " and"),
        ([THE, SPACE], [SPACE, CAT], "  cat"),
        ([SPACE], [CAT], " cat"),
        ([SPACE] * 30, [SPACE, CAT], "  cat"),
        ([0, THE], [AND], " and"),
        ([THE, PIECES.index("s")], [PIECES.index("a"), AND], "a and"),
    ],
)
def test_the_first_space_of_a_continued_text_is_there(
    make: Callable[[], Decoder], prompt: list[int], new: list[int], text: str
) -> None:
    assert continued(make(), prompt, new) == text


@pytest.mark.parametrize(
    ("prompt", "new", "text"),
    [
        (RARE, [AND], " and"),
        (RARE * 5, RARE, "日本😀"),
        (RARE * 5 + RARE[:1], RARE[1:], "日本😀"),
        ([THE, *RARE[:2]], [RARE[2], AND], "日 and"),
        ([THE, *RARE[:1]], [AND], " and"),
    ],
)
def test_characters_of_several_tokens_at_the_border(
    prompt: list[int], new: list[int], text: str
) -> None:
    assert continued(llama(), prompt, new) == text


@pytest.mark.parametrize("make", [llama, metaspace, without_transformers])
@pytest.mark.parametrize("prompt", [[], [0], [THE, END_OF_TURN]])
def test_behind_a_control_token_a_text_begins_without_a_space(
    make: Callable[[], Decoder], prompt: list[int]
) -> None:
    assert continued(make(), prompt, [AND, CAT]) == "and cat"


USER = {"role": "user", "content": "a"}
BEGUN = {"role": "assistant", "content": "s"}
CALL: dict[str, object] = {**BEGUN, "tool_calls": [{}]}


@pytest.mark.parametrize(
    ("prompt", "options", "turn"),
    [
        ("text", None, False),
        ([THE], None, False),
        ([USER], None, True),
        ([USER, BEGUN], None, False),
        ([USER, BEGUN], {"continue_final_message": True}, False),
        ([USER, BEGUN], {"continue_final_message": False}, True),
        ([USER, {**BEGUN, "content": ""}], None, True),
        ([USER, CALL], None, True),
    ],
)
def test_which_texts_are_turns_of_their_own(
    prompt: Prompt, options: dict[str, object] | None, turn: bool
) -> None:
    assert begins_turn(prompt, options) == turn


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = byte_model("llama", vocab_size=len(PIECES), bos_token_id=0, eos_token_id=1)
    return LLM.from_model(model, llama())


LENGTH: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "seed": 3}
#: only words are drawn, so that texts have spaces to lose
BIASES = {PIECES.index(word): 60.0 for word in ("▁the", "▁cat", "▁and", "s", "a")}
LENGTH["logit_bias"] = BIASES
PROMPT = "the cat"


def whole_text(llm: LLM, prompt: str, token_ids: Sequence[int]) -> str:
    return llm.tokenizer.decode([*llm.encode(prompt), *token_ids])


def test_generate_stream_and_many_go_on_from_the_prompt(llm: LLM) -> None:
    result = llm.generate(PROMPT, **LENGTH)
    assert PROMPT + result.text == whole_text(llm, PROMPT, result.token_ids)
    assert result.text.startswith(" ")
    assert "".join(step.text for step in llm.stream(PROMPT, **LENGTH)) == result.text
    (other,) = llm.generate_many([PROMPT], **LENGTH)
    assert other.text == result.text
    assert llm.prefill(PROMPT).generate(**LENGTH).text == result.text


def test_characters_of_each_token_add_up_to_the_text(llm: LLM) -> None:
    steps = list(llm.stream(PROMPT, **LENGTH))
    assert sum(sum(step.chars) for step in steps) == sum(len(step.text) for step in steps)


@pytest.mark.parametrize("prompt", [PROMPT, [USER], [USER, BEGUN]])
@pytest.mark.parametrize("steps", [1, 7])
def test_a_resumed_run_has_the_text_of_an_uninterrupted_one(
    llm: LLM, prompt: Prompt, steps: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    uninterrupted = llm.generate(prompt, **LENGTH)
    with llm.stream(prompt, **LENGTH, run_dir=folder, strategy="autoregressive") as stream:
        for _ in range(steps):
            next(stream)
    assert tokenswift.resume(folder, llm=llm).text == uninterrupted.text
    assert (folder / "text.txt").read_text(encoding="utf-8") == uninterrupted.text


def test_a_turn_of_a_chat_begins_without_a_space_and_a_continued_one_with_it(llm: LLM) -> None:
    turn = llm.generate([USER], **LENGTH)
    assert turn.text == llm.tokenizer.decode(turn.token_ids)
    assert not turn.text.startswith(" ")
    assert llm.chat([USER], **LENGTH).text == turn.text
    more = llm.generate([USER, BEGUN], **LENGTH)
    ids = llm.encode([USER, BEGUN])
    tokenizer = llm.tokenizer
    assert tokenizer.decode(ids) + more.text == tokenizer.decode([*ids, *more.token_ids])
    assert llm.chat([USER, BEGUN], **LENGTH).text == more.text


def test_the_server_goes_on_from_the_prompt(llm: LLM) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "seed": 3}
    body["logit_bias"] = {str(token): bias for token, bias in BIASES.items()}
    server = Running(llm)
    try:
        text = server.post("/v1/completions", body).json()["choices"][0]["text"]
        lines = server.post("/v1/completions", {**body, "stream": True}).text.splitlines()
    finally:
        server.close()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert text == llm.generate(PROMPT, **LENGTH).text
    assert "".join(event["choices"][0]["text"] for event in events) == text
