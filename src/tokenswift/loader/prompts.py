"""Prompts: text, token ids, or chat messages, as token ids.

Text gets the tokenizer's special tokens. A chat template writes its own, so what it wrote is
encoded without more: nothing begins with two tokens of the beginning.

Templates refuse, or leave out without a word, what they were not written for; what a template does
is seen by trials with marks (`abilities`, `fitting`).

Control tokens come from the template alone: what messages and tools say is encoded as text. A sign
that nobody can guess is put before each control token's text in what a client wrote, before the
template runs (:func:`set_apart`). Where such signs come out, the text is encoded by a copy of the
tokenizer that knows control tokens by other names alone (:func:`encoded`); a chat without them is
encoded as any text.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeAlias

from tokenswift.loader import control_tokens
from tokenswift.loader.abilities import Abilities, LimitReached
from tokenswift.loader.call_forms import family_of
from tokenswift.loader.find import refused_as
from tokenswift.loader.fitting import fitted
from tokenswift.loader.messages import Turns, checked
from tokenswift.sandbox import templates
from tokenswift.types import InputError, RunError, check_text, integer_of, shown

logger = logging.getLogger("tokenswift")

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
Options: TypeAlias = Mapping[str, Any] | None
Prompt: TypeAlias = str | Sequence[int] | Messages

#: what a template is given by others than its options
TAKEN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "chat_template")
TAKEN += ("tokenize",)
#: stands behind an assistant's message that is continued; and for one: no template writes it, or
#: changes it
END, PROBE = "31415926535897932384626", "31415926"
SECONDS, MEMORY = 2, 2**28  # processor time of a template, and bytes of address space
#: names under which reasoning is passed, the usual one first
REASONING = ("reasoning_content", "thinking", "reasoning")
VALID = (
    "text, a list of token ids, or a list of messages such as {'role': 'user', 'content': 'Hello'}"
)


def prompt_ids(
    prompt: Any,
    tokenizer: Any,
    vocab_size: int,
    name: str = "prompt",
    tools: Tools = None,
    options: Options = None,
) -> list[int]:
    """Token ids of a prompt of any kind.

    Args:
        prompt: text; token ids (a list, a tuple, a range, or an array or tensor of one dimension);
            or chat messages, which end where the model's answer begins, or goes on behind an
            assistant's message.
        tokenizer: of the model, or None.
        vocab_size: V; ids are below it.
        name: of the argument, for messages.
        tools: that a chat's template is given, in the form of OpenAI's interface.
        options: variables of the template, and ``continue_final_message``: whether the answer goes
            on behind an assistant's message at the end (default), or is a turn of its own.
    Raises:
        InputError: naming what is wrong with it and what is valid.
    """
    if isinstance(prompt, str):
        ids = text_ids(prompt, tokenizer, name)
    elif is_chat(prompt):
        ids = chat_ids(prompt, tokenizer, name, tools, options)
    else:
        ids = _checked(prompt, vocab_size, name)
    if not ids:
        raise InputError(f"{name} is empty; valid: at least one token")
    if (
        token := max(ids)
    ) >= vocab_size:  # a tokenizer may have added tokens that the model has no row for
        written = shown(str(tokenizer.convert_ids_to_tokens(token)))
        raise InputError(
            f"{name} holds {written}, whose token id is {token}; valid: tokens of the model, 0 to "
            f"{vocab_size - 1}"
        )
    return ids


def several_ids(
    prompts: Any, tokenizer: Any, vocab_size: int, options: Options = None
) -> list[list[int]]:
    """Token ids of each of several prompts; ``options`` as for `prompt_ids`.

    Raises:
        InputError: not several prompts, or naming which of them is wrong.
    """
    if not isinstance(prompts, list | tuple) or is_chat(prompts):
        raise InputError(f"prompts is {shown(prompts)}; valid: a list of prompts")
    named = ((f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts))
    return [
        prompt_ids(prompt, tokenizer, vocab_size, name, None, options) for name, prompt in named
    ]


def text_ids(text: str, tokenizer: Any, name: str = "prompt") -> list[int]:
    """Token ids of a text with the tokenizer's special tokens; where the text itself begins with
    the token of the beginning (``<s>``, say), it gets no second one."""
    if tokenizer is None:
        raise InputError(
            f"{name} is text, but the model came without a tokenizer; valid: token ids"
        )
    ids = _encoded(check_text(name, text), tokenizer, name)
    begin = getattr(tokenizer, "bos_token", None)
    if begin and text.startswith(begin):
        bare = _encoded(text, tokenizer, name, add_special_tokens=False)
        if ids[: len(bare) + 1] == [tokenizer.bos_token_id, *bare]:
            return ids[1:]
    return ids


def _encoded(text: str, tokenizer: Any, name: str, **options: Any) -> list[int]:
    """Token ids of a text; what a model's tokenizer trips over is bad input."""
    with refused_as(f"the model's tokenizer refuses {name}"):
        return list(tokenizer(text, **options)["input_ids"])


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is meant as chat messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def template_of(tokenizer: Any, tools: bool = False) -> Any:
    """The chat template of a tokenizer, of several the one for chats (with tools); None without."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        return (found.get("tool_use") if tools else None) or found.get("default")
    return found


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(template_of(tokenizer))


def chat_ids(
    messages: Any,
    tokenizer: Any,
    name: str = "prompt",
    tools: Tools = None,
    options: Options = None,
) -> list[int]:
    """Token ids of chat messages by the tokenizer's template; the arguments are those of
    `prompt_ids`.

    Raises:
        InputError: there is no template, a message is none, or the template refuses them.
    """
    template = template_of(tokenizer, tools=True)
    said = checked(messages, name, template if isinstance(template, str) else "")
    if not has_template(tokenizer):
        raise InputError(
            f"{name} is a list of messages, but the model has no chat template; valid: text"
        )
    made = "the text that the model's chat template makes"
    text, sign = _written(said, tokenizer, tools, check_template_options(options))
    encode = partial(_encoded, tokenizer=tokenizer, name=made, add_special_tokens=False)
    return encoded(check_text(made, text), tokenizer, encode, sign)


def check_template_options(options: Options) -> dict[str, Any]:
    """The options of a chat template.

    Raises:
        InputError: they are no variables of a template.
    """
    if not isinstance(options, Mapping | None):
        valid = "a dict of the template's variables, such as {'enable_thinking': False}"
        raise InputError(
            f"template_options is {shown(options)}; valid: {valid}", "template_options"
        )
    for name in options or ():
        if not isinstance(name, str) or not name.isidentifier() or name in TAKEN:
            valid = f"names of the template's variables, but for {', '.join(TAKEN)}"
            raise InputError(
                f"template_options holds {shown(name)}; valid: {valid}", "template_options"
            )
    return dict(options or {})


def _written(said: Turns, tokenizer: Any, tools: Tools, options: dict[str, Any]) -> tuple[str, str]:
    """The text of chat messages by the tokenizer's template, up to where the answer begins; and the
    sign of :func:`set_apart`."""
    wanted = options.pop("continue_final_message", None)
    if wanted is not False and len(said) > 1 and said[-1] == {"role": "assistant", "content": ""}:
        said.pop()  # the answer that is asked for
    calling = any(turn["role"] == "tool" or turn.get("tool_calls") for turn in said)
    template = _template_text(tokenizer, calling or tools is not None)
    abilities = abilities_of(template, tokenizer)
    signed, sign = set_apart({"messages": said, "tools": tools, "options": options}, tokenizer)
    how = (signed["tools"], signed["options"], abilities, family_of(template))
    fit = fitted(signed["messages"], *how)
    for warning in fit.warnings:
        _warn(warning, template)
    last = fit.turns[-1]
    continued = last["role"] == "assistant" and wanted is not False and not last.get("tool_calls")
    if wanted and not continued:
        given = (
            f"continue_final_message is {shown(wanted)}, and the last message the {last['role']}'s"
        )
        raise InputError(
            f"{given}; valid: with an assistant message at the end", "continue_final_message"
        )
    if not continued:
        return abilities.render(fit.turns, fit.variables), sign
    turns = [*fit.turns[:-1], {**last, "content": last["content"] + END}]
    variables = {**fit.variables, "add_generation_prompt": False}
    text, mark, _ = abilities.render(turns, variables).rpartition(END)
    if not mark:
        raise InputError("the model's chat template leaves out the assistant's message at the end")
    return text, sign


@lru_cache(64)
def _warn(warning: str, template: str) -> None:
    """Say what is wrong with a template, once."""
    logger.warning("%s", warning)


def _template_text(tokenizer: Any, tools: bool = False) -> str:
    """The chat template of a tokenizer.

    Args:
        tools: whether it is to write tools or calls.
    Raises:
        InputError: it is no text.
    """
    template = template_of(tokenizer, tools)
    if not isinstance(template, str):
        raise InputError(f"the model's chat template is {shown(template)}; valid: text")
    return template


def abilities_of(template: str, tokenizer: Any) -> Abilities:
    """What a template can write with the special tokens of a tokenizer."""
    return _abilities(template, json.dumps(tokenizer.special_tokens_map, default=str))


@lru_cache(8)
def _abilities(template: str, special: str) -> Abilities:
    named = json.loads(special)

    def render(turns: Turns, variables: Mapping[str, Any]) -> str:
        return rendered(template, turns, named, **variables)

    return Abilities(render)


def prepare() -> None:
    """Start what renders templates now, beside what else takes time; what is wrong the first chat
    says."""
    with suppress(RunError), templates.lock:
        templates.started()


def rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, Any],
    /,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """The text of chat messages, as transformers' ``apply_chat_template`` has it.

    Args:
        template: of the model.
        messages: each with a role, a content and whatever else JSON can hold.
        special: the tokenizer's special tokens by name.
        tools: as JSON has them.
        options: variables of the template; ``add_generation_prompt``: end where the answer begins
            (default).
    Raises:
        InputError: the template meets a limit, refuses the messages, or is none.
        RunError: no process can be started.
    """
    usual = {"documents": None, "add_generation_prompt": True}
    turns = [_usual(message) for message in messages]
    given = {**usual, **options, **special, "messages": turns, "tools": tools}
    try:
        answer = templates.ask("render", SECONDS, MEMORY, template, given)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"messages are not JSON ({error}); valid: texts, numbers, lists"
        ) from error
    if "error" in answer:
        reason = " ".join(answer["error"].split())
        raise InputError(f"the model's chat template refuses the messages ({reason[:160]})")
    if "limit" in answer:
        valid = f"up to {SECONDS} seconds of processor time and {MEMORY // 10**6} MB of memory"
        raise LimitReached(f"the model's chat template {answer['limit']}; valid: {valid}")
    return answer["made"]


def _usual(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it to templates: no empty fields, reasoning under the usual
    names."""
    made = {key: value for key, value in message.items() if value is not None}
    if message.get("tool_calls") and "content" in message:
        made["content"] = message["content"]  # None tells some templates that calls alone are said
    thought = next((made[key] for key in REASONING if key in made), None)
    return made if thought is None else {"thinking": thought, **made, REASONING[0]: thought}


