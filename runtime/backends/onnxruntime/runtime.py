"""Loads an exported decoder into ONNX Runtime under a memory plan, to chat with it.

The counterpart of `backends/pytorch/runtime.py`: the same caps, sessions and chat, no PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kvcap.dtypes import short
from kvcap.runtime.backends.arrays import ArrayEngine
from kvcap.runtime.backends.numpy_sampler import Generation
from kvcap.runtime.backends.onnxruntime import manifest as manifests
from kvcap.runtime.backends.onnxruntime.decoder import (
    ExportedDecoder,
    evictors_of,
    scales_of,
)
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.loop import OrtCache, OrtLoop
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.backends.onnxruntime.plan import plan_of
from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.memory.cap_guard import Enforce, check_enforce, limit_data
from kvcap.runtime.memory.free_memory import free_memory
from kvcap.runtime.planning.plan import MemoryPlan, Sizes, fitting, parse_cap, warn_if_short
from kvcap.runtime.recall.meaning import Meaning, Vectors
from kvcap.runtime.recall.settings import index_bytes
from kvcap.runtime.session import chat_template
from kvcap.runtime.session.encoding import encode_with
from kvcap.runtime.session.ends import with_ends
from kvcap.runtime.types import PINS, SINKS, ModelKind

IN_GRAPHS = "an exported decoder has its policy in its graphs; {}"


class PolicyRequest(NamedTuple):
    """A policy that a user requested; without a name, the export's own."""

    name: str | None = None
    options: Mapping[str, Any] = {}
    sink_tokens: int | None = None  # None: as many as were exported, or are usual
    recent_tokens: int = 0


