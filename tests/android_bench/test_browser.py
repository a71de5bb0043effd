"""The page in a real browser, headless: what it measures, and what can go wrong on the way.

Needs Debian's package browser, and onnxruntime-web (python -m kvcap.lab.vendor).
WebGPU runs in software here, which proves function, never speed.
"""

from __future__ import annotations

import base64
import copy
import csv
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_requests import edited, posted, requested, vendored
from make import argv, eventually, in_python
from tools import PATIENCE

from kvcap.android_bench.devices.host import run_here
from kvcap.android_bench.documents import BENCH, PLAN_FILE, read_result, validate
from kvcap.android_bench.errors import PlanBroken
from kvcap.android_bench.plan.presets import Group, PlanPreset, narrowed
from kvcap.android_bench.plan.write import PlanRequest, write_plan
from kvcap.android_bench.results.judge import WILD, fit, spread
from kvcap.android_bench.results.source import origin, title
from kvcap.android_bench.runner.inputs import hash11
from kvcap.android_bench.runner.measure import RunOptions
from kvcap.android_bench.runner.statistics import COLUMNS, csv_text, statistics
from kvcap.android_bench.server import vendor
from kvcap.android_bench.server.landing import ClientLimits
from kvcap.android_bench.server.serving import Serving
from kvcap.export.graphs.formulations import FORMULATIONS
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import with_graphs_of_their_own
from kvcap.lab import vendor as fetching
from kvcap.runtime.errors import PortTaken


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    """Return a plan of fp16 and fp32, scores and evictions, one thread and two."""
    quick = narrowed("quick", policies=["keydiff", "tova"], formulations=["stateless", "naive"])
    keydiff, tova = (
        next(v for v in quick.groups[0].variants if (v.policy, v.formulation) == wanted)
        for wanted in (("keydiff", "stateless"), ("tova", None))
    )
    groups = (
        Group("score", (keydiff, tova), (32, 64, 96), ("fp16",)),
        Group("score", (keydiff,), (32, 64, 96), ("fp32",)),
        Group("evict", (keydiff,), (64,), ("fp16",)),
    )
    rules = replace(quick.rules, min_runs=3, min_seconds=0.006, warmup_seconds=0.001, rounds=2)
    preset = PlanPreset(groups, rules, threads=(1, 2))
    folder = tmp_path_factory.mktemp("plan") / "plan"
    write_plan(
        PlanRequest("quick", preset, Shape(kv_heads=2, heads=4, head_dim=16, block=16)), folder
    )
    return folder


@pytest.fixture(scope="module")
def small(plan, tmp_path_factory) -> Path:
    """Three cells of it on one thread."""

    def shrink(plan: Any, _: Path) -> None:
        score = [c for c in plan["cells"] if c["policy"] == "keydiff" and c["n"] in (64, 80)]
        plan |= {"cells": score, "threads": [1], "reference": score[0]["id"]}

    return edited(plan, tmp_path_factory.mktemp("small") / "plan", shrink)


@pytest.fixture
def serving(small, tmp_path) -> Iterator[Serving]:
    with Serving(small, tmp_path / "results") as server:
        yield server


FLAGS = [
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--enable-features=Vulkan,WebGPU",
]
LIMIT = ClientLimits().result_bytes
SOON = 1000 * PATIENCE  # milliseconds

pytestmark = vendored


@pytest.fixture(scope="module")
def result(small, tmp_path_factory) -> dict[str, Any]:
    """Return a good result of the small plan, of this machine."""
    return run_here(small, RunOptions(cores="none"))


@pytest.fixture
def page(browser) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    yield context.new_page()
    context.close()


def opened(page: Any, url: str) -> Any:
    page.goto(url)
    page.locator("#start:visible, #trouble:visible").wait_for(timeout=SOON)
    return page


def measured(page: Any, serving: Serving) -> dict[str, Any]:
    """Press Start and wait for the file."""
    opened(page, serving.url).get_by_role("button", name="Start").click()
    page.locator("#outcome-text code").wait_for(timeout=SOON)
    document = read_result(serving.landed.get(timeout=PATIENCE).path)
    validate(document, BENCH, "the result", AssertionError)
    return document


def reach(page: Any, share: float) -> None:
    """Wait until so much is measured."""
    eventually(lambda: page.locator("#bar").evaluate("bar => bar.value") >= share)


def keeps(page: Any) -> None:
    """Wait until the browser keeps a part of the result."""
    eventually(lambda: page.evaluate("import('./store.js').then(store => store.kept())"))


# What the page measures


