"""`kvcap policies calibrate`: scores against whole attention matrices, and files that load."""

from __future__ import annotations

import json
import os
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny_chat
import torch
from conftest import tiny_config, tiny_model
from make import saved_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcap
from kvcap import pocket
from kvcap.evals.calibrate import Calibration, RepetitionProbe, calibrate
from kvcap.pocket.facts import facts
from kvcap.pocket.prose import filler
from kvcap.policies.base.table import read_table
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.files import encode

FACTS = " ".join(fact.statement for fact in facts(Random(0), 40))
FILLER = " ".join(islice(filler(Random(0)), 40))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return folders of random models with pocket's tokenizer: one plain, one that slides."""
    make = tmp_path_factory.mktemp
    return {x: str(saved_model(make(x), x)) for x in ("qwen3", "gemma2")}


def plain(where: str, ids: list[int], before: list[int] = [], shift: int = 1) -> torch.Tensor:  # noqa: B006
    """Return the scores [L, H] of capped layers, from whole attention matrices."""
    model = AutoModelForCausalLM.from_pretrained(
        where, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        out = model(torch.tensor([before + ids + ids]), output_attentions=True)
    rows = []
    for layer in ModelShape.of(model.config).capped:
        matrix = out.attentions[layer][0].double()  # [H, T, T]
        second = range(len(before) + len(ids), matrix.shape[-1])
        rows.append(sum(matrix[:, t, t - len(ids) + shift] for t in second) / len(ids))
    return torch.stack(rows)


def tokens(text: str, count: int) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    return list(tokenizer(text, add_special_tokens=False)["input_ids"][:count])


def close(scores: list[list[float]], expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(scores).double(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("count", [33, 100])  # in one block, and over several
def test_scores_are_those_of_whole_matrices(family, count, tiny):
    calibration = calibrate(tiny[family], FACTS, tokens=count, device="cpu")
    expected = plain(tiny[family], tokens(FACTS, count))
    assert close(calibration.scores, expected)
    assert calibration.tokens == count
    assert calibration.model == Path(tiny[family]).name


@pytest.mark.parametrize("text", [FACTS, FILLER])
def test_scores_of_pocket(text):
    calibration = calibrate("pocket", text, tokens=200, dtype="float32", device="cpu")
    assert close(calibration.scores, plain(str(pocket.path()), tokens(text, 200)))
    assert [len(row) for row in calibration.scores] == [6] * 6


def test_pocket_has_heads_that_retrieve():
    """What the table is for: a few heads look at what followed, most do not."""
    calibration = calibrate("pocket", FACTS, tokens=400, dtype="float32", device="cpu")
    scores = torch.tensor(calibration.scores, dtype=torch.float64).flatten()
    assert scores.max() > 0.3
    assert scores.median() < 0.05
    assert [score for score, _, _ in calibration.strongest(36)] == sorted(
        scores.tolist(), reverse=True
    )


@pytest.mark.parametrize("block", [1, 7, 64, 200])
def test_blocks_do_not_matter_and_bound_the_memory(block, tiny, monkeypatch):
    ids = tokens(FACTS, 40)
    model = AutoModelForCausalLM.from_pretrained(tiny["gemma2"], attn_implementation="kvcap")
    probe, rows = RepetitionProbe(len(ids), 1), []

    def watched(self: RepetitionProbe, seen: Any, update: Any = RepetitionProbe.update) -> Any:
        state = update(self, seen)
        rows.append(seen.attention.shape[3])
        return state

    monkeypatch.setattr(RepetitionProbe, "update", watched)
    cache = BudgetCache(model.config, 81, block, kvcap.Eviction(probe), positions="true")
    BlockLoop(model, cache).prefill(torch.tensor([[5, *ids, *ids]]))
    scores = [(probe.mass[layer] / len(ids)).tolist() for layer in sorted(probe.mass)]
    assert close(scores, plain(tiny["gemma2"], ids, [5]))
    assert max(rows) == min(block, 81)


def test_the_opening_token_is_read_once(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny["qwen3"])
    assert encode(tokenizer, "a b")[0] == []
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    before, ids = encode(tokenizer, FACTS)
    assert (before, ids) == ([tokenizer.bos_token_id], tokens(FACTS, 10**6))
    assert encode(tokenizer, bos + FACTS)[0] == []  # the text has it already
    tiny_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    calibration = calibrate(tmp_path, FACTS, tokens=50, device="cpu")
    assert close(calibration.scores, plain(str(tmp_path), ids[:50], before))


def test_no_more_is_read_than_the_model_was_trained_on(tmp_path, tiny):
    trained = tiny_config("qwen3").max_position_embeddings
    progress: list[tuple[int, int]] = []
    calibration = calibrate(
        tiny["qwen3"], FACTS, device="cpu", report=lambda *done: progress.append(done)
    )
    assert calibration.tokens == trained // 2
    assert progress == [(128, trained), (256, trained)]


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(FACTS, encoding="utf-8")
    return str(file)


@pytest.fixture
def run(kvcap: Any) -> Any:
    return partial(kvcap, "policies", "calibrate")


@pytest.mark.parametrize(
    ("name", "options"), [("headkv", {"window": 4}), ("duoattention", {"sinks": 2, "recents": 4})]
)
def test_a_table_loads_and_runs(name, options, run, text, tmp_path, tiny):
    for where in ("pocket", *tiny.values()):
        out = str(tmp_path / "heads.json")
        rest = ("-f", text, "-o", out, "--tokens", "64", "--device", "cpu")
        code, output, err = run(name, where, *rest)
        assert (code, err) == (0, "")
        assert output.splitlines()[0] == (
            f"{out} written; use it with --policy {name} --policy-option table={out}"
        )
        eviction = kvcap.load_policy(name, table=out, **options)
        model = AutoModelForCausalLM.from_pretrained(
            pocket.path() if where == "pocket" else where, attn_implementation="kvcap"
        )
        cache = BudgetCache(model.config, 16, 16, eviction)
        BlockLoop(model, cache).prefill(torch.tensor([tokens(FACTS, 100)]))
        heads = cache.layout.allotments
        assert sum(map(sum, heads)) == 16 * sum(map(len, heads))
        if where == "pocket":  # whose heads differ
            assert max(map(max, heads)) > 16
        assert cache.held == 16


def test_the_file(run, text, tmp_path):
    out, again = tmp_path / "heads.json", tmp_path / "again.json"
    rest = ("-f", text, "--tokens", "64", "--device", "cpu")
    code, output, _ = run("headkv", "pocket", *rest, "-o", str(out), "--json")
    document = json.loads(out.read_text())
    assert code == 0
    assert json.loads(output) == document
    assert set(document) == {"model", "kind", "tokens", "kvcap", "scores"}
    assert (document["model"], document["kind"], document["tokens"]) == ("pocket", "heads", 64)
    assert document["kvcap"] == kvcap.__version__
    run("duoattention", "pocket", *rest, "-o", str(again), "-q")
    assert again.read_bytes() == out.read_bytes()
    table = read_table(str(out), 6, 2, "headkv")
    rows = document["scores"]
    assert table.scores[3][0] == pytest.approx(sum(rows[3][:3]) / 3)


def test_what_is_printed(run, text, tmp_path):
    out = str(tmp_path / "heads.json")
    rest = ("-f", text, "--tokens", "64", "-o", out, "--dtype", "float32", "--device", "cpu")
    code, output, _ = run("headkv", "pocket", *rest)
    rows = json.loads(Path(out).read_text())["scores"]
    scores = sorted(score for row in rows for score in row)
    lines = [line.rsplit(maxsplit=1) for line in output.splitlines()[1:]]
    assert code == 0
    assert [label.strip() for label, _ in lines[:3]] == ["least", "mean", "most"]
    figures = [scores[0], sum(scores) / 36, scores[-1], *scores[-5:][::-1]]
    assert [float(figure) for _, figure in lines] == pytest.approx(figures, abs=1e-4)
    first = rows.index(max(rows, key=max))
    assert lines[3][0].strip() == f"layer {first} head {rows[first].index(scores[-1])}"
    assert run("headkv", "pocket", *rest, "-q")[1].count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b"The code is 4821.", "at least 32 tokens"),
        (b"caf\xe9", "UTF-8"),
        (b"a\0b", "NUL"),
        (None, "No such file"),
    ],
)
def test_texts_that_will_not_do(content, says, kvcap, tmp_path):
    file, out = tmp_path / "text", tmp_path / "heads.json"
    if content is not None:
        file.write_bytes(content)
    given = ("headkv", "pocket", "-f", str(file), "-o", str(out))
    assert says in kvcap.refused("policies", "calibrate", *given)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["snapkv"], "'snapkv' takes no table of heads; only duoattention and headkv do"),
        (["criticalkv-headkv"], "takes no table"),
        (["headkv", "nowhere/at-all"], "is no directory here"),
        (["headkv", "--dtype", "int8"], "use one of float32"),
        (["headkv", "--device", "abacus"], "device 'abacus'"),
        (["headkv", "--tokens", "31"], "--tokens"),
        (["headkv", "-o", "no/such/folder/heads.json"], "cannot write"),
        (["headkv", "-o", "."], "cannot write"),
    ],
)
def test_bad_arguments_end_with_one_line(arguments, says, kvcap, text):
    assert says in kvcap.refused("policies", "calibrate", *arguments, "-f", text)


def test_the_text_must_be_given(kvcap):
    assert "--file" in kvcap.refused("policies", "calibrate", "headkv", "pocket")


def test_a_model_trained_on_too_little(run, text, tmp_path):
    where = tiny_chat.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))
    code, _, err = run("headkv", where, "-f", text, "-o", str(tmp_path / "heads.json"))
    assert code == 2
    assert "of this one 24 would be read, twice, by a model trained on 48" in err


def test_attention_that_is_not_finite(run, text, tmp_path, monkeypatch):
    def spoiled(self: RepetitionProbe, seen: Any) -> Any:
        self.mass[seen.layer] = torch.full((6,), float("nan"))
        return {}

    monkeypatch.setattr(RepetitionProbe, "update", spoiled)
    code, _, err = run("headkv", "-f", text, "-o", str(tmp_path / "heads.json"))
    assert code == 2
    assert "not finite in bfloat16" in err
    assert not os.path.exists(tmp_path / "heads.json")


def test_equal_heads_are_ranked_by_layer():
    calibration = Calibration("m", 32, [[0.5, 0.25], [0.5, 1.0]])
    assert calibration.strongest(3) == [(1.0, 1, 1), (0.5, 0, 0), (0.5, 1, 0)]
