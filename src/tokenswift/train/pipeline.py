"""From a model and a source of text to a heads file: collect, closed-form start, fine-tune, save.

Every stage leaves its outcome in the work folder, so the same command after a kill goes on where it
stopped: hidden states by whole batches, training by checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tokenswift.config import SamplingParams, check_choice, check_integer
from tokenswift.heads.checkpoint import HeadsBase, base_of, save_heads
from tokenswift.heads.modules import KINDS, Heads, HeadsConfig
from tokenswift.train.collect import Report, fill_from_model, fill_from_text
from tokenswift.train.data import check_amount, cut, encode, read_texts
from tokenswift.train.loss import Distillation, FrozenBase, rms_eps
from tokenswift.train.ridge import ridge_start
from tokenswift.train.selftext import Backbone
from tokenswift.train.store import HiddenStore, Windows
from tokenswift.types import InputError

#: frequent tokens that a heads file names as worth drafting (with the prompt's own; see docs/LOG.md)
DRAFT_VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What the heads learn from.

    Attributes:
        source: a text or JSONL file, a folder of them, "self" (the model writes from nothing), "pg19".
        continued: learn from passages of the source and the model's own continuations of them.
        tokens: limit of tokens to learn from (with ``continued``, or "self": that the model writes).
        block: longest text run through the model at once.
        prompt: tokens of each passage that the model continues.
        batch: texts run together.
        seed: of passages and sampling.
        sampling: how the model writes, and how the targets are processed.
    """

    source: str
    continued: bool = False
    tokens: int = 300_000
    block: int = 768
    prompt: int = 256
    batch: int = 48
    seed: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        check_integer("tokens", self.tokens, 256)
        check_integer("block", self.block, 32)
        check_integer("batch", self.batch, 1)
        if self.continued:
            if self.source == "self":
                raise InputError("--continued needs a --data file or folder; self writes from nothing")
            check_integer("prompt", self.prompt, 1, f"from 1 to block - 16 = {self.block - 16}")
            if self.prompt > self.block - 16:
                raise InputError(f"prompt is {self.prompt}; valid: from 1 to block - 16 = {self.block - 16}")


def end_tokens(model: Any, tokenizer: Any) -> int:
    """The token that a text from nothing starts with: BOS, else EOS, else 0."""
    for token in (
        getattr(tokenizer, "bos_token_id", None),
        model.config.bos_token_id,
        model.config.eos_token_id,
    ):
        if isinstance(token, int):
            return token
    return 0


