"""Says whether a message asks for something: by a question mark, or as English requests begin.

A text that tells must bring nothing, whatever words it shares with what was read before. Questions
of other languages are known by their mark alone. Knows no tokenizer and no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ENDS = 2  # sentences at each end of a message in which a question is looked for
SENTENCES = re.compile(r"(?<=[.!?…。！？؟])\s+|(?<=[。！？])|\n+")
# A quoted question is told, as in a story; in an address and in code a mark asks nothing.
MARKED = re.compile(r"[?？؟][\s)\]*_!.]*\Z|(?:か|[吗嗎呢])。?\Z")
HELPERS = (
    "is|are|was|were|do|does|did|can|could|will|would|shall|should|may|might|must|has|have|had"
)
OPENERS = "please|now|then|so|and|but|ok|okay|hey|hi|hello|thanks|thank you|also|well|just|again"
ASKERS = (  # each as a sentence begins
    rf"(?:what|who|where|when|why|how|which)(?:['’]?s| (?:{HELPERS}))\b",
    r"(?:what|which|how|whose)(?: (?!(?:the|an?|he|she|it|they|we|you|i)\b)\w+){1,3} "
    rf"(?:{HELPERS})\b",
    r"how (?:many|much|long|old|far|often|big|tall|high|late|early)\b",
    r"who(?:se|m)? (?!ever)\w+",
    rf"(?:{HELPERS}) (?:my|our|your|his|her|their|the|you|there|it|i|we|he|she|they|any)\b",
    r"(?:tell|give|show|remind|send|get|find|read|help|teach) (?:me|us)\b",
    r"let me (?:know|see)\b",
    r"(?:repeat|recall|recite|recap|quote|list|name|explain|describe|summari[sz]e|compare|translate"
    r"|define|spell|write|draft|compose|find|look up|search|calculate|compute|count|continue"
    r"|check|confirm|complete) (?!of\b)\w",
    r"i(?:['’]d| would) like\b|i(?:['’]ve| have)? (?:forg[eo]t(?:ten)?|wonder)\b",
    r"i (?:need|want)(?: to (?:know|see|find|have|remember))? (?!to\b)",
    r"i (?:can(?:['’]?t|not)|do(?:n['’]?t| not)) (?:remember|recall|know|find)\b",
    r"i(?:['’]m| am) looking for\b",
)
ASKER = rf"(?i)(?:(?:{OPENERS})\b[,.!:]? )*(?:{'|'.join(ASKERS)})"  # compiled with the first text

NUMBER = (
    r"\d|\b(?i:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty"
    r"|fifty|hundred|thousand|half|quarter|once|twice)\b"
)
TIME = (
    r"\d|(?i:\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|\b(?:january|february|march|april|may"
    r"|june|july|august|september|october|november|december|noon|night|morning|evening|past)\b)"
)
NAME = r"(?<!^)\b(?!I\b)[A-Z]\w+"
SOUGHT = (  # forms of questions, and of what answers them
    (r"\bwhen\b|\b(?:which|what) (?:day|month|year|time)\b", TIME),
    (
        r"\bhow (?:many|much|old|long|often|large|heavy|big|tall|high|far|late|early)\b"
        r"|\b(?:cost|price|fee|code|number|floor|size)\b",
        NUMBER,
    ),
    (r"\bwho(?:m|se)?\b|\b(?:called|name|city|town|country|college|brand)\b", NAME),
)


def may_answer(question: str, texts: Sequence[str]) -> list[bool]:
    """Return which texts have a time, a number or a name, if the question asks for such.

    >>> may_answer("When do we leave?", ("On Monday.", "By train."))
    [True, False]
    """
    forms = [form for pattern, form in SOUGHT if re.search(pattern, question.lower())]
    return [any(re.search(form, text) for form in forms) for text in texts]


def asks(text: str) -> bool:
    """Return whether a text asks for something, in one of its first or last sentences.

    >>> [asks(text) for text in ("And its colour?", "Now tell me the code.", "who is my dentist")]
    [True, True, True]
    >>> [asks(text) for text in ("When it rained, we left.", "'Why?' he said.", "/find?page=2 is")]
    [False, False, False]
    """
    sentences = [part.strip() for part in SENTENCES.split(text) if part.strip()]
    near = sentences[:ENDS] + sentences[ENDS:][-ENDS:]
    return any(MARKED.search(sentence) or re.match(ASKER, sentence) for sentence in near)
