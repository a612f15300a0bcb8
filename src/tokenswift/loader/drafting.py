"""The layer of some checkpoints that drafts the token behind the next one (MTP, multi-token
prediction)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from tokenswift.loader.layout import NORM, Layout
from tokenswift.loader.tensors import Entry
from tokenswift.loader.weights import Weights

logger = logging.getLogger("tokenswift")
#: what the names of its weights begin with in checkpoints, and those of its decoder layer
BEGINNING = "mtp."
LAYER = "mtp.layers.0."
#: joins the normed embedding and the normed state, (D, 2 D); and the norms of these
JOIN = "mtp.fc.weight"
EMBEDDING_NORM = "mtp.pre_fc_norm_embedding.weight"
STATE_NORM = "mtp.pre_fc_norm_hidden.weight"
FINAL_NORM = "mtp.norm.weight"
#: what GGUF files call them, behind the number of the layer
GGUF_NAMES = {
    "nextn.eh_proj.weight": JOIN,
    "nextn.enorm.weight": EMBEDDING_NORM,
    "nextn.hnorm.weight": STATE_NORM,
    "nextn.shared_head_norm.weight": FINAL_NORM,
}
#: what the names of a model's first layer begin with
_FIRST = "model.layers.0."


def drafting_layout(layout: Layout) -> Layout:
    """The layout of a model that is its decoder layer alone, which attends to all tokens."""
    return replace(
        layout,
        num_hidden_layers=1,
        windows=(0,),
        ropes=(),
        mixture=None,
        dense_layers=(),
        recurrence=None,
        recurrent=(),
    )


def drafting_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Names and shapes of its weights; the layer's are those of a model's first."""
    hidden = layout.hidden_size
    shapes = {
        name: shape
        for name, shape in drafting_layout(layout).shapes().items()
        if name.startswith(_FIRST)
    }
    norms = dict.fromkeys((EMBEDDING_NORM, STATE_NORM, NORM), (hidden,))
    return {**shapes, JOIN: (hidden, 2 * hidden), **norms}


def drafting_weights(weights: Weights, entries: Mapping[str, Entry]) -> Weights | None:
    """The weights of the layer, by the names of a model's first layer; None where there is none,
    or another kind of it than runs here, of which a WARNING tells.

    Args:
        weights: the model's.
        entries: tensors of its files whose names begin with :data:`BEGINNING`.
    """
    if not entries:
        return None
    layout = weights.layout
    named: dict[str, Entry] = {}
    for name, entry in entries.items():
        ours = NORM if name == FINAL_NORM else name.replace(LAYER, _FIRST)
        named[ours] = entry
    shapes = {name: entry.shape for name, entry in named.items()}
    if layout.mixture is not None or shapes != drafting_shapes(layout):
        logger.warning(
            "the model brings a layer that drafts, of a kind that does not run here; it is left out"
        )
        return None
    return Weights(drafting_layout(layout), weights.dtype, named, weights.kind)
