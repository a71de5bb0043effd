"""Every task: lengths, places and counts of what is asked for, and its scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from string import printable
from typing import Any, ClassVar

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import small_sweep
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvcap import cli, pocket
from kvcap.evals.quality.prompts import Sample, prompt_ids, prompt_parts, tokens_to_say
from kvcap.evals.quality.ruler import NOISE, string_match_all
from kvcap.evals.quality.text import fit_whole
from kvcap.lab.quality import measuring
from kvcap.lab.quality.cells import Setting
from kvcap.lab.quality.metrics import contains
from kvcap.lab.quality.sweep import Sweep, run
from kvcap.lab.quality.tasks import is_placed, load_task, make_samples, tasks
from kvcap.pocket.prose import filler
from kvcap.policies import Eviction, Observation, Policy
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.session.messages import render

ASKING = [name for name, task in tasks().items() if task.MAX_NEW_TOKENS]
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{{ m['content'] | trim }} [/INST]{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
KINDS = ["bytes", "pieces"]
NEAR = {"niah_multikey_2": 0.25, "niah_multikey_3": 0.4}  # of long sentences few fit in


@cache
def tokenizer_of(kind: str) -> Any:
    """Return a tokenizer of byte-level BPE, which is pocket's, or of SentencePiece's kind."""
    if kind == "bytes":
        return AutoTokenizer.from_pretrained(pocket.path())
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=list(printable),
        show_progress=False,
    )
    raw.train_from_iterator(islice(filler(Random(0)), 400), trainer)
    raw.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=INSTRUCTIONS,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ASKING)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1000, 1300), depth=st.floats(0, 1))
def test_samples_are_exact_and_repeat(name, kind, seed, length, depth):
    tokenizer, task = tokenizer_of(kind), load_task(name)
    sample = task.make(Random(seed), tokenizer, length, depth)
    assert task.make(Random(seed), tokenizer, length, depth) == sample
    ids = prompt_ids(tokenizer, sample)
    assert len(ids) == length
    context, question = prompt_parts(tokenizer, sample, "after")
    assert [*context, *question] == ids
    question_text = tokenizer.decode(question)
    assert question_text.rstrip().endswith(sample.opening)
    read_before = sample.context or " ".join(text for _, text in sample.before)
    for answer in sample.answers:
        assert read_before.count(answer) == TIMES.get(name, once)(sample, answer)
        assert answer not in question_text
    if is_placed(task):
        at = read_before.index(sample.answers[0]) / len(read_before)
        assert abs(at - depth) < NEAR.get(name, 0.15)
    assert task.score(sample, f"They are {', '.join(sample.answers)}.") == 1
    assert task.score(sample, "I do not know.") == 0
    share = 1 / len(sample.answers)
    assert task.score(sample, f"Only {sample.answers[-1]}.") == pytest.approx(share)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ASKING)
def test_base_models_go_on_from_plain_text(name, kind):
    tokenizer = copy(tokenizer_of(kind))
    tokenizer.chat_template = None
    task = load_task(name)
    sample = task.make(Random(3), tokenizer, 1000, 0.5)
    ids, begun = prompt_ids(tokenizer, sample), sample.opening or "Answer:"
    assert len(ids) == 1000
    prompt = f"{sample.context}{sample.joint}{sample.question} {begun}"
    if sample.before:
        assert sample.plain.startswith(f"User: {sample.before[0][1]}\nAssistant: ")
        prompt = sample.plain
    assert ids == tokenizer(prompt)["input_ids"]  # with the tokenizer's own opening token
    context, question = prompt_parts(tokenizer, sample, "after")
    assert [*context, *question] == ids
    assert sample.question in tokenizer.decode(question)
    answer_ids = tokenizer(f" 1. {', '.join(sample.answers)}", add_special_tokens=False)[
        "input_ids"
    ]
    assert len(answer_ids) <= tokens_to_say(tokenizer, sample)


def once(sample: Sample, answer: str) -> int:
    return 1


def links(sample: Sample, answer: str) -> int:
    return 1 if answer == sample.answers[-1] else 2


def of_list(sample: Sample, answer: str) -> int:
    """Count a common word in a list, of which every other word occurs once."""
    before, _, entries = sample.context.rpartition("\n")
    counts = Counter(entries.split(" ")[1::2])
    assert set(counts.values()) == {1, 10}
    assert {word for word, times in counts.items() if times == 10} == set(sample.answers)
    return 10 + before.count(answer)


def by_rank(sample: Sample, answer: str) -> int:
    """Count a coded word: the answers are the three most frequent ones."""
    text = sample.context.partition("coded words. ")[2].split(" ")
    counts = Counter(word for word in text if word.isalpha() and len(word) == 6)
    first, second, third, fourth = counts.most_common(4)
    assert (first[0], second[0], third[0]) == sample.answers
    assert first[1] > second[1] > third[1] > fourth[1]
    return counts[answer]


TIMES: dict[str, Callable[[Sample, str], int]] = {
    "passkey": lambda *_: 2,
    "vt": links,
    "cwe": of_list,
    "fwe": by_rank,
}


def test_long_lists_of_words_have_the_papers_frequencies():
    (sample,) = make_samples("cwe", tokenizer_of("bytes"), 4096, 1, seed=0)
    entries = Counter(sample.context.rpartition("\n")[2].split(" ")[1::2])
    assert sorted(set(entries.values())) == [3, 30]


def test_a_chain_of_variables_can_be_followed():
    (sample,) = make_samples("vt", tokenizer_of("bytes"), 600, 1, seed=0)
    values: dict[str, str] = {}
    for line in sample.context.splitlines():
        if line.startswith("VAR "):
            name, _, value = line.removeprefix("VAR ").partition(" = ")
            values[name] = values[value.removeprefix("VAR ")] if "VAR" in value else value
    assert tuple(values) == sample.answers
    assert len(values) == 5
    assert len(set(values.values())) == 1
    assert f"the value {values[sample.answers[0]]} in" in sample.question


@pytest.mark.parametrize(
    ("name", "needles", "queries", "prose"),
    [
        ("niah_single_1", 1, 1, False),
        ("niah_multikey_1", 4, 1, True),
        ("niah_multivalue", 4, 1, True),
        ("niah_multiquery", 4, 4, True),
        ("niah_multikey_3", 0, 1, False),
    ],
)
def test_haystacks_hold_what_their_family_says(name, needles, queries, prose):
    (sample,) = make_samples(name, tokenizer_of("bytes"), 1200, 1, seed=1)
    count = sample.context.count("One of the special magic ")
    assert count == needles if needles else count > 5
    assert sample.question.count("-") == (4 if name == "niah_multikey_3" else queries)
    assert (NOISE[0] in sample.context) is (name == "niah_single_1")
    assert ("\n" not in sample.context.partition("afterwards.\n")[2]) is prose


def test_several_answers_are_spread_over_the_text():
    (sample,) = make_samples("niah_multivalue", tokenizer_of("bytes"), 2000, 1, seed=0)
    depths = sorted(sample.context.index(x) / len(sample.context) for x in sample.answers)
    assert all(0.15 < b - a < 0.35 for a, b in pairwise(depths))


@pytest.mark.parametrize("name", tasks())
def test_a_length_that_is_too_short_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}: a length of 1 .*; \d+ are needed"):
        make_samples(name, tokenizer_of("bytes"), 1, 1, seed=0)


def test_all_samples_stand_at_a_depth_that_is_given():
    samples = make_samples("phone_book", tokenizer_of("bytes"), 700, 3, 0, depth=0.5)
    depths = [s.context.index(s.answers[0]) / len(s.context) for s in samples]
    assert all(abs(depth - 0.5) < 0.1 for depth in depths)
    assert len({s.answers for s in samples}) == 3


# As scripts/eval/synthetic/constants.py of RULER computes them, times 100 there.
@pytest.mark.parametrize(
    ("answers", "reply", "every", "part"),
    [
        (("12", "34"), "12 and 34", 1.0, 1.0),
        (("12", "34"), "It is 5134.", 0.5, 1.0),
        (("Blue-Door",), "the BLUE-door!", 1.0, 1.0),
        (("12", "34"), "", 0.0, 0.0),
    ],
)
def test_scores_are_rulers(answers, reply, every, part):
    sample = Sample("", "?", answers)
    assert string_match_all(sample, reply) == every
    assert contains(reply, sample.answers) == part


@pytest.mark.parametrize("length", range(8, 60))
def test_whole_items_are_never_cut(length):
    items, prose = fit_whole(
        lambda some, prose: 5 + len(" ".join([*some, *prose]).split()),
        iter(["Anna Berg: 12 34"] * 20),
        iter(["one two three."] * 99),
        length,
    )
    assert set(items) <= {"Anna Berg: 12 34"}
    assert 5 + 4 * len(items) + len(" ".join(prose).split()) == length


def test_the_documentation_names_every_task():
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
    assert not [name for name in tasks() if f"`{name}`" not in page]


@dataclass(frozen=True)
class Dropping(Policy):
    """Keeps the newest tokens but those of one span, which go first."""

    start: int = 0
    stop: int = 0

    observes: ClassVar = frozenset({"positions"})

    def score(self, obs: Observation) -> Tensor:
        inside = (obs.positions >= self.start) & (obs.positions < self.stop)
        return obs.positions.float().masked_fill(inside, -1.0)


def test_a_policy_that_drops_the_needle_scores_0(monkeypatch):
    runtime = Runtime.from_pretrained("pocket", budget_tokens=256, device="cpu")
    tokenizer = runtime.tokenizer
    monkeypatch.setattr(measuring, "_scoring_ms", lambda *_: None)
    samples = make_samples("niah_single", tokenizer, 400, 2, seed=0, depth=0.7)
    prompts = [(sample, prompt_parts(tokenizer, sample, "aware")) for sample in samples]
    setting = Setting("pocket", "float32", "niah_single", 400, "full", "true", None, 2, 0, 32)
    full = measuring.measure(runtime, setting, prompts, batch=2)

    stock = AutoModelForCausalLM.from_pretrained(pocket.path(), dtype=runtime.model.dtype)
    expected = []
    for sample, (ids,) in prompts:
        given = torch.tensor([ids])
        out = stock.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=32)
        reply = tokenizer.decode(out[0, 400:], skip_special_tokens=True)
        expected.append(load_task("niah_single").score(sample, reply))
    assert full.scores == tuple(expected) == (1, 1)

    def score(spans: list[tuple[int, int]]) -> float:
        left = iter([*spans, (0, 0)])  # the last one's bytes are counted

        def cache(config: Any, _: Setting) -> BudgetCache:
            return BudgetCache(config, 300, 32, Eviction(Dropping(*next(left))), positions="true")

        with monkeypatch.context() as patch:
            patch.setattr(measuring, "new_cache", cache)
            return measuring.measure(runtime, setting, prompts, batch=1).score

    assert score([(0, 0)] * 2) == 1  # the newest 300 tokens hold the needle
    assert score([span_of(tokenizer, sample) for sample in samples]) == 0


def span_of(tokenizer: Any, sample: Sample) -> tuple[int, int]:
    """Return the tokens of the sentence that holds the answer."""
    text = render(tokenizer, sample.messages)
    at = text.index(sample.answers[0])
    start, stop = text.rindex(". ", 0, at), text.index(".", at)
    marks = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    held = [i for i, (a, b) in enumerate(marks["offset_mapping"]) if a < stop and b > start]
    return held[0], held[-1] + 1


# --- perplexity ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_of("pieces")
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def sweep(folder: Path) -> Sweep:
    sizes = {"budgets": (24,), "lengths": (100,), "samples": 3, "positions": ("compact",)}
    return small_sweep(folder, tasks=("perplexity",), questions=("aware", "after"), **sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_length_asked_for_and_begin_as_the_model_expects(kind):
    tokenizer = tokenizer_of(kind)
    samples = make_samples("perplexity", tokenizer, 200, 3, seed=0)
    assert all(len(prompt_ids(tokenizer, sample)) == 200 for sample in samples)
    assert len({sample.ids for sample in samples}) == 3
    assert make_samples("perplexity", tokenizer, 200, 2, seed=0) == samples[:2]
    for sample in samples:  # tokens as the tokenizer makes them of the whole text
        whole = tokenizer(sample.context.removeprefix("<s> "), add_special_tokens=False)
        assert tuple(whole["input_ids"][:150]) == (sample.ids or ())[kind == "pieces" :][:150]
    opens = [sample.ids[0] == tokenizer.bos_token_id for sample in samples if sample.ids]
    assert opens == [kind == "pieces"] * 3


def test_perplexity_of_the_full_cache_is_the_models(sweep, tmp_path):
    capped, full = run(sweep, tmp_path)
    assert (capped.setting.question, capped.unit) == (None, "perplexity")
    tokenizer = tokenizer_of("pieces")
    samples = make_samples("perplexity", tokenizer, 100, 3, seed=0)
    ids = torch.tensor([sample.ids for sample in samples])
    model = AutoModelForCausalLM.from_pretrained(sweep.model)
    losses = [model(row[None], labels=row[None]).loss.item() for row in ids]
    assert full.scores == pytest.approx(losses, abs=1e-4)
    assert full.score == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    assert full.ci_low < full.score < full.ci_high
    assert capped.scores != full.scores
    text = (tmp_path / "results.md").read_text()
    assert "## perplexity, 100 tokens, " in text
    assert "Perplexity, lower is better; 3 samples" in text


def test_a_users_text_is_read_in_pieces(sweep, folder, tmp_path):
    path, tokenizer = tmp_path / "text.txt", tokenizer_of("pieces")
    path.write_text(" ".join(islice(filler(Random(5)), 40)))
    ids = tokenizer(path.read_text(), add_special_tokens=False)["input_ids"]
    task = load_task(f"perplexity:{path}")
    first, last = (task.make(Random(0), tokenizer, 50, depth).ids for depth in (0.0, 1.0))
    assert first == (tokenizer.bos_token_id, *ids[:49])
    assert last == (tokenizer.bos_token_id, *ids[-50:-1])
    marked = tmp_path / "marked.txt"
    marked.write_text(path.read_text(), encoding="utf-8-sig")  # as Windows writes it
    assert load_task(f"perplexity:{marked}").make(Random(0), tokenizer, 50, 0.0).ids == first
    cells = run(replace(sweep, tasks=(f"perplexity:{path}",), samples=2), tmp_path / "out")
    assert [cell.setting.task for cell in cells] == [f"perplexity:{path}"] * 2


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        (b"", "text.txt", "is empty"),
        (b"\xff\xfe", "text.txt", "no text can be read"),
        (b"Too short.", "text.txt", r"give --lengths \d+ or less"),
        (b"Fine.", "other.txt", "no text can be read"),
        (b"Fine.", ".", "no text can be read"),
    ],
)
def test_files_that_are_no_text_are_refused(content, name, says, sweep, tmp_path):
    (tmp_path / "text.txt").write_bytes(content)
    changed = replace(sweep, tasks=(f"perplexity:{tmp_path / name}",))
    with pytest.raises(ValueError, match=says):
        run(changed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pieces_of_a_file_are_those_of_its_copy_in_another_folder(tmp_path):
    """Pieces depended on the whole path, so that two machines read other ones of the same text."""
    tokenizer, drawn = tokenizer_of("pieces"), []
    for folder in ("one", "two"):
        path = tmp_path / folder / "text.txt"
        path.parent.mkdir()
        path.write_text(" ".join(f"word{i}" for i in range(2000)))
        drawn.append([x.ids for x in make_samples(f"perplexity:{path}", tokenizer, 50, 3, seed=0)])
    assert drawn[0] == drawn[1]


def test_depths_are_refused_where_nothing_is_placed(sweep, tmp_path):
    with pytest.raises(ValueError, match="task 'perplexity' hides nothing at one place"):
        run(replace(sweep, depths=(0.5,)), tmp_path)


def test_the_command_asks_both_ways_at_every_depth(folder, tmp_path, capsys, kvcap):
    command = ["eval", str(folder), "--tasks", "niah_single", "--policies", "keydiff"]
    command += ["--budgets", "24", "--lengths", "150", "--samples", "1", "--block-size", "16"]
    command += ["--positions", "true", "--out", str(tmp_path), "--device", "cpu"]
    assert cli.run([*command, "--question", "both", "--depths", "0,0.5"]) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line.startswith("## ")]
    assert [title.split(", ")[2:4] for title in titles] == [
        ["context-only", "depth 0"],
        ["context-only", "depth 0.5"],
        ["question-aware", "depth 0"],
        ["question-aware", "depth 0.5"],
    ]
    assert "--depths 'half': give numbers" in kvcap.refused(*command, "--depths", "half")
