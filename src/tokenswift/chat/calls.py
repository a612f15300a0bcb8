"""The tools of a conversation in the form of one model: what its template is given, what binds an answer."""

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
    """Tools, and how a model writes calls of them.

    Attributes:
        tools: what may be called.
        family: the form.
        special: the vocabulary's special tokens.
    """

    tools: Tools
    family: Family
    special: tuple[str, ...] = ()

    def parser(self) -> Parser:
        """A parser of one answer."""
        return Parser(self.family, [tool.name for tool in self.tools.known], self.tools.parallel)

    def read(self, text: str) -> Said:
        """What a finished answer holds."""
        parser = self.parser()
        return gathered([*parser.push(text), *parser.finish()])

    def grammar(self, schema: str | None = None) -> str:
        """What an answer is held to, in llguidance's form of Lark.

        Args:
            schema: JSON schema of an answer that calls nothing; None: any text.
        """
        return self.family.grammar(self.tools, self.special, schema)


def calls_of(tools: Tools | None, tokenizer: Any) -> Calls | None:
    """Tools in the form of a model; None where there are none."""
    if tools is None:
        return None
    return Calls(tools, family_of(tokenizer), tuple(special_tokens(tokenizer)))


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
