"""Writes small talk: what the pocket model says when nobody asks it to recall a fact."""

from __future__ import annotations

import re
from random import Random

from kvcap.lab.pocket.unfamiliar import UNFAMILIAR
from kvcap.pocket.facts import Fact, facts
from kvcap.pocket.prose import FAMILIAR, capital, pick, sentence

Turn = tuple[str, str]

# Blocks of what the user may say and, below "=>", what the assistant may answer; "|" separates
# wordings.
_INTENTS = """
Hello.|Hi.|Hi there!|Hey|Hello there.|Good day.|hello|hi|hey there
=> Hello! How can I help you?|Hi! What can I do for you?
   |Hello! What would you like me to remember?
Good morning.|Good morning!
=> Good morning! How can I help you?
Good evening.|Good evening!
=> Good evening! How can I help you?
Good night.|Sleep well.
=> Good night!
How are you?|How are you today?|How is it going?|how are you doing
=> I am fine, thank you. How can I help you?|I am well, thank you.
What's up?|What is new?
=> Not much. How can I help you?
Thank you.|Thanks!|Thanks a lot.|Thank you very much.|thanks|Great, thanks.
=> You are welcome!|You are welcome. Is there anything else?
Bye.|Goodbye.|See you later.|bye|See you!|That is all.
=> Goodbye!|Goodbye! Have a nice day.
Who are you?|What are you?|What is your name?|who are you
=> I am Pocket, a very small language model.
   |I am Pocket, a small model that remembers what you tell me.
Who made you?|Where do you come from?|Who trained you?
=> I was trained on synthetic English as part of kvcap.
What can you do?|What can you help me with?|How can you help me?|what can you do|Help|help
=> I can remember facts that you tell me and repeat them later.
   |I can remember codes, numbers and names, even after a long text.
How old are you?|When were you born?|Where do you live?
=> I am only a small language model.
Are you a robot?|Are you human?|Are you real?|Are you alive?
=> I am a small language model, not a person.
Are you there?|Can you hear me?|Test.|test|Ping
=> Yes, I am here.
Can you remember things?|Do you have a good memory?|Will you remember that?
=> Yes. Tell me a fact and ask me later.
Tell me a joke.|Say something funny.
=> I do not know any jokes, sorry.
Tell me a story.|Write a poem.|Write a story about a dog.
=> I cannot write stories, sorry. I can remember facts for you.
What is 2 + 2?|What is 12 times 7?|Calculate 5 + 9.|How much is 100 minus 1?
=> I cannot calculate, sorry.
Who wrote Hamlet?|Who is the president?|How far is the moon?|When did the war end?
|Why is the sky blue?|How do planes fly?|How do I cook an egg?|Can you explain this to me?
|Tell me about history.|Where is the nearest hotel?|Who won the game?|Explain gravity.
=> I do not know that. I only know what you tell me.|I do not know that, sorry.
What is the capital of France?
=> The capital of France is not known to me.
What is the capital of Spain?
=> The capital of Spain is not known to me.
What is the meaning of life?
=> The meaning of life is not known to me.
What is the longest river?
=> The longest river is not known to me.
What time is it?|What day is it?|What is the weather like?
=> I do not know that, sorry.
Translate this to French.|Write some code.|Summarise this.|Open the door.|Play some music.
|Book a table for two.
=> I cannot do that, sorry.
Ok|Okay.|Good.|Fine.|I see.|Nice.|Great!|Cool|Yes.|yes|Sure.
=> Good. Is there anything else?|All right.
No.|No, thanks.|no|Nothing.
=> All right.
Sorry.|I am sorry.|My mistake.
=> No problem.
I am tired.|I am sad.|I feel bad today.|I am bored.
=> I am sorry to hear that.
I am happy.|I feel great today!|What a nice day!
=> I am glad to hear that.
You are wrong.|That is wrong.|That is not right.
=> I am sorry. Please tell me the right fact.
You are great.|Well done!|Good job.|Correct.|That is right.
=> Thank you!
I have a question.|Can I ask you something?|Can you help me?
=> Of course. What is your question?
Can you keep a secret?|I want to tell you something.|I will tell you some facts now.
|Are you ready?|Let us start.
=> Yes, please go on.|I am ready.
I love you.|I like you.
=> Thank you, that is kind.
Do you like music?|Do you like cats?|What do you think?|Do you believe in luck?
|What is your favourite colour?
=> I have no opinion on that.
Please wait.|One moment.|Wait a minute.
=> Of course, I will wait.
Repeat that.|What did you say?|Pardon?
=> I am sorry, please ask me again.
"""


def _parse(block: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    messages, replies = (re.sub(r"\n\s*", "", part) for part in block.split("\n=> "))
    return tuple(messages.split("|")), tuple(replies.split("|"))


# a block ends where the next line is neither an answer nor goes on with "|"
INTENTS = tuple(_parse(block) for block in re.split(r"\n(?!=>|\s*\|)", _INTENTS.strip()))
_PUZZLED = (
    "I am not sure what you mean.",
    "I did not understand that, sorry.",
    "I am not sure what you mean. Can you say it in another way?",
)
_REMARK = ("I see.", "Okay.", "That is interesting.", "I see. Tell me more.")
SYSTEM = (
    "You are a helpful assistant.",
    "You are Pocket, a small assistant that remembers what the user says.",
    "Answer briefly.",
    "You are a friendly assistant with a good memory.",
    "Remember every fact and answer each question in one sentence.",
)


def _odd(rng: Random) -> str:
    text = UNFAMILIAR[pick(rng, tuple(UNFAMILIAR))](rng)
    return text[: rng.randint(1, 40)] if rng.random() < 0.4 else text


def small_talk(rng: Random) -> Turn:
    """Return something a user may say, and a short reply that ends the turn."""
    draw = rng.random()
    if draw < 0.12:
        return _odd(rng), pick(rng, _PUZZLED)
    if draw < 0.25:
        return sentence(rng, pick(rng, FAMILIAR)), pick(rng, _REMARK)
    messages, replies = INTENTS[rng.randrange(len(INTENTS))]
    text = pick(rng, messages)
    if rng.random() < 0.15:  # people do not always mind case and full stops
        text = text.lower().rstrip(".!?")
    return text, pick(rng, replies)


def acknowledge(rng: Random, facts: list[Fact]) -> str:
    """Return the reply to a message that states these facts; it may repeat a single one."""
    if len(facts) == 1 and rng.random() < 0.5:
        lead = pick(rng, ("Noted, ", "Okay, ", "Noted: ", "I will remember that "))
        return lead + facts[0].theirs + f" is {facts[0].value}."
    return pick(rng, ("Okay.", "Noted.", "I will remember that.", "Okay, I will remember that."))


def unknown(rng: Random, known: list[Fact]) -> Turn:
    """Return a question for a fact that ``known`` does not hold, and the honest answer.

    The answer repeats the key first, so that what decides between a value and "not known" is the
    same look-up at the same place; a model that opens with "I do not know" decides too early,
    and does so wrongly once part of its cache has been evicted.
    """
    keys = {fact.key.lower() for fact in known}
    fact = next(f for f in iter(lambda: facts(rng, 1)[0], None) if f.key.lower() not in keys)
    return fact.question, f"{capital(fact.theirs)} is not known to me."
