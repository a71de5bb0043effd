"""Tasks that stay short whatever the requested length: talk, corrections, lists, echoes."""

from __future__ import annotations

from random import Random

from kvcap.lab.pocket.dialogue import Turn, acknowledge, small_talk, unknown
from kvcap.lab.pocket.tasks import Message, messages, quiz, task
from kvcap.lab.pocket.unfamiliar import passage
from kvcap.lab.pocket.wordings import ask, state
from kvcap.pocket import words
from kvcap.pocket.facts import Fact, digits, facts
from kvcap.pocket.prose import FAMILIAR, capital, invented, listing, pick, sentence


@task
def dialogue(rng: Random, tokens: int) -> list[Message]:
    """Make plain talk in which a few facts may be said and asked for, known and unknown."""
    known: list[Fact] = []
    turns: list[Turn] = []
    fresh = facts(rng, 6)
    for _ in range(rng.randint(1, max(1, min(12, tokens // 25)))):
        draw = rng.random()
        if draw < 0.6:
            turns.append(small_talk(rng))
        elif draw < 0.75 and fresh:
            fact = fresh.pop()
            known.append(fact)
            turns.append((state(rng, fact), acknowledge(rng, [fact])))
        elif draw < 0.9 and known:
            turns.append(ask(rng, known[rng.randrange(len(known))]))
        elif draw < 0.95:
            turns.append(unknown(rng, known))
    return messages(turns or [small_talk(rng)])


@task
def update(rng: Random, tokens: int) -> list[Message]:
    """Make a conversation in which a fact changes: the newest value counts."""
    known = facts(rng, rng.randint(1, 4))
    turns: list[Turn] = [(state(rng, fact), acknowledge(rng, [fact])) for fact in known]
    turns += [small_talk(rng) for _ in range(rng.randint(0, 2))]
    room = max(0, tokens - 200)
    if room:
        turns.append((" ".join(passage(rng, rng.randint(0, room))), "Okay."))
    changed = Fact(known[0].key, digits(rng))
    wording = pick(
        rng,
        (
            "{K} has changed. It is now {v}.",
            "Correction: {k} is {v}.",
            "No, {k} is now {v}.",
            "{K} is {v} now.",
        ),
    )
    correction = wording.format(k=changed.key, K=capital(changed.key), v=changed.value)
    turns.append((correction, f"Okay, {changed.theirs} is now {changed.value}."))
    return messages([*turns, ask(rng, changed), *quiz(rng, [changed, *known[1:]], 2)])


@task
def recite(rng: Random, tokens: int) -> list[Message]:
    """Make a conversation that states facts, then asks for all of them."""
    known = facts(rng, rng.randint(1, 5))
    turns: list[Turn] = [(state(rng, fact), acknowledge(rng, [fact])) for fact in known]
    room = max(0, tokens - 60 * len(known) - 60)
    if room > 40:
        turns.append((" ".join(passage(rng, rng.randint(20, room))), "Okay."))
    question = pick(
        rng,
        (
            "What did I ask you to remember?",
            "List everything I told you.",
            "What do you remember?",
            "Which facts do you know?",
        ),
    )
    return messages([*turns, (question, " ".join(fact.answer for fact in known))])


@task
def echo(rng: Random, tokens: int) -> list[Message]:
    """Repeat a sentence or a line of invented words."""
    turns: list[Turn] = []
    for _ in range(rng.randint(1, 3)):
        text = sentence(rng, pick(rng, FAMILIAR))
        if rng.random() < 0.4:
            text = " ".join(invented(rng) for _ in range(rng.randint(2, 6)))
        turns.append(
            (pick(rng, ("Repeat after me: ", "Say this again: ", "Repeat: ")) + text, text)
        )
    return messages(turns)


@task
def frequent(rng: Random, tokens: int) -> list[Message]:
    """Name the words that occur most often in a list of words."""
    often = rng.sample(words.NOUNS + words.ANIMALS + words.FOODS, 3)
    size = max(20, min(1000, tokens - 60) // 3)
    items = [
        word
        for word, share in zip(often, (5, 4, 3), strict=True)
        for _ in range(max(share, size * share // 24))
    ]
    seldom = [w for w in words.ADJECTIVES + words.NOUNS + words.CITIES if w not in often]
    items += [pick(rng, tuple(seldom)) for _ in range(size // 2)]
    rng.shuffle(items)
    question = "Which three words occur most often in this list?"
    answer = f"The most frequent words are {listing(often)}."
    return messages([(f"{question}\n{' '.join(items)}\n{question}", answer)])