def _checked(prompt: Any, vocab_size: int, name: str) -> list[int]:
    """Token ids as Python's own integers."""
    tolist = getattr(prompt, "tolist", None)  # numpy's arrays and torch's tensors
    values = prompt if tolist is None else tolist()
    if not isinstance(values, list | tuple | range):
        raise InputError(f"{name} is {shown(prompt)}; valid: {VALID}")
    ids: list[int] = []
    for value in values:
        token = integer_of(value)
        if token is None:
            raise InputError(f"{name} holds {shown(value)}; valid: {VALID}")
        if not 0 <= token < vocab_size:
            raise InputError(f"{name} token id is {token}; valid: 0 to {vocab_size - 1}")
        ids.append(token)
    return ids


def unnamed_rows(tokenizer: Any, rows: int) -> list[int]:
    """Rows of an embedding that no token of a tokenizer names, in order."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # a whole vocabulary takes longer
        return [row for row in range(rows) if backend.id_to_token(row) is None]
    vocabulary = getattr(tokenizer, "get_vocab", dict)()
    return sorted(set(range(rows)).difference(vocabulary.values())) if vocabulary else []


def turn_ends(tokenizer: Any) -> set[int]:
    """The control token that the chat template puts behind an assistant's message, whatever the
    files say."""
    if not has_template(tokenizer):
        return set()
    messages: Turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": PROBE},
    ]
    try:
        abilities = abilities_of(_template_text(tokenizer), tokenizer)
        text = abilities.render(messages, {"add_generation_prompt": False})
    except (InputError, RunError):  # a chat says what is wrong with it
        return set()
    behind = text.partition(PROBE)[2].lstrip()
    found = [name for name in _controls(tokenizer) if behind.startswith(name)]
    return {_controls(tokenizer)[max(found, key=len)]} if found else set()


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """End-of-text ids: those of a model's generation config, of its config and of the tokenizer."""
    return end_ids(getattr(model, "generation_config", None), model.config, tokenizer)


