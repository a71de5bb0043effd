"""ollama's addresses, tokens of texts, and the document of what is answered, over plain HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from server_chats import pocket
from stand_in import Script
from tools import PATIENCE

from kvcap.runtime.session.logprobs import Logprob
from kvcap.serve.app import Api, Settings, application
from kvcap.serve.contract import Piece
from kvcap.serve.limits import RequestLimits
from kvcap.serve.model_facts import ModelFacts
from kvcap.serve.scheduler import Limits, Scheduler
from kvcap.serve.server import Server, bound

ASKED: Any = {"model": "pocket:latest", "messages": [{"role": "user", "content": "Hi"}]}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["Content-Type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_is_streamed_unless_the_body_says_otherwise(url, talk):
    options = {"temperature": 0.5, "num_predict": 9, "stop": ["END"], "num_ctx": 4096}
    found = lines(httpx.post(f"{url}/api/chat", json={**ASKED, "options": options}))
    assert [one["message"]["content"] for one in found[:-1]] == ["Hel", "lo", " there"]
    assert all(not one["done"] for one in found[:-1])
    assert (found[-1]["done"], found[-1]["done_reason"]) == (True, "stop")
    assert (found[-1]["prompt_eval_count"], found[-1]["eval_count"]) == (11, 3)
    assert talk.asked.options == {"temperature": 0.5, "max_new_tokens": 9, "stop_strings": ["END"]}
    whole = httpx.post(f"{url}/api/chat", json={**ASKED, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello there"}
    assert whole["done"] is True


def test_calls_thoughts_and_results_are_those_of_a_chat(url, talk):
    talk.script = Script(["<think>Hm</think>", CALL])
    asked = {**ASKED, "tools": [TOOL]}
    found = lines(httpx.post(f"{url}/api/chat", json=asked))
    assert found[0]["message"]["thinking"] == "Hm"
    (call,) = found[-2]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    whole = httpx.post(f"{url}/api/chat", json={**asked, "stream": False}).json()
    assert whole["message"]["tool_calls"][0]["function"] == call["function"]
    del call["id"]  # as older clients send it back
    said = [
        *ASKED["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_name": "add"},
    ]
    httpx.post(f"{url}/api/chat", json={**asked, "messages": said})
    _, called, returned = talk.asked.messages
    assert called["tool_calls"][0]["function"] == call["function"]
    assert returned["tool_call_id"] == called["tool_calls"][0]["id"]


def test_a_prompt_is_answered(url, talk):
    asked = {"model": "pocket", "prompt": "Hi", "system": "Be brief.", "think": False}
    found = lines(httpx.post(f"{url}/api/generate", json=asked))
    assert "".join(one["response"] for one in found) == "Hello there"
    assert [one["content"] for one in talk.asked.messages] == ["Be brief.", "Hi"]
    assert talk.asked.options["template_options"] == {"enable_thinking": False}
    loaded = httpx.post(f"{url}/api/generate", json={"model": "pocket"}).json()
    assert (loaded["done_reason"], loaded["response"]) == ("load", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_raw_prompt_is_continued_as_it_is(url, talk, stream):
    """All of the answer is text, also what would be thoughts in a chat."""
    talk.script = Script(["<think>", "Hm", "</think>"])
    asked = {"model": "pocket", "prompt": "Once", "raw": True, "stream": stream, "think": False}
    said = httpx.post(f"{url}/api/generate", json={**asked, "options": {"num_predict": 9}})
    found = lines(said) if stream else [said.json()]
    assert "".join(one["response"] for one in found) == "<think>Hm</think>"
    assert (found[-1]["done_reason"], found[-1]["eval_count"]) == ("stop", 3)
    assert (talk.asked.prompt, talk.asked.messages) == ("Once", None)
    assert talk.asked.options == {"max_new_tokens": 9}


def test_any_json_may_be_asked_for(url, talk):
    httpx.post(f"{url}/api/chat", json={**ASKED, "format": "json"})
    assert talk.asked.options["json_schema"] == {"type": "object"}


@pytest.mark.parametrize(("path", "body", "words"), [
    ("chat", {**ASKED, "options": {"mirostat": 1}}, "'mirostat'"),
    ("chat", {**ASKED, "messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "images"),
    ("chat", {**ASKED, "unheard_of": 1}, "unheard_of"),
    *(("generate", {"model": "pocket", "prompt": "x", "raw": True, **more}, "does not go with raw")
      for more in ({"system": "x"}, {"format": "json"}, {"think": True})),
    ("show", {"model": "llama3"}, "use 'pocket'"),
    *(("chat", {**ASKED, "options": {name: value}}, name) for name, value in (
        ("typical_p", 0.5), ("vocab_only", True), ("repeat_last_n", "x"), ("num_predict", -3))),
    *(("generate", {"model": "pocket", "prompt": "x", **more}, next(iter(more))) for more in (
        {"template": "x"}, {"suffix": "x"}, {"images": ["x"]}, {"context": [1]})),
    ("chat", {**ASKED, "top_logprobs": 3}, "top_logprobs"),
])  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_its_form(url, talk, path, body, words):
    said = httpx.post(f"{url}/api/{path}", json=body)
    assert said.status_code in (400, 404)
    assert words in said.json()["error"]


def test_the_one_model_is_described(url, talk):
    for path in ("tags", "ps"):
        (model,) = httpx.get(f"{url}/api/{path}").json()["models"]
        assert model["name"] == "pocket"
    shown = httpx.post(f"{url}/api/show", json={"model": "pocket"}).json()
    assert shown["capabilities"] == ["completion"]
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


ZEROS: dict[str, Any] = {"template": "", "system": "", "options": None, "suffix": "", "name": "",
    "images": [], "context": None, "raw": False, "format": None, "keep_alive": None, "think": None,
    "truncate": None, "shift": False, "logprobs": False, "top_logprobs": 0, "tools": None,
    "width": 0}  # fmt: skip
NEUTRAL: dict[str, Any] = {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1,
    "tfs_z": 1.0, "repeat_last_n": 64, "penalize_newline": True, "f16_kv": True, "num_ctx": 2048,
    "vocab_only": False, "stop": []}  # fmt: skip


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_what_its_clients_send_unasked_asks_for_nothing(url, talk, path):
    asked = ASKED if path == "chat" else {"model": "pocket", "prompt": "Hi"}
    assert httpx.post(f"{url}/api/{path}", json=asked).status_code == 200
    plain = talk.asked
    options = [{**NEUTRAL, "num_predict": most} for most in (-2, -1, 0)]
    for more in (ZEROS, {"truncate": True}, *({"options": one} for one in options)):
        said = httpx.post(f"{url}/api/{path}", json={**more, **asked})
        assert said.status_code == 200, said.text
        stops = {"stop_strings": []} if more.get("options") else {}
        assert talk.asked == replace(plain, options={**plain.options, **stops})
    unlooked = {"repeat_penalty": 1.3, "repeat_last_n": 0}
    httpx.post(f"{url}/api/{path}", json={**asked, "options": unlooked})
    assert talk.asked.options["repetition_penalty"] == 1.0


@pytest.mark.parametrize(("kept", "reason"), [
    (0, "unload"), ("0", "unload"), ("0s", "unload"), ("0m0s", "unload"), (0.0, "unload"),
    (None, "load"), ("", "load"), (-1, "load"), ("5m", "load"), ("10m", "load"), (300, "load"),
])  # fmt: skip
def test_a_model_is_loaded_and_unloaded_in_word(url, talk, kept, reason):
    for path in ("chat", "generate"):
        said = httpx.post(f"{url}/api/{path}", json={"model": "pocket", "keep_alive": kept}).json()
        assert said["done_reason"] == reason


@pytest.mark.parametrize("asked", [
    ("chat", {}), ("generate", {"prompt": "Hi"}), ("generate", {"prompt": "Hi", "raw": True}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_given(url, talk, asked, stream):
    path, more = asked
    likely = [
        Logprob(7, text, text.encode(), -0.5, (Logprob(8, "x", b"x", -1.0),)) for text in "ab"
    ]
    talk.script = Script([Piece(one.text, (one,)) for one in likely])
    body = {**({"prompt": "Hi"} if path == "generate" else ASKED), **more, "model": "pocket"}
    body = {**body, "stream": stream, "logprobs": True, "top_logprobs": 1}
    said = httpx.post(f"{url}/api/{path}", json=body)
    found = lines(said) if stream else [said.json()]
    given = [one for line in found for one in line.get("logprobs", ())]
    assert given == [one.as_dict() for one in likely]
    assert talk.asked.options["logprobs"] == 1


def test_the_document_describes_every_body(url, talk):
    found = httpx.get(f"{url}/docs").json()
    assert httpx.get(f"{url}/openapi.json").json() == found
    for path, said in found["paths"].items():
        allowed = httpx.put(f"{url}{path}").headers["Allow"].lower()
        assert set(said) == {"post" if "post" in allowed else "get"}
        if "post" in said:
            body = said["post"]["requestBody"]["content"]["application/json"]
            name = body["schema"]["$ref"].rpartition("/")[2]
            assert found["components"]["schemas"][name]["properties"]
    routes = Api(talk, Settings("pocket")).paths
    openai = {path for path in found["paths"] if path.startswith("/v1/") and "messages" not in path}
    short = {path.removeprefix("/v1") for path in (*openai, "/v1/models/{name:path}")}
    others = {"/docs", "/openapi.json", "/v1/models/{name:path}"}
    assert set(routes) - short - others == set(found["paths"])


def test_texts_become_tokens_and_tokens_text():
    runtime = pocket()
    app = application(Scheduler(runtime, Limits(places=1, together=1)), Settings("pocket"))
    with Server(app, bound("127.0.0.1", 0), RequestLimits()) as server:

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
        said = [{"role": "system", "content": "Hello!"}]
        assert post("/chat/completions", messages=said, max_tokens=1)["choices"]
        made = post("/chat/completions", messages=said, tools=[TOOL], tool_choice="required", n=3)
        ids = [one["message"]["tool_calls"][0]["id"] for one in made["choices"]]
        assert len(set(ids)) == 3
        chat = [{"role": "user", "content": "Hello!"}]
        whole = post("/v1/chat/completions", messages=chat, max_tokens=1)
        count = whole["usage"]["prompt_tokens"]
        assert post("/tokenize", messages=chat)["count"] == count
        asked = {"model": "pocket", "messages": chat}
        assert post("/v1/messages/count_tokens", **asked) == {"input_tokens": count}
        assert "prompt, content or messages" in post("/tokenize")["error"]["message"]
