"""The short conversation that has a GPU load its kernels."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from conftest import small_policy, tiny_config
from interpreted import DEVICE
from tools import count_as_gpu, warm_up_of

import kvcap
from kvcap.kernels import elementwise, launch, variants
from kvcap.runtime.backends.pytorch import cuda_graphs, practice, warm_up
from kvcap.runtime.backends.pytorch.loop import BlockLoop

BUDGET, BLOCK = 40, 16


@pytest.fixture(autouse=True)
def short_passes(monkeypatch):
    for module in (practice, warm_up, cuda_graphs):
        monkeypatch.setattr(module, "PASS", 3 * BLOCK)


def practice_of(config, policy="keydiff", budget=BUDGET, **options):
    eviction = small_policy(policy, config)
    plan = kvcap.MemoryPlan.of(
        config, policy=eviction, kv_budget_tokens=budget, block_size=BLOCK, dtype=torch.float32
    )
    few = warm_up._with_few_layers(config, eviction)
    return practice.Practice(few, plan, eviction, torch.device("cpu"), **options)


@pytest.fixture
def passes(monkeypatch):
    """What loops read: tokens, slots held before, and whether only free slots are filled."""
    found, read = [], BlockLoop._read

    def noted(self, ids, wanted):
        cache = self.cache
        found.append((ids.shape[1], cache.held, cuda_graphs.fills(cache, ids.shape[1])))
        return read(self, ids, wanted)

    monkeypatch.setattr(BlockLoop, "_read", noted)
    return found


def test_it_reads_what_a_first_answer_reads(passes):
    """Blocks that fill, several blocks of a full cache in one pass, what is left, and tokens."""
    practice_of(tiny_config("llama")).run()
    assert passes[0] == (BLOCK, 0, True)
    assert {(BLOCK, BLOCK, True), (3 * BLOCK, BUDGET, False), (1, BUDGET, False)} <= set(passes)
    assert any(1 < tokens < BLOCK and held == BUDGET for tokens, held, _ in passes)
    assert len(passes) < 10


def test_a_cache_of_very_many_blocks_is_not_filled(passes):
    practice_of(tiny_config("llama"), budget=16 * 3 * BLOCK + 8).run()
    assert len(passes) < 10
    assert all(fills for _, _, fills in passes)


def test_where_nothing_is_evicted_it_reads_what_fits(passes):
    practice_of(tiny_config("llama"), "full").run()
    assert passes
    assert all(fills for _, _, fills in passes)


def test_it_changes_no_random_numbers_and_keeps_no_memory(monkeypatch):
    made, begin = [], BlockLoop.__init__

    def noted(self, model, cache, **options):
        made.extend([weakref.ref(model), weakref.ref(cache)])
        begin(self, model, cache, **options)

    monkeypatch.setattr(BlockLoop, "__init__", noted)
    before, one = torch.get_rng_state(), practice_of(tiny_config("qwen3"))
    assert {x.device.type for x in one.model.parameters()} == {"meta"}
    one.run()
    assert torch.equal(torch.get_rng_state(), before)
    del one
    gc.collect()
    assert len(made) == 2
    assert [x() for x in made] == [None, None]


def test_its_vocabulary_is_small_and_launches_the_same():
    config = tiny_config("llama", vocab_size=130)
    config.pad_token_id = 120
    small = practice_of(config)
    assert small.model.config.vocab_size == 64 + 130 % 16
    assert (small.vocabulary, config.vocab_size, config.pad_token_id) == (130, 130, 120)


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """What practised, on a CPU that counts as a GPU."""
    found = []
    count_as_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(practice.Practice, "run", lambda self: found.append(self))
    return found


def test_every_process_practises(runs):
    """Also one that finds all kernels compiled, but not where memory is planned to the byte."""
    config = tiny_config("llama")
    for _ in range(2):
        warm_up_of(config).finish()
    assert [run.model.config.num_hidden_layers for run in runs] == [1, 1]
    runs.clear()
    warm_up_of(config, several=False).finish()
    warm_up_of(config, practises=False).finish()
    assert not runs


def test_one_layer_must_stand_for_all(runs):
    config = tiny_config("llama")
    warm_up_of(config, "pyramidkv").finish()
    warm_up_of(tiny_config("gemma2")).finish()
    assert not runs
    warm_up_of(config, "cake").finish()
    assert [run.model.config.num_hidden_layers for run in runs] == [2]


def test_answers_go_on_where_there_is_no_memory_to_practise(monkeypatch):
    one = practice_of(tiny_config("llama"))

    def refuse(**_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(one.model, "to_empty", refuse)
    one.run()


def test_kernels_that_only_practice_launches_are_kept_for_the_next_process(monkeypatch, tmp_path):
    x = torch.ones(1, 2, 8, device=DEVICE)
    monkeypatch.setattr(warm_up.Rehearsal, "run", lambda *_: None)
    monkeypatch.setattr(practice.Practice, "run", lambda _: elementwise.gate(x, x))
    count_as_gpu(monkeypatch, tmp_path)
    one = warm_up_of(tiny_config("llama"))
    assert one.finish() == 1
    found = variants.saved(one.key)
    assert [launch.kernel.fn.__name__ for launch in found.launches] == ["gate"]


def test_what_was_rehearsed_is_kept_where_practice_fails(monkeypatch, tmp_path):
    """It is told who asks, and keeps no answer from anything."""

    def fail(_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(practice.Practice, "run", fail)
    count_as_gpu(monkeypatch, tmp_path)
    one = warm_up_of(tiny_config("llama"))
    with pytest.raises(RuntimeError, match="no such kernel"):
        one.finish()
    assert len(variants.saved(one.key).launches) > 10
    assert not launch.ahead
