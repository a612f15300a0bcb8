"""What an ``LLM`` holds: the target, and all that drafts for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch

from tokenswift.config.loading import LoadArguments, LoadConfig
from tokenswift.models.source import ModelIdentity, Source
from tokenswift.models.target import DraftModels
from tokenswift.sampling.grammars import Grammars
from tokenswift.speculation.calibration import Calibration
from tokenswift.speculation.control import Learnt
from tokenswift.speculation.costs import first_costs
from tokenswift.speculation.drafters.draft_model import ModelContext, ModelDrafter
from tokenswift.speculation.eagle.config import EagleWeights
from tokenswift.speculation.eagle.features import Features
from tokenswift.speculation.eagle.find import eagle_of, eagle_trained, own_drafter
from tokenswift.speculation.eagle.mtp import FeatureModel
from tokenswift.speculation.heads.find import is_default, resolve_heads, shipped_heads
from tokenswift.speculation.heads.modules import Heads
from tokenswift.types import InputError, OnProgress


class Resources:
    """The target and all that drafts for it. Draft models and packed heads are made at first use.
    Threads may share it.

    Args:
        source: what the target is made from.
        name: the model's name.
        heads, on_progress, eagle: see ``LLM``.
        how: the options of loading.
        loading: the arguments of ``LLM`` that load the model again; None: it came from a program.

    Attributes:
        target: the target model.
        heads: its draft heads, or None.
        eagle: its EAGLE-3 drafter, or the one that its own files bring; None: neither.
        draft_models: draft models by name, see `models.target`.
        grammars: compiled grammars.
        lock: guards what is made at first use.
        is_closed: whether the ``LLM`` was closed: no sequence may begin any more.
    Raises:
        InputError: heads or a drafter that do not fit the model, or options that it does not
            support.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        heads: str | Path | Heads | None,
        how: LoadConfig,
        on_progress: OnProgress | None = None,
        eagle: str | Path | EagleWeights | None = "auto",
        loading: LoadArguments | None = None,
    ) -> None:
        self.source = source
        self.name = name
        self.loading = loading
        self.is_closed = False
        self.heads = resolve_heads(heads, source.host)
        self._automatic = isinstance(heads, str) and heads == "auto"
        self._shipped: dict[str, Heads | None] = {}  # by kind, once asked for
        self._packed: dict[Heads, Heads] = {}
        self._learnt: dict[int, Learnt] = {}  # by number of threads
        self.lock = Lock()
        with ThreadPoolExecutor(1) as background:  # the tokenizer is made while weights are packed
            unnamed = background.submit(source.unnamed_rows)
            self.target = source.target(on_progress)
        self.target.compute_as(how, name)
        if rows := unnamed.result():
            self.target.padding = torch.tensor(rows, device=self.target.device)
        self.eagle: FeatureModel | None = None
        if isinstance(eagle, str) and eagle == "auto":
            if not self.take_trained():
                self.eagle = own_drafter(source.drafting, self.target)
        elif eagle is not None and eagle != "none":
            self.eagle = eagle_of(eagle, self.target)
        default = is_default(source.host)
        self.draft_models = DraftModels(self.target, source.tokenizer, is_default=default)
        self.grammars = Grammars(source.tokenizer, self.target.vocab_size, source.end_tokens)

    def take_trained(self) -> bool:
        """Have the newest drafter that was trained for the target, where there is one; whether
        there is. No sequence of the model may be under way."""
        trained = eagle_trained(self.source.host.base, self.target)
        if trained is not None:
            self.eagle = trained
        return trained is not None

    def check_open(self) -> None:
        """Refuse to begin anything after the ``LLM`` was closed.

        Raises:
            InputError: it was.
        """
        if self.is_closed:
            raise InputError("the LLM is closed; valid: one that was not closed")

    def identity(self) -> ModelIdentity:
        """The properties of the model that decide the tokens: dtype, config, weights, positions,
        tokenizer."""
        return {**self.source.identity, **self.target.identity()}

    def heads_of(self, kind: str) -> Heads | None:
        """Heads of this kind: those given, or shipped ones with ``heads="auto"``; else None."""
        if self.heads is not None and self.heads.kind == kind:
            return self.heads
        with self.lock:
            if self._automatic and kind not in self._shipped:
                self._shipped[kind] = shipped_heads(self.source.host, kind)
            return self._shipped.get(kind)

    def packed(self, heads: Heads) -> Heads:
        """Heads packed for the target's backend."""
        with self.lock:
            if heads not in self._packed:
                self._packed[heads] = heads.packed(self.target.backend, self.target.int8)
            return self._packed[heads]

    def small_model(
        self,
        name: object,
        option: tuple[str, object],
        *,
        size: int,
        sinks: int,
        longest: int,
        kv: str = "streaming",
    ) -> ModelDrafter:
        """A drafter with a draft model over a small cache.

        Args:
            name: the model, as `models.target.DraftModels` takes it.
            option: name and value of the option that sets the cache's size, for errors.
            size, sinks: tokens of the cache, and first tokens that it always holds.
            longest: tokens that it drafts in a step at most.
            kv: see `ModelContext`.
        Raises:
            InputError: the model cannot be had.
        """
        context = ModelContext(
            self.draft_models.get(name),
            self.target.vocab_size,
            kv,
            size,
            sinks,
            longest,
            frequent=None if self.heads is None else self.heads.frequent,
        )
        return ModelDrafter(context, self.target, option)

    def features(self) -> Features | None:
        """A store for the features of a sequence, for :attr:`eagle`; None without one."""
        return None if self.eagle is None else self.eagle.features()

    def learnt(self) -> Learnt:
        """What adaptive drafting has learnt on this model with this number of threads (see
        `control`)."""
        calibration = Calibration(None if self.heads is None else self.heads.calibration)
        first_cost = first_costs(self.target.bytes_read)
        learnt = Learnt(calibration, first_cost=first_cost)
        return self._learnt.setdefault(torch.get_num_threads(), learnt)
