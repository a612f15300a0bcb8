"""What an answer may hold beside text, a thought and calls of tools: how it is bound and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenswift.chat.families import family_of, knows_tools
from tokenswift.chat.family import Family
from tokenswift.chat.messages import for_template
from tokenswift.chat.parser import Parser
from tokenswift.chat.plain import in_words
from tokenswift.chat.reply import Said, gathered
from tokenswift.chat.tools import Tools
from tokenswift.sampling.masks import special_tokens


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
        """
        assert self.tools is not None
        return self.family.grammar(self.tools, self.special, schema)


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
    made = for_template(messages, name)
    if not knows_tools(tokenizer):
        return in_words(made, tools), None
    return made, None if tools is None else [*tools.forms]
