"""How families of models write calls of tools; which family it is, the chat template shows.

Every family writes the name of a tool and its arguments. They differ in what stands around the two,
in whether text may come before, and in how arguments are written (`call_arguments`).
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import dataclass

from tokenswift.loader.call_arguments import EXAMPLES, Form, spelled_arguments
from tokenswift.loader.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    START,
    speaks_harmony,
)

#: in `Family.head` and `Family.tail`: where the name of a tool stands, and where an id may
NAME = "NAME"
ID = "ID?"


@dataclass(frozen=True, slots=True)
class Family:
    """A family's form of calls.

    Calls are ``opening head arguments tail closing``. Several are separated by ``between``, each
    with ``opening`` and ``closing`` of its own, or all within one pair (``shared``).

    Attributes:
        title: how docs and messages call it.
        mark: what calls begin with, anywhere in an answer; "": calls begin an answer.
        opening: ``mark`` and what follows it before the first call.
        closing: what ends calls.
        head: what stands before the arguments, with `NAME` and, where there may be one, `ID`.
        tail: what stands behind them.
        between: what stands between two calls.
        shared: whether one ``opening`` and one ``closing`` are around all calls of an answer.
        arguments: how they are written.
        key: the key of the arguments where a call is a bare object.
        begins: a token that may stand before the first call of an answer, or "".
        id_opening, id_closing: what stands around an id.
        result_role: the role of results, where templates write any role; "": they have one of
            their own, or none.
        thinks, speaks: marks around a thought before an answer, and around an answer's text.
    """

    title: str
    mark: str = ""
    opening: str = ""
    closing: str = ""
    head: str = '{"name": "NAME", "arguments": '
    tail: str = "}"
    between: str = "\n"
    shared: bool = False
    arguments: Form = "json"
    key: str = "arguments"
    begins: str = ""
    id_opening: str = ""
    id_closing: str = ""
    result_role: str = ""
    thinks: tuple[str, str] | None = None
    speaks: tuple[str, str] | None = None

    def spelled(self, calls: Iterable[tuple[str, object]]) -> str:
        """Calls as an answer has them.

        Args:
            calls: names with arguments, an object or, where they are none, text.
        """
        written = [self._spelled(name, arguments) for name, arguments in calls]
        if self.shared:
            return f"{self.opening}{self.between.join(written)}{self.closing}"
        return self.between.join(f"{self.opening}{call}{self.closing}" for call in written)

    def _spelled(self, name: str, arguments: object) -> str:
        escaped = json.dumps(name, ensure_ascii=False)[1:-1]
        head = self.head.replace(ID, "").replace(NAME, escaped)
        text = spelled_arguments(arguments, self.arguments)
        return f"{head}{text}{self.tail.replace(ID, '')}"

    @property
    def example(self) -> str:
        """What a call looks like, for a prompt."""
        head = self.head.replace(ID, "").replace(f'"{NAME}"', NAME)
        arguments = EXAMPLES[self.arguments]
        return f"{self.opening}{head}{arguments}{self.tail.replace(ID, '')}{self.closing}"

    @property
    def passing(self) -> tuple[str, ...]:
        """Marks that may stand in an answer beside its text and calls."""
        return (*(self.thinks or ()), *(self.speaks or ()))


#: Hermes, Qwen 2.5 and 3, SmolLM3: each call in tags
HERMES = Family("hermes", mark="<tool_call>", opening="<tool_call>\n", closing="\n</tool_call>")
#: Llama 3.1, 3.2 and 3.3: a bare object with "parameters", perhaps behind ``<|python_tag|>``
LLAMA3 = Family(
    "llama3",
    head='{"name": "NAME", "parameters": ',
    between="; ",
    key="parameters",
    begins="<|python_tag|>",
)
#: Mistral up to its tokenizer v7, Ministral 8B: a list behind a mark; objects may have ids
MISTRAL = Family(
    "mistral",
    mark="[TOOL_CALLS]",
    opening="[TOOL_CALLS][",
    closing="]",
    tail="ID?}",
    between=", ",
    shared=True,
    id_opening=', "id": "',
    id_closing='"',
    thinks=("[THINK]", "[/THINK]"),
)
#: Mistral from its tokenizer v11 on: a mark, a name and arguments for each call
MISTRAL_ARGS = Family(
    "mistral-args",
    mark="[TOOL_CALLS]",
    opening="[TOOL_CALLS]",
    head="NAMEID?[ARGS]",
    tail="",
    between="",
    id_opening="[CALL_ID]",
    thinks=("[THINK]", "[/THINK]"),
)
#: Granite 3: a list behind a mark
GRANITE = Family(
    "granite",
    mark="<|tool_call|>",
    opening="<|tool_call|>[",
    closing="]",
    between=", ",
    shared=True,
    result_role="tool_response",
)
#: Command R7B: a list between marks; thoughts and answers have marks, too
COHERE = Family(
    "cohere",
    mark="<|START_ACTION|>",
    opening="<|START_ACTION|>[\n    ",
    closing="\n]<|END_ACTION|>",
    head='{ID?"tool_name": "NAME", "parameters": ',
    between=",\n    ",
    shared=True,
    key="parameters",
    id_opening='"tool_call_id": "',
    id_closing='", ',
    thinks=("<|START_THINKING|>", "<|END_THINKING|>"),
    speaks=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
#: DeepSeek R1 and models distilled from it: names, and arguments fenced as code
DEEPSEEK = Family(
    "deepseek",
    mark="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    shared=True,
)
#: Phi-4-mini: a list between marks
PHI = Family(
    "phi",
    mark="<|tool_call|>",
    opening="<|tool_call|>[",
    closing="]<|/tool_call|>",
    between=", ",
    shared=True,
    result_role="tool_response",
)
#: what stands behind the tools in its template
PHI_TOOLS_END = "<|/tool|>"
#: gpt-oss: a message of the channel "commentary" to a function (`chat.harmony`)
HARMONY = Family(
    "harmony",
    mark=CHANNEL,
    head=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}",
    tail="",
    between=f"{CALL}{START}assistant",
)
#: Qwen 3.5 and 3.6, Qwen3-Coder: each call in tags, each argument in tags of its own
XML = Family(
    "xml",
    mark="<tool_call>",
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    head="<function=NAME>\n",
    tail="</function>",
    arguments="xml",
)
#: LFM2: a list between marks, of calls as Python writes them
PYTHONIC = Family(
    "pythonic",
    mark="<|tool_call_start|>",
    opening="<|tool_call_start|>[",
    closing="]<|tool_call_end|>",
    head="NAME(",
    tail=")",
    between=", ",
    shared=True,
    arguments="python",
)
#: models of which nothing is known: an answer that is ``{"name": …, "arguments": {…}}``, a call a
#: line
PLAIN = Family("plain")
FAMILIES = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, GRANITE, COHERE, DEEPSEEK, PHI, PLAIN)


def family_of(template: str, marks: Container[str] = ()) -> Family:
    """The family whose form of calls a chat template speaks of; a plain one where it speaks of
    none.

    Args:
        marks: the special tokens of the vocabulary: LFM2's template may name none of its own.
    """
    if MISTRAL.mark in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if speaks_harmony(template):
        return HARMONY
    if PHI_TOOLS_END in template:
        return PHI
    for family in (COHERE, DEEPSEEK, GRANITE):
        if family.mark in template:
            return family
    if "tools" in template:
        if PYTHONIC.mark in template or PYTHONIC.mark in marks:
            return PYTHONIC
        if HERMES.mark in template:
            return XML if "<function=" in template else HERMES
        if "ipython" in template or LLAMA3.begins in template:
            return LLAMA3
    return PLAIN