def end_ids(*sources: Any) -> set[int]:
    """The ids that end a text, of whatever names ``eos_token_id``."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(
            one for one in (ids if isinstance(ids, list | tuple) else [ids]) if type(one) is int
        )
    return found


PRIVATE = [
    chr(at) for at in range(0xE000, 0xF900)
]  # of the characters that Unicode leaves to everybody


def _secret() -> str:
    return "".join(secrets.choice(PRIVATE) for _ in range(6))


SECRET = _secret()  # stands before names of control tokens


def set_apart(given: Any, tokenizer: Any) -> tuple[Any, str]:
    """What a template is given, as JSON has it, with a sign before each control token, and that
    sign.

    Raises:
        InputError: there are too many levels.
    """
    sign, marks = _secret(), _controls(tokenizer)
    whole, longest = re.compile(f"(?={_any_of(marks)})"), max(map(len, marks), default=0)
    parts = {mark[:size] for mark in marks for size in range(1, len(mark))}

    def signed(text: str) -> str:
        """A control token that the end of the text may begin is signed, too."""
        at = {i for i in range(max(0, len(text) - longest), len(text)) if text[i:] in parts}
        at |= {found.start() for found in whole.finditer(text)}
        return "".join(sign * (i in at) + letter for i, letter in enumerate(text)) if at else text

    try:
        return (_mapped(given, signed) if marks else given), sign
    except RecursionError as error:
        raise InputError("messages are nested too deeply; valid: texts, numbers, lists") from error


def encoded(text: str, tokenizer: Any, encode: Callable[..., list[int]], sign: str) -> list[int]:
    """Token ids of what a template made of what :func:`set_apart` returned.

    Args:
        encode: encodes a text as the tokenizer does.
    Raises:
        InputError: a control token is to be text, and the tokenizer cannot write it so.
    """
    escaped = r"(\\{1,8})" + r"\1".join(f"u{ord(letter):04x}" for letter in sign)
    text = re.sub(
        escaped, sign, text
    )  # where a template writes JSON in ASCII, or JSON of such JSON
    controls = _controls(tokenizer)
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        apart = partial(_apart, tokenizer, sign)
        encode = control_tokens.without_forgeries(
            encode, controls, control_tokens.unknown_id(tokenizer, controls), apart
        )
    if sign not in text:
        return encode(text)
    marks, plain = _any_of(controls), text.replace(sign, "")
    own = re.compile(f"(?<!{sign})(?:{marks})")
    if own.findall(text) == re.findall(marks, plain):  # they only seemed to begin
        return encode(plain)
    return _apart(tokenizer, sign, text)


def _apart(tokenizer: control_tokens.Named, sign: str, text: str) -> list[int]:
    """Token ids of a text in which the names of control tokens alone are such, and those behind a
    sign text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        made, named = _renamed(backend)
        controls = _controls(tokenizer)
        own = re.compile(f"(?<!{sign})(?:{_any_of(controls)})")
        text = own.sub(lambda found: SECRET + found[0], text).replace(sign, "")
        ids: list[int] = made.encode(text, add_special_tokens=False).ids
        if set(ids).isdisjoint(
            {*named.values()} - {control_tokens.unknown_id(tokenizer, controls)}
        ):
            return [named.get(token, token) for token in ids]
    raise InputError(
        "a message holds a control token, which the model's tokenizer cannot write as text; "
        "valid: a "
        "message without it"
    )


