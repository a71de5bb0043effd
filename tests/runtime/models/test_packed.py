"""Weights in 8 and 4 bits by PyTorch: their products, their bytes, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from families import ALL, ELSEWHERE, OLD, STATES, model_of
from safetensors.torch import load_file, save_file
from tools import goes_on
from torch import nn
from transformers import AutoModelForCausalLM

from kvcap import BudgetCache, MemoryPlan, Runtime, Session
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.errors import PlanInfeasible, SessionFileForeign, UnsupportedModel
from kvcap.runtime.models import files, packed, packed_matrix
from kvcap.runtime.models.files import load_config, load_model, load_packed
from kvcap.runtime.models.formats import NAMES, int4, matrix_of
from kvcap.runtime.models.fused.decoder import decoder_of
from kvcap.runtime.models.packed import PackedEmbedding, PackedLinear, pack
from kvcap.runtime.models.weights import held_weights, read_headers, weigh

SHAPES = [(64, 32), (100, 70), (7, 5), (130, 96), (1, 33)]  # rows and columns
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def filled(weight: torch.Tensor, kind: str, dtype: torch.dtype) -> Any:
    matrix = matrix_of(kind)(*weight.shape, dtype)
    matrix.fill(lambda start, stop: weight[start:stop])
    return matrix


def far(values: torch.Tensor, true: torch.Tensor) -> float:
    """The size of the difference, as a share of what is true."""
    return float((values.float() - true).norm() / true.norm())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", NAMES)
def test_products_are_those_of_the_numbers_that_are_looked_up(kind, dtype):
    torch.manual_seed(0)
    for rows, columns in SHAPES:
        matrix = filled(torch.randn(rows, columns), kind, dtype)
        true = matrix.lookup(torch.arange(rows)).float()
        x = torch.randn(41, columns).to(dtype)
        rounding = 1e-5 if dtype == torch.float32 else 0.01
        for count in (1, 3, matrix.few):
            assert far(matrix(x[:count]), x[:count].float() @ true.T) < rounding
        assert far(matrix(x), x.float() @ true.T) < 0.02, "tokens in 8 bits"
        assert matrix(x[:0]).shape == (0, rows)
        same = matrix.integers(0, rows)[:columns].T.float() * matrix.row_scales.float()[:, None]
        assert far(same, true) < rounding
        assert torch.equal(matrix.lookup(torch.tensor([[rows - 1]]))[0, 0].float(), true[-1])


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.011), ("int4", 0.1)])
def test_weights_are_rounded_to_the_nearest_that_there_is(kind, most):
    torch.manual_seed(0)
    weight = torch.randn(70, 256) * torch.rand(70, 1).exp()
    weight[3], weight[4], weight[5, :32] = 0, 1e-3, weight[5, :32].abs()  # one sign
    weight[6] *= 1e-30  # no float16 scale for it
    for dtype in FLOATS:
        rows = filled(weight, kind, dtype).lookup(torch.arange(70)).float()
        assert far(rows, weight) < most
        assert not rows[3].any()
        assert far(rows[4], weight[4]) < 0.02
        assert rows.isfinite().all()


@pytest.mark.parametrize("kind", NAMES)
def test_pieces_give_what_the_whole_gives(kind, monkeypatch):
    torch.manual_seed(0)
    weight, x = torch.randn(200, 64), torch.randn(20, 64)
    whole = filled(weight, kind, torch.float32)
    expected = whole(x)
    monkeypatch.setattr(sys.modules[type(whole).__module__], "ROUNDED", 64 * 64)
    monkeypatch.setattr(packed_matrix, "SPREAD", 64 * 64)
    pieces = filled(weight, kind, torch.float32)
    assert list(pieces.pieces(64 * 64)) == [(0, 64), (64, 128), (128, 192), (192, 200)]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor[:200], pieces.state_dict()[name][:200]), name
    torch.testing.assert_close(pieces(x), expected)


def test_rows_in_another_order_are_found(monkeypatch):
    """As CPUs pack whose vectors are shorter: pairs of rows that lie side by side."""
    torch.manual_seed(0)
    weight = torch.randn(96, 64)
    ids = torch.arange(96)
    true = filled(weight, "int4", torch.float32)
    looked_up, integers = true.lookup(ids), true.integers(64, 96)

    def pairs(numbers: torch.Tensor) -> torch.Tensor:
        blocks = numbers.to(torch.uint8).unflatten(0, (-1, 16, 2)).permute(0, 3, 1, 2)
        return (blocks[..., 0] | blocks[..., 1] << 4).reshape(len(numbers), -1)

    monkeypatch.setattr(int4, "_pack", pairs)
    int4.row_order.cache_clear()
    try:
        assert int4.row_order().size == 32
        other = filled(weight, "int4", torch.float32)
        assert not torch.equal(other.numbers, true.numbers)
        assert torch.equal(other.lookup(ids), looked_up)
        assert torch.equal(other.integers(64, 96), integers)
    finally:
        int4.row_order.cache_clear()


def save(family: str, folder: Path, dtype: torch.dtype) -> str:
    model_of(family).to(dtype).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("family", ALL | ELSEWHERE)
def test_families_run_and_hold_what_is_planned(family, tmp_path, tokens):
    """Logits are those of the plain model with the rounded weights, under a cap too."""
    if OLD and (family in STATES or family == "gemma3n"):
        pytest.skip("this transformers keeps no states, or does not read what it wrote")
    kind = NAMES[len(family) % 2]
    where = save(family, tmp_path, torch.float32)
    config = load_config(where)
    model = load_packed(where, config, torch.float32, kind).eval()
    planned = weigh(config, torch.float32, read_headers(where), kind)
    assert planned.nbytes == held_weights(model).nbytes
    plain = load_model(where, config, torch.float32).eval()
    assert planned.nbytes < held_weights(plain).nbytes
    assert decoder_of(model) is None
    parts = dict(plain.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, (PackedLinear, PackedEmbedding)):
            matrix = module.matrix
            parts[name].weight.data = matrix.lookup(torch.arange(matrix.rows))
    ids, logits = tokens(24), []
    for loaded in (model, plain):
        loop = BlockLoop(loaded, BudgetCache(loaded.config, 12, 4), graphs=False)
        own_logits = map(loop.read, ids[:, 20:].split(1, 1))
        logits.append(torch.stack([loop.prefill(ids[:, :20]), *own_logits], 1))
    torch.testing.assert_close(logits[0], logits[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", NAMES)
def test_what_is_tied_is_held_once_and_the_float_weights_are_let_go(kind, tmp_path):
    where = save("gemma3_text", tmp_path, torch.bfloat16)
    model = load_packed(where, load_config(where), torch.bfloat16, kind)
    assert model.lm_head.matrix is model.get_input_embeddings().matrix
    assert model.dtype == torch.bfloat16
    big = [p for p in model.parameters() if p.dim() > 1 and p.dtype == torch.bfloat16]
    assert all(p.dim() == 3 for p in big), "scales alone"


@pytest.mark.parametrize("other", [True, False])
def test_a_head_of_its_own_is_kept_as_transformers_keeps_it(other, tmp_path):
    """The config ties it. transformers 5 goes by what the file holds, 4.57 by the config."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    where, file = str(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += other  # the last number that is compared
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    config = load_config(where)
    plain = load_model(where, config, torch.float32)
    true = AutoModelForCausalLM.from_pretrained(where)
    assert torch.equal(plain.lm_head.weight, true.lm_head.weight)
    model = load_packed(where, config, torch.float32, "int8")
    separate = other and not OLD
    assert (model.lm_head.matrix is not model.get_input_embeddings().matrix) == separate
    rows = model.lm_head.matrix.lookup(torch.arange(len(head)))
    torch.testing.assert_close(rows, true.lm_head.weight, rtol=0, atol=0.01)
    for held, loaded in (("int8", model), (None, plain)):
        planned = weigh(config, torch.float32, read_headers(where), held)
        assert planned.nbytes == held_weights(loaded).nbytes


