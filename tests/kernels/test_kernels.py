"""Twins against float64: values, kept sets, every element written; on a GPU, else interpreted.

`conftest.py` turns the interpreter on where there is no GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401
from make import in_python
from observations import grouped, pooled
from torch import Tensor

from kvcap import kernels
from kvcap.kernels import window
from kvcap.kernels.device import Target
from kvcap.policies import Observation, Policy
from kvcap.policies.andpro import AnDPro
from kvcap.policies.base import Logits
from kvcap.policies.dropkv import DropKV
from kvcap.policies.h2o import H2O
from kvcap.policies.keydiff import KeyDiff
from kvcap.policies.random import Random
from kvcap.policies.saliencies.obcache import OBCache
from kvcap.policies.snapkv import SnapKV
from kvcap.policies.tova import TOVA

keydiff = importlib.import_module("kvcap.kernels.keydiff")
launch = importlib.import_module("kvcap.kernels.launch")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Shape:
    n: int
    w: int = 8
    G: int = 4
    D: int = 64
    dtype: torch.dtype = BF16
    B: int = 1
    K: int = 2
    softcap: float | None = None


SHAPES = [
    Shape(1, w=1, G=1, dtype=F32),
    Shape(2, w=2, G=8, D=16, dtype=F16, K=1),
    Shape(65, w=8, D=128),
    Shape(300, w=8, G=4, D=80, dtype=F32),
    Shape(130, w=5, G=3, D=96, dtype=F16, B=2),
    Shape(150, w=32, G=8, D=64, K=1),
    Shape(120, w=32, G=1, D=128, dtype=F32, softcap=5.0),
    Shape(128, w=16, G=2, D=80, dtype=F16, softcap=30.0),
    Shape(513, w=1, G=7, D=128, K=1),
    Shape(400, w=3, G=5, D=256, dtype=BF16, K=1),
]
ids = [f"{s.n}x{s.w}x{s.G}x{s.D}-{str(s.dtype)[6:]}" for s in SHAPES]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=ids)


def observe(s: Shape, seed: int | None = None) -> Observation:
    """Random tensors that are views of larger ones: what lies around them is NaN."""
    if seed is not None:
        torch.manual_seed(seed)
    H, seen = s.K * s.G, s.n + 40

    def pool(*shape: int) -> Tensor:
        whole = torch.full((s.B, s.K, s.n + 19, s.D + 8), float("nan"))
        whole[:, :, 3 : 3 + s.n, : s.D] = torch.randn(s.B, s.K, s.n, s.D)
        return whole.to(DEVICE, s.dtype)[:, :, 3 : 3 + s.n, : s.D]

    # The newest tokens are held, so that some queries do not see some slots.
    newest = min(s.w, s.n - 1)
    positions = torch.full((s.B, s.K, s.n + 5), -7, dtype=torch.int32)
    for row in positions.view(-1, s.n + 5):
        old = torch.randperm(seen - s.w)[: s.n - newest]
        held = torch.cat([old, torch.arange(seen - newest, seen)])
        row[: s.n] = held[torch.randperm(s.n)]
    queries = (2 * torch.randn(s.B, s.w, H, s.D)).to(DEVICE, s.dtype).transpose(1, 2)
    return Observation(
        keys=pool(),
        values=pool(),
        positions=positions.to(DEVICE)[:, :, : s.n],
        num_tokens=seen,
        budget=max(1, s.n // 2),
        queries=queries,
        rule=Logits(s.D**-0.5, s.softcap),
        state={"accumulated": torch.rand(s.B, s.K, s.n, device=DEVICE)},
    )


def exact(policy: Policy, obs: Observation, magnitude: bool = False) -> Tensor:
    """The formulas of the papers in float64. [B, K, n].

    With `magnitude`, every difference is a sum: the numbers whose rounding makes the error.
    """
    k, v = obs.keys.double(), obs.values.double()
    if isinstance(policy, KeyDiff):
        unit = k / k.norm(dim=-1, keepdim=True)
        mean = (unit if policy.anchor == "unit_mean" else k).mean(2, keepdim=True)
        return -(unit * mean / mean.norm(dim=-1, keepdim=True)).sum(-1)
    q = obs.queries.double().unflatten(1, (k.shape[1], -1))  # [B, K, G, w, D]
    z = obs.rule.scale * q @ k[:, :, None].mT
    z = z if obs.rule.softcap is None else obs.rule.softcap * (z / obs.rule.softcap).tanh()
    times = obs.num_tokens - q.shape[3] + torch.arange(q.shape[3], device=k.device)
    hidden = obs.positions[:, :, None, None] > times[:, None]
    p = z.masked_fill(hidden, -torch.inf)
    if obs.rule.sinks is not None:
        column = obs.rule.sinks.double().view(1, -1, q.shape[2], 1, 1).expand(*p.shape[:-1], 1)
        p = torch.cat((p, column), -1)
    p = p.softmax(-1)[..., : k.shape[2]]
    z = z.masked_fill(hidden, 0)
    a, square = p @ v[:, :, None], v.square().sum(-1)[:, :, None, None]
    if obs.attended is not None:
        a = obs.attended.double().view_as(a)
    along = a @ v[:, :, None].mT
    if magnitude:
        along, z = -(a.norm(dim=-1, keepdim=True) * square.sqrt()), z.abs()
    distance = a.square().sum(-1, keepdim=True) + square - 2 * along
    weight = {
        None: p,
        "value": p**2 * square,
        "key": (p * z) ** 2 * distance,
        "joint": 2 * p**2 * z * (square - along) + p**2 * square + (p * z) ** 2 * distance,
    }[getattr(obs.saliency, "mode", None)]
    if isinstance(policy, DropKV):
        p = p.bfloat16().double() if policy.bf16_ratio else p
        weight = (p / (1 - p + policy.epsilon)) ** 2 * distance
    if isinstance(policy, AnDPro):
        weight = p * (along.abs() if magnitude else along)
    if isinstance(policy, TOVA):
        weight = weight[..., -1:, :]
    cost = weight.sum(3)  # [B, K, G, n]
    if isinstance(policy, SnapKV):
        cost = pooled(cost, obs, policy.window, policy.kernel, policy.pool)
    scores = grouped(cost, policy.group)
    if isinstance(policy, DropKV):
        scores = pooled(scores, obs, policy.window, policy.kernel, policy.pool)
    return scores + obs.state["accumulated"].double() if isinstance(policy, H2O) else scores


def twin(policy: Policy, obs: Observation) -> Tensor:
    with kernels.use("triton"):
        if isinstance(policy, H2O):
            return kernels.update(policy, obs)["accumulated"]
        return kernels.score(policy, obs)


def eager(policy: Policy, obs: Observation) -> Tensor:
    obs = replace(obs)  # nothing computed before
    return policy.update(obs)["accumulated"] if isinstance(policy, H2O) else policy.score(obs)


def excess(
    policy: Policy, obs: Observation, scores: Tensor, epsilon: float | None = None
) -> tuple[Tensor, Tensor]:
    """The error in units of what is allowed, and that. [B, K, n] each.

    Allowed is twice the largest error of eager, which computes in float32 whatever the inputs; and
    `epsilon` of the numbers that are subtracted from one another. 2**-18 is what 16-bit inputs are
    multiplied to by matrix units; the rounding of the inputs is 512 times as much. OBCache's joint
    mode has the output in two numbers of 16 bits, and a quarter of that exactness.
    """
    true = exact(policy, obs)
    if epsilon is None:
        epsilon = 2**-20 if obs.keys.dtype == torch.float32 else 2**-18
        if obs.saliency == OBCache("joint"):
            epsilon *= 4
    allowed = 2 * (eager(policy, obs).double() - true).abs().max()
    allowed = allowed + epsilon * exact(policy, obs, magnitude=True).abs()
    return (scores.double() - true).abs() / allowed, allowed


def check(policy: Policy, obs: Observation, epsilon: float | None = None) -> None:
    """Values, type and the kept set up to ties."""
    scores = twin(policy, obs)
    assert scores.dtype == torch.float32
    assert scores.shape == obs.positions.shape
    share, allowed = excess(policy, obs, scores, epsilon)
    assert share.max() <= 1
    true = exact(policy, obs)
    kept = torch.zeros_like(true, dtype=torch.bool)
    kept.scatter_(-1, scores.topk(obs.budget).indices, True)
    least = (true + allowed).masked_fill(~kept, torch.inf).amin(-1)
    most = (true - allowed).masked_fill(kept, -torch.inf).amax(-1)
    assert (least >= most).all()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that is asked for holds NaN until it is written."""

    def nan(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, float("nan"), device=device, dtype=dtype)

    monkeypatch.setattr(launch, "empty", nan)
    monkeypatch.setattr(keydiff, "empty", nan)


