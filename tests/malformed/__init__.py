"""Files that no honest program writes: GGUF, safetensors, config and tokenizer files, each wrong in one way.

:func:`corpus` yields them by name, made on the fly from tiny models. None may end the command in a signal or
a traceback, take more than 10 s, or more than 1 GB of memory.
"""

from tests.malformed.cases import Case, corpus

__all__ = ["Case", "corpus"]
