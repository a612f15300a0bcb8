"""Prompts: text, token ids, or chat messages, as token ids.

Text gets the tokenizer's special tokens. A chat template writes its own, so what it wrote is encoded without
more: nothing begins with two tokens of the beginning.

Templates refuse, or drop without a word, roles and orders that they were not written for; what a template
does is seen by a probe of the same roles (:func:`fitted`).

Control tokens come from the template alone: what messages and tools say is encoded as text. A character that
nobody uses is put before each control token's text in what a client wrote, before the template runs
(:func:`set_apart`). Where such signs come out, the text is encoded by a copy of the tokenizer in which
control tokens have other names (:func:`encoded`); a chat without them is encoded as any text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, TypeAlias

from tokenswift.config import integer_of
from tokenswift.loader.find import refused_as
from tokenswift.loader.template import rendered
from tokenswift.types import InputError, RunError, check_text, shown

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
Options: TypeAlias = Mapping[str, Any] | None
Turns: TypeAlias = list[dict[str, Any]]
Prompt: TypeAlias = str | Sequence[int] | Messages

#: what a template is given by others than its options
TAKEN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "chat_template")
TAKEN += ("tokenize",)
#: stands behind an assistant's message that is continued; and for one: no template writes it, or changes it
END, PROBE = "31415926535897932384626", "31415926"
VALID = "text, a list of token ids, or a list of messages such as {'role': 'user', 'content': 'Hello'}"


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
        prompt: text; token ids (a list, a tuple, a range, or an array or tensor of one dimension); or chat
            messages, which end where the model's answer begins, or goes on behind an assistant's message.
        tokenizer: of the model, or None.
        vocab_size: V; ids are below it.
        name: of the argument, for messages.
        tools: that a chat's template is given, in the form of OpenAI's interface.
        options: variables of the template, and ``continue_final_message``: whether the answer goes on behind
            an assistant's message at the end (default), or is a turn of its own.
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
    if (token := max(ids)) >= vocab_size:  # a tokenizer may have added tokens that the model has no row for
        written = shown(str(tokenizer.convert_ids_to_tokens(token)))
        raise InputError(
            f"{name} holds {written}, whose token id is {token}; valid: tokens of the model, 0 to "
            f"{vocab_size - 1}"
        )
    return ids


def several_ids(prompts: Any, tokenizer: Any, vocab_size: int, options: Options = None) -> list[list[int]]:
    """Token ids of each of several prompts; ``options`` as for `prompt_ids`.

    Raises:
        InputError: not several prompts, or naming which of them is wrong.
    """
    if not isinstance(prompts, list | tuple) or is_chat(prompts):
        raise InputError(f"prompts is {shown(prompts)}; valid: a list of prompts")
    named = ((f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts))
    return [prompt_ids(prompt, tokenizer, vocab_size, name, None, options) for name, prompt in named]


def text_ids(text: str, tokenizer: Any, name: str = "prompt") -> list[int]:
    """Token ids of a text with the tokenizer's special tokens; where the text itself begins with the token
    of the beginning (``<s>``, say), it gets no second one."""
    if tokenizer is None:
        raise InputError(f"{name} is text, but the model came without a tokenizer; valid: token ids")
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
    messages: Any, tokenizer: Any, name: str = "prompt", tools: Tools = None, options: Options = None
) -> list[int]:
    """Token ids of chat messages by the tokenizer's template; the arguments are those of `prompt_ids`.

    Raises:
        InputError: there is no template, a message is none, or the template refuses them.
    """
    said: Turns = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            valid = "a message such as {'role': 'user', 'content': 'Hello'}"
            raise InputError(f"{name}[{i}] is {shown(message)}; valid: {valid}")
        said.append({**message, "content": joined(message["content"])})
        for key in ("role", "content"):
            if not isinstance(said[i][key], str):
                raise InputError(f"{name}[{i}][{key!r}] is {shown(said[i][key])}; valid: text")
            check_text(f"{name}[{i}][{key!r}]", said[i][key])
    if not has_template(tokenizer):
        raise InputError(f"{name} is a list of messages, but the model has no chat template; valid: text")
    made = "the text that the model's chat template makes"
    text, sign = _written(said, tokenizer, tools, check_template_options(options))
    encode = partial(_encoded, tokenizer=tokenizer, name=made, add_special_tokens=False)
    return encoded(check_text(made, text), tokenizer, encode, sign)


def joined(content: Any) -> Any:
    """The text of a message's content: itself, or of parts such as ``{"type": "text", "text": "Hello"}``;
    anything else as it is."""
    if not isinstance(content, list | tuple) or not content:
        return content
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content


def check_template_options(options: Options) -> dict[str, Any]:
    """The options of a chat template.

    Raises:
        InputError: they are no variables of a template.
    """
    if not isinstance(options, Mapping | None):
        valid = "a dict of the template's variables, such as {'enable_thinking': False}"
        raise InputError(f"template_options is {shown(options)}; valid: {valid}", "template_options")
    for name in options or ():
        if not isinstance(name, str) or not name.isidentifier() or name in TAKEN:
            valid = f"names of the template's variables, but for {', '.join(TAKEN)}"
            raise InputError(f"template_options holds {shown(name)}; valid: {valid}", "template_options")
    return dict(options or {})


def _written(said: Turns, tokenizer: Any, tools: Tools, options: dict[str, Any]) -> tuple[str, str]:
    """The text of chat messages by the tokenizer's template, up to where the answer begins; and the
    sign of :func:`set_apart`."""
    wanted = options.pop("continue_final_message", None)
    more = {**options, **({} if tools is None else {"tools": list(tools)})}
    if wanted is not False and len(said) > 1 and said[-1] == {"role": "assistant", "content": ""}:
        said.pop()  # the answer that is asked for
    said = fitted(said, lambda turns: _templated(turns, tokenizer, more))
    last = said[-1]
    continued = last["role"] == "assistant" and wanted is not False and not last.get("tool_calls")
    if wanted and not continued:
        given = f"continue_final_message is {shown(wanted)}, and the last message the {last['role']}'s"
        raise InputError(f"{given}; valid: with an assistant message at the end", "continue_final_message")
    given, sign = set_apart({**more, "messages": said}, tokenizer, str(tokenizer.chat_template))
    turns: Turns = given.pop("messages")
    if not continued:
        return _templated(turns, tokenizer, given), sign
    turns[-1]["content"] += END
    text, mark, _ = _templated(turns, tokenizer, {**given, "add_generation_prompt": False}).rpartition(END)
    if not mark:
        raise InputError("the model's chat template leaves out the assistant's message at the end")
    return text, sign


def _templated(messages: Turns, tokenizer: Any, given: Mapping[str, Any]) -> str:
    """The text of chat messages by the tokenizer's template, or by its own method where it has one."""
    own = getattr(type(tokenizer), "apply_chat_template", None)
    if own is not None and getattr(own, "__module__", None) != "transformers.tokenization_utils_base":
        how = {"add_generation_prompt": True, **given}
        with refused_as("the model's tokenizer refuses the messages"):
            return tokenizer.apply_chat_template(messages, tokenize=False, **how)
    template = template_of(tokenizer, "tools" in given)
    if not isinstance(template, str):
        raise InputError(f"the model's chat template is {shown(template)}; valid: text")
    return rendered(template, messages, tokenizer.special_tokens_map, **given)


