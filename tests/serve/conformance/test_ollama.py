"""ollama's addresses, tokens of texts, and the document of what is answered, over plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from server_chats import HELLO, TOOL, pocket, serving
from stand_in import Script
from tools import PATIENCE

from kvcap.runtime.session.logprobs import Logprob
from kvcap.serve.app import Api, Settings
from kvcap.serve.contract import Piece
from kvcap.serve.model_facts import ModelFacts
from kvcap.serve.scheduler import Limits, Scheduler

CHAT: Any = {"model": "pocket:latest", "messages": HELLO}


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["Content-Type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_an_answer_is_streamed_unless_the_body_says_otherwise(url, talk):
    *parts, last = lines(httpx.post(f"{url}/api/chat", json=CHAT))
    assert [one["message"]["content"] for one in parts] == ["Hel", "lo", " there"]
    assert [one["done"] for one in (*parts, last)] == [False] * 3 + [True]
    answer = lines(httpx.post(f"{url}/api/generate", json={"model": "pocket", "prompt": "Hi"}))
    assert "".join(one["response"] for one in answer) == "Hello there"


@pytest.mark.parametrize("stream", [False, True])
def test_a_raw_prompt_is_continued_as_it_is(url, talk, stream):
    """All of the answer is text, also what would be thoughts in a chat."""
    talk.script = Script(["<think>", "Hm", "</think>"])
    request = {"model": "pocket", "prompt": "Once", "raw": True, "stream": stream, "think": False}
    response = httpx.post(f"{url}/api/generate", json=request)
    parts = lines(response) if stream else [response.json()]
    assert "".join(one["response"] for one in parts) == "<think>Hm</think>"
    assert (parts[-1]["done_reason"], parts[-1]["eval_count"]) == ("stop", 3)


def test_the_one_model_is_described(url, talk):
    for path in ("tags", "ps"):
        (model,) = httpx.get(f"{url}/api/{path}").json()["models"]
        assert model["name"] == "pocket"
    shown = httpx.post(f"{url}/api/show", json={"model": "pocket"}).json()
    assert shown["capabilities"] == ["completion"]
    refused = httpx.post(f"{url}/api/show", json={"model": "llama3"})
    assert (refused.status_code, "use 'pocket'" in refused.json()["error"]) == (404, True)
    level = httpx.get(f"{url}/api/version").json()["version"]
    assert tuple(map(int, level.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize(("tools", "thinking"), [(True, True), (True, False), (False, True)])
def test_a_model_can_do_what_its_template_writes(url, talk, monkeypatch, tools, thinking):
    facts = ModelFacts("qwen3", 40_960, 1_720_574_976, "BF16", tools, thinking)
    monkeypatch.setattr(talk, "model", facts)
    shown = httpx.post(f"{url}/api/show", json={"model": "pocket"}).json()
    can = [name for name, able in (("tools", tools), ("thinking", thinking)) if able]
    assert shown["capabilities"] == ["completion", *can]
    assert shown["model_info"] == {
        "general.architecture": "qwen3",
        "general.parameter_count": 1_720_574_976,
        "qwen3.context_length": 40_960,
    }
    (listed,) = httpx.get(f"{url}/api/tags").json()["models"]
    assert shown["details"] == listed["details"]
    assert listed["details"]["families"] == [listed["details"]["family"]] == ["qwen3"]
    assert listed["details"]["parameter_size"] == "1.7B"


@pytest.mark.parametrize(("kept", "reason"), [
    (0, "unload"), ("0", "unload"), ("0s", "unload"), ("0m0s", "unload"), (0.0, "unload"),
    (None, "load"), ("", "load"), (-1, "load"), ("5m", "load"), ("10m", "load"), (300, "load"),
])  # fmt: skip
def test_a_model_is_loaded_and_unloaded_in_word(url, talk, kept, reason):
    for path in ("chat", "generate"):
        body = httpx.post(f"{url}/api/{path}", json={"model": "pocket", "keep_alive": kept}).json()
        assert body["done_reason"] == reason


@pytest.mark.parametrize("case", [
    ("chat", {}), ("generate", {"prompt": "Hi"}), ("generate", {"prompt": "Hi", "raw": True}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_given(url, talk, case, stream):
    path, more = case
    likely = [
        Logprob(7, text, text.encode(), -0.5, (Logprob(8, "x", b"x", -1.0),)) for text in "ab"
    ]
    talk.script = Script([Piece(one.text, (one,)) for one in likely])
    body = {**({"prompt": "Hi"} if path == "generate" else CHAT), **more, "model": "pocket"}
    body = {**body, "stream": stream, "logprobs": True, "top_logprobs": 1}
    response = httpx.post(f"{url}/api/{path}", json=body)
    parts = lines(response) if stream else [response.json()]
    given = [one for line in parts for one in line.get("logprobs", ())]
    assert given == [one.as_dict() for one in likely]
    assert talk.request.options["logprobs"] == 1


def test_the_document_describes_every_body(url, talk):
    whole = httpx.get(f"{url}/docs").json()
    assert httpx.get(f"{url}/openapi.json").json() == whole
    for path, operations in whole["paths"].items():
        allowed = httpx.put(f"{url}{path}").headers["Allow"].lower()
        assert set(operations) == {"post" if "post" in allowed else "get"}
        if "post" in operations:
            body = operations["post"]["requestBody"]["content"]["application/json"]
            name = body["schema"]["$ref"].rpartition("/")[2]
            assert whole["components"]["schemas"][name]["properties"]
    routes = Api(talk, Settings("pocket")).paths
    openai = {path for path in whole["paths"] if path.startswith("/v1/") and "messages" not in path}
    short = {path.removeprefix("/v1") for path in (*openai, "/v1/models/{name:path}")}
    others = {"/docs", "/openapi.json", "/v1/models/{name:path}"}
    assert set(routes) - short - others == set(whole["paths"])


def test_texts_become_tokens_and_tokens_text():
    runtime = pocket()
    with serving(Scheduler(runtime, Limits(places=1, together=1))) as server:

        def post(path: str, **body: Any) -> Any:
            return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE).json()

        def get(path: str) -> Any:
            return httpx.get(f"{server.url}{path}").json()

        ids = runtime.tokenizer.backend_tokenizer.encode("Hello there").ids
        plain = runtime.tokenizer.backend_tokenizer.encode(
            "Hello there", add_special_tokens=False
        ).ids
        assert post("/tokenize", prompt="Hello there") == {"tokens": ids, "count": len(ids)}
        assert post("/tokenize", content="Hello there")["tokens"] == plain
        assert post("/detokenize", tokens=plain)["content"] == "Hello there"
        beyond = runtime.tokenizer.backend_tokenizer.get_vocab_size()
        refused = post("/detokenize", tokens=[*plain, beyond])["error"]
        assert refused["code"] == "token_unknown"
        assert f"token {beyond:,} is not in the vocabulary" in refused["message"]
        shown, (listed,) = post("/api/show", model="pocket"), get("/v1/models")["data"]
        assert (shown["capabilities"], shown["details"]["family"]) == (["completion"], "llama")
        info, length = shown["model_info"], runtime.trained_length
        assert info["general.architecture"] == "llama"
        assert info["llama.context_length"] == listed["max_model_len"] == length
        assert info["general.parameter_count"] == runtime.model.num_parameters()
        assert shown["details"]["parameter_size"].endswith("M")
        assert shown["details"]["quantization_level"] == "F32"
        assert get("/models")["data"] == [listed]
        messages = [{"role": "system", "content": "Hello!"}]
        assert post("/chat/completions", messages=messages, max_tokens=1)["choices"]
        made = post(
            "/chat/completions", messages=messages, tools=[TOOL], tool_choice="required", n=3
        )
        ids = [one["message"]["tool_calls"][0]["id"] for one in made["choices"]]
        assert len(set(ids)) == 3
        chat = [{"role": "user", "content": "Hello!"}]
        whole = post("/v1/chat/completions", messages=chat, max_tokens=1)
        count = whole["usage"]["prompt_tokens"]
        assert post("/tokenize", messages=chat)["count"] == count
        request = {"model": "pocket", "messages": chat}
        assert post("/v1/messages/count_tokens", **request) == {"input_tokens": count}
        assert "prompt, content or messages" in post("/tokenize")["error"]["message"]
