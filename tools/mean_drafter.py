"""The mean of two trained drafters' weights.

    python -m tools.mean_drafter MODEL BEFORE AFTER OUT [--weight 0.5]

AFTER was trained on from BEFORE (`tokenswift train --more`), on other kinds of text. The mean keeps
some of what was gained in the new kinds and gives back what was lost in the old ones (after
Wortsman et al. 2022, arXiv 2109.01903; `src/tokenswift/data/drafters/README.md` has an example).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tokenswift import LLM
from tokenswift.speculation.eagle.config import EagleWeights
from tokenswift.train.eagle import drafter_there, float_tensors, named_by, write_eagle
from tokenswift.types import InputError


def drafter(llm: LLM, file: Path) -> EagleWeights:
    """A drafter that was trained for this model.

    Raises:
        InputError: the file is none.
    """
    weights = drafter_there(file, llm)
    if weights is None:
        raise InputError(f"{file} holds no drafter of this model; valid: one by tokenswift train")
    return weights


def write_mean(llm: LLM, before: Path, after: Path, out: Path, weight: float = 0.5) -> None:
    """Write the mean of two drafters' weights.

    Args:
        weight: share of the second one, from 0 to 1.
    Raises:
        InputError: a weight out of range, a file that is no drafter of this model, or drafters of
            different shapes.
    """
    if not 0 <= weight <= 1:
        raise InputError(f"weight is {weight}; valid: from 0 to 1")
    first = drafter(llm, before)
    second = drafter(llm, after)
    named = named_by(first)
    if first.config != second.config or not torch.equal(named, named_by(second)):
        raise InputError(
            f"{before} and {after} differ in their sizes or in the tokens they name; valid: two "
            "drafters, of which the second was trained on from the first"
        )
    later = float_tensors(second)
    mean = {name: tensor.lerp(later[name], weight) for name, tensor in float_tensors(first).items()}
    base = llm.source.host.base.sample.tolist()
    write_eagle(out, first.config, mean, named, base, Path(llm.name).name)


def main() -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    for name in ("before", "after", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--weight", type=float, default=0.5, help="share of AFTER, from 0 to 1")
    options = parser.parse_args()
    try:
        llm = LLM(options.model, heads=None, eagle=None)
        write_mean(llm, options.before, options.after, options.out, options.weight)
    except InputError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
