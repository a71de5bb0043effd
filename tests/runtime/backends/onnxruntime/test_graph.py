"""One graph in ONNX Runtime: the options of its session."""

from __future__ import annotations

from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from kvcap.runtime.backends.onnxruntime.graph import Graph  # noqa: E402  # needs onnxruntime

TEXT = """<ir_version: 8, opset_import: ["": 17]>
doubled (float[n] x) => (float[n] y) { y = Add(x, x) }"""


@pytest.mark.parametrize("threads", [None, 2])
def test_threads_of_a_session_do_not_spin(threads: int | None, tmp_path: Path) -> None:
    """Spinning threads are several times as slow beside a busy process."""
    onnx.save(onnx.parser.parse_model(TEXT), file := tmp_path / "doubled.onnx")
    options = Graph(file, threads).session.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert not options.enable_mem_pattern
    if threads:
        assert options.intra_op_num_threads == threads
