"""`kvcap.cap`: whoever calls a loaded model runs under the cap, or is refused by name."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from conftest import CACHE, FAMILIES, as_cache, small_policy, tiny_config, tiny_model
from families import OLD, model_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MixtralConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)

import kvcap
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.backends.pytorch.cap import MARK
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.errors import (
    MemoryCapExceeded,
    PaddingUnsupported,
    PlanInfeasible,
    PositionMismatch,
    UnsupportedModel,
)
from kvcap.runtime.models.trial import small_copy

RECURRENT = [] if OLD else ["qwen3_5_text", "lfm2", "nemotron_h", "falcon_h1", "zaya", "gemma3n"]
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}


def ones(ids):
    return {"attention_mask": torch.ones_like(ids)}


def answered(model, ids, policy="keydiff", budget=24, block=8, **options):
    """What the block loop says, up to the end of text."""
    cache = kvcap.BudgetCache(model.config, budget, block, policy, **options)
    loop = BlockLoop(model, cache)
    logits, written = loop.prefill(ids), []
    while len(written) < 8 and 2 not in written:
        written.append(int(logits.argmax()))
        logits = loop.read(logits.argmax(-1, keepdim=True))
    return written


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


@pytest.mark.parametrize(("family", "policy", "options", "given"), [
    *((family, "snapkv", {}, {}) for family in FAMILIES),
    *((family, "keydiff", {}, {}) for family in RECURRENT),
    *(("llama", "streaming_llm", {}, given) for given in (
        {"prefill_chunk_size": 8}, {"prefill_chunk_size": 5},
        {"generation_config": GenerationConfig(**OPTIONS)},
    )),
    *(("llama", policy, {"positions": positions, "evict_every": 3}, {})
      for policy in ("adakv", "cake", "calidrop", "criticalkv", "h2o", "keydiff")
      for positions in ("compact", "true")),
], ids=str)  # fmt: skip
def test_generate_says_what_the_block_loop_says(family, policy, options, given, tokens):
    """However the prompt is read, under every part of a policy, in layers of every kind."""
    model, ids = model_of(family, "eager"), tokens(41)  # 4.57 reads the last one alone
    eviction = policy if options == {} else small_policy(policy, model.config)
    generation = given if "generation_config" in given else {**OPTIONS, **given}
    with kvcap.cap(model, 24, 8, eviction, **options) as capped:
        out = model.generate(ids, **ones(ids), **generation)
        assert capped.cache.seen == out.shape[1] - 1
        assert 24 <= capped.cache.held <= 24 + options.get("evict_every", 1) - 1
    block = given.get("prefill_chunk_size", 8)
    expected = answered(model_of(family), ids, eviction, block=block, **options)
    assert out[0, 41:].tolist() == expected


def test_a_pipeline(chat_model):
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    prompts = ["The door is blue. " * 20, "Tell me more about the weather. " * 15]
    tokenizer = pipeline("text-generation", chat_model).tokenizer
    capped = kvcap.cap(model, 32, 16)
    before, after = (pipeline("text-generation", model, tokenizer=tokenizer) for _ in range(2))
    seen = []
    for prompt in prompts:
        for pipe in (before, after):
            out = pipe(prompt, max_new_tokens=4, do_sample=False, return_full_text=False)
            seen.append(out[0]["generated_text"])
            assert capped.cache.held == 32
    assert seen[0] == seen[1]
    both = after(prompts, max_new_tokens=4, do_sample=False, return_full_text=False)
    assert [one[0]["generated_text"] for one in both] == seen[::2]
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(PaddingUnsupported, match="one at a time"):
        after(prompts, batch_size=2, max_new_tokens=4)
    capped.remove()


class Five(LogitsProcessor):
    """Prefers token 5 in every second place."""

    def __call__(self, ids, scores):
        return scores.index_fill(1, torch.tensor([5]), 100.0 if ids.shape[1] % 2 else 0.0)


class Long(StoppingCriteria):
    """Stops at 44 tokens."""

    def __call__(self, ids, *_, **__):
        return torch.full((len(ids),), ids.shape[1] >= 44, dtype=torch.bool)


class Streamed:
    """Takes what is streamed."""

    def put(self, ids):
        self.ids = ids

    def end(self):
        self.ended = True


def own_sampling(model, input_ids, **options):
    """A decoding method that a program passes."""
    return model._sample(input_ids, **options)


TAKEN = {
    "stop_strings": lambda t: {"stop_strings": [t.decode([1749])], "tokenizer": t},
    "assistant_tokenizer": lambda t: {"tokenizer": t, "assistant_tokenizer": t},
    "logits_processor": lambda _: {"logits_processor": [Five()]},
    "stopping_criteria": lambda _: {"stopping_criteria": StoppingCriteriaList([Long()])},
    "streamer": lambda _: {"streamer": Streamed()},
    "output_scores": lambda _: {"return_dict_in_generate": True, "output_scores": True,
                                "output_logits": True, "output_hidden_states": True},
    "max_time": lambda _: {"max_time": 600.0},
    "negative_prompt_ids": lambda _: {"negative_prompt_ids": torch.arange(3, 12)[None],
                                      "guidance_scale": 1.5},
    "prefix_allowed_tokens_fn": lambda _: {
        "prefix_allowed_tokens_fn": lambda _, ids: [5, 6, 7 + len(ids) % 3]},
    "synced_gpus": lambda _: {"synced_gpus": False},
    "custom_generate": lambda _: {"custom_generate": own_sampling},
    "num_return_sequences": lambda _: {"do_sample": True, "num_return_sequences": 3},
    "processors": lambda _: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3,
                             "bad_words_ids": [[5]], "min_new_tokens": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def chat(chat_model):
    """A small random model, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(chat_model)


