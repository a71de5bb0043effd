"""Found decoders that count positions by their slots: which are taken, and refusals by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grouped_decoder
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from standard_decoder import COMPANIONS

from kvcap.cli import run
from kvcap.export.adopted.adopt import adopt, decoder_in
from kvcap.export.files import file_entry
from kvcap.export.verify import verify_decoder
from kvcap.policies import load_policy
from kvcap.runtime.errors import ModelNotFound, NotExportable, UnsupportedModel

KEYDIFF = [load_policy("keydiff")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return grouped_decoder.ready(tmp_path_factory, "llama")


@pytest.fixture
def decoder(source, tmp_path):
    """A copy that may be spoilt."""
    shutil.copytree(source / "decoder", tmp_path / "decoder")
    for path in (tmp_path / "decoder").glob("*kvcap*"):
        path.unlink()
    return tmp_path / "decoder"


def spoil(folder: Path, change: Any) -> None:
    """Change the graph in a directory."""
    model = onnx.load(folder / "model.onnx")
    change(model.graph)
    onnx.save(model, folder / "model.onnx")


def weight(name: str, change: Any) -> Any:
    def spoilt(graph: Any) -> None:
        (tensor,) = (x for x in graph.initializer if x.name == name)
        array = np.array(numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(change(array), name))

    return spoilt


def attribute(name: str, value: int) -> Any:
    def spoilt(graph: Any) -> None:
        for node in graph.node:
            if node.op_type == "GroupQueryAttention":
                kept = [a for a in node.attribute if a.name != name]
                del node.attribute[:]
                node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return spoilt


def nodes(*new: Any, **inputs: Any) -> Any:
    """Nodes before the others, and other inputs (by place) of all attention."""

    def spoilt(graph: Any) -> None:
        for node in new:
            graph.node.insert(0, node)
        for node in graph.node:
            if node.op_type == "GroupQueryAttention":
                for place, name in inputs.items():
                    place = int(place[1:])
                    node.input.extend([""] * (place + 1 - len(node.input)))
                    node.input[place] = name

    return spoilt


def row(x: Any) -> Any:
    x[77] = -x[77]
    return x


def theta(x: Any) -> Any:
    """Cosines of slightly other frequencies."""
    angles = np.arange(len(x))[:, None] * 11_000.0 ** -(np.arange(x.shape[1]) / x.shape[1])
    return np.cos(angles).astype(x.dtype)


def none(x: Any) -> Any:
    x[1, 0] = np.nan
    return x


SAME = helper.make_node("Identity", ["cos_cache"], ["made"], "same")
FAULTS = {
    "a row of cosines": (weight("cos_cache", row), r"cos_cache of model\.onnx is .* position 77"),
    "other frequencies": (weight("cos_cache", theta), "cos_cache .* moved by other angles"),
    "sines": (weight("sin_cache", row), "sin_cache .* position 77"),
    "no number": (weight("cos_cache", none), "cos_cache .* nan"),
    "fewer pairs": (weight("cos_cache", lambda x: x[:, :3]), "8 pairs"),
    "computed": (nodes(SAME, x7="made"), "computed in its graph"),
    "neighbours": (attribute("rotary_interleaved", 1), "rotates neighbours"),
    "heads": (attribute("num_heads", 8), "cannot read|8 heads"),
    "a window": (attribute("local_window_size", 5), "computes something else"),
    "smooth": (attribute("smooth_softmax", 1), "smooth_softmax"),
    "a bias": (nodes(x10="cos_cache"), "bias by where slots lie"),
    "sinks": (nodes(x11="sin_cache"), "sink logits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_be_silently_wrong_is_refused_by_name(decoder, fault):
    change, says = FAULTS[fault]
    spoil(decoder, change)
    with pytest.raises(Exception, match=says) as caught:
        adopt(decoder, None, KEYDIFF)
    assert type(caught.value).__module__ == "kvcap.runtime.errors"
    assert not list(decoder.glob("*kvcap*"))


def test_a_config_of_other_frequencies_is_refused(decoder):
    config = json.loads((decoder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 30.0}
    (decoder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="cos_cache"):
        adopt(decoder, None, KEYDIFF)


@pytest.mark.slow
def test_keys_that_are_rotated_otherwise_are_found_by_trial(tmp_path_factory, tmp_path):
    """Beside its attention, where no node says by which angles."""
    found = grouped_decoder.ready(tmp_path_factory, "places")
    shutil.copytree(found / "decoder", tmp_path / "decoder")
    spoil(tmp_path / "decoder", weight("cos_cache", theta))
    with pytest.raises(UnsupportedModel, match="other angles than config"):
        adopt(tmp_path / "decoder", None, KEYDIFF)


@pytest.mark.slow
def test_a_window_that_nothing_can_pass(decoder):
    spoil(decoder, attribute("local_window_size", 40))
    said = adopt(decoder, None, KEYDIFF, budget_tokens=24, block_size=8)
    assert said["model"]["window"] == 40
    assert run(["generate", str(decoder), "Hi", "--budget-tokens", "33"]) == 2
    assert run(["generate", str(decoder), "Hi", "--max-new-tokens", "3"]) == 0


def test_what_is_said_of_one(source, capsys):
    said = json.loads((source / "decoder" / "kvcap.json").read_text())
    assert said["kind"] == "grouped"
    assert said["rotates"] == [True] * len(said["kv_layers"])
    assert [entry["positions"] for entry in said["evictors"]] == ["compact", "compact"]
    assert run(["export", "verify", str(source / "decoder")]) == 0
    assert capsys.readouterr().out.count("  ok\n") == 2


@pytest.mark.slow
def test_a_fault_in_a_graph_that_selects_is_found(source, tmp_path):
    shutil.copytree(source / "decoder", tmp_path / "decoder")
    file = tmp_path / "decoder" / "kvcap-evict.keydiff.compact.onnx"
    model = onnx.load(file)
    (sign,) = (node for node in model.graph.node if node.op_type == "Neg")
    sign.op_type = "Identity"
    onnx.save(model, file)
    said = json.loads((tmp_path / "decoder" / "kvcap.json").read_text())
    for entry in said["files"]:
        entry |= {**file_entry(tmp_path / "decoder" / entry["file"]), "file": entry["file"]}
    (tmp_path / "decoder" / "kvcap.json").write_text(json.dumps(said))
    report = verify_decoder(tmp_path / "decoder")
    assert [row.ok for row in report.rows] == [False, True]


def test_true_positions_and_policies_that_need_more_are_refused(decoder):
    with pytest.raises(UnsupportedModel, match="positions='true' are not exact"):
        adopt(decoder, None, KEYDIFF, positions="true")
    with pytest.raises(NotExportable, match="reads attention, queries"):
        adopt(decoder, None, [load_policy("snapkv")])


def test_variants_are_found_by_name(tmp_path, source, capsys):
    (tmp_path / "onnx").mkdir()
    for name in ("model_q4", "model_q4f16", "model_quantized"):
        shutil.copy(source / "decoder" / "model.onnx", tmp_path / "onnx" / f"{name}.onnx")
    for name in COMPANIONS:
        shutil.copy(source / "decoder" / name, tmp_path)
    assert decoder_in(tmp_path).name == "model_q4.onnx"
    assert decoder_in(tmp_path, "q4f16").name == "model_q4f16.onnx"
    assert decoder_in(tmp_path, "quantized") == decoder_in(tmp_path, "q8")
    with pytest.raises(ModelNotFound, match=r"'int8'; there are q4 \(model_q4\.onnx\), q8"):
        decoder_in(tmp_path, "int8")
    sizes = ["--budget-tokens", "24", "--block-size", "8", "--policy", "keydiff"]
    command = ["export", "decoder", str(tmp_path), "--exporter", "existing", *sizes]
    assert run([*command, "--variant", "q4f16"]) == 0
    assert "decoder: onnx/model_q4f16.onnx, fp32; also there: q4, q8" in capsys.readouterr().out
    assert run(["generate", str(tmp_path), "Hi", "--max-new-tokens", "2"]) == 0
    assert run(["export", "decoder", "pocket", "--variant", "q4"]) == 2
    assert "--exporter existing" in capsys.readouterr().err


@pytest.mark.slow
def test_where_no_config_lies_beside_it(decoder, source, capsys):
    (decoder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match="--config MODEL"):
        adopt(decoder, None, KEYDIFF)
    command = ["export", "decoder", str(decoder), "--exporter", "existing", "--policy", "keydiff"]
    assert run([*command, "--config", str(source / "model")]) == 0
    assert (decoder / "config.json").is_file()
    assert run(["export", "verify", str(decoder)]) == 0
