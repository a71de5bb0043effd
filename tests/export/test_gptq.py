"""Weights rounded by a text: the plain formula's numbers, layer by layer, in the export."""

from __future__ import annotations

import json
from itertools import islice
from random import Random

import pytest
import torch
from conftest import small_policy, tiny_model
from make import argv, saved_model

from kvcap import pocket
from kvcap.cli import run
from kvcap.export.decoder import calibrate as calibrating
from kvcap.export.decoder import spec
from kvcap.export.decoder.calibrate import LEAST, MOST, TIED, calibrate, pieces
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.decoder.spec import layout_for, open_model
from kvcap.export.gptq import DAMPING, gptq
from kvcap.export.weights import pack, rounded_in, unpack
from kvcap.pocket.prose import filler
from kvcap.policies import load_policy
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.files import load_config, load_tokenizer
from kvcap.runtime.models.rounding import BLOCK, Rounding
from kvcap.runtime.types import MANIFEST

ROUNDINGS = [Rounding(4, symmetric) for symmetric in (True, False)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(columns, count=200):
    """Return vectors whose numbers go together, as those of a text do."""
    return random(count, columns) @ random(columns, columns, seed=1) / columns**0.5


def by_formula(weights, moments, rounding):
    """Column by column, each time with the inverse of what is left of the damped moments."""
    rows, columns = weights.shape
    whole = -(-columns // BLOCK) * BLOCK
    left, rounded = torch.zeros(rows, whole).double(), torch.zeros(rows, whole).double()
    left[:, :columns] = weights
    damped = torch.zeros(whole, whole).double()
    damped[:columns, :columns] = moments
    damped += torch.eye(whole) * DAMPING * damped.diagonal().mean()
    for j in range(whole):
        if j % BLOCK == 0:
            block = left[:, j : j + BLOCK]
            if rounding.symmetric:
                extreme = block[range(rows), block.abs().argmax(1)]
                scale, zero = extreme / -8, torch.full((rows,), 8.0).double()
            else:
                low, high = block.amin(1).clamp_max(0), block.amax(1).clamp_min(0)
                scale = (high - low) / 15
                zero = (-low / scale).round()
        rounded[:, j] = ((left[:, j] / scale).round() + zero).clamp(0, 15).sub(zero) * scale
        inverse = torch.linalg.inv(damped[j:, j:])
        error = (left[:, j] - rounded[:, j]) / inverse[0, 0]
        left[:, j:] -= error[:, None] * inverse[0]
    return rounded[:, :columns].float()


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("shape", [(5, 96), (7, 70)])
def test_gptq_is_the_plain_formula(shape, rounding):
    weights, x = random(*shape, seed=2), inputs(shape[1])
    moments = x.T @ x
    packed = gptq(weights, moments, rounding)
    numbers = unpack(packed, shape[1], rounding)
    torch.testing.assert_close(
        numbers, by_formula(weights, moments, rounding), rtol=1e-4, atol=1e-4
    )
    nearest = unpack(pack(weights, rounding), shape[1], rounding)
    lost, before = (((weights - q) @ x.T).norm() for q in (numbers, nearest))
    assert lost < 0.85 * before


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("moments", [torch.eye(70), torch.zeros(70, 70)], ids=["eye", "zeros"])
def test_where_nothing_goes_together_numbers_are_the_nearest(moments, rounding, monkeypatch):
    weights = random(50, 70)
    weights[3] = 0
    wanted = pack(weights, rounding)
    monkeypatch.setattr("kvcap.export.gptq.NUMBERS", 1000)  # in parts
    for mine, theirs in zip(gptq(weights, moments, rounding), wanted, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_what_the_text_never_has_is_kept_near():
    weights, x = random(6, 64), inputs(64)
    x[:, 5] = 0
    numbers = unpack(gptq(weights, x.T @ x, ROUNDINGS[1]), 64, ROUNDINGS[1])
    assert (numbers[:, 5] - weights[:, 5]).abs().max() < 0.4


# --- layer by layer


def text(sentences=400, seed="gptq"):
    return " ".join(islice(filler(Random(seed)), sentences))


def made(family, **changes):
    model = tiny_model(family, **changes)
    return DecoderGraph(
        model, layout_for(model.config, CacheSettings(12, 4, small_policy("keydiff", model.config)))
    )


def one_by_one(decoder, ids, rounding):
    """Round by whole runs of the model, one for every layer."""
    model, matrices = decoder.model, {}
    tied = model.config.tie_word_embeddings
    names = {module: name for name, module in decoder.named_modules()}
    model.config._attn_implementation = "eager"
    for part in [*model.model.layers, model.lm_head]:
        linears = [m for m in part.modules() if type(m) is torch.nn.Linear]
        sums = {m: torch.zeros(m.in_features, m.in_features) for m in linears}

        def see(m, given, sums=sums):
            rows = given[0].flatten(0, -2)
            sums[m] += rows.T @ rows

        hooks = [m.register_forward_pre_hook(see) for m in linears]
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        for m in linears:
            both = tied and m is model.lm_head
            packed = gptq(m.weight.data, sums[m], rounding, TIED if both else DAMPING)
            matrices[f"{names[m]}.weight"] = packed
            if both:
                matrices["model.model.embed_tokens.weight"] = packed
            m.weight.data = unpack(packed, m.in_features, rounding)
    return matrices


@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("granite", {}),
])  # fmt: skip
def test_a_layer_is_rounded_by_what_the_rounded_ones_before_it_give(family, changes):
    decoder, rounding = made(family, num_hidden_layers=3, **changes), ROUNDINGS[1]
    ids = torch.randint(3, 97, (4, 32), generator=torch.Generator().manual_seed(0))
    before = {name: x.clone() for name, x in decoder.state_dict().items()}
    notes = []
    packed = calibrate(decoder, ids, rounding, note=notes.append)
    assert notes[:3] == [f"calibrating layer {i} of 3" for i in (1, 2, 3)]
    assert all(torch.equal(x, before[name]) for name, x in decoder.state_dict().items())
    assert decoder.model.config._attn_implementation == "kvcap"
    wanted = one_by_one(decoder, ids, rounding)
    assert packed.keys() == wanted.keys()
    for name, theirs in wanted.items():
        same = packed[name].numbers == theirs.numbers
        assert same.float().mean() > 0.9, name  # a number that tips over moves those behind it


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a directory of a tiny model that knows pocket's tokens."""
    return saved_model(tmp_path_factory.mktemp("gptq") / "model", num_hidden_layers=5)


def test_pieces_are_spread_over_the_text(monkeypatch):
    tokenizer = load_tokenizer(str(pocket.path()))
    sample = text()
    ids = tokenizer(sample, add_special_tokens=False)["input_ids"]
    assert LEAST <= len(ids) <= MOST
    whole = pieces(tokenizer, sample, 100)
    assert whole.shape[0] * whole.shape[1] > len(ids) - 100
    assert whole.shape[1] == 100
    monkeypatch.setattr(calibrating, "MOST", 1000)
    parts = pieces(tokenizer, sample, 10_000)
    assert parts.shape == (1, 512)
    monkeypatch.setattr(calibrating, "PIECE", 250)
    parts = pieces(tokenizer, sample, 10_000)
    assert parts.shape == (4, 250)
    assert parts[0].tolist() == ids[:250]
    assert parts[-1].tolist() == ids[-250:]
    with pytest.raises(NotExportable, match=r"has [\d,]+ tokens, and at least 2,048"):
        pieces(tokenizer, text(20), 512)
    with pytest.raises(NotExportable, match="no tokenizer"):
        pieces(None, sample, 512)


@pytest.mark.slow
def test_the_export_of_weights_in_files_has_the_rounded_numbers(
    checkpoint, tmp_path, monkeypatch, capsys, kvcap
):
    read, out, where = tmp_path / "text.txt", tmp_path / "x", str(checkpoint)
    read.write_text(text())
    layout = layout_for(load_config(where), CacheSettings(12, 4, load_policy("keydiff")))
    source = spec.load(where, "int4")
    ids = pieces(source.tokenizer, text(), layout.shape.trained_length)
    wanted = calibrate(DecoderGraph(source.model, layout), ids, ROUNDINGS[1])
    monkeypatch.setattr(spec, "LOADED", 0)
    assert open_model(where, "int4").checkpoint is not None
    given = argv(
        "export decoder {} -o {} --budget-tokens 12 --quick --block-size 4 --dtype int4",
        where,
        out,
    )
    assert run([*given, "--calibrate", str(read)]) == 0
    matrices = rounded_in(out / "decoder.onnx")
    for name, packed in wanted.items():
        theirs = unpack(packed, matrices[name].columns, ROUNDINGS[1])
        assert torch.equal(matrices[name].read(), theirs), name
    assert len(json.loads((out / MANIFEST).read_text())["calibrated_on"]) == 64
    capsys.readouterr()
    assert "calibrated_on" in kvcap.refused(*given)


@pytest.mark.parametrize(("dtype", "content", "says"), [
    ("int8", text(), "--calibrate is for --dtype int4, and this is int8"),
    ("fp32", text(), "--calibrate is for --dtype int4"),
    ("int4", "too short", "and at least 2,048 are needed"),
    ("int4", b"\xff\xfe\x00", "not UTF-8"),
    ("int4", None, "No such file"),
])  # fmt: skip
def test_texts_that_cannot_be(dtype, content, says, checkpoint, tmp_path, kvcap):
    read, out = tmp_path / "text.txt", tmp_path / "x"
    if content is not None:
        read.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = ["export", "decoder", str(checkpoint), "-o", str(out), "--dtype", dtype]
    assert says in kvcap.refused(*given, "--calibrate", str(read))
    assert not out.exists()
