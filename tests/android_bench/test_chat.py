"""The page that chats, in a real browser: the same text and kept tokens as Python's ONNX Runtime.

Needs Debian's package chromium, and the page's libraries
(python -m kvcap.lab.vendor).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_requests import requested, vendored
from tools import PATIENCE, pocket_decoder, sliding_decoder

from kvcap.android_bench.decoders import PAGE_BYTES, decoder_for_a_page
from kvcap.android_bench.server.serving import ChatServer
from kvcap.runtime.backends.onnxruntime.decoder import ExportedDecoder, evictors_of
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.manifest import read
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.errors import ChatTemplateMissing, ModelFilesBroken, NotExportable
from kvcap.runtime.types import EVICT_EVERY

SOON = 1000 * PATIENCE  # milliseconds
STORY = (
    "Please remember: the code for the blue door is 4821. Seven kinds of mosses survive the cold "
    "near Porto. He believed that tall grasses attract many bees – “naïve”, she said. 🐝 "
)
MESSAGES = (STORY, 4 * STORY, "What is the code for the blue door?")

pytestmark = vendored


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    return pocket_decoder(tmp_path_factory)


@pytest.fixture(scope="module")
def page(browser) -> Any:
    return browser.new_page(viewport={"width": 360, "height": 740})


def opened(page: Any, serving: ChatServer) -> Any:
    page.goto(serving.url)
    page.locator("#form:visible, #trouble:visible").wait_for(timeout=SOON)
    return page


def answer_to(page: Any, text: str) -> str:
    """Return the answer to a message."""
    page.get_by_role("textbox", name="Your message").fill(text)
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Send").wait_for(timeout=SOON)
    return str(page.locator(".said.assistant").last.text_content())


def test_the_page_answers_as_python_does_and_sends_nothing(decoder, page):
    console, requests = [], []
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: console.append(str(error)))
    page.on("request", lambda request: requests.append(request))
    # The page has no index of evicted text, so that both know what the cache holds.
    runtime = OrtRuntime.from_directory(decoder, threads=1, recall_store=0)
    session = runtime.session()
    with ChatServer(decoder) as serving:
        opened(page, serving)
        loaded = len(requests)
        for text in MESSAGES:
            assert answer_to(page, text) == "".join(session.send(text))
        held, evicted = (page.locator(id).inner_text().split()[0] for id in ("#held", "#evicted"))
        stats = session.stats
        assert (int(held), int(evicted)) == (stats.held_tokens, stats.evicted_tokens)
        assert int(evicted) > 128
        assert f"{session.cache.nbytes / 1e6:.2f} MB" in page.locator("#bytes").inner_text()
        assert len(requests) == loaded, "nothing is asked for once the model is there"
        assert all(one.method == "GET" for one in requests)
        assert all(one.url.startswith((serving.url, "blob:")) for one in requests)
        assert requested(serving, "POST", "/results", b"{}")[0] == 405
        page.get_by_role("button", name="New conversation").click()
        page.locator(".said").first.wait_for(state="detached")
        assert answer_to(page, "Hello!") == "".join(runtime.session().send("Hello!"))
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "the page scrolls sideways on a phone"
    assert not console


@pytest.mark.parametrize("mode", ["compact", pytest.param("true", marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("slides", [False, True], ids=["all attend", "some slide"])
def test_logits_and_kept_tokens_are_pythons(slides, mode, tmp_path_factory, page):
    if slides:
        folder = sliding_decoder(tmp_path_factory, mode) / "decoder"
    else:
        folder = pocket_decoder(tmp_path_factory, mode)
    figures = read(folder)
    sample, block = figures.facts["sample"], figures.facts["block_size"]
    text = sample["prompt"] * 3
    runs = [block, block - 5, *[block] * 6, *[1] * 40, block // 4 + 1, block]
    python = ExportedDecoder(
        figures, Graph(figures.decoder, 1), evictors_of(figures, 1), block, min(EVICT_EVERY, block)
    )
    seen, expected = 0, []
    for length in runs:
        ids = [text[(seen + i) % len(text)] for i in range(length)]
        expected.append(python.run(ids, seen, [])[0].copy())
        seen += length
    with ChatServer(folder) as serving:
        page.goto(serving.url + "icon.svg")  # an empty page of the same origin
        got = page.evaluate(
            """async ({ url, runs, text }) => {
              const { open } = await import(`${url}bound-ort.js`);
              const { Decoder } = await import(`${url}decoder.js`);
              open(1);
              const facts = await (await fetch(`${url}decoder/kvcap.json`)).json();
              const file = async (name) => {
                const response = await fetch(`${url}decoder/${name}`);
                return new Uint8Array(await response.arrayBuffer());
              };
              const decoder = await Decoder.load(facts, file);
              const logits = [];
              for (const length of runs) {
                const from = decoder.seen;
                const ids = Array.from({ length }, (_, i) => text[(from + i) % text.length]);
                logits.push(Array.from(decoder.run(ids)));
              }
              const { positions, bytes, usedBytes: used } = decoder;
              return { logits, positions, bytes, used };
            }""",
            {"url": serving.url, "runs": runs, "text": text},
        )
    np.testing.assert_allclose(np.array(got["logits"]), np.array(expected), atol=2e-4)
    for layer, kept in zip(got["positions"], python.positions(seen), strict=True):
        np.testing.assert_array_equal(layer, kept)
        assert (
            kept[:, : python.sinks] == np.arange(python.sinks)
        ).all()  # the attention sink, which its graph pins
    assert (got["bytes"], got["used"]) == (python.nbytes, python.used_bytes(seen))


@pytest.mark.slow
def test_an_answer_can_be_stopped_and_the_conversation_goes_on(decoder, page):
    with ChatServer(decoder) as serving:
        opened(page, serving)
        page.get_by_role("textbox").fill(40 * STORY)
        page.get_by_role("textbox").press("Enter")
        page.get_by_text("Reading", exact=False).first.wait_for(timeout=SOON)
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped before the message was read").wait_for(timeout=SOON)
        assert page.get_by_role("textbox").input_value() == 40 * STORY
        assert page.locator("#held").inner_text().startswith("0 slots")
        assert answer_to(page, "Hello!")


@pytest.mark.slow
def test_what_cannot_be_loaded_is_told_in_words(decoder, page):
    facts = json.loads((decoder / "kvcap.json").read_text())

    def answered(change: Any) -> None:
        manifest = json.loads(json.dumps(facts))
        change(manifest)
        page.route("**/decoder/kvcap.json", lambda route: route.fulfill(json=manifest))

    def large(manifest: Any) -> None:
        for state in manifest["state"]:
            state["full"][2] = 2_000_000

    def without_template(manifest: Any) -> None:
        manifest["tokenizer"]["chat_template"] = None

    with ChatServer(decoder) as serving:
        for change, text in (
            (large, "not enough memory"),
            (without_template, "no chat template"),
        ):
            answered(change)
            opened(page, serving)
            assert text in page.get_by_role("alert").inner_text()
            page.unroute("**/decoder/kvcap.json")
        page.route("**/decoder/tokenizer.json", lambda route: route.fulfill(body="{}"))
        opened(page, serving)
        assert "tokenizer" in page.get_by_role("alert").inner_text()
        page.unroute("**/decoder/tokenizer.json")


# What is refused before anything is served


def test_what_is_no_decoder_of_kvcaps_is_refused_by_name(decoder, tmp_path, kvcap):
    assert "kvcap export decoder" in kvcap.refused("android", "chat", str(tmp_path))
    copy = shutil.copytree(decoder, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesBroken, match=r"tokenizer\.json"):
        decoder_for_a_page(copy)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": {"weights_bytes": PAGE_BYTES}}, NotExportable, "--dtype int4"),
        ({"files": [], "tokenizer": {"chat_template": None}}, ChatTemplateMissing, "for chat"),
    ],
)
def test_a_page_refuses_what_it_cannot_hold_or_say(decoder, tmp_path, change, error, text):
    copy = shutil.copytree(decoder, tmp_path / "copy")
    facts = json.loads((copy / "kvcap.json").read_text())
    for key, value in change.items():
        if key == "files":
            facts["files"] = [e for e in facts["files"] if e["file"] != "chat_template.jinja"]
        else:
            facts[key] |= value
    (copy / "kvcap.json").write_text(json.dumps(facts))
    with pytest.raises(error, match=text):
        decoder_for_a_page(copy)


def test_a_template_that_takes_lists_of_parts_is_no_page_s(decoder, tmp_path, monkeypatch):
    """The page gives texts, of which such a template would write nothing."""
    walks = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    monkeypatch.setattr(
        "kvcap.runtime.backends.onnxruntime.tokenizer.read_plain",
        lambda *_: f"{walks}{{% endfor %}}".encode(),
    )
    with pytest.raises(ChatTemplateMissing, match="takes lists of parts"):
        decoder_for_a_page(decoder)
