"""`kvcap serve`: its options, and OpenAI's client against the true server on pocket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from make import argv
from server_chats import client_of, plain, pocket, served, user
from tiny_chat import save
from tools import PATIENCE

from kvcap.cli import run
from kvcap.runtime.cli.options import Running
from kvcap.serve.commands import Address
from kvcap.serve.scheduler import Scheduler

FACT = "Please remember: the code for the blue door is 4821. " * 4
REQUEST: Any = {"model": "pocket", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(scheduler: Scheduler) -> Iterator[openai.OpenAI]:
    with client_of(scheduler) as client:
        yield client


def test_clients_at_once_are_answered_as_if_each_were_alone(client):
    chats: list[Any] = [[user(f"Please remember: my lucky number is {n}. " * 4)] for n in range(5)]

    def answer(messages: Any) -> str:
        parts = client.chat.completions.create(messages=messages, stream=True, **REQUEST)
        return "".join(part.choices[0].delta.content or "" for part in parts)

    with ThreadPoolExecutor(5) as threads:
        answers = list(threads.map(answer, chats))
    assert answers == [plain(pocket(), messages)[1] for messages in chats]


def test_log_probabilities_are_those_of_the_text(client):
    whole = client.chat.completions.create(
        messages=[user("Hello!")], logprobs=True, top_logprobs=2, **REQUEST
    )
    content = whole.choices[0].logprobs.content
    assert "".join(one.token for one in content) == whole.choices[0].message.content
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in content)
    assert {len(one.top_logprobs) for one in content} == {2}
    parts = client.chat.completions.create(
        messages=[user("Hello!")], logprobs=True, stream=True, **REQUEST
    )
    streamed = [p.choices[0].logprobs.content for p in parts if p.choices[0].logprobs]
    assert [one.token for few in streamed for one in few] == [one.token for one in content]
    text = client.completions.create(prompt="Hello!", logprobs=1, **REQUEST).choices[0]
    assert text.logprobs.text_offset[0] == 0
    assert "".join(text.logprobs.tokens) == text.text


def test_a_model_is_told_of_tools_that_its_template_does_not_write(client):
    tool: Any = {"type": "function", "function": {"name": "add"}}
    request = {"messages": [user("Hello!")], **REQUEST, "max_tokens": 40}
    plain = client.chat.completions.create(**request)
    completion = client.chat.completions.create(**request, tools=[tool], tool_choice="required")
    (call,) = completion.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", "{}")
    assert completion.usage.prompt_tokens > plain.usage.prompt_tokens + 40
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    further = {**request, "messages": [*request["messages"], completion.choices[0].message, result]}
    more = client.chat.completions.create(**further, tools=[tool])
    assert more.usage.prompt_tokens_details.cached_tokens >= completion.usage.prompt_tokens


def test_a_server_that_is_told_to_stop_saves_its_conversations_and_ends_well(tmp_path):
    keep = tmp_path / "kept"
    with subprocess.Popen(
        argv(
            "{} -m kvcap serve --port 0 --budget-tokens 64 --keep {} --name small",
            sys.executable,
            keep,
        ),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVCAP_API_KEY": "one two"},
    ) as process:
        line = process.stderr.readline()
        address = re.search(r"serving small at (http://127\.0\.0\.1:\d+)/v1", line)
        assert address, line + process.stderr.read()
        assert httpx.get(f"{address[1]}/v1/models").status_code == 401
        with openai.OpenAI(base_url=f"{address[1]}/v1", api_key="two", timeout=PATIENCE) as client:
            client.chat.completions.create(model="small", messages=[user("Hello!")])
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, process.stderr.read()
    assert len(list(keep.glob("*.kvcap"))) == 1


def test_other_machines_are_let_in_only_with_a_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n\ntwo\n")
    assert Address("0.0.0.0", api_key_file=file).keys() == ["one", "two"]
    assert Address("0.0.0.0", insecure=True).keys() == []
    assert Address("::1").keys() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--host 0.0.0.0", "--insecure"),
        ("--api-key ключ", "API key 1"),
        ("--api-key=", "API key 1"),
        ("--api-key-file {empty}", "there is no key"),
        ("--api-key-file {none}", "cannot read"),
        ("--max-body many", "many"),
        ("--recall some", "use auto, off, or"),
        ("--recall-store 9KiB", "256"),
        ("--host no.such.name.invalid --insecure", "no address"),
        ("--allow-host http://box", "no name of a host"),
        ("--allow-host box:8000", "no name of a host"),
        ("--cors-origin chat.example.org", "no origin"),
        ("--cors-origin https://chat.example.org/", "no origin"),
        ("--tls-cert {none}", "go together"),
        ("--tls-cert {none} --tls-key {none}", "cannot be used"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words, tmp_path, capsys):
    (tmp_path / "empty").touch()
    files = {name: tmp_path / name for name in ("empty", "none")}
    assert run(["serve", "--port", "0", *options.format(**files).split()]) in (2, 3)
    assert words in capsys.readouterr().err


def test_without_its_packages_serving_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kvcap.serve.app", None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "kvcap.serve.app")
    monkeypatch.delitem(sys.modules, "kvcap.serve.metrics", raising=False)
    assert run(["serve"]) == 1
    output = capsys.readouterr().err
    assert "prometheus_client, which is not installed; run in kvcap's checkout: pip" in output


def test_a_model_without_a_chat_template_is_named_at_start_and_in_answers(tmp_path, capsys):
    model = save(tmp_path / "model", template=False)
    for template, chats in ((None, False), ("phi-3", True)):
        running = Running(device="cpu", chat_template=template)
        with served(model, running, name="plain") as server:
            output = capsys.readouterr().err
            assert ("warning: plain has no chat template" in output) is not chats
            assert ("/v1/completions" in output) is ("--chat-template FILE" in output) is not chats
            with openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0
            ) as client:
                request: Any = {"model": "plain", "max_tokens": 2}
                assert client.completions.create(prompt="Once", **request).choices[0].text
                (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
                assert listed["chat_template"] is chats
                if chats:
                    assert client.chat.completions.create(messages=[user("Hello!")], **request)
                    continue
                with pytest.raises(openai.BadRequestError, match="--chat-template FILE") as refused:
                    client.chat.completions.create(messages=[user("Hello!")], **request)
                assert refused.value.code == "no_chat_template"
                assert "kvcap generate" not in str(refused.value)
