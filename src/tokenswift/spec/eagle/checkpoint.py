"""EAGLE-3 checkpoints of the three forms that are published, read within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tokenswift.spec.eagle.config import EagleConfig


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A drafter's weights by canonical names.

    Attributes:
        config: of the drafter.
        tensors: ``fc`` (H, 3 Ht); ``input_norm`` (H) of embeddings and ``hidden_norm`` (H) of features;
            ``q`` (heads · d, 2 H), ``k`` and ``v`` (kv heads · d, 2 H), ``o`` (H, heads · d);
            ``post_norm`` (H); ``gate`` and ``up`` (I, H), ``down`` (H, I); ``norm`` (H). Those that not all
            have: ``embed`` (V, H) and ``lm_head`` (Vd, H), without which the target's are used (see
            `reference`); ``features_norm`` (3 Ht) with ``norm_before_fc``; ``fc_norm.0`` to ``fc_norm.2`` (Ht)
            with ``fc_norm``; ``q_norm`` and ``k_norm`` (d) with ``qk_norm``; biases ``q_bias`` and so on.
        d2t: ids of the target's tokens by those of the drafter's, (Vd,) int64, rising; None: they are the same.
        name: what the checkpoint was asked for by.
    """

    config: EagleConfig
    tensors: Mapping[str, Tensor]
    d2t: Tensor | None
    name: str


def load_eagle(path: Path, target: Any) -> EagleWeights:
    """A drafter's weights for a target.

    Args:
        path: a folder with config.json and safetensors files, or a GGUF file.
        target: the target's config (`loader.native.NativeConfig` or transformers').
    Raises:
        InputError: the files cannot be read, are none of an EAGLE-3 drafter, or do not fit the target.
    """
    raise NotImplementedError