@lru_cache(2)
def _renamed(backend: Any) -> tuple[Any, dict[Any, int]]:
    """A tokenizer to which control tokens are text, but for those with `SECRET` before their names;
    and the ids of these, with those that they stand for."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_str(backend.to_str())
    made.encode_special_tokens = True
    known = {
        at: token for at, token in backend.get_added_tokens_decoder().items() if _is_control(token)
    }
    made.add_special_tokens([token.content for token in known.values()])  # which some are not yet
    for token in known.values():
        how = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
        made.add_tokens([AddedToken(SECRET + token.content, normalized=False, **how)])
    return made, {made.token_to_id(SECRET + token.content): at for at, token in known.items()}


def _controls(tokenizer: Any) -> dict[str, int]:
    """The control tokens of a tokenizer, with their ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = getattr(tokenizer, "added_tokens_decoder", {})
    added = plain if backend is None else backend.get_added_tokens_decoder()
    return {token.content: at for at, token in added.items() if _is_control(token)}


def _is_control(token: Any) -> bool:
    """Whether a token beside a model is one; some files call ``<|im_start|>`` a word of the
    users'."""
    called = token.special or re.fullmatch(r"<[|｜].*[|｜]>", token.content)
    return bool(called) and not token.content.isspace()


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of any of some texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list | tuple) else value
