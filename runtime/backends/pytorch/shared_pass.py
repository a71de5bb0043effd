"""Reads a token of each of several sessions in one pass, over caches of their own.

Matrix products, norms and feed-forward parts take the tokens of all sessions as rows, so that
weights are read once and an operator is called once; only attention runs for one session after
the other, over what its own cache holds, and evicts there. So sessions may hold unequally many
tokens, at positions of their own. Knows caches and sessions; no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from kvcap.kernels.choice import ready
from kvcap.policies.base import Logits
from kvcap.runtime.attention.masks import Slots
from kvcap.runtime.backends.pytorch.loop import BlockLoop, out_of_memory
from kvcap.runtime.backends.pytorch.sampler import draw_each
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.layer import AttendedLayer, BudgetLayer, refuse_moving
from kvcap.runtime.cache.positions import RotatedKeys
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.packed import pack
from kvcap.runtime.planning.dry_run import Tally, pretend_full, pretend_uneven
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.session.batch import Answer


class SharedPass:
    """Reads a token of each of several sessions in one pass: the `TokenReader` of a CPU.

    A session's tokens stay in its own cache. While it answers, it uses memory of this object for a
    copy of its keys that is rotated to their present positions, where its slots have no such keys.

    Args:
        model: of the sessions.
        cache: one such as theirs.
        size: sessions that answer at once, at most.
    """

    def __init__(self, model: Any, cache: BudgetCache, size: int) -> None:
        self.model = model
        shapes = rotated_key_shapes(cache, model.dtype)
        self._rotated_keys = [
            [RotatedKeys(torch.empty(x, dtype=model.dtype)) for x in shapes] for _ in range(size)
        ]
        self._free = list(range(size))

    @property
    def nbytes(self) -> int:
        """Return the bytes of rotated keys of all sessions, which are not part of their caches."""
        return sum(x.keys.nbytes for layers in self._rotated_keys for x in layers)

    def fits(self, answer: Answer) -> bool:
        """Return whether a session's token can be read so: not by other factors of longrope."""
        return not cast(BlockLoop, answer.session.loop).read_short

    def join(self, answer: Answer) -> None:
        """Check that a session can read a token, and give it memory for its rotated keys.

        It has that memory until `Session.fetch_cache`.

        Raises:
            MemoryCapExceeded, SessionBroken: it cannot; nothing is changed.
        """
        session, loop = answer.session, cast(BlockLoop, answer.session.loop)
        loop.make_room(1)
        if session.cache_away is None:
            row = self._free.pop()
            for layer, copy in zip(loop.cache.capped_layers, self._rotated_keys[row], strict=False):
                copy.count, layer.engine.positions.copy = 0, copy
            session.cache_away = partial(self._leave, loop.cache, row)

    def _leave(self, cache: BudgetCache, row: int) -> None:
        """Take back the memory for rotated keys."""
        for layer in cache.capped_layers:
            layer.engine.positions.copy = None
        self._free.append(row)

    asynchronous = False

    @torch.inference_mode()
    def begin(self, answers: list[Answer], tokens: list[int]) -> Callable[[], list[Any]]:
        """Read the token of each of these, which have joined; see `TokenReader.begin`.

        Raises:
            MemoryCapExceeded: nothing was read; or the system refused memory half-way.
        """
        caches = [a.session.loop.cache for a in answers]
        guard = next((cache.guard for cache in caches if cache.guard is not None), None)
        if guard is not None:
            guard.check(len(answers))
        try:
            with interrupts_deferred():
                logits = read_token_of_each(self.model, tokens, caches)
        except Exception as error:
            for answer in answers:  # some of its layers have read the token
                answer.session.cache.reset()
            if not out_of_memory(error):
                raise
            raise MemoryCapExceeded(
                f"the system refused the memory that a pass over {len(answers)} tokens takes; what "
                "was held is forgotten, conversations are read again with their next message"
            ) from error
        steps = {i: a.step for i, a in enumerate(answers) if a.step is not None}
        samplers = {i: one.sampler for i, one in steps.items() if one.sampler is not None}
        numbers = draw_each(logits, samplers).tolist() if samplers else []
        results = [numbers[i] if i in samplers else logits[i : i + 1] for i in range(len(answers))]
        return lambda: results


