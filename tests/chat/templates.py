"""Chat templates of the shapes that families of models have, written for these tests.

Each has what sets its family apart: what it refuses, what it leaves out without a word, and where
it looks for tools, calls and results.
"""

from __future__ import annotations

#: tools in the first question, one call a message, results of the role "ipython"
LLAMA = """{% if messages[0].role == 'system' %}{{ '<sys>' + messages[0].content | trim }}
{%- set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}
{%- if tools is not none %}{% if not turns %}{{ raise_exception('tools need a question') }}
{%- endif %}{{ '<user>' }}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
{{- turns[0].content + '<eot>' }}{% set turns = turns[1:] %}{% endif %}
{%- for m in turns %}{% if m.role == 'ipython' or m.role == 'tool' %}
{{- '<ipython>' + m.content | tojson + '<eot>' }}{% elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{{- '<assistant>{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}<eot>' }}{% else %}
{{- '<' + m.role + '>' + m.content | trim + '<eot>' }}{% endif %}{% endfor %}{{ '<assistant>' }}"""

#: tools in the system message, calls in tags behind text, results in a user's turn
QWEN = """{% if tools %}{{ '<sys>' }}{% if messages[0].role == 'system' %}
{{- messages[0].content }}{% endif %}{% for tool in tools %}{{ '\\n' + tool | tojson }}
{%- endfor %}{{ '<end>' }}
{%- elif messages[0].role == 'system' %}{{ '<sys>' + messages[0].content + '<end>' }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<' + m.role + '>' + m.content + '<end>' }}{% elif m.role == 'assistant' %}
{{- '<assistant>' + (m.content or '') }}{% for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}{{ '<end>' }}
{%- elif m.role == 'tool' %}{{ '<user><tool_response>' + m.content + '</tool_response><end>' }}
{%- endif %}{% endfor %}{{ '<assistant>' }}"""

#: the same; thoughts of earlier turns are left out
QWEN3 = QWEN.replace("(m.content or '')", "(m.content or '').split('</think>')[-1]")

#: the same with arguments in tags, which have to be an object; the system message comes first or
#: never; somebody has to ask; thoughts since the last question stay; a thought begins the answer
QWEN35 = """{% macro value(v) %}{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}
{%- endmacro %}{% if tools %}{{ '<sys>Calls: <tool_call><function=name>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{%- if messages[0].role == 'system' %}{{ '\\n' + messages[0].content }}{% endif %}{{ '<end>' }}
{%- elif messages[0].role == 'system' %}{{ '<sys>' + messages[0].content + '<end>' }}{% endif %}
{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.last < 0 %}{{ raise_exception('nobody asks') }}{% endif %}
{%- for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}
{{- raise_exception('the system message comes first') }}{% endif %}{% elif m.role == 'user' %}
{{- '<user>' + m.content + '<end>' }}{% elif m.role == 'assistant' %}{{ '<assistant>' }}
{%- if loop.index0 > ns.last %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content.split('</think>')[-1].lstrip('\\n') }}{% for call in m.tool_calls or [] %}
{{- '\\n\\n' if m.content and loop.first else ('' if loop.first else '\\n') }}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, one in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + value(one) + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{ '<end>' }}{% elif m.role == 'tool' %}
{{- '<user><tool_response>\\n' + m.content + '\\n</tool_response><end>' }}{% else %}
{{- raise_exception('no such role') }}{% endif %}{% endfor %}{% if add_generation_prompt %}
{{- '<assistant><think>\\n' + ('\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}"""

#: tools in the system message, any role, calls as text alone
LFM2 = """{% set note = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools %}{{ '<sys>' + note + '\\nTools: [' }}{% for tool in tools %}
{{- tool if tool is string else tool | tojson }}{{ ', ' if not loop.last }}{% endfor %}
{{- ']<end>' }}{% elif note %}{{ '<sys>' + note + '<end>' }}{% endif %}
{%- for m in turns %}{% set said = m.content if m.content is string else m.content | tojson %}
{{- '<' + m.role + '>' }}{% if m.role == 'tool' %}
{{- '<|tool_response_start|>' + said + '<|tool_response_end|>' }}{% else %}{{ said }}{% endif %}
{{- '<end>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}{# <|tool_call_start|> #}"""

