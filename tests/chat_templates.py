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


def with_template(tokenizer: Any, template: Any) -> Any:
    """A copy of a tokenizer that has this template."""
    found = copy.copy(tokenizer)
    found.chat_template = template
    return found
