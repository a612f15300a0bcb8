"""The trained weights of a draft model as one small file, as the default model's lies in benchmarks/data.

python scripts/pack_draft.py FOLDER FILE

FOLDER is what `tokenswift train --kind draft` wrote.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenswift.files import line_of, replacing
from tokenswift.loader import default_model
from tokenswift.loader.default_model import RECORD
from tokenswift.types import InputError


def write(folder: Path, file: Path) -> None:
    """Write a small file with the trained weights of a draft model's folder, bfloat16.

    Args:
        folder: of `tokenswift train --kind draft`.
        file: the safetensors file; see `tokenswift.loader.load.packed_draft` for the way back.
    Raises:
        InputError: the folder is no draft model, or the file cannot be written.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", framework="pt") as source:
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
        header = {"version": 1, "target": record["target"], "notes": record["notes"]}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"{folder} is not a draft model of tokenswift train ({error})") from error
    header["config"] = {k: v for k, v in config.items() if not re.match("_|transformers_version", k)}
    weights = {n: t.bfloat16() for n, t in tensors.items() if not n.endswith(default_model.SHARED)}
    try:
        with replacing(file) as part:
            save_file(weights, part, metadata={default_model.METADATA_KEY: json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise InputError(f"pack {file} cannot be written: {line_of(error)}") from error


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
