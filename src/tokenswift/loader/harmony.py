"""The marks of Harmony, the form of gpt-oss's messages."""

from __future__ import annotations

from collections.abc import Container

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
#: a message ends, and another one of the same answer may follow
END = "<|end|>"
#: an answer ends, with a call or without
CALL = "<|call|>"
RETURN = "<|return|>"


def speaks_harmony(names: Container[str]) -> bool:
    """Whether a vocabulary has the marks of Harmony, or a template writes them."""
    return CHANNEL in names and MESSAGE in names
