"""`kvcap eval --agreement`: figures against whole matrices of logits, planted caps, refusals."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny_chat
import torch
from conftest import tiny_model
from make import argv, saved_model
from sweeps import small_sweep
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoTokenizer

import kvcap
from kvcap import cli
from kvcap.evals.quality.scores import bootstrap
from kvcap.lab.quality.agreement import SettingAgreement, compare, measure, table
from kvcap.lab.quality.sweep import Sweep
from kvcap.pocket.facts import facts
from kvcap.pocket.prose import filler
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.models.files import encode

STATED = iter(facts(Random(0), 60))
TEXT = " ".join(f"{s} {next(STATED).statement}" for s in islice(filler(Random(0)), 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture
def sweep(folder: Path) -> Sweep:
    return small_sweep(folder, budgets=(24,), lengths=(100,))


def only(report: Any, policy: str, positions: str = "true") -> SettingAgreement:
    (row,) = (
        row
        for row in report.rows
        if (row.setting.policy, row.setting.positions) == (policy, positions)
    )
    return row


def test_what_is_compared():
    mine, truth = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(0))
    mine[2] = truth[2]
    p, q = truth.log_softmax(-1), mine.log_softmax(-1)
    divergence, same = compare(q, p)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(divergence, expected)
    assert divergence[2] == 0
    assert torch.equal(same, mine.argmax(-1) == truth.argmax(-1))
    assert not same.all()
    assert same[2]


@pytest.mark.parametrize("positions", ["compact", "true"])
def test_figures_are_those_of_whole_matrices(positions, sweep, folder):
    row = only(measure(replace(sweep, positions=(positions,)), TEXT), "keydiff", positions)
    before, ids = encode(AutoTokenizer.from_pretrained(folder), TEXT)
    size = 100 - len(before)
    model = tiny_model(
        "llama", vocab_size=len(AutoTokenizer.from_pretrained(folder)), max_position_embeddings=512
    )
    stock = tiny_model(
        "llama", "eager", vocab_size=model.config.vocab_size, max_position_embeddings=512
    )
    parts: dict[bool, list[Any]] = {False: [], True: []}
    for start in (0, size):
        passage = torch.tensor([[*before, *ids[start : start + size]]])
        with torch.no_grad():
            truth = stock(passage).logits[0].log_softmax(-1)
            with kvcap.cap(model, 24, 16, "keydiff", positions=positions, sink_tokens=0):
                mine = model(passage).logits[0].log_softmax(-1)
        divergence, same = compare(mine, truth)
        for evicted, span in ((False, slice(0, 32)), (True, slice(32, None))):
            parts[evicted].append((divergence[span], same[span]))
    for evicted, part in ((False, row.fits), (True, row.evicted)):
        divergence, same = (torch.cat(x) for x in zip(*parts[evicted], strict=True))
        assert part.tokens == len(same)
        assert part.same == pytest.approx(float(same.float().mean()), abs=0.011)  # one may tie
        assert part.kl == pytest.approx(float(divergence.mean()), abs=1e-4)
    assert sum(part.tokens for part in row.stretches) == 200


def test_uncapped_agrees_exactly_and_what_drops_everything_does_not():
    sizes = {"budgets": (4, 192), "lengths": (400,), "block_size": 64, "positions": ("compact",)}
    sweep = small_sweep("pocket", policies=("full", "random", "keydiff"), **sizes)
    report = measure(sweep, TEXT)
    full = only(report, "full")
    assert full.evicted.tokens == 0
    assert (full.fits.same, full.fits.kl, full.fits.tokens) == (1, 0, report.tokens)
    by = {(row.setting.policy, row.setting.budget): row for row in report.rows}
    dropped, kept = by["random", 4], by["keydiff", 192]
    for row in (dropped, kept):
        assert row.fits.same == 1
        assert row.fits.kl == pytest.approx(0, abs=1e-6)
    assert dropped.fits.tokens == 2 * 64
    assert dropped.evicted.same < kept.evicted.same < 1
    assert dropped.evicted.kl > 2 * kept.evicted.kl > 0
    low, high = kept.evicted.kl_interval
    assert low < kept.evicted.kl < high < dropped.evicted.kl_interval[0]


def test_no_more_than_a_block_of_predictions_is_held(sweep, monkeypatch):
    read, made, most = BlockLoop.read_every, [], 0

    def watched(self: BlockLoop, ids: torch.Tensor) -> torch.Tensor:
        nonlocal most
        gc.collect()
        most = max(most, sum(not there.expired() for there in made))
        logits = read(self, ids)
        made.append(StorageWeakRef(logits.untyped_storage()))
        return logits

    monkeypatch.setattr(BlockLoop, "read_every", watched)
    measure(sweep, TEXT)
    assert len(made) > 20
    assert most <= 2  # the uncapped model's, and those of the setting read last


def test_intervals_weigh_blocks_by_their_tokens():
    draws = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 16, (60,), generator=draws).double()
    rates = torch.rand(60, generator=draws).double() + (sizes > 8)
    low, high = bootstrap(rates.tolist(), sizes.tolist())
    mean = (rates * sizes).sum() / sizes.sum()
    error = ((rates - mean) * sizes).square().sum().sqrt() / sizes.sum()  # of a ratio of sums
    assert low == pytest.approx(float(mean - 1.96 * error), abs=0.03)
    assert high == pytest.approx(float(mean + 1.96 * error), abs=0.03)
    assert not low < float(rates.mean()) < high


def test_passages_keep_to_the_trained_length(sweep):
    report = measure(replace(sweep, lengths=(4096,), samples=50, policies=("keydiff",)), TEXT)
    assert report.length == 512
    assert report.passages == -(-report.tokens // 512) > 1
    assert "passages of up to 512" in table(report)


def test_the_command(sweep, tmp_path, capsys, kvcap):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    out = tmp_path / "out"
    command = argv(
        "eval {} --agreement -f {} --policies keydiff,snapkv --policy-option window=4 "
        "--budgets 24,40 --lengths 100 --samples 2 --positions compact --block-size 16 "
        "--device cpu --kv-dtype int8 --out {}",
        sweep.model,
        file,
        out,
    )
    assert cli.run(command) == 0
    output = capsys.readouterr().out
    assert output == (out / "agreement.md").read_text() + "\n"
    assert "200 tokens in 2 passages of up to 100, blocks of 16, float32" in output
    assert output.count("| snapkv, window=4, int8 slots | compact   | 40 ") == 2
    document = kvcap.document(*command)
    assert document == json.loads((out / "agreement.json").read_text())
    assert [(row["policy"], row["budget"]) for row in document["rows"]] == [
        ("keydiff", 24),
        ("keydiff", 40),
        ("snapkv", 24),
        ("snapkv", 40),
    ]
    assert document["rows"][2]["options"] == {"window": 4}
    assert all(row["kv_dtype"] == "int8" for row in document["rows"])


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        (" \n", "-f {}", "the text is empty"),
        ("A word.", "-f {}", "tokens are read at once, and under a budget of 128 slots"),
        (TEXT, "-f {} --budgets 64,2000", "under a budget of 2,000 slots"),
        (TEXT, "-f {} --lengths 256", "an eviction shows only after 256; give a longer text"),
        (TEXT, "-f {} --lengths 512,1024", "give one of --lengths"),
        (TEXT, "-f {} --policies keydif", "keydiff"),
        (TEXT, "-f {} --workers 2", "--workers"),
        (TEXT, "-f {} -m MODEL", "has no tokenizer"),
        (None, "-f {}", "cannot read"),
        (None, "", "--agreement -f FILE"),
    ],
)
def test_refusals(text, given, message, tmp_path, kvcap):
    file, model = tmp_path / "text.txt", "pocket"
    if text is not None:
        file.write_text(text)
    if given.endswith("-m MODEL"):
        model = tiny_chat.save(tmp_path / "model")
        (tmp_path / "model" / "tokenizer.json").unlink()
    given = given.removesuffix("-m MODEL")
    line = f"eval {{}} --agreement --device cpu --out {{}} --budgets 128 {given}"
    command = argv(line, model, tmp_path / "out", file)
    assert message in kvcap.refused(*command)
    assert not (tmp_path / "out").exists()


def test_a_file_needs_the_option_that_reads_it(kvcap):
    assert "--agreement -f FILE" in kvcap.refused("eval", "pocket", "-f", "text.txt")
