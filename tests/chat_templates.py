"""Defines small chat templates, each with a peculiarity of some family of models.

They mark turns by tokens of the built-in model's tokenizer, so that a tiny model can read them.
None is a published template.
"""

from __future__ import annotations

import copy
from typing import Any

END = "<|end|>"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"

PLAIN = {
    # Contents must be texts; the system prompt is a turn of its own.
    "text": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endfor %}" + PROMPT,
    # Contents are trimmed, and the system prompt is put into the user's turn.
    "trimmed": "{{ bos_token }}{% set ns = namespace(first='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.first = m.content | trim + '\n\n' %}{% else %}"
    "<|{{ m.role }}|>{{ ns.first }}{{ m.content | trim }}<|end|>\n{% set ns.first = '' %}"
    "{% endif %}{% endfor %}" + PROMPT,
    # A content may be a text or a list of parts.
    "either": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}" + PROMPT,
}
PARTS = {
    # Contents must be lists of parts; for a text it would iterate over the letters.
    "walked": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>{% endif %}"
    "{% endfor %}<|end|>{% endfor %}" + PROMPT,
    # Filters write images first, then texts.
    "filtered": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{% generation %}"
    "{{ part.text }}{% endgeneration %}{% endfor %}<|end|>{% endfor %}" + PROMPT,
    # Contents must be lists, but for the system prompt, which must be a text.
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
    # As in Hermes and Qwen, a result is a turn of its own.
    "own turn": OPENING + "{% for m in messages %}{% if m.role == 'tool' %}<|user|><tool_response>"
    "{{ m.content }}</tool_response>{% else %}<|{{ m.role }}|>{{ m.content }}"
    + CALLS
    + "{% endif %}"
    "<|end|>{% endfor %}" + PROMPT,
    # As in Mistral, ids have nine letters and digits, and a result has its call's id.
    "ids": OPENING + "{% macro nine(id) %}{% if id is not defined or id | length != 9 %}"
    "{{ raise_exception('ids have 9 letters') }}{% endif %}{{ id }}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|user|>[{{ nine(m.tool_call_id) }}]"
    "{{ {'content': m.content} | tojson }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "[{{ nine(call.id) }}]</tool_call>{% endfor %}<|end|>{% endif %}{% endfor %}" + PROMPT,
    # As in gpt-oss, a result has the name of the call before it, and is JSON.
    "named": OPENING + "{% for m in messages %}{% if m.role == 'tool' %}{% if not ns.name %}"
    "{{ raise_exception('a result without a call') }}{% endif %}<|user|>{{ ns.name }}: "
    "{{ m.content | tojson }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
    + CALLS
    + "{% for call "
    "in m.tool_calls or [] %}{% set ns.name = call.function.name %}{% endfor %}<|end|>{% endif %}"
    "{% endfor %}" + PROMPT,
    # As in Gemma 4, calls, their results and the rest of the answer are one turn.
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
    # As in Qwen 3, an answer without thinking begins after empty thoughts.
    "switch": "{{ bos_token }}" + TURNS + "{% if add_generation_prompt %}<|assistant|>{% if "
    "enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}",
    # As in DeepSeek R1, thoughts are always opened.
    "opens": "{{ bos_token }}" + TURNS + "{% if add_generation_prompt %}<|assistant|><think>\n"
    "{% endif %}",
    # As in DeepSeek R1 and Qwen 3, thoughts are opened, and left out of earlier answers.
    "forgets": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    # As in SmolLM 3, the system prompt turns thinking on or off, before the user's own.
    "system": "{{ bos_token }}<|system|>{% if enable_thinking | default(true) %}/think{% else %}"
    "/no_think{% endif %} {{ mood }}<|end|>" + TURNS + PROMPT,
}


def with_template(tokenizer: Any, template: Any) -> Any:
    """Return a copy of a tokenizer with this template."""
    copied = copy.copy(tokenizer)
    copied.chat_template = template
    return copied