@dataclass(repr=False)
class OrtRuntime(ArrayEngine):
    """An exported decoder that chats under a cap.

    >>> runtime = OrtRuntime.from_directory("pocket-onnx")  # doctest: +SKIP
    >>> answer = "".join(runtime.session().send("Hello!"))  # doctest: +SKIP
    """

    backend = "onnxruntime"
    library_name = "ONNX Runtime"

    manifest: Manifest
    tokenizer: Tokenizer
    plan: MemoryPlan
    policy: PolicyRequest
    graph: Graph  # the decoder's, with the weights
    name: str
    settings: CacheSettings  # as requested
    memory_cap: int | None = None

    @cached_property
    def meaning(self) -> Meaning | None:
        """Return what compares texts by the model's embedding table; earlier exports give none."""
        if self.manifest.embeddings is None:
            return None
        session = Graph(self.manifest.embeddings, threads=1).session

        def rows(ids: Sequence[int]) -> Vectors:
            (vectors,) = session.run(None, {"input_ids": np.array([ids], np.int64)})
            return vectors[0].astype(np.float32)  # type: ignore[no-any-return]

        encode = partial(encode_with, self.tokenizer, follows=True)
        return Meaning(rows, encode, self.vocabulary)

    @cached_property
    def generation(self) -> Generation:
        """Return the model's own settings of generation, with all tokens that end an answer."""
        generation: Generation = with_ends(self.tokenizer, generation_of(self.manifest))
        return generation

    def __repr__(self) -> str:
        return f"<OrtRuntime of {self.name} on {self.device_label}: {self.plan.summary}>"

    @classmethod
    def from_directory(
        cls,
        folder: str | Path,
        policy: PolicyRequest = PolicyRequest(),  # noqa: B008  # cannot be changed
        settings: CacheSettings = CacheSettings(evict_every=None),  # noqa: B008  # likewise
        *,
        memory_cap: str | int | None = None,
        enforce: Enforce = "check",
        dtype: str | None = None,
        threads: int | None = None,
        recall_store: str | int | None = None,
        **named: Any,
    ) -> OrtRuntime:
        """Load a decoder that `kvcap export decoder` wrote or prepared.

        Args:
            folder: of the decoder, with its manifest.
            policy: the export's own by default.
            settings: but for their policy; the export's where none is given, and no others where
                its graphs cannot follow. Evicts every 64 tokens, or the block, by default.
            memory_cap: bytes for the whole process, such as '2GiB', or 'auto'.
            enforce: 'check' checks before every block; 'rlimit' also has the system refuse more.
            dtype: of the weights; the export's, or an error.
            threads: of the CPU; OMP_NUM_THREADS, or all cores, by default.
            recall_store: bytes of the index by which a conversation finds its evicted text, at
                most; 8 MiB by default, less under a small `memory_cap`; 0: nothing is recalled.
            named: settings by their names, in place of those in `settings`.

        Raises:
            ModelNotFound, NotExportable, ManifestError, ModelFilesBroken, PlanInfeasible: before
                weights are read.
            GraphBroken, ShapeError: the graph is not what the manifest says.
            ValueError: a cap that is not given is to be enforced.
        """
        check_enforce(enforce, memory_cap)
        manifest = manifests.read(Path(folder))
        cap = None if memory_cap is None else parse_cap(memory_cap)
        settings = CacheSettings.of((settings,), named)
        check_policy(manifest, policy, settings.positions)
        check_dtype(manifest, dtype)
        check_slots(manifest, settings.kv_dtype)
        plan_for = partial(
            plan_of,
            manifest,
            Sizes(settings, cap),
            recall_store=index_bytes(recall_store, cap),
        )
        plan = plan_for()
        plan.sized(settings)  # refuses evictions further apart than blocks
        warn_if_short(plan, free_memory(), memory_cap)
        if manifest.embeddings is None and plan.recall_store:
            name = manifest.model["name"]
            warnings.warn(
                f"{str(folder)!r} has no graph of embeddings, as an earlier kvcap exported it, so "
                "that evicted text is found by words alone; to find it by meaning, too: "
                f"kvcap export decoder {name} -o DIR",
                stacklevel=2,
            )
        chat_template.start_renderer()
        tokenizer = Tokenizer(manifest.folder, manifest.listed)
        graph = Graph(manifest.decoder, threads)
        if cap is not None:
            # After loading, the plan uses what loading really took.
            plan = plan_for(loaded=True)
            if enforce == "rlimit":
                limit_data(cap)
        return cls(manifest, tokenizer, plan, policy, graph, str(folder), settings, cap)

    @property
    def device_label(self) -> str:
        """Return the library, the device and the type of numbers, as text for people."""
        return f"onnxruntime cpu {self.plan.dtype}"

    @property
    def vocabulary(self) -> int:
        """Return how many different tokens the model knows."""
        return int(self.manifest.model["vocabulary"])

    @property
    def kind(self) -> ModelKind:
        """Return the model's family and size."""
        return self.manifest.kind

    @property
    def trained_length(self) -> int:
        """Return the longest sequence, in tokens, that the model was trained on."""
        return int(self.manifest.model["trained_length"])

    def shared_rows(self, size: int) -> tuple[None, str]:
        """Return None, and the reason why sessions are read one after the other."""
        return None, "an exported graph reads one conversation"

    def reserve(self, conversations: int) -> int:
        """Return 0, as each conversation allocates its own cache."""
        return 0

    def loop(self) -> OrtLoop:
        """Return a loop over an empty cache."""
        decoder = ExportedDecoder(
            self.manifest,
            self.graph,
            evictors_of(self.manifest, self.graph.threads),
            self.plan.block_size,
            self.every,
            scales_of(self.manifest),
        )
        return OrtLoop(OrtCache(decoder, self.plan.policy), self.guard())

    def with_policy_name(self, policy: str, options: dict[str, Any]) -> OrtRuntime:
        """Return a runtime of this decoder under another policy that was exported.

        Raises:
            NotExportable: it was not, or it was with other options.
        """
        pins = {name: getattr(self.policy, name) for name in PINS}
        given = {name: value for name, value in options.items() if name not in PINS}
        pins |= {name: int(options[name]) for name in PINS if name in options}
        request = PolicyRequest(policy, given, **pins)
        check_policy(self.manifest, request, self.plan.positions)
        settings = self.settings
        if settings.kv_budget is None:
            settings = replace(settings, budget_tokens=self.plan.budget_tokens)
        return replace(self, policy=request)._replanned(settings)

    def with_policy(self, policy: object) -> NoReturn:
        """Refuse another policy, as the graphs have theirs.

        Raises:
            NotExportable: always.
        """
        raise NotExportable(IN_GRAPHS.format("export it again with another"))

    def free_idle(self) -> int:
        """Return 0, as no cache outlives its session."""
        return 0

    def _replanned(self, settings: CacheSettings) -> OrtRuntime:
        """Return a runtime of this decoder and policy under another plan."""
        requested = replace(settings, block_size=self.plan.block_size)
        plan = plan_of(
            self.manifest,
            Sizes(requested),
            recall_store=self.plan.recall_store,
        )
        # The first plan has already measured what the process takes without a cache.
        plan = replace(plan, baseline=self.plan.baseline)
        if self.memory_cap is not None:
            fitting(plan, self.memory_cap)
        return replace(self, plan=plan, settings=settings)

    def policies(self) -> dict[str, list[str]]:
        """Return the policies that were exported, with the names of their options."""
        policy = self.manifest.facts["policy"]
        return {policy["name"]: [*policy["parameters"], *PINS]}

    @property
    def identity(self) -> dict[str, Any]:
        """Return all that must agree for saved slots to be usable."""
        policy, plan = self.manifest.facts["policy"], self.plan
        return {
            "fingerprint": self.manifest.fingerprint,
            "dtype": plan.dtype,
            "positions": plan.positions,
            "policy": policy["name"],
            "parts": {name: policy[name] for name in ("name", "parameters")},
            "budget_tokens": plan.budget_tokens,
        }


