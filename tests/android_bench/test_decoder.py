"""A whole decoder in a plan: what the three runners time, and what is made of it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_requests import edited, posted, vendored
from make import argv, ran
from tools import (
    PATIENCE,
    pocket_decoder,
    runner_here,
    sliding_decoder,
)

from kvcap.android_bench.devices.host import run_here
from kvcap.android_bench.documents import read_plan, read_result
from kvcap.android_bench.errors import PlanBroken, ResultBroken
from kvcap.android_bench.plan.decoder import DecoderWork, shape_of
from kvcap.android_bench.plan.presets import narrowed
from kvcap.android_bench.plan.write import PlanRequest, write_plan
from kvcap.android_bench.results import chart, judge, regress, table
from kvcap.android_bench.runner.measure import RunOptions
from kvcap.export.graphs.shape import Shape

WORK = DecoderWork(prompt=20, answer=20, long=300, minutes=0.002, every=0.05)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    """Return one small cell, and the built-in model's decoder of 128 slots."""
    return planned(pocket_decoder(tmp_path_factory), tmp_path_factory)


def planned(decoder: Path, factory: pytest.TempPathFactory) -> Path:
    """Return a plan of one small cell and a decoder."""
    quick = narrowed("quick", ["keydiff"], ["stateless"], ["fp32"], ["score"], [64])
    rules = replace(quick.rules, min_runs=3, min_seconds=0.006, warmup_seconds=0.001, rounds=2)
    sizes = shape_of(decoder)
    name = sizes.pop("name")
    folder = factory.mktemp("decoder") / "plan"
    wanted = PlanRequest("quick", replace(quick, rules=rules), Shape(**sizes), name, decoder, WORK)
    write_plan(wanted, folder)
    return folder


@pytest.fixture(scope="module")
def result(plan) -> dict[str, Any]:
    return run_here(plan, RunOptions(cores="none"))


def c_command(here: Path, plan: Path, out: Path) -> list[str]:
    """Return the command by which the C runner runs a plan."""
    program, library = here / "kvcap-bench", here / "libonnxruntime.so"
    return argv("{} {} -o {} --cores none --lib {}", program, plan / "plan.json", out, library)


def only(result: dict[str, Any]) -> dict[str, Any]:
    (row,) = result["decoders"]
    return row


def check_row(row: dict[str, Any], plan: Path) -> None:
    """Whatever ran it, the numbers are those of the plan's work."""
    wanted = read_plan(plan)["decoder"]
    assert row["status"] == "ok", row["reason"]
    assert row["parity"]["passed"], row["parity"]
    assert [len(tokens) for tokens in row["token_us"]] == [19, 19]
    assert len(row["first_ms"]) == len(row["long_ms"]) == 2
    assert row["evicting_blocks"] == 10 - 4  # 300 tokens in blocks of 32, of which 128 fit
    assert row["held_bytes"] > wanted["state_bytes"]  # and the table of rotations
    assert len(row["sustained"]) >= 2
    assert sum(window["tokens"] for window in row["sustained"]) >= 2
    mean = np.mean(np.concatenate(row["token_us"]))
    assert row["tokens_per_s"] == pytest.approx(1e6 / mean)
    assert row["prefill_tokens_per_s"] == pytest.approx(300 / np.median(row["long_ms"]) * 1000)


def test_a_plan_holds_the_decoder_and_the_scores_of_its_layers(plan):
    document = read_plan(plan)
    assert document["shape"] == {
        "name": "pocket",
        "batch": 1,
        "kv_heads": 2,
        "heads": 6,
        "head_dim": 64,
        "block": 32,
    }
    decoder = document["decoder"]
    assert decoder["id"] == "decoder.pocket.keydiff.fp32.n128"
    assert len(decoder["check"]["prompt"]) > 128, "what is checked passes the budget"
    names = {entry["file"] for entry in document["files"]}
    facts = json.loads((plan / "decoder" / "kvcap.json").read_text())
    assert names >= {"decoder/kvcap.json", *(f"decoder/{e['file']}" for e in facts["files"])}


def test_the_python_runner_times_it(result, plan):
    check_row(only(result), plan)
    assert {flag["kind"] for flag in result["validity"]["flags"]} <= {
        "rules",
        "drift",
        "throttled",
        "spread",
        "timer",
    }


@pytest.mark.slow
def test_the_c_runner_times_it(plan, tmp_path_factory, tmp_path):
    here = runner_here(tmp_path_factory)
    command = c_command(here, plan, tmp_path / "c.json")
    done = ran(command)
    assert done.returncode == 0, done.stderr
    check_row(only(judge.judged(read_result(tmp_path / "c.json"))), plan)

    def state(plan_document: Any, folder: Path) -> None:
        file = folder / "decoder" / "kvcap.json"
        facts = json.loads(file.read_text())
        facts["state"].append({**facts["state"][-1], "name": "accumulated"})
        file.write_text(json.dumps(facts))

    command[1] = str(edited(plan, tmp_path / "plan", state) / "plan.json")
    assert ran(command).returncode == 0
    row = only(read_result(tmp_path / "c.json"))
    assert (row["status"], "accumulated" in row["reason"]) == ("skipped", True)
    assert "--browser" in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compact", "true"])
