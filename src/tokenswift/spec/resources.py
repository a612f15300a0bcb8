"""What strategies are made from: a model, and whatever can draft for it."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from tokenswift.config import LoadConfig
from tokenswift.loader.prompts import unnamed_rows
from tokenswift.models.draft_models import DraftModels
from tokenswift.models.target import Target
from tokenswift.sampling.masks import Grammars
from tokenswift.spec.control import Learnt
from tokenswift.spec.eagle.files import EagleWeights, trained_for
from tokenswift.spec.eagle.model import Features, eagle_of
from tokenswift.spec.heads.files import resolve_heads, shipped_heads, shipped_kinds
from tokenswift.spec.heads.modules import Heads
from tokenswift.types import OnProgress

logger = logging.getLogger("tokenswift")


class Resources:
    """A model and what can draft for it; drafts are loaded and quantized when first asked for.
    Threads may share it.

    Args:
        source: what the model is made from now (see `engine.source`).
        name: of the model.
        heads: as of ``LLM``.
        how: what is computed in.
        on_progress: as of ``LLM``.
        eagle: as of ``LLM``.

    Attributes:
        target: the model.
        heads: its draft heads, where it has some.
        eagle: its EAGLE-3 drafter, where it has one.
        draft_models: see `models.draft_models`.
        grammars: those that texts of the model were held to.
        lock: of what is made when first asked for.
    Raises:
        InputError: heads or a drafter that are none of this model, or it cannot be computed so.
    """

    target: Target

    def __init__(
        self,
        source: Any,
        name: str,
        heads: str | Path | Heads | None,
        how: LoadConfig,
        on_progress: OnProgress | None = None,
        eagle: str | Path | EagleWeights | None = "auto",
    ) -> None:
        self.source, self.name = source, name
        self.heads = resolve_heads(heads, source.host)
        self._automatic = isinstance(heads, str) and heads == "auto"
        self._shipped: dict[str, Heads | None] = {}  # those of them that were asked for
        self._packed: dict[Heads, Heads] = {}
        self._learnt: dict[int, Learnt] = {}  # by number of threads
        self.lock = Lock()
        self.target = source.target(on_progress)
        self.target.compute_as(how, name)
        self.target.leave_out(unnamed_rows(source.codec, self.target.vocab_size))
        if isinstance(eagle, str) and eagle in ("auto", "none"):
            eagle = trained_for(source.host.base) if eagle == "auto" else None
        self.eagle = None if eagle is None else eagle_of(eagle, self.target)
        is_default = bool(shipped_kinds(source.host))
        self.draft_models = DraftModels(self.target, source.codec, is_default=is_default)
        self.grammars = Grammars(source.codec, self.target.vocab_size, source.end_tokens)

    def identity(self) -> dict[str, Any]:
        """What of the model decides the tokens: dtype, config, weights, positions, tokenizer."""
        return self.source.identity() | self.target.identity()

    def heads_of(self, kind: str) -> Heads | None:
        """Heads of a kind for this model: those it was given, or, where they are automatic, shipped ones."""
        if self.heads is not None and self.heads.kind == kind:
            return self.heads
        with self.lock:
            if self._automatic and kind not in self._shipped:
                self._shipped[kind] = shipped_heads(self.source.host, kind)
            return self._shipped.get(kind)

    def packed(self, heads: Heads) -> Heads:
        """Heads as the model's kernels run them."""
        with self.lock:
            if heads not in self._packed:
                self._packed[heads] = heads.packed(self.target.backend, self.target.whole)
            return self._packed[heads]

    def features(self) -> Features | None:
        """What keeps a text's features for :attr:`eagle`; None where there is none."""
        return None if self.eagle is None else self.eagle.features()

    def frequent(self) -> Tensor | None:
        """Token ids that a draft model may draft besides the prompt's, as heads name them; None: all."""
        return None if self.heads is None else self.heads.frequent

    def learnt(self) -> Learnt:
        """What runs of this model with as many threads have learnt (see `spec.control`)."""
        return self._learnt.setdefault(torch.get_num_threads(), Learnt())
