"""Defines the training tasks: each makes one conversation of about ``tokens`` tokens, by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvcap.lab.pocket.dialogue import Turn, acknowledge, small_talk, unknown
from kvcap.lab.pocket.unfamiliar import passage
from kvcap.lab.pocket.wordings import ask, similar, state
from kvcap.pocket import words
from kvcap.pocket.facts import Fact, digits, facts
from kvcap.pocket.prose import capital, listing, pick

Message = dict[str, str]
Task = Callable[[Random, int], list[Message]]
TASKS: dict[str, Task] = {}


def task(function: Task) -> Task:
    """Register ``function`` in :data:`TASKS` under its name."""
    TASKS[function.__name__] = function
    return function


def messages(turns: list[Turn]) -> list[Message]:
    """Turn (user, assistant) pairs into chat messages."""
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]


def _oddness(rng: Random) -> float:
    """Return the share of unfamiliar passages for one conversation: mostly none, at times all."""
    return rng.choices((0.0, 0.3, 1.0), (0.55, 0.27, 0.18))[0]


def hide(rng: Random, lines: list[str], tokens: int, sep: str = " ") -> str:
    """Return filler of about ``tokens`` tokens with ``lines`` at random depths, in their order."""
    spent = 18 * len(lines)
    sentences = passage(rng, tokens - spent, _oddness(rng))
    indices = sorted(rng.randint(0, len(sentences)) for _ in lines)
    for index, line in reversed(list(zip(indices, lines, strict=True))):
        sentences.insert(index, line)
    return sep.join(sentences)


def several(rng: Random, known: list[Fact]) -> Turn:
    """Ask for two to four facts in one question."""
    chosen = rng.sample(known, min(len(known), rng.randint(2, 4)))
    question = pick(rng, ("What are {}?", "Tell me {}.", "I need {}.")).format(
        listing([fact.key for fact in chosen])
    )
    return question, capital(listing([f"{fact.theirs} is {fact.value}" for fact in chosen])) + "."


def quiz(rng: Random, known: list[Fact], rounds: int) -> list[Turn]:
    """Return ``rounds`` questions about ``known`` in sequence, now and then about another fact."""
    turns: list[Turn] = []
    order = rng.sample(known, len(known))
    for i in range(rounds):
        draw = rng.random()
        if draw < 0.05:
            turns.append(unknown(rng, known))
        elif draw < 0.12:
            turns.append(small_talk(rng))
        elif draw < 0.22 and len(known) > 1:
            turns.append(several(rng, known))
        else:
            turns.append(ask(rng, order[i % len(order)]))
    return turns


def _amount(rng: Random, tokens: int, most: int = 16) -> int:
    return rng.randint(1, max(1, min(most, tokens // 40)))


_INTRO = (
    "",
    "Read the text and answer the question at the end.\n\n",
    "Here is a text.\n\n",
    "Text: ",
    "Some facts are hidden in this text. Remember them.\n\n",
)


@task
def paste(rng: Random, tokens: int) -> list[Message]:
    """Put facts in one pasted text, the first question right below it, others in turns after it."""
    return paste_about(rng, tokens, facts(rng, _amount(rng, tokens)))


def paste_about(rng: Random, tokens: int, known: list[Fact]) -> list[Message]:
    """Return a conversation of the task :func:`paste` about the facts ``known``."""
    rounds = min(len(known) + 1, 10)
    lines = [state(rng, fact) if rng.random() < 0.5 else fact.statement for fact in known]
    text = hide(rng, lines, tokens - 40 * rounds, pick(rng, (" ", " ", " ", "\n")))
    question, answer = ask(rng, pick_fact(rng, known))
    lead = pick(rng, ("\n\n", "\n\nQuestion: ", "\n", " "))
    first = (pick(rng, _INTRO) + text + lead + question, answer)
    return messages([first, *quiz(rng, known, rounds - 1)])


def pick_fact(rng: Random, known: list[Fact]) -> Fact:
    """Return one of ``known``."""
    return known[rng.randrange(len(known))]


def _tell(rng: Random, known: list[Fact]) -> list[Turn]:
    """Tell ``known`` over several turns, one to three facts in each."""
    turns, left = [], list(known)
    while left:
        size = 1 if rng.random() < 0.6 else rng.randint(1, 3)
        facts, left = left[:size], left[size:]
        turns.append((" ".join(state(rng, fact) for fact in facts), acknowledge(rng, facts)))
    return turns


def _chatter(rng: Random, tokens: int) -> list[Turn]:
    """Return turns that hold about ``tokens`` tokens of pasted text and small talk."""
    turns: list[Turn] = []
    most = rng.choice((120, 600, max(tokens, 120)))
    while tokens > 0:
        if rng.random() < 0.2 or tokens < 40:
            turns.append(small_talk(rng))
            tokens -= 30
            continue
        size = rng.randint(30, min(most, tokens + 30))
        text = " ".join(passage(rng, size, _oddness(rng)))
        lead = pick(rng, ("", "", "Here is some text: ", "Read this: ", "Listen. "))
        reply = pick(rng, ("Okay.", "I have read it.", "Thank you, I have read it.", "I see."))
        turns.append((lead + text, reply))
        tokens -= size + 15
    return turns


@task
def chat(rng: Random, tokens: int) -> list[Message]:
    """Say facts in chat turns, then (or among them) long filler, then ask questions."""
    return chat_about(rng, tokens, facts(rng, _amount(rng, tokens)))


def chat_about(rng: Random, tokens: int, known: list[Fact]) -> list[Message]:
    """Return a conversation of the task :func:`chat` about the facts ``known``."""
    rounds = min(len(known) + 1, 10)
    tell = _tell(rng, known)
    chatter = _chatter(rng, tokens - 45 * len(known) - 35 * rounds)
    if rng.random() < 0.5:
        turns = tell + chatter
    else:
        indices = sorted(rng.randint(0, len(chatter)) for _ in tell)
        turns = list(chatter)
        for index, turn in reversed(list(zip(indices, tell, strict=True))):
            turns.insert(index, turn)
    return messages(turns + quiz(rng, known, rounds))


@task
def multi_key(rng: Random, tokens: int) -> list[Message]:
    """Hide many facts whose keys differ in one or two words."""
    known = similar(rng, max(2, _amount(rng, tokens, 24)))
    rounds = min(len(known), 8)
    text = hide(rng, [fact.statement for fact in known], tokens - 40 * rounds)
    question, answer = ask(rng, pick_fact(rng, known))
    return messages([(f"{text}\n\n{question}", answer), *quiz(rng, known, rounds - 1)])


@task
def multi_value(rng: Random, tokens: int) -> list[Message]:
    """Say one key several times with different values; the question asks for all of them."""
    topics = similar(rng, rng.randint(1, max(1, min(4, tokens // 150))))
    values = {fact.key: [digits(rng) for _ in range(rng.randint(2, 4))] for fact in topics}
    pairs = [(key, value) for key in values for value in values[key]]
    rng.shuffle(pairs)
    lines = [f"One of {_plural(key)} is {value}." for key, value in pairs]
    text = hide(rng, lines, tokens - 50 * len(topics))
    turns = []
    for key in values:
        plural = _plural(key)
        question = pick(rng, ("What are all {}?", "Tell me all {}.", "List {}.")).format(plural)
        in_order = [value for other, value in pairs if other == key]
        turns.append((question, f"{capital(plural)} are {listing(in_order)}."))
    turns[0] = (f"{text}\n\n{turns[0][0]}", turns[0][1])
    return messages(turns)


def _plural(key: str) -> str:
    head, tail = key.split(" for ", 1)
    return f"{head}s for {tail}"


@task
def multi_query(rng: Random, tokens: int) -> list[Message]:
    """Ask for several keys in one question."""
    known = facts(rng, max(2, _amount(rng, tokens, 12)))
    rounds = min(len(known) // 2, 4)
    text = hide(rng, [fact.statement for fact in known], tokens - 60 * (rounds + 1))
    turns = [several(rng, known) for _ in range(rounds + 1)]
    turns[0] = (f"{text}\n\n{turns[0][0]}", turns[0][1])
    return messages(turns)


_NEEDLE = "One of the special magic {}s for {} is: {}."


@task
def needle(rng: Random, tokens: int) -> list[Message]:
    """Hide needles in a haystack in RULER's wording, and ask for one to four keys."""
    what = pick(rng, ("number", "number", "word"))
    known = facts(rng, rng.randint(1, max(1, min(8, tokens // 60))), "magic")
    keys = {fact.key.rsplit(" ", 1)[1]: fact.value for fact in known}
    if what == "word":
        keys = {key: f"{pick(rng, words.ADJECTIVES)}-{pick(rng, words.NOUNS)}" for key in keys}
    text = hide(rng, [_NEEDLE.format(what, *item) for item in keys.items()], tokens - 110)
    queried = rng.sample(list(keys), min(len(keys), rng.randint(1, 4)))
    verb, s, are = ("is", "", "is") if len(queried) == 1 else ("are", "s", "are")
    question = (
        f"Some special magic {what}s are hidden within the following text. Make sure to memorize "
        f"it. I will quiz you about the {what}s afterwards.\n{text}\nWhat {verb} the special magic "
        f"{what}{s} for {listing(queried)} mentioned in the provided text?"
    )
    values = listing([keys[key] for key in queried])
    answer = (
        f"The special magic {what}{s} for {listing(queried)} mentioned in the provided text {are} "
        f"{values}."
    )
    return messages([(question, answer)])


@task
def variables(rng: Random, tokens: int) -> list[Message]:
    """Chain variables that copy one another; the question asks for the value at a chain's end."""
    lines: list[str] = []
    value_of: dict[str, str] = {}
    for _ in range(rng.randint(1, max(1, min(5, tokens // 120)))):
        name, value = _variable(rng), digits(rng)
        lines.append(f"VAR {name} = {value}")
        value_of[name] = value
        for _ in range(rng.randint(0, 2)):
            copy = _variable(rng)
            lines.append(f"VAR {copy} = VAR {name}")
            value_of[copy] = value
            name = copy
    rounds = min(len(value_of), 5)
    text = hide(rng, lines, tokens - 25 * rounds, pick(rng, ("\n", " ")))
    chosen = rng.sample(list(value_of), rounds)
    turns = [(f"What is the value of {name}?", f"{name} is {value_of[name]}.") for name in chosen]
    turns[0] = (f"{text}\n\n{turns[0][0]}", turns[0][1])
    return messages(turns)


def _variable(rng: Random) -> str:
    return "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(3, 5)))


@task
def phone_book(rng: Random, tokens: int) -> list[Message]:
    """Make a list of names and numbers, then ask for some of them."""
    book: dict[str, str] = {}
    for _ in range(max(2, min(400, (tokens - 150) // 12))):
        name = f"{pick(rng, words.FIRST_NAMES)} {pick(rng, words.LAST_NAMES)}"
        book.setdefault(name, digits(rng))
    mark = pick(rng, (": ", " - ", ", "))
    lines = [name + mark + number for name, number in book.items()]
    chosen = rng.sample(list(book), min(6, len(book)))
    turns = [
        ask(rng, Fact(f"{name}'s {pick(rng, ('phone number', 'number'))}", book[name]))
        for name in chosen
    ]
    turns[0] = ("Here is a phone book.\n" + "\n".join(lines) + "\n\n" + turns[0][0], turns[0][1])
    return messages(turns)
