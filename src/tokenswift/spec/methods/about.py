"""What each strategy is, in a line each; light, for the list of strategies."""

from __future__ import annotations

from typing import NamedTuple


class About(NamedTuple):
    """A strategy in words.

    Attributes:
        summary, needs, paper: one line each.
    """

    summary: str
    needs: str
    paper: str


ABOUT: dict[str, About] = {
    "auto": About(
        "the default: every step drafts what pays, from whatever can draft here",
        "nothing; draft heads make it faster (shipped for the default model)",
        "none",
    ),
    "autoregressive": About(
        "plain decoding: one token a pass; the baseline of every ratio",
        "nothing",
        "none",
    ),
    "tokenswift": About(
        "the paper's method: draft heads over a dynamic partial KV cache, n-grams, a fixed tree",
        "draft heads (shipped for the default model); works without them, slower",
        "Wu et al. 2025, TokenSwift, arXiv 2502.18890",
    ),
    "medusa": About(
        "parallel residual-block heads on the last verified hidden state, tree over the full cache",
        "heads of kind medusa (in a checkout for the default model)",
        "Cai et al. 2024, Medusa, arXiv 2401.10774",
    ),
    "triforce": About(
        "a small model drafts for the target over retrieved chunks, which drafts for the full cache",
        "a draft model with the target's tokenizer (in a checkout for the default model)",
        "Sun et al. 2024, TriForce, arXiv 2404.11912",
    ),
    "magicdec": About(
        "a chain drafted over a sparse KV cache by the target itself, or by a small model",
        "nothing; a draft model for the standalone form",
        "Chen et al. 2024, MagicDec, arXiv 2408.11049",
    ),
}
