"""What an answer may hold beside text, a thought and calls of tools: how it is bound and how it is read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenswift.chat.families import family_of, knows_tools
from tokenswift.chat.family import Family
from tokenswift.chat.messages import for_template
from tokenswift.chat.parser import Parser
from tokenswift.chat.plain import in_words
from tokenswift.chat.reply import Said, gathered
from tokenswift.chat.tools import Tool, Tools
from tokenswift.sampling.masks import faults, special_tokens

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True, slots=True)
class Calls:
    """Tools, how a model writes calls of them, and whether it thinks before.

    Attributes:
        tools: what may be called; None: nothing.
        family: the form.
        special: the vocabulary's special tokens.
        thought: of `thought.thought_of`.
    """

    tools: Tools | None
    family: Family
    special: tuple[str, ...] = ()
    thought: str = ""

    def parser(self) -> Parser:
        """A parser of one answer."""
        tools = self.tools
        if tools is None:
            return Parser(None, thought=self.thought)
        return Parser(self.family, [tool.name for tool in tools.known], tools.parallel, self.thought)

    def read(self, text: str) -> Said:
        """What a finished answer holds."""
        parser = self.parser()
        return gathered([*parser.push(text), *parser.finish()])

    def grammar(self, schema: str | None = None) -> str:
        """What an answer is held to that may call tools, in llguidance's form of Lark.

        Args:
            schema: JSON schema of an answer that calls nothing; None: any text.
        Raises:
            InputError: a tool's schema crashes llguidance, or takes it too long.
        """
        assert self.tools is not None
        wrong = faults([json.dumps(tool.bound) for tool in self.tools.known])
        known = [self._held(*each) for each in zip(self.tools.known, wrong, strict=True)]
        return self.family.grammar(replace(self.tools, known=tuple(known)), self.special, schema)

    def _held(self, tool: Tool, wrong: str) -> Tool:
        """A tool as its arguments can be held to it: to any object where its schema is more than that."""
        if not wrong:
            return tool
        logger.warning("the parameters of the tool %r are not enforced: %s", tool.name, wrong)
        return replace(tool, parameters={"type": "object"})


def calls_of(tools: Tools | None, tokenizer: Any, thought: str = "") -> Calls | None:
    """What an answer may hold beside text, in the form of a model; None: nothing."""
    if tools is None and not thought:
        return None
    return Calls(tools, family_of(tokenizer), tuple(special_tokens(tokenizer)), thought)


def conversation(
    messages: Sequence[Any], tools: Tools | None, tokenizer: Any, name: str = "messages"
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]] | None]:
    """Messages, and the tools beside them, as a model's template takes them.

    Args:
        messages: in the form of OpenAI's interface.
        name: of the argument.
    Raises:
        InputError: a message is none.
    """
    made = for_template(messages, family_of(tokenizer), name)
    if not knows_tools(tokenizer):
        return in_words(made, tools), None
    return made, None if tools is None else [*tools.forms]