def _checked(prompt: Any, vocab_size: int, name: str) -> list[int]:
    """Token ids as Python's own integers."""
    tolist = getattr(prompt, "tolist", None)  # numpy's arrays and torch's tensors
    values = prompt if tolist is None else tolist()
    if not isinstance(values, list | tuple | range):
        raise InputError(f"{name} is {shown(prompt)}; valid: {VALID}")
    if values and isinstance(values[0], str | bytes | list | tuple):
        raise InputError(
            f"{name} is {shown(prompt)}; valid: {VALID} (of one prompt; generate_many takes several)"
        )
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
    """The control token that the chat template puts behind an assistant's message, whatever the files say."""
    if not has_template(tokenizer):
        return set()
    messages: Turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": PROBE}]
    try:
        text = _templated(messages, tokenizer, {"add_generation_prompt": False})
    except (InputError, RunError):  # a chat says what is wrong with it
        return set()
    found = first_control(text.partition(PROBE)[2].lstrip(), tokenizer)
    return set() if found is None else {found}


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """End-of-text ids: those of a model's generation config, of its config and of the tokenizer."""
    return end_ids(getattr(model, "generation_config", None), model.config, tokenizer)


def end_ids(*sources: Any) -> set[int]:
    """The ids that end a text, of whatever names ``eos_token_id``."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(one for one in (ids if isinstance(ids, list | tuple) else [ids]) if type(one) is int)
    return found


def fitted(messages: Sequence[Mapping[str, Any]], render: Callable[[Turns], str]) -> Turns:
    """Messages in the first form that the template writes whole: as they are; with one system message; also
    with neighbours of one role joined; also with the system message in the first user turn. As they are where
    it writes none of these.

    Args:
        messages: with the keys role and content, a text.
        render: gives the text that the template makes of messages.
    """
    given: Turns = [
        {**one, "role": "system" if one["role"] == "developer" else one["role"]} for one in messages
    ]
    systems = [one for one in given if one["role"] == "system"]
    rest = [one for one in given if one["role"] != "system"]
    first: Turns = [{**systems[0], "content": _text(systems)}] if systems else []
    forms = (
        given,
        [*first, *rest],
        _joined([*first, *rest]),
        _joined([*({**one, "role": "user"} for one in first), *rest]),
    )
    return next((form for form in forms if _are_written(form, render)), given)


def _are_written(messages: Turns, render: Callable[[Turns], str]) -> bool:
    """Whether a template writes what is said to the model in a conversation of these roles, and later system
    messages otherwise than somebody else's."""

    def tried(turns: Turns) -> str | None:
        try:
            return render(turns)
        except InputError:
            return None

    marks = [f"31415{i:05}92653" for i in range(len(messages))]
    probe = [{**one, "content": mark} for one, mark in zip(messages, marks, strict=True)]
    others: list[Turns] = []
    if any(one["role"] == "system" for one in probe[1:]):
        for role in ("user", "assistant"):
            later = ({**one, "role": role} if one["role"] == "system" else one for one in probe[1:])
            others.append([*probe[:1], *later])
    if (text := tried(probe)) is None:
        return False
    told = [one["content"] for one in probe if one["role"] != "assistant"]
    return all(mark in text for mark in told) and text not in map(tried, others)


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(one["content"] for one in messages if one["content"])


