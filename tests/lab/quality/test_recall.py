"""Cells in which evicted text is read again before the question."""

from __future__ import annotations

import pickle

import pytest
import torch

from kvcap.evals.quality import answering
from kvcap.evals.quality.prompts import prompt_parts
from kvcap.lab.quality import measuring
from kvcap.lab.quality.cells import Setting, label
from kvcap.lab.quality.sweep import CellJob, Sweep, run
from kvcap.lab.quality.table import describe
from kvcap.lab.quality.tasks import make_samples
from kvcap.lab.quality.workers.crew import Crew
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime


@pytest.fixture(scope="module")
def runtime():
    return Runtime.from_pretrained("pocket", budget_tokens=256, device="cpu")


def setting_of(task, question, recall, count, length=1500):
    return Setting(
        "pocket",
        "bfloat16",
        task,
        length,
        "streaming_llm",
        "compact",
        256,
        count,
        0,
        128,
        options=(("sink_tokens", 4),),
        question=question,
        recall=recall,
    )


def scores(runtime, task, question, recall, count=3):
    tokenizer = runtime.tokenizer
    samples = make_samples(task, tokenizer, 1500, count, seed=0, depth=0.3)
    prompts = [(sample, prompt_parts(tokenizer, sample, question)) for sample in samples]
    setting = setting_of(task, question, recall, count)
    return measuring.measure(runtime, setting, prompts, batch=2, timed=False).scores


@pytest.mark.parametrize("question", ["aware", "after"])
@pytest.mark.parametrize("task", ["niah_single", "multi_turn_facts"])
def test_what_was_evicted_is_answered_with_recall_alone(runtime, task, question):
    count = 1 if (task, question) == ("niah_single", "after") else 3
    assert sum(scores(runtime, task, question, 0, count)) == 0
    assert sum(scores(runtime, task, question, 64, count)) == count


@pytest.mark.parametrize("question", ["aware", "after"])
def test_a_cell_recalls_the_tokens_that_a_session_does_at_the_same_place(runtime, question):
    (sample,) = make_samples("niah_single", runtime.tokenizer, 700, 1, seed=0, depth=0.3)
    setting = setting_of("niah_single", question, 64, 1, 700)
    recall = answering.recall_as_in_chats(runtime, 64, 256)
    assert recall._meaning() is runtime.meaning
    cache = measuring.new_cache(runtime.model.config, setting)
    prompt = sample, prompt_parts(runtime.tokenizer, sample, question)
    _, split = answering.split_at_question(runtime.tokenizer, recall, prompt)
    parts = [torch.tensor([ids]) for ids in split]
    (rest,) = answering.with_recalled(BlockLoop(runtime.model, cache), recall, parts)
    session = runtime.with_policy_name("streaming_llm", {}).session(seed=0)
    session.set_generation(max_new_tokens=1)
    answer = session.send(sample.messages)
    next(answer)
    assert session.recall.passages == recall.passages != []
    assert session.recall.spans == recall.spans
    assert session.cache.pinned_spans == cache.pinned_spans != []
    assert session.read_ids[: session.turn.prompt_tokens][cache.seen :] == rest[0].tolist()
    answer.close()


def test_a_sweep_has_cells_with_and_without_recall():
    sweep = Sweep(
        ["keydiff", "full"],
        [128, 512],
        tasks=["niah_single", "perplexity"],
        positions=["true"],
        recalls=["off", "auto", "96"],
    )
    rows = [(s.task, s.policy, s.budget, s.recall) for s in sweep.settings("float32")]
    needles = [row[1:] for row in rows if row[0] == "niah_single"]
    assert needles == [
        ("keydiff", 128, 0),
        ("keydiff", 128, 64),
        ("keydiff", 128, 96),
        ("keydiff", 512, 0),
        ("keydiff", 512, 170),
        ("keydiff", 512, 96),
        ("full", None, 0),
    ]
    assert {row[3] for row in rows if row[0] == "perplexity"} == {0}  # nothing is asked
    one = sweep.settings("float32")[1]
    assert label(one) == "keydiff, recall 64"
    assert "keydiff recall 64" in describe(one)
    with pytest.raises(ValueError, match="use auto, off"):
        Sweep(["keydiff"], [128], recalls=["some"]).check()


def sweep_of(samples):
    return Sweep(
        ["streaming_llm"],
        [256],
        lengths=[700],
        positions=["compact"],
        samples=samples,
        options={"sink_tokens": 4},
        depths=[0.1],
        recalls=["off", "64"],
        device="cpu",
    )


def test_a_worker_elsewhere_is_sent_what_to_recall(runtime):
    """Pickle the job and a setting, as processes and Ray do: what to recall is in it."""
    sweep = sweep_of(1)
    settings = sweep.settings("bfloat16")
    (sample,) = make_samples("niah_single", runtime.tokenizer, 700, 1, seed=0, depth=0.1)
    prompts = {
        ("niah_single", 700, 0.1, "aware"): [
            (sample, prompt_parts(runtime.tokenizer, sample, "aware"))
        ]
    }
    job = pickle.loads(pickle.dumps(CellJob(sweep, settings[0], prompts, timed=False)))
    job.load(0)
    cells = [job.run(pickle.loads(pickle.dumps(setting))) for setting in settings]
    assert [(cell.setting.recall, cell.scores) for cell in cells] == [(0, (0.0,)), (64, (1.0,))]


@pytest.mark.slow(ci=0)
def test_processes_recall_as_one_does(tmp_path):
    here, spread = (
        run(sweep_of(2), tmp_path / str(workers), crew=Crew(workers=workers)) for workers in (1, 2)
    )
    assert [(c.setting, c.scores) for c in spread] == [(c.setting, c.scores) for c in here]
    assert [cell.scores for cell in here] == [(0.0, 0.0), (1.0, 1.0)]
