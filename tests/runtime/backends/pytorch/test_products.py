"""Sizes of matrix products: noted as they are computed, and computed ahead."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from torch.nn import functional

from kvcap.runtime.backends.pytorch import products
from kvcap.runtime.backends.pytorch.products import Noted, Product, compute

CPU = torch.device("cpu")
SIZES = [Product(3, 5, 7, False), Product(1, 5, 2, True), Product(4, 2, 64, False)]


def test_products_of_a_model_are_noted_and_its_logits_are_the_same():
    model, ids = tiny_model("qwen2"), torch.arange(6)[None]  # with biases
    plain, config = model(ids).logits, model.config
    with Noted() as noted:
        assert torch.equal(model(ids).logits, plain)
        functional.linear(weight=torch.ones(7, 5), input=torch.ones(2, 3, 5), bias=torch.ones(7))
    width, inner = config.hidden_size, config.intermediate_size
    head = Product(6, width, config.vocab_size, False)
    assert {Product(6, width, width, True), Product(6, inner, width, False), head} < noted.products
    assert Product(6, 5, 7, True) in noted.products


def test_each_is_computed_once(monkeypatch):
    again = Noted()
    with again:
        compute(SIZES, torch.bfloat16, CPU)
    assert again.products == set(SIZES)
    monkeypatch.setattr(products, "MOST", 64)
    with Noted() as fewer:
        compute(SIZES, torch.bfloat16, CPU)
        compute([], torch.bfloat16, CPU)
    assert fewer.products == set(SIZES[:2])


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("empty", torch.OutOfMemoryError),
        ("linear", torch.OutOfMemoryError),
        ("linear", RuntimeError),
    ],
)
def test_an_answer_goes_on_where_they_cannot_be_computed(place, error, monkeypatch):
    def refuse(*_, **__):
        raise error("no memory, or no such kernel")

    monkeypatch.setattr({"empty": torch, "linear": functional}[place], place, refuse)
    compute(SIZES, torch.float32, CPU)
