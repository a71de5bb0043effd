"""Provides a server without a model, for tests of its responses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_in import Script, StandIn

from kvcap.serve.app import Settings, application
from kvcap.serve.server import Server, bound


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[StandIn, Server]]:
    """Start a server with the `SETTINGS` of the test file."""
    talk = StandIn()
    settings = getattr(request.module, "SETTINGS", Settings("pocket"))
    with Server(application(talk, settings), bound("127.0.0.1", 0), settings.limits) as server:
        yield talk, server


@pytest.fixture
def talk(served: tuple[StandIn, Server]) -> StandIn:
    """Return the stand-in for the model, which answers `Hello there`."""
    served[0].script = Script()
    return served[0]


@pytest.fixture(scope="module")
def url(served: tuple[StandIn, Server]) -> str:
    return served[1].url