def sunk(obs: Observation) -> Observation:
    """Give each query head a sink logit, far apart; and state as H2O has it."""
    sinks = torch.linspace(-2, 4, obs.queries.shape[1], device=DEVICE)
    return replace(
        obs,
        rule=obs.rule._replace(sinks=sinks),
        state={"accumulated": torch.zeros(obs.positions.shape, device=DEVICE)},
    )


def weighed(mode: str) -> Callable[[Observation], Observation]:
    return lambda obs: replace(obs, saliency=OBCache(mode))


MANY = [
    Shape(330, w=172, G=3, D=32, K=1), Shape(260, w=140, G=4, D=16, dtype=F32, softcap=5.0),
    Shape(140, w=86, G=7, D=32, dtype=F16, K=1, B=2),
]  # fmt: skip
"""Holds shapes of many queries, whose heads are computed side by side."""
LONG = Shape(150, D=128)
SINKS = [DropKV(kernel=1), AnDPro(), SnapKV(kernel=1), TOVA(group="max"), H2O()]
HALVES, SUMS = [H2O(), H2O(group="max")], [SnapKV(kernel=1, group="sum"), TOVA(group="max")]
ROWS: list[tuple[str, list[Policy], list[Shape], list[Callable[[Observation], Observation]]]] = [
    ("dropkv", [DropKV(kernel=1), DropKV(kernel=1, group="max")], SHAPES[2:], []),
    ("sums of attention", SUMS, SHAPES, []),
    ("sinks", SINKS, SHAPES[1:8:2], [sunk]),
    ("sinks", SINKS[:2], SHAPES[2:8:2], [sunk]),
    ("sinks", SINKS[2:], SHAPES[2:8:2], [sunk]),
    ("sinks, joint", [SnapKV(kernel=1)], SHAPES[1:8], [sunk, weighed("joint")]),
    ("keydiff", [KeyDiff(), KeyDiff(anchor="unit_mean")], SHAPES, []),
    ("value", [SnapKV(kernel=1)], SHAPES[2:5], [weighed("value")]),
    ("key", [SnapKV(kernel=1)], SHAPES[2:5], [weighed("key")]),
    ("joint", [SnapKV(kernel=1), TOVA()], SHAPES[2:5], [weighed("joint")]),
    ("andpro", [AnDPro(group=group) for group in ("mean", "sum", "max")], SHAPES[3:5], []),
    ("pooled", [DropKV(), DropKV(pool="avg", kernel=5, group="sum")], [Shape(90)], []),
    ("pooled", [SnapKV(), SnapKV(pool="avg")], [Shape(90)], []),
    ("pooled", [SnapKV(pool="avg", group="max")], [Shape(90)], []),
    ("state", [H2O()], [Shape(100, w=70, G=4)], []),
    ("state, joint", [H2O()], [Shape(100, w=70, G=4)], [weighed("joint")]),
    ("many queries", HALVES, MANY, [sunk]),
    ("many queries, joint", HALVES, MANY, [sunk, weighed("joint")]),
    ("many queries, value", HALVES, MANY, [sunk, weighed("value")]),
    ("int64", [DropKV()], [LONG, replace(LONG, n=151), replace(LONG, n=152)], [
        lambda obs: replace(obs, positions=obs.positions.long()),
    ]),
    ("whole numbers", [SnapKV(kernel=1)], [Shape(64, D=16, softcap=5.0)], [
        lambda obs: replace(obs, rule=Logits(1, 5)),
    ]),
]  # fmt: skip
"""Holds policies whose twins are compared, on which shapes, and what is changed of observations."""


