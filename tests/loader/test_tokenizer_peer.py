"""Token ids of byte-level GGUF vocabularies, against those of llama.cpp.

Its package does not stand among the requirements, as it is compiled for minutes. `make peer`
installs it in an environment of its own and runs this file; elsewhere it is skipped.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.gguf_files import tokenizer_fields
from tokenswift.loader.cuts import RULES, SAME
from tokenswift.loader.gguf_tokenizer import Words, gguf_tokenizer, words_of

llama_cpp = pytest.importorskip("llama_cpp", reason="make peer installs llama-cpp-python")

TEXTS = 1000
UNREACHABLE = 500  # tokens that no merges lead to, which some rules take all the same
#: a few characters of every kind of script; letters with marks are written in parts
SCRIPTS = (
    "abcxyzABCXYZ",
    "the The THE iPhone HelloWorld HTTPServer",
    "äöüßÄÖÜéèÅñǅſ",
    "αβγΑΒΓάώ",
    "абвгдАБВГё",
    "աբգԱԲԳ",
    "აბგდ",
    "אבגדםش",
    "ابتثجحپ،؟",
    "अआकखगि्ाँ।",
    "কখগিা",
    "กขคงี่ๆ",
    "ກຂຄ",
    "ကခဂာ",
    "កខគា",
    "སྤྱན་",
    "ሀለሐመ",
    "ᎠᎡᎢꭰ",
    "漢字仮名交中文、。「」",
    "ひらがなカタカナー",
    "한국어조선말ㄱㄴ",
    "각",
    "e\u0301a\u0308n\u0303o\u0327",
    "ḀẀἀὈ",
    "𝐀𝐛𝔄𐐀𐐨",
)
SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~…—“”‘’«»¿¡€£¥±×÷§©®™→∑√∞♥☃。，！？（）"
DIGITS = "0123456789١٢٣४५६２３½²³Ⅳ①〇"
BLANKS = (
    "\u0020",
    "\u0020",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    "    ",
    "\u00a0",
    "\u3000",
    "\u2003",
)
CONTRACTIONS = ("'s", "'S", "'t", "'re", "'RE", "'ve", "'m", "'ll", "'LL", "'d", "'x", "’s")
EMOJI = ("😀", "👍🏽", "👩‍👩‍👧", "🇫🇷", "❤️", "1️⃣")


def texts(count: int, seed: int) -> Iterator[str]:
    """Mixtures of scripts, digits, spaces, signs, contractions and emoji."""
    draw = random.Random(seed)
    for _ in range(count):
        parts = [part_of(draw) for _ in range(draw.randint(1, 30))]
        yield "".join(parts)


def part_of(draw: random.Random) -> str:
    kind = draw.random()
    length = draw.randint(1, 6)
    if kind < 0.45:
        script = draw.choice(SCRIPTS)
        return "".join(draw.choice(script) for _ in range(length))
    if kind < 0.7:
        return "".join(draw.choice(BLANKS) for _ in range(draw.choice((1, 1, 1, 2, 3))))
    if kind < 0.8:
        return "".join(draw.choice(DIGITS) for _ in range(length))
    if kind < 0.9:
        return "".join(draw.choice(SIGNS) for _ in range(draw.choice((1, 1, 2, 4))))
    return draw.choice((*CONTRACTIONS, *EMOJI))


@pytest.fixture(scope="module")
def vocabulary() -> PreTrainedTokenizerFast:
    """Merges across every border that a rule may cut at."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        max_token_length=12,
    )
    backend.train_from_iterator(texts(6000, 1), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def write(path: Path, words: Words) -> None:
    """A GGUF file of a vocabulary alone."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(words.model or "")
    writer.add_tokenizer_pre(words.pre or "")
    writer.add_token_list(words.tokens or [])
    writer.add_token_types(words.token_type or [])
    writer.add_token_merges(words.merges or [])
    writer.add_bos_token_id(words.bos_token_id or 0)
    writer.add_eos_token_id(words.eos_token_id or 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("name", [*RULES, *SAME])
def test_ids_are_those_of_llama_cpp(
    name: str, vocabulary: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    fields = tokenizer_fields(vocabulary, pre=name)
    del fields["tokenizer.ggml.merges"][-UNREACHABLE:]
    path = tmp_path / "vocabulary.gguf"
    write(path, words_of(fields, path))
    peer = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokenizer = gguf_tokenizer(fields, path)
    composes = RULES[SAME.get(name, name)].composes
    wrong = []
    for text in texts(TEXTS, 2):
        if composes:  # as the models' own tokenizers do, which llama.cpp leaves out
            text = unicodedata.normalize("NFC", text)
        theirs = peer.tokenize(text.encode(), add_bos=True, special=False)
        if tokenizer(text)["input_ids"] != theirs:
            wrong.append(text)
    peer.close()
    assert wrong == []
