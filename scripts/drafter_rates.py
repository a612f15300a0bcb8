"""How often heads and an EAGLE-3 drafter for one model are right, depth by depth, at the same places.

python scripts/drafter_rates.py MODEL HEADS EAGLE TEXTS [PLACES]

HEADS is a heads file, EAGLE a drafter's folder or GGUF file, TEXTS a text or a folder of texts that neither
was trained on. The measures are those of `tokenswift eval-heads`: match is how often the first candidate,
ranked with the model's own noise, is what the model chooses. The sampling is the paper's, with the seed 5.
"""

from __future__ import annotations

import sys

from tokenswift.config import SamplingParams
from tokenswift.loader.load import load
from tokenswift.spec.eagle.checkpoint import load_eagle
from tokenswift.spec.heads.checkpoint import load_heads
from tokenswift.train.data import passages, prefix_of
from tokenswift.train.evaluate import eagle_rates, head_rates
from tokenswift.train.selftext import Backbone

SEED, TEXTS, LENGTH, FIRST = 5, 8, 384, 64  # passages, tokens of each, and the first place that counts


def main(model: str, heads: str, eagle: str, texts: str, places: str = "1000") -> None:
    """Print a row for each depth of each drafter."""
    loaded = load(model, dtype="float32", device="cpu")
    backbone, sampling, count = Backbone(loaded.model), SamplingParams(seed=SEED), int(places)
    read = passages(texts, loaded.tokenizer, [LENGTH] * TEXTS, prefix_of(loaded.tokenizer), SEED)
    made = load_heads(heads, loaded.model)
    weights = load_eagle(eagle, loaded.model.config)
    found = {
        "heads": head_rates(backbone, made, read, sampling, FIRST, count),
        "eagle": eagle_rates(backbone, weights, made.count, read, sampling, FIRST, count),
    }
    for name, rows in found.items():
        for depth, row in enumerate(rows, 1):
            print(name, depth, *(f"{key} {value:.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
