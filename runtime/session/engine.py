"""What a conversation needs of whatever runs the model: the seam between `Session` and a backend.

`Runtime` (PyTorch) and `ort.OrtRuntime` (ONNX Runtime) both fit. Token ids and logits are arrays of
the backend's own kind; a session only hands them on. Imports neither of the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvcap.runtime.planning.plan import MemoryPlan


from bisect import bisect_left
from typing import NamedTuple

from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.types import OnFull


class Loop(Protocol):
    """Reads tokens into a capped cache, at most a block at a time."""

    on_full: OnFull
    peak_bytes: int  # the most storage the cache has held

    @property
    def cache(self) -> Any:
        """What holds keys and values.

        It has `seen`, `held` and `spare` (tokens), `nbytes`, `used_bytes`, `recomputed`, `unread`,
        and `reset()`, `pin(spans)` and `pinned_with(spans)`.
        """

    @property
    def execution(self) -> str:
        """How blocks run that are all alike, for people; empty where there is nothing to say."""

    def check_room(self, tokens: int, answer: int = 0, *, emptied: bool = False) -> None:
        """Where nothing may be evicted, refuse what does not fit before any of it is read.

        `answer` tokens at most follow; `emptied`, the cache is reset before.
        """

    def prefill(self, ids: Any, on_block: Callable[[int], None] | None = None) -> Any:
        """Read ids [1, T] block by block; the last token's logits [1, V]."""

    def read(self, ids: Any) -> Any:
        """Read one block [1, T]; the last token's logits [1, V]."""


class Sampler(Protocol):
    """Draws tokens."""

    def next(self, logits: Any, history: Any) -> Any:
        """Token ids [1] from logits [1, V] and the tokens that count as said [1, T]."""


class Engine(Protocol):
    """A loaded model under a plan."""

    name: str
    tokenizer: Any
    plan: MemoryPlan

    @property
    def where(self) -> str:
        """What it runs on, for people."""

    @property
    def trained_length(self) -> int:
        """The tokens that the model was trained on at once."""

    @property
    def cap_bytes(self) -> int:
        """The cap of the cache: what was asked for in bytes, else what the slots need."""

    @property
    def generation(self) -> Any:
        """The model's own settings of generation, under transformers' names."""

    def session(
        self, system: str | None = None, *, seed: int | None = None, generation: Any = None
    ) -> Any:
        """A new conversation with a cache of its own."""

    def loop(self) -> Loop:
        """A loop over an empty cache of the planned size."""

    def draws(self, seed: int | None) -> Any:
        """Random numbers, repeatable with a seed."""

    def sampler(self, generation: Any, draws: Any) -> Sampler:
        """What draws tokens by these settings."""

    def ids(self, tokens: list[int]) -> Any:
        """Token ids as an array [1, T]."""

    def joined(self, history: Any, token: Any) -> Any:
        """History [1, T] and the next token [1], [1, T + 1]."""

    def under(self, policy: str, options: dict[str, Any]) -> Engine:
        """The same model and budget under another policy; what else is pinned stays pinned."""

    def with_budget(self, tokens: int) -> Engine:
        """The same model and policy with so many slots per KV head and layer.

        Raises:
            PlanInfeasible: no such budget can be had.
        """

    def policies(self) -> Mapping[str, Sequence[str]]:
        """The policies that `under` takes, with the names of their options."""

    def save(self, session: Any, path: str | os.PathLike[str]) -> None:
        """Write everything that `session` needs to go on."""

    def restore(self, session: Any, path: str | os.PathLike[str]) -> None:
        """Make `session` what was saved, or refuse and leave it as it is."""


MOST = 1000  # times as many slots as are needed are looked at


class Room(NamedTuple):
    """Tokens of a cache, per KV head and layer."""

    held: int
    spare: int  # that fit before any head must evict
    budget: int  # slots, as the user gave them
    least: Callable[[int], int]  # those of the smallest head under such a budget

    @property
    def emptied(self) -> Room:
        """Of the same cache, once it is empty."""
        return self._replace(held=0, spare=self.least(self.budget))

    def check(self, tokens: int, answer: int, on_full: OnFull, never: str | None) -> None:
        """Refuse what does not fit.

        Args:
            tokens: to be read next.
            answer: to be written after them, at most; only for the advice.
            on_full: see `Session.on_full`.
            never: the policy's name, if it evicts nothing whatever `on_full` is.

        Raises:
            MemoryCapExceeded: naming a budget in which the answer ends by itself.
        """
        if tokens <= self.spare or (on_full == "evict" and never is None):
            return
        if never is not None:
            why, advice = f"policy {never!r} never evicts", "choose a policy that evicts"
        else:
            why = f"nothing may be evicted (on-full is {on_full!r})"
            advice = "set on-full to 'evict'"
        if enough := self._enough(self.held + tokens + answer):
            also = f", which holds an answer of {answer:,} tokens too," if answer else ""
            advice = f"raise the budget to {enough:,}{also} or {advice}"
        raise MemoryCapExceeded(
            f"{why}: {self.held:,} of {self.budget:,} slots are in use and {tokens:,} more "
            f"token{'s were' if tokens > 1 else ' was'} to be read; {advice}"
        )

    def _enough(self, needed: int) -> int | None:
        """A budget in which every head holds so many tokens, if there is one."""
        found = range(needed, needed * MOST)
        place = bisect_left(found, needed, key=self.least)
        return found[place] if place < len(found) else None  # some heads never get more
