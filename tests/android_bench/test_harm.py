"""Results and plans that mean harm: refused by name, or reported without what they smuggle."""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_results import EVIL, MUTATIONS, mutated, plan, put, result, written
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcap.android_bench.devices.run import DeviceRunSettings
from kvcap.android_bench.documents import (
    BENCH,
    PARTS,
    SCHEMAS,
    parsed,
    plan_id,
    read_plan,
    read_result,
    validate,
    write_json,
)
from kvcap.android_bench.errors import PlanBroken, ResultBroken, ResultsFull, RunFailed
from kvcap.android_bench.results import table
from kvcap.android_bench.results.chart import _styles, draw
from kvcap.android_bench.results.judge import judged
from kvcap.android_bench.safe_text import escaped, plain
from kvcap.android_bench.server.landing import ClientLimits, Results
from kvcap.cli import run
from kvcap.export.graphs.spec import with_graphs_of_their_own

few = settings(max_examples=150)


def safe_line(text: str) -> None:
    """Hold a text to one line that a terminal shows as it is."""
    assert text.isprintable(), repr(text)
    assert len(text) <= 1000


def safe_markdown(text: str, titles: int) -> None:
    """Hold a page to no HTML, control character, heading or row that a document brought."""
    text.encode("utf-8")
    assert "<" not in text
    assert all(line.isprintable() for line in text.split("\n"))
    lines = text.split("\n")
    assert sum(line.startswith("#") for line in lines) == titles
    for head, rule in pairwise(lines):
        if rule.startswith("|---"):
            assert len(re.findall(r"(?<!\\)\|", head)) == rule.count("|")


@few
@given(MUTATIONS)
def test_a_changed_result_is_refused_or_reported_safely(tmp_path_factory, mutations):
    file = tmp_path_factory.mktemp("fuzz") / "r.json"
    file.write_bytes(written(mutated(result(), mutations)))
    try:
        document = judged(read_result(file))
    except ResultBroken as error:
        safe_line(str(error))
        return
    safe_markdown(table.markdown([document]), 2)
    safe_markdown(table.markdown([document, judged(result())]), 3)
    write_json(document, file)
    again = read_result(file)  # what was accepted is accepted once more
    assert judged(again)["validity"] == document["validity"]


@few
@given(MUTATIONS)
def test_a_changed_result_that_is_sent_is_refused_or_written(tmp_path_factory, mutations):
    results = Results(tmp_path_factory.mktemp("fuzz"), plan(), ClientLimits(spare_bytes=0))
    try:
        landed = results.take(written(mutated(result(), mutations)), "")
    except (ResultBroken, ResultsFull) as error:
        safe_line(str(error))
        assert not list(results.folder.iterdir())
        return
    assert re.fullmatch(r"[A-Za-z0-9-]+\.json", landed.path.name)
    assert list(results.folder.iterdir()) == [landed.path]


@few
@given(MUTATIONS)
def test_a_changed_plan_is_refused_or_stays_in_its_folder(tmp_path_factory, mutations):
    folder = put(tmp_path_factory.mktemp("fuzz"))
    document = mutated(plan(), mutations)
    if "id" in document:
        document["id"] = plan_id(document)  # or nothing but the id would be refused
    (folder / "plan.json").write_bytes(written(document))
    try:
        read = read_plan(folder)
    except PlanBroken as error:
        safe_line(str(error))
        return
    for entry in read["files"]:
        assert (folder / entry["file"]).resolve().is_relative_to(folder.resolve())
    for cell in read["cells"]:
        safe_line(cell["id"])


def test_the_good_ones_are_good(tmp_path):
    assert read_plan(put(tmp_path))["id"] == plan()["id"]
    document = Results(tmp_path / "r", plan()).take(written(result()), "").result
    kinds = {flag["kind"] for flag in document["validity"]["flags"]}
    assert kinds == {"failed", "rules"}


def test_rounds_without_samples_are_no_fault(tmp_path):
    document = result()
    document["baselines"][0]["samples_us"] = [[], []]
    document["cells"][4]["samples_us"] = [[]]
    text = table.markdown([judged(document)])
    assert "5 of 6 cells ran" in text


# Words


