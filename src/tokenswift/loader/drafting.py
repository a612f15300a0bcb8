"""The layer of some checkpoints that drafts the token behind the next one (MTP, multi-token
prediction)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenswift.loader.layout import NORM, Layout
from tokenswift.loader.tensors import Entry

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
    """The layout of a model that is its decoder layer alone, which attends to all tokens, and has
    experts where the model's layers have."""
    return replace(
        layout,
        num_hidden_layers=1,
        windows=(0,),
        ropes=(),
        dense_layers=(),
        recurrence=None,
        recurrent=(),
    )


def drafting_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of such a layout; the layer's are those of a model's
    first."""
    hidden = layout.hidden_size
    shapes = {name: shape for name, shape in layout.shapes().items() if name.startswith(_FIRST)}
    norms = dict.fromkeys((EMBEDDING_NORM, STATE_NORM, NORM), (hidden,))
    return {**shapes, JOIN: (hidden, 2 * hidden), **norms}


def drafting_names(entries: Mapping[str, Entry], beginning: str = LAYER) -> dict[str, Entry]:
    """Tensors of the layer as those of a model's first.

    Args:
        beginning: of the names of those of its decoder layer.
    """
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        ours = NORM if name == FINAL_NORM else name
        if name.startswith(beginning):
            ours = _FIRST + name.removeprefix(beginning)
        renamed[ours] = entry
    return renamed
