"""The path of a key: docs/architecture.md names every function that it goes through, in order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tools import tiny_model

import kvcap
from kvcap.runtime.backends.pytorch.loop import BlockLoop

ROOT = Path(__file__).parents[3]
PACKAGE = f"{Path(kvcap.__file__).parent}/"
STOPS = 15
# They make a view, or say whether a kernel runs: a reader need not stop.
ASIDE = {"Segment.rows_of", "Rotation.back_plainly", "KeyDiff._score", "KeyDiff._similarity",
         "_rotate_halves", "AttendedLayer.carried_by"}  # fmt: skip


def documented() -> list[tuple[str, str]]:
    """(file, function) of every stop that the page has."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (section,) = re.findall(r"## The path of a key\n(.*?)\n## ", page, re.DOTALL)
    return re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", section, re.MULTILINE)


def called(policy: str) -> tuple[list[tuple[str, str]], set[str]]:
    """What kvcap calls while a full cache reads a block, and what of it is given the keys."""
    model = tiny_model("llama", num_hidden_layers=1)
    cache = kvcap.BudgetCache(model.config, 24, 8, policy)
    loop, ids = BlockLoop(model, cache, graphs=False), torch.randint(3, 90, (1, 40))
    loop.prefill(ids[:, :32])
    shape, log, given = cache.layout.shape, list[tuple[str, str]](), set[str]()

    def is_keys(x: object) -> bool:
        size = (shape.kv_heads, shape.head_size)
        return isinstance(x, torch.Tensor) and x.dim() == 4 and (x.shape[1], x.shape[3]) == size

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            owner = frame.f_locals.get("self")
            kinds = () if owner is None else type(owner).__mro__
            kind = next((k.__name__ for k in kinds if code.co_name in vars(k)), None)
            name = code.co_name if kind is None else f"{kind}.{code.co_name}"
            log.append((code.co_filename.removeprefix(PACKAGE), name))
            arguments = code.co_varnames[: code.co_argcount]
            if any(is_keys(frame.f_locals.get(argument)) for argument in arguments):
                given.add(name)

    sys.setprofile(note)
    try:
        loop.read(ids[:, 32:])
    finally:
        sys.setprofile(None)
    return log, given


def test_a_key_makes_the_stops_that_are_documented_in_that_order():
    stops, (log, _) = documented(), called("keydiff")
    assert 5 < len(stops) <= STOPS
    left = iter(log)
    for stop in stops:
        assert stop in left, f"{stop} is not called, or not after those before it"


def test_nothing_else_is_given_the_keys():
    names = {name for _, name in documented()}
    _, given = called("keydiff")
    assert given <= names | ASIDE, f"{given - names - ASIDE} are no stops of the page"
