"""Saved sessions: they go on exactly, are refused by name, and survive what befalls files."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_chat
import torch
from conftest import in_turn, small_policy, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tools import pocket_runtime, runtime_of

import kvcap
from kvcap.policies import load_policy, policies
from kvcap.runtime.cache.pool import SHIFT
from kvcap.runtime.cli.chat import Chat
from kvcap.runtime.cli.options import Output
from kvcap.runtime.errors import (
    SessionFileCorrupt,
    SessionFileError,
    SessionFileForeign,
    SessionFileNewer,
    SessionNotSaved,
)
from kvcap.runtime.session import file as session_file
from kvcap.runtime.session.file import SessionFile
from kvcap.runtime.session.session import Session

SRC = str(Path(kvcap.__file__).parents[1])
MODELS = {family: tiny_model(family) for family in ("llama", "gemma2", "gemma3_text", "smollm3")}


def read_on(session, ids):
    """Logits after a block and after every token of some steps."""
    logits = [session.loop.prefill(ids[:, :13])]
    logits += [session.loop.read(ids[:, i : i + 1]) for i in range(13, ids.shape[1])]
    return torch.stack(logits)


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize(
    ("policy", "family", "positions"),
    # Compact positions ask more of a cache; beside sliding layers they stand for both.
    in_turn(sorted(policies()), [
        *((family, "compact") for family in sorted(MODELS)), ("llama", "true"), ("smollm3", "true"),
    ], 2),
)  # fmt: skip
def test_a_loaded_session_goes_on_exactly(family, policy, positions, tokens, tmp_path):
    """Logits are equal to the bit, and nothing is read again."""
    model = MODELS[family]
    budget = 120 if policy == "full" else 24
    runtime = runtime_of(model, policy, budget, positions=positions)
    session = runtime.session(seed=1)
    ids = tokens(84)
    session.loop.prefill(ids[:, :60])
    for i in range(60, 66):
        session.loop.read(ids[:, i : i + 1])
    session.save(tmp_path / "s")
    copy = session.loop.copied()
    assert 0 < copy.nbytes <= session.cache.nbytes
    forks = [Session.load(runtime, tmp_path / "s") for _ in range(2)]
    others = [runtime.session() for _ in range(2)]
    others[1].loop.prefill(ids[:, :33])
    for other in others:
        other.loop.go_on_from(copy)
    assert forks[0].cache.seen == others[0].cache.seen == 66
    expected = read_on(session, ids[:, 66:])
    for fork in (*forks, *others):  # one after the other: they share nothing
        assert torch.equal(read_on(fork, ids[:, 66:]), expected)
        assert fork.cache.held == session.cache.held
        assert fork.cache.recomputed == session.cache.recomputed
    for fork in forks:
        assert fork.rng.get_state().equal(session.rng.get_state())
    others[0].loop.go_on_from(copy)  # which has not changed
    assert torch.equal(read_on(others[0], ids[:, 66:]), expected)


@pytest.mark.parametrize("sinks", [None, 0, 6])
@pytest.mark.parametrize(
    ("policy", "positions"),
    [("pyramidkv", "auto"), ("snapkv+pyramidkv+adakv", "compact"), ("headkv", "auto")],
)
def test_bytes_of_a_session_of_another_budget(policy, positions, sinks, tokens, tmp_path):
    """It brings its number of first tokens, by which layers and heads share slots out."""
    model = MODELS["llama"]
    eviction = (
        load_policy(policy, window=4) if "+" in policy else small_policy(policy, model.config)
    )
    saved = runtime_of(model, replace(eviction, sink_tokens=sinks), 40, 16, positions).session()
    saved.loop.prefill(tokens(60))
    saved.save(tmp_path / "s")
    for budget in (28, 40, 64):
        runtime = runtime_of(model, eviction, budget, 16, positions)
        cache = Session.load(runtime, tmp_path / "s").cache
        assert cache.nbytes == runtime.plan.cache_bytes


def test_an_answer_is_given_again_from_its_beginning(tmp_path):
    runtime = pocket_runtime()
    session = runtime.session()
    session.set_generation(max_new_tokens=6)
    rest = "".join(session.send("Who are you?", begin="I am"))
    session.save(tmp_path / "s")
    loaded = Session.load(runtime, tmp_path / "s")
    assert "".join(loaded.regenerate()) == rest
    assert loaded.messages == session.messages


def test_a_smaller_budget_keeps_what_the_policy_would(tokens, tmp_path):
    """KeyDiff needs no queries: the kept set is that of one eviction more."""
    model, ids = MODELS["llama"], tokens(60)
    session = runtime_of(model).session()
    session.loop.prefill(ids)
    session.save(tmp_path / "s")
    loaded = Session.load(runtime_of(model, budget=12), tmp_path / "s")
    one, two = session.cache.capped_layers[0], loaded.cache.capped_layers[0]
    segment = one.segments[0]
    keys = one.engine.positions.rotation.back(segment.keys, segment.aux("shift"))
    obs = kvcap.Observation(keys, segment.values, segment.positions, num_tokens=60, budget=12)
    gone = session.cache.eviction.select(obs, 12)
    for head in range(2):
        kept = set(segment.positions[0, head].tolist())
        kept -= set(segment.positions[0, head][gone[0, head]].tolist())
        assert set(two.segments[0].positions[0, head].tolist()) == kept


@pytest.mark.parametrize(
    ("saved", "loaded", "takes"),
    [
        ("h2o", "keydiff", True),
        ("adakv", "keydiff", True),
        ("keydiff", "adakv", False),  # no window of queries
        ("adakv", "snapkv", True),
        ("cake", "adakv", True),
        ("keydiff", "h2o", False),  # no accumulated attention
        ("obcache-h2o", "h2o", False),
        ("snapkv", "calidrop", True),
        ("calidrop", "snapkv", True),
        ("keydiff", "full", True),
    ],
)
def test_another_policy(saved, loaded, takes, tokens, tmp_path):
    model, ids = MODELS["smollm3"], tokens(90)
    session = runtime_of(model, saved).session()
    session.loop.prefill(ids[:, :60])
    session.save(tmp_path / "s")
    other = runtime_of(model, loaded, 60 if loaded == "full" else 24)
    if not takes:
        with pytest.raises(SessionFileForeign, match=saved):
            Session.load(other, tmp_path / "s")
        return
    assert read_on(Session.load(other, tmp_path / "s"), ids[:, 60:]).isfinite().all()


@pytest.fixture(scope="module")
def chatting(chat_model):
    return kvcap.Runtime.from_pretrained(chat_model, budget_tokens=32, block_size=16)


@pytest.fixture
def session(chatting):
    session = chatting.session("Be kind.", seed=3)
    session.set_generation(max_new_tokens=9, temperature=0.8)
    "".join(session.send("Hello there, how are you today? I am well."))
    return session


def rewritten(source, target, change):
    """A file with other content that its digest vouches for."""
    with SessionFile(source) as file:
        tensors = {name: [file.tensor(name)] for name in file.names}
        facts = file.facts
        change(tensors, facts)
        session_file.write(target, tensors, facts)
    return target


def put(index, name, value):
    def change(tensors, facts):
        tensors[f"layers.{index}.{name}"] = [value(tensors[f"layers.{index}.{name}"][0])]

    return change


def fact(value, *keys):
    def change(tensors, facts):
        part = facts
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value

    return change


@pytest.mark.slow(keep=35)
@pytest.mark.parametrize(
    "change",
    [
        put(0, "slots.keys", lambda x: x[:-1]),
        put(0, "slots.keys", lambda x: x.double().float().half()),
        put(1, "slots.values", lambda x: x * float("nan")),
        put(0, "slots.positions", lambda x: x - 1000),
        put(0, "slots.positions", lambda x: x + 1000),
        put(0, "slots.positions", lambda x: x * 0),
        put(0, "slots.shift", lambda x: x + 10_000),
        put(0, "slots.shift", lambda x: x - 10_000),
        lambda tensors, facts: tensors.pop("layers.0.slots.shift"),
        lambda tensors, facts: tensors.pop("draws"),
        lambda tensors, facts: facts.pop("messages", None) or facts.pop("conversation"),
        fact(-1, "seen"),
        fact(10**30, "seen"),
        fact(1e400, "seen"),
        fact("many", "seen"),
        fact([], "layers"),
        fact([5, 5], "layers", 0, "held"),
        fact([64, 0], "layers", 0, "budgets"),
        fact([99, 99], "layers", 0, "stays"),
        fact([[5, 2]], "pinned_spans"),
        fact([{"role": "user"}], "conversation", "messages"),
        fact([-4], "conversation", "unread"),
        fact([7], "conversation", "pinned"),
        fact("warm", "generation"),
        fact(None, "fingerprint"),
        fact(24.0, "seen"),
        fact(True, "seen"),
        fact("compact\0", "positions"),
        fact([[0, 1]] * 200_000, "pinned_spans"),
        fact([[0, 1 << 40]], "pinned_spans"),
        fact([[0, 1, 2]], "pinned_spans"),
        fact([0, 0], "layers", 0, "stays"),
        fact("no", "layers", 0, "moved"),
        fact(1 << 60, "layers", 0, "ring"),
        fact([1.0] * 3, "preferences"),
        fact([float("nan")] * 2, "preferences"),
        fact([[{"role": "user", "content": ["Hi"]}]], "conversation", "messages"),
        fact([{"role": "root", "content": "Hi"}] * 2, "conversation", "messages"),
        fact([{"role": "user", "content": "\ud800"}] * 2, "conversation", "messages"),
        fact(["Be kind."], "conversation", "system"),
        fact("yes", "conversation", "pin_system"),
        fact([10**9], "conversation", "unread"),
        fact([1, 2], "conversation", "unread"),
        fact(1.5, "conversation", "seed"),
        fact(1 << 70, "conversation", "seed"),
        *(
            fact(value, "generation", name)
            for name, values in {
                "temperature": ["hot", -1, float("nan"), float("inf"), 1e-200, True],
                "top_k": [-1, 2.5, "3"],
                "top_p": [1.5, -0.1, [0.5]],
                "min_p": [2],
                "repetition_penalty": [0, -1, "x", 1e200],
                "max_new_tokens": [0, 2.5, "many"],
                "eos_token_id": ["</s>", [[2]], 2.0, {"a": 1}],
                "stop_strings": [3, [None], {"a": 1}],
                "do_sample": ["yes", 1],
            }.items()
            for value in values
        ),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(change, session, chatting, tmp_path):
    """Even where the digest is right."""
    session.save(tmp_path / "s")
    bad = rewritten(tmp_path / "s", tmp_path / "bad", change)
    before, logits = session.conversation, session.cache.capped_layers[0].keys.clone()
    with pytest.raises(SessionFileError, match="bad"):
        session.restore(bad)
    assert session.conversation == before
    assert torch.equal(session.cache.capped_layers[0].keys, logits)


@pytest.mark.parametrize("version", ["9" * 4301, "9" * 10, "1.0", "-1", "\u0661", "", " 1"])
def test_a_version_that_is_none(version, session, chatting, tmp_path):
    session.save(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["version"] = version
    text = json.dumps(header).encode()
    (tmp_path / "s").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(SessionFileCorrupt, match="its version is"):
        Session.load(chatting, tmp_path / "s")


def test_settings_of_generation_are_what_a_session_goes_by(session, chatting, tmp_path):
    """Whole numbers where fractions are meant, one stop string, settings that nobody knows."""
    session.save(tmp_path / "s")

    def change(tensors, facts):
        facts["generation"] = {
            "do_sample": True,
            "temperature": 1,
            "repetition_penalty": 2,
            "stop_strings": "zzz",
            "num_beams": 4,
            "cache_implementation": "static",
            "max_new_tokens": 3,
        }

    loaded = Session.load(chatting, rewritten(tmp_path / "s", tmp_path / "other", change))
    assert "".join(loaded.send("And now?"))
    assert loaded.turn.completion_tokens <= 3
    assert loaded.generation.stop_strings == ["zzz"]
    assert loaded.generation.num_beams == chatting.generation.num_beams


@pytest.mark.slow
def test_pinned_spans_are_kept_in_the_fewest(session, chatting, tmp_path):
    """So that what evictions do for each of them is bounded by the slots."""
    session.save(tmp_path / "s")
    many = rewritten(
        tmp_path / "s", tmp_path / "many", fact([[2, 4], [3, 6]] * 40_000, "pinned_spans")
    )
    assert Session.load(chatting, many).cache.pinned_spans == [(2, 6)]


def test_evicted_tokens_of_calidrop_are_checked(tokens, tmp_path):
    """Figures, places and numbers of the store beside the cache."""
    runtime = runtime_of(MODELS["llama"], "calidrop")
    session = runtime.session(seed=1)
    session.loop.prefill(tokens(60))
    for i in range(4):
        session.loop.read(tokens(70)[:, 60 + i : 61 + i])
    session.save(tmp_path / "s")
    assert Session.load(runtime, tmp_path / "s").cache.recomputed == session.cache.recomputed
    for change in (
        fact([2, 3], "layers", 0, "counts"),
        fact([-1, -1], "layers", 0, "counts"),
        fact(["x", 1], "layers", 0, "counts"),
        fact(None, "layers", 0, "counts"),
        fact([1 << 40, 0], "layers", 0, "evicted"),
        put(0, "evicted.made_at", lambda x: x * 0 - 1),
        put(0, "evicted.made_at", lambda x: x * 0 + 5000),
        put(0, "evicted.positions", lambda x: x + 5000),
        put(0, "evicted.score", lambda x: x * float("nan")),
        put(0, "evicted.keys", lambda x: x * float("inf")),
        put(0, "remembered.out", lambda x: x * float("nan")),
        put(0, "remembered.lse", lambda x: x * 0 + float("inf")),
    ):
        bad = rewritten(tmp_path / "s", tmp_path / "bad", change)
        with pytest.raises(SessionFileCorrupt):
            session.restore(bad)
        assert session.cache.seen == 64


@pytest.mark.parametrize("positions", ["compact", "true"])
def test_a_session_goes_on_wherever_evicted_tokens_lie(positions, tokens, tmp_path):
    """On the device, on the host, in a file, or in the memory of an earlier version's file."""
    ids, options = tokens(84), {"window": 4, "calibration_size": 20, "theta1": 0.3}
    runtimes = [
        runtime_of(
            MODELS["llama"],
            kvcap.load_policy("calidrop", store=store, **options),
            positions=positions,
        )
        for store in ("device", "host", str(tmp_path))
    ]
    session = runtimes[0].session(seed=1)
    session.loop.prefill(ids[:, :60])
    session.loop.read(ids[:, 60:61])
    session.save(tmp_path / "s")

    def earlier(tensors, facts):
        facts["parts"]["corrector"][1]["store"] = "memory"

    earlier_file = rewritten(tmp_path / "s", tmp_path / "earlier", earlier)
    expected = read_on(session, ids[:, 61:])
    for runtime in runtimes:
        for file in (tmp_path / "s", earlier_file):
            other = Session.load(runtime, file)
            assert torch.equal(read_on(other, ids[:, 61:]), expected)
            assert other.cache.recomputed == session.cache.recomputed
    other.save(tmp_path / "again")
    with SessionFile(tmp_path / "again") as file:
        assert "store" not in file.facts["parts"]["corrector"][1]
        assert "layers.0.evicted.made_at" in file.names
        assert f"layers.0.evicted.{SHIFT}" not in file.names


