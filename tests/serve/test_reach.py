"""Names of the server, pages of other sites, and TLS: who reaches the server, and how."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from make import argv
from stand_in import StandIn

from kvcap.serve.app import Settings, application
from kvcap.serve.commands import Address
from kvcap.serve.limits import RequestLimits
from kvcap.serve.server import Server, bound

SITE = "https://chat.example.org"


@contextmanager
def reached(address: Address, **more: Any) -> Iterator[Server]:
    """Provide a server that is let in by these options, on a free port of this machine."""
    settings = Settings("pocket", hosts=address.hosts(), origins=address.origins(), **more)
    app, tls = application(StandIn(), settings), address.tls()
    with Server(app, bound("127.0.0.1", 0), RequestLimits(), tls=tls) as server:
        yield server


def status(server: Server, host: str) -> int:
    return httpx.get(f"{server.url}/health", headers={"Host": host}).status_code


def test_a_server_answers_by_the_names_that_it_is_given():
    with reached(Address(allow_host=["host.docker.internal", "[fe80::1]"])) as server:
        assert status(server, "Host.Docker.Internal:8000") == 200
        assert status(server, "[fe80::1]:8000") == status(server, "localhost") == 200
        response = httpx.get(f"{server.url}/health", headers={"Host": "evil.example"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_host")
        assert "--allow-host NAME" in response.json()["error"]["message"]


def test_names_are_checked_for_other_machines_too_where_some_are_given():
    with reached(Address("0.0.0.0", allow_host=["box.example"])) as server:
        assert status(server, "box.example") == status(server, "127.0.0.1:8000") == 200
        assert status(server, "other.example") == 400
    with reached(Address("0.0.0.0")) as server:
        assert status(server, "other.example") == 200


def test_pages_of_a_site_that_is_let_in_may_ask_before_they_have_a_key():
    asks = {
        "Origin": SITE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with reached(Address(cors_origin=[SITE]), keys=["secret"]) as server:
        url = f"{server.url}/v1/chat/completions"
        allowed = httpx.options(url, headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == SITE
        assert "authorization" in allowed.headers["Access-Control-Allow-Headers"]
        assert httpx.options(url, headers={**asks, "Origin": "https://evil.example"}).is_error
        for headers, code in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            response = httpx.post(
                url,
                headers={"Origin": SITE, **headers},
                json={"messages": [{"role": "user", "content": "Hello!"}]},
            )
            assert (response.status_code, response.headers["Access-Control-Allow-Origin"]) == (
                code,
                SITE,
            )
        assert "X-Session-Id" in response.headers["Access-Control-Expose-Headers"]
        other = httpx.get(f"{server.url}/health", headers={"Origin": "https://evil.example"})
        assert "Access-Control-Allow-Origin" not in other.headers


def test_pages_of_other_sites_are_not_let_in_unless_that_is_said():
    with reached(Address()) as server:
        response = httpx.get(f"{server.url}/health", headers={"Origin": SITE})
        assert "Access-Control-Allow-Origin" not in response.headers
    with reached(Address(cors_origin=["*"])) as server:
        response = httpx.get(f"{server.url}/health", headers={"Origin": SITE})
        assert response.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_server_with_a_certificate_speaks_https(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        argv(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 "
            "-nodes -keyout {} -out {} -days 2 -subj /CN=localhost -addext "
            "subjectAltName=IP:127.0.0.1",
            key,
            cert,
        ),
        check=True,
        capture_output=True,
    )
    trusted = ssl.create_default_context(cafile=str(cert))
    with reached(Address(tls_cert=cert, tls_key=key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert httpx.get(f"{server.url}/health", verify=trusted).json() == {"status": "ok"}
    with pytest.raises(ValueError, match="cannot be used"):
        Address(tls_cert=key, tls_key=cert).tls()
