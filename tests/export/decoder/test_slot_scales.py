"""Exports whose slots are int8: their scales, what the graph and the backend make of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FAMILIES, as_cache, tiny_model
from exported import decoder, graph_of
from make import argv
from transformers import DynamicCache

from kvcap.android_bench.decoders import decoder_in
from kvcap.cli import run
from kvcap.export.decoder import check as checking
from kvcap.export.decoder import spec
from kvcap.export.decoder.attention import MOST, QUANTISED, group_attention, quantised
from kvcap.export.decoder.blocks import attend_by_length
from kvcap.export.decoder.calibrate import refuse_text
from kvcap.export.decoder.check import check, facts_of, opened
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.decoder.manifest import SLOT_SCALES
from kvcap.export.decoder.slot_scales import MARGIN, measure, reach, sample
from kvcap.export.decoder.spec import Source
from kvcap.export.decoder.write import write
from kvcap.export.verify import verify_decoder
from kvcap.runtime.backends.onnxruntime.decoder import scales_of
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.backends.onnxruntime.manifest import read
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime, PolicyRequest
from kvcap.runtime.errors import ManifestError, NotExportable, ToleranceError
from kvcap.runtime.models.rope import Rope, Rotation, rotate
from kvcap.runtime.types import MANIFEST


def exported(
    out: Path, family="llama", policy="keydiff", positions="compact", dtype="fp32", **more
):
    made = decoder(family, policy, positions)
    source = Source("tiny", made.model, None)
    return write(source, made.layout, dtype, out, quick=True, kv_dtype="int8")


# Scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [16, 20])  # of which 16 numbers are rotated
def test_a_key_is_within_its_reach_at_every_position(size, interleaved):
    rope = Rope("default", 1 / 10_000 ** (torch.arange(8) / 8), interleaved)
    keys = torch.randn(3, 50, size, generator=torch.Generator().manual_seed(0))
    most = reach(keys, rope).amax(1, keepdim=True)
    table = Rotation(rope.inv_freq, 300, "cpu").table
    for shift in (0, 1, 7, 299):
        moved = rotate(keys, table[shift][None, None], back=True, interleaved=interleaved)
        assert (moved.abs() <= most * 1.0001).all()
    assert torch.equal(reach(keys, None), keys.abs())
    assert torch.equal(reach(keys, rope)[..., 16:], keys[..., 16:].abs())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_scales_are_of_what_the_layers_hold(family):
    """What a float cache holds after the same tokens fits, and its largest number is near 127."""
    made = decoder(family, positions="true", budget=64)
    layout = made.layout
    ids = sample(None, None, layout.shape.vocabulary, 64)
    scales = measure(made, ids)
    assert scales.shape == (
        len(layout.shape.layers),
        2,
        layout.shape.kv_heads,
        layout.shape.head_size,
    )
    assert made.model.config._attn_implementation == "kvcap"  # as it was

    cache = DynamicCache()
    plain = tiny_model(family, "eager" if layout.shape.softcap else "sdpa")
    with torch.no_grad():
        plain(ids, use_cache=True, **as_cache(cache))
    for layer, scale, shape in zip(cache.layers, scales, layout.shape.layers, strict=True):
        keys = reach(layer.keys, shape.rope)
        for held, one in ((keys, scale[0]), (layer.values.abs(), scale[1])):
            torch.testing.assert_close(held.amax((0, 2)) * (MARGIN / MOST), one)


def test_a_text_that_is_too_short_and_no_tokenizer_are_refused():
    with pytest.raises(NotExportable, match="no tokenizer"):
        sample(None, "A text.", 100, 64)


def test_a_text_is_for_slots_in_int8_whatever_the_weights():
    refuse_text("A text.", "fp32", "int8")
    with pytest.raises(NotExportable, match="measure what slots hold by it: --kv-dtype int8"):
        refuse_text("A text.", "fp32")


def test_numbers_are_rounded_to_the_nearest_and_cut_off():
    x = torch.tensor([0.49, -0.51, 12.0, 1e9, -1e9]).view(1, 1, 1, 5)
    assert quantised(x, torch.ones(1, 1, 5)).flatten().tolist() == [0, -1, 12, 127, -128]


@pytest.mark.parametrize("length", [1, 3])
def test_attention_over_int8_is_that_over_what_it_stands_for(length):
    """A block sees itself as it arrived, a token sees itself as it is held."""
    (query, key, value), held, scales = drawn(length)
    last, new = torch.tensor([9], dtype=torch.int32), slice(10 - length, 10)
    out, keys, values = group_attention(query, key, value, *held, last, 0.25, 0.0, scales)
    assert torch.equal(keys[:, :, new], quantised(key, scales[0]))
    assert torch.equal(keys[:, :, : new.start], held[0][:, :, : new.start])
    floats = [x.float() * s for x, s in zip((keys, values), scales, strict=True)]
    block = [key, value] if length > 1 else [x[:, :, new] for x in floats]
    expected = group_attention(query, *block, *floats, last, 0.25)[0]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_both_ways_to_attend_are_the_formula(length, before, softcap, attention_alone):
    """In ONNX Runtime, in place: what it writes is the block alone."""
    arrived, held, scales = drawn(length)
    last = torch.tensor([before + length - 1], dtype=torch.int32)
    wanted = group_attention(*arrived, *held, last, 0.25, softcap, scales)

    flat = [x.transpose(1, 2).flatten(2).contiguous() for x in arrived]
    given = [x.numpy() for x in (*flat, *held, last, last[0] + 1, *scales)]
    names = ["query", "key", "value", "keys", "values", "last", "total", "key_scale", "value_scale"]
    buffers = [x.numpy().copy() for x in held]
    inputs = dict(zip(names, given, strict=True)) | dict(zip(names[3:5], buffers, strict=True))
    out = np.empty(flat[0].shape, np.float32)
    graph = attention_alone(inputs, softcap)
    outputs = dict(zip(("out", "present_keys", "present_values"), (out, *buffers), strict=True))
    graph.run(inputs, outputs)
    torch.testing.assert_close(torch.from_numpy(out), wanted[0].transpose(1, 2).flatten(2))
    for buffer, expected in zip(buffers, wanted[1:], strict=True):
        assert np.array_equal(buffer, expected.numpy())


def drawn(length):
    """Return queries, keys and values of a block, slots of int8 and their scales."""
    draws = torch.Generator().manual_seed(0)
    block = [torch.randn(1, h, length, 16, generator=draws) for h in (4, 2, 2)]
    held = [torch.randint(-127, 128, (1, 2, 12, 16), generator=draws).to(torch.int8) for _ in "kv"]
    return block, held, tuple(0.01 + torch.rand(2, 1, 16, generator=draws) / 30 for _ in "kv")


@pytest.fixture
def attention_alone(tmp_path):
    """Return a maker of graphs of one node of attention over int8, for both lengths."""

    def made(inputs, softcap):
        helper = library("onnx.helper")
        kinds = {np.dtype(np.float32): 1, np.dtype(np.int8): 3, np.dtype(np.int32): 6}
        ports = [
            helper.make_tensor_value_info(name, kinds[x.dtype], x.shape)
            for name, x in inputs.items()
        ]
        outputs = [
            helper.make_tensor_value_info(name, kind, None)
            for name, kind in (("out", 1), ("present_keys", 3), ("present_values", 3))
        ]
        names = list(inputs)
        node = helper.make_node(
            "GroupQueryAttention",
            [*names[:7], *[""] * 5, *names[7:]],
            [x.name for x in outputs],
            domain="com.microsoft",
            num_heads=4,
            kv_num_heads=2,
            scale=0.25,
            softcap=softcap,
            **QUANTISED,
        )
        model = graph_of([node], ports, outputs)
        attend_by_length(model, "query")
        (tmp_path / "one.onnx").write_bytes(model.SerializeToString())
        return Graph(tmp_path / "one.onnx")

    return made


# The graph ----------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("family", "positions"),
    # Plain; norms of each key; another scaling; norms of all keys at once; joint products.
    [("llama", "true"), ("qwen3", "compact"), ("granite", "true"), ("olmo2", "compact"),
     ("phi3", "compact")],
)  # fmt: skip
def test_the_graph_is_its_module(family, positions, tmp_path, monkeypatch):
    if family == "granite":  # of random weights, whose logits rounding moves by up to a third
        monkeypatch.setattr(checking, "SLOTS", checking.SLOTS._replace(values=0.35))
    _, report = exported(tmp_path / "out", family, positions=positions)
    graph = [row.error for row in report.rows if row.who == "graph to module"]
    # A number that lies between two may be rounded to the other one.
    assert report.ok
    assert sorted(graph)[len(graph) // 2] < 1e-4


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("policy", "positions", "dtype"),
    [("h2o", "compact", "fp32"), ("criticalkv", "true", "int4"), ("snapkv", "compact", "int8"),
     ("obcache", "true", "fp32"), ("pyramidkv", "compact", "fp32"), ("snapkv", "true", "fp16")],
)  # fmt: skip
def test_policies_and_types_of_weights(policy, positions, dtype, tmp_path):
    manifest, report = exported(tmp_path / "out", "llama", policy, positions, dtype)
    assert report.ok
    assert manifest["kv_dtype"] == "int8"
    kinds = {(entry["name"], entry["dtype"]) for entry in manifest["state"]}
    assert {("keys", "int8"), ("values", "int8")} <= kinds
    assert (("arrived", "int8") in kinds) == (positions == "compact")


@pytest.fixture(scope="module")
def tiny_int8(tmp_path_factory):
    """Return the folder and the module of a tiny Llama with int8 slots."""
    out = tmp_path_factory.mktemp("tiny") / "out"
    exported(out)
    made, scales = decoder(), torch.from_numpy(np.load(out / SLOT_SCALES))
    return out, DecoderGraph(made.model, made.layout, scales)


@pytest.mark.parametrize("fault", ["scales of keys", "scales of values", "another head's"])
def test_other_scales_than_the_modules_are_found(fault, tiny_int8, monkeypatch):
    folder, made = tiny_int8
    scales = made.slot_scales
    wrong = scales.clone()
    if fault == "another head's":
        wrong = wrong.flip(2)
    else:
        wrong[:, int(fault == "scales of values")] *= 1.5
    assert check(folder, made, "fp32", quick=True).ok

    def opened_wrongly(folder, facts, decoder, *rest, **named):
        return opened(folder, facts, DecoderGraph(made.model, made.layout, wrong), *rest, **named)

    monkeypatch.setattr(checking, "opened", opened_wrongly)
    with pytest.raises(ToleranceError):
        check(folder, made, "fp32", quick=True).require()


def test_no_rounding_adds_up_while_keys_are_turned(tiny_int8):
    """However often a key was turned it is at most one rounding from what arrived, turned once."""
    folder, made = tiny_int8
    running = opened(folder, facts_of(made, "fp32"), made)
    ids = 3 + torch.randint(90, (400,), generator=torch.Generator().manual_seed(2))
    seen = 0
    for part in ids.split([8] * 20 + [1] * 240):
        running.run(part.tolist(), seen, [(0, 2)])
        seen += len(part)
    turns, moved = running.turns, 0
    for layer in running.layers:
        buffers, held, scale = layer.buffers, layer.held, layer.scales[0]
        arrived = buffers["arrived"][0, :, :held] * scale
        turns.back(arrived, buffers["shifts"][0, :, :held])
        now = buffers["keys"][0, :, :held] * scale
        assert (np.abs(now - arrived) <= 0.5001 * scale).all()
        moved += int((buffers["shifts"][0, :, :held] > 10).sum())
    assert moved  # by many evictions, of one older token each


COMMAND = "export decoder pocket --kv-dtype int8 --budget-tokens 64 --block-size 32 --quick -o {}"


def test_weights_that_stay_in_their_files_give_the_same_scales(pocket_int8, tmp_path, monkeypatch):
    monkeypatch.setattr(spec, "LOADED", 0)
    assert run(argv(COMMAND, tmp_path / "out")) == 0
    one, other = (np.load(folder / SLOT_SCALES) for folder in (pocket_int8, tmp_path / "out"))
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_what_was_written_is_verified(pocket_int8):
    assert verify_decoder(pocket_int8, quick=True).ok


# The backend --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pocket_int8(tmp_path_factory):
    """Pocket with slots in int8."""
    out = tmp_path_factory.mktemp("int8") / "decoder"
    assert run(argv(COMMAND, out)) == 0
    return out


def test_the_plan_counts_every_byte(pocket_int8):
    runtime = OrtRuntime.from_directory(pocket_int8)
    session = runtime.session()
    list(session.send("Hello!"))
    assert session.cache.nbytes == runtime.plan.cache_bytes
    assert runtime.plan.kv_dtype == "int8"
    slots = 64 + 32
    model = runtime.manifest.model
    layers, heads, size = model["layers"], model["kv_heads"], model["head_dim"]
    scales = 8 * layers * heads * size
    assert runtime.plan.keys_values == 3 * layers * heads * slots * size + scales


def test_a_saved_conversation_goes_on(pocket_int8, tmp_path):
    runtime = OrtRuntime.from_directory(pocket_int8)
    text = "Tell me about the sea. " * 12
    session = runtime.session()
    list(session.send(text))
    session.save(tmp_path / "one.kvcap")
    again = runtime.session()
    again.restore(tmp_path / "one.kvcap")
    assert "".join(again.send("And then?")) == "".join(session.send("And then?"))
    assert again.cache.held == session.cache.held < 64 + 32


def test_evicting_every_token_or_many_at_once_keeps_as_much(pocket_int8):
    for every in (1, 7):
        runtime = OrtRuntime.from_directory(pocket_int8, evict_every=every)
        session = runtime.session()
        session.set_generation(max_new_tokens=40, temperature=0.0)
        list(session.send("Tell me about the sea. " * 12))
        assert 64 <= session.cache.held < 64 + every


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "cannot be read"), (b"no array", "cannot be read"), ("shape", "does not hold scales"),
     ("float64", "does not hold scales"), ("nan", "scales that are none"),
     ("zero", "scales that are none"), ("object", "cannot be read")],
)  # fmt: skip
def test_broken_scales_are_refused(content, message, pocket_int8, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(pocket_int8, folder)
    good = np.load(folder / SLOT_SCALES)
    if isinstance(content, bytes):
        (folder / SLOT_SCALES).write_bytes(content)
    else:
        bad = {
            "shape": good[1:],
            "float64": good.astype(float),
            "nan": good * np.nan,
            "zero": good * 0,
            "object": np.array([{}], object),
        }[content]
        np.save(folder / SLOT_SCALES, bad)
    manifest = read(pocket_int8)
    with pytest.raises(ManifestError, match=message):
        scales_of(type(manifest)(folder, manifest.facts))


@pytest.mark.parametrize("change", ["no scales", "no type", "no file"])
def test_a_manifest_that_contradicts_itself_is_refused(change, pocket_int8, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(pocket_int8, folder)
    facts = json.loads((folder / MANIFEST).read_text())
    if change == "no file":
        facts["files"] = [entry for entry in facts["files"] if entry["file"] != SLOT_SCALES]
    else:
        del facts[{"no scales": "slot_scales", "no type": "kv_dtype"}[change]]
    (folder / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(ManifestError, match="slot_scales"):
        read(folder)


# Refusals -----------------------------------------------------------------------------------------


def test_slots_of_another_type_are_refused_by_name(pocket_int8, tmp_path, kvcap):
    OrtRuntime.from_directory(pocket_int8, kv_dtype="int8")
    for kind in ("int4", "int8-int4"):
        with pytest.raises(NotExportable, match="one scale for each channel"):
            OrtRuntime.from_directory(pocket_int8, kv_dtype=kind)
        assert run(["plan", str(pocket_int8), "--kv-dtype", kind]) == 2
        assert "one scale for each channel" in kvcap.refused(
            "plan", "pocket", "--weights", "int8", "--kv-dtype", kind
        )
    with pytest.raises(NotExportable, match="runs in Python only"):
        decoder_in(pocket_int8)
    with pytest.raises(NotExportable, match="auto"):
        OrtRuntime.from_directory(pocket_int8, PolicyRequest(), positions="auto")
