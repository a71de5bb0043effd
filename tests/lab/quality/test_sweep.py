"""Tasks, sweeps and tables, on a small random model that knows pocket's tokens."""

from __future__ import annotations

import copy
import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import tiny_config, tiny_model
from make import argv
from sweeps import small_sweep

from kvcap import cli
from kvcap.evals.quality.answering import answer, losses
from kvcap.evals.quality.prompts import Sample, prompt_ids, prompt_parts
from kvcap.evals.quality.scores import UNITS, bootstrap, cell_score, wilson
from kvcap.evals.quality.text import fit, has_word, number_facts
from kvcap.lab.eviction_time import eviction_ms
from kvcap.lab.quality import sweep as runner
from kvcap.lab.quality.cells import as_options, read_cells
from kvcap.lab.quality.intervals import interval
from kvcap.lab.quality.measuring import batches, new_cache
from kvcap.lab.quality.sweep import Sweep, run
from kvcap.lab.quality.table import results
from kvcap.lab.quality.tasks import load_task, make_samples, spelled_out, tasks
from kvcap.lab.quality.workers import Here
from kvcap.lab.quality.workers.crew import Crew
from kvcap.policies import PolicyError, policies
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.errors import ModelNotFound, UnsupportedModel
from kvcap.runtime.planning.plan import MemoryPlan


@pytest.fixture
def sweep(folder: Path) -> Sweep:
    return small_sweep(folder, lengths=(128,), samples=3)


def test_needles_are_spread_over_the_text(tokenizer):
    samples = make_samples("niah_single", tokenizer, 1024, 10, seed=0)
    depths = sorted(s.context.index(s.answers[0]) / len(s.context) for s in samples)
    assert all(i / 10 - 0.1 < depth < i / 10 + 0.2 for i, depth in enumerate(depths))


@pytest.mark.parametrize("length", range(5, 40))
def test_fit_is_exact_at_every_length(length):
    words = fit(lambda s: 5 + len(" ".join(s).split()), iter(["one two three four."] * 20), length)
    assert 5 + len(" ".join(words).split()) == length


def test_facts_have_distinct_keys_and_numbers():
    facts = number_facts(Random(0), 200)
    assert len({fact.key.lower() for fact in facts}) == len({fact.value for fact in facts}) == 200
    assert all(fact.value.isdigit() for fact in facts)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4821", True), ("It is 4821.", True), ("14821", False), ("48210", False), ("", False)],
)
def test_a_word_counts_only_as_a_whole(text, counts):
    assert has_word(text, "4821") is counts


