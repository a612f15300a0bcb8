"""The tools of a request, each held to its schema where a grammar can hold it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tokenswift.chat import Tools, tools_of
from tokenswift.serve.refusals import log_text

logger = logging.getLogger("tokenswift")
#: tools of a request whose schemas may fail to compile: each failure may take a core for seconds
MOST_UNBOUND = 8
ANY_OBJECT = {"type": "object"}
#: types of tools that a client runs; the others are run by a server, and are left out
CLIENT_TYPES = (None, "function")


class GrammarCompiler(Protocol):
    """What compiles grammars for a model: `sampling.grammars.Grammars`."""

    def reason_not_held(self, schema: Mapping[str, object], /) -> str | None:
        """Why texts cannot be held to a JSON schema, in one line; None: they can be."""
        ...


@dataclass(frozen=True, slots=True)
class OfferedTools(Tools):
    """Tools of which some may be called with any JSON object.

    Attributes:
        unbound: names of those whose schema no grammar can hold.
    """

    unbound: frozenset[str] = frozenset()

    def bound(self, name: str) -> dict[str, object]:
        """The schema that the arguments of a call are held to."""
        return dict(ANY_OBJECT) if name in self.unbound else Tools.bound(self, name)


def offered_tools(
    tools: object, choice: object, parallel: object, unbound: frozenset[str]
) -> OfferedTools | None:
    """The functions among a request's tools; None where nothing can be called.

    Args:
        tools, choice, parallel: as for `chat.tools_of`.
        unbound: names of tools that any JSON object is an argument of.
    Raises:
        InputError: naming what is wrong with them.
    """
    functions = [
        _with_object(tool)
        for tool in (tools if isinstance(tools, list) else ())
        if not isinstance(tool, Mapping) or tool.get("type") in CLIENT_TYPES
    ]
    known = tools_of(functions, choice, parallel)
    if known is None:
        return None
    return OfferedTools(
        known=known.known, choice=known.choice, parallel=known.parallel, unbound=unbound
    )


def _with_object(tool: object) -> object:
    """A tool whose parameters are an object, where its schema is ``true``: anything at all."""
    if not isinstance(tool, Mapping):
        return tool
    inner = tool.get("function")
    if isinstance(inner, Mapping):
        return {**tool, "function": _with_object(inner)} if "parameters" in inner else tool
    return {**tool, "parameters": ANY_OBJECT} if tool.get("parameters") is True else tool


def unbound_tools(tools: OfferedTools, compiler: GrammarCompiler) -> frozenset[str]:
    """The tools whose schemas cannot be compiled, each tried alone; none where they are too many
    to be tried.

    Args:
        tools: whose common grammar cannot be compiled.
        compiler: of the model.
    """
    unbound: set[str] = set()
    for name in tools.callable:
        reason = compiler.reason_not_held(tools.bound(name))
        if reason is not None:
            unbound.add(name)
            logger.warning(
                "calls of the tool %s may hold any JSON object: the JSON schema cannot be compiled "
                "(%s)",
                name,
                log_text(reason, 300),
            )
        if len(unbound) > MOST_UNBOUND:
            return frozenset()
    return frozenset(unbound)
