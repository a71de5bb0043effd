"""Small chat templates, each with the habit of a family of models that sessions must cope with.

They use marks of the built-in model's tokenizer where a turn begins and ends, so that they can be
read by a tiny model, too. None is a published template.
"""

from __future__ import annotations

import copy
from typing import Any

END = "<|end|>"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"

PLAIN = {
    # Contents are texts; the system prompt is a turn of its own.
    "text": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endfor %}" + PROMPT,
    # Trimmed, and the system prompt goes into the user's turn.
    "trimmed": "{{ bos_token }}{% set ns = namespace(first='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.first = m.content | trim + '\n\n' %}{% else %}"
    "<|{{ m.role }}|>{{ ns.first }}{{ m.content | trim }}<|end|>\n{% set ns.first = '' %}"
    "{% endif %}{% endfor %}" + PROMPT,
    # Takes either form of a content.
    "either": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}" + PROMPT,
}
PARTS = {
    # Every content is walked through; of a text, its letters have no type.
    "walked": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>{% endif %}"
    "{% endfor %}<|end|>{% endfor %}" + PROMPT,
    # Images first, then texts, by filters; only these roles.
    "filtered": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{% generation %}"
    "{{ part.text }}{% endgeneration %}{% endfor %}<|end|>{% endfor %}" + PROMPT,
    # It fails on a text, and the system prompt is one.
    "mixed": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'system' %}"
    "{{ m.content | trim }}{% else %}{{ m.content[0]['text'] + '' }}{% endif %}<|end|>{% endfor %}"
    + PROMPT,
}

OPENING = (
    "{{ bos_token }}{% if tools %}<|system|>Tools: {% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}<|end|>{% endif %}{% set ns = namespace(name='', open=false) %}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}"
)
TOOLS = {
    # As Hermes and Qwen: a result is a turn of its own.
    "own turn": OPENING + "{% for m in messages %}{% if m.role == 'tool' %}<|user|><tool_response>"
    "{{ m.content }}</tool_response>{% else %}<|{{ m.role }}|>{{ m.content }}"
    + CALLS
    + "{% endif %}"
    "<|end|>{% endfor %}" + PROMPT,
    # As Mistral: ids have nine letters and digits, and a result says its own.
    "ids": OPENING + "{% macro nine(id) %}{% if id is not defined or id | length != 9 %}"
    "{{ raise_exception('ids have 9 letters') }}{% endif %}{{ id }}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|user|>[{{ nine(m.tool_call_id) }}]"
    "{{ {'content': m.content} | tojson }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "[{{ nine(call.id) }}]</tool_call>{% endfor %}<|end|>{% endif %}{% endfor %}" + PROMPT,
    # As gpt-oss: a result has the name of the call before it, and is JSON.
    "named": OPENING + "{% for m in messages %}{% if m.role == 'tool' %}{% if not ns.name %}"
    "{{ raise_exception('a result without a call') }}{% endif %}<|user|>{{ ns.name }}: "
    "{{ m.content | tojson }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
    + CALLS
    + "{% for call "
    "in m.tool_calls or [] %}{% set ns.name = call.function.name %}{% endfor %}<|end|>{% endif %}"
    "{% endfor %}" + PROMPT,
    # As Gemma 4: calls and their results are one turn, in which the answer goes on.
    "one turn": OPENING + "{% for m in messages %}{% if m.role != 'tool' %}{% if not (ns.open and "
    "m.role == 'assistant') %}<|{{ m.role }}|>{% endif %}{{ m.content }}" + CALLS + "{% set at = "
    "loop.index %}{% set ns.open = false %}{% if m.tool_calls %}{% for r in messages[at:] %}"
    "{% if r.role != 'tool' %}{% break %}{% endif %}<tool_response>{{ r.content | tojson }}"
    "</tool_response>{% set ns.open = true %}{% endfor %}{% endif %}{% if not ns.open %}<|end|>"
    "{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt and not ns.open %}<|assistant|>"
    "{% endif %}",
}

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
NO_THOUGHTS = "<think>\n\n</think>\n\n"
THINKING = {
    # As Qwen 3: switched off, an answer begins behind empty thoughts.
    "switch": "{{ bos_token }}" + TURNS + "{% if add_generation_prompt %}<|assistant|>{% if "
    "enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}",
    # As DeepSeek R1: thoughts are opened, whatever is asked for.
    "opens": "{{ bos_token }}" + TURNS + "{% if add_generation_prompt %}<|assistant|><think>\n"
    "{% endif %}",
    # As SmolLM 3: the system prompt says how to think, and what the reader asked for.
    "system": "{{ bos_token }}<|system|>{% if enable_thinking | default(true) %}/think{% else %}"
    "/no_think{% endif %} {{ mood }}<|end|>" + TURNS + PROMPT,
}


def with_template(tokenizer: Any, template: Any) -> Any:
    """A copy of a tokenizer that has this template."""
    found = copy.copy(tokenizer)
    found.chat_template = template
    return found