def _joined(messages: Turns) -> Turns:
    """Neighbours of one role as one message, but for calls and their results."""
    made: Turns = []
    for (role, calls), found in groupby(messages, lambda one: (one["role"], bool(one.get("tool_calls")))):
        group = list(found)
        alone = role == "tool" or calls
        made += group if alone else [{**group[0], "content": _text(group)}]
    return made


PRIVATE = [chr(at) for at in range(0xE000, 0xF900)]  # of the characters that Unicode leaves to everybody
#: stands before names of control tokens, and in no text, as nobody can guess it
SECRET = "".join(secrets.choice(PRIVATE) for _ in range(12))


def set_apart(given: Any, tokenizer: Any, template: str) -> tuple[Any, str]:
    """What a template is given, with a sign before each control token.

    Args:
        given: messages and tools, as JSON has them.
        template: which may use private characters itself.
    Returns:
        The same with signs, and the sign.
    Raises:
        InputError: there are too many levels.
    """
    try:
        used = json.dumps(_mapped(given, str), ensure_ascii=False, default=str, skipkeys=True) + template
    except (RecursionError, ValueError) as error:
        raise InputError("messages are nested too deeply; valid: texts, numbers, lists") from error
    used, marks = used.lower(), _marks(tokenizer)
    free = (one for one in PRIVATE if one not in used and json.dumps(one)[1:-1] not in used)
    if (sign := next(free, None)) is None:
        raise InputError("messages hold every character that Unicode leaves to everybody; valid: fewer")
    firsts = {mark[:1] for mark in marks}
    whole, longest = re.compile(f"(?={_any_of(marks)})"), max(map(len, marks), default=0)

    def signed(text: str) -> str:
        """A control token that the end of the text may begin is signed, too."""
        ends = range(max(0, len(text) - longest + 1), len(text))
        at = {i for i in ends if text[i] in firsts and any(mark.startswith(text[i:]) for mark in marks)}
        at |= {found.start() for found in whole.finditer(text)}
        return "".join(sign * (i in at) + letter for i, letter in enumerate(text)) if at else text

    return (_mapped(given, signed) if marks else given), sign