def test_files_that_cannot_be_read_by_name_are_loaded_and_packed(tmp_path, monkeypatch):
    where = save("llama", tmp_path, torch.float32)
    config = load_config(where)
    direct = load_packed(where, config, torch.float32, "int4")
    monkeypatch.setattr(files.Checkpoint, "of", lambda *_, **__: None)
    loaded = load_packed(where, config, torch.float32, "int4")
    mine, its = direct.state_dict(), loaded.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    whole = weigh(config, torch.float32).nbytes
    load_packed(where, config, torch.float32, "int4", room=whole)
    with pytest.raises(PlanInfeasible, match="1 more than the cap leaves"):
        load_packed(where, config, torch.float32, "int4", room=whole - 1)


def test_modules_of_other_kinds_stay():
    class Own(nn.Linear):
        pass

    kinds = {"own": Own, "gate": nn.Linear, "kv_b_proj": nn.Linear, "shared": nn.Embedding}
    kinds |= {"head": Own, "plain": nn.Linear}
    model = nn.ModuleDict({name: kind(32, 32) for name, kind in kinds.items()})
    model["head"].weight = model["shared"].weight  # of which one cannot be packed
    pack(model, "int8")
    changed = [name for name, module in model.items() if isinstance(module, PackedLinear)]
    assert changed == ["plain"]
    assert type(model["shared"]) is nn.Embedding


