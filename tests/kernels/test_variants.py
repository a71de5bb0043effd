"""What is compiled ahead is what runs: launches of rehearsed conversations and of real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import small_policy, tiny_config, tiny_model
from interpreted import DEVICE, pytestmark, tl  # noqa: F401
from observations import observe
from tools import count_as_gpu, warm_up_of

import kvcap
from kvcap import kernels
from kvcap.kernels import launch, variants
from kvcap.kernels import window as window_kernel
from kvcap.kernels.device import Target
from kvcap.policies import policies
from kvcap.runtime.backends.pytorch import cuda_graphs, practice, warm_up
from kvcap.runtime.backends.pytorch.cuda_graphs import Uncaptured
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.products import Noted
from kvcap.runtime.backends.pytorch.warm_up import Rehearsal
from kvcap.runtime.models.fused.decoder import FAMILIES

BUDGET, BLOCK = 40, 16


def rehearsed(config, eviction, kind=None):
    compiler, given = Noting(), (BUDGET, BLOCK, torch.float32, "compact")
    with kernels.use("triton"):
        Rehearsal(config, eviction, *given, kv_dtype=kind).run(compiler.hear)
    return compiler.found


def launched(model, eviction, lengths, kind=None):
    """Variants of conversations that begin with so many tokens, and of their answers."""
    cache = kvcap.BudgetCache(
        model.config, BUDGET, BLOCK, eviction, positions="compact", kv_dtype=kind
    )
    loop = BlockLoop(model, cache.allocate(1, torch.float32, "cpu"), graphs=False)
    loop.graphs, compiler = Uncaptured(model, cache), Noting(cache.layout.pooled)
    ids = torch.zeros(1, max(lengths), dtype=torch.long)
    with kernels.use("triton"), launch.heard(compiler.hear):
        for length in lengths:
            cache.reset()
            evicts = eviction.policy.evicts
            loop.prefill(ids[:, : length if evicts else min(length, BUDGET - 8)])
            for _ in range(3):
                loop.read(ids[:, :1])
            if evicts:
                loop.prefill(ids[:, :7])
    return compiler.found


class Noting:
    """Has nothing launched, unless numbers decide what is."""

    def __init__(self, launches=False):
        self.found, self.launches = set(), launches

    def hear(self, *call):
        self.found.add(variants.Launch.of(*call).variant)
        return self.launches


def distinct():
    """Policies and presets, one of those that are alike."""
    config, found = tiny_config("llama"), {}
    for name in policies():
        eviction = replace(small_policy(name, config), name="")
        found.setdefault(repr(eviction), name)
    return list(found.values())


@pytest.mark.skipif(DEVICE != "cpu", reason="compares with what would be interpreted")
@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("policy", "kind"),
    [("keydiff", "int8-int4"), *((policy, None) for policy in distinct()), ("h2o", "int4")],
)
def test_what_runs_was_rehearsed(policy, kind, monkeypatch):
    """Prompts that fill the cache or do not, messages of odd lengths, and answers."""
    for module in (warm_up, cuda_graphs):
        monkeypatch.setattr(module, "PASS", 3 * BLOCK)  # shorter than the longest prompts
    model = tiny_model("llama")
    eviction = small_policy(policy, model.config)
    lengths = (101,) if eviction.layers_move else (3, 16, 37, 90, 101)  # some are interpreted
    found = launched(model, eviction, lengths, kind)
    assert found
    assert found <= rehearsed(model.config, eviction, kind)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_the_decoder_is_rehearsed(family):
    """Configs of some name the type of every layer, of which few are made."""
    model = tiny_model(family)
    eviction = small_policy("keydiff", model.config)
    assert launched(model, eviction, (37,)) <= rehearsed(model.config, eviction)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
def test_what_practice_launches_was_rehearsed(policy, monkeypatch):
    for module in (warm_up, cuda_graphs, practice):
        monkeypatch.setattr(module, "PASS", 3 * BLOCK)
    config, compiler = tiny_config("llama"), Noting(launches=True)
    eviction = small_policy(policy, config)
    plan = kvcap.MemoryPlan.of(
        config, policy=eviction, kv_budget_tokens=BUDGET, block_size=BLOCK, dtype=torch.float32
    )
    few = warm_up._with_few_layers(config, eviction)
    with kernels.use("triton"), launch.heard(compiler.hear):
        practice.Practice(few, plan, eviction, torch.device("cpu")).run()
    assert len(compiler.found) > 10
    assert compiler.found <= rehearsed(config, eviction)


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "pyramidkv"])
def test_matrix_products_of_what_runs_were_rehearsed(policy, monkeypatch):
    for module in (warm_up, cuda_graphs):
        monkeypatch.setattr(module, "PASS", 3 * BLOCK)
    model = tiny_model("llama")
    eviction = small_policy(policy, model.config)
    with Noted() as noted:
        launched(model, eviction, (3, 16, 37, 200))
    with Noted() as before:
        rehearsed(model.config, eviction)
    assert {product.rows for product in noted.products} > {1, 8, BLOCK, 3 * BLOCK}
    assert noted.products <= before.products


def test_autocast_does_nothing_without_numbers_and_what_it_did_elsewhere():
    warm_up.autocast_nothing_on_meta()
    with torch.autocast("meta", enabled=False), torch.autocast(device_type="meta"):
        assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16) as found:
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert isinstance(found, torch.autocast)
    assert torch.autocast("cpu", enabled=False)(lambda: torch.is_autocast_enabled("cpu"))() is False
    with pytest.raises(RuntimeError, match="no such device"):
        torch.autocast("no such device")


def test_a_rehearsal_holds_no_weights_and_leaves_none_behind():
    """Of a model that would fill any memory."""
    config = tiny_config("llama", hidden_size=2**14, vocab_size=2**20, num_hidden_layers=100)
    rehearsal = Rehearsal(config, small_policy("keydiff", config), BUDGET, BLOCK,
                          torch.bfloat16, "compact")  # fmt: skip
    heard = Noting()
    with kernels.use("triton"):
        rehearsal.run(heard.hear)
    assert {variant[1] for variant in heard.found} >= {"attend_part", "dot", "evict_one", "write"}
    assert all(type(x) is torch.Tensor for x in kernels.device._clocks.values())
    assert not launch.ahead


@pytest.mark.slow
def test_a_rehearsal_of_auto_positions_hears_both_ways(monkeypatch):
    for module in (warm_up, cuda_graphs):
        monkeypatch.setattr(module, "PASS", 8)
    config, found = tiny_model("llama", max_position_embeddings=4000).config, {}
    for mode in ("auto", "true", "compact"):
        rehearsal, heard = Rehearsal(
            config, small_policy("knorm", config), 8, 4, torch.float32, mode
        ), Noting()  # fmt: skip
        with kernels.use("triton"):
            rehearsal.run(heard.hear)
        found[mode] = heard.found
    assert found["compact"] - found["true"]
    assert found["auto"] >= found["compact"]


class Kernel:
    """One that a function compiles, of an address and three numbers."""

    do_not_specialize = ("plain",)

    def __init__(self, compiles=lambda: None):
        self.compiles, self.done = compiles, 0

    @staticmethod
    def fn(x, size, plain, CONSTANT: tl.constexpr): ...

    def run(self, *_, grid, warmup):
        assert warmup
        self.compiles()
        self.done += 1


def test_variants_are_those_that_triton_tells_apart():
    x, one = torch.zeros(64), Kernel()
    told = lambda x, *n, **o: variants.Launch.of(one, (x, *n), o).variant  # noqa: E731
    base = told(x, 32, 5, 7, num_warps=4)
    assert base == told(x[16:], 48, 6, 7, num_warps=4) == told(x, 32, 1, 7, num_warps=4)
    others = [
        told(x[1:], 32, 5, 7, num_warps=4),  # begins elsewhere
        told(x.half(), 32, 5, 7, num_warps=4),
        told(None, 32, 5, 7, num_warps=4),
        told(x, 33, 5, 7, num_warps=4),
        told(x, 1, 5, 7, num_warps=4),
        told(x, 2**40, 5, 7, num_warps=4),
        told(x, 32, 5, 8, num_warps=4),
        told(x, 32, 5, 7, num_warps=8),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_each_variant_is_compiled_once_and_waited_for():
    go, told = threading.Event(), []
    one, x = Kernel(go.wait), torch.zeros(4)
    compiler = variants.Compiler(torch.device("cpu"), lambda *counts: told.append(counts))
    for size in (16, 32, 1):
        assert compiler.hear(one, (x, size, 2, 3), {}) is False
    assert len(compiler.launches) == 2
    waits = threading.Thread(target=compiler.join, args=(one, (x, 48, 2, 3), {}))
    waits.start()
    compiler.join(one, (x, 48, 2, 4), {})  # nobody compiles that one
    waits.join(0.05)
    assert waits.is_alive()
    go.set()
    waits.join()
    compiler.finish()
    assert one.done == 2
    assert sorted(told) == [(1, 2), (2, 2)]


def test_a_launch_is_not_looked_at_where_all_is_compiled(monkeypatch):
    one, x = Kernel(), torch.zeros(4)
    compiler, looked = variants.Compiler(torch.device("cpu")), []
    compiler.hear(one, (x, 16, 2, 3), {})
    compiler.finish()
    monkeypatch.setattr(variants.Launch, "of", lambda *_: looked.append(1))
    compiler.join(one, (x, 16, 2, 3), {})
    assert not looked


def test_a_launcher_stays_its_own_when_another_of_its_name_is_loaded(monkeypatch):
    from triton.runtime import build

    shared = SimpleNamespace()  # as Python gives back a C module that it loads again

    def load(name, path):
        shared.launch = path
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load, raising=False)
    assert build._load_module_from_path("launcher", "one") is load("launcher", "two")
    assert variants.launchers_apart()
    assert variants.launchers_apart()  # arranged once
    one = build._load_module_from_path("launcher", "one")
    two = build._load_module_from_path("launcher", "two")
    assert (one.launch, two.launch) == ("one", "two")
    monkeypatch.delattr(build, "_load_module_from_path")
    assert not variants.launchers_apart()


def test_what_a_compiler_raises_is_told_and_a_stopped_one_begins_nothing():
    def fail():
        raise RuntimeError("no such instruction")

    compiler = variants.Compiler(torch.device("cpu"))
    compiler.hear(Kernel(fail), (None, 1, 2, 3), {})
    with pytest.raises(RuntimeError, match="no such instruction"):
        compiler.finish()
    compiler.stop()
    with pytest.raises(variants.Stopped):
        compiler.hear(Kernel(), (None, 1, 2, 3), {})


@pytest.fixture
def gpu_of(monkeypatch, tmp_path):
    """Has a CPU count as a GPU; what was compiled."""
    return count_as_gpu(monkeypatch, tmp_path)


def test_a_plan_is_rehearsed_once(gpu_of, monkeypatch):
    """The next process has what was launched from Triton's cache, for the same plan alone."""
    config, multiplied = tiny_config("llama"), []
    monkeypatch.setattr(warm_up, "compute", lambda products, *_: multiplied.append(products))
    count = warm_up_of(config).finish()
    assert count == len(gpu_of) == len(set(gpu_of)) > 15
    first, (rows,) = set(gpu_of), multiplied
    assert {BLOCK // 8, BLOCK} < {product.rows for product in rows}
    gpu_of.clear()
    rehearsals = []
    monkeypatch.setattr(warm_up, "Rehearsal", lambda *_: rehearsals.append(1) or 1 / 0)
    assert warm_up_of(config).finish() == count
    assert set(gpu_of) == first
    assert multiplied == [rows, rows]
    assert not rehearsals
    assert not launch.ahead
    with pytest.raises(ZeroDivisionError):  # what went wrong is told who asks, and no answer
        warm_up_of(config, evict_every=4).finish()
    assert len(rehearsals) == 1
    assert not launch.ahead


@pytest.mark.slow
def test_an_answer_goes_on_where_kernels_cannot_be_compiled_ahead(gpu_of, monkeypatch):
    def fail(_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(variants.Launch, "compile", fail)
    config = tiny_config("llama")
    warmed_up = warm_up_of(config)
    with pytest.raises(RuntimeError, match="no such instruction"):
        warmed_up.finish()
    assert not launch.ahead
    assert variants.saved(warmed_up.key) is None


AHEAD = """
import json, os, sys
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0
    get_active_torch_device = lambda self: torch.device("cpu")

triton.runtime.driver.set_active(Driver())
from kvcap.kernels import variants
from kvcap.kernels.ring_triton import push

args = torch.zeros(2, 4, 8, 16, dtype=torch.int16), torch.zeros(2, 2, 8, dtype=torch.int32)
args += torch.zeros(3 + 2 * 4 * 5 * 16, dtype=torch.int16)[3:].view(2, 4, 5, 16), 5, None
args += 320, 80, 16
options = dict(HEADS=4, GROUP=2, LENGTH=8, LENGTH_PAD=8, SIZE=16, SIZE_PAD=16, num_warps=4)
launch = variants.Launch.of(push, args, options)
again = variants.Launch.read(json.loads(json.dumps(launch.written())))
binder = push.device_caches[0][4]
kinds = [str(binder(*x, **options)[1]) for x in (args, launch.args, again.args)]
assert variants.saved("plan") is None
compiler = variants.Compiler(torch.device("cpu"))
compiler.add(again)
compiler.finish()
variants.save("plan", compiler.launches.values(), [(1, 2)])
(found,), further = variants.saved("plan")
assert further == [[1, 2]]
hits = []
triton.knobs.compilation.listener = lambda **of: hits.append(of["cache_hit"])
push.device_caches.clear()
push.run(*args, grid=(1,), warmup=True, **options)  # as a real launch looks for it
print(json.dumps({"kinds": len(set(kinds)), "same": found.variant == launch.variant,
                  "hits": hits, "other": variants.saved("another") is None}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs triton's compiler")
def test_what_is_compiled_ahead_is_found_by_a_launch(tmp_path):
    """For a GPU that is not there; Triton's own cache has it, and of which launches it has."""
    triton = pytest.importorskip("triton")
    if not hasattr(triton, "knobs"):
        pytest.skip("needs a triton that tells of its cache")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AHEAD], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '{"kinds": 1, "same": true, "hits": [true], "other": true}'


def test_a_rehearsal_shares_out_evenly_what_the_host_decides(monkeypatch):
    """Quantised slots that move between heads or layers are read by no kernel of rows."""
    config = tiny_config("llama")
    for policy in ("adakv", "cake"):
        assert rehearsed(config, small_policy(policy, config), "int8")


def test_a_rehearsal_is_of_a_gpu_where_a_cpu_would_read_otherwise():
    """Quantised slots are read into floats of the model's type; on a CPU into float32."""
    config, compiler = tiny_config("llama"), Noting()
    gpu = Target(multiprocessors=132, shared_memory=232448, overlaps=False)
    eviction = small_policy("pyramidkv", config)
    given = config, eviction, BUDGET, BLOCK, torch.bfloat16, "compact"
    Rehearsal(*given, target=gpu, kv_dtype="int8").run(compiler.hear)
    read = [dict(v[2:]) for v in compiler.found if v[1] == "read_slots"]
    assert {out for each in read for out in [each["out"][0]]} == {"torch.bfloat16"}


@pytest.mark.parametrize("changed", [{"positions": "auto"}, {"store": "host"}])
def test_a_rehearsal_takes_no_numbers(changed):
    """Neither where positions become compact, nor where evicted tokens lie elsewhere."""
    config, heard = tiny_config("llama", max_position_embeddings=4000), Noting()
    eviction = small_policy("calidrop", config)
    if "store" in changed:
        eviction = replace(eviction, corrector=replace(eviction.corrector, **changed))
    positions = changed.get("positions", "compact")
    with kernels.use("triton"):
        Rehearsal(config, eviction, BUDGET, BLOCK, torch.float32, positions).run(heard.hear)
    assert heard.found


def test_windows_of_any_length_share_their_code():
    """However many blocks in time they are; one that is no longer than a block has its own."""
    found = {}
    for window in (20, 70, 100, 200):
        heard = Noting()
        with kernels.use("triton"), launch.heard(heard.hear):
            window_kernel.scores(observe(256, window=window), "attention", "sum")
        found[window] = heard.found
    assert found[70] == found[100] == found[200] != found[20]
