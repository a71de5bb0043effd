"""A server whose answers are written by replicas: where each goes, and what outlives a replica."""

from __future__ import annotations

import inspect
import pickle
import sys
from typing import Any

import pytest
from server_chats import served

from kvcap.runtime.cli.options import Recalling, Run, Running
from kvcap.runtime.cluster import Share
from kvcap.runtime.errors import Busy, ConversationUnknown, ExtraMissing, KvcapError
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.serve.admission import open_conversations
from kvcap.serve.commands import EngineOptions
from kvcap.serve.contract import Ask, Figures
from kvcap.serve.replicas import Opening, open_replicas, place_of, routed, sent, shared, total


def chat_of(*texts: str, system: str | None = None) -> tuple[Any, ...]:
    """Return a chat of these texts, the user's first."""
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return (*([{"role": "system", "content": system}] if system else []), *chat)


def test_a_conversation_returns_to_its_replica_by_its_messages_and_by_its_id():
    first, replica = routed(Ask(chat_of("Hello!", system="Be brief."), owner="ada"))
    later = Ask(chat_of("Hello!", "Hi.", "And now?", system="Be brief."), owner="ada")
    assert routed(later)[1] == replica
    assert first.fresh_id is not None
    assert routed(Ask(chat_of("And now?"), owner="ada", session_id=first.fresh_id))[1] == replica
    assert place_of("ada", first.fresh_id) == replica
    assert routed(later)[0].fresh_id != first.fresh_id  # another conversation, begun alike
    named = Ask(chat_of("Hello!"), owner="ada", session_id="mine")
    assert routed(named) == (named, place_of("ada", "mine"))


def test_other_owners_beginnings_and_names_go_elsewhere():
    asks = [
        Ask(chat_of("Hello!"), owner="ada"),
        Ask(chat_of("Hello!"), owner="bob"),
        Ask(chat_of("Hello."), owner="ada"),
        Ask(chat_of("Hello!", system="Be brief."), owner="ada"),
        Ask(chat_of("Hello!"), owner="ada", session_id="x"),
        Ask(chat_of("Hello!"), owner="bob", session_id="x"),
        Ask(chat_of("Hello!"), owner="ada", session_id="y"),
        Ask(prompt="Hello!", owner="ada"),  # any replica takes it
    ]
    replicas = [routed(one)[1] for one in asks]
    assert len(set(replicas)) == len(asks)
    assert replicas[-1] == ""


GPUS = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}]


@pytest.mark.parametrize(
    ("nodes", "replicas", "running", "expected"),
    [
        (GPUS, None, Running(), Share(2, 0, 1)),
        (GPUS, 1, Running(), Share(1, 0, 1)),
        (GPUS, None, Running(device="cpu"), Share(2, 8, 0)),
        (GPUS, 3, Running(device="cpu"), Share(3, 4, 0)),
        ([{"CPU": 8.0}, {}], 2, Running(threads=2), Share(2, 2, 0)),
    ],
)
def test_replicas_share_the_machines(nodes, replicas, running, expected):
    assert shared(nodes, replicas, running) == expected


@pytest.mark.parametrize(
    ("nodes", "running", "match"),
    [
        (GPUS, Running(), "--replicas 9 do not fit: the cluster has 2 GPUs"),
        ([{"CPU": 8.0}], Running(), "room for 8 of 1 CPUs each"),
        ([{"CPU": 8.0}], Running(threads=4), "room for 2 of 4 CPUs each"),
    ],
)
def test_more_replicas_than_the_cluster_has_room_for_are_refused(nodes, running, match):
    with pytest.raises(ValueError, match=match):
        shared(nodes, 9, running)


def test_figures_of_replicas_are_added_but_for_what_they_share():
    one = Figures("keydiff", 64, places=4, asked=3, on_disk=5, disk_cap=9, memory_cap=7)
    both = total([one, one])
    assert (both.policy, both.budget_tokens, both.on_disk, both.disk_cap) == ("keydiff", 64, 5, 9)
    assert (both.places, both.asked, both.memory_cap, both.closing) == (8, 6, 14, False)
    assert total([]) == Figures()


def test_ray_is_refused_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExtraMissing, match=r"pip install '\.\[serve-ray\]'"):
        open_replicas(Opening(Run("pocket")), "pocket", address="x:1")


@pytest.mark.parametrize("engine", [EngineOptions(replicas=2), EngineOptions(ray_address="x:1")])
def test_options_of_a_cluster_need_one(engine):
    with pytest.raises(ValueError, match="needs --engine ray; add that"):
        engine.check()


def test_every_replica_recalls_as_the_command_was_told(monkeypatch):
    openings: list[Opening] = []

    def start(opening: Opening, *_: Any) -> Any:
        openings.append(pickle.loads(pickle.dumps(opening)))
        raise KvcapError("there is no cluster")

    monkeypatch.setattr("kvcap.serve.replicas.open_replicas", start)
    with pytest.raises(KvcapError, match="no cluster"):
        served("pocket", engine=EngineOptions("ray"), recalling=Recalling("96", "1MiB"))
    assert openings[0].load["recall"] == RecallSettings(96, 1 << 20)
    inspect.signature(open_conversations).bind("", **openings[0].load)


def test_errors_are_the_same_on_the_other_side(caplog):
    busy = pickle.loads(pickle.dumps(sent(Busy("full", 7.5))))
    assert (type(busy), str(busy), busy.retry_after_s) == (Busy, "full", 7.5)
    unknown = pickle.loads(pickle.dumps(sent(ConversationUnknown("none"))))
    assert isinstance(unknown, ConversationUnknown)
    assert "no such key" not in caplog.text
    fault = sent(KeyError("no such key"))  # what it says may be of use to an attacker
    assert type(fault) is KvcapError
    assert "KeyError" in str(fault)
    assert "no such key" not in str(fault)
    assert "no such key" in caplog.text
