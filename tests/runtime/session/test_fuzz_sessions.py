"""Sessions' files with odd values that their digest vouches for: refused whole, or they go on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_values import odd
from tools import tiny_decoder

import kvcap
from kvcap.policies import load_policy
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.errors import KvcapError
from kvcap.runtime.session import file as session_file
from kvcap.runtime.session.file import SessionFile
from kvcap.runtime.session.session import Session

few = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
POLICIES = ["keydiff", "snapkv+adakv", "calidrop", "cake"]
OPTIONS = {"calidrop": {"window": 4, "calibration_size": 16}, "keydiff": {}}
TEXT = "Hello there, how are you today? I am well, and it is a fine day by the sea."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory)


def talked(runtime: Any) -> Session:
    session = runtime.session("Be kind.", seed=3)
    session.set_generation(max_new_tokens=4, temperature=0.8)
    "".join(session.send("Hi.", pin=True))
    "".join(session.send(TEXT))
    return session


@pytest.fixture(scope="module", params=[*POLICIES, "onnxruntime"])
def session(request: Any, model: Path) -> Session:
    if request.param == "onnxruntime":
        return talked(OrtRuntime.from_directory(model / "decoder"))
    policy = load_policy(request.param, **OPTIONS.get(request.param, {"window": 4}))
    return talked(
        kvcap.Runtime.from_pretrained(model / "model", policy, budget_tokens=24, block_size=8)
    )


def state(session: Session) -> tuple[Any, ...]:
    """Everything of a session that a refusal must leave as it is."""
    cache, rng = session.cache, session.rng
    if isinstance(rng, torch.Generator):
        held = [x.float().numpy() for x in cache.buffers()]
        drawn = rng.get_state().tolist()
        figures = [
            (s.held, s.budget, s.target_length) for x in cache.capped_layers for s in x.segments
        ]
    else:
        figures, decoder = list(cache.decoder.held), cache.decoder
        held, drawn = list(decoder.state(cache.seen, figures).values()), rng.bit_generator.state
    spans, conversation = list(cache.pinned_spans), repr(session.conversation)
    arrays = [array.tobytes() for array in held]
    return cache.seen, spans, conversation, repr(session.generation), drawn, figures, arrays


def tensor_of(x: torch.Tensor, value: float) -> torch.Tensor:
    """The tensor with one element that is odd."""
    changed = x.clone()
    if x.numel() and (x.is_floating_point() or math.isfinite(value)):
        low, high = (-math.inf, math.inf) if x.is_floating_point() else _range(x.dtype)
        changed.view(-1)[x.numel() // 2] = min(max(value, low), high) if value == value else value
    return changed


def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype == torch.bool:
        return 0, 1
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


TENSORS = [
    lambda x: x[:-1],
    lambda x: x.flatten(),
    lambda x: x.double(),
    lambda x: x[:0],
    *(lambda x, value=value: tensor_of(x, value)
      for value in (math.nan, math.inf, -math.inf, -1, 0, 3, 1000, 1 << 31)),
]  # fmt: skip


@pytest.mark.slow(keep=1)
@few
@given(data=st.data())
def test_what_a_session_says(data, session, tmp_path):
    """One value of the facts or a tensor's element is odd: the session goes on, or is as it was."""
    path = tmp_path / "s"
    session.save(path)
    with SessionFile(path) as file:
        tensors, facts = {name: file.tensor(name) for name in sorted(file.names)}, file.facts
    if data.draw(st.integers(0, 2)):
        facts = data.draw(odd(facts))
    else:
        name = data.draw(st.sampled_from(sorted(tensors)))
        tensors[name] = data.draw(st.sampled_from(TENSORS))(tensors[name])
    try:
        session_file.write(tmp_path / "bad", {k: [x] for k, x in tensors.items()}, facts)
    except (KeyError, UnicodeEncodeError):  # what no file can hold
        return
    before = state(session)
    try:
        session.restore(tmp_path / "bad")
    except KvcapError:
        assert state(session) == before
        return
    session.generation.max_new_tokens = 3
    "".join(session.send("And now?"))
    assert session.cache.seen > 0
    session.restore(path)
    assert state(session)[:3] == before[:3]