def read_token_of_each(model: Any, tokens: Sequence[int], caches: Sequence[BudgetCache]) -> Tensor:
    """Read a token into each of these caches in one pass, and evict; returns logits [S, V].

    Args:
        model: a causal language model loaded with `attn_implementation='kvcap'`, on a CPU.
        tokens: ids, one for each cache.
        caches: S of them, each of one sequence, all made by one runtime and with room.
    """
    device = model.device
    starts = [cache.next_position for cache in caches]
    logits: Tensor = model(
        input_ids=torch.tensor(tokens, device=device)[:, None],
        position_ids=torch.tensor(starts, device=device)[:, None],
        **cache_argument(model, _Caches(caches, starts)),
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits.flatten(0, 1)


def rotated_key_shapes(cache: BudgetCache, dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Return the shapes [1, K, slots, D] of a session's rotated keys, one of each capped layer.

    The list is empty where keys never move, are rotated in place (float32) or are read otherwise.
    """
    layout, eviction = cache.layout, cache.eviction
    still = dtype == torch.float32 or not (eviction.policy.evicts and all(layout.rotates))
    unequal = layout.ragged or layout.pooled
    if still or unequal or layout.slot_format.quantised or eviction.corrector is not None:
        return []
    shape = layout.shape
    return [
        (1, shape.kv_heads, slots[0] + cache.evict_every, shape.head_size)
        for slots in layout.allotments
    ]


def passes_on(device: torch.device | str) -> bool:
    """Return whether sessions share passes on a device: on a CPU without kvcap's own kernels.

    Elsewhere such a pass would save nothing: it launches as many kernels as one pass for each
    session, which is most of their time, and no CUDA graph can replay it.
    """
    return torch.device(device).type == "cpu" and not ready(torch.empty(0))


def why_no_pass(cache: BudgetCache) -> str | None:
    """Return why sessions that hold caches such as this one cannot share passes; None: they can."""
    shape, layout = cache.layout.shape, cache.layout
    if shape.slides:
        return "native sliding layers grow and shrink"
    if shape.recurrent:
        return "some layers are recurrent"
    if shape.latent is not None:
        return "slots hold latents"
    if any(layer.readers > 1 for layer in cache.capped_layers):
        return "layers read the slots of others"
    if not shape.all_capped:
        return "some layers have no attention"
    changing = any(rope.longest is not None or not rope.exact for rope in shape.capped_ropes)
    if layout.positions == "true" and changing:
        return "the model's rotation follows the longest session"
    return None


def rehearse_pass(config: Any, settings: CacheSettings, plan: MemoryPlan, size: int) -> int:
    """Return the most bytes that reading a token of each of `size` sessions takes, with logits.

    They are counted in a dry run, as by `rehearse_block`, over full caches that evict.
    """
    dtype: torch.dtype = getattr(torch, plan.dtype)
    most = plan.budget_tokens + (settings.evict_every or 1) - 1  # in use before a token evicts
    token = replace(settings, budget_tokens=most, block_size=1, evict_every=1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="kvcap", dtype=dtype
        ).eval()
        if plan.weights_dtype is not None:
            pack(model, plan.weights_dtype)
        caches = [BudgetCache(config, token).allocate(1, dtype, "cpu") for _ in range(size)]
        held = [x for cache in caches for x in cache.buffers()]
        tally = Tally((*model.parameters(), *model.buffers(), *held))
        with tally:
            for cache in caches:
                pretend_uneven(cache)
                pretend_full(cache)
            tally.peak = tally.now
            before = tally.now
            read_token_of_each(model, [0] * size, caches)
    return tally.peak - before


class _Caches(Cache):  # type: ignore[misc]
    """A cache for the model during a pass, which stands for those of all sessions."""

    def __init__(self, caches: Sequence[BudgetCache], starts: Sequence[int]) -> None:
        contexts = [ForwardContext(start, 1) for start in starts]
        layers = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[_Layer(of_each, contexts) for of_each in layers])


class _Layer(AttendedLayer):
    """A layer of `_Caches`, which stands for that layer of all sessions."""

    def __init__(self, layers: Sequence[BudgetLayer], contexts: Sequence[ForwardContext]) -> None:
        super().__init__()
        self._layers, self._contexts = layers, contexts

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [S, K, 1, D], each to its session's; attention finds them here."""
        rows = zip(self._layers, keys.split(1), values.split(1), self._contexts, strict=True)
        for layer, key, value, context in rows:
            layer.update(key, value, context)
        return self.carried_by(keys), values

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        logits: Logits,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Attend with each session's token [S, H, 1, D], then evict; see `BudgetLayer.attend`."""
        rows = zip(self._layers, query.split(1), strict=True)
        return torch.cat([layer.attend(module, q, logits, None) for layer, q in rows])

    def take_back(self) -> None:
        """Forget the tokens just appended, which are refused."""
        for layer in self._layers:
            layer.take_back()

    def get_seq_length(self) -> int:
        """Return how many tokens the longest session has read."""
        return max(layer.seen for layer in self._layers)

    def get_mask_sizes(self, _: int | Tensor) -> tuple[int, int]:
        """Return sizes for which no mask is made: a token sees all that its session holds."""
        return Slots.of(self.get_seq_length() + 1), 0

    reset = refuse_moving
