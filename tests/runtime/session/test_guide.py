"""Answers held to a JSON schema or a regular expression: every one fits, or says it was cut."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest
from batches import together
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import Wrapped, gemma_like
from make import DOOR
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tools import pocket_runtime
from toy_engine import ToyEngine, session_of

from kvcap import pocket
from kvcap.runtime.errors import ExtraMissing, SchemaRefused
from kvcap.runtime.session import guide as guides
from kvcap.runtime.session.closed_schema import FORMATS, closed
from kvcap.runtime.session.decoding import TextStream
from kvcap.runtime.session.guide import Guide
from kvcap.runtime.session.tool_calls import schema_of_call

pytest.importorskip("llguidance")

NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "boolean"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    },
    "required": ["value"],
    "additionalProperties": False,
}
TRICKY: dict[str, Any] = {
    "anything": True,
    "any object": {"type": "object"},
    "another key is required": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a", "z"],
    },
    "constants": {"enum": ["a", 1, None, {"x": [1, 2.5]}, "é☃\n"]},
    "recursive": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    },
    "one of": {
        "oneOf": [
            {**DOOR, "properties": {"door": {"const": "blue"}, "code": {"type": "null"}}},
            {**DOOR, "properties": {"door": {"const": "red"}, "code": {"type": "integer"}}},
        ]
    },
    "letters": {"type": "string", "minLength": 3, "maxLength": 6},
    "a pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$"},
    "a pattern within": {"type": "string", "pattern": "ab", "maxLength": 9},
    "range": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    "whole range": {"type": "integer", "exclusiveMinimum": -17, "maximum": 1234},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "date": {"type": "string", "format": "date"},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 4}],
        "items": False,
        "minItems": 2,
    },
    "keys of a pattern": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
    },
    "keys of odd letters": {
        "type": "object",
        "properties": {'ключ\n"': {"type": "integer"}},
        "required": ['ключ\n"'],
        "additionalProperties": False,
    },
}


def with_bytes() -> Tokenizer:
    """Return a tokenizer as SentencePiece has them, with tokens of several letters of JSON."""
    tokenizer = gemma_like(("{", '"'), ('"', ":"), ('"', ","), ('"', "}"))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])  # a text like any other
    return tokenizer


TOKENIZERS = {
    "pocket": Wrapped(Tokenizer.from_file(str(pocket.path() / "tokenizer.json"))),
    "bytes": Wrapped(with_bytes()),
}
END = 2  # of both


def walked(guide: Guide, tokenizer: Any, seed: int, most: int = 300) -> tuple[str, bool]:
    """A text of random tokens among those that are allowed, and whether it is complete."""
    rng, stream, text = np.random.default_rng(seed), TextStream(tokenizer), ""
    closing = {tokenizer.backend_tokenizer.token_to_id(x) for x in ['"', "}", "]", ",", ":", "0"]}
    for _ in range(most):
        allowed = np.flatnonzero(guide.allowed())
        likely = [token for token in allowed if token in closing or token in guide.ends]
        token = int(rng.choice(likely if likely and rng.random() < 0.6 else allowed))
        if token in guide.ends:
            return text + stream.end(), True
        ended = guide.token(token)
        text += stream.put(token)
        if ended == "stop":
            return text + stream.end(), True
    return text, False


def check(text: str, schema: Any) -> None:
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", TRICKY)
def test_every_text_fits_a_tricky_schema(name, tokenizer):
    known = TOKENIZERS[tokenizer]
    guide, ended = Guide(known, frozenset([END]), TRICKY[name]), 0
    assert guide.ends == {END}
    for seed in range(8):
        guide.restart()
        text, complete = walked(guide, known, seed)
        if complete:
            check(text, TRICKY[name])
            ended += 1
    assert ended > 2


X_ALONE = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
MORE = '{"x":1,"z":null}'
OPEN: dict[str, tuple[Any, str, bool]] = {
    "no other word": ({"type": "object", **X_ALONE}, MORE, False),
    "others are welcome": ({**X_ALONE, "additionalProperties": True}, MORE, True),
    "of one kind": ({**X_ALONE, "additionalProperties": {"type": "null"}}, MORE, True),
    "a name is required that is not there": ({**X_ALONE, "required": ["x", "z"]}, MORE, True),
    "any object": ({"type": "object"}, MORE, True),
    "no properties": ({"type": "object", "properties": {}}, MORE, False),
    "one part": ({"allOf": [X_ALONE]}, MORE, False),
    "two parts": ({"allOf": [X_ALONE, {"properties": {"y": {"type": "null"}}}]}, MORE, True),
    "two parts, one by name": (
        {"$defs": {"p": X_ALONE}, "properties": {"y": True}, "$ref": "#/$defs/p"}, MORE, True,
    ),
    "one of two": ({"anyOf": [X_ALONE, {"properties": {"z": {"type": "null"}}}]}, MORE, False),
    "a name": ({"$defs": {"a/ß": X_ALONE}, "$ref": "#/$defs/a~1%C3%9F"}, MORE, False),
    "within": ({"type": "array", "items": X_ALONE}, f"[{MORE}]", False),
}  # fmt: skip


def fits(guide: Guide, text: str) -> bool:
    """Return whether an answer may begin with a text."""
    for letter in text:
        token = TOKENIZERS["bytes"].backend_tokenizer.token_to_id(letter)
        if not guide.allowed()[token]:
            return False
        guide.token(token)
    return True


@pytest.mark.parametrize("name", OPEN)
def test_an_object_has_no_property_that_its_schema_does_not_name(name):
    """Else a model writes on until it is cut: what it has written may always go on."""
    schema, text, is_open = OPEN[name]
    check(text, schema)
    guide = Guide(TOKENIZERS["bytes"], frozenset([END]), schema)
    assert fits(guide, text) == is_open
    guide.restart()
    assert fits(guide, text.partition(",")[0] if name != "no properties" else "{}")


def test_closed_objects_within_open_ones_are_found_where_a_schema_is():
    """A property may have the name of a keyword, and a constant may look like a schema."""
    open_ = {"properties": {}}
    shut = {**open_, "additionalProperties": False}
    assert closed(
        {
            "properties": {
                "format": open_,
                "uniqueItems": open_,
                "items": {"items": [open_, open_]},
            },
            "additionalProperties": open_,
            "const": open_,
            "default": open_,
            "$defs": {"a": open_},
            "title": 3,
            "required": "?",
        }
    ) == {
        "properties": {"format": shut, "uniqueItems": shut, "items": {"items": [shut, shut]}},
        "additionalProperties": shut,
        "const": open_,
        "default": open_,
        "$defs": {"a": shut},
        "title": 3,
        "required": "?",
    }
    joined = {"allOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"items": open_}, "b": open_}}
    assert closed(joined)["$defs"] == {"a": {"items": open_}, "b": open_}


@pytest.mark.parametrize("format", ["path", "password", "binary", "no such", *sorted(FORMATS)])
def test_formats_that_cannot_be_held_are_notes(format):
    """An answer is held to the formats that llguidance knows; others and `uniqueItems` pass."""
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": format}}
    guide = Guide(TOKENIZERS["bytes"], frozenset([END]), schema)
    assert fits(guide, '["]","]"]') == (format not in FORMATS - {"unknown"})


names = st.sampled_from(["a", "b", "long name", "ß"])
schemas = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -20, "maximum": 30},
            {"type": "number"},
            {"type": "string", "maxLength": 4},
            {"enum": ["x", 2, None]},
            {"const": {"k": "v"}},
            {"type": ["string", "null"], "maxLength": 2},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda items, least, more: {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda parts, count: {
                "type": "object",
                "properties": parts,
                "required": sorted(parts)[:count],
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, max_size=3),
            st.integers(0, 3),
        ),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@given(schema=schemas, tokenizer=st.sampled_from(sorted(TOKENIZERS)), seed=st.integers(0, 999))
def test_every_text_fits_a_random_schema(schema, tokenizer, seed):
    known = TOKENIZERS[tokenizer]
    text, complete = walked(Guide(known, frozenset([END]), schema), known, seed)
    if complete:
        check(text, schema)


def test_answers_of_a_random_model_fit_or_are_cut(runtime):
    """Whatever is drawn, past evictions too; a model without an end token ends all the same."""
    session, reasons = session_of(runtime), set()
    session.set_generation(temperature=1.0, max_new_tokens=40, seed=5)
    for name in ("letters", "whole range", "multiples", "tuple", "constants", "date", "anything"):
        session.set_generation(json_schema=TRICKY[name])
        for _ in range(3):
            text = "".join(session.send("What is it?"))
            reasons.add(session.turn.finish_reason)
            if session.turn.finish_reason == "stop":
                check(text, TRICKY[name])
            else:
                assert session.turn.completion_tokens == 40
            assert session.messages[-1]["content"] == text
    session.set_generation(json_schema=TRICKY["date"], max_new_tokens=1)
    "".join(session.send("What is it?"))
    reasons.add(session.turn.finish_reason)  # one token is no date
    assert reasons == {"stop", "length"}
    session.set_generation(json_schema=None, max_new_tokens=3)
    assert "".join(session.send("And now?")).strip()[:1] not in ("{", "[")
    assert session.turn.finish_reason == "length"


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.2}, {"min_p": 0.9},
                                     {"repetition_penalty": 5.0, "do_sample": False}])  # fmt: skip
def test_other_settings_choose_among_what_is_allowed(runtime, options):
    session = session_of(runtime)
    session.set_generation(temperature=2.0, max_new_tokens=30, regex="[0-9]{3}-[a-f]{2}", seed=1)
    session.set_generation(**options)
    for _ in range(3):
        text = "".join(session.send("Hello!"))
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", text), text
        assert session.turn.finish_reason == "stop"


def test_an_answer_that_is_cut_says_so(runtime):
    session = session_of(runtime)
    session.set_generation(json_schema=DOOR, max_new_tokens=3)
    assert "".join(session.send("Hello!")).startswith("{")
    assert session.turn.finish_reason == "length"
    session.set_generation(max_new_tokens=200, stop_strings=["door"])
    assert "door" not in "".join(session.send("Hello!"))
    assert (session.turn.finish_reason, session.turn.stop_string) == ("stop", "door")


def test_an_answer_begun_is_not_disturbed_by_the_next_one(runtime):
    session = session_of(runtime)
    session.set_generation(json_schema=DOOR, max_new_tokens=200)
    first = session.send("Hello!")
    begun = next(first) + next(first)
    session.send("This is refused or begun by its first token only.")
    check(begun + "".join(first), DOOR)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "contains": {}}, "contains"),
        ({"if": {"type": "object"}, "then": {"required": ["b"]}}, '"if"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supp"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum"),
        ({"$ref": "#/$defs/x"}, "'/$defs/x' does not exist"),
        ({"$ref": "#"}, "no text fits this JSON schema"),
        ({"$ref": "file:///etc/passwd"}, "not present in a registry"),
        ({"$ref": "http://localhost:9/x.json"}, "not present in a registry"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"enum": [{1, 2}]}, "not JSON serializable"),
        ({"const": float("nan")}, "Out of range float"),
        ({"properties": {f"key {i}": {} for i in range(9_000)}}, "it has 142,906 letters, and"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_before_anything_is_read(runtime, schema, says):
    session = session_of(runtime)
    session.set_generation(regex="[a-z]+")
    with pytest.raises(SchemaRefused, match=re.escape(says)):
        session.set_generation(json_schema=schema, regex=None, max_new_tokens=9)
    assert (session.generation.regex, session.generation.json_schema) == ("[a-z]+", None)
    assert session.generation.max_new_tokens == 6
    session.set_generation(regex=None)
    session.generation.json_schema = schema  # past the door
    with pytest.raises(SchemaRefused, match=re.escape(says)):
        session.send("Hello!")
    assert session.cache.seen == 0


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"pattern": "(?=x)y"}, "regex parse error: (?=x)y ^^^ error: look-around, including"),
    ],
)
def test_a_tool_that_cannot_be_held_to_is_refused_by_its_schema_alone(runtime, part, says):
    """And not by the grammar around it, which nobody wrote."""
    schema = {"type": "object", "properties": {"a": {"type": "string", **part}}}
    with pytest.raises(SchemaRefused) as refused:
        session_of(runtime).set_generation(call_schema=schema)
    assert f"of these tools' parameters: {says}" in str(refused.value)
    assert not re.search("%|failed to|TEXT|llguidance", str(refused.value))


def test_a_tool_is_refused_by_the_place_in_its_own_schema(runtime):
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}
    schema = schema_of_call([{"function": {"name": "look", "parameters": parameters}}])
    for form in ("json_schema", "call_schema"):
        with pytest.raises(SchemaRefused, match=r"'/\$defs/x' does not exist"):
            session_of(runtime).set_generation(**{form: schema})


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"json_schema": "{}"}, "use a dictionary"),
        ({"json_schema": False}, "True for any JSON"),
        ({"regex": 3}, "a regular expression as a text"),
        ({"regex": "a", "json_schema": {}}, "set one of them to None"),
    ],
)
def test_what_is_no_schema_is_refused(runtime, setting, says):
    with pytest.raises(ValueError, match=says):
        session_of(runtime).set_generation(**setting)


def test_without_the_library_the_extra_is_named(runtime, monkeypatch):
    session = session_of(runtime)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ExtraMissing, match=r"pip install '\.\[json\]'"):
        session.set_generation(json_schema={"type": "object"})
    assert "".join(session.send("Hello!"))


CALL = {
    "type": "object",
    "properties": {"name": {"const": "add"}, "arguments": DOOR},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
GOOD = '<tool_call>\n{"name": "add", "arguments": {"door": "red", "code": 12}}\n</tool_call>'
WRITTEN = {  # a text, and how much of it an answer may begin with
    "text": ("Hello! {1} <tool and </tool_call> </think>\n", None),
    "a call": (GOOD, None),
    "several": (f"One.{GOOD}{GOOD} Two. {GOOD}\nThree.", None),
    "another tool": ('<tool_call>{"name": "sub"', '<tool_call>{"name": "'),
    "arguments that do not fit": (GOOD.replace("12", "true"), GOOD.partition("12")[0]),
    "arguments beyond": (GOOD.replace("12", '12, "x"'), GOOD.partition("12")[0] + "12"),
    "no JSON": ("Wait.<tool_call>no", "Wait.<tool_call>"),
    "behind a call": (f"{GOOD}<tool_call>[", f"{GOOD}<tool_call>"),
    "not closed": (GOOD.replace("</tool_call>", "Done."), GOOD.partition("</")[0]),
}


def marked(*special: str) -> Any:
    """A tokenizer of which these marks are special tokens."""
    tokenizer = Tokenizer.from_file(str(pocket.path() / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in special])
    return Wrapped(tokenizer)


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>"), ("</think>",)])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_fit_their_schema_and_what_is_around_them_is_free(name, special):
    text, part = WRITTEN[name]
    tokenizer = marked(*special)
    if "</tool_call>" in special:  # which no text has
        text = text.replace("and </tool_call>", "")
    guide = Guide(tokenizer, frozenset([END]), call_schema=CALL)
    for _ in range(2):
        read = list[int]()
        for token in tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids:
            if not guide.allowed()[token]:
                break
            assert guide.token(token) is None
            read.append(token)
        written = tokenizer.backend_tokenizer.decode(read, skip_special_tokens=False)
        whole = text if part is None else part
        assert whole.startswith(written)
        assert len(written) >= len(whole) - 2  # tokens have several letters
        assert guide.allowed()[END] == (part is None)  # a call that is begun is written to its end
        guide.restart()


@pytest.mark.parametrize("seed", range(3))
def test_every_call_of_random_answers_fits(seed):
    tokenizer = marked("<tool_call>", "</tool_call>")
    opens = tokenizer.backend_tokenizer.token_to_id("<tool_call>")
    guide = Guide(tokenizer, frozenset([END]), call_schema=CALL)
    rng, read = np.random.default_rng(seed), [opens]
    guide.token(opens)
    while len(read) < 400 and read[-1] != END:
        allowed = np.flatnonzero(guide.allowed())
        read.append(int(rng.choice(allowed if END not in allowed else [opens, END])))
        if read[-1] != END:
            guide.token(read[-1])
    text = tokenizer.backend_tokenizer.decode(read, skip_special_tokens=False)
    calls = re.findall("<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    assert calls
    for call in calls:
        check(call, CALL)


def test_a_call_schema_leaves_thoughts_and_saved_files_as_they_are(runtime, tmp_path):
    session = session_of(runtime)
    session.set_generation(call_schema=CALL, template_options={"enable_thinking": True})
    assert "".join(session.send("Hello!"))
    with pytest.raises(ValueError, match="set one of them to None"):
        session.set_generation(regex="a")
    if not isinstance(runtime, ToyEngine):
        session.save(tmp_path / "s")
        assert type(session).load(runtime, tmp_path / "s").generation.call_schema == CALL


def test_an_expression_whose_states_are_too_many_ends_by_name(monkeypatch):
    """The next answer is held to it again."""
    monkeypatch.setattr(guides, "STATES", 3000)
    guide = Guide(TOKENIZERS["pocket"], frozenset([END]), regex="(.*x.{0,200}y){3}")
    letters = np.random.default_rng(0).choice(list("xyab"), 3000)
    ids = {x: TOKENIZERS["pocket"].backend_tokenizer.token_to_id(x) for x in "xyab"}

    def walk() -> None:
        for letter in letters:
            guide.allowed()
            guide.token(ids[letter])

    with pytest.raises(SchemaRefused, match=r"too many states: 3000 >= 3000$"):
        walk()
    guide.restart()
    assert guide.allowed()[ids["x"]]


def test_a_tokenizer_that_the_library_cannot_read_is_refused():
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(SchemaRefused, match="cannot read its tokenizer"):
        Guide(Wrapped(words), frozenset(), {})


def test_rows_of_a_batch_are_held_to_schemas_of_their_own():
    runtime = pocket_runtime(budget=24)
    held: list[dict[str, Any]] = [
        {"json_schema": DOOR},
        {},
        {"regex": "(ab|ba){2,30}"},
        {"json_schema": DOOR, "logprobs": 1, "do_sample": True},
    ]

    def sessions() -> list[Any]:
        made = [runtime.session(seed=3) for _ in held]
        for session, options in zip(made, held, strict=True):
            session.set_generation(max_new_tokens=3, do_sample=False)
            list(session.send("Please remember: the code for the blue door is 4821. " * 2))
            session.set_generation(max_new_tokens=60, **options)
        return made

    batch, several = runtime.batch(3), sessions()
    assert batch.why_one_by_one is None
    question = "What is the code for the blue door?"
    answers = together(batch, several, [question] * 4)
    assert answers == ["".join(session.send(question)) for session in sessions()]
    check(answers[0], DOOR)
    check(answers[3], DOOR)
    assert re.fullmatch("(ab|ba){2,30}", answers[2])
    assert answers[1][0] not in "{["
    assert "".join(one.text for one in several[3].logprobs) == answers[3]
