"""Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, after text or not."""

from __future__ import annotations

from tokenswift.chat.family import Family

HERMES = Family("hermes", opening="<tool_call>\n", closing="\n</tool_call>")
