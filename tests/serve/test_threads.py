"""Threads beside the one that computes answers: each ends with its work."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from server_chats import admitted, ask, serve, text_of, user

from kvcap.serve import admission, scheduler
from kvcap.serve.scheduler import Scheduler
from kvcap.serve.threads import by_a_thread


def test_its_error_comes_to_who_asked():
    with pytest.raises(ZeroDivisionError):
        by_a_thread(lambda: 1 // 0)


def test_a_model_is_loaded_and_prompts_are_prepared_by_threads_that_end(chat_model, monkeypatch):
    load, begin = admission.load_for_chat, scheduler.begin
    threads = list[threading.Thread]()

    def noted(work: Any) -> Any:
        def noting(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*arguments)

        return noting

    monkeypatch.setattr(admission, "load_for_chat", noted(load))
    monkeypatch.setattr(scheduler, "begin", noted(begin))
    opened = admitted(chat_model)

    async def chat(s: Scheduler) -> None:
        await text_of(s.submit(ask(user("Hello!"), tokens=3)))
        assert len(threads) == 2
        assert not any(thread.is_alive() for thread in threads)

    serve(opened.scheduler, chat)
