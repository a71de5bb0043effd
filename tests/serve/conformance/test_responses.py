"""`/v1/responses`: by OpenAI's own client, over a stand-in and over a true model."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server_chats import CALL, client_of, pocket
from stand_in import Script

from kvcap.serve.app import Settings
from kvcap.serve.contract import Piece
from kvcap.serve.limits import RequestLimits
from kvcap.serve.scheduler import Limits, Scheduler

SETTINGS = Settings("pocket", limits=RequestLimits(body_bytes=5_000))
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def test_a_stream_is_put_together_by_the_client(client, talk):
    talk.script = Script(["<think>Hm</think>", "Hel", "lo\n", CALL])
    with client.responses.stream(model="pocket", input="Hi", tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") == 2
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert (response.output_text, response.output[2].arguments) == ("Hello", '{"a": 1}')


def test_a_response_goes_on_and_one_that_is_not_known_is_refused(client, talk):
    first = client.responses.create(model="pocket", input="One", instructions="Be brief.")
    second = client.responses.create(
        model="pocket", input="Two", previous_response_id=first.id, stream=False
    )
    client.responses.create(model="pocket", input="Three", previous_response_id=second.id)
    assert [one["content"] for one in talk.request.messages] == [
        "One",
        "Hello there",
        "Two",
        "Hello there",
        "Three",
    ]
    unkept = client.responses.create(model="pocket", input="One", store=False)
    for id_ in (unkept.id, "none"):
        with pytest.raises(openai.NotFoundError, match="is not kept") as refused:
            client.responses.create(model="pocket", input="Two", previous_response_id=id_)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"
    for _ in range(10):  # beyond 20,000 bytes the oldest are forgotten
        client.responses.create(model="pocket", input="x" * 4_000)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="pocket", input="Four", previous_response_id=second.id)


def test_a_response_goes_on_with_what_its_conversation_holds():
    with client_of(Scheduler(pocket(), Limits(places=2, together=1))) as client:
        first = client.responses.create(model="pocket", input="Hello!", temperature=0)
        second = client.responses.create(
            model="pocket", input="Thanks.", previous_response_id=first.id, temperature=0
        )
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_a_kept_response_is_served_and_its_items_can_be_referred_to(client, talk):
    """The AI SDK's default refers to all items of earlier answers, without the answer's id."""
    talk.script = Script([
        Piece("<think>Hm", completion_tokens=4), Piece("</think>", completion_tokens=5),
        Piece("Well.\n", completion_tokens=6), Piece(CALL, completion_tokens=30),
    ])  # fmt: skip
    question: Any = {"role": "user", "content": "1+1?"}
    first = client.responses.create(model="pocket", input=[question], tools=[TOOL])
    assert first.usage.output_tokens_details.reasoning_tokens == 4  # without the mark
    assert client.responses.retrieve(first.id) == first
    call = first.output[-1]
    refs: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    whole = [item.model_dump(exclude_none=True) for item in first.output]
    for items in ([question, *refs, output], [question, *whole, output]):
        client.responses.create(model="pocket", input=items, tools=[TOOL])
        assert [one["role"] for one in talk.request.messages] == ["user", "assistant", "tool"]
        assert talk.request.messages[1]["content"] == "Well."
        assert talk.request.messages[1]["tool_calls"][0]["id"] == call.call_id
    client.responses.delete(first.id)
    for gone in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.create(model="pocket", input=[question, *refs]),
    ):
        with pytest.raises(openai.NotFoundError, match="not any more"):
            gone()
    unkept = client.responses.create(model="pocket", input="Hi", store=False)
    assert (first.model_extra["store"], unkept.model_extra["store"]) == (True, False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
