"""From a model and a source of text to a heads file: collect, start, fine-tune, save.

Every stage leaves its outcome in the work folder, so the same command after a kill goes on where it
stopped: hidden states by whole batches, the start as a file, training by checkpoints.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from tokenswift.config import check_choice, check_integer
from tokenswift.files import replacing
from tokenswift.loader.identity import BaseIdentity, base_of
from tokenswift.models.generic import final_norm
from tokenswift.spec.heads.checkpoint import save_heads
from tokenswift.spec.heads.modules import KINDS, Heads, HeadsConfig
from tokenswift.train.collect import Report, fill_from_model, fill_from_text
from tokenswift.train.data import blocks, check_amount, check_tokens, passages, prefix_of
from tokenswift.train.loss import Distillation, frozen_base, rms_eps
from tokenswift.train.manifest import claim, states_part, training_part
from tokenswift.train.options import DataOptions, Job
from tokenswift.train.processes import first_process, once
from tokenswift.train.ridge import ridge_start, zero_start
from tokenswift.train.selftext import Backbone
from tokenswift.train.store import Block, HiddenStore, Windows, held_out
from tokenswift.train.vocabulary import counts, covering, frequent
from tokenswift.types import InputError

LEAST = 256  # tokens of text that anything can be learnt from


def start_tokens(model: Any, tokenizer: Any) -> list[int]:
    """What a text from nothing starts with: the tokenizer's first tokens, else BOS, else EOS, else 0."""
    if prefix := prefix_of(tokenizer):
        return prefix
    own = getattr(tokenizer, "bos_token_id", None)
    for token in (own, model.config.bos_token_id, model.config.eos_token_id):
        if isinstance(token, int):
            return [token]
    return [0]