def open_export(
    folder: Path,
    given: Sequence[Any],
    named: Mapping[str, Any],
    *,
    device: Any = None,
    dtype: Any = None,
    weights: Any = None,
    **further: Any,
) -> OrtRuntime:
    """Load an exported decoder by the arguments of `Runtime.from_pretrained`.

    Raises:
        NotExportable: an argument that says otherwise than the export, or is for PyTorch.
    """
    if device is not None and str(device) != "cpu":
        raise NotExportable(
            f"device={str(device)!r} is not for an exported decoder, which runs on the CPU; leave "
            "it out"
        )
    if weights is not None:
        raise NotExportable(
            f"weights={weights!r} is not for an exported decoder, whose weights are as they are; "
            "leave it out, or give the model that it was made from"
        )
    usual = CacheSettings(evict_every=None)
    whole = given if given and isinstance(given[0], CacheSettings) else (usual, *given)
    settings = CacheSettings.of(whole, named, "policy")
    policy = None if settings.policy == usual.policy else settings.policy
    if policy is not None and not isinstance(policy, str):
        raise NotExportable(IN_GRAPHS.format("give policy by its name, or leave it out"))
    return OrtRuntime.from_directory(
        folder,
        PolicyRequest(policy, sink_tokens=settings.sink_tokens),
        settings,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        **further,
    )


def check_policy(manifest: Manifest, request: PolicyRequest, positions: str | None) -> None:
    """Refuse a policy, options or positions that an export does not have.

    Raises:
        NotExportable: says which it has, or what could.
    """
    manifests.refuse_cache(positions, None)
    facts = manifest.facts
    policy, mode = facts["policy"], positions or facts["positions"]
    name = request.name or policy["name"]
    if (name, mode) != (policy["name"], facts["positions"]):
        raise NotExportable(
            f"policy {name!r} with {mode} positions is not in this export, which has "
            f"{policy['name']} ({facts['positions']} positions); export it again with the policy "
            "and positions that you want"
        )
    pins = {name: getattr(request, name) for name in PINS}  # these are in the graph too
    requested = {name: n for name, n in pins.items() if n or (name == SINKS and n == 0)}
    for name, value in {**request.options, **requested}.items():
        if policy["parameters"].get(name) != value:
            has = ", ".join(f"{k}={v}" for k, v in policy["parameters"].items()) or "no options"
            raise NotExportable(
                f"{name}={value} is not in this export, whose graph has {has}; export it again "
                "with that option"
            )


def check_dtype(manifest: Manifest, dtype: str | None) -> None:
    """Refuse a dtype that is not the export's."""
    mine = manifest.facts["dtype"]
    if dtype is not None and short(dtype) != short(mine):
        raise NotExportable(
            f"this decoder was exported with --dtype {mine}; leave --dtype {dtype} out, or export "
            "it again"
        )


def generation_of(manifest: Manifest) -> Generation:
    """Return a manifest's settings of generation; an empty list of ends counts as unknown."""
    generation = Generation.of(manifest.facts["generation"])
    generation.eos_token_id = generation.eos_token_id or None
    return generation


def check_slots(manifest: Manifest, kv_dtype: str | None) -> None:
    """Refuse slots of another type than the export's.

    Raises:
        NotExportable: says which it has, and which there are.
    """
    mine = manifest.facts.get("kv_dtype")
    if kv_dtype in (None, mine):
        return
    manifests.refuse_cache(None, kv_dtype)
    raise NotExportable(
        f"--kv-dtype {kv_dtype} is not for this decoder, which holds keys and values in floats; "
        f"leave it out, or export the model again with: kvcap export decoder MODEL --kv-dtype "
        f"{kv_dtype}"
    )