def collect(
    model: Any, tokenizer: Any, options: DataOptions, store: HiddenStore, report: Report
) -> HiddenStore:
    """Fill the store unless it is complete already."""
    if store.complete:
        report(f"hidden states: {store.tokens_stored:,} tokens found in {store.folder}")
        return store
    documents = None
    if options.source != "self":
        room = options.tokens
        if options.continued:  # passages come from anywhere; of a whole corpus a part is enough
            room = 8 * options.tokens if options.source == "pg19" else 10**9
        documents = encode(read_texts(options.source), tokenizer, room)
        check_amount(sum(map(len, documents)), 256, options.source)
        largest = max(max(d) for d in documents)
        if largest >= model.config.vocab_size:
            raise InputError(
                f"the tokenizer gives token {largest}, the model's vocabulary has {model.config.vocab_size}"
            )
    backbone = Backbone(model)
    try:
        if documents is not None and not options.continued:
            blocks = cut(documents, options.block)
            check_amount(sum(map(len, blocks)), 256, options.source)
            fill_from_text(store, backbone, blocks, max(1, options.batch // 4), report)
        else:
            prompt = options.prompt if documents is not None else 1
            fill_from_model(
                store,
                backbone,
                documents,
                texts=max(1, options.tokens // (options.block - prompt)),
                prompt=prompt,
                block=options.block,
                batch=options.batch,
                sampling=options.sampling,
                seed=options.seed,
                start_token=end_tokens(model, tokenizer),
                report=report,
            )
    finally:
        backbone.close()
    return store


def frequent(store: HiddenStore, vocab_size: int, size: int) -> Int[Tensor, " S"]:
    """The ``size`` most frequent tokens of the store, ascending; 0 takes the whole vocabulary."""
    if size <= 0 or size >= vocab_size:
        return torch.arange(vocab_size)
    tokens, _ = store.arrays()
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for start in range(0, len(tokens), 1 << 22):
        piece = torch.from_numpy(tokens[start : start + (1 << 22)].astype("int64"))
        counts += torch.bincount(piece, minlength=vocab_size)
    order = counts * vocab_size + torch.arange(vocab_size, 0, -1) - 1  # ties: the smaller id
    return order.topk(size).indices.sort().values


def heads_config(kind: str, count: int, base: HeadsBase, inner: int | None, eps: float = 1e-5) -> HeadsConfig:
    """What the heads to train look like.

    Args:
        kind: "linear", "conditioned" or "medusa" (with the base model's own LM head).
        count: number of heads.
        base: the base model's sizes.
        inner: hidden layer (conditioned; None takes 1024, 0 none), or residual blocks per head
            (medusa; None takes 1).
        eps: ε of the norms.
    """
    check_choice("kind", kind, KINDS)
    if inner is None:
        inner = 1024 if kind == "conditioned" else 1
    if kind == "medusa":
        check_integer("inner", inner, 1, "at least 1 residual block for medusa heads")
    check_integer("inner", inner, 0, "at least 0 (0: no hidden layer)")
    width = 0 if kind == "linear" else inner
    return HeadsConfig(kind, count, base.hidden_size, base.vocab_size, width, eps=eps)


def gather(
    model: Any, tokenizer: Any, data: DataOptions, base: HeadsBase, work: Path, report: Report
) -> HiddenStore:
    """The work folder's store, filled by the first process while others wait."""
    sampling = data.sampling
    made_from = {
        "base": [base.vocab_size, base.hidden_size, round(float(base.sample.abs().sum()), 1)],
        "dtype": str(model.dtype),
        "data": [data.source, data.continued, data.tokens, data.block, data.prompt, data.batch, data.seed],
        "sampling": [sampling.temperature, sampling.min_p, sampling.repetition_penalty],
    }

    def store() -> HiddenStore:
        return HiddenStore(work / "states", base.hidden_size, made_from)

    return _shared(work, lambda: collect(model, tokenizer, data, store(), report)) or store()


def frozen_base(model: Any, subset: Int[Tensor, " S"]) -> FrozenBase:
    """The parts of a loaded model that the loss needs, where the model lies."""
    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return FrozenBase(embedding, lm_head, model.base_model.norm, subset)


def check_lesson(work: Path, lesson: dict[str, Any]) -> None:
    """Refuse a work folder whose checkpoints are of another training; ``lesson`` says what is trained."""
    path = work / "training.json"
    lesson = json.loads(json.dumps(lesson))
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = lesson
        if first_process():
            work.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(lesson) + "\n", encoding="utf-8")
    differing = [key for key in sorted({*known, *lesson}) if known.get(key) != lesson.get(key)]
    if differing:
        raise InputError(
            f"work folder {work} holds checkpoints of another training ({', '.join(differing)} differ); "
            "name another --work folder"
        )


def first_process() -> bool:
    """True in the process that writes the files (rank 0)."""
    return int(os.environ.get("RANK", "0")) == 0


def train_heads(
    model: Any,
    tokenizer: Any,
    data: DataOptions,
    training: Any,
    *,
    out: Path,
    work: Path,
    kind: str,
    count: int,
    inner: int | None,
    vocabulary: int,
    name: str,
    report: Report,
) -> dict[str, Any]:
    """The whole way; returns the notes that are also written to the file's header.

    Args:
        model, tokenizer: the loaded base; it stays as it is.
        data, training: :class:`DataOptions` and `trainer.TrainingOptions`.
        out: the heads file to write.
        work: folder for hidden states, checkpoints and the CSV log.
        kind, count, inner: which heads; see :func:`heads_config`.
        vocabulary: frequent tokens that the loss looks at; 0 for all.
        name: the base model's name, for the header.
        report: takes progress lines.
    """
    from tokenswift.train.trainer import train

    base = base_of(model, name)
    begun = time.monotonic()
    sampling = data.sampling
    config = heads_config(kind, count, base, inner, rms_eps(model.base_model.norm))
    store = gather(model, tokenizer, data, base, work, report)
    subset = frequent(store, base.vocab_size, vocabulary)
    check_lesson(work, {"heads": config.to_dict(), "vocabulary": len(subset)})
    frozen = frozen_base(model, subset)
    report(f"closed-form start of {count} {kind} heads")
    torch.manual_seed(training.seed)
    heads = Heads(config)
    ridge_start(heads, store, frozen.to("cpu"))
    frozen = frozen.to(model.device)
    lesson = Distillation(heads, frozen, sampling)
    notes: dict[str, Any] = {"data": Path(data.source).name, "continued": data.continued}
    notes |= {"tokens": store.tokens_stored, "kind": kind, "vocabulary": len(subset)}
    if training.epochs or training.steps:
        windows = Windows(store, count, 128, min(sampling.window, data.block))
        device = "cpu" if model.device.type == "cpu" else "cuda"
        notes |= train(lesson, windows, training, work, device, report)
    notes["minutes"] = round((time.monotonic() - begun) / 60, 1)
    heads.frequent = frequent(store, base.vocab_size, DRAFT_VOCABULARY)
    if first_process():
        save_heads(heads.eval(), out, base, notes=notes)
    return notes


def _shared(work: Path, make: Any) -> HiddenStore | None:
    """Run ``make`` in the first process; the others wait for its mark. Returns its result there."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return make()
    mark = work / f"ready-{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}"
    if first_process():
        with contextlib.suppress(OSError):
            mark.unlink()
        store = make()
        mark.touch()
        return store
    while not mark.exists():
        time.sleep(0.5)
    return None
