"""How often heads and an EAGLE-3 drafter for one model are right, depth by depth, at the same places.

python -m scripts.drafter_rates MODEL HEADS EAGLE TEXTS [--temperature T] [--greedy] [--context N] ...

HEADS is a heads file, EAGLE a drafter's folder or GGUF file, TEXTS a text or a folder of texts that neither
was trained on. The model goes on from passages of CONTEXT tokens, and its own tokens are the places looked
at. The measures are those of `benchmarks.head_rates`: match is how often the first candidate, ranked
with the model's own noise, is what the model chooses, and chain how often all up to this depth are. The
sampling is the paper's, with the seed 5. A last row for each drafter has the tokens of a step that drafts a
chain of two.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.head_rates import head_rates, own_text, rates_of
from tokenswift.config import SamplingParams
from tokenswift.loader.load import load
from tokenswift.loader.weights import unstored
from tokenswift.spec.eagle.files import EagleWeights, load_eagle
from tokenswift.spec.heads.files import load_heads
from tokenswift.train.data import passages, prefix_of
from tokenswift.train.eagle import EagleStudent
from tokenswift.train.loss import FrozenBase
from tokenswift.train.states import Backbone

SEED = 5


@torch.no_grad()
def eagle_rates(
    backbone: Backbone, weights: EagleWeights, depths: int, *places: Any
) -> list[dict[str, float]]:
    """The measures of the depths of an EAGLE-3 drafter, whose window is that of its training.

    Args:
        places: as of `head_rates`.
    """
    config = replace(weights.config, window=weights.config.default_window)
    found = {name: unstored(tensor, torch.float32) for name, tensor in weights.tensors.items()}
    ids = torch.arange(config.vocab) if weights.d2t is None else weights.d2t
    base, student = FrozenBase(backbone.model, ids), EagleStudent(config, found, depths)
    head = found.get("lm_head", base.rows[: len(ids)].float())

    def read(tokens: Tensor, hidden: Tensor) -> Tensor:
        return backbone.features(config.feature_layers, tokens[None])[0]

    def logits(i: int, rows: Tensor) -> Tensor:
        return torch.full((1, config.vocab), -torch.inf).index_copy(1, ids, rows @ head.T)

    return rates_of(backbone, student, base, read, logits, *places, tell=lambda done, total: None)


def main() -> None:
    """Print a row for each depth of each drafter, and for its chains of two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("model", "heads", "eagle", "texts"):
        parser.add_argument(name)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--greedy", action="store_true")
    for name, value in (("context", 1024), ("passages", 6), ("written", 128), ("places", 1000)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default {value})")
    args = parser.parse_args()
    sampling = SamplingParams(seed=SEED, temperature=args.temperature, greedy=args.greedy)
    loaded = load(args.model, dtype="float32", device="cpu")
    backbone = Backbone(loaded.model)
    lengths = [args.context] * args.passages
    read = passages(args.texts, loaded.tokenizer, lengths, prefix_of(loaded.tokenizer), SEED)
    texts = own_text(backbone, read, args.written, sampling, lambda done, total: None)
    heads, eagle = load_heads(args.heads, loaded.model), load_eagle(args.eagle, loaded.model.config)
    places = (texts, sampling, args.context, args.places)
    found = {
        "heads": head_rates(backbone, heads, *places),
        "eagle": eagle_rates(backbone, eagle, heads.count, *places),
    }
    for name, rows in found.items():
        for depth, row in enumerate(rows, 1):
            print(name, depth, *(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
        print(name, f"tokens a step {1 + sum(row['chain'] for row in rows[:2]):.3f}")


if __name__ == "__main__":
    main()
