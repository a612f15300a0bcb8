"""From a model and a source of text to a heads file: collect, start, fine-tune, save.

Every stage leaves its outcome in the work folder, so the same command after a kill goes on where it
stopped: hidden states by whole batches, the start as a file, training by checkpoints.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import ConcatDataset

from tokenswift.config import SamplingParams, check_choice, check_integer
from tokenswift.files import replacing
from tokenswift.heads.checkpoint import save_heads
from tokenswift.heads.modules import KINDS, Heads, HeadsConfig
from tokenswift.identity import BaseIdentity, base_of
from tokenswift.models.generic import final_norm
from tokenswift.train.collect import Report, fill_from_model, fill_from_text
from tokenswift.train.data import blocks, check_amount, check_tokens, passages, prefix_of
from tokenswift.train.loss import Distillation, FrozenBase, frozen_base, rms_eps
from tokenswift.train.manifest import claim, states_part, training_part
from tokenswift.train.options import DataOptions, TrainingOptions
from tokenswift.train.processes import first_process, once
from tokenswift.train.ridge import ridge_start, zero_start
from tokenswift.train.selftext import Backbone
from tokenswift.train.store import HiddenStore, Windows, held_out
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


def stores_of(
    model: Any,
    tokenizer: Any,
    data: DataOptions | None,
    states: Sequence[Path],
    base: BaseIdentity,
    work: Path,
    report: Report,
) -> list[HiddenStore]:
    """The hidden states to learn from: of finished work folders, or of ``data``."""
    if states:
        return [finished_store(folder, model) for folder in states]
    if data is None:
        raise InputError("data is None; valid: DataOptions, or states")
    return [gather(model, tokenizer, data, base, work, report)]


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
    data: DataOptions | None,
    training: TrainingOptions,
    *,
    out: Path,
    work: Path,
    kind: str,
    count: int,
    inner: int | None,
    blocks: int = 1,
    vocabulary: int,
    name: str,
    report: Report,
    sampling: SamplingParams | None = None,
    states: Sequence[Path] = (),
    coverage: float = 0.92,
) -> dict[str, Any]:
    """The whole way; returns the notes that are also written to the file's header.

    Args:
        model, tokenizer: the loaded base; it stays as it is.
        data: where hidden states come from (None with ``states``).
        training: how to train.
        out: the heads file to write.
        work: folder for hidden states, checkpoints and the CSV log.
        kind, count, inner, blocks: which heads; see :func:`heads_config`.
        vocabulary: frequent tokens that the loss looks at; 0 for all.
        name: the base model's name, for the header.
        report: takes progress lines.
        sampling: the sampler whose distribution is learnt; None takes ``data``'s.
        states: finished work folders of train-heads whose states are used instead of ``data``.
        coverage: share of the training text that the tokens worth drafting make up.
    Raises:
        InputError: an option out of range, too little data, a work folder of another training.
        RunError: the loss is not finite, the disk is full.
    """
    from tokenswift.train.trainer import train

    if kind == "conditioned" and training.start == "zero":
        raise InputError("start is 'zero', which conditioned heads have not; valid: ridge")
    base = base_of(model, name)
    begun = time.monotonic()
    sampling = sampling or (data.sampling if data is not None else SamplingParams())
    config = heads_config(kind, count, base, inner, rms_eps(final_norm(model)), blocks)
    stores = stores_of(model, tokenizer, data, states, base, work, report)
    found = counts(stores, base.vocab_size)
    subset = frequent(found, vocabulary)
    claim(
        work,
        training_part(stores, training, sampling, heads=config.to_dict(), vocabulary=subset),
    )
    frozen = frozen_base(model, subset)
    heads = started(config, stores, frozen, training, work, report)
    objective = Distillation(heads, frozen, sampling, training.targets)
    notes: dict[str, Any] = {"data": Path(data.source).name, "continued": data.continued} if data else {}
    notes |= {"tokens": sum(s.tokens_stored for s in stores), "kind": kind, "vocabulary": len(subset)}
    if training.epochs or training.steps:
        context = sampling.window if training.targets == "model" else 0
        parts = [(store, held_out(store, training.held_out)) for store in stores]
        learnt, kept = (
            ConcatDataset([Windows(s, count, training.window, context, part[k]) for s, part in parts])
            for k in (0, 1)
        )
        notes |= train(objective, learnt, training, work, frozen.device, report, kept)
    notes["minutes"] = round((time.monotonic() - begun) / 60, 1)
    heads.frequent = covering(found, coverage)
    notes["drafted"] = len(heads.frequent)
    if first_process():
        save_heads(heads.eval(), out, base, notes=notes)
    return notes


def started(
    config: HeadsConfig,
    stores: list[HiddenStore],
    base: FrozenBase,
    training: TrainingOptions,
    work: Path,
    report: Report,
) -> Heads:
    """Heads at their start, on the base's device: made once, then read from the work folder."""
    path = work / "start.safetensors"

    def make() -> None:
        report(f"start of {config.count} {config.kind} heads: {training.start}")
        torch.manual_seed(training.seed)
        heads = Heads(config).to(base.device)
        if training.start == "zero":
            zero_start(heads, base)
        else:
            ridge_start(heads, stores, base)
        with replacing(path) as part:
            save_file({k: v.cpu().contiguous() for k, v in heads.state_dict().items()}, part)

    once(path.exists, make)
    heads = Heads(config)
    heads.load_state_dict(load_file(path))
    return heads.to(base.device)