def test_runners_time_a_decoder_whose_layers_slide(mode, tmp_path_factory, tmp_path):
    """Its logits are checked over several budgets and windows."""
    plan = planned(sliding_decoder(tmp_path_factory, mode) / "decoder", tmp_path_factory)
    wanted = read_plan(plan)["decoder"]
    assert len(wanted["check"]["prompt"]) > 24 + 12
    here = runner_here(tmp_path_factory)
    command = c_command(here, plan, tmp_path / "c.json")
    done = ran(command)
    assert done.returncode == 0, done.stderr
    by_runner = {
        "c": read_result(tmp_path / "c.json"),
        "python": run_here(plan, RunOptions(cores="none")),
    }
    for result in by_runner.values():
        row = only(result)
        assert row["status"] == "ok", row["reason"]
        assert row["parity"]["passed"], row["parity"]
        assert row["held_bytes"] >= wanted["state_bytes"]


@vendored
@pytest.mark.slow
def test_the_page_times_it(browser, plan, tmp_path):
    from kvcap.android_bench.server.serving import Serving

    with Serving(plan, tmp_path) as serving:
        page = browser.new_page(viewport={"width": 360, "height": 740})
        page.goto(serving.url + "#start")
        page.locator("#outcome-text code").wait_for(timeout=1000 * PATIENCE)
        document = serving.landed.get(timeout=PATIENCE).result
        check_row(only(document), plan)
        assert "tokens/s" in page.locator("#decoders").inner_text()
        assert "Writing on and on" in page.locator("#sustained").inner_text()


@vendored
def test_the_server_takes_no_other_decoder(result, plan, tmp_path):
    from kvcap.android_bench.server.serving import Serving

    with Serving(plan, tmp_path) as serving:
        assert posted(serving, result)[0] == 201
        other = copy.deepcopy(result)
        only(other)["id"] = "decoder.other"
        status, response = posted(serving, other)
    assert (status, "decoder.other" in response["error"]) == (422, True)


def test_wrong_logits_are_called_wrong(plan, tmp_path):
    def spoil(document: Any, folder: Path) -> None:
        document["decoder"] |= {"sustained_seconds": 0, "long_tokens": 1, "answer_tokens": 2}
        file = folder / document["decoder"]["check"]["file"]
        logits = np.fromfile(file, "<f4")
        logits[7] += 1
        logits.tofile(file)

    document = run_here(edited(plan, tmp_path / "plan", spoil), RunOptions(cores="none"))
    assert not only(document)["parity"]["passed"]
    assert only(document)["parity"]["error"] == pytest.approx(1, abs=0.1)
    assert "parity" in {flag["kind"] for flag in document["validity"]["flags"]}
    assert "WRONG" in table.markdown([document])


def test_a_report_has_its_speeds_and_their_drift(result, tmp_path):
    document = copy.deepcopy(result)
    row = only(document)
    row |= {
        "first_ms": [50.0, 70.0, 60.0],
        "token_us": [[9000.0, 11000.0]],
        "long_ms": [600.0],
        "sustained": [{"seconds": 30.0, "tokens": 600}, {"seconds": 30.0, "tokens": 300}],
    }
    document = judge.judged(document)
    text = table.markdown([document])
    assert "| decoder.pocket.keydiff.fp32.n128 | cpu | 1 | 60.0 (20 tokens) | 100 " in text
    assert "500 (300 tokens, 6 blocks evict)" in text
    assert "-50% from first to last: 20.0, 10.0" in text
    flags = {flag["kind"]: flag["text"] for flag in document["validity"]["flags"] if flag["cell"]}
    assert "-50%" in flags["throttled"]
    assert "token_us" not in only(judge.rows_of(document))
    chart.draw([document], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    beside = table.markdown([document, document])
    assert "60.0, 100, 500" in beside
    slower = copy.deepcopy(document)
    only(slower)["token_us"] = [[20000.0]]
    only(slower)["first_ms"] = [30.0]
    worse = regress.regressions(judge.judged(slower), document, 0.1)
    assert [line for line in worse if "decoder" in line] == [
        "decoder.pocket.keydiff.fp32.n128 (cpu, 1): tokens a second 50.0, 100.0 before"
    ]


def test_what_cannot_be_timed_is_refused_by_name(plan, tmp_path, kvcap):
    assert "kvcap export decoder" in kvcap.refused(
        "android", "plan", "--decoder", str(tmp_path), "-o", str(tmp_path / "x")
    )
    with pytest.raises(PlanBroken, match="--answer-tokens"):
        DecoderWork(answer=1)

    def lengths(plan_document: Any, _: Path) -> None:
        plan_document["decoder"]["check"]["runs"].append(1)

    with pytest.raises(PlanBroken, match="another length"):
        read_plan(edited(plan, tmp_path / "runs", lengths))
    twice = run_here_once(plan)
    twice["decoders"] *= 2
    with pytest.raises(ResultBroken, match="twice"):
        judge.judged(twice)


def run_here_once(plan: Path) -> dict[str, Any]:
    """Return a result that nothing was measured for."""
    wanted = read_plan(plan)["decoder"]
    row = {
        **{key: wanted[key] for key in ("id",)},
        "threads": 1,
        "provider_asked": "cpu",
        "status": "failed",
        "reason": "a test",
    }
    return {"cells": [], "baselines": [], "decoders": [row]}