@pytest.mark.slow(keep=28)
@pytest.mark.parametrize(("twins", "shape", "changes"), [
    pytest.param(twins, shape, changes, id=f"{name} {shape.n}x{shape.w}x{shape.G}x{shape.D}")
    for name, twins, shapes, changes in ROWS for shape in shapes
])  # fmt: skip
def test_a_twin_scores_as_its_formula(twins, shape, changes):
    obs = observe(shape)
    for change in changes:
        obs = change(obs)
    for policy in twins:
        check(policy, obs)


def test_many_queries_are_many():
    assert all(window.power_of_two(s.G) * s.w > window.MANY_ROWS for s in MANY)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=ids[:2])
def test_dropkv_of_next_to_no_slots_is_finite(shape):
    """There p = 1 and v = a: the score is rounding over epsilon squared, so any number will do."""
    assert twin(DropKV(kernel=1), observe(shape)).isfinite().all()


@pytest.mark.slow(keep=1)
@each_shape
def test_keydiff_with_sums_made_elsewhere(shape):
    obs = observe(shape)
    parts = obs.keys.float().split(5, dim=2)
    sums = torch.stack([part.sum(2) for part in parts], dim=2)  # [B, K, P, D]
    known = keydiff.scores(obs.keys, key_sums=sums)
    torch.testing.assert_close(known, twin(KeyDiff(), obs), rtol=0, atol=2e-6)
    wrong = keydiff.scores(obs.keys, key_sums=-sums)  # they are what is read
    torch.testing.assert_close(wrong, -known, rtol=0, atol=2e-6)


