"""The marks by which a model fills in the middle of a text: between which of them it reads what
stands before and behind.

They are what a GGUF file numbers, or tokens of the names that families of models for code have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from tokenswift.tokenizer import Tokenizer, backend_of

#: what a GGUF file calls the tokens, behind ``tokenizer.ggml.`` and before ``_token_id``; the
#: second names are those of older files
GGUF_NAMES: dict[str, tuple[str, ...]] = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
}


@dataclass(frozen=True, slots=True)
class Marks:
    """Names of the tokens; "" where a model has none.

    Attributes:
        prefix: before the text that comes first.
        suffix: before the text that comes last.
        middle: behind both: what the model writes from here on stands between them.
        pad: fills up texts in training.
        repository: before the name of a repository.
        file: before each file of it.
    """

    prefix: str
    suffix: str
    middle: str
    pad: str = ""
    repository: str = ""
    file: str = ""

    @property
    def names(self) -> list[str]:
        """All that the model has."""
        return [name for name in astuple(self) if name]


#: by family; StarCoder's are those of Granite's models for code, too
FAMILIES = {
    "Qwen-Coder": Marks(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        pad="<|fim_pad|>",
        repository="<|repo_name|>",
        file="<|file_sep|>",
    ),
    "CodeGemma": Marks(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        file="<|file_separator|>",
    ),
    "StarCoder 2": Marks(
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        pad="<fim_pad>",
        repository="<repo_name>",
        file="<file_sep>",
    ),
    "StarCoder": Marks(
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        pad="<fim_pad>",
        repository="<reponame>",
    ),
    "SantaCoder": Marks(
        prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>", pad="<fim-pad>"
    ),
    "DeepSeek-Coder": Marks(
        prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>"
    ),
    "GLM": Marks(prefix="<|code_prefix|>", suffix="<|code_suffix|>", middle="<|code_middle|>"),
}


def marks_of(tokenizer: Tokenizer | None) -> Marks | None:
    """The marks of a model; None: it has none.

    Args:
        tokenizer: of the model. Its ``infill_names`` are what the model's file names, by the fields
            of `Marks`.
    """
    if tokenizer is None:
        return None
    named: Mapping[str, str] = getattr(tokenizer, "infill_names", {})
    if {"prefix", "suffix", "middle"} <= named.keys():
        return Marks(**named)
    best: Marks | None = None
    for marks in FAMILIES.values():
        known = _known(marks, tokenizer)
        if known is not None and (best is None or len(known.names) > len(best.names)):
            best = known
    return best


def _known(marks: Marks, tokenizer: Tokenizer) -> Marks | None:
    """A family's marks, as far as a tokenizer has them; None: one that is needed is missing."""
    names = [name if token_id(tokenizer, name) is not None else "" for name in astuple(marks)]
    return Marks(*names) if all(names[:3]) else None


def token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a token; None: there is none of the name."""
    backend = backend_of(tokenizer)
    if backend is not None:
        return backend.token_to_id(name) if name else None
    return tokenizer.get_vocab().get(name)
