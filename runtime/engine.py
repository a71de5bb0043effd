"""What a conversation needs of whatever runs the model: the seam between `Session` and a backend.

`Runtime` (PyTorch) and `ort.OrtRuntime` (ONNX Runtime) both fit. Token ids and logits are arrays of
the backend's own kind; a session only hands them on. Imports neither of the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from kvcap.runtime.plan import MemoryPlan
    from kvcap.runtime.session import Session

OnFull = Literal["evict", "stop", "error"]
"""What happens when the budget is used up; see `Session.on_full`."""


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
    ) -> Session:
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

    def save(self, session: Session, path: str | os.PathLike[str]) -> None:
        """Write everything that `session` needs to go on."""

    def restore(self, session: Session, path: str | os.PathLike[str]) -> None:
        """Make `session` what was saved, or refuse and leave it as it is."""