def test_dropkv_with_rounded_attention():
    # A p next to a rounding boundary may fall on either side of it, in eager as in the twin.
    obs = observe(Shape(200))
    obs.queries *= 0.25  # 1 - p would make much of that where p is near 1
    # The interpreter does not round: it cuts off.
    check(DropKV(kernel=1, bf16_ratio=True), obs, epsilon=2**-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_token_that_queries_see_all_but_alone(dtype):
    """Attention's output is nearly its value, and what is between them is divided by 1 - p."""
    obs = observe(Shape(70, dtype=dtype), seed=0)
    obs, policy = replace(obs, queries=6 * obs.queries), DropKV(kernel=1)
    assert obs.attention.max() > 0.9999
    expected = exact(policy, obs)
    for scores in (policy.score(obs), twin(policy, obs)):
        torch.testing.assert_close(scores.double(), expected, rtol=4e-2, atol=1e-6)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("shape", [SHAPES[5], SHAPES[9], MANY[0]], ids=lambda s: f"{s.w} queries")
@pytest.mark.parametrize("policy", [DropKV(kernel=1), H2O(), H2O(group="max"), SnapKV(kernel=1)])
def test_a_gpu_of_less_shared_memory_has_fewer_queries_at_once(policy, shape, monkeypatch):
    monkeypatch.setattr(window, "target", lambda _: Target(82, 101376, False))
    obs = observe(shape)
    check(policy, obs)
    given = 2, shape.G, shape.w, shape.n, 256, 4
    sizes = [
        window.tiling(*given, "attention", "mean", 82, Target(82, room, False))
        for room in (232448, 101376)
    ]
    large, small = (t.GP * t.score.WB * t.score.N for t in sizes)
    assert small <= large


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5], *MANY], ids=lambda s: f"{s.w} queries")
@pytest.mark.parametrize("group", ["sum", "max"])
@pytest.mark.parametrize("mode", ["key", "joint"])
def test_what_attention_gave_is_scored_as_it_gave_it(mode, group, shape):
    """Return them as [B, w, H, D], of the values' type."""
    obs = replace(sunk(observe(shape)), saliency=OBCache(mode))
    policy, heads = H2O(group=group), (shape.B, shape.K * shape.G, shape.w, shape.D)
    output = obs.output.reshape(heads).transpose(1, 2).to(shape.dtype).contiguous()
    attended = replace(obs, attended=output.transpose(1, 2))
    assert torch.equal(attended.output, output.transpose(1, 2).float().view_as(obs.output))
    check(policy, attended)
    check(TOVA(group=group), attended)
    wrong = replace(obs, attended=attended.attended + 1)
    assert excess(policy, attended, twin(policy, wrong))[0].max() > 10


