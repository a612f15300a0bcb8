"""tokenswift: ultra-long text from open language models by speculative decoding, provably the same output.

Every name is loaded on its first use: an import of this package alone takes no time.
"""

from __future__ import annotations

import atexit as _atexit
import gc as _gc
import os as _os
import sys as _sys

from tokenswift.version import __version__

if "torch" not in _sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & _os.environ.keys():
    # torch's threads spin for milliseconds when they have nothing to do, on cores that ours or another
    # program could use; its OpenMP runtime reads this once, when torch is loaded
    _os.environ["GOMP_SPINCOUNT"] = "1000"

# The collections of an interpreter that ends can read what msgspec's types have freed, and end the process by
# a signal after all is done (msgspec issue 717). Nothing that is alive then needs to be collected.
_atexit.register(_gc.freeze)

TYPE_CHECKING = False  # typing's own, without the import
if TYPE_CHECKING:
    from tokenswift.chat.calls import Reply, ToolCall
    from tokenswift.config import (
        AutoOptions,
        MagicDecOptions,
        MedusaOptions,
        SamplingParams,
        TokenSwiftOptions,
        TriForceOptions,
    )
    from tokenswift.engine.journal import resume
    from tokenswift.engine.llm import LLM
    from tokenswift.engine.request import Request
    from tokenswift.engine.scheduler import Scheduler, Ticket
    from tokenswift.engine.sequence import Stream
    from tokenswift.grammar import Grammar
    from tokenswift.types import Generation, InputError, Logprob, Loop, Metrics, RunError, Step

__all__ = [
    "LLM",
    "AutoOptions",
    "Generation",
    "Grammar",
    "InputError",
    "Logprob",
    "Loop",
    "MagicDecOptions",
    "MedusaOptions",
    "Metrics",
    "Reply",
    "Request",
    "RunError",
    "SamplingParams",
    "Scheduler",
    "Step",
    "Stream",
    "Ticket",
    "TokenSwiftOptions",
    "ToolCall",
    "TriForceOptions",
    "__version__",
    "resume",
]
_MODULES = {
    "chat.calls": "Reply ToolCall",
    "config": "AutoOptions MagicDecOptions MedusaOptions SamplingParams TokenSwiftOptions TriForceOptions",
    "engine.journal": "resume",
    "engine.llm": "LLM",
    "engine.request": "Request",
    "engine.scheduler": "Scheduler Ticket",
    "engine.sequence": "Stream",
    "grammar": "Grammar",
    "types": "Generation InputError Logprob Loop Metrics RunError Step",
}


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> object:
    """Load a public name (PEP 562)."""
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names.split():
            value = getattr(import_module(f"tokenswift.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
