"""Words that arguments take, as types: editors complete them, and checks take the valid ones from them. And
counts in words."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

#: how to draft; it never changes the tokens
Strategy: TypeAlias = Literal["auto", "autoregressive", "tokenswift", "medusa", "triforce", "magicdec"]

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KvCacheDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
#: what weights are stored as in memory: as their files hold them, as floats, or in a quantized format
Weights: TypeAlias = Literal["stored", "float32", "bfloat16", "q8_0", "q4_0", "q4_1"]
Activations: TypeAlias = Literal["float", "int8"]
#: kernel backend: the kernels of the device where they work, those of one kind of device, or torch
Backend: TypeAlias = Literal["auto", "cpu", "cuda", "torch"]
CudaGraphs: TypeAlias = Literal["auto", "off"]

#: kinds of draft heads; as ``heads`` each names the shipped ones of its kind
HeadKind: TypeAlias = Literal["linear", "conditioned", "medusa"]

OnLoop: TypeAlias = Literal["report", "stop"]

Cache: TypeAlias = Literal["full", "partial", "dynamic"]
Candidates: TypeAlias = Literal["coupled", "probability"]
Draft: TypeAlias = Literal["auto", "partial", "hidden"]
Vocabulary: TypeAlias = Literal["frequent", "full"]
Acceptance: TypeAlias = Literal["exact", "published"]
Kv: TypeAlias = Literal["snapkv", "streaming"]


def words(kind: Any) -> tuple[str, ...]:
    """The words of one of these types, in their order."""
    return get_args(kind)


def counted(number: int, word: str, several: str | None = None) -> str:
    """A count in words: ``1 token``, ``2,000 tokens``.

    Args:
        word: of one.
        several: of any other number; default: with an s.
    """
    return f"{number:,} {word if number == 1 else several or word + 's'}"
