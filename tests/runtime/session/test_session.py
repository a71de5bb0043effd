"""Conversations: turns, streaming, stopping, sampling, figures; on a random model."""

from __future__ import annotations

import pytest
import torch
from conftest import SIZES
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import Wrapped
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM

import kvcap
from kvcap.runtime.backends.pytorch.runtime import usual_every
from kvcap.runtime.errors import LogitsBroken, TokenUnknown
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.session.decoding import TextStream
from kvcap.runtime.session.messages import ChatWriter, render


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {**SIZES, **ids, "vocab_size": len(tokenizer)}
    LlamaForCausalLM(LlamaConfig(**sizes, head_dim=16)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make(directory, budget=64, **options):
    runtime = kvcap.Runtime.from_pretrained(
        directory, budget_tokens=budget, block_size=16, device="cpu", **options
    )
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=12)
    session.generation.eos_token_id = None  # a random model's answers have no end
    return session


@pytest.mark.parametrize("special", [False, True])
def test_text_is_encoded_whole_as_transformers_does(directory, special):
    session = make(directory)
    tokenizer = session.runtime.tokenizer
    for text in ("Grüße aus dem <|im_end|> Süden, 12 mal 34. " * 20, "", " \n", "<|im_start|>"):
        expected = tokenizer(text, add_special_tokens=special)["input_ids"]
        assert session.encode(text, special=special) == expected
        tokenizer(text, truncation=True, max_length=5)  # which stays until the next call
        assert session.encode(text, special=special) == expected


@pytest.mark.parametrize(("every", "spare"), [(1, 0), (None, 15)])
def test_figures_add_up(directory, every, spare):
    """Also where an answer evicts as suits a CPU: every 64 tokens, or every block."""
    session = make(directory, evict_every=every)
    runtimes = session.runtime, session.runtime.with_budget(40)
    assert [x.settings.evict_every for x in runtimes] == [spare + 1] * 2
    assert usual_every("cpu", 128) == 64
    assert usual_every("cuda", 128) == 1
    for text in ("Hello there, how are you today?", "Tell me more about the weather, please."):
        before = session.stats.seen_tokens
        answer = "".join(session.send(text))
        stats = session.stats
        assert session.messages[-1] == {"role": "assistant", "content": answer}
        assert stats.turn.finish_reason == "length"
        assert stats.turn.completion_tokens == 12
        # The last token of an answer is read with the next turn.
        assert stats.seen_tokens - before == stats.turn.prompt_tokens + 11
        assert stats.held_tokens == min(stats.seen_tokens, 64)
        assert 0 <= stats.waiting_tokens <= spare
        used = stats.held_tokens + stats.waiting_tokens
        assert stats.evicted_tokens == stats.seen_tokens - used
        assert str(stats.slots) in repr(stats)
        assert str(stats.slots) in repr(session)
        assert stats.bytes <= stats.peak_bytes == stats.cap_bytes
    session.clear()
    assert session.stats.seen_tokens == 0
    assert session.messages == []


def test_ctrl_c_waits_for_the_block(directory):
    import os
    import signal

    session = make(directory)
    stream = session.send("Hello!")
    next(stream)
    layer = session.runtime.model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    hook.remove()
    assert session.cache.consistent
    assert session.turn.finish_reason == "interrupted"
    assert [m["role"] for m in session.messages] == ["user", "assistant"]
    assert session._unread == []  # the token was read before Ctrl-C took effect
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "cake", "adakv", "full"])
def test_a_full_cache_can_end_the_answer(policy, directory):
    full = make(directory, policy=policy, budget=48)
    full.on_full = "stop"
    full.set_generation(max_new_tokens=100)
    answer = "".join(full.send("Hi!"))
    assert full.turn.finish_reason == "full"
    assert full.stats.evicted_tokens == 0
    assert full.stats.held_tokens == 48
    free = make(directory, budget=200)
    free.set_generation(max_new_tokens=full.turn.completion_tokens)
    assert "".join(free.send("Hi!")) == answer
    assert free.turn.finish_reason == "length"
    with pytest.raises(kvcap.KvcapError, match=r"never evicts|may be evicted"):
        list(full.send("And now?"))
    assert len(full.messages) == 2
    with pytest.raises(ValueError, match="evict, stop, error"):
        full.on_full = "grow"
    full.on_full = "evict"
    if policy != "full":
        "".join(full.send("And now?"))
        assert full.stats.evicted_tokens > 0