def test_a_plan_runs_and_its_result_lands(plan, page, tmp_path):
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    with Serving(plan, tmp_path) as serving:
        document = measured(page, serving)
        assert all(url.startswith((serving.url, "blob:")) for url in requests)
    rows = {(row["dtype"], row["stage"], row["threads"]) for row in document["cells"]}
    assert rows == {
        (d, s, t)
        for d, s in (("fp16", "score"), ("fp32", "score"), ("fp16", "evict"))
        for t in (1, 2)
    }
    for row in document["cells"]:
        assert (row["status"], row["provider_got"]) == ("ok", "wasm")
        assert row["parity"]["passed"], row
        assert len(row["samples_us"]) == document["rules"]["rounds"]
    assert document["run"]["complete"]
    assert document["repeat"] is not None
    assert {row["id"] for row in document["baselines"]} == {
        entry["id"] for entry in json.loads((plan / PLAN_FILE).read_text())["baselines"]
    }
    runtime = document["runtime"]
    assert (runtime["isolated"], runtime["telemetry"]) == (True, False)
    assert set(runtime["features"]) == {"simd", "threads"}
    assert runtime["timer_us"] < 50
    memory = document["memory"]
    assert (memory["of"], memory["reason"]) == ("WebAssembly", None)
    assert memory["peak_bytes"] >= 16 << 20  # what the module begins with
    assert memory["peak_bytes"] % 65536 == 0  # pages of WebAssembly
    assert document["device"]["source"] == "host"
    assert title(document).startswith("HOST, not a phone")
    assert not messages, "nothing on the console"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_the_page_can_be_read_and_heard(plan, page, tmp_path):
    with Serving(plan, tmp_path) as serving:
        opened(page, serving.url)
        assert page.title() == page.get_by_role("heading", level=1).inner_text()
        assert "Not a phone" in page.locator("#origin").inner_text()
        two = page.get_by_role("checkbox", name="WebAssembly, 2 threads")
        assert two.is_checked()  # as the plan asks
        two.uncheck()
        page.get_by_role("button", name="Start").click()
        page.get_by_role("progressbar", name="Measured so far").wait_for()
        page.locator("#announce", has_text="percent measured").wait_for(state="attached")
        page.get_by_role("heading", name="Done").wait_for(timeout=SOON)
        assert page.evaluate("document.activeElement.id") == "outcome-title"
        heads = page.get_by_role("columnheader").all_inner_texts()
        assert [head.split()[0] for head in heads] == ["Policy", "32", "64", "96", "t₀", "slope"]
        names = page.get_by_role("rowheader").all_inner_texts()
        assert [name.split() for name in names] == [
            ["KeyDiff", "stateless"],
            ["TOVA", "1", "query"],
        ]
        assert page.get_by_role("img").get_attribute("aria-label").endswith("has the numbers.")
        page.get_by_role("radio", name="relative").check()
        first = page.locator("tbody tr", has_text="KeyDiff").locator("td").first
        assert first.inner_text().split()[0] == "1.00×"
        assert re.match(r"[\d.]+–[\d.]+×", first.locator("small").first.inner_text())
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "the page scrolls sideways on a phone"
        with page.expect_download() as download:
            page.get_by_role("button", name="Download the result").click()
        with page.expect_download() as table:
            page.get_by_role("button", name="Download a table (CSV)").click()
    saved = json.loads(Path(download.value.path()).read_text())
    written = Path(table.value.path()).read_text().splitlines()
    assert list(csv.reader(written)) == list(csv.reader(csv_text([saved], COLUMNS).splitlines()))
    for row in saved["cells"]:
        expected = statistics(row["samples_us"])
        for name in ("min_us", "p50_us", "p90_us", "p95_us", "p99_us"):
            assert row[name] == pytest.approx(expected[name])
    validate(saved, BENCH, "the download", AssertionError)


@pytest.mark.slow
def test_webgpu_runs_what_it_can_and_names_what_it_lacks(serving, page):
    opened(page, serving.url)
    box = page.get_by_role("checkbox", name="WebGPU")
    if not box.is_enabled():
        pytest.skip("this Chromium has no WebGPU in software")
    assert "in software only" in page.locator("#rows").inner_text()
    box.check()
    page.get_by_role("checkbox", name="WebAssembly, 1 thread").uncheck()
    page.get_by_role("button", name="Start").click()
    page.locator("#outcome-text code").wait_for(timeout=SOON)
    document = serving.landed.get(timeout=PATIENCE).result
    by_type = {row["dtype"]: row for row in document["cells"]}
    assert by_type["fp32"]["status"] == "ok"
    assert by_type["fp32"]["provider_got"].startswith("webgpu")
    assert by_type["fp32"]["parity"]["passed"]
    assert by_type["fp16"]["status"] == "skipped"
    assert "shader-f16" in by_type["fp16"]["reason"]
    assert "shader-f16" in page.locator("#skipped").inner_text()
    assert document["memory"]["peak_bytes"] is None
    assert "cannot read the memory of WebGPU" in document["memory"]["reason"]


