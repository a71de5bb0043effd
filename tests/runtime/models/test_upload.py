"""Moving a model to a GPU by way of pinned memory."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import tiny_model
from torch import nn

from kvcap.runtime.models import upload
from kvcap.runtime.models.fused import linear
from kvcap.runtime.models.fused.decoder import decoder_of

GPU = torch.device("cuda")


class Event:
    """One of CUDA; notes what becomes of it."""

    log: list[str]

    def __init__(self):
        self.recorded = False

    def record(self):
        self.recorded = True
        self.log.append("record")

    def synchronize(self):
        self.log.append("wait" if self.recorded else "free")


@pytest.fixture
def buffers(monkeypatch):
    """Small buffers that are not pinned, as there may be no GPU."""
    monkeypatch.setattr(Event, "log", [], raising=False)
    monkeypatch.setattr(upload, "CHUNK", 48)
    monkeypatch.setattr(upload, "_pinned", lambda: torch.zeros(48, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (24,), (5, 7), (3, 4, 11)])
def test_tensors_are_copied_through_buffers(shape, dtype, buffers):
    uploader = upload.Uploader()
    for seed in range(3):
        values = torch.randint(100, shape, generator=torch.Generator().manual_seed(seed))
        source = values.to(dtype)
        target = torch.empty_like(source)
        uploader.copy(target, source)
        assert torch.equal(target, source)


def test_a_buffer_is_filled_again_once_it_was_read(buffers):
    source = torch.arange(5 * 48, dtype=torch.uint8)
    upload.Uploader().copy(torch.empty_like(source), source)
    assert Event.log == ["free", "record"] * 2 + ["wait", "record"] * 3


def test_elsewhere_than_on_a_gpu_nothing_is_moved_by_hand(monkeypatch):
    monkeypatch.setattr(upload, "Uploader", lambda: pytest.fail("no memory is to be pinned"))
    model = tiny_model("llama")
    places = [x.data_ptr() for x in model.parameters()]
    assert upload.moved(model, torch.device("cpu")) is model
    assert [x.data_ptr() for x in model.parameters()] == places


def test_a_model_is_moved_as_a_whole_where_nothing_can_be_pinned(monkeypatch):
    def refuse():
        raise RuntimeError("no memory can be pinned")

    model, asked = tiny_model("llama"), []
    monkeypatch.setattr(upload, "_pinned", refuse)
    monkeypatch.setattr(model, "to", lambda device: (asked.append(device), model)[1])
    assert upload.moved(model, GPU) is model
    assert asked == [GPU]


def test_what_is_copied_by_hand_is_plain(monkeypatch):
    class Packed(nn.Parameter):
        """A library's own, which `to` packs."""

    monkeypatch.setattr(upload, "LEAST", 64)
    assert upload._is_plain(nn.Parameter(torch.zeros(16)))
    assert upload._is_plain(torch.zeros(4, 4))
    for x in (torch.zeros(15), torch.zeros(8, 4)[:, ::2], Packed(torch.zeros(16)),
              torch.zeros(16, device="meta")):  # fmt: skip
        assert not upload._is_plain(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3"])
def test_a_model_on_a_gpu_is_what_it_was(family, monkeypatch):
    monkeypatch.setattr(upload, "LEAST", 64)
    model = tiny_model(family)
    expected = copy.deepcopy(model).cuda()
    found = upload.moved(model, GPU)
    assert [name for name, _ in found.named_parameters()] == [
        name for name, _ in expected.named_parameters()
    ]
    for (name, mine), its in zip(
        found.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert mine.device.type == "cuda"
        assert torch.equal(mine, its), name
    ids = torch.tensor([[5, 7, 9]], device=GPU)
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits)
    monkeypatch.setattr(linear, "_side_by_side", lambda *_: pytest.fail("moved again"))
    decoder_of(found)
