"""Writes the synthetic corpus of the pocket model: seeded, streaming, plain Python.

>>> from random import Random
>>> rng = Random(7)
>>> fact = facts(rng, 1)[0]            # fact.statement, fact.question, fact.answer, fact.value
>>> text = next(filler(rng))           # an endless iterator of sentences
>>> talk = conversation(rng, 500)      # [{"role": "user", "content": ...}, ...]

Equal seeds give equal text on every machine and Python version that this package supports.
"""

from __future__ import annotations

from random import Random

from kvcap.lab.pocket import short_tasks as _short_tasks  # registers its tasks
from kvcap.lab.pocket.dialogue import SYSTEM, small_talk
from kvcap.lab.pocket.tasks import TASKS, Message, Task
from kvcap.lab.pocket.unfamiliar import estimate, passage
from kvcap.lab.pocket.wordings import ask, similar, state
from kvcap.pocket.facts import Fact, facts
from kvcap.pocket.prose import filler, pick, sentence

__all__ = [
    "TASKS",
    "WEIGHTS",
    "Fact",
    "Message",
    "Task",
    "ask",
    "conversation",
    "estimate",
    "facts",
    "filler",
    "passage",
    "sentence",
    "similar",
    "small_talk",
    "state",
]

WEIGHTS: dict[str, float] = {
    "paste": 5,
    "chat": 7,
    "multi_key": 2.5,
    "multi_value": 2.5,
    "multi_query": 1.5,
    "needle": 2.5,
    "variables": 1.3,
    "phone_book": 1.2,
    "dialogue": 1,
    "update": 0.7,
    "recite": 0.6,
    "echo": 0.3,
    "frequent": 0.3,
}
SHORT = tuple(name for name, task in TASKS.items() if task.__module__ == _short_tasks.__name__)


def conversation(
    rng: Random, tokens: int, task: str | None = None, system: float = 0.2
) -> list[Message]:
    """Return one conversation of roughly ``tokens`` tokens.

    ``task`` names one of :data:`TASKS`; by default one is drawn by :data:`WEIGHTS`, and the short
    ones (:data:`SHORT`) only below 2,048 tokens. ``system`` is the share of conversations that
    open with a system message.
    """
    if task is None:
        names = [name for name in WEIGHTS if tokens < 2048 or name not in SHORT]
        task = rng.choices(names, [WEIGHTS[name] for name in names])[0]
    talk = TASKS[task](rng, tokens)
    if rng.random() < system:
        talk.insert(0, {"role": "system", "content": pick(rng, SYSTEM)})
    return talk
