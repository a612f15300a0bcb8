"""The strategies by name: the options of each, and how it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tokenswift.interfaces import Strategy
from tokenswift.memory import Planned
from tokenswift.method_options import OPTIONS
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.drafters.registry import others
from tokenswift.spec.heads.modules import Heads
from tokenswift.spec.methods.auto import Auto
from tokenswift.spec.methods.autoregressive import Autoregressive
from tokenswift.spec.methods.magicdec import MagicDec
from tokenswift.spec.methods.medusa import Medusa
from tokenswift.spec.methods.resources import Resources
from tokenswift.spec.methods.tokenswift import TokenSwift
from tokenswift.spec.methods.triforce import TriForce


class Planning(Strategy, Planned, Protocol):
    """A strategy that tells ahead of a run what memory it will hold, and afterwards what it did."""

    def report(self) -> dict[str, Any] | None:
        """Its account of the run: figures ready for JSON, with a ``summary`` in a sentence; None: it has
        none."""
        ...


class Entry(NamedTuple):
    """A strategy.

    Attributes:
        options: dataclass of its options.
        build: makes it from resources, options and the choice rule.
    """

    options: type
    build: Callable[[Resources, Any, Sampler], Planning]


_BUILDERS: tuple[Any, ...] = (Auto, Autoregressive, TokenSwift, Medusa, TriForce, MagicDec)
STRATEGIES: dict[str, Entry] = {build.name: Entry(OPTIONS[build.name], build) for build in _BUILDERS}


def drafts_from(llm: Resources, strategy: str, options: Any) -> tuple[Heads | None, str]:
    """The heads that a strategy has at hand, and what it may draft from, in the words of
    `types.Generation.draft_source`."""
    if strategy in ("auto", "tokenswift"):
        heads = llm.heads
        partial = options.draft != "hidden" and (options.draft == "partial" or options.cache != "full")
        parts = {"heads": heads is not None, "partial passes": partial, "text": options.ngrams != 0}
        if strategy == "auto":
            if options.draft_model is not None:
                parts[f"draft model {llm.draft_models.name(options.draft_model)}"] = True
            if llm.eagle is not None:
                parts[f"EAGLE-3 drafter {llm.eagle.name}"] = True
            parts |= dict.fromkeys((drafter.mark.title for drafter in others()), True)
        return heads, ", ".join(name for name, there in parts.items() if there) or "none"
    if strategy == "medusa":
        return llm.heads_of("medusa"), "heads"
    if strategy == "triforce" or (strategy == "magicdec" and options.draft_model is not None):
        return None, f"draft model {llm.draft_models.name(options.draft_model)}"
    return None, "partial passes" if strategy == "magicdec" else "none"