@given(st.text())
def test_words_of_others_stay_one_line_and_no_markup(text):
    safe_line(plain(text))
    shown = escaped(text)
    assert shown.isprintable()
    assert "<" not in shown
    assert not re.search(r"(?<!\\)(\\\\)*[|*`\[\]~]", shown)
    assert not re.match(r"#+(\s|$)|[-+=](\s|$)|\d+[.)](\s|$)", shown)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("evil", EVIL)
def test_no_field_brings_markup_into_a_report_or_breaks_a_chart(evil, tmp_path, capsys):
    """Every field of text, one after the other and all together."""
    document = result()
    short = evil[:100]
    for part, name in (
        ("device", "model"),
        ("device", "soc"),
        ("device", "android"),
        ("run", "preset"),
        ("shape", "name"),
        ("runtime", "version"),
    ):
        document[part][name] = short
    document["conditions"]["before"] |= {"governor": [short], "thermal": {short: 1.0}}
    for row in document["cells"]:
        row |= {"policy": short, "formulation": short, "provider_got": short}
        row |= {"provider_asked": short, "id": short + row["id"]}
    document["cells"][4]["reason"] = evil[:2000]
    document["run"]["reference"] = document["cells"][0]["id"]
    document["repeat"] = None
    (tmp_path / "r.json").write_bytes(written(document))
    files = ["--plot", str(tmp_path / "r.png"), "-o", str(tmp_path / "r.md")]
    assert run(["android", "report", str(tmp_path / "r.json"), *files]) == 0
    printed = capsys.readouterr()
    safe_markdown(printed.out, 2)
    assert (tmp_path / "r.md").read_text() == printed.out
    assert (tmp_path / "r.png").stat().st_size > 10_000
    document["run"]["plan"] = evil
    (tmp_path / "r.json").write_bytes(written(document))
    assert run(["android", "report", str(tmp_path / "r.json")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    safe_line(err.rstrip("\n"))


def test_what_a_device_says_does_not_reach_the_terminal_as_it_is(capsys):
    DeviceRunSettings().note("[1/2] \x1b[2J\x07 a\nb")
    safe_line(capsys.readouterr().err.rstrip("\n"))
    safe_line(str(RunFailed("the runner ended: \x1b]0;owned\x07")))


def test_a_chart_of_very_many_lines_shows_the_first(tmp_path):
    document = result()
    document["cells"] = [
        {**document["cells"][0], "id": f"p{i}.n{n}", "policy": f"p{i}", "n": n}
        for i in range(40)
        for n in range(1, 60, 10)
    ]
    document |= {"repeat": None}
    draw([judged(document)], tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_each_policy_of_a_plan_has_a_colour_of_its_own():
    policies = with_graphs_of_their_own()
    cell = result()["cells"][0]
    lines = {(name,): [{**cell, "policy": name}] for name in policies}
    styles = _styles(lines)
    assert len({style["color"] for style in styles}) == len(policies)
    assert styles == _styles(lines)


# Size


def calls(work: Any) -> int:
    """Count the functions of Python that run."""
    count = 0

    def seen(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    ("path", "value"),
    [(("cells",), 0), (("cells", 0, "samples_us"), 0), (("cells", 0, "samples_us", 0), -1),
     (("baselines",), {}), (("repeat", "samples_us"), "x")],
)  # fmt: skip
def test_many_faults_cost_no_more_than_one(path, value):
    def faulty(count: int) -> dict[str, Any]:
        document = result()
        holder: Any = document
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = [value] * count
        return document

    def refuse(document: dict[str, Any]) -> None:
        with pytest.raises(ResultBroken, match=path[0]):
            validate(document, BENCH, "the result", ResultBroken)

    refuse(faulty(1))  # what is made once is made
    few_faults, many_faults = faulty(1), faulty(900)
    assert calls(lambda: refuse(many_faults)) < 1.2 * calls(lambda: refuse(few_faults))


def test_long_lists_of_numbers_are_looked_at_as_a_whole():
    document = result()

    def held(count: int) -> int:
        document["cells"][0]["samples_us"][0] = [1.5] * count
        return calls(lambda: validate(document, BENCH, "the result", ResultBroken))

    def refused(count: int) -> int:
        document["cells"][0]["samples_us"][0] = [*[1.5] * count, "x"]

        def refuse() -> None:
            with pytest.raises(ResultBroken, match=f"samples_us/0/{count}: 'x' is not of type"):
                validate(document, BENCH, "the result", ResultBroken)

        return calls(refuse)

    held(1)
    refused(1)
    assert held(100_000) == held(1)
    assert refused(100_000) < 1.1 * refused(1)


def test_every_part_of_both_formats_is_bounded():
    """Whatever a schema lets in has a largest length, a largest number, or is one of a few."""
    for name in ("bench.schema.json", "plan.schema.json"):
        document = json.loads((SCHEMAS / name).read_text())
        waiting = [(name, document)]
        while waiting:
            path, node = waiting.pop()
            if isinstance(node, list):
                waiting += [(f"{path}/{i}", one) for i, one in enumerate(node)]
                continue
            if not isinstance(node, dict):
                continue
            waiting += [(f"{path}/{key}", one) for key, one in node.items()]
            types = node.get("type", [])
            if path.endswith("/properties") or "const" in node or "enum" in node:
                continue
            types = [types] if isinstance(types, str) else types
            if "string" in types:
                pattern = node.get("pattern", "")
                assert "maxLength" in node or re.search(r"\{\d+\}\$", pattern), path
            if {"number", "integer"} & {*types}:
                assert "maximum" in node, path
                assert "minimum" in node or "exclusiveMinimum" in node, path
            if "array" in types:
                assert "maxItems" in node, path
            if "object" in types and "allOf" not in node:
                assert node.get("additionalProperties") is False or "maxProperties" in node, path


def test_documents_of_very_many_parts_are_not_read():
    with pytest.raises(ResultBroken, match="lists and objects"):
        parsed(b"[" + b"{}," * PARTS + b"{}]", "the result", ResultBroken)
    for text in ("[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900):
        document = json.loads(text)
        with pytest.raises(ResultBroken):
            validate({"schema": BENCH, "run": document}, BENCH, "the result", ResultBroken)
        with pytest.raises(ResultBroken):
            validate({"schema": document}, BENCH, "the result", ResultBroken)


# Files


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: os.mkfifo(p), "is a pipe, not a file"),
        (lambda p: p.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda p: p.mkdir(), "is a directory, not a file"),
        (lambda p: p.symlink_to(p), "cannot be read"),
        (lambda p: None, "No such file"),
        (lambda p: os.truncate(os.open(p, os.O_CREAT | os.O_RDWR), 2**40), "bytes, more than"),
        (lambda p: p.write_bytes(written(result()).decode().encode("utf-16")), "no JSON"),
        (lambda p: p.write_bytes(b'{"schema": "\xe9"}'), "no JSON"),
        (lambda p: p.write_bytes(b"[" * 90_000), "nested too deeply"),
        (lambda p: p.write_text(""), "cannot be read"),
        (lambda p: p.write_text("[]"), "has schema None"),
        (lambda p: p.write_text("{"), "cannot be read"),
        (lambda p: p.write_text('{"schema": "other/2"}'), "has schema 'other/2'"),
        (lambda p: p.write_text('{"schema": NaN}'), "NaN is no JSON"),
        (lambda p: p.write_bytes(b'{"schema": ' + b"9" * 5000 + b"}"), "no JSON"),
    ],
)
def test_files_that_could_do_harm_are_refused_by_name(make, message, tmp_path, capsys):
    path = tmp_path / "r.json"
    make(path)
    assert run(["android", "report", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert run(["android", "report", str(path) + "\0"]) == 2


def test_a_byte_order_mark_does_no_harm(tmp_path):
    (tmp_path / "r.json").write_bytes(b"\xef\xbb\xbf" + written(result()))
    assert read_result(tmp_path / "r.json")["run"]["preset"] == "quick"


def test_a_plans_file_that_is_a_pipe_is_missing(tmp_path):
    put(tmp_path)
    (tmp_path / "models/m.onnx").unlink()
    os.mkfifo(tmp_path / "models/m.onnx")
    with pytest.raises(PlanBroken, match="is missing"):
        read_plan(tmp_path)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def full(self: Path, *_: Any, **__: Any) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_json({}, tmp_path / "r.json")
    assert not list(tmp_path.iterdir())
