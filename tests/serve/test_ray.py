"""A server of two replicas on a Ray cluster, of which one is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from make import eventually, saved_model
from server_chats import admitted, served
from tools import PATIENCE

from kvcap.runtime.cli.options import Budget
from kvcap.runtime.errors import PlanInfeasible
from kvcap.serve.commands import EngineOptions, Load
from kvcap.serve.contract import Ask
from kvcap.serve.server import Server

pytestmark = pytest.mark.slow
pytest.importorskip("ray.serve", reason="pip install '.[serve-ray]'")
STORE = {"object_store_memory": 100 << 20}
BUDGET = Budget(budget_tokens=32)
LONG = 3000  # tokens, so that an answer lasts


def user(number: int) -> dict[str, Any]:
    return {
        "role": "user",
        "content": f"Please remember: the code for door {number} is 40{number}.",
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a small random model, which does not end an answer by itself."""
    return str(saved_model(tmp_path_factory.mktemp("model"), eos_token_id=[]))


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keep")


@pytest.fixture(scope="module")
def server(cluster: Any, model: str, keep: Path) -> Iterator[Server]:
    engine = EngineOptions("ray", 2, cluster.address)
    with served(
        model, load=Load(keep=keep), engine=engine, budget=BUDGET, api_key=["ada", "bob"]
    ) as made:
        yield made


def body(messages: Any, tokens: int = 12, **more: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, **more}


def chat(server: Server, messages: Any, key: str = "ada", **more: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/chat/completions",
        json=body(messages, **more),
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE,
    )


def streamed(server: Server, messages: Any) -> Any:
    """Ask for a long answer of ada's, which is read within `with`."""
    return httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        timeout=PATIENCE,
        json=body(messages, LONG, stream=True),
        headers={"Authorization": "Bearer ada"},
    )


def message_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}


def figure(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer ada"}).text
    lines = [line for line in text.splitlines() if line.startswith(f"kvcap_{name} ")]
    return float(lines[0].split()[1])


def test_two_replicas_answer_as_one_process_does(server, model):
    talks = [[user(number)] for number in range(6)]
    for _ in range(2):
        for talk in talks:
            answer = chat(server, talk)
            reused = answer.json()["usage"]["kv"]["reused"]
            assert (reused > 0) == (len(talk) > 1)  # it came back to its replica
            talk += [message_of(answer), {"role": "user", "content": "And now?"}]

    async def alone() -> None:
        one = admitted(model, BUDGET).scheduler
        for talk in talks:
            for end in (1, 3):
                options = {"max_new_tokens": 12, "temperature": 0}
                reply = one.submit(Ask(tuple(talk[:end]), options=options, owner="ada"))
                text = "".join([piece.text async for piece in reply])
                assert text == talk[end]["content"]
        await one.aclose()

    asyncio.run(alone())
    eventually(lambda: figure(server, "answered_total") >= 12)
    assert figure(server, "places") == 128


def replicas() -> list[int]:
    """Return the processes of the replicas."""
    import psutil

    running = psutil.process_iter(["pid", "cmdline"])
    return [
        one.pid for one in running if (one.info["cmdline"] or [""])[0].startswith("ray::ServeRep")
    ]


def working() -> int:
    """Return the replica that answers now."""
    import psutil

    known = {pid: psutil.Process(pid) for pid in replicas()}
    before = {pid: one.cpu_times().user for pid, one in known.items()}
    time.sleep(0.5)
    return max(known, key=lambda pid: known[pid].cpu_times().user - before[pid])


def test_a_replica_killed_mid_answer_loses_no_conversation(server, keep):
    talk = [user(7)]
    talk += [message_of(chat(server, talk)), {"role": "user", "content": "And now?"}]
    secret = [{"role": "user", "content": "Bob's secret is 9999."}]
    chat(server, secret, "bob")
    eventually(lambda: figure(server, "on_disk") >= 8)

    last, pid = "", 0
    with streamed(server, talk) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number == 10:
                pid = working()
                os.kill(pid, signal.SIGKILL)
            last = line or last
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"

    answer = chat(server, talk)  # by the other replica, from the file
    assert answer.json()["usage"]["kv"]["reused"] > 0
    assert chat(server, secret + talk[1:], "ada").json()["usage"]["kv"]["reused"] == 0
    eventually(lambda: len(set(replicas()) - {pid}) == 2)  # another takes its place
    for number in range(10, 16):
        message_of(chat(server, [user(number)]))


def test_what_a_replica_refuses_is_told_as_on_one_machine(server):
    no_key = httpx.post(f"{server.url}/v1/chat/completions", json=body([user(1)]))
    assert no_key.status_code == 401
    pinned = [{**user(1), "content": "long " * 400, "pin": True}]
    answer = chat(server, pinned)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "pins_too_large")