@pytest.mark.parametrize("name", TAKEN)
def test_generate_takes_what_transformers_takes(name, chat, tokens):
    """Within the budget the answer is that of transformers uncapped."""
    (model, tokenizer), ids = chat, tokens(40)
    given = {**OPTIONS, "output_router_logits": False} | TAKEN[name](tokenizer)

    def answer(**cache):
        torch.manual_seed(0)
        out = model.generate(ids, **ones(ids), **given, **cache)
        return out if torch.is_tensor(out) else out.sequences

    expected = answer()
    with kvcap.cap(model, 64, 16, "streaming_llm"):
        assert torch.equal(answer(), expected)
    if name == "negative_prompt_ids" or "num_return_sequences" in given:
        return  # these take a cache of more sequences, or two
    model.set_attn_implementation("kvcap")
    cache = kvcap.BudgetCache(model.config, 64, 40, "streaming_llm")
    assert torch.equal(answer(**as_cache(cache)), expected)
    assert cache.seen >= 40


def test_a_pipeline_that_stops_at_a_sequence(chat):
    model, tokenizer = chat
    pipe = pipeline("text-generation", model, tokenizer=tokenizer)
    for given in ({"stop_sequence": "e"}, {"stop_strings": ["e"], "tokenizer": tokenizer}):
        given |= {"max_new_tokens": 8, "do_sample": False}
        expected = pipe("The door is blue.", **given)
        with kvcap.cap(model, 64, 16):
            assert pipe("The door is blue.", **given) == expected