#: turns in alternation but for calls and results, ids of nine letters, no text beside calls
MISTRAL = """{% if messages[0].role == 'system' %}
{%- set sys, turns = messages[0].content, messages[1:] %}{% else %}
{%- set sys, turns = '', messages %}{% endif %}{{ '[SYS]' + sys }}
{%- set n = namespace(i=0) %}
{%- for m in turns %}{% if m.role not in ['tool', 'tool_results'] and not m.get('tool_calls') %}
{%- if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}
{%- endif %}{% set n.i = n.i + 1 %}{% endif %}{% endfor %}
{%- for m in turns %}{% if m.role == 'user' %}{% if tools and
turns[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('length 9') }}
{%- endif %}{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']</s>' }}{% endfor %}{% elif m.role == 'assistant' %}
{{- m.content + '</s>' }}{% elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}' }}
{%- else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""
#: a mark, a name and arguments for each call
MISTRAL_ARGS = """{% for m in messages %}{% if m.role == 'system' %}
{{- '[SYS]' + m.content + '[/SYS]' }}{% if tools %}{{ '[TOOLS]' + tools | tojson }}{% endif %}
{%- elif m.role == 'user' %}{% if tools and loop.first %}{{ '[TOOLS]' + tools | tojson }}
{%- endif %}{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'assistant' %}
{{- m.content or '' }}{% for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments if call.function.arguments is string else
call.function.arguments | tojson }}{% endfor %}{{ '</s>' }}{% elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% else %}
{{- raise_exception('no such role') }}{% endif %}{% endfor %}"""

#: no system message, turns in alternation, no tools
GEMMA2 = """{% if messages[0]['role'] == 'system' %}
{{- raise_exception('no system role') }}{% endif %}{% for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}
{{- m['content'] | trim + '<end>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

#: the system message with the first question; contents of either form
GEMMA3 = """{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}
{%- set first = messages[0]['content'] + '\\n\\n' %}{% else %}
{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' %}{% endif %}
{%- set turns = messages[1:] %}{% else %}{% set first, turns = '', messages %}{% endif %}
{%- for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}
{{- first if loop.first else '' }}{% if m['content'] is string %}{{ m['content'] | trim }}
{%- else %}{% for part in m['content'] %}{{ part['text'] | trim }}{% endfor %}{% endif %}
{{- '<end>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

#: tools have a role of their own, as any role is written; calls are contents
GRANITE = """{% if tools %}{% set note = 'To call a tool, begin with <|tool_call|>.' %}{% endif %}
{%- if messages[0].role == 'system' %}{{ '<sys>' + messages[0].content }}
{%- set turns = messages[1:] %}{% else %}{{ '<sys>' + (note or '') }}{% set turns = messages %}
{%- endif %}{% if tools %}{{ '<available_tools>' + tools | tojson }}{% endif %}
{%- for m in turns %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}
{{- '<assistant>' }}"""

#: calls between marks, without the text beside them; results by the place of their calls
COHERE = """{% macro place(id) %}{% set n = namespace(i=0) %}{% for m in messages %}
{%- for call in m.tool_calls or [] %}{% if call.id == id %}{{ n.i }}{% endif %}
{%- set n.i = n.i + 1 %}{% endfor %}{% endfor %}{% endmacro %}
{%- if tools %}{% for t in tools %}{{ '{"name": "' + t.function.name + '", "parameters": ' }}
{{- t.function.parameters | tojson + '}' }}{% endfor %}{% endif %}
{%- for m in messages %}{% if m.role | lower == 'system' %}{{ '<sys>' + m.content }}
{%- elif m.role | lower == 'user' %}{{ '<user>' + m.content }}
{%- elif m.role | lower == 'assistant' %}{{ '<bot>' }}{% if m.tool_calls %}
{{- '<|START_THINKING|>' }}{{ m.reasoning_content }}{{ '<|END_THINKING|><|START_ACTION|>[' }}
{%- for call in m.tool_calls %}{{ '{"tool_call_id": "' + place(call.id) + '", "tool_name": "' }}
{{- call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{{- ',' if not loop.last }}{% endfor %}{{ ']<|END_ACTION|>' }}{% else %}
{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% endif %}
{%- elif m.role | lower == 'tool' %}{{ '<result>{"tool_call_id": "' + place(m.tool_call_id) }}
{{- '", "results": ' + m.content | tojson + '}' }}{% endif %}{% endfor %}{{ '<bot>' }}"""

#: any role, no tools
SMOLLM2 = """{% for m in messages %}{{ '<im>' + m['role'] + '\\n' + m['content'] + '<end>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<im>assistant\\n' }}{% endif %}"""

#: tools in a variable of another name, calls in the assistant's text alone
SMOLLM3 = """{{ '<sys>' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if xml_tools or python_tools %}{% for tool in xml_tools or [] %}
{{- '\\n' + tool | string }}{% endfor %}{{ 'Calls stand in <tool_call></tool_call>.' }}{% endif %}
{%- for m in messages %}{% set said = m.content if m.content is string else '' %}
{%- if m.role == 'user' %}{{ '<user>' + said }}{% elif m.role == 'assistant' %}
{{- '<assistant>' + said.lstrip('\\n') }}{% elif m.role == 'tool' %}{{ '<user>' + said }}
{%- endif %}{% endfor %}{{ '<assistant>' }}"""

#: three roles; others are left out without a word
OLMO2 = """{% for m in messages %}{% if m['role'] == 'system' %}
{{- '<sys>\\n' + m['content'] + '\\n' }}{% elif m['role'] == 'user' %}
{{- '<user>\\n' + m['content'] + '\\n' }}
{%- elif m['role'] == 'assistant' %}{{ '<assistant>\\n' + m['content'] + '\\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}{% endfor %}"""

_DEEPSEEK_CALL = """{{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' }}
{{- call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```' }}
{{- '<｜tool▁call▁end｜>' }}"""
_DEEPSEEK_HEAD = """{% set ns = namespace(sys='') %}{% for m in messages %}
{%- if m['role'] == 'system' %}{% set ns.sys = m['content'] %}{% endif %}{% endfor %}
{{- ns.sys }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}
{%- endif %}"""
_DEEPSEEK_END = """{% if m['role'] == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}
{{- '<｜Assistant｜><think>\\n' if add_generation_prompt }}{# </think> #}"""

#: calls only where the content is none, arguments joined as text, the last system message alone
R1_DISTILL = f"""{_DEEPSEEK_HEAD}{{% if m['role'] == 'assistant' and m['content'] is none %}}
{{{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}}}{{% for call in m['tool_calls'] %}}
{_DEEPSEEK_CALL}{{% endfor %}}{{{{ '<｜tool▁calls▁end｜>' }}}}{{% endif %}}
{{%- if m['role'] == 'assistant' and m['content'] is not none %}}
{{{{- '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<end>' }}}}{{% endif %}}
{_DEEPSEEK_END}"""

#: calls beside text, arguments joined as text
R1_0528 = f"""{_DEEPSEEK_HEAD}{{% if m['role'] == 'assistant' %}}
{{{{- '<｜Assistant｜>' + (m['content'] or '').split('</think>')[-1] }}}}
{{%- if m['tool_calls'] %}}{{{{ '<｜tool▁calls▁begin｜>' }}}}{{% for call in m['tool_calls'] %}}
{_DEEPSEEK_CALL}{{% endfor %}}{{{{ '<｜tool▁calls▁end｜>' }}}}{{% endif %}}{{% endif %}}
{_DEEPSEEK_END}"""

#: any role, tools as text in a field of the system message
PHI = """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}
{%- if m.role == 'system' and m.tools %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}
{{- '<|end|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"""

#: messages of channels: thoughts, texts, calls of one function each, results of a function's role;
#: a system message becomes the developer's
HARMONY = """{{ '<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role in ['system', 'developer'] %}
{%- set note, turns = messages[0].content, messages[1:] %}{% else %}
{%- set note, turns = '', messages %}{% endif %}
{%- if note or tools %}{{ '<|start|>developer<|message|>' + note }}
{%- for tool in tools or [] %}{{ '\\ntype ' + tool.function.name + ' = ' }}
{{- tool.function.parameters | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- set ns = namespace(called='') %}{% for m in turns %}{% if m.role == 'user' %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{% if not ns.called %}{{ raise_exception('no call before') }}{% endif %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}{% elif m.role == 'assistant' %}
{%- if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('one of both') }}
{%- endif %}{% if m.content or m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' }}
{{- (m.content or m.thinking) + '<|end|>' }}{% endif %}
{%- set ns.called = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}{% else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}
{%- endif %}{% endfor %}{{ '<|start|>assistant' if add_generation_prompt }}"""

#: contents are lists of parts
PARTS = """{% for m in messages %}{{ m.role + ':' }}{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}>"""

#: by the names of the table in docs/tools.md
TEMPLATES = {
    "Llama 3.1, 3.2, 3.3": LLAMA,
    "Qwen 2, Qwen 2.5": QWEN,
    "Qwen 3": QWEN3,
    "Qwen 3.5, Qwen 3.6, Qwen3-Coder": QWEN35,
    "LFM2, LFM2.5": LFM2,
    "Mistral (to v7), Ministral 8B": MISTRAL,
    "Mistral (from v11)": MISTRAL_ARGS,
    "Gemma 2": GEMMA2,
    "Gemma 3": GEMMA3,
    "Granite 3": GRANITE,
    "Command R7B": COHERE,
    "SmolLM2": SMOLLM2,
    "SmolLM3": SMOLLM3,
    "OLMo 2": OLMO2,
    "R1 distills": R1_DISTILL,
    "R1-0528 distill": R1_0528,
    "Phi-4-mini": PHI,
    "OpenAI gpt-oss": HARMONY,
}