def test_the_strip_is_of_the_conversation_and_its_owner(server):
    answer = chat(server, [user(9)])
    where = f"{server.url}/v1/kvcap/sessions/{answer.headers['X-Session-Id']}/strip"
    mine, others = (
        httpx.get(where, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)
        for key in ("ada", "bob")
    )
    usage = answer.json()["usage"]["kv"]
    assert len(mine.json()["tokens"]) == sum(usage[name] for name in ("held", "waiting", "evicted"))
    assert (others.status_code, others.json()["error"]["code"]) == (404, "conversation_not_found")


def test_a_reader_that_goes_frees_its_place(server):
    stopped = figure(server, "stopped_total")
    with streamed(server, [user(8)]) as answer:
        next(answer.iter_lines())
    eventually(lambda: figure(server, "stopped_total") > stopped)
    eventually(lambda: figure(server, "answering") == 0)


def delete(server: Server, session_id: str, key: str = "ada") -> tuple[int, str]:
    answer = httpx.delete(
        f"{server.url}/v1/kvcap/sessions/{session_id}",
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE,
    )
    return answer.status_code, answer.json().get("error", {}).get("code", "")


def test_a_deleted_conversation_is_on_no_replica(server, keep):
    unknown = (404, "conversation_not_found")
    names: dict[str, Any] = {}
    for number in range(30, 34):  # on both of them
        answer = chat(server, talk := [user(number)])
        talk += [message_of(answer), {"role": "user", "content": "And now?"}]
        names[answer.headers["X-Session-Id"]] = talk
    for name, talk in names.items():
        eventually(lambda name=name: list(keep.glob(f"*-{name}-*.kvcap")))
        assert delete(server, name, "bob") == unknown
        assert list(keep.glob(f"*-{name}-*.kvcap"))
        assert delete(server, name) == (200, "")
        assert not list(keep.glob(f"*-{name}-*.kvcap"))
        assert delete(server, name) == unknown
        assert chat(server, talk).json()["usage"]["kv"]["reused"] == 0


def test_an_answer_ends_whose_conversation_is_deleted(server):
    with streamed(server, [user(40)]) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert delete(server, answer.headers["X-Session-Id"]) == (200, "")
        assert sum(line.startswith("data: ") for line in lines) < LONG
    eventually(lambda: figure(server, "answering") == 0)


def small(cluster: Any, model: str, replicas: int, budget: Budget) -> None:
    engine = EngineOptions("ray", replicas, cluster.address)
    served(model, engine=engine, budget=budget, name="small")


def test_after_the_end_all_is_kept_and_what_cannot_be_is_refused_by_name(
    cluster, model, server, keep
):
    import ray

    before = set(keep.glob("*.kvcap"))
    message_of(chat(server, [user(20)]))
    server.__exit__()
    assert len(set(keep.glob("*.kvcap")) - before) >= 1
    assert not replicas()
    assert not ray.is_initialized()  # the cluster is left, and goes on
    with pytest.raises(ValueError, match="--replicas 9 do not fit"):
        small(cluster, model, 9, BUDGET)
    with pytest.raises(PlanInfeasible, match="MiB"):
        small(cluster, model, 1, Budget(memory_cap="1MiB"))
    assert not replicas()
