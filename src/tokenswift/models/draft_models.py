"""Draft models for a target: found by name or lent, checked, loaded once."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Lock
from typing import Any

from tokenswift.config import shown
from tokenswift.loader.default_model import DRAFT
from tokenswift.loader.load import load
from tokenswift.models.target import Target, check_model, make_target
from tokenswift.types import InputError


class DraftModels:
    """The draft models of one target.

    Args:
        target: the model that they draft for.
        tokenizer: its tokenizer, or None.
        is_default: whether it is the default model, for which a draft model is shipped.
    """

    def __init__(self, target: Target, tokenizer: Any, is_default: bool) -> None:
        self._target, self._tokenizer, self._is_default = target, tokenizer, is_default
        self._made: dict[str, Target] = {}
        self._lent: list[Any] = []
        self._lock = Lock()

    def name(self, wanted: Any) -> str:
        """The name of a draft model, for records."""
        return DRAFT if wanted is None else str(wanted) if _is_name(wanted) else type(wanted).__name__

    def get(self, wanted: Any) -> Target:
        """A draft model, loaded once.

        Args:
            wanted: alias, folder, hub id or a loaded transformers model; None takes the one that is
                shipped for the default model.
        Raises:
            InputError: there is none, it cannot be loaded, or its vocabulary is another one.
        """
        if wanted is None and not self._is_default:
            raise InputError(
                "draft_model is not given; valid: a causal LM with the target's tokenizer, such as a smaller "
                "one of its family"
            )
        named = wanted is None or _is_name(wanted)
        key = self.name(wanted) if named else f"object {id(wanted)}"
        with self._lock:
            if key not in self._made:
                self._made[key] = self._load(key) if named else self._take(wanted)
            return self._made[key]

    def _load(self, name: str) -> Target:
        dtype = str(self._target.dtype).removeprefix("torch.")
        try:
            loaded = load(name, dtype=dtype, device=str(self._target.device))
        except InputError as error:
            raise InputError(re.sub("^model", "draft_model", str(error))) from error
        return self._checked(self._made_of(loaded.model, name), loaded.tokenizer, name)

    def _take(self, model: Any) -> Target:
        try:
            check_model(model)
        except InputError as error:
            raise InputError(
                f"draft_model is {shown(model)}; valid: alias, folder, hub id or a loaded causal LM"
            ) from error
        target = self._target
        name = type(model).__name__
        made = self._checked(self._made_of(model, name), None, name)
        if (made.device, made.dtype) != (target.device, target.dtype):
            raise InputError(
                f"draft_model is {made.dtype} on {made.device}; valid: as the target, "
                f"{target.dtype} on {target.device}"
            )
        self._lent.append(model)  # while it lives, no other object has its id
        return made

    def _made_of(self, model: Any, name: str) -> Target:
        """A target over a draft model; what is wrong with it is said of the draft model of that name."""
        try:
            return make_target(model, backend=self._target.backend)
        except InputError as error:
            text = re.sub(rf"^model {re.escape(type(model).__name__)}", "", str(error))
            raise InputError(f"draft_model {name}{text}") from error

    def _checked(self, made: Target, tokenizer: Any, name: str) -> Target:
        mine, theirs = self._target.vocab_size, made.vocab_size
        vocabularies = [one.get_vocab() for one in (tokenizer, self._tokenizer) if one is not None]
        if mine != theirs and len(vocabularies) < 2:
            raise InputError(
                f"draft_model {name} has a vocabulary of {theirs} tokens, the target one of {mine}; "
                f"valid: a model with the target's tokenizer"
            )
        if len(vocabularies) == 2 and vocabularies[0] != vocabularies[1]:
            raise InputError(
                f"draft_model {name} has another vocabulary; valid: a model with the target's tokenizer"
            )
        if (unnamed := self._target.unnamed) is not None:
            made.unnamed = unnamed[unnamed < theirs]
        return made


def _is_name(wanted: Any) -> bool:
    return isinstance(wanted, str | Path)
