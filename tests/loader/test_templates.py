"""Chat templates: the texts that transformers makes of them, and an end to those that do not
end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import tiny_tokenizer
from tokenswift.chat.prompts import prompt_ids
from tokenswift.loader.chat_template import rendered
from tokenswift.sandbox import templates
from tokenswift.types import InputError

ASK = [{"role": "user", "content": "What is 2 + 2?"}]
CALL: dict[str, object] = {
    "name": "add",
    "arguments": {"a": 2, "b": [1.5, None, True], "c": "é <&'\">"},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "turns": [
        {"role": "system", "content": "Be <b>brief</b>. "},
        {"role": "user", "content": " a\n\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "é 語 \U0001f600 {{ no }} {% no %}"},
    ],
    "calls": [
        *ASK,
        {
            "role": "assistant",
            "content": "",
            "reasoning": "adding",
            "tool_calls": [{"id": "abcdef123", "type": "function", "function": CALL}],
        },
        {
            "role": "tool",
            "content": "4",
            "name": "add",
            "tool_call_id": "abcdef123",
            "weight": None,
        },
    ],
}
TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <numbers> & 'more'",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}},
                "required": ["a"],
            },
        },
    }
]
#: what templates of the families that are run here ask of jinja and of transformers
TEMPLATES = {
    "everything": """
    {%- macro line(m, n=1) %}{{ n }}. {{ m.role|upper }}: {{ m.content|trim|replace('a', 'o') }}
{% endmacro %}
  {% set d = dict(a=1, b='x') %}{% set f = dict.fromkeys(['k'], 2) %}
{{- d.items()|list }} {{ f | tojson }}
  {% for m in messages %}
    {% if m.role == 'tool' %}{% continue %}{% endif %}
{{ line(m, loop.index) }}{% generation %}<g>{{ m.content }}</g>{% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
  {% endfor %}
{{ messages|map(attribute='role')|join(',') }} {{ '%s/%d' % ('a', 3) }} {{ "{:>5}".format(7) }}
{{ d | tojson(separators=(',', ':'), sort_keys=true) }} {{ 'é<' | tojson }}
{{ 'é' | tojson(ensure_ascii=true) }} {{ strftime_now("%Y, a year") }}
{%- for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}
{%- for m in messages if m.tool_calls %}
{{- m.tool_calls[0].function.arguments | tojson }}{% endfor %}
{{- '!' if add_generation_prompt }} {{ messages[-1].thinking }} {{ messages[1].reasoning_content }}
{{ unknown }}{{ unknown is defined }} {{ documents is none }} {{ messages[-1].content[1:3] }}
{% filter upper %}a{% endfilter %}{{ range(3)|list }} {{ bos_token|e }}
{% macro twice() %}{{ caller('x') }}{{ caller('y') }}{% endmacro %}
{%- call(x) twice() %}-{{ x }}{% endcall %}
""",
    "escape": "{{ ''.__class__.__mro__ }}{{ dict.__init__ }}{{ messages.append(1) }}",
    "unclosed": "{% for m in messages %}",
    "undefined": "{{ a.b.c }}",
    "empty": "{{ raise_exception('') }}",
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(name: str, chat: str) -> None:
    """What it refuses is refused in its words."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    for tools, ends in ((None, True), (TOOLS, False)):
        how = {"tools": tools, "add_generation_prompt": ends}
        if name == "everything":
            expected = tokenizer.apply_chat_template(CHATS[chat], tokenize=False, **how)
            assert (
                rendered(TEMPLATES[name], CHATS[chat], tokenizer.special_tokens_map, how)
                == expected
            )
            continue
        with pytest.raises(Exception) as theirs:  # whatever it raises
            tokenizer.apply_chat_template(CHATS[chat], tokenize=False, **how)
        with pytest.raises(InputError) as ours:
            rendered(TEMPLATES[name], CHATS[chat], tokenizer.special_tokens_map, how)
        assert " ".join(str(theirs.value).split())[:160] in str(ours.value)


def test_templates_that_are_none() -> None:
    tokenizer = tiny_tokenizer()
    for template, words in (
        ({"default": ["x"]}, r"is \['x'\]; valid: text"),
        (r"{{ '\ud800' }}", "lone surr"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(InputError, match=f"the model's chat template.*{words}"):
            prompt_ids(ASK, tokenizer, 260)


# ---- limits --------------------------------------------------------------------------------------

LONG = "writes too much text"
TOO_MUCH = "takes too much memory"
TOO_LONG = "takes too long"
DEEP = "recursion"
#: template → what is said of it: one for each limit, and one whose time goes into a single
#: operation
HOSTILE: dict[str, tuple[str, str]] = {
    "product": ("{{ 'a' * 10**10 }}", TOO_MUCH),
    "power": ("{{ 9**(9**9) }}", TOO_LONG),
    "writes": ("{{ 'a' * 10**7 }}", LONG),
    "loops": (
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "takes too",
    ),
    "macros": ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", DEEP),
    "blocks": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, DEEP),
    "error": ("{{ raise_exception('x ' * 10**6) }}", "refuses the messages (x x "),
}
DRIVER = """
import json, resource, sys
from tokenswift.loader.chat_template import rendered
from tokenswift.sandbox import templates
from tokenswift.types import InputError
asked = [{"role": "user", "content": "Hi"}]
said = []
for template in json.load(sys.stdin):
    try:
        said.append(rendered(template, asked, {}))
    except InputError as error:
        said.append(str(error))
    assert rendered("{{ messages[0].content }}", asked, {}) == "Hi"
    templates.close()
# not ru_maxrss: what the process was forked from is in that
with open("/proc/self/status") as file:
    own = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
print(json.dumps([said, own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


def test_templates_without_measure_end_in_a_line_each() -> None:
    """One after the other in one process, each rendered by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([template for template, _ in HOSTILE.values()]),
        capture_output=True,
        text=True,
        timeout=300,  # one hangs
    )
    assert done.returncode == 0, done.stderr
    lines, parent, child = json.loads(done.stdout)
    for (name, (_, words)), line in zip(HOSTILE.items(), lines, strict=True):
        assert line.startswith("the model's chat template "), (name, line)
        assert words in line, (name, line)
        assert "\n" not in line, name
        assert len(line) < 300, name
    assert max(parent, child) < 512 * 1024, "kilobytes at most"


def test_a_template_without_end_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever forms a conversation has."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HOSTILE["loops"][0]
    renders: list[str] = []
    ask = templates.ask

    def counting(what: str, *arguments: Any) -> Any:
        renders.append(what)
        return ask(what, *arguments)

    monkeypatch.setattr(templates, "ask", counting)
    with pytest.raises(InputError, match="the model's chat template takes too"):
        prompt_ids(CHATS["calls"], tokenizer, 260, tools=TOOLS)
    assert renders == ["render"]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_the_process_is_kept_and_replaced() -> None:
    def process() -> Any:
        assert rendered("{{ 1 }}", ASK, {}) == "1"
        return templates.running

    first = process()
    assert process() is first
    first.kill()
    first.wait()
    second = process()
    assert second is not first
    child = os.fork()
    if not child:  # a fork has one of its own
        code = 1
        try:
            code = int(process() is second)
            templates.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert process() is second