def test_a_wrong_graph_is_called_wrong(small, page, tmp_path):
    def spoil(plan, folder):
        (cell,) = (c for c in plan["cells"] if c["stage"] == "score" and c["dtype"] == "fp32")
        file = folder / cell["outputs"][0]["check"]["file"]
        numbers = np.fromfile(file, "<f4")
        numbers[3] += 1
        numbers.tofile(file)

    with Serving(edited(small, tmp_path / "plan", spoil), tmp_path / "results") as serving:
        document = measured(page, serving)
    verdicts = {(row["stage"], row["dtype"]): row["parity"] for row in document["cells"]}
    assert not verdicts["score", "fp32"]["passed"]
    assert verdicts["score", "fp32"]["error"] == pytest.approx(1, abs=0.1)
    assert verdicts["evict", "fp16"]["passed"]
    assert "parity" in {flag["kind"] for flag in document["validity"]["flags"]}
    page.get_by_role("radio", name="fp32").check()
    assert "wrong" in page.locator("tbody").first.inner_text()


# What goes wrong on the way


@pytest.mark.slow
def test_a_missing_model_fails_its_cells_alone(small, page, tmp_path):
    folder = tmp_path / "plan"
    shutil.copytree(small, folder)
    with Serving(folder, tmp_path / "results") as serving:
        opened(page, serving.url)
        (gone,) = folder.glob("models/*evict*")
        gone.unlink()
        page.get_by_role("button", name="Start").click()
        page.locator("#outcome-text code").wait_for(timeout=SOON)
        document = serving.landed.get(timeout=PATIENCE).result
    states = {row["stage"]: (row["status"], row["reason"]) for row in document["cells"]}
    assert states["score"] == ("ok", None)
    assert states["evict"][0] == "failed"
    assert gone.name in states["evict"][1]
    assert gone.name in page.locator("#skipped").inner_text()


@pytest.mark.slow
def test_over_plain_http_there_is_one_thread_and_the_page_says_so(plan, page, tmp_path):
    address = own_address()
    with Serving(plan, tmp_path, lan=address) as serving:
        token = serving.url.rstrip("/").rsplit("/", 1)[1]
        for path in ("/", "/index.html", f"/{token[:-1]}/", f"/{token}x/plan/plan.json"):
            status, text = requested(serving, "GET", path)
            assert status == 403
            assert "QR code" in text
        assert requested(serving, "POST", "/results", b"{}")[0] in (403, 405)
        document = measured(page, serving)
    assert len(token) >= 20
    assert not document["runtime"]["isolated"]
    assert document["runtime"]["timer_us"] >= 50
    for row in document["cells"]:
        if row["threads"] == 1:
            assert row["parity"]["passed"]
        else:
            assert row["status"] == "skipped"
            assert "plain http" in row["reason"]
    limits = page.locator("#limits").inner_text()
    assert "One thread" in limits
    assert "No WebGPU row" in limits


def test_every_start_has_another_token(small, tmp_path):
    address, urls = own_address(), set()
    for _ in range(2):
        with Serving(small, tmp_path, lan=address) as serving:
            urls.add(serving.url.split("/")[3])
    assert len(urls) == 2


@pytest.mark.slow
def test_a_closed_tab_loses_nothing(plan, browser, tmp_path):
    context = browser.new_context()
    with Serving(plan, tmp_path) as serving:
        page = opened(context.new_page(), serving.url)
        page.get_by_role("button", name="Start").click()
        keeps(page)
        page.close()
        page = opened(context.new_page(), serving.url)
        page.locator("#earlier-text", has_text="interrupted after").wait_for(timeout=SOON)
        page.get_by_role("button", name="Send it").click()
        page.get_by_role("heading", name="Ended early").wait_for()
        page.locator("#outcome-text code").wait_for(timeout=SOON)
        document = serving.landed.get(timeout=PATIENCE).result
        assert not document["run"]["complete"]
        assert "interrupted" in {flag["kind"] for flag in document["validity"]["flags"]}
        page.reload()
        page.locator("#start:visible").wait_for(timeout=SOON)
        assert page.locator("#earlier").is_hidden()
    context.close()


def test_stopping_keeps_what_there_is(plan, page, tmp_path):
    with Serving(plan, tmp_path) as serving:
        opened(page, serving.url).get_by_role("button", name="Start").click()
        reach(page, 0.2)
        page.get_by_role("button", name="Stop").click()
        page.locator("#outcome-text code").wait_for(timeout=SOON)
        document = serving.landed.get(timeout=PATIENCE).result
    assert not document["run"]["complete"]
    assert {row["status"] for row in document["cells"]} == {"ok", "skipped"}


@pytest.mark.slow
def test_a_lost_server_gets_the_result_when_it_is_back(small, page, tmp_path):
    with Serving(small, tmp_path) as serving:
        opened(page, serving.url)
        page.route("**/results", lambda route: route.abort())
        page.get_by_role("button", name="Start").click()
        page.get_by_text("The computer cannot be reached").wait_for(timeout=SOON)
        port = serving.port
    page.unroute("**/results")
    page.get_by_role("button", name="Send again").click()
    page.get_by_text("The computer cannot be reached").wait_for(timeout=SOON)
    with Serving(small, tmp_path, port=port) as serving:
        page.locator("#outcome-text code").wait_for(timeout=SOON)  # by itself
        assert serving.landed.get(timeout=PATIENCE).result["run"]["complete"]


