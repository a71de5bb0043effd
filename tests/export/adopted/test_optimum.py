"""Optimum's export under a cap, where optimum is: an environment with transformers 4.57."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import tiny_chat

from kvcap.cli import run
from kvcap.export.adopted.optimum import export_with_optimum
from kvcap.policies import load_policy
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.errors import ExtraMissing, NotExportable, ToleranceError

HERE = importlib.util.find_spec("optimum") is not None
TEXT = "Please remember: the code for the blue door is 4821. The old ship left in the morning. " * 2


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    if not HERE:
        pytest.skip("optimum-onnx is not installed here: it needs transformers below 4.58")
    folder = tmp_path_factory.mktemp("optimum")
    tiny_chat.save(folder / "model")
    policies = [load_policy("keydiff")]
    said = export_with_optimum(str(folder / "model"), folder / "out", policies, budget_tokens=24)
    assert said["exporter"] == "optimum"
    return folder


@pytest.mark.parametrize("mode", ["compact", "true"])
@pytest.mark.parametrize("budget", [12, 24, 40])
def test_text_and_kept_positions_are_pytorchs(exported, mode, budget):
    settings = {"budget_tokens": budget, "block_size": 8, "positions": mode}
    eager = Runtime.from_pretrained(str(exported / "model"), dtype="float32", **settings)
    sessions = [eager.session(), OrtRuntime.from_directory(exported / "out", **settings).session()]
    said = []
    for session in sessions:
        session.set_generation(do_sample=False, max_new_tokens=300)
        said.append("".join(session.complete(TEXT)))
    assert said[0] == said[1]
    layers = sessions[0].cache.capped_layers
    kept = [layer.segments[0].positions[0].sort(-1).values.tolist() for layer in layers]
    assert kept == [rows.tolist() for rows in sessions[1].cache.positions]


def test_the_command(exported, tmp_path, capsys):
    options = ["--exporter", "optimum", "--policy", "knorm", "--budget-tokens", "16"]
    model, out = str(exported / "model"), str(tmp_path / "out")
    assert run(["export", "decoder", model, "-o", out, *options]) == 0
    capsys.readouterr()
    assert run(["generate", out, "Hi", "--backend", "onnxruntime", "--max-new-tokens", "3"]) == 0
    assert run(["export", "decoder", model, "-o", out, *options]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_decoder_that_differs_from_the_model_is_not_written(exported, tmp_path, monkeypatch):
    """As if optimum had exported other weights."""
    monkeypatch.setattr("kvcap.export.adopted.optimum.CLOSE", 1e-12)
    with pytest.raises(ToleranceError, match="--exporter kvcap"):
        export_with_optimum(str(exported / "model"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_half_precision_is_refused(tmp_path):
    with pytest.raises(NotExportable, match="float32"):
        export_with_optimum("pocket", tmp_path / "out", dtype="fp16")


def test_what_is_there_is_not_replaced(tmp_path):
    Path(tmp_path, "mine").write_text("x")
    with pytest.raises(NotExportable, match="is there already"):
        export_with_optimum("pocket", tmp_path)


@pytest.mark.skipif(HERE, reason="optimum is installed here")
def test_where_optimum_is_not_it_is_missed_by_name(tmp_path):
    with pytest.raises(ExtraMissing, match=r"'\.\[optimum\]'"):
        export_with_optimum("pocket", tmp_path / "out")
    assert not list(tmp_path.iterdir())