def test_sampling_is_reproducible_and_greedy_is_the_maximum(directory):
    def say(**options):
        session = make(directory)
        session.set_generation(max_new_tokens=10, **options)
        return "".join(session.send("Hello!"))

    assert say(temperature=1.0, seed=1) == say(temperature=1.0, seed=1)
    assert say(temperature=1.0, seed=1) != say(temperature=1.0, seed=2)
    assert say(temperature=1.0, top_k=1, seed=5) == say(temperature=0.0)
    assert say(temperature=1.0, top_p=1e-6, seed=5) == say(temperature=0.0)
    assert say(temperature=1.0, min_p=1.0, seed=5) == say(temperature=0.0)


def test_beams_are_refused(directory):
    session = make(directory)
    session.generation.num_beams = 4
    with pytest.raises(kvcap.KvcapError, match="num_beams=1"):
        list(session.send("Hello!"))


def test_a_token_beyond_the_embedding_is_refused_before_it_is_read(directory, tokenizer):
    session = make(directory)
    assert session.runtime.tokenizer.add_tokens(["<extra>"]) == 1
    size = len(tokenizer)  # of the model, too
    for _ in range(2):  # in a new conversation, and in one that has begun
        seen, messages = session.cache.seen, list(session.messages)
        for refused in (session.send, session.complete):
            with pytest.raises(TokenUnknown) as error:
                refused("Once <extra> upon a time")
            assert f"has '<extra>', token {size:,} of the tokenizer" in str(error.value)
            assert f"embeddings of {size:,} tokens" in str(error.value)
        assert (session.cache.seen, session.messages) == (seen, messages)
        assert len("".join(session.send("Once upon a time"))) > 0


def test_other_policies_share_the_weights(directory):
    session = make(directory)
    other = session.runtime.with_policy(kvcap.load_policy("h2o"))
    assert other.model is session.runtime.model
    assert other.plan.policy_state > 0
    "".join(other.session(seed=0).send("Hello!"))


@pytest.mark.slow
def test_a_byte_cap_holds_for_every_policy_that_is_switched_to(directory):
    runtime = kvcap.Runtime.from_pretrained(directory, kv_budget="48KiB", device="cpu")
    for policy in ("keydiff", "h2o", "snapkv"):
        other = runtime.with_policy(kvcap.load_policy(policy))
        session = other.session(seed=0)
        "".join(session.send("word " * 100))
        assert session.stats.peak_bytes <= other.cap_bytes == 48 * 1024
        assert session.stats.held_tokens <= other.plan.budget_tokens


def test_tokenizers_without_a_usable_template(tokenizer):
    class Plain:
        chat_template = None

    class Forgetful:
        chat_template, special_tokens_map = "{{ messages[-1].content }}", {}

    hi = [{"role": "user", "content": "hi"}]
    with pytest.raises(kvcap.KvcapError, match="generate --raw"):
        render(Plain(), hi)
    with pytest.raises(kvcap.KvcapError, match="rewrites earlier answers"):
        ChatWriter(Forgetful()).render_turn(None, hi)


@given(
    text=st.text(max_size=40),
    stops=st.lists(st.text(min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_streamed_text_is_the_text_up_to_the_first_stop_string(text, stops, data):
    """However the text is cut into pieces; nothing of a stop string is shown."""
    pieces, rest = [], text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:cut])
        rest = rest[cut:]
    known = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(set(pieces))}))
    known.decoder = decoders.Fuse()
    stream = TextStream(Wrapped(known), stops)
    shown = ""
    for piece in pieces:
        shown += stream.put(known.token_to_id(piece))
        if stream.stopped:
            break
    shown += stream.end()
    if not stream.stopped:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)


def test_logits_that_are_no_numbers_end_in_an_error(directory):
    """Damaged weights gave an answer of no text, or of arbitrary tokens."""
    session = make(directory)
    weight = session.runtime.model.model.norm.weight
    sound = weight.detach().clone()
    with torch.no_grad():
        weight[0] = float("nan")
    with pytest.raises(LogitsBroken, match=r"NaN or infinite.* behind \d+ tokens"):
        "".join(session.send("Hello!"))
    with torch.no_grad():
        weight.copy_(sound)
    session.clear()
    assert "".join(session.send("Hello!"))


@pytest.mark.parametrize(("positions", "advice"), [("compact", "at most 48"), ("true", "compact")])
def test_positions_beyond_the_trained_length_are_warned_of_once(directory, positions, advice):
    runtime = kvcap.Runtime.from_pretrained(
        directory, budget_tokens=64, block_size=16, device="cpu", positions=positions
    )
    runtime.model.config.max_position_embeddings = 48
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=12)
    with pytest.warns(UserWarning, match=f"beyond the 48 tokens.*{advice}") as warned:
        "".join(session.send("one two three four five six seven eight " * 16))
    assert len(warned) == 1
    session = runtime.with_budget(40).session(seed=0)
    if positions == "compact":  # pytest turns another warning into an error
        "".join(session.send("one two three four five six seven eight " * 16))
