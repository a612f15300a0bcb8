"""Llama 3: an answer that is ``{"name": …, "parameters": {…}}``, perhaps behind ``<|python_tag|>``."""

from __future__ import annotations

from tokenswift.chat.family import Family

LLAMA3 = Family("llama3", key="parameters", between="; ", begins="<|python_tag|>")