@pytest.mark.slow
def test_a_locked_screen_pauses_and_is_told(plan, page, tmp_path):
    def lock(state: str) -> None:
        page.evaluate(
            "state => { Object.defineProperty(document, 'visibilityState', "
            "{ value: state, configurable: true }); "
            "document.dispatchEvent(new Event('visibilitychange')) }",
            state,
        )

    with Serving(plan, tmp_path) as serving:
        opened(page, serving.url)
        page.get_by_role("checkbox", name="WebAssembly, 2 threads").uncheck()
        page.get_by_role("button", name="Start").click()
        reach(page, 0.1)
        lock("hidden")
        page.get_by_text("Paused while the page is hidden").wait_for()
        time.sleep(0.5)  # for what was under way
        share = page.locator("#bar").evaluate("bar => bar.value")
        time.sleep(0.5)
        assert page.locator("#bar").evaluate("bar => bar.value") == share
        lock("visible")
        page.get_by_role("heading", name="Done, with interruptions").wait_for(timeout=SOON)
        page.locator("#outcome-text code").wait_for(timeout=SOON)
        document = serving.landed.get(timeout=PATIENCE).result
    assert document["run"]["complete"]
    (span,) = document["run"]["interrupted"]
    assert span["from"] < span["to"]
    assert {row["status"] for row in document["cells"]} == {"ok"}
    assert "interrupted" in {flag["kind"] for flag in document["validity"]["flags"]}


@pytest.mark.slow
def test_two_phones_at_once(small, browser, tmp_path):
    contexts = [browser.new_context() for _ in range(2)]
    with Serving(small, tmp_path) as serving:
        pages = [opened(context.new_page(), serving.url) for context in contexts]
        for page in pages:
            page.get_by_role("button", name="Start").click()
        for page in pages:
            page.locator("#outcome-text code").wait_for(timeout=SOON)
    names = {page.locator("#outcome-text code").inner_text() for page in pages}
    runs = {read_result(tmp_path / name)["run"]["id"] for name in names}
    assert len(names) == len(runs) == 2
    for context in contexts:
        context.close()


def test_a_page_without_its_plan_says_so(serving, page):
    page.route("**/plan/plan.json", lambda route: route.abort())
    opened(page, serving.url)
    assert "could not be loaded" in page.get_by_role("alert").inner_text()
    page.unroute("**/plan/plan.json")
    page.get_by_role("button", name="Try again").click()
    page.locator("#start:visible").wait_for(timeout=SOON)


def test_a_program_can_open_the_page_and_have_it_start(serving, page):
    page.goto(serving.url + "#start")
    page.locator("#outcome-text code").wait_for(timeout=SOON)
    assert serving.landed.get(timeout=PATIENCE).result["run"]["complete"]
    assert page.url == serving.url, "a reload begins nothing"


# Who says that it is a phone

PIXEL = {
    "user_agent": "Mozilla/5.0 (Linux; Android 16; Pixel 9) AppleWebKit/537.36 Chrome/150 Mobile",
    "platform": "Linux armv81", "model": "Pixel 9", "webdriver": False, "touch_points": 5,
    "gpu": "ANGLE (ARM, Mali-G715, OpenGL ES 3.2)",
}  # fmt: skip
IPHONE = {
    "user_agent": "Mozilla/5.0 (iPhone; CPU iPhone OS 19_0 like Mac OS X) Safari/604.1",
    "platform": "iPhone", "model": None, "webdriver": False, "touch_points": 5, "gpu": "Apple GPU",
}  # fmt: skip
DESKTOP = {
    "user_agent": "Mozilla/5.0 (X11; Linux x86_64) Chrome/150", "platform": "Linux x86_64",
    "webdriver": False, "touch_points": 0, "gpu": "ANGLE (NVIDIA RTX 4090)",
}  # fmt: skip


@pytest.mark.parametrize("signs", [PIXEL, IPHONE])
def test_a_phone_whose_signs_agree_is_real(signs):
    assert origin(signs, signs["user_agent"]).source == "real"


