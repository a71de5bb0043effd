"""Layers that slide in an exported decoder: the same logits and kept tokens as in PyTorch."""

from __future__ import annotations

import json
import shutil

import exported
import numpy as np
import onnx
import pytest
import torch
from conftest import small_policy, tiny_model
from exported import BLOCK, BUDGET, LENGTHS, STEPS, beside_the_runtime, graph_of, ids_of
from families import config_of
from make import in_python
from tools import operations, sliding_decoder  # noqa: F401

from kvcap import Runtime
from kvcap.export.decoder.attention import NODE, group_attention
from kvcap.export.decoder.check import Watched, facts_of
from kvcap.export.decoder.spec import Source, layout_for
from kvcap.export.decoder.write import write
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import ManifestError, NotExportable
from kvcap.runtime.types import MANIFEST

FAMILIES = [
    "cohere2",
    "cwm",
    "exaone4",
    "gemma2",
    "gemma4 k=v",
    "granite_swa",
    "ministral",
    "olmo3",
    "vaultgemma",
]


def decoder(family="gemma3_text", *given, **changes):
    return exported.decoder(family, *given, **changes)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("window", [2, 5, 9, 24, 100])
@pytest.mark.parametrize("positions", ["compact", "true"])
def test_windows_of_any_size_compute_what_the_runtime_does(window, positions):
    """Below a block and above it, below what is read and above it."""
    made = decoder(positions=positions, sliding_window=window)
    compared = beside_the_runtime(made)
    for layer in compared.windows.values():
        assert layer.held == min(window - 1, sum(LENGTHS))
        last = np.arange(sum(LENGTHS) - layer.held, sum(LENGTHS))
        assert (layer.positions(sum(LENGTHS)) == last).all()


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_slides_computes_what_the_runtime_does(family, positions):
    beside_the_runtime(decoder(family, positions=positions))


@pytest.mark.parametrize(("policy", "positions", "evict_every"), [
    ("snapkv", "compact", 3), ("h2o", "true", 8), ("pyramidkv", "compact", 8),
    ("criticalkv", "compact", 1),
])  # fmt: skip
def test_policies_with_a_state_and_evictions_at_once(policy, positions, evict_every):
    layers = ["sliding_attention", "full_attention"] * 2
    made = decoder(
        "gemma3_text", policy, positions, num_hidden_layers=4, layer_types=layers, sliding_window=13
    )
    beside_the_runtime(made, STEPS, evict_every=evict_every)


@pytest.mark.parametrize("positions", ["compact", "true"])
def test_where_all_fits_it_is_the_uncapped_model(positions):
    """Logits are those of transformers' own attention over a text longer than the window."""
    made = decoder(positions=positions, budget=64, sliding_window=11)
    watched, seen, ids = Watched(facts_of(made, "fp32"), made), 0, ids_of(47)
    plain = tiny_model("gemma3_text", "eager", sliding_window=11)
    with torch.no_grad():
        wanted = plain(ids, use_cache=False).logits[0]
    for block in ids.split([8] * 5 + [1] * 7, 1):
        logits = watched.run(block[0].tolist(), seen, ())
        seen += block.shape[1]
        torch.testing.assert_close(torch.from_numpy(logits[0]), wanted[seen - 1])


@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("length", "before"), [(1, 0), (1, 9), (5, 0), (5, 9)])
def test_the_node_computes_what_the_module_does(length, before, window, sinks):
    """GroupQueryAttention with a window and with sink logits, over a buffer with room."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    query, key, value = drawn(1, 4, length, 16), drawn(1, 2, length, 16), drawn(1, 2, length, 16)
    keys, values, logits = drawn(1, 2, 20, 16), drawn(1, 2, 20, 16), drawn(4)
    last = torch.tensor([before + length - 1], dtype=torch.int32)
    wanted = group_attention(
        query, key, value, keys, values, last, 0.3, window=window, sinks=logits if sinks else None
    )[0]
    flat = [x.transpose(1, 2).flatten(2).numpy() for x in (query, key, value)]
    total = np.array(before + length, np.int32)
    arrays = [*flat, keys.numpy(), values.numpy(), last.numpy(), total]
    given = dict(zip("qkvabcl", arrays, strict=True))
    names = [*given]
    if sinks:
        given["s"], names = logits.numpy(), [*names, "", "", "", "", "s"]
    helper = onnx.helper
    node = helper.make_node(
        NODE.partition("::")[2],
        names,
        ["out", "x", "y"],
        domain="com.microsoft",
        num_heads=4,
        kv_num_heads=2,
        scale=0.3,
        **({} if window is None else {"local_window_size": window}),
    )
    ports = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in given.items()
    ]
    out = helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)
    model = graph_of([node], ports, [out]).SerializeToString()
    session = library("onnxruntime").InferenceSession(model)
    output = torch.from_numpy(session.run(["out"], given)[0])
    torch.testing.assert_close(output.unflatten(2, (4, -1)).transpose(1, 2), wanted)


# --- graphs in files


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("family", "positions", "dtype", "kv_dtype"), [
    ("gemma3_text", "compact", "fp32", "int8"),
    ("gemma2", "true", "fp32", None),  # two lengths whose angles are the same
    ("granite_swa", "compact", "fp32", None),  # sink logits; a layer without positions
    ("gemma2", "compact", "fp32", "int8"),  # softcaps, where slots are measured
    ("gemma4 k=v", "compact", "fp32", None),  # heads of two sizes
    ("cohere2", "compact", "int4", None), ("exaone4", "true", "fp16", None),
    ("olmo3", "compact", "int8", None), ("ministral", "compact", "fp32", None),
])  # fmt: skip
def test_graphs_compute_what_modules_do(family, positions, dtype, kv_dtype, tmp_path):
    made = decoder(family, positions=positions)
    source = Source("tiny", made.model.half() if dtype == "fp16" else made.model, None)
    _, report = write(source, made.layout, dtype, tmp_path / "made", kv_dtype=kv_dtype)
    errors = [row.error for row in report.rows if row.who.startswith("graph")]
    assert len(errors) > 10
    if dtype == "fp32":
        assert max(errors) < 1e-4


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Return a model with windows of 12 tokens in `model`, and its export in `decoder`."""
    return sliding_decoder(tmp_path_factory)


