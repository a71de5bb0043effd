"""Holds an answer, or the calls in it, to a form, token by token, by llguidance.

llguidance computes which tokens can follow what was written, so that whatever is drawn among them,
the answer fits. What it cannot hold exactly it refuses, and nothing is approximated. Knows no
model; of a tokenizer, the file in which the library `tokenizers` writes it, or its own index.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.errors import ExtraMissing, SchemaRefused, how_to_install
from kvcap.runtime.session.closed_schema import closed
from kvcap.runtime.session.listener import Listener
from kvcap.runtime.session.stats import FinishReason
from kvcap.runtime.session.tool_calls import HERMES

# A space, or a new line and its indentation: a model that is held to JSON and has nothing to say
# would otherwise write white space without end.
SPACE = r" |\r?\n[ \t]{0,40}"
LONGEST = 100_000  # letters of a schema, beyond which some take a minute to read
STATES = 25_000  # of llguidance's automaton, of 1 to 2 kB each: some schemas would fill the memory
OPENS, CLOSES = HERMES, "</tool_call>"  # marks around a call that an answer may have
CALLS = r"""%llguidance {{}}
start: ({parts})* text
call: {opens} gap %json {schema} gap {closes}
head[lazy]: TEXT "{mark}"
text: TEXT
gap: GAP
TEXT: /(.|\n)*/
GAP: /[ \t\r\n]{{0,8}}/
"""  # the free text of an answer, with calls in it
WHERE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
"""Matches the place of an error in the grammar `CALLS`, which no user wrote."""
PLACED = re.compile(r"/anyOf/\d+/properties/arguments(?=/)")
"""Matches where `schema_of_call` puts a tool's parameters, in whose schema it is the root."""
NOT_OURS = re.compile(r"\n *1 \| |\. Enable 'coerce_one_of'|<backtrace>|<state>|<non-verbose/>")
"""Matches where an error of llguidance's goes on with that grammar, or with its own code.

It also offers to hold `oneOf` inexactly."""
STRICT = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": SPACE}

_vocabularies: WeakKeyDictionary[Any, dict[frozenset[int], Any]] = WeakKeyDictionary()


