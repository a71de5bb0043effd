"""Provides a server without a model, for tests of its responses."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from server_chats import pocket, small
from stand_in import Script, StandIn

import kvcap
from kvcap.serve.app import Settings, application
from kvcap.serve.scheduler import Limits, Scheduler
from kvcap.serve.server import Server, bound


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[StandIn, Server]]:
    """Start a server with the `SETTINGS` of the test file."""
    talk = StandIn()
    settings = getattr(request.module, "SETTINGS", Settings("pocket"))
    with Server(application(talk, settings), bound("127.0.0.1", 0), settings.limits) as server:
        yield talk, server


@pytest.fixture(scope="module")
def runtime(chat_model: str) -> kvcap.Runtime:
    return small(chat_model)


@pytest.fixture(scope="module")
def scheduler() -> Scheduler:
    """Return a scheduler of the built-in model, with fewer places than clients ask for."""
    return Scheduler(pocket(), Limits(places=3, together=2))


@pytest.fixture
def talk(served: tuple[StandIn, Server]) -> StandIn:
    """Return the stand-in for the model, which answers `Hello there`."""
    served[0].script = Script()
    return served[0]


@pytest.fixture(scope="module")
def url(served: tuple[StandIn, Server]) -> str:
    return served[1].url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as client:
        yield client