def test_evicted_tokens_move_into_a_cache_of_another_budget(tokens, tmp_path):
    """Where fewer are held, each counts behind fewer: keys stay where they were rotated to."""
    ids, eviction = tokens(84), kvcap.load_policy("h2o+calidrop", calibration_size=20)
    session = runtime_of(MODELS["llama"], eviction).session(seed=1)
    session.loop.prefill(ids[:, :60])
    session.save(tmp_path / "s")
    smaller = runtime_of(MODELS["llama"], eviction, budget=16, block=20)
    other = Session.load(smaller, tmp_path / "s")
    for mine, its in zip(session.cache.capped_layers, other.cache.capped_layers, strict=True):
        stores = mine.engine.evicted_store, its.engine.evicted_store
        assert torch.equal(stores[0].made_at(mine.segments)[0], stores[1].made_at(its.segments)[0])
        shifts = [store.evicted[0].aux(SHIFT) for store in stores]
        assert (shifts[0] <= shifts[1]).all()
        assert (shifts[0] < shifts[1]).any()
    assert torch.isfinite(read_on(other, ids[:, 60:])).all()


def test_foreign(session, chatting, tmp_path, tmp_path_factory):
    session.save(tmp_path / "s")
    folder = tmp_path_factory.mktemp("other")
    tiny_chat.save(folder)
    options = {"budget_tokens": 32, "block_size": 16}

    def load(message, **more):
        runtime = kvcap.Runtime.from_pretrained(folder, **{**options, **more})
        with pytest.raises(SessionFileForeign, match=message):
            Session.load(runtime, tmp_path / "s")

    load("--dtype float32", dtype="bfloat16")
    load("--positions compact", positions="true")
    # the same weights under another name are the same model
    same = Session.load(kvcap.Runtime.from_pretrained(folder, **options), tmp_path / "s")
    assert same.cache.seen == session.cache.seen
    with torch.no_grad():
        same.runtime.model.model.embed_tokens.weight.mul_(1.5)
    with pytest.raises(SessionFileForeign, match=r"saved by model .*, and this is"):
        Session.load(same.runtime, tmp_path / "s")
    same.runtime.name = session.runtime.name
    with pytest.raises(SessionFileForeign, match=r"when it had other weights.*of 32 slots"):
        Session.load(same.runtime, tmp_path / "s")


