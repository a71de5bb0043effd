"""Decoders of others over slots that stay in place: right logits, kept tokens, bytes, sessions."""

from __future__ import annotations

import json
from typing import Any

import grouped_decoder
import masked
import numpy as np
import pytest

from kvcap.cli import run
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime, PolicyRequest
from kvcap.runtime.errors import PlanInfeasible, SessionFileCorrupt, UnsupportedModel
from kvcap.runtime.models.states import KEPT

TEXT = "Please remember: the code for the blue door is 4821. The old ship left in the morning. "
CLOSE = {"float16": 2e-2}  # of the largest logit


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    def folder(kind: str) -> Any:
        if kind == "lfm2" and not KEPT:
            pytest.skip("this transformers keeps no recurrent states")
        return grouped_decoder.ready(tmp_path_factory, kind)

    return folder


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", ["llama", "lfm2", "qwen3", "places", "float16", "length"])
def test_logits_are_those_of_full_attention_over_what_was_kept(ready, kind, monkeypatch):
    """Past the budget, over blocks and tokens that evict; in generation every third."""
    folder = ready(kind)
    runtime = OrtRuntime.from_directory(folder / "decoder", evict_every=3)
    ids = np.random.default_rng(3).integers(0, runtime.manifest.model["vocabulary"], (1, 77))
    got, ends, kept = grouped_decoder.driven(runtime, ids, 8, 9)
    monkeypatch.setattr(masked, "_KEPT", None)  # is what it was, once this is over
    wanted = grouped_decoder.masked_logits(folder / "model", ids, kept)[ends]
    allowed = CLOSE.get(kind, 1e-4) * np.abs(wanted).max()
    assert np.abs(got - wanted).max() < allowed
    kept.compact = False  # positions that count otherwise would be seen
    other = grouped_decoder.masked_logits(folder / "model", ids, kept)[ends]
    assert np.abs(got - other).max() > allowed


def test_nothing_held_is_copied(ready):
    """Buffers stay where they are, and a token that evicts nothing changes no slot but its own."""
    loop = OrtRuntime.from_directory(ready("llama") / "decoder", evict_every=4).loop()
    decoder, draws = loop.cache.decoder, np.random.default_rng(0)
    before = [x.ctypes.data for layer in decoder.layers for x in layer.buffers.values()]
    loop.prefill(draws.integers(6, 2560, (1, 24)))
    for step in range(7):
        old = [{k: x.copy() for k, x in layer.buffers.items()} for layer in decoder.layers]
        loop.read(draws.integers(6, 2560, (1, 1)))
        held = 24 + (step + 1) % 4
        assert decoder.held == [held] * len(decoder.layers)
        for layer, was in zip(decoder.layers, old, strict=True):
            for name, x in layer.buffers.items():
                same = x[:, :, : held - 1] == was[name][:, :, : held - 1]
                assert same.all() == (held > 24 or name == "none")
    assert [x.ctypes.data for one in decoder.layers for x in one.buffers.values()] == before


@pytest.mark.slow
def test_keys_in_float16_do_not_drift(ready):
    """A key that stays for 300 evictions is where one rotation brings it, in float32."""
    runtime = OrtRuntime.from_directory(
        ready("float16") / "decoder",
        PolicyRequest("streaming_llm"),
        budget_tokens=8,
        block_size=2,
    )
    loop, draws = runtime.loop(), np.random.default_rng(0)
    loop.prefill(draws.integers(6, 2560, (1, 300)))
    layer = loop.cache.decoder.layers[1]
    keys, arrived = (layer.buffers[name][0, :, :8] for name in ("keys", "arrived"))
    assert (layer.buffers["shifts"][0, :, :4] == 0).all()  # the sinks
    late = layer.buffers["shifts"][0, :, :8].argmax(1)
    angles = layer.buffers["shifts"][0, :, :8].max(1)[:, None] * np.array(
        runtime.manifest.facts["inv_freq"]
    )
    for head, slot in enumerate(late):
        x, half = arrived[head, slot].astype(np.float64), angles.shape[1]
        cos, sin = np.cos(angles[head]), np.sin(angles[head])
        wanted = [x[:half] * cos + x[half:] * sin, x[half:] * cos - x[:half] * sin]
        np.testing.assert_allclose(keys[head, slot], np.concatenate(wanted), atol=2e-3)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", ["lfm2", "float16", "length", "llama"])
def test_a_plan_is_what_is_allocated_and_sessions_go_on_to_the_bit(ready, kind, tmp_path):
    folder = ready(kind) / "decoder"
    for sizes in ({"kv_budget": "60KiB"}, {"budget_tokens": 30, "block_size": 5}):
        runtime = OrtRuntime.from_directory(folder, **sizes)
        plan = runtime.plan
        assert runtime.loop().cache.nbytes == plan.cache_bytes <= runtime.cap_bytes
    assert (plan.state_layers > 0) == (kind == "lfm2")
    session = runtime.session("Be kind.", seed=5)
    session.set_generation(max_new_tokens=12, temperature=0.8)
    list(session.send(TEXT))
    session.save(tmp_path / "s")
    assert session.cache.used_bytes <= session.cache.nbytes
    loaded = type(session).load(runtime, tmp_path / "s")
    assert loaded.stats.seen_tokens == session.stats.seen_tokens > plan.budget_tokens
    said = ["".join(one.send("And?")) for one in (session, loaded)]
    assert said[0] == said[1]
    for one, other in zip(
        *(
            s.cache.decoder.state(s.cache.seen, s.cache.decoder.held).items()
            for s in (session, loaded)
        ),
        strict=True,
    ):
        assert one[0] == other[0]
        assert one[1].tobytes() == other[1].tobytes()


def test_a_new_conversation_begins_without_a_state(ready):
    loop = OrtRuntime.from_directory(ready("lfm2") / "decoder").loop()
    ids = np.arange(20, 29)[None]
    first = np.array(loop.prefill(ids))
    loop.cache.reset()
    assert (np.array(loop.prefill(ids)) == first).all()


def test_the_commands(ready, capsys, tmp_path):
    folder = str(ready("llama") / "decoder")
    assert run(["plan", folder, "--budget-tokens", "40", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    options = ["--budget-tokens", "40", "--max-new-tokens", "60", "--temperature", "0"]
    assert run(["generate", folder, TEXT, *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "40" in str(planned)
    assert said
    more = ["--policy", "streaming_llm", "--evict-every", "2", "--max-new-tokens", "4"]
    assert run(["generate", folder, TEXT, *more]) == 0
    capsys.readouterr()
    assert run(["generate", folder, TEXT, "--positions", "true"]) == 2
    assert "is not in this export" in capsys.readouterr().err


def test_more_slots_than_there_are_cosines_are_refused(ready):
    with pytest.raises(UnsupportedModel, match="cosines of"):
        OrtRuntime.from_directory(ready("llama") / "decoder", budget_tokens=1_000_000)
    with pytest.raises(PlanInfeasible):
        OrtRuntime.from_directory(ready("llama") / "decoder", kv_budget="1KiB")


@pytest.mark.slow
def test_shifts_that_no_key_can_have_are_refused(ready, tmp_path):
    runtime = OrtRuntime.from_directory(ready("float16") / "decoder")
    session = runtime.session()
    session.set_generation(max_new_tokens=40)
    list(session.send(TEXT))
    session.cache.decoder.layers[0].buffers["shifts"][0, 0, 3] = 99
    session.save(tmp_path / "s")
    with pytest.raises(SessionFileCorrupt, match=r"shifts\.0"):
        session.restore(tmp_path / "s")
