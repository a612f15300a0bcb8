r"""How byte-level tokenizers of GGUF files cut a text before they merge: rules by the names that
``tokenizer.ggml.pre`` has for them.

A pattern's matches are pieces, and what is between them; the next pattern cuts each of these again.
The patterns are those that llama.cpp has, since files come with its names. Where it knows letters
beyond ASCII by their kind alone, as for "tekken", so do they: ``[\p{L}&&[^a-z]]`` are all letters
but the small ones of ASCII. `make peer` holds the ids against its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
#: of GPT-4 and those after it; contractions have the letters of all cases
_WORDS = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORD}|\p{{N}}%s|{SIGNS}|{BLANKS}"

#: the same, with marks of letters as parts of words
_MARKED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"
)

_UPPER = r"[\p{L}&&[^a-z]]"
_LOWER = r"[\p{L}&&[^A-Z]]"
#: words that end where a capital letter follows a small one
CAMEL = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)

#: letters that have two cases, as code points and ranges of them
CASED = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a
38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf
1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d
1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4
1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f
2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f
a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3
104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943
"""
#: of ASCII, with its letters, their full-width forms, quotation marks, and Chinese stops
PUNCTUATION = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3001-3002"
#: Chinese, Korean, and what lies between Arabic and Chinese
EASTERN = "4e00-9fa5 800-4e00 ac00-d7ff"


def _class_of(ranges: str) -> str:
    """The pattern of one character, which is no space, of some ranges in hexadecimal digits."""
    parts: list[str] = []
    for span in ranges.split():
        first, _, last = span.partition("-")
        parts.append(rf"\x{{{first}}}-\x{{{last or first}}}")
    return f"[{''.join(parts)}&&\\S]"


@dataclass(frozen=True)
class Rule:
    """How a text is cut, and what else goes with it.

    Attributes:
        patterns: one after the other; none: as GPT-2 does.
        digits: each is cut off before.
        ignores_merges: a piece that is a token becomes that one, whatever the merges say.
        adds_bos: texts begin with the token of the beginning where the file does not say.
        composes: letters and their marks become one character where there is one (NFC).
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        """The same as the tokenizers library has it."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        for pattern in self.patterns:
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
        usual = not self.patterns
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=usual))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Normalizer | None:
        """The same as the tokenizers library has it."""
        from tokenizers import normalizers

        return normalizers.NFC() if self.composes else None


RULES = {
    "gpt-2": Rule(),
    "smollm": Rule(digits=True),
    "llama-bpe": Rule((_WORDS % "{1,3}",), ignores_merges=True, adds_bos=True),
    "qwen2": Rule((_WORDS % "",), composes=True),
    "qwen35": Rule((_MARKED_WORDS,), composes=True),
    "dbrx": Rule((_WORDS % "{1,3}",)),
    "olmo": Rule(composes=True),
    "tekken": Rule((CAMEL % ("", "", ""),), ignores_merges=True, adds_bos=True),
    "gpt-4o": Rule((CAMEL % (f"{CONTRACTION}?", f"{CONTRACTION}?", "{1,3}"),)),
    "seed-coder": Rule((rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}",)),
    "deepseek-llm": Rule(
        (
            r"[\r\n]",
            rf"\s?{_class_of(CASED)}+",
            rf"\s?{_class_of(PUNCTUATION)}+",
            r"\s+\z",
            rf"{_class_of(EASTERN)}+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Rule(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{_class_of(EASTERN)}+", r"\p{N}")
    ),
    "viking": Rule(
        (r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+", r"\p{N}")
    ),
}
#: other names of them
SAME = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "lfm2": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "smaug-bpe": "dbrx",
    "command-r": "smollm",
    "refact": "smollm",
    "starcoder": "smollm",
    "minerva-7b": "smollm",
}


def rule_of(name: str | None) -> Rule | None:
    """The rule of a name; None: it is not known."""
    return RULES.get(SAME.get(name or "", name or ""))
