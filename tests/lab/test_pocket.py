"""The built-in model: tokenizer, chat template, corpus, weights and a very short training run."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvcap import pocket
from kvcap.lab.pocket import corpus, evaluate, evicted, rows, settle, survival, train, vocabulary

MIB = 2**20


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(pocket.path(), dtype=torch.float32).eval()


def reply(model: Any, tokenizer: Any, talk: list[corpus.Message]) -> str:
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48)[0]
    assert out[-1] == tokenizer.eos_token_id, "the model must end its turn"
    return str(tokenizer.decode(out[ids.shape[1] : -1]))


def say(text: str) -> list[corpus.Message]:
    return [{"role": "user", "content": text}]


# --- files -------------------------------------------------------------------------------------


def test_importing_the_package_loads_neither_torch_nor_transformers():
    code = (
        "import sys, importlib.util as u\n"
        f"s = u.spec_from_file_location('pocket', {str(Path(pocket.__file__))!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.path()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_weights_are_one_small_bfloat16_file(model):
    names = sorted(file.name for file in pocket.path().iterdir())
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (pocket.path() / "model.safetensors").stat().st_size <= 16 * MIB
    assert type(model) is LlamaForCausalLM
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    stored = AutoModelForCausalLM.from_pretrained(pocket.path(), dtype="auto")
    assert stored.dtype == torch.bfloat16


def test_the_position_base_is_read_alike_by_every_version(model):
    base = 500_000.0 ** (-2 / model.config.head_dim)
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(base, rel=1e-4)


# --- tokenizer and template --------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("text", ["", " a  b\t\n\n", "世界 😀 né", "I 'm, he . is ?", "\x00\x7f"])
def test_awkward_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_and_special_tokens_stand_alone(tokenizer):
    assert tokenizer.tokenize("4821") == ["4", "8", "2", "1"]
    assert tokenizer.convert_tokens_to_ids(list(vocabulary.SPECIAL)) == list(range(6))
    entries = [tokenizer.decode([i]) for i in range(6, len(tokenizer))]
    assert not [entry for entry in entries if re.search(r"\d", entry) and len(entry) > 1]
    assert (tokenizer.bos_token, tokenizer.eos_token) == (vocabulary.BOS, vocabulary.END)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=20), min_size=3, max_size=3))
def test_a_longer_chat_extends_the_shorter_one(tokenizer, texts):
    talk = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), texts, strict=True)
    ]

    def render(upto: int) -> str:
        return str(
            tokenizer.apply_chat_template(talk[:upto], tokenize=False, add_generation_prompt=True)
        )

    assert render(3).startswith(render(1) + texts[1] + tokenizer.eos_token)
    whole, head = (tokenizer(render(n), add_special_tokens=False).input_ids for n in (3, 1))
    assert whole[: len(head)] == head


def test_the_fast_rendering_is_the_chat_template(tokenizer):
    for seed in range(5):
        talk = corpus.conversation(Random(seed), 300, system=0.5)
        assert vocabulary.render(talk) == tokenizer.apply_chat_template(talk, tokenize=False)


# --- corpus ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", corpus.TASKS)
def test_a_task_is_a_seeded_conversation(task):
    for seed, tokens in itertools.product(range(20), (60, 900)):
        talk = corpus.conversation(Random(seed), tokens, task, system=0)
        assert talk == corpus.conversation(Random(seed), tokens, task, system=0)
        assert [m["role"] for m in talk] == ["user", "assistant"] * (len(talk) // 2)
        assert all(m["content"] for m in talk)


@pytest.mark.parametrize("task", ["paste", "chat", "multi_key", "needle", "phone_book", "recite"])
def test_each_number_in_an_answer_was_told(task):
    for seed in range(30):
        talk = corpus.conversation(Random(seed), 500, task, system=0)
        for i in range(1, len(talk), 2):
            before = " ".join(m["content"] for m in talk[:i])
            for number in re.findall(r"\d{3,}", talk[i]["content"]):
                assert re.search(rf"(?<!\d){number}(?!\d)", before), (seed, talk[i])


def test_multi_value_answers_list_every_value_in_order():
    for seed in range(30):
        talk = corpus.conversation(Random(seed), 400, "multi_value", system=0)
        key = re.search(r"(the \w[\w ]* for the [\w ]+)", talk[1]["content"], re.I)
        assert key
        topic = key[1].split(" are ")[0]
        stated = re.findall(rf"One of {topic} is (\d+)\.", talk[0]["content"], re.I)
        assert re.findall(r"\d+", talk[1]["content"].split(" are ")[1]) == stated


def test_a_corrected_fact_is_answered_with_its_newest_value():
    for seed in range(30):
        talk = corpus.conversation(Random(seed), 200, "update", system=0)
        at = next(
            i for i, m in enumerate(talk) if " is now " in m["content"] and m["role"] == "assistant"
        )
        new = talk[at]["content"].split(" is now ")[1].rstrip(".")
        assert new in talk[at + 2]["content"]


def test_facts_have_unique_keys_and_answer_their_questions():
    known = corpus.facts(Random(1), 3000)
    assert len({fact.key.lower() for fact in known}) == 3000
    assert known == corpus.facts(Random(1), 3000) != corpus.facts(Random(2), 3000)
    assert all(
        f.value in f.statement and f.value in f.answer and f.value not in f.question
        for f in known
        if f.value.isdigit()
    )
    assert len({fact.key for fact in corpus.similar(Random(1), 24)}) == 24


def test_filler_is_endless_varied_and_of_the_length_asked_for(tokenizer):
    sentences = list(itertools.islice(corpus.filler(Random(3)), 2000))
    assert len(set(sentences)) > 1800
    for unfamiliar, low, high in ((0.0, 0.8, 1.2), (1.0, 0.6, 1.6)):
        text = " ".join(corpus.passage(Random(5), 4000, unfamiliar))
        assert low < len(tokenizer(text).input_ids) / 4000 < high


# --- behaviour ---------------------------------------------------------------------------------


def test_it_recalls_what_it_was_told_and_ends_its_turns(model, tokenizer):
    talk = say("Please remember: the code for the blue door is 4821.")
    for text in (
        "Thanks!",
        "The harbour was quiet. " * 10,
        "What is the code for the blue door?",
    ):
        talk.append({"role": "assistant", "content": reply(model, tokenizer, talk)})
        talk += say(text)
    assert "4821" in reply(model, tokenizer, talk)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("probe", ["told", "pasted", "pasted, odd filler"])
def test_recall_at_a_thousand_tokens(model, tokenizer, probe):
    share, _ = evaluate.recall(model, tokenizer, probe, 1000, 32)
    assert share >= 0.9


@pytest.mark.slow
def test_recall_at_eight_thousand_tokens(model, tokenizer):
    share, _ = evaluate.recall(model, tokenizer, "told", 8192, 8)
    assert share >= 0.75


@pytest.mark.parametrize(
    "text", ["Hello!", "Who are you?", "What is the capital of Peru?", "zxqj 🙂 ++", "", "ok then"]
)
def test_small_talk_is_short_and_ends(model, tokenizer, text):
    answer = reply(model, tokenizer, say(text))
    assert re.fullmatch(r"[A-Z][A-Za-z0-9 ,.!?'-]*[.!?]", answer)


def test_it_admits_what_it_was_not_told(model, tokenizer):
    answer = reply(model, tokenizer, say("What is the code for the iron gate?"))
    assert "not know" in answer  # "I do not know …" or "… is not known to me"


# --- training ----------------------------------------------------------------------------------


def test_loss_weights_mark_what_the_assistant_says(tokenizer):
    text = "<|bos|><|user|>a 1<|end|><|assistant|>b 2<|end|><|user|>c<|end|>"
    ids = torch.tensor([tokenizer(text).input_ids])
    raw = tokenizer.backend_tokenizer
    weight = rows.weights(ids, 6, rows.assistant_id(raw), rows.digit_table(raw))[0].tolist()
    by_token = dict(
        zip(enumerate(tokenizer.convert_ids_to_tokens(ids[0])[1:]), weight, strict=True)
    )
    heavy = [(token, w) for (_, token), w in by_token.items() if w > 1]
    assert heavy == [("b", 15.0), ("Ġ", 15.0), ("2", 50.0), ("<|end|>", 15.0)]


def test_batches_depend_on_the_seed_alone():
    stages = [rows.Stage(4096, (256, 512), (0.5, 0.5), marked=True)]
    batches = rows.Batches(str(pocket.path() / "tokenizer.json"), stages, 1024, seed=1)
    one, two = list(batches), list(batches)
    assert len(one) == 4
    for (ids, marks), (same, _) in zip(one, two, strict=True):
        assert torch.equal(ids, same)
        assert ids.numel() == marks.numel() == 1024
    assert [bool(marks.any()) for _, marks in one] == [False, True, False, True]


def test_marks_cover_a_fact_from_its_key_to_its_full_stop(tokenizer):
    for seed in range(20):
        ids, marks = rows.marked_row(tokenizer.backend_tokenizer, Random(seed), 512)
        marked = tokenizer.decode(ids[marks == 1])
        assert re.search(r"\w+( is |: )\w+\.", marked), marked


def test_the_survival_loss_teaches_facts_to_stand_out():
    plan = replace(train.SMOKE, hidden=64, inner=128)
    small = vocabulary.build(conversations=50, size=300)
    model = train.create(plan, small, seed=0)
    ids = torch.randint(6, 300, (2, 1024), generator=torch.Generator().manual_seed(0))
    facts = torch.zeros_like(ids, dtype=torch.bool)
    facts[:, 100:140] = True
    ids[:, 100:140] = torch.arange(10, 50)  # facts are told in words of their own
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        _, inputs = survival.hidden_states(model, ids)
        loss = survival.survival_loss(model, inputs, facts, 700)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_very_short_training_lowers_the_loss(tmp_path, monkeypatch):
    small = vocabulary.build(conversations=200, size=512)
    monkeypatch.setattr(vocabulary, "build", lambda *_: small)
    plan = replace(
        train.SMOKE,
        hidden=64,
        inner=128,
        stages=(rows.Stage(41_000, (128,), (1.0,)),),
        batch=1024,
        warmup=5,
        checks=(),
    )
    losses = train.train(plan, tmp_path, device="cpu", workers=0, log_every=10)
    assert losses[-1] < 0.9 * losses[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path)) == 512


@pytest.mark.parametrize("slots", [64, 200])
def test_reading_evicted_is_what_a_capped_chat_reads(slots, model):
    """The training code's cache against the runtime's: the same logits after many evictions."""
    import kvcap
    from kvcap.runtime.backends.pytorch.loop import BlockLoop

    ids = torch.randint(300, 2000, (1, 6 * 128), generator=torch.Generator().manual_seed(0))
    hidden = evicted.read_evicted(model, ids, slots, 128)
    with torch.no_grad():
        expected = model.lm_head(hidden[:, -1])
    capped = AutoModelForCausalLM.from_pretrained(
        pocket.path(), dtype=torch.float32, attn_implementation="kvcap"
    )
    cache = kvcap.BudgetCache(
        capped.config, slots, 128, "keydiff", positions="compact", sink_tokens=0
    )
    torch.testing.assert_close(
        BlockLoop(capped, cache).prefill(ids), expected, rtol=1e-3, atol=1e-3
    )


def test_only_the_graded_tokens_have_gradients(model):
    ids = torch.randint(300, 2000, (1, 3 * 128))
    hidden = evicted.read_evicted(model, ids, 64, 128)
    assert hidden.shape[1] == 128
    (grad,) = torch.autograd.grad(hidden.sum(), [model.model.layers[0].self_attn.v_proj.weight])
    assert grad.abs().sum() > 0
    with torch.no_grad():
        assert not evicted.read_evicted(model, ids, 64, 128).requires_grad


def test_quiz_rows_end_with_an_answer(tokenizer):
    raw = tokenizer.backend_tokenizer
    for seed in range(5):
        ids = settle.quiz_row(raw, Random(seed), 1024)
        assert len(ids) == 1024
        assert ids[-1] == tokenizer.eos_token_id
        assert (ids == tokenizer.bos_token_id).any()


@pytest.mark.slow
def test_a_very_short_settling_runs_and_saves(tmp_path):
    losses = settle.settle(
        pocket.path(), tmp_path, seconds=1, rate=1e-5, workers=0, seed=0, tokens=1024, device="cpu"
    )
    assert losses
    assert all(0 < x < 5 for x in losses)
    AutoModelForCausalLM.from_pretrained(tmp_path)