def encoded(text: str, tokenizer: Any, encode: Callable[..., list[int]], sign: str) -> list[int]:
    """Token ids of what a template made of what :func:`set_apart` returned.

    Args:
        encode: encodes a text as the tokenizer does.
    Raises:
        InputError: a control token is to be text, and the tokenizer is none of `tokenizers`.
    """
    text = text.replace(json.dumps(sign)[1:-1], sign)  # where a template writes JSON in ASCII
    if sign not in text:
        return encode(text)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            "a message holds a control token, which the model's tokenizer cannot write as text; valid: a "
            "message without it"
        )
    marks = _marks(tokenizer)
    own = re.compile(f"(?<!{sign})(?:{_any_of(marks)})")
    text = own.sub(lambda found: SECRET + found[0], text).replace(sign, "")
    return _renamed(backend, tuple(marks)).encode(text, add_special_tokens=False).ids


@lru_cache(2)
def _renamed(backend: Any, marks: Sequence[str]) -> Any:
    """A tokenizer whose control tokens have `SECRET` before their names: the names alone are text to it."""
    from tokenizers import Tokenizer

    named, said = {mark: SECRET + mark for mark in marks}, json.loads(backend.to_str())
    for token in said["added_tokens"]:
        token["content"] = named.get(token["content"], token["content"])
    model = said["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {named.get(name, name): at for name, at in model["vocab"].items()}
    else:
        model["vocab"] = [[named.get(name, name), score] for name, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & named.keys()]
    model["unk_token"] = named.get(model.get("unk_token"), model.get("unk_token"))
    return Tokenizer.from_str(json.dumps(said))


def first_control(text: str, tokenizer: Any) -> int | None:
    """The id of the control token that a text begins with; None: it begins with none."""
    found = [
        (len(t.content), at)
        for at, t in _added(tokenizer).items()
        if _controls(t) and text.startswith(t.content)
    ]
    return max(found)[1] if found else None


def _added(tokenizer: Any) -> dict[int, Any]:
    """Tokens beside a tokenizer's model, by id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.get_added_tokens_decoder()
    return getattr(tokenizer, "added_tokens_decoder", {})


def _controls(token: Any) -> bool:
    return token.special and not token.content.isspace()


def _marks(tokenizer: Any) -> list[str]:
    """The texts of the control tokens."""
    return [token.content for token in _added(tokenizer).values() if _controls(token)]


def _any_of(texts: Sequence[str]) -> str:
    """A pattern of any of some texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with its texts changed, but for names of roles."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _mapped(key, change): inner if _is_role(key, inner) else _mapped(inner, change)
            for key, inner in value.items()
        }
    return [_mapped(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def _is_role(key: object, value: object) -> bool:
    return key == "role" and isinstance(value, str) and value.isidentifier()