@pytest.mark.parametrize(
    ("signs", "change", "source", "words"),
    [
        (DESKTOP, {}, "host", "computer"),
        (DESKTOP, {"touch_points": 10}, "host", "computer"),
        (DESKTOP, {"gpu": "Adreno X1-85"}, "host", "computer"),
        (DESKTOP, {"user_agent": PIXEL["user_agent"]}, "emulated", "processor"),
        (PIXEL, {"platform": "Linux x86_64"}, "emulated", "Linux x86_64"),
        (PIXEL, {"webdriver": True}, "emulated", "program"),
        (PIXEL, {"webdriver": None}, "emulated", "program"),
        (PIXEL, {"touch_points": 0}, "emulated", "touch"),
        (PIXEL, {"gpu": None}, "emulated", "not named"),
        (PIXEL, {"gpu": "ANGLE (Google, SwiftShader Device)"}, "emulated", "SwiftShader"),
        (PIXEL, {"gpu": "Android Emulator OpenGL ES Translator (Adreno)"}, "emulated", "Emulator"),
        (PIXEL, {"gpu": "ANGLE (Apple M2)"}, "emulated", "Apple M2"),
        (PIXEL, {"model": "sdk_gphone64_arm64"}, "emulated", "sdk_gphone64"),
        (IPHONE, {"platform": "MacIntel"}, "emulated", "MacIntel"),
    ],
)
def test_one_sign_against_it_is_enough(signs, change, source, words):
    judged = origin({**signs, **change}, change.get("user_agent", signs["user_agent"]))
    assert judged.source == source
    assert words in judged.reason


def test_the_page_and_its_requests_must_be_one_browser():
    assert origin(PIXEL, DESKTOP["user_agent"]).source == "emulated"
    assert origin(PIXEL, PIXEL["user_agent"].replace("Chrome", "HeadlessChrome")).source != "real"
    assert origin({}, "").source == "host"


def test_a_desktop_dressed_as_a_phone_is_emulated(browser, small, tmp_path):
    context = browser.new_context(**browser.devices["Pixel 7"])
    with Serving(small, tmp_path) as serving:
        page = opened(context.new_page(), serving.url)
        assert page.title().endswith("(emulated)")
        text = page.locator("#origin").inner_text()
        assert text.startswith("Not a real phone: a program drives the browser")
        assert "the processor is Linux x86_64" in text
    context.close()


FORGED = """
const signs = { platform: "Linux armv81", webdriver: false, maxTouchPoints: 5 };
for (const [name, value] of Object.entries(signs))
  Object.defineProperty(Navigator.prototype, name, { get: () => value });
WebGLRenderingContext.prototype.getParameter = () => "ANGLE (ARM, Mali-G715, OpenGL ES 3.2)";
Object.defineProperty(Navigator.prototype, "userAgentData", { get: () => undefined });
"""


@pytest.mark.slow
def test_where_every_sign_agrees_the_result_is_a_phones(browser, small, tmp_path):
    """No phone is here, so its signs are forged: what follows from them is what is tested."""
    context = browser.new_context(user_agent=PIXEL["user_agent"])
    context.add_init_script(FORGED)
    with Serving(small, tmp_path) as serving:
        page = context.new_page()
        document = measured(page, serving)
        assert page.title() == "How fast is eviction on this phone?"
        assert page.locator("#origin").inner_text().startswith("A real phone")
    context.close()
    device = document["device"]
    assert (device["source"], device["model"], device["android"]) == ("real", "Pixel 9", "16")
    assert title(document).startswith("Pixel 9, Android 16, in a browser")
    assert "source" not in {flag["kind"] for flag in document["validity"]["flags"]}


# What the server takes and gives


def test_a_result_is_stored_once_and_never_overwritten(serving, result):
    status, first = posted(serving, result)
    assert status == 201
    assert {flag["kind"] for flag in first["flags"]} >= {"rules"}
    file = serving.landed.get(timeout=PATIENCE).path
    assert file.name == first["file"]
    file.write_text("mine")
    assert posted(serving, result)[1]["file"] == file.name
    assert file.read_text() == "mine"
    other = copy.deepcopy(result)
    other["run"]["finished"] = "2030-01-01T00:00:00Z"
    assert posted(serving, other)[1]["file"] != file.name
    assert len(list(file.parent.iterdir())) == 2


def broken(change: Any) -> Any:
    def make(result: dict[str, Any]) -> bytes:
        document = copy.deepcopy(result)
        change(document)
        return json.dumps(document).encode()

    return make


def twice(document):
    document["cells"].append(document["cells"][0])


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize(
    ("make", "status", "message"),
    [
        (lambda _: b"{", 422, "no JSON"),
        (lambda _: b"[" * 100_000, 422, "no JSON"),
        (lambda _: b"\xff\xfe", 422, "no JSON"),
        (lambda _: b"[]", 422, "schema"),
        (broken(lambda r: r.pop("cells")), 422, "cells"),
        (broken(lambda r: r["device"].update(source="moon")), 422, "device/source"),
        (broken(lambda r: r["device"].update(source="real")), 422, "does not bear out"),
        (broken(lambda r: r["run"].update(plan="0" * 16)), 422, "of plan"),
        (broken(lambda r: r["cells"][0].update(id="../x")), 422, "the plan has not"),
        (broken(lambda r: r["cells"][0]["samples_us"][0].append(-1)), 422, "samples_us"),
        (broken(lambda r: r["cells"][0].update(p50_us=1e9)), 422, "p50_us"),
        (broken(twice), 422, "twice"),
        (broken(lambda r: r["cells"][0].update(load_ms=float("nan"))), 422, "no JSON"),
    ],
)
def test_a_bad_result_is_refused_by_name_and_the_server_lives(
    serving, result, make, status, message
):
    got, answer = posted(serving, make(result))
    assert got == status
    assert message in answer["error"]
    assert not list((serving.results.folder).iterdir())
    assert posted(serving, result)[0] == 201