def test_engines_without_pytorch_read_whose_file_it_is(tmp_path):
    """NumPy has no bfloat16."""
    session_file.write(tmp_path / "s", {"keys": [torch.ones(3, dtype=torch.bfloat16)]}, {"a": 1})
    with SessionFile(tmp_path / "s", "np") as file:
        assert file.facts == {"a": 1}


@pytest.mark.parametrize(("changes", "says"), [
    ({"fingerprint": "0", "model": "someone/else"}, "saved by model 'someone/else'"),
    ({"fingerprint": "0", "model": "someone/else", "dtype": "bfloat16"},
     "saved by model 'someone/else'.*--dtype bfloat16"),
    ({"fingerprint": "0", "dtype": "bfloat16"}, "start with --dtype bfloat16"),
    ({"backend": "onnxruntime", "model": "x (ONNX Runtime)"}, "--backend onnxruntime"),
    ({"positions": "true"}, "start with --positions true"),
])  # fmt: skip
def test_a_file_of_another_model_is_refused_by_the_model_first(changes, says, session, tmp_path):
    session.save(tmp_path / "s")
    other = rewritten(tmp_path / "s", tmp_path / "t", lambda _, facts: facts.update(changes))
    with pytest.raises(SessionFileForeign, match=says):
        session.restore(other)


