"""`kvcap bench clients` at toy sizes, against true servers."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tools import PATIENCE, script

from kvcap.evals.bench import BenchmarkOptions, load, options_for
from kvcap.lab.bench import clients
from kvcap.lab.bench.clients import Clients
from kvcap.lab.peers.http_servers import PeerServer, endless, pieces, running
from kvcap.lab.random_models import directory
from kvcap.runtime.errors import PeerFailed

SAYS = "import sys, time; print('at http://127.0.0.1:1/', file=sys.stderr, flush=True)"


@pytest.fixture
def options(tmp_path: Path) -> BenchmarkOptions:
    toy = {
        "model": "random-tiny",
        "lengths": (48,),
        "budgets": (16,),
        "block_size": 16,
        "steps": 4,
        "repeats": 1,
        "clients": 3,
        "files": tmp_path,
    }
    return options_for("clients", toy)


@pytest.mark.slow
def test_all_answer_together_and_one_alone(options):
    (row,) = load("clients")(replace(options, vs=())).rows
    assert (row["server"], row["clients"], row["n"], row["why"]) == ("kvcap", 3, 48, "")
    assert row["gain"] == row["tok_s"] / row["alone_tok_s"] > 0
    assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["most_ms"]
    assert row["ratio"] == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("fastapi", "openai", "accelerate"))),
    reason="pip install transformers[serving]",
)
def test_the_peer_answers_the_same_prompts(options):
    mine, peer = load("clients")(options).rows
    assert (peer["server"], peer["clients"], peer["why"]) == ("transformers", 3, "")
    assert peer["ratio"] == mine["tok_s"] / peer["tok_s"]


@pytest.mark.slow
def test_a_peer_that_fails_has_a_row_that_says_why(options, tmp_path):
    broken = script(tmp_path / "python", "echo no such package >&2\nexit 1")
    _, peer = load("clients")(replace(options, peer_pythons={"transformers": str(broken)})).rows
    assert (peer["tok_s"], peer["ratio"]) == ("", "")
    assert "no such package" in peer["why"]


@pytest.mark.parametrize("more", [{"model": "pocket"}, {"vs": ("llama.cpp",)}])
def test_what_cannot_be_measured_is_refused(options, more):
    with pytest.raises(ValueError, match=r"random-tiny|transformers alone"):
        load("clients")(replace(options, **more))


def asked_in_vain(server: PeerServer) -> None:
    assert server.port == 1
    server.process.wait()
    raise PeerFailed("a stream ended before its end")


def test_a_server_that_hangs_is_killed():
    with (
        pytest.raises(PeerFailed, match="not done after 1 s"),
        running([sys.executable, "-c", "import time; time.sleep(600)"], limit_s=1),
    ):
        pass
    hung = [sys.executable, "-c", SAYS + "; time.sleep(600)"]
    with pytest.raises(PeerFailed, match="not done after 1 s"), running(hung, limit_s=1) as server:
        asked_in_vain(server)


@pytest.mark.parametrize(
    ("code", "last_words"),
    [
        ("sys.exit('no model there')", "no model there"),
        ("raise ImportError('no server there')", "ImportError: no server there"),  # no traceback
        ("sys.exit(1)", "it said nothing"),
    ],
)
def test_a_server_that_ends_says_its_last_words(code, last_words):
    ends = [sys.executable, "-c", f"import sys; {code}"]
    with pytest.raises(PeerFailed, match=f"did not start: {last_words}$"), running(ends):
        pass


def test_an_endless_model_is_the_same_without_its_end(tmp_path):
    from transformers import AutoConfig

    model = directory("random-tiny", tmp_path)
    copy = endless(model, tmp_path / "endless")
    assert AutoConfig.from_pretrained(model).eos_token_id == 2
    assert AutoConfig.from_pretrained(copy).eos_token_id == []
    assert Path(copy, "model.safetensors").resolve() == Path(model, "model.safetensors").resolve()


class Stream:
    """A response of these lines."""

    status = 200

    def __init__(self, *lines: bytes) -> None:
        self.lines = [*lines, b""]

    def readline(self) -> bytes:
        return self.lines.pop(0)

    def read(self) -> bytes:
        return b""


def test_streams_of_both_servers_are_read_to_their_end():
    piece = b'data: {"choices": [{"text": "t5", "finish_reason": null}]}\n'
    ended = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n'
    chat = b'data: {"choices": [{"delta": {"content": "t5"}}]}\n'
    for stream in (Stream(piece, b"\n", ended), Stream(chat, b"data: [DONE]\n")):
        assert "".join(text for _, text in pieces(stream)) == "t5"
    for stream, why in (
        (Stream(piece), "before its end"),
        (Stream(b'data: {"error": {"message": "full"}}\n'), "full"),
        (Stream(b'data: {"error": "CUDA "out" of memory"}\n'), "of memory"),
    ):
        with pytest.raises(PeerFailed, match=why):
            list(pieces(stream))


class Halting:
    """A server whose answers have so many tokens each, or never begin."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.process = list(tokens), self
        self.killed = threading.Event()

    def kill(self) -> None:
        self.killed.set()

    def post(self, body: Any, _: str) -> Any:
        many = self.tokens[int(body["prompt"])]
        piece = b'data: {"choices": [{"text": "t5", "finish_reason": null}]}\n'
        stream = Stream(*[piece] * many, b"data: [DONE]\n" if many else b"")
        if not many:
            stream.readline = self.hang
        return stream

    def hang(self) -> bytes:
        assert self.killed.wait(PATIENCE)
        return b""


def test_clients_that_fail_say_how_far_all_had_come(monkeypatch, capsys):
    """At once, though others wait for their first token yet."""
    monkeypatch.setattr(clients, "PROGRESS_S", 0.01)
    server = Halting(7, 0)
    at_once = Clients(server, ["0", "1"], 100, 4)
    with pytest.raises(PeerFailed, match=r"an answer ended before .*; 1 of 2 clients .* 7 tokens"):
        at_once.read()
    assert server.killed.is_set()
    hung = Halting(0)
    at_once = Clients(hung, ["0"], 100, 4)
    threading.Timer(0.2, hung.kill).start()
    with pytest.raises(PeerFailed, match="before its end; 0 of 1 clients"):
        at_once.read()
    assert "kvcap: 0 of 1 clients had begun and 0 tokens had come" in capsys.readouterr().err