def test_a_result_beyond_the_limit_is_not_read(serving, result):
    assert posted(serving, b"", **{"Content-Length": str(LIMIT + 1)})[0] == 413
    with socket.create_connection(("127.0.0.1", serving.port)) as line:  # no length announced
        line.sendall(
            b"POST /results HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        part = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        try:
            for _ in range(LIMIT // 0x100000 + 2):
                line.sendall(part)
        except OSError:
            pass  # the server hung up
        assert b"413" in line.recv(64)
    assert posted(serving, result)[0] == 201


def test_a_result_that_cannot_be_written_may_be_sent_again(serving, result):
    folder = serving.results.folder
    folder.rmdir()
    folder.write_text("in the way")
    status, answer = posted(serving, result)
    assert status == 507  # of the 5xx, upon which the page keeps the result and sends it again
    assert "cannot be written" in answer["error"]
    folder.unlink()
    assert posted(serving, result)[0] == 201


def test_other_sites_cannot_speak_to_the_server(serving, result):
    status, _ = requested(serving, "GET", "/", Host="evil.example")
    assert status == 400
    status, answer = posted(serving, result, **{"Content-Type": "text/plain"})
    assert (status, answer["error"]) == (415, "a result is sent as application/json")


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/plan/../../x", "/%2e%2e/server.py", "/plan/%2e%2e%2fplan.json",
     "/ort/../app.js", "/plan//etc/passwd", "/.gitignore", "/plan/", "/server.py", "/ort"],
)  # fmt: skip
def test_only_files_that_the_plan_names_are_handed_out(serving, path):
    assert requested(serving, "GET", path)[0] == 404


def test_nothing_is_let_in_or_out_of_the_page(serving):
    connection = http.client.HTTPConnection("localhost", serving.port)
    for path in ("/", "/app.js", "/ort/ort-wasm-simd-threaded.wasm", "/none"):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    connection.close()


def test_what_cannot_be_served_is_refused_by_name(small, tmp_path, monkeypatch):
    with pytest.raises(PlanBroken, match=r"plan\.json"):
        Serving(tmp_path, tmp_path)
    with Serving(small, tmp_path) as serving, pytest.raises(PortTaken, match="--port 0"):
        Serving(small, tmp_path, port=serving.port)
    monkeypatch.setattr(vendor.require, "__defaults__", ({tmp_path: vendor.TEXT},))
    with pytest.raises(vendor.VendorError, match=r"kvcap\.lab\.vendor"):
        Serving(small, tmp_path)


def own_address() -> str:
    """Return an address of this machine that is not loopback, which browsers trust less."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            pytest.skip("this machine is in no network")
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    return address


# The command


def kvcap(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvcap", "android", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_missing_packages_are_named(small, tmp_path):
    code = (
        "import sys; sys.modules['uvicorn'] = None; from kvcap.cli import run; "
        f"sys.exit(run(['android', 'serve', {str(small)!r}, '-o', {str(tmp_path / 'out')!r}]))"
    )
    done = in_python(code)
    assert done.returncode == 1
    assert "pip install '.[android]'" in done.stderr


@pytest.mark.parametrize("json_lines", [False, True])
def test_the_command_names_every_result_and_ends(small, result, tmp_path, json_lines):
    options = ["--json"] if json_lines else []
    process = kvcap(
        str(small), "-o", str(tmp_path / "new" / "results"), "--port", "0", "--count", "1", *options
    )
    url = next(line for line in process.stderr if line.startswith("http")).strip()

    class Known:
        port = int(url.split(":")[2].strip("/"))

    Known.url = url
    assert posted(Known, result)[0] == 201
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    file = json.loads(out)["file"] if json_lines else out.strip()
    assert read_result(Path(file))["run"]["id"] == result["run"]["id"]


def test_a_terminal_shows_a_code_to_scan(small, tmp_path):
    own_address()
    screen, terminal = os.openpty()
    process = subprocess.Popen(
        argv("{} -m kvcap android serve {} -o {} --port 0 --lan", sys.executable, small, tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    written = b""
    while b"Ctrl-C" not in written:
        written += os.read(screen, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE) == 130
    text = written.decode()
    assert text.count("▀") > 50
    assert re.search(r"http://\d+\.\d+\.\d+\.\d+:\d+/[\w-]{20,}/", text)
    os.close(screen)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{empty}"], "kvcap android plan"),
        (["{plan}", "--address", "127.0.0.1"], "--lan"),
        (["{plan}", "--lan", "--address", "203.0.113.7"], "cannot listen"),
        (["{plan}", "--port", "70000"], "--port"),
        (["{plan}", "-o", "{plan}/plan.json"], "is a file"),
    ],
)
def test_the_command_refuses_by_name(small, tmp_path, arguments, message):
    known = {"empty": tmp_path, "plan": small}
    process = kvcap("-o", str(tmp_path / "out"), *(part.format(**known) for part in arguments))
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# The page's own arithmetic


@pytest.fixture(scope="module")
def module(browser, small, tmp_path_factory) -> Iterator[Any]:
    """Provide calls of the page's modules, from here."""
    with Serving(small, tmp_path_factory.mktemp("results")) as serving:
        page = browser.new_page()
        page.goto(serving.url)

        def call(file: str, expression: str, given: Any = None) -> Any:
            body = f"async given => {{ const m = await import('./{file}'); return {expression} }}"
            return page.evaluate(body, given)

        yield call
        page.close()