# Rounded to 4 places: R's prop.test(x, n, correct=FALSE).
@pytest.mark.parametrize(
    ("right", "samples", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_interval(right, samples, low, high):
    assert wilson(right, samples) == pytest.approx((low, high), abs=6e-5)


def test_intervals_of_scores_that_are_not_right_or_wrong():
    share, perplexity = UNITS["share"], UNITS["perplexity"]
    assert interval([1, 0, 1.0], share) == wilson(2, 3)
    scores = [0.5, 0.25, 1, 0, 0.75] * 20
    low, high = interval(scores, share)
    # The normal approximation: 0.5 ± 1.96 · 0.3536 / 10.
    assert (low, high) == pytest.approx((0.5 - 0.0693, 0.5 + 0.0693), abs=0.01)
    assert interval(scores, share) == (low, high)  # the same scores, the same interval
    assert interval(scores, perplexity) == (math.exp(low), math.exp(high))
    assert interval([0, 1, 1], perplexity) != wilson(2, 3)
    assert cell_score([1.0, 3.0], perplexity) == math.exp(2)
    assert bootstrap([2.0]) == (2.0, 2.0)


def test_a_batch_answers_like_single_prompts(folder, tokenizer):
    size, end = len(tokenizer), tokenizer.eos_token_id
    model = tiny_model("llama", vocab_size=size, eos_token_id=end)
    samples = make_samples("niah_single", tokenizer, 96, 3, seed=0)
    ids = torch.tensor([prompt_ids(tokenizer, sample) for sample in samples])

    def replies(rows: torch.Tensor) -> list[list[int]]:
        return answer(model, BudgetCache(model.config, 32, 16, "keydiff"), [rows], 6, [end])

    assert replies(ids) == [replies(row[None])[0] for row in ids]


def test_uncapped_answers_are_those_of_generate(tokenizer):
    size, end = len(tokenizer), tokenizer.eos_token_id
    sample = make_samples("niah_single", tokenizer, 96, 1, seed=0)[0]
    ids = torch.tensor([prompt_ids(tokenizer, sample)])
    stock = tiny_model("llama", "eager", vocab_size=size, eos_token_id=end)
    whole = torch.ones_like(ids)  # no padding
    expected = stock.generate(ids, attention_mask=whole, max_new_tokens=6, do_sample=False)[0, 96:]
    model = tiny_model("llama", vocab_size=size, eos_token_id=end)
    cache = BudgetCache(model.config, 96 + 6, 16, "full", positions="true")
    assert answer(model, cache, [ids], 6, [end])[0] == [t for t in expected.tolist() if t != end]


@pytest.mark.parametrize("template", [None, "{{ messages[0].content | trim }} [/INST]"])
def test_a_question_is_split_off_where_it_begins(template, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template or tokenizer.chat_template
    sample = make_samples("niah_single", tokenizer, 300, 1, seed=0)[0]
    sample = replace(sample, opening=f"{sample.question} It is")
    context, question = prompt_parts(tokenizer, sample, "after")
    assert context + question == prompt_ids(tokenizer, sample)
    assert sample.question not in tokenizer.decode(context)
    assert tokenizer.decode(question).lstrip().startswith(sample.question)
    assert tokenizer.decode(question).endswith(sample.opening)
    assert prompt_parts(tokenizer, sample, "aware") == ([*context, *question],)


def test_a_question_that_the_template_changes_is_refused(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages[0].content | upper }}"
    sample = make_samples("niah_single", tokenizer, 300, 1, seed=0)[0]
    with pytest.raises(ValueError, match="--question after"):
        prompt_parts(tokenizer, sample, "after")


@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
def test_a_question_that_comes_after_meets_an_evicted_context(policy, tokenizer):
    model = tiny_model("llama", vocab_size=len(tokenizer))
    ids = torch.arange(5, 5 + 90)[None]
    context, question = ids[:, :70], ids[:, 70:]  # 4 blocks of 16 and 6 tokens; then 16 and 4

    def reply(*parts: torch.Tensor) -> list[int]:
        return answer(model, BudgetCache(model.config, 40, 16, policy), parts, 8, [])[0]

    cache = BudgetCache(model.config, 40, 16, policy)
    loop = BlockLoop(model, cache)
    blocks = [*context.split(16, dim=1), *question.split(16, dim=1)]
    logits = [loop.read(block) for block in blocks]
    expected = [int(logits[-1].argmax())]
    while len(expected) < 8:
        expected.append(int(loop.read(torch.tensor([expected[-1:]])).argmax()))
    assert reply(context, question) == expected
    assert reply(ids) != expected

    held = BudgetCache(model.config, 40, 16, policy)
    BlockLoop(model, held).prefill(context)
    assert held.held == 40


def test_uncapped_answers_do_not_depend_on_when_the_question_comes(folder, tmp_path):
    sizes = {"lengths": (128, 200), "samples": 3, "questions": ("aware", "after")}
    sweep = small_sweep(folder, policies=("full",), **sizes)
    texts: dict[Any, list[str]] = {}

    def score(sample: Sample, reply: str) -> float:
        return float(texts.setdefault(sample, []).append(reply) is None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_task("niah_single"), "score", score)
        cells = run(sweep, tmp_path)
    assert [(c.setting.length, c.setting.question) for c in cells] == [
        (128, "aware"),
        (128, "after"),
        (200, "aware"),
        (200, "after"),
    ]
    assert len(texts) == 6
    assert all(aware == after != "" for aware, after in texts.values())
    table = (tmp_path / "results.md").read_text()
    assert "128 tokens, question-aware, " in table
    assert "200 tokens, context-only, " in table


def test_prompts_are_read_at_once_where_their_parts_are_of_equal_lengths():
    prompts = [([1] * n, [2] * q) for n, q in ((5, 3), (6, 3), (5, 3), (5, 4), (5, 3))]
    assert list(batches(prompts, 2)) == [[0, 2], [4], [1], [3]]


@pytest.mark.parametrize(("policy", "block"), [("full", 16), ("keydiff", 1), ("snapkv", 16)])
def test_the_loss_of_a_text_is_that_of_its_tokens(policy, block):
    model = tiny_model("llama")
    ids = torch.stack([torch.arange(3, 60), torch.arange(60, 3, -1)])
    size = 64 if policy == "full" else 24
    by_cache = losses(model, BudgetCache(model.config, size, block, policy), ids)
    assert by_cache.shape == (2, 56)
    if policy == "full":
        stock = tiny_model("llama", "eager")
        logits = stock(ids).logits[:, :-1]
    else:
        logits = read_singly(model, policy, size, block, ids)
    expected = -logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert torch.allclose(by_cache, expected, atol=1e-4)


@pytest.mark.parametrize("length", [37, 48])
@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
def test_texts_read_at_once_have_the_losses_of_each_alone(policy, length):
    model = tiny_model("llama")
    ids = torch.randint(3, 60, (3, length), generator=torch.Generator().manual_seed(0))
    caches = [BudgetCache(model.config, 24, 16, policy) for _ in range(4)]
    together = losses(model, caches[0], ids)
    alone = [losses(model, cache, row) for cache, row in zip(caches[1:], ids.split(1), strict=True)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "full"])
def test_text_that_is_only_read_leaves_the_losses_behind_it(policy):
    model = tiny_model("llama")
    ids = torch.randint(
        model.config.vocab_size, (2, 90), generator=torch.Generator().manual_seed(3)
    )
    size = 90 if policy == "full" else 24
    whole, part = (
        losses(model, BudgetCache(model.config, size, 16, policy), ids, start) for start in (0, 48)
    )
    assert part.shape == (2, 41)
    torch.testing.assert_close(part, whole[:, 48:])


def test_losses_never_hold_a_block_of_several_texts_in_float32(monkeypatch):
    seen: list[tuple[tuple[int, ...], int]] = []

    def noted(logits: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((tuple(logits.shape), logits.stride(-1)))
        return torch.nn.functional.cross_entropy(logits, ids, **options)

    monkeypatch.setattr("kvcap.evals.quality.answering.cross_entropy", noted)
    model = tiny_model("llama")
    vocabulary = model.config.vocab_size
    losses(model, BudgetCache(model.config, 24, 16), torch.full((3, 21), 5))
    assert seen == [((16, vocabulary), 1)] * 3 + [((4, vocabulary), 1)] * 3


def read_singly(model: Any, policy: str, size: int, block: int, ids: torch.Tensor) -> torch.Tensor:
    """Return logits [B, T - 1, V] of every token, each read anew after whole blocks."""

    def logits(stop: int) -> torch.Tensor:
        loop = BlockLoop(model, BudgetCache(model.config, size, block, policy))
        return loop.prefill(ids[:, :stop])

    return torch.stack([logits(stop) for stop in range(1, ids.shape[1])], dim=1)


def test_a_reply_ends_where_the_model_ends_it(tokenizer):
    model = tiny_model("llama", vocab_size=len(tokenizer))
    ids = torch.tensor([[5, 6, 7, 8]])
    tokens = answer(model, BudgetCache(model.config, 16, 8), [ids], 6, [])[0]
    assert len(tokens) == 6
    stopped = answer(model, BudgetCache(model.config, 16, 8), [ids], 6, [tokens[2], 1])[0]
    assert stopped == tokens[: tokens.index(tokens[2])]


def test_a_sweep_writes_every_cell_and_a_table(sweep, tmp_path):
    cells = run(sweep, tmp_path)
    assert [(c.setting.policy, c.setting.positions, c.setting.budget) for c in cells] == [
        ("keydiff", "compact", 24),
        ("keydiff", "true", 24),
        ("keydiff", "compact", 48),
        ("keydiff", "true", 48),
        ("full", "true", None),
    ]
    rows = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    named = {"task", "policy", "positions", "budget", "length", "samples", "score", "ci_low"}
    named |= {"ci_high", "kv_bytes", "seed", "block_size", "model", "versions", "device", "seconds"}
    assert all(named <= set(row) for row in rows)
    assert all(len(c.scores or ()) == 3 and c.unit == "share" for c in cells)
    assert all(c.score == sum(c.scores or ()) / 3 for c in cells)
    for cell in cells:
        cache = new_cache(tiny_config("llama"), cell.setting).allocate(1, torch.float32, "cpu")
        assert cell.kv_bytes == cache.nbytes
    assert read_cells(tmp_path / "cells.jsonl") == cells
    text = (tmp_path / "results.md").read_text()
    assert text == results(cells)
    assert "| keydiff | compact   | 0.00 (0.00–0.56) | 0.00 (0.00–0.56) |" in text
    header = next(line for line in text.splitlines() if line.startswith("| policy"))
    columns = [column.strip() for column in header.strip("|").split("|")]
    assert columns == [
        "policy",
        "positions",
        "24",
        "48",
        "uncapped",
        "ms per block",
        "extra memory",
    ]


def test_a_base_model_is_asked_in_plain_text_and_the_command_says_so(
    folder, tokenizer, tmp_path, capsys, monkeypatch
):
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    (base / "chat_template.jinja").unlink(missing_ok=True)
    plain.save_pretrained(base)
    limits: list[int] = []

    def noted(
        model: Any, cache: Any, parts: Any, limit: int, stops: Any, recall: Any
    ) -> list[list[int]]:
        limits.append(limit)
        return answer(model, cache, parts, 1, stops, recall)

    monkeypatch.setattr("kvcap.lab.quality.measuring.answer", noted)
    out = tmp_path / "out"
    command = argv(
        "eval {} --tasks niah_single_1,perplexity --policies keydiff --budgets 24 "
        "--lengths 300 --samples 2 --block-size 16 --positions true --device cpu --out {}",
        base,
        out,
    )
    assert cli.run(command) == 0
    assert f"{base} has no chat template" in capsys.readouterr().err.replace("\n", "")
    cells = {cell.setting.task: cell for cell in read_cells(out / "cells.jsonl")}
    assert cells["niah_single_1"].plain
    assert not cells["perplexity"].plain
    assert (out / "results.md").read_text().count("without a chat template") == 1
    assert load_task("niah_single_1").MAX_NEW_TOKENS == 128
    digits = len(tokenizer(" 1234567", add_special_tokens=False)["input_ids"])
    assert set(limits) == {16 + 2 * digits}
    assert cli.run([*command, "--max-new-tokens", "3", "--tasks", "niah_single_1"]) == 0
    assert limits[-1] == 3


@pytest.mark.parametrize("below", [[], ["folder"]])
def test_results_cannot_go_below_a_file(below, tmp_path, kvcap):
    file = tmp_path / "file"
    file.touch()
    assert f"{str(file)!r} is a file, not a folder" in kvcap.refused(
        "eval", "pocket", "--out", str(file.joinpath(*below))
    )


def test_a_cell_says_what_eviction_costs(sweep, tmp_path):
    policies = ("keydiff", "h2o", "snapkv", "full")
    changes = {"policies": policies, "budgets": (40,), "positions": ("true",), "samples": 1}
    cells = {cell.setting.policy: cell for cell in run(replace(sweep, **changes), tmp_path)}
    for name in policies[:-1]:
        took = cells[name].scoring_ms
        assert 0 < took["p20"] <= took["p50"] <= took["p80"]
        assert cells[name].extra_bytes == cells[name].kv_bytes - cells["keydiff"].kv_bytes
    assert cells["full"].scoring_ms is None
    extra = {name: cells[name].extra_bytes for name in policies}
    assert extra["keydiff"] == extra["full"] == 0
    assert extra["h2o"] == 2 * 2 * (40 + 16) * 4  # layers, KV heads, slots, a float32 each
    assert (extra["snapkv"] or 0) >= 2 * 4 * 32 * 16 * 4  # layers, heads, queries, size, float32
    assert f"| {extra['h2o']} B " in results(cells.values())


def test_eviction_is_timed_where_nobody_else_computes_on_the_gpu(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(Crew, "start", lambda _, job, device: Here(job))
    changes = {"policies": ("keydiff",), "budgets": (40,), "positions": ("true",), "samples": 1}
    one = replace(sweep, **changes, device=None)
    times = [
        run(one, tmp_path / f"{workers}", crew=Crew(workers=workers))[0].scoring_ms
        for workers in (1, 2)
    ]
    assert times[0] is not None
    assert times[1] is None


def test_threads_make_the_samples_that_one_makes(tokenizer):
    made = [make_samples("niah_single", tokenizer, 120, 7, 3, threads=n) for n in (1, 4)]
    assert made[0] == made[1]
    assert len(made[0]) == 7
    assert make_samples("niah_single", tokenizer, 120, 2, 3) == made[0][:2]
    assert make_samples("niah_single", tokenizer, 120, 7, 4) != made[0]


def test_every_measured_block_evicts():
    model = tiny_model("llama")
    cache = BudgetCache(model.config, 40, 16, "keydiff")
    times = eviction_ms(model, cache, torch.arange(3, 80)[None], blocks=3)
    assert len(times) == 3
    assert cache.held == 40
    assert cache.seen == 16 * (3 + 4 + 3)  # to fill the cache, to warm up, measured


def test_all_is_every_policy_and_ruler_every_family_of_rulers_once():
    named = runner.spelled_out(("snapkv", "all", "keydiff"))
    assert sorted(named) == sorted(policies())
    assert named[0] == "snapkv"
    named = spelled_out(("vt", "ruler", "niah_single"))
    assert named[0] == "vt"
    assert len(named) == len(set(named)) == 12
    assert all(load_task(name) for name in named)


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, "compact"), ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "true")],
)
def test_positions_are_those_of_a_chat_unless_others_are_asked_for(more, expected, sweep):
    config = tiny_config("llama", **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that answers will suffer at true positions
        chat = MemoryPlan.of(config, budget_tokens=24, block_size=16).positions
        unsaid = replace(sweep, positions=())
        settings = unsaid.settings("float32", runner.usual_positions(unsaid, config))
    assert chat == expected
    assert {s.positions for s in settings if s.policy == "keydiff"} == {chat}


def test_sinks_are_pinned_in_every_task(sweep):
    config = tiny_config("llama")
    every = replace(sweep, tasks=tuple(tasks()), options={"sink_tokens": 5})
    settings = every.settings("float32")
    assert {setting.task for setting in settings} == set(tasks())
    for setting in settings:
        eviction = new_cache(config, setting).eviction
        assert eviction.sink_tokens == (5 if eviction.policy.evicts else 0)


def test_sinks_change_what_a_text_loses(folder, tmp_path):
    def scores(name: str, *sinks: str) -> list[float]:
        command = [
            *argv(
                "eval {} --tasks perplexity --policies random,full --budgets 24 --lengths 90 "
                "--samples 2 --block-size 16 --positions true --device cpu",
                folder,
            ),
            *sinks,
        ]
        assert cli.run([*command, "--out", str(tmp_path / name)]) == 0
        return [cell.score for cell in read_cells(tmp_path / name / "cells.jsonl")]

    papers, same = scores("papers"), scores("none", "--sink-tokens", "0")
    pinned = scores("pinned", "--sink-tokens", "8")
    assert papers == same
    assert papers[0] != pinned[0]
    assert papers[1] == pinned[1]  # nothing is evicted


def test_options_go_to_the_policies_that_have_them(sweep, tmp_path):
    changes = {"policies": ("keydiff", "snapkv", "full"), "budgets": (24,), "samples": 1}
    changed = replace(sweep, **changes, options={"window": 4, "sink_tokens": 2})
    cells = run(changed, tmp_path)
    assert [cell.setting.options for cell in cells[::2]] == [
        (("sink_tokens", 2),),
        (("sink_tokens", 2), ("window", 4)),
        (),
    ]
    assert read_cells(tmp_path / "cells.jsonl") == cells
    assert "| snapkv, sink_tokens=2, window=4 | compact " in (tmp_path / "results.md").read_text()
    cache = new_cache(tiny_config("llama"), cells[2].setting)
    assert cache.eviction.policy.options()["window"] == 4
    again: list[int] = []
    run(replace(changed, options={"window": 4}), tmp_path, lambda done, *_: again.append(done))
    assert again[0] == 1  # only `full` is the same


@pytest.mark.parametrize("options", [{"a": 1.5, "table": "x.json"}, {"b": [1, [2]], "a": True}])
def test_options_survive_json(options):
    given = as_options(options)
    hash(given)
    assert as_options(dict(json.loads(json.dumps(given)))) == given


def test_cells_without_the_newer_fields_are_read(sweep, tmp_path):
    run(sweep, tmp_path)
    path = tmp_path / "cells.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        for name in ("options", "scoring_ms", "extra_bytes", "scores", "unit", "question", "depth"):
            del row[name]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cells = run(sweep, tmp_path)
    assert [(c.scoring_ms, c.extra_bytes, c.setting.options) for c in cells] == [
        (None, None, ())
    ] * 5
    assert len(path.read_text().splitlines()) == 5  # none was measured again


def test_an_interrupted_sweep_goes_on_where_it_stopped_unless_by_another_version(
    sweep, tmp_path, monkeypatch
):
    def stop(done: int, *_: Any) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(sweep, tmp_path, stop)
    kept = read_cells(tmp_path / "cells.jsonl")
    assert len(kept) == 2
    assert (tmp_path / "results.md").read_text() == results(kept)
    steps: list[int] = []
    cells = run(sweep, tmp_path, lambda done, *_: steps.append(done))
    assert steps == [2, 3, 4, 5]
    assert cells[:2] == kept
    with monkeypatch.context() as patch:
        patch.setattr(runner.CellJob, "load", pytest.fail)
        assert run(sweep, tmp_path) == cells  # nothing is missing: no model is loaded
    monkeypatch.setattr("kvcap.__version__", "99")
    assert {cell.versions["kvcap"] for cell in run(sweep, tmp_path)} == {"99"}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"policies": ("keydif",)}, PolicyError, "did you mean 'keydiff'"),
        ({"policies": ("streaming_llm",), "budgets": (48, 3)}, PolicyError, "at least 4"),
        ({"tasks": ("niah",)}, ValueError, "no task"),
        ({"positions": ("tru",)}, ValueError, "--positions: .*'compact', 'true'"),
        ({"budgets": (0,)}, ValueError, "--budgets: 0"),
        ({"budgets": ()}, ValueError, "--budgets: give"),
        ({"samples": 0}, ValueError, "--samples: 0"),
        ({"max_new_tokens": 0}, ValueError, "--max-new-tokens: 0"),
        ({"recalls": ()}, ValueError, "--recall: give"),
        ({"questions": ("before",)}, ValueError, "--question: .*'aware', 'after'"),
        ({"depths": (0.5, 2.0)}, ValueError, "--depths: 2.0"),
        ({"tasks": ("niah_single:x.txt",)}, ValueError, "reads no file"),
        ({"options": {"ancor": "mean"}}, ValueError, "did you mean 'anchor'"),
        ({"options": {"anchor": "maen"}}, PolicyError, "one of mean"),
        ({"policies": ("keydiff", "headkv"), "budgets": (48,)}, PolicyError, "needs a table"),
        ({"options": {"anchor": {"mean": 1}}}, ValueError, "option anchor"),
        ({"lengths": (12,)}, ValueError, "too short"),
        ({"model": "no-such-folder"}, ModelNotFound, "no-such-folder"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(sweep, tmp_path, change, error, match):
    changed = Sweep(**{**vars(sweep), **change})
    with pytest.raises(error, match=match):
        run(changed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_compact_positions_are_refused_where_they_are_not_exact(sweep, tokenizer, tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = tiny_config("llama", vocab_size=len(tokenizer), rope_scaling=scaling)
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="positions='true'"):
        run(Sweep(**{**vars(sweep), "model": str(tmp_path / "model")}), tmp_path / "out")


def test_a_broken_line_is_named(sweep, tmp_path):
    (tmp_path / "cells.jsonl").write_text('{"task": "niah_single"}\n')
    with pytest.raises(ValueError, match=r"cells\.jsonl, line 1"):
        run(sweep, tmp_path)