@pytest.mark.parametrize("kind", NAMES)
def test_the_plan_is_what_is_held_and_a_cap_counts_it(kind, chat_model, tmp_path):
    sizes: dict[str, Any] = {"budget_tokens": 32, "block_size": 16}
    runtime = Runtime.from_pretrained(chat_model, weights=kind, **sizes)
    config, headers = load_config(chat_model), read_headers(chat_model)
    plan = MemoryPlan.of(config, headers=headers, weights=kind, rehearse=True, **sizes)
    assert plan.weights == runtime.plan.weights == held_weights(runtime.model).nbytes
    assert plan.weights_dtype == runtime.plan.weights_dtype == kind
    assert runtime.device_label.endswith(f"{kind} weights")
    goes_on(runtime, tmp_path)
    assert runtime.with_policy_name("snapkv", {"window": 4}).plan.weights == plan.weights
    capped = Runtime.from_pretrained(chat_model, weights=kind, memory_cap="8GiB", **sizes)
    assert capped.plan.weights == plan.weights
    goes_on(capped.with_budget(24), tmp_path)


def test_a_session_goes_on_under_the_same_weights_alone(chat_model, tmp_path):
    file = tmp_path / "session.kvcap"
    runtimes = {
        kind: Runtime.from_pretrained(chat_model, budget_tokens=32, weights=kind, device="cpu")
        for kind in (None, *NAMES)
    }
    for kind, runtime in runtimes.items():
        session = runtime.session()
        session.set_generation(max_new_tokens=4, temperature=0)
        "".join(session.send("one two three"))
        session.save(file)
        again = Session.load(runtime, file)
        how = "start without --weights" if kind is None else f"start with --weights {kind}"
        for other, foreign in runtimes.items():
            if other != kind:
                with pytest.raises(SessionFileForeign, match=how):
                    Session.load(foreign, file)
        assert "".join(session.send("four")) == "".join(again.send("four"))


def test_what_cannot_be_is_refused_by_name(chat_model, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=" or ".join(NAMES)):
        Runtime.from_pretrained(chat_model, weights="int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on a CPU, and this is cuda"):
        packed.check_packing(load_config(chat_model), torch.float32, "cuda", "int4")
    for policy in ("criticalkv", "keydiff+criticalkv"):
        with pytest.raises(UnsupportedModel, match="without criticalkv, or leave --weights out"):
            Runtime.from_pretrained(chat_model, policy, weights="int8")
    runtime = Runtime.from_pretrained(chat_model, weights="int8")
    with pytest.raises(UnsupportedModel, match="without criticalkv"):
        runtime.with_policy_name("criticalkv", {})
    quantised = Path(chat_model, "config.json").read_text()
    method = {"quant_method": "torchao", "quant_type": "int8"}
    config = load_config(chat_model)
    config.quantization_config = method
    assert "torchao" not in quantised
    with pytest.raises(UnsupportedModel, match=r"'torchao' already; leave --weights int4 out"):
        packed.check_packing(config, torch.float32, "cpu", "int4")


@pytest.mark.parametrize("wrong", ["missing", "wrong"])
def test_a_build_without_products_or_with_wrong_ones_is_named(wrong, chat_model, monkeypatch):
    def product(x: torch.Tensor, *_: Any) -> torch.Tensor:
        if wrong == "missing":
            raise RuntimeError("not compiled with it\nfor this CPU")
        return x.new_zeros(len(x), 67)

    monkeypatch.setattr(int4.Int4Matrix, "product_of_few", lambda self, x: product(x))
    packed._fault.cache_clear()
    try:
        reason = r"\(not compiled with it\)" if wrong == "missing" else r"\(they are wrong\)"
        with pytest.raises(UnsupportedModel, match=rf"products of int4.*{reason}.*ONNX Runtime"):
            MemoryPlan.of(load_config(chat_model), weights="int4")
        Runtime.from_pretrained(chat_model, weights="int8")
    finally:
        packed._fault.cache_clear()


def test_the_command_line_runs_them_in_pytorch(kvcap):
    given = ["pocket", "--weights", "int4", "--backend", "torch", "--budget-tokens", "64"]
    assert kvcap.document("plan", *given)["weights_dtype"] == "int4"
    question = ["The code for the blue door is 4821. What is the code for the blue door?"]
    more = ["--temperature", "0", "--max-new-tokens", "24"]
    assert "4821" in kvcap.document("generate", given[0], *question, *given[1:], *more)["text"]
    assert "int4 weights" in kvcap("plan", *given)[1]
    for wrong, why in (
        (["--device", "meta"], "meta"),
        (["--calibrate", "text.txt"], "--calibrate is for exports"),
        (["--policy", "criticalkv"], "without criticalkv"),
    ):
        assert why in kvcap.refused("generate", given[0], "Hello!", *given[1:], *wrong)
