"""Language models within models of text and pictures: the config and the weights of the text part,
which is all that runs here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenswift.files import MOST_CONFIG, object_in

#: model types whose config has a text model's as a part
WRAPPERS = ("mistral3", "qwen3_5", "qwen3_5_moe")
TEXT_CONFIG = "text_config"
#: beginnings of the names of a wrapper's weights, and what the text model's own files have there;
#: None: they are no part of it
BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "vision_tower.": None,
    "multi_modal_projector.": None,
    "model.vision_tower.": None,
    "model.visual.": None,
    "model.multi_modal_projector.": None,
}


def is_wrapper(config: Mapping[str, object]) -> bool:
    """Whether a config is one of a model of text and pictures whose text model may run here."""
    return config.get("model_type") in WRAPPERS and isinstance(config.get(TEXT_CONFIG), Mapping)


def wraps_text(name: str, folder: Path) -> bool:
    """Whether a model's folder is one of a wrapper.

    Args:
        name: the model's, for messages.
    """
    return is_wrapper(object_in(folder / "config.json", MOST_CONFIG, f"model {name}"))


def text_config(config: Mapping[str, object]) -> dict[str, object]:
    """The config of a wrapper's text model, with what only the outer one states of it."""
    inner = config[TEXT_CONFIG]
    outer = {
        name: config[name]
        for name in ("dtype", "torch_dtype", "tie_word_embeddings")
        if config.get(name) is not None
    }
    return {**outer, **(inner if isinstance(inner, Mapping) else {})}


def text_name(name: str) -> str | None:
    """A weight's name in the text model's own files; None: it is no part of it."""
    for beginning, ours in BEGINNINGS.items():
        if name.startswith(beginning):
            return None if ours is None else ours + name.removeprefix(beginning)
    return name


def has_head(names: Iterable[str]) -> bool:
    """Whether a wrapper's weights have an LM head of their own, which its config may not say."""
    return any(text_name(name) == "lm_head.weight" for name in names)
