"""What it takes to build a set of draft heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from tokenswift.config.loading import HEAD_KINDS

_Size = Annotated[int, Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What it takes to build a set of heads. Files' are held to the bounds that the types name.

    Attributes:
        kind: "linear", "conditioned" or "medusa".
        count: number of heads; a shared step (conditioned) drafts any number of levels.
        hidden_size: D of the base model.
        vocab_size: V of the base model.
        inner: width of the hidden layer (conditioned); 0 for none.
        eps: ε of the norms.
    """

    kind: Annotated[str, Meta(pattern=f"^({'|'.join(HEAD_KINDS)})$")]
    count: Annotated[int, Meta(ge=1, le=64)]
    hidden_size: _Size
    vocab_size: _Size
    inner: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    eps: Annotated[float, Meta(ge=0, le=1)] = 1e-5
