"""What a model's cache is called among its arguments: transformers' name, or its own code's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from conftest import CACHE, FAMILIES, tiny_model

import kvcap
from kvcap.runtime.models.arguments import CACHE_NAMES, cache_argument, cache_of


class Older:
    def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...


class Newer:
    def forward(self, input_ids: Any, cache: Any = None) -> None: ...


class Around:
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


class Callable:
    def __call__(self, past_key_values: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "name"),
    [(Older(), "past_key_values"), (Newer(), "cache"), (Around(), CACHE),
     (Callable(), "past_key_values")],
)  # fmt: skip
def test_a_model_is_given_its_cache_by_the_name_that_it_knows(model, name):
    assert cache_argument(model, 7) == {name: 7}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_names_it_as_this_transformers_does(family):
    model = tiny_model(family)
    assert list(cache_argument(model, None)) == [CACHE]
    assert CACHE in inspect.signature(model.get_decoder().forward).parameters


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_found_by_either_name(name):
    others = dict.fromkeys(CACHE_NAMES)
    assert cache_of(others | {name: 7}) == 7
    assert cache_of(others) is None


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["past_key_values", CACHE])
def test_a_capped_model_takes_it_by_either_name(name, tokens):
    model, ids = tiny_model("llama"), tokens(40)
    with kvcap.cap(model, 24, 8) as capped:
        expected = model(ids).logits
        cache = kvcap.BudgetCache(model.config, 24, 8)
        assert (model(ids, **{name: cache}).logits == expected).all()
        assert capped.cache is cache
    assert cache.seen == 40
