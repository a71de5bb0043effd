"""Documents held to JSON schemas: stricter than JSON, the first fault by its place."""

from __future__ import annotations

import json

import pytest

from kvcap.schema import fault

SCHEMA = {
    "type": "object",
    "required": ["times"],
    "properties": {
        "times": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 10}},
        "free": {"type": "array", "items": {"type": "number"}},
        "odd": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}},
        "count": {"type": "integer"},
        "other": {"$ref": "other.schema.json"},
    },
}


@pytest.fixture
def schema(tmp_path):
    (tmp_path / "other.schema.json").write_text(json.dumps({"enum": ["a"]}))
    path = tmp_path / "one.schema.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def test_what_a_schema_allows_has_no_fault(schema):
    good = {"times": [0, 1.5, 10], "free": [-1, 1e300], "odd": [0.1], "count": 3, "other": "a"}
    assert fault(good, schema) is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "the whole: 'times' is a required property"),
        ([], "the whole: [] is not of type 'object'"),
        ({"times": [1, 11]}, "times/1: 11 is greater than the maximum of 10"),
        ({"times": [1, 2, True]}, "times/2: True is not of type 'number'"),
        ({"times": [1, "2"]}, "times/1: '2' is not of type 'number'"),
        ({"times": [], "free": [1, float("inf")]}, "free/1: inf is not of type 'number'"),
        ({"times": [], "free": [float("nan")]}, "free/0: nan is not of type 'number'"),
        ({"times": [], "odd": [1, 0]}, "odd/1: 0 is less than or equal to the minimum of 0"),
        ({"times": [], "count": 1.0}, "count: 1.0 is not of type 'integer'"),
        ({"times": [], "other": "b"}, "other: 'b' is not one of ['a']"),
    ],
)
def test_the_first_fault_is_told_by_its_place(schema, document, message):
    assert fault(document, schema) == message


def test_a_long_value_is_cut(schema):
    reason = fault({"times": "x" * 10_000}, schema)
    assert len(reason) < 200
    assert reason.startswith("times: 'xxx")
    assert reason.endswith("is not of type 'array'")


def test_a_document_nested_too_deeply_is_told(schema):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert fault({"times": [], "other": deep}, schema) == "it is nested too deeply"
