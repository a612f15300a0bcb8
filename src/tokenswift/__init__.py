"""tokenswift: ultra-long text from open language models by speculative decoding, provably the same
output.

Every name is loaded on its first use: an import of this package alone takes no time.
"""

from __future__ import annotations

import atexit as _atexit
import gc as _gc
import os as _os
import sys as _sys

from tokenswift.version import __version__ as __version__

if "torch" not in _sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & _os.environ.keys():
    # torch's threads spin for milliseconds when they have nothing to do, on cores that ours or
    # another program could use; its OpenMP runtime reads this once, when torch is loaded
    _os.environ["GOMP_SPINCOUNT"] = "1000"

# The collections of an interpreter that ends can read what msgspec's types have freed, and end the
# process by a signal after all is done (msgspec issue 717). Nothing that is alive then needs to be
# collected.
_atexit.register(_gc.freeze)

TYPE_CHECKING = False  # typing's own, without the import
if TYPE_CHECKING:
    from tokenswift.chat import Reply as Reply
    from tokenswift.chat import ToolCall as ToolCall
    from tokenswift.config.sampling import SamplingParams as SamplingParams
    from tokenswift.engine.llm import LLM as LLM
    from tokenswift.engine.request import Request as Request
    from tokenswift.engine.resume import resume as resume
    from tokenswift.engine.scheduler import Scheduler as Scheduler
    from tokenswift.engine.stream import Stream as Stream
    from tokenswift.engine.ticket import Ticket as Ticket
    from tokenswift.grammar import Grammar as Grammar
    from tokenswift.types import Generation as Generation
    from tokenswift.types import InputError as InputError
    from tokenswift.types import Logprob as Logprob
    from tokenswift.types import Loop as Loop
    from tokenswift.types import Metrics as Metrics
    from tokenswift.types import RunError as RunError
    from tokenswift.types import Step as Step

_MODULES = {
    "chat": "Reply ToolCall",
    "config.sampling": "SamplingParams",
    "engine.llm": "LLM",
    "engine.request": "Request",
    "engine.resume": "resume",
    "engine.scheduler": "Scheduler",
    "engine.stream": "Stream",
    "engine.ticket": "Ticket",
    "grammar": "Grammar",
    "types": "Generation InputError Logprob Loop Metrics RunError Step",
}


def __dir__() -> list[str]:
    return ["__version__", *" ".join(_MODULES.values()).split()]


def __getattr__(name: str) -> object:
    """Load a public name (PEP 562)."""
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names.split():
            value = getattr(import_module(f"tokenswift.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