def test_its_manifest_says_which_layers_slide(shelf):
    manifest = json.loads((shelf / "decoder" / MANIFEST).read_text())
    assert manifest["windows"] == [12, None, 12]
    assert manifest["budgets"] == [11, 24, 11]
    assert [entry["layers"] for entry in manifest["evictors"]] == [[1]]
    assert {x["name"] for x in manifest["state"] if x["layer"] != 1} == {"keys", "values"}
    assert any("windows" in line for line in manifest["rule"])


def test_python_runs_it_by_its_directory(shelf):
    """`Runtime.from_pretrained` takes it, and it answers as PyTorch does."""
    text = "The ship sails to the harbour in the morning, and back home at night with its crew."
    made = Runtime.from_pretrained(shelf / "decoder")
    model = Runtime.from_pretrained(
        shelf / "model",
        budget_tokens=24,
        block_size=8,
        dtype="float32",
        evict_every=8,
        positions="compact",
    )
    answers = []
    for runtime in (made, model):
        session = runtime.session()
        session.set_generation(max_new_tokens=24, do_sample=False)
        answers.append("".join(session.send(text)))
    assert answers[0] == answers[1]


def test_its_bytes_are_those_of_the_plan(shelf):
    runtime = Runtime.from_pretrained(shelf / "decoder")
    cache = runtime.session().cache
    plan = runtime.plan
    assert cache.nbytes == plan.cache_bytes
    assert plan.sliding_layers == 2 * 2 * 2 * (11 + 8) * 16 * 4  # layers, K and V, heads
    assert plan.uncapped_bytes(100) == 2 * 2 * 16 * 4 * (100 + 2 * 12)


def test_a_conversation_goes_on_from_a_file(shelf, tmp_path):
    """With windows that have slid, at a time when some tokens wait to go."""
    runtime = Runtime.from_pretrained(shelf / "decoder")
    session = runtime.session()
    session.set_generation(max_new_tokens=13, do_sample=False)
    "".join(session.send("The baker of Lund sells nine kinds of bread in the morning."))
    session.save(tmp_path / "s.safetensors")
    other = runtime.session()
    other.restore(tmp_path / "s.safetensors")
    question = "Which kinds?"
    assert "".join(other.send(question)) == "".join(session.send(question))
    kept = session.cache.kept_tokens()
    assert [(layer.layer, layer.capped) for layer in kept] == [(0, False), (1, True), (2, False)]
    seen = session.cache.seen
    held = session.cache.decoder.held[0]
    assert np.array_equal(kept[0].heads[0], np.arange(seen - held, seen))


@pytest.mark.parametrize(("change", "why"), [
    (lambda manifest: manifest["windows"].pop(), "windows: not said of each layer"),
    (lambda manifest: manifest["windows"].__setitem__(0, 20), "other than its tokens but one"),
    (lambda manifest: manifest.update(windows=[12, 25, 12]), "none is left for the policy"),
    (lambda manifest: manifest["rotates"].__setitem__(0, True), "counts no ranks"),
    (lambda manifest: manifest["evictors"][0]["layers"].append(0), "evictors"),
    (lambda manifest: manifest.update(windows=["12", None, 12]), "windows"),
])  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(change, why, shelf, tmp_path):
    folder = shutil.copytree(shelf / "decoder", tmp_path / "made")
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match=why):
        Runtime.from_pretrained(folder)


# --- refused by name


@pytest.mark.parametrize(("family", "policy", "kv_dtype", "why"), [
    ("granite_swa", "snapkv", None, "sink logits.*keydiff or knorm.*--backend torch"),
    ("gemma4 k=v", "keydiff", "int8", "KV heads of one size"),
    ("gemma3n", "keydiff", None, "layers 4 to 7 read 2 and 3.*--backend torch --weights int4"),
    ("gpt_oss", "keydiff", None, "experts.*--backend torch --weights int4"),
])  # fmt: skip
def test_what_a_graph_does_not_do_is_said_of_the_config(family, policy, kv_dtype, why):
    config = config_of(family)
    settings = CacheSettings(
        BUDGET, BLOCK, small_policy(policy, config), "compact", kv_dtype=kv_dtype
    )
    with pytest.raises(NotExportable, match=why):
        layout_for(config, settings)


REFUSED = """
import sys
from kvcap.cli import run
code = run(["export", "decoder", sys.argv[1], "-o", sys.argv[2]])
heavy = {"onnx", "onnxruntime", "kvcap.export.decoder.write", "torch._dynamo"}
print(code, sorted(heavy & set(sys.modules)))
"""


def test_a_refusal_waits_for_no_weights_and_for_nothing_that_traces(tmp_path):
    config_of("granitemoe_swa").save_pretrained(tmp_path / "model")  # which is all there is
    done = in_python(REFUSED, tmp_path / "model", tmp_path / "made")
    assert done.stdout.split("\n")[0] == "2 []", done.stderr
    assert "experts" in done.stderr
    assert not (tmp_path / "made").exists()
