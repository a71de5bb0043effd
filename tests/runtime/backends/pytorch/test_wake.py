"""What is begun in the background before anything is known of a model."""

from __future__ import annotations

import functools
import time
from threading import Thread

import pytest
import torch

import kvcap
from kvcap.kernels import variants
from kvcap.runtime.backends.pytorch import runtime, wake


def test_elsewhere_than_on_a_gpu_nothing_begins():
    for device in ("cpu", torch.device("cpu"), "mps"):
        assert wake.wake(device) == []


@pytest.mark.parametrize("multiplies", [True, False])
def test_it_goes_on_in_the_background_whatever_fails(multiplies, monkeypatch):
    begun = []

    def begin(*given):
        begun.append(given)
        raise RuntimeError("there is no such device")

    monkeypatch.setattr(wake, "_begin", begin)
    monkeypatch.setattr(wake, "know_triton", lambda: begun.append("triton"))
    for thread in wake.wake("cuda:1", multiplies):
        thread.join()
    assert sorted(map(str, begun)) == [f"(device(type='cuda', index=1), {multiplies})", "triton"]


@pytest.mark.parametrize("cap", [None, "3GiB"])
def test_a_runtime_begins_it_and_takes_no_memory_under_a_cap(cap, monkeypatch):
    asked = []
    monkeypatch.setattr(runtime, "wake", lambda *given, **further: asked.append((given, further)))
    kvcap.Runtime.from_pretrained("pocket", kv_budget_tokens=64, device="cpu", memory_cap=cap)
    assert asked == [(("cpu",), {"multiplies": cap is None})]


def test_triton_reads_its_library_once_though_many_ask(monkeypatch):
    cache = pytest.importorskip("triton.runtime.cache")
    read = []

    @functools.lru_cache
    def key():
        time.sleep(0.05)
        read.append("all of it")

    monkeypatch.setattr(cache, "triton_key", key)
    threads = [Thread(target=variants.know_triton) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == ["all of it"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_works():
    wake._begin(torch.device("cuda"), multiplies=True)
