"""EAGLE-3 drafters of random weights, and one for the scripted model that must be always right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests import eagles
from tests.speculation.drafters.scripted import CLASSES, HALF, NORMED, VOCAB, WIDTH
from tokenswift.speculation.eagle.config import EagleWeights

#: as wide as the models of `tests.tiny`
SIZES = replace(
    eagles.config(
        eagles.target(hidden_size=48, vocab_size=97), draft_vocab=97, feature_layers=(0, 1, 2)
    ),
    head_dim=12,
    intermediate=80,
    trained=512,
)
#: for the scripted model
SCRIPTED_SIZES = replace(
    SIZES,
    rope={"rope_type": "default", "rope_theta": 8.0},
    parts=frozenset({"qkv_bias"}),
    hidden=WIDTH,
    target_hidden=WIDTH,
    head_dim=WIDTH,
    vocab=VOCAB,
    draft_vocab=VOCAB,
    heads=1,
    kv_heads=1,
    intermediate=2,
    eps=1e-12,
    trained=2048,
)


def random_eagle(
    seed: int = 0,
    names: int | None = None,
    shared: bool = False,
    std: float = 0.2,
    **changes: object,
) -> EagleWeights:
    """A drafter of random weights.

    Args:
        names: tokens that it can name; None: all, by the target's ids.
        shared: whether it uses the target's embedding and LM head.
        std: of its weights.
        changes: fields of its config.
    """
    config = replace(SIZES, **changes)
    config = replace(config, draft_vocab=names or config.vocab)
    return eagles.weights(config, seed, shared, std)


def scripted_eagle(names: bool = False, **changes: Any) -> EagleWeights:
    """The drafter of the scripted model: from the feature of a token, whose class it takes, and the
    embedding of the next it makes the state that the model would have, and so its distribution.

    The feature is what leaves the last layer: (class, class before). Attention sees the row itself
    alone, and takes off the residual: (class of the embedding, class of the feature).

    Args:
        names: its tokens have numbers of their own.
        changes: fields of its config.
    """
    config = replace(SCRIPTED_SIZES, **changes)
    fc = torch.zeros(WIDTH, 3 * WIDTH)
    fc[:, 2 * WIDTH :] = torch.eye(WIDTH)
    q = torch.zeros(WIDTH, 2 * WIDTH)
    v = torch.zeros(WIDTH, 2 * WIDTH)
    o = torch.zeros(WIDTH, WIDTH)
    for c in range(CLASSES):
        newest = c  # of the embedding
        middle = CLASSES + c  # of the feature
        last = 2 * CLASSES + c  # of the one before
        v[newest, c] = WIDTH**-0.5
        v[middle, WIDTH + c] = 1 / NORMED
        v[last, WIDTH + HALF + c] = 1 / NORMED
        o[c, newest] = 1.0
        o[c, middle] = -1.0
        o[HALF + c, middle] = 1.0
        o[HALF + c, last] = -1.0
    bias = torch.cat([torch.ones(WIDTH // 2), torch.zeros(WIDTH // 2)])
    tensors = {
        "fc": fc,
        "q": q,
        "k": q,
        "v": v,
        "o": o,
        "q_bias": 60.0 * bias,
        "k_bias": bias,
        "v_bias": torch.zeros(WIDTH),
        "gate": torch.zeros(2, WIDTH),
        "up": torch.zeros(2, WIDTH),
        "down": torch.zeros(WIDTH, 2),
    }
    for name in ("input_norm", "hidden_norm", "post_norm", "norm"):
        tensors[name] = torch.ones(WIDTH)
    d2t = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)) if names else None
    return EagleWeights(config, tensors, d2t, "scripted")