def test_fields_of_another_version_of_transformers_do_not_matter(session, chatting, tmp_path):
    saved = tmp_path / "session"
    session.save(saved)
    with SessionFile(saved) as file:
        settings = file.facts["generation"]
    assert None not in settings.values()
    assert {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"} <= set(settings)
    chatting.model.config.only_in_this_version = 1
    try:
        assert Session.load(chatting, saved).messages == session.messages
    finally:
        del chatting.model.config.only_in_this_version


def test_newer(session, chatting, tmp_path, monkeypatch):
    monkeypatch.setattr(session_file, "VERSION", 2)
    session.save(tmp_path / "s")
    monkeypatch.undo()
    with pytest.raises(SessionFileNewer, match="format 2"):
        Session.load(chatting, tmp_path / "s")


@pytest.mark.parametrize(("content", "says"), [
    *((x, "cannot be loaded") for x in (b"", b"x", b"\0" * 100, b"Hello, this is a text." * 9)),
    (save({"x": torch.zeros(3)}), "no kvcap session"),
])  # fmt: skip
def test_no_session(content, says, chatting, tmp_path):
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(SessionFileCorrupt, match=says):
        Session.load(chatting, tmp_path / "s")


def test_no_such_file(session, chatting, tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SessionFileCorrupt, match="cannot be read"):
            Session.load(chatting, path)
    with pytest.raises(SessionNotSaved, match="No such file"):
        session.save(tmp_path / "none" / "s")


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and devices")
def test_what_is_no_file_is_neither_read_nor_replaced(session, chatting, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, kind in (("pipe", "pipe is a pipe"), ("device", "device is a device")):
        with pytest.raises(SessionFileCorrupt, match=kind):
            Session.load(chatting, tmp_path / name)
        with pytest.raises(SessionNotSaved, match="not a file"):
            session.save(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    assert Path("/dev/zero").is_char_device()


def test_what_could_not_be_loaded_is_not_saved(session, tmp_path, monkeypatch):
    session.save(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()
    monkeypatch.setattr(session_file, "LONGEST", 1000)
    with pytest.raises(SessionNotSaved, match="begin a new one"):
        session.save(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_changed_bytes_never_load(data, saved_bytes, chatting, tmp_path):
    """Flipped, cut or extended: a named error, or what was saved to the bit."""
    content = bytearray(saved_bytes)
    # Half of the examples hit the header, where most can go wrong.
    last = data.draw(st.sampled_from([4000, len(content) - 1]))
    at = data.draw(st.integers(0, last))
    kind = data.draw(st.sampled_from(["flip", "cut", "extend", "zero"]))
    if kind == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[at:]
    elif kind == "extend":
        content += data.draw(st.binary(min_size=1, max_size=20))
    else:
        content[at : at + 16] = bytes(len(content[at : at + 16]))
    path = tmp_path / "s"
    path.write_bytes(content)
    if content == saved_bytes:
        return
    with pytest.raises(SessionFileError):
        Session.load(chatting, path)


@pytest.fixture(scope="module")
def saved_bytes(chatting, tmp_path_factory):
    session = chatting.session(seed=3)
    session.set_generation(max_new_tokens=4)
    "".join(session.send("Hello there!"))
    path = tmp_path_factory.mktemp("saved") / "s"
    session.save(path)
    return path.read_bytes()


def test_what_another_program_saved_is_not_replaced(session, chatting, tmp_path):
    session.save(tmp_path / "s")
    other = Session.load(chatting, tmp_path / "s")
    "".join(other.send("My cat is Tom."))
    other.save(tmp_path / "s")
    with pytest.raises(SessionNotSaved, match="saved meanwhile"):
        session.save(tmp_path / "s")
    session.restore(tmp_path / "s")
    assert session.messages == other.messages
    session.save(tmp_path / "s")


@pytest.mark.parametrize(("name", "error"), [
    *((f"os.{name}", OSError(28, "No space left")) for name in ("write", "fsync", "replace")),
    ("tempfile.mkstemp", PermissionError(13, "Permission denied")),
])  # fmt: skip
def test_a_disk_that_is_full_or_may_not_be_written(name, error, session, tmp_path, monkeypatch):
    """Root may write anywhere, so that the refusal itself is made."""
    session.save(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()

    def refused(*_, **__):
        raise error

    monkeypatch.setattr(name, refused)
    with pytest.raises(SessionNotSaved, match=error.strerror):
        session.save(tmp_path / "s")
    monkeypatch.undo()
    assert (tmp_path / "s").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


KILLED = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from kvcap.runtime.session.file import write
count = 0
while True:
    count += 1
    write(sys.argv[1], {"x": [torch.full((300_000,), count)]}, {"count": count})
    print(count, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_at_any_moment(tmp_path):
    """Whatever is on the disk is one whole save."""
    path, wait = tmp_path / "s", random.Random(0)
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path), SRC], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()  # saved once at least
        time.sleep(wait.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with SessionFile(path) as file:
            assert file.facts == {"count": int(file.tensor("x")[0])}
            assert file.tensor("x").unique().numel() == 1
    session_file.write(path, {}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["s"], "nor is anything left beside it"


WRITING = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from kvcap.runtime.files import replacing
with replacing(Path(sys.argv[1])) as descriptor:
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL and locks")
def test_parts_of_the_killed_are_removed_and_those_of_the_living_are_not(tmp_path):
    path = tmp_path / "s"
    others = [".s.part", ".t.abcdefgh.part", ".s.abcdefgh.part.bak", ".s.x.abcdefgh.part"]
    for name in others:
        (tmp_path / name).touch()
    killed, living = (
        subprocess.Popen(
            [sys.executable, "-c", WRITING, str(path), SRC],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    )
    for process in (killed, living):
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
    killed.kill()
    killed.communicate()
    parts = lambda: sorted(p.name for p in tmp_path.iterdir() if p.name not in others)  # noqa: E731
    assert len(parts()) == 2
    session_file.write(path, {}, {"count": 1})
    assert len(parts()) == 2, "the file and the part of the living"
    assert living.communicate("")[0] == ""
    assert living.returncode == 0
    assert parts() == ["s"]
    assert path.read_bytes() == b"", "the last to end"
    assert {*others} < {p.name for p in tmp_path.iterdir()}


def test_other_tools_can_look_inside(session, tmp_path):
    """Metadata says what is inside to who looks with other tools."""
    from safetensors import safe_open

    session.save(tmp_path / "s")
    with safe_open(tmp_path / "s", framework="pt") as file:
        facts = json.loads(file.metadata()["session"])
        assert file.metadata()["format"] == "kvcap-session"
        assert facts["policy"] == "lagkv"
        assert file.get_tensor("layers.0.slots.keys").shape == (2 * 32, 16)


@pytest.fixture
def command(kvcap):
    """The command line on the small model, in this process."""
    rest = ("--budget-tokens", "32", "--block-size", "16", "--max-new-tokens", "6", "-q")
    return lambda *arguments, stdin=b"": kvcap(*arguments, *rest, stdin=stdin)


def test_the_command_line_goes_on(command, chatting, tmp_path):
    """Three answers in three processes are those of one."""
    model, file = chatting.name, str(tmp_path / "s")
    texts = ("Hello!", "How are you?", "And now?")
    likeliest = ("--temperature", "0")
    whole = command("chat", model, *likeliest, stdin="\n".join(texts).encode())[1]
    parts = [
        command("generate", model, texts[0], "--session", file, *likeliest),
        command("chat", model, "--session", file, *likeliest, stdin=texts[1].encode()),
        command("generate", model, texts[2], "--session", file, *likeliest),
    ]
    assert [code for code, _, _ in parts] == [0, 0, 0]
    assert "".join(out for _, out, _ in parts) == whole
    assert len(Session.load(chatting, file).messages) == 6


def test_options_that_cannot_be_with_a_session(command, chatting, tmp_path):
    model, file = chatting.name, str(tmp_path / "s")
    given = ("--system-prompt", "Be kind.", "--pin-system", "--session", file)
    assert command("generate", model, "Hello!", *given)[0] == 0
    assert Session.load(chatting, file).cache.pinned_spans
    assert command("generate", model, "Hello!", *given)[0] == 0
    given = ("--system-prompt", "Be rude.", "--session", file)
    (tmp_path / "other").write_text("Hello")
    for options, wrong, says in (
        (given, 2, "another system prompt"),
        (("--pin-system",), 2, "needs a system prompt"),
        (("--session", str(tmp_path / "none" / "s")), 1, "cannot be saved"),  # before the answer
        (("--session", str(tmp_path / "other")), 2, "cannot be loaded"),
    ):
        code, out, err = command("generate", model, "Hello!", *options)
        assert (code, out) == (wrong, "")
        assert says in err
    assert (tmp_path / "other").read_text() == "Hello"


def test_chat_commands(chatting, tmp_path, capsys):
    session = chatting.session(seed=0)
    session.set_generation(max_new_tokens=6)
    chat = Chat(session, Output(quiet=True), str(tmp_path / "kept"))
    file = tmp_path / "a file"
    chat.handle("/pin The door is blue.")
    chat.handle(f"/save {file}")
    chat.handle("Tell me more.")
    first = session.messages[-1]["content"]
    assert len(Session.load(chatting, tmp_path / "kept").messages) == 4
    chat.handle(f"/load {file}")
    assert len(session.messages) == 2
    chat.handle("Tell me more.")
    assert session.messages[-1]["content"] == first
    capsys.readouterr()
    chat.handle("/pin")
    assert "The door is blue." in capsys.readouterr().err
    chat.handle("/policy snapkv window=4")
    chat.handle("Go on.")
    assert chat.session.pinned == {0}
    assert chat.session.cache.pinned_spans
    assert chat.code == 0
    for line, says in (
        ("/save", "give a file"),
        ("/load", "give a file"),
        (f"/load {tmp_path}/none", "cannot be read"),
        (f"/save {tmp_path}/none/s", "cannot be saved"),
        ("/pin " + "word " * 60, "pin less"),
    ):
        before = len(chat.session.messages)
        chat.handle(line)
        assert says in capsys.readouterr().err
        assert len(chat.session.messages) == before
