"""Weights in blocks: packed by a plain formula's numbers, and read by ONNX Runtime as they are."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from kvcap.export.decoder import embeddings
from kvcap.export.weights import Store, pack, place, rounded_in, unpack
from kvcap.runtime.models.rounding import BLOCK, Rounding

SHAPES = [(5, 32), (3, 33), (7, 100), (64, 31), (2, 96)]
ROUNDINGS = [Rounding(bits, symmetric) for bits in (4, 8) for symmetric in (True, False)]


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def by_formula(weights, rounding):
    """Return numbers, scales, zeros, and what they stand for, of every block by itself."""
    rows, columns = weights.shape
    count = -(-columns // BLOCK)
    numbers = np.zeros((rows, count, BLOCK), int)
    scales, zeros = np.zeros((rows, count), np.float32), np.zeros((rows, count), int)
    for row in range(rows):
        for block in range(count):
            part = np.zeros(BLOCK, np.float32)
            given = weights[row, block * BLOCK : (block + 1) * BLOCK].numpy()
            part[: len(given)] = given
            if rounding.symmetric:
                scale = part[np.abs(part).argmax()] / np.float32(-(2 ** (rounding.bits - 1)))
                zero = 2 ** (rounding.bits - 1)
            else:
                low, high = min(part.min(), 0), max(part.max(), 0)
                scale = (high - low) / np.float32(2**rounding.bits - 1)
                zero = round(float(-low / (scale or np.float32(1))))
            codes = np.rint(part / (scale or np.float32(1))) + zero
            numbers[row, block] = np.clip(codes, 0, 2**rounding.bits - 1)
            scales[row, block], zeros[row, block] = scale, zero
    meant = ((numbers - zeros[..., None]) * scales[..., None]).reshape(rows, -1)[:, :columns]
    return numbers, scales, zeros, meant


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_is_the_plain_formula(shape, rounding):
    weights = matrix(*shape)
    weights[0] = 0  # a block of zeros alone
    weights[1, :BLOCK] = weights[1, :BLOCK].abs() + 1  # of one sign
    packed = pack(weights, rounding)
    numbers, scales, zeros, meant = by_formula(weights, rounding)
    if rounding.bits == 4:
        numbers = numbers[..., 0::2] | numbers[..., 1::2] << 4
        zeros = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
        zeros = zeros[:, 0::2] | zeros[:, 1::2] << 4
    assert packed.numbers.dtype == torch.uint8
    np.testing.assert_array_equal(packed.numbers.numpy(), numbers)
    np.testing.assert_array_equal(packed.scales.numpy(), scales)
    if rounding.symmetric:
        assert packed.zeros is None
    else:
        np.testing.assert_array_equal(packed.zeros.numpy(), zeros)
    np.testing.assert_allclose(unpack(packed, shape[1], rounding).numpy(), meant, rtol=1e-6)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_no_number_is_rounded_by_more_than_half_a_step(rounding):
    weights = matrix(9, 70)
    packed = pack(weights, rounding)
    far = (unpack(packed, 70, rounding) - weights).abs()
    steps = packed.scales.abs().repeat_interleave(BLOCK, 1)[:, :70]
    # One number of a symmetric block may lie beyond the last one, 7 or 127.
    assert (far <= (1.01 if rounding.symmetric else 0.501) * steps).all()


def test_rows_are_packed_the_same_in_parts(monkeypatch):
    weights = matrix(50, 40)
    whole = [pack(weights, rounding) for rounding in ROUNDINGS]
    monkeypatch.setattr("kvcap.export.weights.ROWS", 120)
    for rounding, wanted in zip(ROUNDINGS, whole, strict=True):
        for mine, theirs in zip(pack(weights, rounding), wanted, strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)


# --- in graphs


def graph(shape, *, tied=False, bias=False, as_is=False):
    """Return a graph that looks tokens up in a table, times a matrix [N, K]."""
    rows, columns = shape
    value, node = helper.make_tensor_value_info, helper.make_node
    table = "head" if tied else "embed"
    inputs = [
        value("ids", TensorProto.INT64, ["tokens"]),
        value("head", TensorProto.FLOAT, [columns, rows] if as_is else [rows, columns]),
    ]
    nodes = [node("Gather", [table, "ids"], ["hidden"])]
    if not tied:
        inputs.append(value("embed", TensorProto.FLOAT, [rows, columns]))
    if not as_is:
        nodes.append(node("Transpose", ["head"], ["turned"], perm=[1, 0]))
    last = "product" if bias else "logits"
    nodes.append(node("MatMul", ["hidden", "head" if as_is else "turned"], [last]))
    if bias:
        inputs.append(value("bias", TensorProto.FLOAT, [rows]))
        nodes.append(node("Add", ["product", "bias"], ["logits"]))
    outputs = [value(name, TensorProto.FLOAT, ["tokens", None]) for name in ("hidden", "logits")]
    made = helper.make_graph(nodes, "tiny", inputs, outputs)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def weights_for(shape, *, tied=False, bias=False, as_is=False):
    head = matrix(*shape, seed=1)
    by_name = {"head": head.T.contiguous() if as_is else head}
    if not tied:
        by_name["embed"] = matrix(*shape, seed=2)
    if bias:
        by_name["bias"] = matrix(1, shape[0], seed=3)[0]
    return by_name


def run(file, ids, *outputs):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert [port.name for port in session.get_inputs()] == ["ids"]
    return [torch.from_numpy(x) for x in session.run(outputs, {"ids": ids})]


@pytest.mark.parametrize("rounding", [None, *ROUNDINGS], ids=str)
@pytest.mark.parametrize("options", [
    {}, {"tied": True}, {"bias": True}, {"as_is": True}, {"tied": True, "bias": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(48, 33), (40, 64)])
def test_the_graph_computes_what_the_rounded_weights_do(
    shape, options, rounding, tmp_path, monkeypatch
):
    monkeypatch.setattr("kvcap.export.weights.LARGE", 0)
    weights, model = weights_for(shape, **options), graph(shape, **options)
    rounded_names = place(model, weights, Store(tmp_path / "data"), rounding)
    (tmp_path / "x.onnx").write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(tmp_path / "x.onnx"))
    rounded = rounded_in(tmp_path / "x.onnx")
    assert (
        set(rounded)
        == set(rounded_names)
        == (set() if rounding is None else set(weights) - {"bias"})
    )
    meant = {**weights, **{name: matrix.read() for name, matrix in rounded.items()}}
    for name, weight in weights.items():
        assert meant[name].shape == weight.shape
        torch.testing.assert_close(meant[name], weight, rtol=0, atol=0.4)  # 3 of 16 steps and more
    ids = np.array([0, 7, shape[0] - 1])
    hidden, logits = run(tmp_path / "x.onnx", ids, "hidden", "logits")
    wanted = meant["head" if options.get("tied") else "embed"][ids]
    head = meant["head"] if options.get("as_is") else meant["head"].T
    torch.testing.assert_close(hidden, wanted)
    assert embeddings.write(tmp_path / "x.onnx", tmp_path / "rows.onnx")
    (rows,) = run(tmp_path / "rows.onnx", ids, embeddings.ROWS)
    torch.testing.assert_close(rows, wanted)
    expected = wanted @ head + meant.get("bias", torch.zeros(()))
    near = 1e-5 if rounding is None else 2e-2  # activations are rounded to int8
    assert float((logits - expected).abs().max() / expected.abs().max()) < near


@pytest.mark.parametrize("rounding", [None, *ROUNDINGS], ids=str)
@pytest.mark.parametrize("columns", [33, 64])
def test_matrices_side_by_side_are_kept_as_one(columns, rounding, tmp_path):
    """Three matrices of unequal heights, of which each is found again by its own name."""
    heights = {"q": 40, "k": 7, "v": 16}
    weights = {name: matrix(n, columns, seed=n) for name, n in heights.items()}
    value, node, floats = helper.make_tensor_value_info, helper.make_node, TensorProto.FLOAT
    nodes = [node("Transpose", [name], [f"{name}.t"], perm=[1, 0]) for name in weights]
    nodes.append(node("Concat", [f"{name}.t" for name in weights], ["all"], axis=1))
    nodes.append(node("MatMul", ["x", "all"], ["y"]))
    inputs = [value("x", floats, [2, columns])]
    inputs += [value(name, floats, [n, columns]) for name, n in heights.items()]
    made = helper.make_graph(nodes, "joint", inputs, [value("y", floats, [2, None])])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    rounded_names = place(model, weights, Store(tmp_path / "data"), rounding)
    file = tmp_path / "x.onnx"
    file.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(file))
    assert [n.op_type for n in model.graph.node] == [
        "MatMul" if rounding is None else "MatMulNBits"
    ]
    rounded = rounded_in(file)
    assert list(rounded) == list(rounded_names) == ([] if rounding is None else list(weights))
    meant = {**weights, **{name: one_matrix.read() for name, one_matrix in rounded.items()}}
    for name, weight in weights.items():
        if rounding is not None:
            packed = pack(weight, rounding)
            torch.testing.assert_close(meant[name], unpack(packed, columns, rounding))
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    x = matrix(2, columns, seed=5)
    (y,) = session.run(None, {"x": x.numpy()})
    expected = x @ torch.cat(list(meant.values())).T
    near = 1e-5 if rounding is None else 2e-2
    assert float((torch.from_numpy(y) - expected).abs().max() / expected.abs().max()) < near


def test_a_matrix_that_is_read_alone_too_is_not_joined(tmp_path):
    weights = {"a": matrix(40, 64), "b": matrix(8, 64)}
    value, node, floats = helper.make_tensor_value_info, helper.make_node, TensorProto.FLOAT
    nodes = [node("Transpose", [name], [f"{name}.t"], perm=[1, 0]) for name in weights]
    nodes.append(node("Concat", ["a.t", "b.t"], ["all"], axis=1))
    nodes += [node("MatMul", ["x", "all"], ["y"]), node("MatMul", ["x", "a.t"], ["z"])]
    inputs = [
        value("x", floats, [2, 64]),
        value("a", floats, [40, 64]),
        value("b", floats, [8, 64]),
    ]
    outputs = [value(name, floats, [2, None]) for name in "yz"]
    made = helper.make_graph(nodes, "both", inputs, outputs)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    assert place(model, weights, Store(tmp_path / "data"), Rounding(4)) == {}
    (tmp_path / "x.onnx").write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(tmp_path / "x.onnx"), full_check=True)


def test_a_tied_table_is_kept_once_and_shared_by_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr("kvcap.export.weights.LARGE", 0)
    shape, store, rounding = (256, 64), Store(tmp_path / "data"), Rounding(4)
    weights, sizes = weights_for(shape, tied=True), []
    for name in ("one.onnx", "two.onnx"):
        model = graph(shape, tied=True)
        place(model, weights, store, rounding)
        (tmp_path / name).write_bytes(model.SerializeToString())
        sizes.append((tmp_path / "data").stat().st_size)
    assert sizes[0] == sizes[1] == 256 * 64 // 2 + 256 * 2 * 4  # half a byte each, and scales
    one, two = (run(tmp_path / name, np.array([3])) for name in ("one.onnx", "two.onnx"))
    assert all(map(torch.equal, one, two))


def test_what_else_reads_a_matrix_keeps_it_as_it_is(tmp_path):
    model = graph((300, 300))
    model.graph.node.append(helper.make_node("Abs", ["head"], ["more"]))
    store = Store(tmp_path / "data")
    rounded_names = place(model, weights_for((300, 300)), store, Rounding(4))
    assert set(rounded_names) == {"embed"}
    assert {n.op_type for n in model.graph.node} >= {"MatMul", "Transpose", "GatherBlockQuantized"}


def test_no_more_than_one_weight_is_read_at_a_time(tmp_path):
    """By count: weights are asked for one by one, each once, and none is kept."""
    import weakref

    shape, alive, most = (300, 300), weakref.WeakSet(), []

    class Counted(dict):
        def __getitem__(self, name):
            tensor = super().__getitem__(name).clone()
            alive.add(tensor)
            most.append(len(alive))
            return tensor

    place(
        graph(shape, bias=True),
        Counted(weights_for(shape, bias=True)),
        Store(tmp_path / "d"),
        Rounding(8),
    )
    assert len(most) == 3
    assert max(most) == 1