def test_halves_are_those_of_numpy(module):
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    decoded = module("half.js", "Array.from({length: 65536}, (_, i) => String(m.fromHalf(i)))")
    assert np.array_equal(np.array(decoded, dtype=np.float64), every.astype(np.float64), True)
    generator = np.random.default_rng(0)
    numbers = np.concatenate(
        [generator.standard_normal(2000) * 10.0**e for e in range(-9, 6)]
        + [[0, -0.0, 65504, 65519.99, 65520, 1e9, -1e9, 2**-24, 2**-25, 3 * 2**-25, 2**-14]]
    ).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = numbers.astype(np.float16).view(np.uint16).tolist()
    assert module("half.js", "given.map(m.toHalf)", numbers.astype(float).tolist()) == expected


def test_inputs_are_those_of_the_other_runners(module):
    for seed in (1, 2, 4294967295):
        assert module("inputs.js", "m.numbers(given, 999)", seed) == hash11(seed, 999).tolist()


def test_spreads_and_what_is_wild_are_those_of_the_report(module):
    assert module("stats.js", "m.WILD") == WILD
    for most in (2.4, 2.6):
        samples = [1.0, *[2.0] * 5, *[most] * 5]
        shown, expected = (
            module("stats.js", "m.summary({ samples_us: [given] })", samples),
            statistics([samples]),
        )
        assert [shown[name] for name in ("least", "us", "most")] == pytest.approx(
            [expected[name] for name in ("min_us", "p50_us", "p90_us")]
        )
        assert shown["wild"] == (spread(expected) > WILD) == (most > 2.5)


def test_lines_differ_in_more_than_colour(module, plan):
    """Each of a view's has its own marker and, of one policy, its own dash; a bar at each point."""
    cells = [
        {
            "id": f"{policy}{form}{n}",
            "policy": policy,
            "formulation": form,
            "queries": 0,
            "n": n,
            "provider_asked": "wasm",
            "threads": 1,
            "stage": "score",
            "dtype": "fp16",
            "status": "ok",
            "samples_us": [[n, n * 1.1, n * (9 if n == 64 else 1.2)]],
        }
        for policy, form in [
            *(("keydiff", form) for form in FORMULATIONS),
            ("tova", "naive"),
            ("h2o", "naive"),
            ("snapkv", "naive"),
        ]
        for n in (32, 64, 128)
    ]
    styles = module(
        "chart.js",
        """await (async () => {
            const { lines, styles } = await import("./series.js");
            const place = document.createElement("div");
            const view = { configuration: "wasm 1", stage: "score", dtype: "fp16" };
            m.drawChart(place, lines(given, { reference: "" }, view),
                        { relative: false, caption: "", styles: styles(given), narrow: false });
            return [...place.querySelectorAll("g.line")].map((line) => ({
                dash: line.querySelector(".course").getAttribute("stroke-dasharray"),
                marks: [...new Set([...line.querySelectorAll(".mark")]
                    .map((one) => one.getAttribute("d")))],
                wild: line.querySelectorAll(".mark.wild").length,
                bars: line.querySelector(".bar").getAttribute("d").split("M").length - 1,
                colour: line.getAttribute("class") })) })()""",
        cells,
    )
    assert len(styles) == 7
    assert len({mark for line in styles for mark in line["marks"]}) == 7
    assert all(len(line["marks"]) == 1 for line in styles)
    assert len({line["dash"] for line in styles[:4]}) == 4
    assert len({line["colour"] for line in styles}) == 7
    assert {(line["wild"], line["bars"]) for line in styles} == {(1, 3)}


def test_every_policy_of_a_plan_has_a_name_for_people(module):
    policies = with_graphs_of_their_own()
    names = dict(
        zip(policies, module("series.js", "given.map(m.policyName)", policies), strict=True)
    )
    assert [name for name, shown in names.items() if not shown[0].isupper()] == []
    assert not any("_" in shown for shown in names.values())
    assert len(set(names.values())) == len(policies)
    assert names["expected_attention"] == "Expected Attention"
    assert names["obcache-h2o"] == "OBCache-h2o"


