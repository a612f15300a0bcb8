"""The families that the native decoder runs, by the model type of their configs.

There is one decoder, and for each family what sets it apart, as data. To add one: describe it in
`dense_families`, `mixture_families` or `recurrent_families` and give it an entry here. What
describes it (`family.Family`) are the fields of its config and their defaults, as its configuration
class in transformers has them, and the switches that it needs. Numbers that a config may hold
(multipliers, caps, windows, layers without positions) are read by `layout.layout_of` where the
family's defaults name them. Where GGUF files of it exist, say what they call it (``gguf``) and its
numbers (``gguf_keys``), and whether they permute its rows (``gguf_permuted``). Then add it, tiny,
to tests/tiny.py: the tests hold it against transformers. What no switch expresses stays with
transformers.
"""

from __future__ import annotations

from tokenswift.loader.dense_families import (
    COHERE2,
    GEMMA2,
    GEMMA3,
    GRANITE,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from tokenswift.loader.family import Family
from tokenswift.loader.mixture_families import (
    GPT_OSS,
    GRANITE_MOE,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from tokenswift.loader.recurrent_families import LFM2, LFM2_MOE, QWEN35, QWEN35_MOE

#: by the model type of transformers' configs
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "ministral3": MINISTRAL3,
    "phi3": PHI3,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "cohere2": COHERE2,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "mixtral": MIXTRAL,
    "granitemoe": GRANITE_MOE,
    "gpt_oss": GPT_OSS,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": QWEN35_MOE,
}
