"""Ways to rank passages: each finds what it must, on a text where the answer is known."""

from __future__ import annotations

import json

import pytest
import torch

from kvcap.evals.bench import load, options_for
from kvcap.lab.bench import passages
from kvcap.runtime.backends.pytorch.runtime import Runtime


@pytest.fixture(scope="module")
def read() -> passages.Passages:
    """Return a text of one fact among others, read by pocket."""
    runtime = Runtime.from_pretrained("pocket", dtype="float32", device="cpu")
    runtime.model.set_attn_implementation("sdpa")
    around = " ".join(f"Line {i} tells how the river ran to the sea." for i in range(30))
    with torch.inference_mode():
        return passages.Passages(runtime, f"{around} Grandpa hid a violin. {around}")


@torch.inference_mode()
def test_every_way_ranks_every_passage(read):
    ranked = list(read.rank("Grandpa hid a violin."))
    ways = [way for way, *_ in ranked]
    assert len(set(ways)) == len(ways) == 1 + 4 * 5 + 2 * 3
    for way, order, took, size in ranked:
        assert took > 0 < size
        if way[0] != "words":  # which ranks those alone that share one
            assert sorted(order) == list(range(len(read.spans)))
        if way[0] in ("words", "tokens"):  # the same tokens, which no other passage has
            assert "violin" in read.texts[order[0]], way


@torch.inference_mode()
def test_keys_are_those_before_rotation(read):
    layer = read.base.layers[1]
    seen = list[torch.Tensor]()
    hook = layer.self_attn.k_proj.register_forward_hook(lambda *given: seen.append(given[2]))
    hidden = passages.hidden_states(read.base, read.ids, 0)
    hook.remove()
    keys = passages.heads(layer, "k", hidden[1])
    torch.testing.assert_close(keys.flatten(1), seen[0][0])


def test_a_row_has_the_share_of_each_kind_of_question(tmp_path, monkeypatch):
    lines = passages.PAIRS.read_text(encoding="utf-8").splitlines()
    (tmp_path / "few.txt").write_text("\n".join(lines[:4]), encoding="utf-8")
    monkeypatch.setattr(passages, "PAIRS", tmp_path / "few.txt")
    monkeypatch.setattr(passages, "DRAWN", 1)
    monkeypatch.setattr(passages, "FACTS", 2)
    result = load("passages")(options_for("passages", {"lengths": (400,)}))
    row = json.loads(json.dumps(result.as_dict()))["rows"][0]
    assert (row["way"], row["own"], row["facts"]) == ("words", 1, 1)
    assert result.derived["questions"] == {"own": 4, "other": 4, "needle": 1, "facts": 1}
    assert result.derived["recalled"]["own"] == 1
    assert result.derived["recalled"]["statement"] < 1
    assert len(result.table().splitlines()) == 2 + len(result.rows)


def test_the_pairs_are_facts_with_two_questions():
    lines = passages.PAIRS.read_text(encoding="utf-8").splitlines()
    parts = [[part.strip() for part in line.split("|")] for line in lines]
    assert len({fact for fact, *_ in parts}) == len(parts) == 40
    assert all(own.endswith("?") and other.endswith("?") for _, own, other in parts)
