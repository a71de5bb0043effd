"""Lives of sessions: whatever was said and taken back before, a file of one goes on.

Each is lived twice: in one session, and in one that is saved and loaded on the way. Both must keep
the same tokens and say the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import in_turn, small_policy, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools import tiny_decoder
from transformers import AutoTokenizer

import kvcap
from kvcap import pocket
from kvcap.policies import policies
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.cache.query_window import QueryWindow
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import KvcapError
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.session.session import Session

LONG = "Hello there, how are you today? I am well, and it is a fine day by the sea. " * 2
WAYS: list[tuple[Any, ...]] = [
    ("compact", None, 1), ("true", None, 1), ("auto", None, 8), ("compact", "int8", 1),
    ("auto", "int8-int4", 1), ("true", "int8", 8), ("compact", "int4", 8),
]  # fmt: skip
"""Positions, slot formats, and after how many tokens an answer evicts."""
WINDOW = 12  # more queries than there are in a short message
ACTS = [
    "long",
    "short",
    "pinned",
    "clear",
    "undo",
    "regenerate",
    "begin",
    "save",
    "load",
    "restore",
]
LIVES = st.lists(st.sampled_from(ACTS), max_size=7)
# What a window, a store or a mean has of a conversation that is forgotten is not the next one's.
HARD = [
    "long",
    "clear",
    "short",
    "load",
    "long",
    "undo",
    "restore",
    "short",
    "begin",
    "short",
    "load",
    "pinned",
    "regenerate",
    "load",
]
few = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": None}
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=96, **ids)
    return model, tokenizer


def runtime_of(
    parts: tuple[Any, Any], policy: str, positions: Any, kv_dtype: Any, every: int
) -> kvcap.Runtime:
    model, tokenizer = parts
    eviction = small_policy(policy, model.config, window=WINDOW)
    budget = 72 if policy == "full" else 32
    if eviction.corrector is not None:
        kv_dtype = None  # it keeps evicted tokens beside the slots, which are not quantised then
    settings = CacheSettings(budget, 32, eviction, positions, every, kv_dtype)
    plan = MemoryPlan.of(model.config, settings, dtype=model.dtype)
    return kvcap.Runtime(model, tokenizer, plan, settings, name="tiny")


def begun(runtime: Any) -> Session:
    """A new session, which may have the memory of one that ended."""
    session: Session = runtime.session(seed=3)
    session.set_generation(max_new_tokens=3, temperature=0.8)
    return session


def said(session: Session, what: str) -> str:
    """What a session answers, or by which error it refuses."""
    try:
        if what == "regenerate":
            return "".join(session.regenerate())
        if what == "undo":
            return session.undo()
        text = LONG if what == "long" else "Hi."
        return "".join(session.send(text, pin=what == "pinned"))
    except KvcapError as error:
        return repr(error)


def holds(session: Session) -> Any:
    """The tokens that each head holds, those that were read, and the conversation."""
    kept = [
        [sorted(head.tolist()) for head in layer.heads] for layer in session.cache.kept_tokens()
    ]
    return kept, session.cache.seen, session.read_ids, session.conversation


def live(runtime: Any, life: list[str], path: Path) -> None:
    """Live it, and go on a little."""
    one, never_saved = begun(runtime), begun(runtime)
    for act in [*life, "save", "load", "short"]:
        if act == "clear":
            one.clear(), never_saved.clear()
        elif act == "begin":  # the memory of the former is that of the next
            del one, never_saved
            one, never_saved = begun(runtime), begun(runtime)
        elif act == "save":
            one.save(path)
        elif act == "load":
            one.save(path)
            one = Session.load(runtime, path)
        elif act == "restore":  # over a conversation of its own
            one.save(path)
            one = begun(runtime)
            said(one, "long")
            one.restore(path)
        else:
            assert said(one, act) == said(never_saved, act)
        assert holds(one) == holds(never_saved)


each_policy = pytest.mark.parametrize(
    ("policy", "positions", "kv_dtype", "every"), in_turn(sorted(policies()), WAYS)
)
beyond = pytest.mark.filterwarnings("ignore:position .* is beyond")


@beyond
@each_policy
def test_a_saved_session_is_one_that_never_was(policy, positions, kv_dtype, every, parts, tmp_path):
    live(runtime_of(parts, policy, positions, kv_dtype, every), HARD, tmp_path / "s")


@beyond
@pytest.mark.slow
@each_policy
def test_any_life(policy, positions, kv_dtype, every, parts, tmp_path):
    runtime = runtime_of(parts, policy, positions, kv_dtype, every)

    @settings(few, max_examples=25)
    @given(LIVES)
    def some(life: list[str]) -> None:
        live(runtime, life, tmp_path / "s")

    some()


@beyond
@settings(few, max_examples=12)
@given(LIVES, st.sampled_from(["snapkv", "pyramidkv", "adakv", "cake", "calidrop"]),
       st.sampled_from(WAYS))  # fmt: skip
def test_any_life_of_some(parts, tmp_path, life, policy, way):
    live(runtime_of(parts, policy, *way), life, tmp_path / "s")


@pytest.mark.slow
def test_any_life_by_onnx_runtime(tmp_path_factory, tmp_path):
    runtime = OrtRuntime.from_directory(tiny_decoder(tmp_path_factory) / "decoder")

    @settings(few, max_examples=25)
    @given(LIVES)
    def some(life: list[str]) -> None:
        live(runtime, life, tmp_path / "s")

    live(runtime, HARD, tmp_path / "s")
    some()


@each_policy
def test_a_file_has_nothing_of_a_conversation_that_was_cleared(
    policy, positions, kv_dtype, every, parts, tmp_path
):
    """It is that of a new session, to the byte."""
    runtime = runtime_of(parts, policy, positions, kv_dtype, every)
    cleared, new = begun(runtime), begun(runtime)
    for session in (cleared, new):
        session.set_generation(temperature=0.0)  # draws nothing, so that the seed's state is alike
    said(cleared, "long")
    cleared.clear()
    for what in (None, "short"):
        if what is not None:
            assert said(cleared, what) == said(new, what)
        cleared.save(tmp_path / "cleared")
        new.save(tmp_path / "new")
        assert (tmp_path / "cleared").read_bytes() == (tmp_path / "new").read_bytes()


def test_a_file_of_an_earlier_version_goes_on(parts, tmp_path, monkeypatch):
    """Which left a cleared conversation's queries in the window if the next was shorter."""
    runtime = runtime_of(parts, "snapkv", "compact", None, 1)
    session, new = begun(runtime), begun(runtime)
    said(session, "long")
    with monkeypatch.context() as patch:
        patch.setattr(QueryWindow, "reset", lambda self: None)
        session.clear()
    session.set_generation(seed=3)
    assert said(session, "short") == said(new, "short")
    assert session.cache.capped_layers[0].engine.query_window.shift.max() > session.cache.seen
    session.save(tmp_path / "s")
    loaded = Session.load(runtime, tmp_path / "s")
    assert said(loaded, "long") == said(new, "long")
    assert holds(loaded)[:2] == holds(new)[:2]
