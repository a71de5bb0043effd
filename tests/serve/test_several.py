"""Evaluations and load tools get several prompts, tokens, echoes, and answers that are begun."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from server_chats import assistant, client_of, pocket, serving, user
from stand_in import Script

from kvcap.serve.contract import Piece
from kvcap.serve.scheduler import Limits, Scheduler

HELLO: Any = [user("Hello!")]
REQUEST: Any = {"model": "pocket", "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def client(scheduler: Scheduler) -> Iterator[openai.OpenAI]:
    with client_of(scheduler) as client:
        yield client


def ids_of(scheduler: Scheduler, text: str, *, special: bool = True) -> list[int]:
    backend = scheduler.runtime.tokenizer.backend_tokenizer
    return backend.encode(text, add_special_tokens=special).ids


def test_tokens_are_a_prompt_as_their_text_is(client, scheduler):
    ids = ids_of(scheduler, "Once upon a time")
    by_text = client.completions.create(prompt="Once upon a time", **REQUEST)
    by_tokens = client.completions.create(prompt=ids, **REQUEST)
    assert by_tokens.choices[0].text == by_text.choices[0].text
    assert by_tokens.usage.prompt_tokens == by_text.usage.prompt_tokens == len(ids)
    with pytest.raises(openai.BadRequestError, match="token"):
        client.completions.create(prompt=[10**6], **REQUEST)


def test_several_prompts_are_answered_each_with_its_number(client, scheduler):
    prompts = ["Once", "The door"]
    alone = [client.completions.create(prompt=one, **REQUEST) for one in prompts]
    texts = [one.choices[0].text for one in alone]
    whole = client.completions.create(prompt=prompts, n=2, **REQUEST)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == [texts[0]] * 2 + [texts[1]] * 2
    assert whole.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert whole.usage.completion_tokens == 2 * sum(one.usage.completion_tokens for one in alone)
    tokens: Any = [ids_of(scheduler, one) for one in prompts]
    streamed = ["", ""]
    for part in client.completions.create(prompt=tokens, stream=True, **REQUEST):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == texts


def test_answers_to_one_chat_are_drawn_apart_and_repeatable(client):
    request = {**REQUEST, "temperature": 1.5, "seed": 5, "n": 3}
    whole = client.chat.completions.create(messages=HELLO, **request)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    again = client.chat.completions.create(messages=HELLO, **request)
    assert texts == [choice.message.content for choice in again.choices]
    streamed, roles, ends = ["", "", ""], 0, 0
    for part in client.chat.completions.create(messages=HELLO, stream=True, **request):
        (choice,) = part.choices
        streamed[choice.index] += choice.delta.content or ""
        roles += choice.delta.role is not None
        ends += choice.finish_reason is not None
    assert (streamed, roles, ends) == (texts, 3, 3)


def test_an_echoed_prompt_has_the_probabilities_of_the_model_itself(client, scheduler):
    text = "Please remember: the code for the blue door is 4821."
    ids = ids_of(scheduler, text)
    (choice,) = client.completions.create(
        prompt=text, echo=True, logprobs=2, **{**REQUEST, "max_tokens": 0}
    ).choices
    assert choice.text == text
    assert choice.finish_reason == "length"
    noted = choice.logprobs
    assert len(noted.token_logprobs) == len(ids)
    assert (noted.token_logprobs[0], noted.top_logprobs[0]) == (None, None)
    with torch.inference_mode():  # uncapped: the prompt is shorter than the budget
        cache = scheduler.runtime.session()
        logits = cache.loop.read_every(torch.tensor([ids[:16]]))[0].float().log_softmax(-1)
    expected = [float(logits[i, ids[i + 1]]) for i in range(15)]
    assert noted.token_logprobs[1:16] == pytest.approx(expected, abs=1e-4)
    offsets = itertools.accumulate(map(len, noted.tokens), initial=0)
    assert noted.text_offset == [*offsets][:-1]


def test_an_echo_comes_before_the_answer_streamed_and_of_tokens(client, scheduler):
    plain = client.completions.create(prompt="Once", **REQUEST).choices[0].text
    whole = client.completions.create(prompt="Once", echo=True, logprobs=0, **REQUEST)
    assert whole.choices[0].text == "Once" + plain
    assert whole.usage.completion_tokens == 6
    ids = ids_of(scheduler, "Once", special=False)
    parts = [*client.completions.create(prompt=ids, echo=True, stream=True, **REQUEST)]
    assert parts[0].choices[0].text == "Once"
    (only,) = client.completions.create(
        prompt="Once", echo=True, **{**REQUEST, "max_tokens": 0}
    ).choices
    assert only.text == "Once"


def test_a_cap_that_has_no_room_for_all_logits_refuses_them_by_name():
    scheduler = Scheduler(pocket(), Limits(places=1, together=1), memory_cap=2**33)
    with serving(scheduler) as server:
        request = {"prompt": "Once", "echo": True, "max_tokens": 0}
        url = f"{server.url}/v1/completions"
        refused = httpx.post(url, json={**request, "logprobs": 1})
        assert refused.status_code == 400
        assert "--memory-cap" in refused.json()["error"]["message"]
        assert httpx.post(url, json=request).json()["choices"][0]["text"] == "Once"


def test_an_answer_that_may_not_end_has_all_its_tokens(client):
    given: Any = {**REQUEST, "max_tokens": 40}
    short = client.chat.completions.create(messages=HELLO, **given)
    assert short.choices[0].finish_reason == "stop"
    full = client.chat.completions.create(messages=HELLO, extra_body={"ignore_eos": True}, **given)
    assert (full.choices[0].finish_reason, full.usage.completion_tokens) == ("length", 40)


def test_a_token_can_be_forbidden_or_forced(client, scheduler):
    plain = client.completions.create(prompt="Once", logprobs=0, **REQUEST)
    first = plain.choices[0].logprobs.tokens[0]
    ids = ids_of(scheduler, "x" + first, special=False)[1:]
    other = client.completions.create(
        prompt="Once", logprobs=0, logit_bias={str(ids[0]): -100}, **REQUEST
    )
    assert other.choices[0].logprobs.tokens[0] != first
    forced = client.completions.create(
        prompt="Once", logprobs=0, logit_bias={str(ids[0]): 100}, **REQUEST
    )
    assert set(forced.choices[0].logprobs.tokens) == {first}
    with pytest.raises(openai.BadRequestError, match="logit_bias names token 999,999"):
        client.completions.create(prompt="Once", logit_bias={"999999": 1}, **REQUEST)


def test_an_answer_is_continued_where_the_last_message_begins_it(client):
    whole = client.chat.completions.create(messages=HELLO, **{**REQUEST, "max_tokens": 12})
    text = whole.choices[0].message.content
    middle = text.index(" ", len(text) // 2)  # where a token begins
    begun, rest = text[:middle], text[middle:]
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        continued = client.chat.completions.create(
            messages=[*HELLO, assistant(begun)], extra_body=more, **{**REQUEST, "max_tokens": 12}
        )
        assert continued.choices[0].message.content.startswith(rest)
    after = client.chat.completions.create(
        messages=[*HELLO, assistant(begun + rest), user("Thanks.")], **REQUEST
    )
    assert after.usage.kv["reused"] > 0  # the whole answer is one message of the conversation


def test_every_part_has_the_usage_so_far_where_that_is_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = [
        *client.chat.completions.create(
            messages=HELLO, stream=True, stream_options=options, **REQUEST
        )
    ]
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert {part.usage.prompt_tokens for part in parts} == {parts[-1].usage.prompt_tokens}


def test_a_stream_tells_how_far_the_prompt_is_read_where_that_is_asked_for(client):
    """By the names of llama.cpp's server; what the cache holds counts as read from the start."""

    def progress_of(*messages: Any, **more: Any) -> tuple[list[dict[str, int]], Any, str]:
        options = {"include_usage": True}
        parts = [
            *client.chat.completions.create(
                messages=messages, stream=True, stream_options=options, extra_body=more, **REQUEST
            )
        ]
        progress = [part.model_extra.get("prompt_progress") for part in parts]
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        return [one for one in progress if one], parts[-1].usage, text

    long, held = user("Seven kinds of mosses survive the cold near Porto. " * 20), 0
    messages = [long]
    for _ in range(2):
        progress, usage, text = progress_of(*messages, return_progress=True)
        read = [one["processed"] for one in progress]
        assert len(read) > 3
        assert read == sorted(set(read))
        assert held <= progress[0]["cache"] < read[0]
        assert read[-1] < usage.prompt_tokens
        held = usage.prompt_tokens_details.cached_tokens
        assert {(one["total"], one["cache"]) for one in progress} == {(usage.prompt_tokens, held)}
        messages = [*messages, assistant(text), long]
    assert held > 0
    assert progress_of(long)[0] == []
    with pytest.raises(openai.BadRequestError, match="return_progress is for stream: true"):
        client.chat.completions.create(
            messages=[long], extra_body={"return_progress": True}, **REQUEST
        )


def test_what_fails_in_the_second_answer_ends_all(talk, url):
    talk.script = Script([Piece("Hi")], at_end=RuntimeError("broken"))
    answered = httpx.post(f"{url}/v1/completions", json={"prompt": ["a", "b"], "stream": True})
    lines = [json.loads(x[6:]) for x in answered.text.splitlines() if x.startswith("data: {")]
    assert lines[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in answered.text
    assert len(talk.answers) == 1
