"""A stand-in for a transformers tokenizer, without importing transformers: a second at every start.

It knows what generating needs: texts and ids in both directions, and chat templates that ask for nothing
unusual. :func:`describe` makes one beside the tokenizer and compares the two: what they do not do alike,
transformers does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenswift.types import InputError

FILE = "tokenizer.json"
#: what a template may ask for besides the special tokens
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception"}
#: words of a template for which transformers has rules of its own
OWN_RULES = ("tojson", "namespace", "dict", "generation %}", "generation -%}", "__", "strftime")
#: methods of a tokenizer class that the stand-in takes to be transformers' usual ones
USUAL = (
    "__call__",
    "_encode_plus",
    "encode",
    "decode",
    "_decode",
    "apply_chat_template",
    "get_chat_template",
)
#: chats that both must write alike, or refuse alike
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " <b>two\nlines</b> & 'q' \" "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": ""},
    ],
    [{"role": "assistant", "content": "b"}, {"role": "system", "content": "c"}],
    [{"role": "nobody", "content": "x"}],
)


class StandIn:
    """What `prompts` and `text` ask of a tokenizer, from ``tokenizer.json`` alone.

    Args:
        source: the model's folder, or its tokenizer as `tokenizers` has it.
        special: the special tokens by name (``bos_token``, …), as transformers reads them.
        template: the chat template, or None.
        real: gives the tokenizer that it stands for, for messages that are more than a role and a text.
    Raises:
        InputError: the file cannot be read, or says that texts are to be cut or filled.
    """

    def __init__(
        self, source: Any, special: dict[str, str], template: str | None, real: Callable[[], Any]
    ) -> None:
        self._tokenizer: Any = _read(source) if isinstance(source, Path) else source
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            raise InputError(f"tokenizer {source} cuts or fills texts; valid: one that does not")
        self.special_tokens_map, self.chat_template, self._real = special, template, real
        self.bos_token = special.get("bos_token")
        self.bos_token_id = None if self.bos_token is None else self._tokenizer.token_to_id(self.bos_token)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text, under "input_ids"."""
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self, tokens: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of some ids."""
        if clean_up_tokenization_spaces:
            raise ValueError("clean_up_tokenization_spaces is True; valid: False")
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The name of an id in the vocabulary."""
        return self._tokenizer.id_to_token(token)

    def get_vocab(self) -> dict[str, int]:
        """Tokens and their ids."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def to_str(self) -> str:
        """The tokenizer as its library writes it."""
        return self._tokenizer.to_str()

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool = False, add_generation_prompt: bool = True
    ) -> str:
        """The text of chat messages.

        Raises:
            Exception: whatever the template raises.
        """
        if any(message.keys() != {"role", "content"} for message in messages):
            real = self._real()
            return real.apply_chat_template(
                messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt
            )
        made = _environment().from_string(self.chat_template or "")
        return made.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map,
        )


def _read(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / FILE))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise InputError(f"tokenizer {folder / FILE} cannot be read ({error})") from error


def describe(tokenizer: Any, source: Any) -> dict[str, Any] | None:
    """What a :class:`StandIn` for a tokenizer of transformers is made from (``special`` and ``template``);
    None where it would do anything else than the tokenizer itself.

    Args:
        source: as of :class:`StandIn`.
    """
    from transformers import PreTrainedTokenizerFast

    usual: Any = PreTrainedTokenizerFast
    if not isinstance(tokenizer, usual) or (isinstance(source, Path) and not (source / FILE).is_file()):
        return None
    own = type(tokenizer).__mro__[: type(tokenizer).__mro__.index(usual)]
    if any(name in vars(kind) for kind in own for name in USUAL) or tokenizer.split_special_tokens:
        return None
    special, template = dict(tokenizer.special_tokens_map), tokenizer.chat_template
    if not (template is None or isinstance(template, str)) or not _is_plain(template, special):
        return None
    try:
        made = StandIn(source, special, template, lambda: tokenizer)
    except InputError:
        return None
    same = (
        made.to_str() == tokenizer.backend_tokenizer.to_str()
        and made.bos_token_id == tokenizer.bos_token_id
        and made.get_vocab() == tokenizer.get_vocab()
        and (template is None or all(_written(made, chat) == _written(tokenizer, chat) for chat in CHATS))
    )
    return {"special": special, "template": template} if same else None


def _is_plain(template: str | None, special: dict[str, str]) -> bool:
    """Whether a template asks for nothing but messages, special tokens and what jinja itself does."""
    if template is None:
        return True
    from jinja2 import TemplateSyntaxError, meta

    if any(word in template for word in OWN_RULES):
        return False
    try:
        asked = meta.find_undeclared_variables(_environment().parse(template))
    except TemplateSyntaxError:
        return False
    return asked <= GIVEN | special.keys()


def _environment() -> Any:
    """Where templates are rendered: a sandbox, without anything that a plain one does not ask for."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    made.globals.clear()
    made.globals["raise_exception"] = refuse
    return made


def _written(tokenizer: Any, chat: list[dict[str, str]]) -> tuple[str, str]:
    """What a tokenizer makes of a chat: its text, or what it says against it."""
    try:
        messages = [dict(message) for message in chat]
        return "text", tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever the template's own code raises
        return type(error).__name__, str(error)