def on_the_device(obs: Observation) -> Observation:
    """The same told by a clock, as inside a CUDA graph; it need not start a piece of memory."""
    return replace(obs, num_tokens=torch.tensor([-5, obs.num_tokens], device=DEVICE)[1])


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "mode", "dtype"), [
    (DropKV(), None, torch.int32),
    (SnapKV(kernel=1), None, torch.int64),
    (TOVA(), None, torch.int32),
    (SnapKV(kernel=1), "key", torch.int32),
    (H2O(), "joint", torch.int32),
])  # fmt: skip
def test_a_clock_on_the_device_tells_the_time_as_an_int_does(policy, mode, dtype, monkeypatch):
    obs = observe(Shape(50, w=20, G=8, D=16, K=1))  # several blocks of queries
    saliency = None if mode is None else OBCache(mode)
    obs = replace(obs, positions=obs.positions.to(dtype), saliency=saliency)
    clocked = on_the_device(obs)
    keys, readers, launched = [], set(), launch.launch

    def watched(kernel, grid, key, args, **options):
        keys.append((kernel, key))
        readers.update({kernel} if any(x is clocked.num_tokens for x in args) else ())
        launched(kernel, grid, key, args, **options)

    monkeypatch.setattr(launch, "launch", watched)
    by_int = twin(policy, obs)
    assert not readers
    assert torch.equal(twin(policy, clocked), by_int)
    # What a graph replays must read it, not what it once said; pooling leaves the newest out.
    assert len(readers) == (3 if isinstance(policy, DropKV) else 2)
    assert keys[: len(keys) // 2] == keys[len(keys) // 2 :]  # the same machine code
    check(policy, clocked)
    earlier = replace(obs, num_tokens=torch.tensor(obs.num_tokens - 15, device=DEVICE))
    assert not torch.equal(twin(policy, earlier), by_int)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no CUDA graphs")
@pytest.mark.parametrize("policy", [DropKV(), SnapKV()])
def test_the_clock_can_change_between_replays_of_a_graph(policy, monkeypatch):
    monkeypatch.undo()  # a graph's memory is its own
    obs = observe(Shape(90, w=8))
    clock = torch.tensor(obs.num_tokens, device=DEVICE)
    clocked = replace(obs, num_tokens=clock)
    twin(policy, obs)  # compiles, by an int
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = twin(policy, clocked)
    for now in (obs.num_tokens, obs.num_tokens - 3, obs.num_tokens + 1000):
        clock.fill_(now)
        graph.replay()
        assert torch.equal(scores, twin(policy, replace(obs, num_tokens=now)))


@pytest.mark.slow
def test_heads_observed_one_by_one_equal_the_layer():
    obs = observe(Shape(140, K=3))
    whole = twin(DropKV(), obs)
    for head in range(3):
        mine = slice(head, head + 1)
        alone = replace(
            obs,
            keys=obs.keys[:, mine],
            values=obs.values[:, mine],
            first_head=head,
            positions=obs.positions[:, mine],
            queries=obs.queries[:, 4 * head : 4 * head + 4],
        )
        check(DropKV(), alone)
        torch.testing.assert_close(twin(DropKV(), alone), whole[:, mine], rtol=1e-4, atol=1e-6)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", [DropKV(), SnapKV(), KeyDiff()])
def test_two_runs_are_equal_to_the_bit(policy):
    obs = observe(Shape(300, D=128))
    assert torch.equal(twin(policy, obs), twin(policy, obs))


def test_new_lengths_and_strides_run_through_remembered_kernels():
    for n in (64, 65, 64, 130, 65):
        check(DropKV(kernel=1), observe(Shape(n, D=128)))
        check(KeyDiff(), observe(Shape(n, D=128)))


def unaware(*_: object, **__: object) -> Tensor:
    raise AssertionError("a twin ran")


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize(("policy", "change"), [
    (TOVA(across="layer"), {}),
    (KeyDiff(anchor="median"), {}),
    (KeyDiff(metric="dot"), {}),
    (Random(), {}),
    (SnapKV(), {"keys": strided}),
    (SnapKV(), {"positions": strided}),
    (DropKV(), {"values": lambda x: x.float()}),
    (KeyDiff(), {"keys": lambda x: x.double()}),
    (KeyDiff(), {"keys": lambda x: x.repeat(1, 1, 1, 8)}),
])  # fmt: skip
def test_what_no_twin_covers_is_scored_eagerly(policy, change, monkeypatch):
    obs = observe(Shape(40))
    obs = replace(obs, **{name: f(getattr(obs, name)) for name, f in change.items()})
    monkeypatch.setattr(window, "scores", unaware)
    monkeypatch.setattr(keydiff, "scores", unaware)
    assert torch.equal(twin(policy, obs), policy.score(replace(obs)))


def test_the_choice(monkeypatch):
    obs = observe(Shape(40))
    monkeypatch.setattr(keydiff, "scores", unaware)
    with kernels.use("eager"):
        kernels.score(KeyDiff(), obs)
    monkeypatch.setenv("KVCAP_KERNELS", "eager")
    kernels.score(KeyDiff(), obs)
    monkeypatch.setenv("KVCAP_KERNELS", "triton")
    with pytest.raises(AssertionError, match="a twin ran"):
        kernels.score(KeyDiff(), obs)
    monkeypatch.setenv("KVCAP_KERNELS", "cuda")
    with pytest.raises(ValueError, match="auto, eager, triton"):
        kernels.score(KeyDiff(), obs)
    cpu = replace(obs, keys=obs.keys.cpu())
    with kernels.use("auto"):
        kernels.score(KeyDiff(), cpu)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with kernels.use("triton"), pytest.raises(RuntimeError, match="use auto"):
        kernels.score(KeyDiff(), cpu)


def test_importing_loads_no_kernel_and_scoring_needs_no_triton():
    code = (
        "import sys, torch, kvcap.kernels\n"
        "from kvcap.policies import Observation\n"
        "from kvcap.policies.keydiff import KeyDiff\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'triton' not in sys.modules\n"
        "sys.modules['triton'] = None\n"
        "x = torch.randn(1, 1, 5, 16)\n"
        "obs = Observation(x, x, torch.arange(5)[None, None], num_tokens=5, budget=3)\n"
        "assert torch.equal(kvcap.kernels.score(KeyDiff(), obs), KeyDiff().score(obs))\n"
    )
    done = in_python(code)
    assert done.returncode == 0, done.stderr