@torch.no_grad()
def test_what_the_experts_of_all_blocks_were_chosen_by(tokens):
    """Of which the loss of a mixture of experts takes a part."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_copy(MixtralConfig, MixtralConfig().to_dict()))
    model, ids = model.float().eval(), tokens(40, batch=2)
    given = {"labels": ids, "output_router_logits": True}
    uncapped = model(ids, **given)
    with kvcap.cap(model, 64, 8):
        out = model(ids, **given)
        last = model(ids, output_router_logits=True, logits_to_keep=1)
    for name in ("router_logits", "loss", "aux_loss", "logits"):
        torch.testing.assert_close(out[name], uncapped[name], rtol=1e-4, atol=1e-4)
    assert [len(x) for x in last.router_logits] == [len(x) for x in uncapped.router_logits]


def test_a_conversation_goes_on_in_the_cache_that_came_back(model, tokens):
    ids = tokens(40)
    options = {**OPTIONS, "return_dict_in_generate": True}
    with kvcap.cap(model, 24, 8):
        out = model.generate(ids, **ones(ids), **options)
        more = torch.cat((out.sequences, tokens(20, seed=1)), dim=1)
        cache = out[CACHE]
        assert isinstance(cache, kvcap.BudgetCache)
        out = model.generate(more, **ones(more), **as_cache(cache), **options)
        assert out[CACHE] is cache
        assert (cache.seen, cache.held) == (40 + 8 + 20 + 7, 24)
        # and a call without it begins anew
        model.generate(ids, **ones(ids), **OPTIONS)
        assert cache.seen == 75


def said_by(model, ids, own=None, **options):
    """The logits of a program's own loop over `ids` and four tokens, and the cache it ends with."""
    logits, cache = [], own
    for _ in range(5):
        out = model(ids, **as_cache(cache), **options)
        logits.append(out.logits[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
        cache = out[CACHE] if own is None else own
    return torch.stack(logits), cache


OWN = {
    "none": lambda config: None,
    "empty": lambda config: DynamicCache(),
    "of its config": lambda config: DynamicCache(config=config),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@torch.no_grad()
def test_a_loop_of_a_programs_own_with_the_cache_it_made(make, family, tokens):
    """Within the budget it says what it says uncapped; beyond, what the block loop does."""
    model, ids = tiny_model(family, "sdpa"), tokens(40)
    uncapped, _ = said_by(model, ids, make(model.config))
    with kvcap.cap(model, 64, 8, "keydiff"):
        logits, _ = said_by(model, ids, make(model.config))
    torch.testing.assert_close(logits, uncapped, rtol=1e-4, atol=1e-4)
    with kvcap.cap(model, 24, 8, "keydiff") as capped:
        own = make(model.config)
        logits, cache = said_by(model, ids, own)
        assert cache is capped.cache
        assert own is None or own is cache
        assert (cache.get_seq_length(), cache.held) == (44, 24)
    assert logits.argmax(-1).flatten().tolist() == answered(tiny_model(family), ids)[:5]


@torch.no_grad()
def test_own_caches_are_conversations_apart(model, tokens):
    """Two at once, a copy of one, and one that is emptied."""
    one, other = DynamicCache(), DynamicCache()
    ids, more = tokens(40), tokens(1, seed=1)
    with kvcap.cap(model, 24, 8):
        expected = model(torch.cat((ids, more), dim=1)).logits[:, -1]
        model(ids, **as_cache(one))
        model(tokens(30, seed=2), **as_cache(other))
        twin = copy.deepcopy(one)
        for cache in (one, twin):
            logits = model(more, **as_cache(cache)).logits[:, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert (one.seen, twin.seen, other.seen) == (41, 41, 30)
        one.reset()
        torch.testing.assert_close(
            model(ids, **as_cache(one)).logits, model(ids).logits, rtol=1e-4, atol=1e-4
        )
        gone = weakref.ref(other)
        del other
        assert gone() is None


@pytest.mark.parametrize("given", [{"use_cache": False}, {"cache_implementation": "dynamic"},
                                   {"own": True}], ids=str)  # fmt: skip
def test_generate_with_caches_of_transformers(given, model, tokens):
    ids = tokens(40)
    given = as_cache(DynamicCache()) if "own" in given else given
    expected = model.generate(ids, **ones(ids), **OPTIONS, **copy.deepcopy(given))
    with kvcap.cap(model, 64, 8) as capped:
        assert torch.equal(model.generate(ids, **ones(ids), **OPTIONS, **given), expected)
    if CACHE in given:
        assert given[CACHE].seen == expected.shape[1] - 1
        assert given[CACHE] is capped.cache


def test_a_cache_is_not_read_by_another_attention(model, tokens):
    """Which counts true positions, whatever the cache counts."""
    with kvcap.cap(model, 24, 8):
        cache = model(tokens(40))[CACHE]
    with pytest.raises(UnsupportedModel, match=r"capped\.remove\(\)"):
        model(tokens(1), **as_cache(cache))
    assert (cache.seen, cache.consistent) == (40, True)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_plain_call_gives_all_logits(use_cache, model, tokens):
    """As a harness asks for likelihoods: block by block, as they are in a chat."""
    ids = tokens(50, batch=2)
    uncapped = model(ids).logits
    with kvcap.cap(model, 24, 8) as capped, torch.no_grad():
        out = model(ids, use_cache=use_cache, labels=ids, output_hidden_states=True)
        assert (out.get(CACHE) is capped.cache) == use_cache
        assert capped.cache.held == 24
        few = model(ids, logits_to_keep=11).logits
        as_tuple = model(ids, return_dict=False)[0]
    assert out.logits.shape == uncapped.shape
    torch.testing.assert_close(out.logits[:, :8], uncapped[:, :8], rtol=1e-4, atol=1e-4)
    assert (out.logits - uncapped).abs().max() > 1e-2
    assert [x.shape for x in out.hidden_states] == [(2, 50, 64)] * 3
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(few, out.logits[:, -11:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(as_tuple, out.logits, rtol=1e-4, atol=1e-4)
    kept = kvcap.BudgetCache(tiny_model("llama").config, 24, 8)
    last = BlockLoop(tiny_model("llama"), kept).prefill(ids)
    torch.testing.assert_close(out.logits[:, -1], last, rtol=1e-4, atol=1e-4)


def test_padding_on_the_right_that_nobody_reads(model, tokens):
    """As lm-eval batches: pads follow the tokens, and there is no mask."""
    ids = tokens(50, batch=2)
    ids[0, 30:] = 2
    with kvcap.cap(model, 24, 8), torch.no_grad():
        together = model(ids).logits
        alone = model(ids[:1, :30]).logits
    torch.testing.assert_close(together[:1, :30], alone, rtol=1e-4, atol=1e-4)


def test_undone_it_leaves_no_trace(model, tokens):
    ids = tokens(40)
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    model.generation_config.cache_implementation = "dynamic"
    before = model.generate(ids, **ones(ids), **OPTIONS)
    capped = kvcap.cap(model, 24, 8)
    assert model.config._attn_implementation == "kvcap"
    assert not torch.equal(model.generate(ids, **ones(ids), **OPTIONS), before)
    capped.remove()
    capped.remove()
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.cache_implementation == "dynamic"
    assert hooks == [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(model.generate(ids, **ones(ids), **OPTIONS), before)
    with pytest.raises(ZeroDivisionError), kvcap.cap(model, 24, 8):
        1 / 0  # noqa: B018
    assert torch.equal(model.generate(ids, **ones(ids), **OPTIONS), before)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded]
)
def test_a_copy_of_the_model_has_a_cap_of_its_own(copied, model, tokens):
    ids = tokens(40)
    capped = kvcap.cap(model, 24, 8)
    model(ids)
    twin = copied(model)
    capped.remove()
    assert model(ids)[CACHE].get_seq_length() == 40
    assert twin(ids)[CACHE].held == 24
    getattr(twin.get_decoder(), MARK).remove()
    assert twin(ids)[CACHE].get_seq_length() == 40
    assert kvcap.cap(twin, 24, 8).cache is None


def test_the_decoder_alone_and_a_chat_beside(model, tokens):
    ids = tokens(40)
    with kvcap.cap(model, 24, 8) as capped:
        out = model.model(ids)
        assert out.last_hidden_state.shape == (1, 40, 64)
        assert out[CACHE] is capped.cache
        expected = answered(model, ids)  # by the block loop, with a cache of its own
    assert expected == answered(tiny_model("llama"), ids)
    decoder = model.model
    with kvcap.cap(decoder, 24, 8) as capped:
        assert decoder(ids)[CACHE].held == 24


def test_embeddings_in_place_of_ids(model, tokens):
    ids = tokens(40)
    with kvcap.cap(model, 24, 8), torch.no_grad():
        expected = model(ids).logits
        got = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        torch.testing.assert_close(got, expected)


def test_its_figures_are_told(model, tokens):
    with kvcap.cap(model, 24, 8) as capped:
        assert "0 tokens read" in repr(capped)
        model(tokens(40))
        for part in ("LlamaForCausalLM", "40 tokens read", "24 of 24 slots", "bytes"):
            assert part in repr(capped)


def compiled_module(model):
    return torch.compile(model, backend="eager")


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [compiled_module, compiled_forward, compiled_in_place])
@pytest.mark.parametrize("order", ["capped first", "compiled first"])
@pytest.mark.slow(keep=1)
@torch.no_grad()
def test_a_compiled_model_says_what_it_says_uncompiled(compiled, order, tokens):
    model, ids = tiny_model("llama", "sdpa", num_hidden_layers=1), tokens(20)
    with kvcap.cap(model, 12, 8, "snapkv"):
        expected = model(ids).logits
    torch.compiler.reset()
    made = compiled(model) if order == "compiled first" else model
    with kvcap.cap(made, 12, 8, "snapkv") as capped:
        made = made if order == "compiled first" else compiled(model)
        torch.testing.assert_close(made(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert (capped.cache.seen, capped.cache.held) == (20, 12)
    torch.compiler.reset()


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_with_a_capped_cache(tokens):
    """A block, and a token that follows; with a mask that no slots follow it is refused."""
    model, ids = tiny_model("llama", num_hidden_layers=1), tokens(9)
    torch.compiler.reset()
    compiled, logits = torch.compile(model, backend="eager", dynamic=False), []
    for each in (model, compiled):
        cache = kvcap.BudgetCache(model.config, 4, 8, "snapkv")
        logits.append([each(x, **as_cache(cache)).logits for x in ids.split([8, 1], 1)])
        assert (cache.seen, cache.held) == (9, 4)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    padded = torch.ones(1, 10).index_fill(1, torch.tensor([0]), 0)
    with pytest.raises(PaddingUnsupported, match="has zeros"):
        compiled(ids[:, :1], **as_cache(cache), attention_mask=padded)
    torch.compiler.reset()


@torch.no_grad()
def test_one_graph_of_a_whole_model_is_refused(model, tokens):
    torch.compiler.reset()
    model.set_attn_implementation("kvcap")
    whole = torch.compile(model, backend="eager", fullgraph=True)
    cache = kvcap.BudgetCache(model.config, 12, 8, "streaming_llm")
    with pytest.raises(RuntimeError, match=r"fullgraph|torch\.compiler\.disable"):
        whole(tokens(8), **as_cache(cache))
    torch.compiler.reset()


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (UnsupportedModel, "beam search", {"num_beams": 2}),
        (UnsupportedModel, "assisted decoding .* cannot run", {"prompt_lookup_num_tokens": 2}),
        (UnsupportedModel, "num_return_sequences", {"assistant_model": tiny_model("llama")}),
        (UnsupportedModel, "StaticCache is not capped", {"cache_implementation": "static"}),
        (PaddingUnsupported, "has zeros", {"attention_mask": "padded"}),
    ],
)
@pytest.mark.parametrize("length", [6, 40])  # of one block, of several
def test_what_cannot_be_capped_is_refused(error, message, options, length, model, tokens):
    ids = tokens(length)
    given = {**ones(ids), **OPTIONS, "eos_token_id": 2, **options}
    if options.get("attention_mask"):
        given["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)
    with kvcap.cap(model, 24, 8), pytest.raises(error, match=message):
        model.generate(ids, **given)
    if "cache_implementation" in given:
        return  # of which transformers says that a cache was given, too
    model.set_attn_implementation("kvcap")
    cache = kvcap.BudgetCache(model.config, 24, 40, "streaming_llm")
    with pytest.raises(error, match=message):
        model.generate(ids, **given, **as_cache(cache))
    if "assisted" in message:  # another model may still have it for an assistant
        assert model.generate(ids, **given).shape[1] == length + 8


class Listed(DynamicCache):
    """A cache that a program derived, which does something of its own."""


def checkpointed(family, attention, *, reentrant):
    model = tiny_model(family, attention).train()
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    return model


@pytest.mark.parametrize("length", [6, 40])  # of one block, of several
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradient_checkpointing_is_refused(length, family, reentrant, tokens):
    """It takes the cache from every layer, so that each block would see itself alone."""
    model, ids = checkpointed(family, "sdpa", reentrant=reentrant), tokens(length)
    with kvcap.cap(model, 24, 8):
        with pytest.raises(UnsupportedModel, match="gradient checkpointing, and a capped"):
            model(ids, labels=ids)
        model.eval()
        assert model(ids, labels=ids)[CACHE].seen == length
    model.train()
    model(ids, labels=ids).loss.backward()


@pytest.mark.parametrize(("family", "reentrant"), [("llama", True), ("gemma3_text", False)])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradient_checkpointing_beside_a_cache_is_refused(family, reentrant, tokens):
    model, ids = checkpointed(family, "kvcap", reentrant=reentrant), tokens(6)
    cache = kvcap.BudgetCache(model.config, 24, 8, "streaming_llm")
    with pytest.raises(UnsupportedModel, match="pass no BudgetCache"):
        model(ids, labels=ids, **as_cache(cache))
    assert not cache.seen
    model.eval()
    model(ids, labels=ids, **as_cache(cache))
    assert cache.seen == 6


@pytest.mark.parametrize(
    ("newer", "message"),
    [
        ({"budget_tokens": 12}, "cache has budget_tokens=24.* in force has budget_tokens=12"),
        ({"policy": "full"}, "policy='keydiff'.*policy='full'"),
        ({"kv_dtype": "int8"}, "kv_dtype=None.*kv_dtype='int8'"),
        ({"policy": KeyDiff()}, None),  # of other words, but the same
    ],
)
def test_a_cache_of_an_earlier_cap(newer, message, model, tokens):
    """It would hold what the earlier one allowed."""
    settings = {"budget_tokens": 24, "block_size": 8, "policy": "keydiff"}
    with kvcap.cap(model, **settings):
        cache = model(tokens(40))[CACHE]
    with kvcap.cap(model, **{**settings, **newer}) as capped:
        refused = pytest.raises(UnsupportedModel, match=message) if message else nullcontext()
        with refused:
            assert model(tokens(3), **as_cache(cache))[CACHE] is capped.cache
    assert cache.seen == (40 if message else 43)


def test_other_calls_that_are_refused(model, tokens):
    ids = tokens(40)
    filled = DynamicCache(config=model.config)
    model(ids, **as_cache(filled))
    with kvcap.cap(model, 24, 8):
        with pytest.raises(UnsupportedModel, match="DynamicCache is not capped"):
            model(ids, **as_cache(filled))
        with pytest.raises(PaddingUnsupported, match="ready-made"):
            model(ids, attention_mask=torch.ones(1, 1, 40, 40).tril())
        with pytest.raises(PositionMismatch, match="a call each"):
            model(ids, position_ids=(torch.arange(40) % 30)[None])
        with pytest.raises(UnsupportedModel, match="no gradients"):
            model(ids, labels=ids).loss.backward()
        with pytest.raises(UnsupportedModel, match="already under a cap"):
            kvcap.cap(model)
        with pytest.raises(UnsupportedModel, match="a Listed is not capped"):
            model(ids, **as_cache(Listed()))
    with kvcap.cap(model, 24, 8, "full") as capped:
        with pytest.raises(MemoryCapExceeded, match="raise the budget to 40"):
            model(ids)
        assert capped.cache.seen == 0


def test_pages_are_refused_while_there_is_a_cap(model):
    with kvcap.cap(model, 24, 8), pytest.raises(UnsupportedModel, match=r"kvcap\.Runtime\.batch"):
        model.generate_batch([[3, 4, 5]])
    assert "init_continuous_batching" not in vars(model)


def test_a_pipeline_in_place_of_its_model_is_refused(chat):
    pipe = pipeline("text-generation", chat[0], tokenizer=chat[1])
    with pytest.raises(UnsupportedModel, match=r"kvcap\.cap\(pipeline\.model, "):
        kvcap.cap(pipe)


def test_models_that_are_refused(model):
    with pytest.raises(UnsupportedModel, match=r"get_base_model\(\)"):
        kvcap.cap(torch.nn.Linear(2, 2))
    with pytest.raises(PlanInfeasible, match="MemoryPlan"):
        kvcap.cap(model, "64MiB")
    assert model.config._attn_implementation == "sdpa"
    gpt2 = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=97)
    with pytest.raises(UnsupportedModel, match="gpt2"):
        kvcap.cap(AutoModelForCausalLM.from_config(gpt2))
    with pytest.raises(UnsupportedModel, match="at most 24 slots"):
        kvcap.cap(AutoModelForCausalLM.from_config(tiny_config("mistral", sliding_window=24)))
