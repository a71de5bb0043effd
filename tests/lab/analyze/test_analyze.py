"""`kvcap analyze`: formulas against loops and by hand, then the command on small random models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import OLD, STATES, model_of
from make import argv

from kvcap import cli
from kvcap.lab import analyze
from kvcap.lab.analyze import (
    AnalysisOptions,
    analyses,
    cone,
    correlation,
    oracle,
    pca,
    perturbation,
    queries,
    volume,
)
from kvcap.lab.bench import saliency
from kvcap.lab.captured import until
from kvcap.lab.texts import Text, generated, pieces
from kvcap.policies import Observation, PolicyError
from kvcap.policies.base import Logits
from kvcap.runtime.backends.pytorch.runtime import Runtime

TOKENS = 96


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Runtime:
    return Runtime.from_pretrained(folder, budget_tokens=TOKENS, device="cpu")


@pytest.fixture
def text(runtime: Runtime) -> Text:
    return generated(runtime, "prose", 0, TOKENS, "true")


def observed(n: int, w: int = 1, seed: int = 0, heads: int = 4, **changes: Any) -> Observation:
    """Two KV heads of four numbers, and `heads` query heads."""
    rng = torch.Generator().manual_seed(seed)
    given: dict[str, Any] = {
        "keys": torch.randn(1, 2, n, 4, generator=rng),
        "values": torch.randn(1, 2, n, 4, generator=rng),
        "positions": torch.arange(n).expand(1, 2, n),
        "num_tokens": n,
        "budget": n,
        "queries": torch.randn(1, heads, w, 4, generator=rng),
        "output_projection": torch.randn(2, heads // 2, 4, 6, generator=rng),
    }
    return Observation(**{**given, **changes})


# KeyDiff


def plain_ranks(row: list[float]) -> list[float]:
    return [
        sum(y < x for y in row) + (1 + sum(y == x for y in row)) / 2  # 1 + those below + half ties
        for x in row
    ]


def test_ranks_and_their_correlation_are_those_of_loops():
    x = torch.tensor([[3.0, 1.0, 1.0, -2.0, 5.0], [0.0, 0.0, 0.0, 1.0, 2.0]])
    y = torch.tensor([[1.0, 2.0, 3.0, 4.0, 4.0], [9.0, 8.0, 7.0, 6.0, 5.0]])
    for rows in (x, y):
        expected = [plain_ranks(row) for row in rows.tolist()]
        assert correlation.ranks(rows).tolist() == expected
    correlations = correlation.spearman(x, y)
    for rho, a, b in zip(correlations.tolist(), x.tolist(), y.tolist(), strict=True):
        p, q = (torch.tensor(plain_ranks(row), dtype=torch.float64) for row in (a, b))
        assert rho == pytest.approx(float(torch.corrcoef(torch.stack((p, q)))[0, 1]))
    rising = torch.tensor([[1.0, 10.0, 11.0]])
    assert correlation.spearman(rising, rising.exp()).item() == pytest.approx(1)
    assert correlation.spearman(rising, -rising).item() == pytest.approx(-1)


@pytest.mark.parametrize("row", [[1.0], [2.0, 2.0, 2.0]])
def test_no_order_has_no_correlation(row):
    assert correlation.spearman(torch.tensor([row]), torch.rand(1, len(row))).isnan().all()


@pytest.mark.parametrize("window", [None, 3])
def test_attention_received_is_summed_over_the_queries_asked_for(window):
    whole = observed(300, 300)  # several pieces
    received = correlation.received(whole, window)
    rows = whole.attention[0, :, :, -(window or 300) :]
    torch.testing.assert_close(received, rows.sum((1, 2)))


def test_points_along_the_main_axes():
    keys = torch.tensor([[0.0, 0.0, 7.0], [4.0, 0.0, 7.0], [0.0, 2.0, 7.0], [4.0, 2.0, 7.0]])
    points, shares = pca.project(keys.double())
    assert points.tolist() == [[-2, -1], [2, -1], [-2, 1], [2, 1]]
    assert shares.tolist() == pytest.approx([0.8, 0.2])


@pytest.mark.parametrize("keys", [torch.ones(1, 3), torch.ones(5, 3), torch.zeros(2, 1)])
def test_keys_that_do_not_vary_lie_at_one_point(keys):
    points, shares = pca.project(keys.double())
    assert points.shape == (len(keys), 2)
    assert not points.any()
    assert not shares.any()
    assert math.isnan(pca.spread(keys.double(), torch.ones(len(keys), dtype=torch.bool)))


def test_the_spread_of_kept_keys():
    keys = torch.tensor([[0.0], [1.0], [2.0], [3.0]]).double()  # variance 1.25
    assert pca.spread(keys, torch.tensor([True, False, False, True])) == pytest.approx(2.25 / 1.25)


def test_the_volume_of_keys():
    assert volume.log_volume(torch.tensor([[2.0, 0, 0], [0, 3.0, 0]])) == pytest.approx(
        math.log(36)
    )
    few, many = torch.randn(3, 5).double(), torch.randn(9, 5).double()
    assert volume.log_volume(few) == pytest.approx(float((few @ few.T).logdet()))
    assert volume.log_volume(many) == pytest.approx(float((many.T @ many).logdet()))
    assert volume.log_volume(torch.tensor([[3.0, 4.0]])) == pytest.approx(math.log(25))
    for flat in (torch.ones(4, 3), torch.zeros(1, 3), torch.empty(0, 3)):
        assert volume.log_volume(flat) == -math.inf


# CriticalKV


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])])
def test_moves_are_those_of_loops_over_heads(sinks):
    after = observed(6, rule=Logits(sinks=sinks))
    stays = torch.tensor([[True, False, True, False, False], [False, True, True, True, False]])
    moved, size = perturbation.moves(after, stays)
    for h in range(4):
        k = h // 2
        z = (after.keys[0, k] @ after.queries[0, h, 0]).double()
        sink = -math.inf if sinks is None else float(sinks[h])
        outputs = []
        for chosen in (range(6), [*stays[k].nonzero().flatten().tolist(), 5]):
            weights = [math.exp(z[j]) for j in chosen]
            total = sum(weights) + math.exp(sink)
            out = sum(
                w / total * after.values[0, k, j].double()
                for w, j in zip(weights, chosen, strict=True)
            )
            outputs.append(out @ after.output_projection[k, h % 2].double())
        assert float(moved[h]) == pytest.approx(float((outputs[0] - outputs[1]).abs().sum()), 1e-4)
        assert float(size[h]) == pytest.approx(float(outputs[1].abs().sum()), 1e-4)


def test_what_keeps_everything_moves_nothing():
    moved, _ = perturbation.moves(observed(5), torch.ones(2, 4, dtype=torch.bool))
    assert moved.abs().max() < 1e-5
    alone, _ = perturbation.moves(observed(1), torch.ones(2, 0, dtype=torch.bool))
    assert not alone.any()


def test_shares_of_heads_and_means():
    options = AnalysisOptions(policies=("a", "b"), budgets=(8,))
    change = torch.tensor([[[[[1.0, 4.0]]], [[[2.0, 1.0]]]], [[[[1.0, 0.0]]], [[[3.0, 1.0]]]]])
    one = {"layers": [0], "size": torch.tensor([[4.0, 4.0]]), "change": change, "growth": change}
    figures = analyze.plain(perturbation.gather([one, one], options))
    assert figures["once"]["ratio_by_head"] == [[[2.0, 0.25]]]
    assert figures["once"]["lower"] == [0.5]
    assert figures["blocks"]["ratio_by_head"] == [[[3.0, None]]]  # one head loses nothing
    assert figures["blocks"]["lower"] == [0.0]
    assert figures["once"]["relative"] == [[0.625], [0.375]]
    assert figures["once"]["relative_by_layer"] == [[[0.625]], [[0.375]]]


# DropKV


def test_the_bound_of_the_theorem():
    ratio = {("random", 10): torch.tensor([[1.0, 2.0, torch.nan], [1.5, 3.0, 1.0]])}
    one = {
        "layers": [0, 1],
        "cone": torch.tensor([[0.5, -0.1], [0.15, 0.25]]).double(),
        "epsilon": torch.tensor([[0.01, 0.01], [0.02, 0.2]]),
        "evicted": 10,
        "ratio": ratio,
    }
    figures = cone.gather([one], AnalysisOptions(budgets=(1,)))
    bounds = [1 / (0.5 * 0.99 * 0.9), 1 / (0.15 * 0.98 * 0.8)]  # of the others none
    assert figures["bound_finite"] == 0.5
    assert figures["bound"]["min"] == pytest.approx(bounds[0], 1e-5)
    assert figures["bound"]["max"] == pytest.approx(bounds[1], 1e-5)
    assert figures["cone_above"] == {
        "0.0": 0.75,
        "0.05": 0.75,
        "0.1": 0.75,
        "0.2": 0.5,
        "0.3": 0.25,
        "0.5": 0.0,
    }
    assert figures["cone_by_layer"].tolist() == [0.5, 1.0]
    (row,) = figures["ratio"]
    assert row["records"] == 2
    assert row["dropkv"]["max"] == 2
    assert row["attention"]["max"] == 3
    assert cone.quantiles(torch.empty(0)) == dict.fromkeys(cone.QUANTILES)


# OBCache


def test_growing_windows_end_with_the_whole_text():
    whole = observed(150, 150)
    steps = [x.clone() for x in oracle.growing(whole, 149, [1, 8])]
    for window, scores in zip((1, 8, None), steps, strict=True):
        expected = torch.stack([*saliency.scores(until(whole, 149, window)).values()])
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def test_reserved_tokens_come_first():
    score = torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0]]])
    truth = torch.tensor([[[0.0, 9.0, 0.0, 0.0, 8.0]]])
    assert saliency.recall(score, truth, 2) == 0.5
    assert saliency.recall(oracle.with_recents(score, 1), truth, 2) == 0.5
    assert score[0, 0, -1] == 1  # untouched
    assert oracle.with_recents(score, 2).topk(2).indices.sort().values.tolist() == [[[3, 4]]]


# CaliDrop


def test_recomputed_steps_are_those_of_a_loop():
    unit = torch.nn.functional.normalize(torch.randn(3, 40, 2), dim=-1)
    shares = queries.recompute_share(unit, 0.7)
    for head, share in zip(unit, shares.tolist(), strict=True):
        remembered, count = head[0], 0
        for query in head[1:]:
            if float(query @ remembered) < 0.7:
                remembered, count = query, count + 1
        assert share == pytest.approx(count / 39)
    assert queries.recompute_share(unit[:, :1], 0.7).tolist() == [0, 0, 0]
    same = unit[:, :1].expand(3, 9, 2)
    assert not queries.recompute_share(same, 0.9).any()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])])
def test_calibration_by_the_same_query_is_exact(sinks):
    """As the paper says of Figure 1."""
    whole, stays = observed(9, 9, rule=Logits(sinks=sinks)), torch.rand(2, 8) > 0.5
    plain, calibrated = queries.loss(whole, stays, 9, 0).tolist()
    assert plain > 0.01
    assert calibrated < 1e-5
    assert queries.loss(whole, torch.ones(2, 8, dtype=torch.bool), 9, 3).max() < 1e-5


# Texts


def test_pieces_put_together_are_the_text(tokenizer):
    passage = "Two  spaces,\n\ta tab, é, 漢字, and 🙂🙃 at the end.\n"
    parts = pieces(tokenizer, passage)
    assert "".join(parts) == passage
    assert len(parts) == len(tokenizer(passage, add_special_tokens=False)["input_ids"])


def test_what_is_kept_is_what_the_policy_says(text):
    expected = [*range(4), *range(TOKENS - 36, TOKENS)]
    for block in (16, TOKENS):
        for layer in text.kept("streaming_llm", 40, block):
            assert [row.nonzero().flatten().tolist() for row in layer] == [expected] * 2
    for layer in text.kept("snapkv+adakv", 48, 16, {"window": 8}):  # heads hold unequally many
        assert int(layer.sum()) == 2 * 48
    sets = text.kept("keydiff", 40, 16, tokens=TOKENS - 1)
    assert [one.shape for one in sets] == [(2, TOKENS - 1)] * 2


def test_texts_and_policies_that_cannot_be_analysed(runtime, text):
    with pytest.raises(ValueError, match="full never evicts"):
        text.kept("full", 40, 16)
    with pytest.raises(ValueError, match="holds all of prose 0"):
        text.kept("keydiff", TOKENS, 16)
    with pytest.raises(PolicyError, match="pins 20 sinks"):
        text.kept("streaming_llm", 8, 16, {"sinks": 20})
    with pytest.raises(ValueError, match=r"letter: .* at least 64 are needed"):
        Text.of(runtime, "letter", "Too short.", 100)
    for changes in ({"layer": 2}, {"head": 2}):
        options = AnalysisOptions(policies=("keydiff",), budgets=(40,), **changes)
        with pytest.raises(ValueError, match=f"--{next(iter(changes))} 2"):
            pca.measure(text, options)


def test_generated_texts_are_the_same_again(runtime):
    for kind in ("prose", "conversation"):
        first, again = (generated(runtime, kind, 3, 128) for _ in range(2))
        assert len(first) == 128
        assert torch.equal(first.ids, again.ids)
        assert not torch.equal(first.ids, generated(runtime, kind, 4, 128).ids)


FAMILY = ["gpt_oss", "gemma3n", "glm", "qwen3_next", "deepseek_v3"]
"""Sink logits, shared and sliding slots, rotated by neighbours, recurrent states, latents."""


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("family", FAMILY)
def test_every_analysis_of_every_kind_of_model(family, tmp_path, monkeypatch):
    if OLD and family in STATES:
        pytest.skip("transformers 4.57 keeps no recurrent states in a cache")
    monkeypatch.setattr(analyze, "_write", lambda *_: None)  # pictures take long
    model = model_of(family)
    ids = torch.randint(3, 90, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    text = Text(model, family, "random", ids, [str(i) for i in ids])
    documents = analyze.run(
        ["all"], [lambda: text], AnalysisOptions(block_size=16, budgets=(40,)), tmp_path
    )
    assert set(documents) == set(analyses())
    (change,) = documents["perturbation"]["figures"]["once"]["relative"][0]
    assert change > 0


# The command


def command(folder: Path, *words: str) -> list[str]:
    return [
        *argv("analyze {}", folder),
        *words,
        *argv("--tokens {} --block-size 16 --device cpu", TOKENS),
    ]


def test_the_command_writes_a_picture_and_figures_for_each(folder, tmp_path, capsys):
    words = ["all", "--budgets", "40", "--texts", "2", "--out", str(tmp_path), "--seed", "7"]
    assert cli.run(command(folder, *words)) == 0
    output = capsys.readouterr().out
    assert len(analyses()) == 8
    for name, analysis in analyses().items():
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        document = json.loads((tmp_path / f"{name}.json").read_text())
        assert document["read"] in output
        assert len([x for x in document["read"].split(". ") if x]) == 2  # sentences
        assert document["tokens"] == [TOKENS] * min(2, analysis.TEXTS or 2)
        assert {"model", "versions", "device", "figures", "paper"} <= document.keys()
    runs = json.loads((tmp_path / "kept.json").read_text())["figures"]["runs"]
    assert [sum(row) for row in runs[0]["heads"]] == [2 * 40] * 2


def test_a_file_is_read_with_the_options_given(folder, tmp_path, kvcap):
    file = tmp_path / "letter.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    words = argv(
        "kept pca -f {} --policies snapkv,tova --policy-option window=4 --budgets 10,20 "
        "--layer 1 --head 1 --out {}",
        file,
        tmp_path / "new" / "out",
    )
    stays, points = kvcap.document(*command(folder, *words))
    assert "".join(stays["figures"]["pieces"]) in file.read_text()
    shown = [(run["policy"], run["budget"]) for run in stays["figures"]["runs"]]
    assert shown == [("snapkv", 10), ("snapkv", 20), ("tova", 10), ("tova", 20)]
    assert (points["figures"]["layer"], points["figures"]["head"]) == (1, 1)
    assert [len(one) for one in points["figures"]["kept"].values()] == [10, 10]
    assert points["policy_options"] == {"window": 4}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "no analysis is called 'nothing'"),
        (["corelation"], "did you mean 'correlation'?"),
        (["perturbation", "--policies", "snapkv"], "compares two policies"),
        (["kept", "--policies", "full"], "full never evicts"),
        (["kept", "--policies", "snapvk"], "snapvk"),
        (["kept", "--budgets", "x"], "give whole numbers"),
        (["kept", "--policies", "keydiff", "--policy-option", "wnidow=3"], "wnidow"),
        (["kept", "-f", "/nowhere"], "cannot read '/nowhere'"),
        (["kept", "--tokens", "64", "-f", "EMPTY"], "at least 64 are needed"),
        (["kept", "--out", "EMPTY"], "is a file, not a folder"),
    ],
)
def test_what_cannot_be_analysed_is_refused_by_name(words, says, folder, tmp_path, kvcap):
    empty = tmp_path / "empty.txt"
    empty.touch()
    given = [str(empty) if word == "EMPTY" else word for word in words]
    given += [] if "--out" in words else ["--out", str(tmp_path / "out")]
    assert says in kvcap.refused(*command(folder, *given))
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_it_is_refused_by_name(folder, capsys, monkeypatch):
    monkeypatch.setattr(analyze, "find_spec", lambda _: None)
    assert cli.run(command(folder, "all")) != 0
    assert "pip install '.[plot]'" in capsys.readouterr().err