@pytest.mark.parametrize("slots", [[512, 2048, 8192], [64, 128, 4096, 8192]])
def test_fits_and_percentiles_are_those_of_the_report(module, slots):
    generator = np.random.default_rng(len(slots))
    for _ in range(5):
        times = (generator.random() * 50 + generator.random(len(slots)) * np.array(slots)).tolist()
        fitted = module("stats.js", "m.line(given)", list(zip(slots, times, strict=True)))
        expected = fit(slots, times)
        assert fitted["t0"] == pytest.approx(expected["t0_us"], abs=1e-6)
        assert fitted["slope"] * 1024 == pytest.approx(expected["us_per_1024"])
        for share in (0.5, 0.9):
            got = module("stats.js", f"m.percentile(given, {share})", times)
            assert got == pytest.approx(np.percentile(times, 100 * share))


KEPT = {"name": "kept", "shape": [1, 1, 2], "check": {"kind": "slots", "file": "slots"}}
ROWS = {"name": "rows", "shape": [1, 1, 2, 2], "check": {"kind": "rows", "of": "keys"}}
BY_SLOT = {
    "name": "by", "shape": [1, 1, 2], "check": {"kind": "by_slot", "file": "by", "allowed": 0.1},
}  # fmt: skip
VALUES = {
    "name": "by", "shape": [1, 1, 2], "check": {"kind": "values", "file": "two", "allowed": 0.1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("ports", "outputs", "fault"),
    [
        ([KEPT, ROWS, BY_SLOT], {}, None),
        ([KEPT], {"kept": [2, 0]}, None),  # any order
        ([KEPT], {"kept": [2, 1]}, "slot 1 had to go"),
        ([KEPT], {"kept": [0, 3]}, "slot 2 had to stay"),
        ([KEPT], {"kept": [2, 2]}, "kept twice"),
        ([KEPT], {"kept": [2, 9]}, "slot 9"),
        ([KEPT, ROWS], {"rows": [1, 2, 5, 7]}, "row 1 of head 0"),
        ([KEPT, BY_SLOT], {"by": [1, 3.2]}, "differs by 0.2"),
        ([VALUES], {"by": [5, 6.05]}, None),
        ([VALUES], {"by": [5, 6.2]}, "differs by 0.2"),
        ([VALUES], {"by": [5, None]}, "not a number"),
        ([VALUES], {"by": [5, 1e31]}, "marks"),
        ([VALUES], {"by": [5]}, "1 numbers in place of 2"),
    ],
)
def test_wrong_outputs_are_caught(module, ports, outputs, fault):
    right = {"kept": [0, 2], "rows": [1, 2, 5, 6], "by": [1, 3]}
    given = {"ports": ports, "outputs": {**right, **outputs}}
    parity = module(
        "parity.js",
        """await (async () => {
            const files = { slots: new Uint8Array([1, 0, 2, 1]), by: new Float32Array([1, 2, 3, 4]),
                            two: new Float32Array([5, 6]) };
            const read = numbers => ({ numbers: numbers.map(n => n ?? NaN), raw: numbers });
            const outputs = Object.fromEntries(
              Object.entries(given.outputs).map(([name, numbers]) => [name, read(numbers)]));
            return m.parity({ outputs: given.ports }, outputs, { keys: [1, 2, 3, 4, 5, 6, 7, 8] },
                            async file => files[file].buffer) })()""",
        given,
    )
    assert parity["passed"] == (fault is None)
    if fault is not None:
        assert fault in parity["text"]


# The libraries beside the page


def test_what_is_vendored_is_whole_and_licensed():
    for folder, packages in vendor.FOLDERS.items():
        names = {path.name.removesuffix(".gz") for path in folder.iterdir()}
        files = {name for package in packages for name in package.files.values()}
        notices = set(fetching.NOTICES) if vendor.ORT in packages else set()
        assert names == {*files, *notices, "VERSION"}
    assert "MIT License" in (vendor.FOLDER / "LICENSE").read_text()
    assert "Apache License" in (vendor.TEXT_FOLDER / "LICENSE.tokenizers").read_text()
    assert "MIT License" in (vendor.TEXT_FOLDER / "LICENSE.jinja").read_text()


def test_another_package_is_refused_and_leaves_nothing(tmp_path):
    false = tmp_path / "false.tgz"
    false.write_bytes(b"not what was published")
    with pytest.raises(vendor.VendorError, match="as published"):
        fetching.vendor(tmp_path / "ort", [vendor.ORT], [false])
    assert [path.name for path in tmp_path.iterdir()] == ["false.tgz"]


def test_without_npm_the_error_says_what_would_work(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(vendor.VendorError, match="--tarball"):
        fetching.vendor(tmp_path / "text", vendor.TEXT)
    assert not list(tmp_path.iterdir())
    for packages in vendor.FOLDERS.values():
        assert {len(base64.b64decode(package.sha512)) for package in packages} == {64}