class Guide(Listener):
    """A listener that says which tokens an answer may have next, and when it is complete.

    Args:
        tokenizer: whose vocabulary the answer is written in. Of a vocabulary of 150,000 tokens
            llguidance keeps an index of some 90 MiB, made once in about two seconds.
        ends: the tokens that end an answer; where there are none, llguidance names one.
        json_schema: that the answer fits, as `closed` reads it; True for any JSON.
        regex: or a regular expression that the whole answer matches.
        call_schema: or a JSON schema that each call fits which the answer has in its text, between
            the marks `<tool_call>` and `</tool_call>`. What else the answer says is free.

    Raises:
        SchemaRefused: it cannot be held exactly, no text fits it, or the tokenizer is of a kind
            that llguidance does not read.
        ExtraMissing: llguidance is not installed.
    """

    reads_logits = True

    def __init__(
        self,
        tokenizer: Any,
        ends: frozenset[int],
        json_schema: dict[str, Any] | bool | None = None,
        regex: str | None = None,
        call_schema: dict[str, Any] | None = None,
    ) -> None:
        self._vocabulary = _vocabulary(tokenizer, ends)
        self.ends = frozenset[int](self._vocabulary.eos_tokens)
        """Holds the tokens that end the answer, once it may end."""
        self._what = "this regular expression" if regex is not None else "this JSON schema"
        if call_schema is not None:
            self._what = "the JSON schemas of these tools' parameters"
        self._special = {
            added.content: token
            for token, added in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
            if added.special
        }
        self._shape = json_schema, regex, call_schema
        self._matcher = self._made(*self._shape)
        self._check()
        self._bits = np.zeros(-(-self._vocabulary.vocab_size // 32), np.int32)
        self.allowed()  # refuses a form that no text fits, and the first answer begins sooner

    def _made(
        self,
        json_schema: dict[str, Any] | bool | None,
        regex: str | None,
        call_schema: dict[str, Any] | None,
    ) -> Any:
        """Return llguidance's matcher; it is in an error state if the schema cannot be held."""
        llguidance = library()
        try:
            if regex is not None:
                text = regex
            else:
                schema = call_schema if json_schema is None else json_schema
                text = json.dumps({} if schema is True else schema, allow_nan=False)
            if len(text) > LONGEST:
                raise ValueError(f"it has {len(text):,} letters, and the most is {LONGEST:,}")
            if regex is not None:
                grammar = llguidance.LLMatcher.grammar_from_regex(text)
            elif json_schema is not None:
                text = json.dumps(closed(json.loads(text)))
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=STRICT)
            else:
                grammar = self._with_calls(closed(json.loads(text)))
        except (ValueError, TypeError, RecursionError) as error:
            raise self._refused(str(error)) from error
        limits = llguidance.LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
        return llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)

    def _with_calls(self, schema: dict[str, Any]) -> str:
        """Return the grammar of text in which every call matches a schema.

        Special tokens, which no text can have, are written by their ids: those that mark calls, and
        all others but the ends, such as the marks of thoughts.
        """
        others = {id for text, id in self._special.items() if text not in (OPENS, CLOSES)}
        opens, closes = (
            f"<[{self._special[mark]}]>" if mark in self._special else None
            for mark in (OPENS, CLOSES)
        )
        listed = ",".join(map(str, sorted(others - self.ends)))
        return CALLS.format(
            schema=json.dumps({**schema, "x-guidance": STRICT}),
            mark=OPENS,
            opens="head" if opens is None else f"TEXT {opens}",
            closes=json.dumps(CLOSES) if closes is None else closes,
            parts=f"call | TEXT <[{listed}]>" if listed else "call",
        )

    def restart(self) -> None:
        """Begin another answer."""
        if self._matcher.is_error():  # a reset does not clear an error
            self._matcher = self._made(*self._shape)
        self._matcher.reset()

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens of the tokenizer's vocabulary that may come next.

        Raises:
            SchemaRefused: none; or too much would have to be computed to tell.
        """
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        mask = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(np.bool_)
        if not mask.any():
            raise SchemaRefused(f"no text fits {self._what}")
        return mask[: self._vocabulary.vocab_size]

    def token(self, number: int, logits: Any = None) -> FinishReason | None:
        """Advance over an allowed token; end the answer where it fits and no text can follow."""
        self._matcher.consume_token(number)
        self._check()
        return "stop" if self._matcher.is_stopped() else None

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._refused(self._matcher.get_error())

    def _refused(self, why: str) -> SchemaRefused:
        if why.startswith("NoExtension"):
            return SchemaRefused(f"no text fits {self._what}")
        reason = PLACED.sub("", NOT_OURS.split(WHERE.sub("", why))[0])
        reason = " ".join(reason.split())[:500]
        return SchemaRefused(f"answers cannot be held to {self._what}: {reason}")


def library() -> Any:
    """Return the module llguidance.

    Raises:
        ExtraMissing: it is not installed.
    """
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise ExtraMissing(
            f"answers are held to json_schema and regex by llguidance, which is not installed "
            f"({error}); {how_to_install('json')}"
        ) from error


def _vocabulary(tokenizer: Any, ends: frozenset[int]) -> Any:
    """Return llguidance's index of a vocabulary, shared by all answers of its tokenizer."""
    by_ends = _vocabularies.setdefault(tokenizer, {})
    if ends not in by_ends:
        kind = library().LLTokenizer
        backend = tokenizer.backend_tokenizer
        known_ends = sorted(end for end in ends if end < backend.get_vocab_size())
        try:
            if indexed := getattr(backend, "indexed_by", None):
                by_ends[ends] = indexed(kind, known_ends)
            else:
                by_ends[ends] = kind(backend.to_str(), eos_token=known_ends or None)
        except (ValueError, RuntimeError) as error:
            raise SchemaRefused(
                f"answers of this model cannot be held to anything: llguidance cannot read its "
                f"tokenizer ({error})"
            ) from error
    return by_ends[ends]