def collect(model: Any, tokenizer: Any, options: DataOptions, store: HiddenStore, report: Report) -> None:
    """Fill the store, or the rest of it."""
    prefix = prefix_of(tokenizer)
    backbone = Backbone(model)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if options.source != "self" and not options.continued:
        length = options.sequence_length
        made = _checked(blocks(options.source, tokenizer, options.tokens, length, prefix), vocab_size)
        first = []  # enough to learn from, before anything is written
        while sum(map(len, first)) < LEAST and (block := next(made, None)) is not None:
            first.append(block)
        if sum(map(len, first)) < LEAST:
            check_amount(options.source, tokenizer, LEAST)
        batch = max(1, options.write_batch // 4)
        fill_from_text(store, backbone, itertools.chain(first, made), batch, options.tokens, report)
    else:
        texts = max(1, options.tokens // options.new_tokens)
        if options.source == "self":
            starts = [start_tokens(model, tokenizer)] * texts
        else:
            lengths = [options.prompt[i * len(options.prompt) // texts] for i in range(texts)]
            starts = passages(options.source, tokenizer, lengths, prefix, options.seed)
        check_tokens(itertools.chain.from_iterable(starts), vocab_size)
        fill_from_model(store, backbone, starts, options, report)
    store.finish()


def _checked(made: Any, vocab_size: int) -> Any:
    for block in made:
        check_tokens(block, vocab_size)
        yield block


def gather(
    model: Any, tokenizer: Any, data: DataOptions, base: BaseIdentity, work: Path, report: Report
) -> HiddenStore:
    """The work folder's store, filled by the first process while others wait."""
    made_from = states_part(model, tokenizer, base, data)

    def store() -> HiddenStore:
        return HiddenStore(work / "states", base.hidden_size, made_from)

    once(lambda: store().complete, lambda: collect(model, tokenizer, data, store(), report))
    whole = store()
    report(f"hidden states: {whole.tokens_stored:,} tokens in {whole.folder}")
    return whole


def finished_store(folder: Path, model: Any) -> HiddenStore:
    """The whole store of a work folder of train-heads, whatever data and options it was made with.

    The first states are computed again, so that a store of another model is found out.
    """
    for place in (folder / "states", folder):
        try:
            made_from = json.loads((place / "index.json").read_text(encoding="utf-8"))["made_from"]
            break
        except (OSError, ValueError, KeyError):
            continue
    else:
        raise InputError(f"states {folder} holds no hidden states; valid: a work folder of train-heads")
    width, vocab_size = model.config.hidden_size, model.config.vocab_size
    other = InputError(f"states {folder} are of another model")
    if made_from.get("base", [])[:2] != [vocab_size, width]:
        raise other
    store = HiddenStore(place, width, made_from)
    if not store.complete or not store.blocks:
        raise InputError(f"states {folder} are not finished; run the command that makes them again")
    tokens, bits = store.arrays()
    size = min(32, store.blocks[0].length)
    mine = Backbone(model).hidden(torch.from_numpy(tokens[:size].astype(np.int64))[None].to(model.device))[0]
    kept = torch.from_numpy(np.array(bits[:size])).view(torch.bfloat16).float()
    if not float((mine.float().cpu() - kept).norm()) <= 0.1 * float(kept.norm()):
        raise other
    return store


class Pipeline:
    """What training heads and training a draft model have in common: states, the loss's tokens, the loop.

    Args:
        model, tokenizer: the loaded base; it stays as it is.
        job: what to learn from, how, and where.
        report: takes progress lines.
        more: what else the outcome depends on; a work folder of other values is refused.

    Attributes:
        base: the model's identity.
        stores: the hidden states, in order.
        counts: how often each token occurs in them.
        subset: the tokens that the loss looks at.
        frozen: the parts of the model that the loss needs.

    Raises:
        InputError: too little data, foreign states, a work folder of another training.
    """

    def __init__(self, model: Any, tokenizer: Any, job: Job, report: Report, **more: Any) -> None:
        self.job, self.report, self._begun = job, report, time.monotonic()
        self.base = base_of(model, job.name)
        if job.states:
            self.stores = [finished_store(folder, model) for folder in job.states]
        elif job.data is not None:
            self.stores = [gather(model, tokenizer, job.data, self.base, job.work, report)]
        else:
            raise InputError("data is None; valid: DataOptions, or states")
        self.counts = counts(self.stores, self.base.vocab_size)
        self.subset = frequent(self.counts, job.vocabulary)
        claim(job.work, training_part(self.stores, job.training, job.learnt, self.subset, **more))
        self.frozen = frozen_base(model, self.subset)

    def windows(self, cut: Callable[[HiddenStore, list[Block]], Dataset[Any]]) -> list[ConcatDataset[Any]]:
        """What ``cut`` makes of blocks of each store: items to learn from, and those held out."""
        parts = [(store, held_out(store, self.job.training.held_out)) for store in self.stores]
        return [ConcatDataset([cut(store, part[k]) for store, part in parts]) for k in (0, 1)]

    def train(self, objective: nn.Module, learnt: Any, kept: Any) -> dict[str, Any]:
        """Train as the job says, and the figures of it; none where it asks for the start alone."""
        from tokenswift.train.trainer import train

        job = self.job
        if not (job.training.epochs or job.training.steps):
            return {}
        return train(objective, learnt, job.training, job.work, self.frozen.device, self.report, kept)

    def notes(self) -> dict[str, Any]:
        """What was learnt from, for the outcome's header."""
        return {"tokens": sum(s.tokens_stored for s in self.stores), "vocabulary": len(self.subset)}

    @property
    def minutes(self) -> float:
        """Minutes since the beginning."""
        return round((time.monotonic() - self._begun) / 60, 1)


def heads_config(
    kind: str, count: int, base: BaseIdentity, inner: int | None, eps: float = 1e-5, blocks: int = 1
) -> HeadsConfig:
    """What the heads to train look like.

    Args:
        kind: "linear", "conditioned" or "medusa" (with the base model's own LM head).
        count: number of heads.
        base: the base model's sizes.
        inner: hidden layer (conditioned; None takes 1024, 0 none).
        eps: ε of the norms.
        blocks: residual blocks of each head (medusa).
    """
    check_choice("kind", kind, KINDS)
    inner = 1024 if inner is None else inner
    check_integer("inner", inner, 0, "at least 0 (0: no hidden layer)")
    check_integer("blocks", blocks, 1, "at least 1 residual block")
    width = inner if kind == "conditioned" else 0
    return HeadsConfig(kind, count, base.hidden_size, base.vocab_size, width, eps=eps, blocks=blocks)


def train_heads(
    model: Any,
    tokenizer: Any,
    job: Job,
    report: Report,
    *,
    kind: str,
    count: int,
    inner: int | None,
    blocks: int = 1,
    coverage: float = 0.92,
) -> dict[str, Any]:
    """The whole way; returns the notes that are also written to the file's header.

    Args:
        model, tokenizer, job, report: see :class:`Pipeline`.
        kind, count, inner, blocks: which heads; see :func:`heads_config`.
        coverage: share of the training text that the tokens worth drafting make up.
    Raises:
        InputError: an option out of range, too little data, a work folder of another training.
        RunError: the loss is not finite, the disk is full.
    """
    data, training = job.data, job.training
    if kind == "conditioned" and training.start == "zero":
        raise InputError("start is 'zero', which conditioned heads have not; valid: ridge")
    config = heads_config(kind, count, base_of(model), inner, rms_eps(final_norm(model)), blocks)
    line = Pipeline(model, tokenizer, job, report, heads=config.to_dict())
    heads = started(config, line)
    context = job.learnt.window if training.targets == "model" else 0
    learnt, kept = line.windows(lambda store, part: Windows(store, count, training.window, context, part))
    objective = Distillation(heads, line.frozen, job.learnt, training.targets)
    notes: dict[str, Any] = {"data": Path(data.source).name, "continued": data.continued} if data else {}
    notes |= {"kind": kind, **line.notes(), **line.train(objective, learnt, kept), "minutes": line.minutes}
    heads.frequent = covering(line.counts, coverage)
    notes["drafted"] = len(heads.frequent)
    if first_process():
        save_heads(heads.eval(), job.out, line.base, notes=notes)
    return notes


def started(config: HeadsConfig, line: Pipeline) -> Heads:
    """Heads at their start, on the base's device: made once, then read from the work folder."""
    training, frozen = line.job.training, line.frozen
    path = line.job.work / "start.safetensors"

    def make() -> None:
        line.report(f"start of {config.count} {config.kind} heads: {training.start}")
        torch.manual_seed(training.seed)
        heads = Heads(config).to(frozen.device)
        if training.start == "zero":
            zero_start(heads, frozen)
        else:
            ridge_start(heads, line.stores, frozen)
        with replacing(path) as part:
            save_file({k: v.cpu().contiguous() for k, v in heads.state_dict().items()}, part)

    once(path.exists, make)
    heads = Heads(config)
    heads.load_state_dict(load_file(path))
    return heads.to(frozen.device)
