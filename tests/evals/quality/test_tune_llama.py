"""`kvcap tune` of a GGUF file by llama.cpp, from a text to a command that runs; refusals."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tiny_gguf
from llama_reference import Plain, loaded, needs_library

from kvcap import cli
from kvcap.evals.quality import tune
from kvcap.evals.quality.recommend import Recommendation
from kvcap.evals.quality.tune import TuningRequest
from kvcap.evals.quality.tune_llama import LlamaTuned
from kvcap.pocket.prose import filler
from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.models.files import encode
from kvcap.runtime.planning.plan import Sizes

pytestmark = needs_library
TEXT = " ".join(islice(filler(Random(0)), 20))
SIZES = ("--budget-tokens", "64", "--block-size", "32", "--threads", "1")


@pytest.fixture(scope="module")
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a random model with the test's chat template, if it names one."""
    template = getattr(request, "param", tiny_gguf.CHATML)
    folder = tmp_path_factory.mktemp("gguf")
    return str(tiny_gguf.written(folder, trained=2048, template=template))


@pytest.fixture
def tune_command(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a command; its rounds are few, and facts are as long as the task is in bytes."""
    monkeypatch.setattr(tune, "MOST_ROUNDS", 2)
    monkeypatch.setattr(tune, "LEAST_FACTS_LENGTH", 1024)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return ["tune", file, "-f", str(text), "--length", "256", *SIZES]


@pytest.mark.parametrize("file", [tiny_gguf.CHATML, None], ids=["chat", "plain"], indirect=True)
def test_the_command_runs_what_was_measured(tune_command, file, capsys, monkeypatch):
    assert cli.run([*tune_command, "--json"]) in (
        0,
        1,
    )  # a random model may know no better than random
    document = json.loads(capsys.readouterr().out)
    rows = {row["policy"]: row for row in document["rows"]}
    assert [*rows] == ["streaming_llm", "keydiff-window", "lagkv", "random", "full"]
    assert all(len(row["losses"]) == 4 and len(row["facts"]) == 2 for row in rows.values())
    assert [row["slots"] for row in rows.values()] == [64, 64, 64, 64, None]
    assert "llama.cpp" in document["environment"]["device"]
    monkeypatch.setattr(tune, "choose", lambda rows: Recommendation("lagkv", {}, ()))
    assert cli.run([*tune_command, "--policies", "lagkv", "--json"]) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    plain = document["plain"]
    begun = ["generate", file, "--file", tune_command[3], "--raw"] if plain else ["chat", file]
    recall = "32" if plain else "auto"
    assert command == ["kvcap", *begun, "--policy", "lagkv", *SIZES, "--recall", recall]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n")))
    assert cli.run([*command[1:], "--max-new-tokens", "1"]) == 0


def test_the_uncapped_losses_are_llamacpps_own(file):
    request = TuningRequest(file, TEXT, Sizes(CacheSettings(64, 32)))
    model = bound(request)
    engine = model.load("lagkv")
    ids = encode(model.tokenizer, TEXT)[1][:200]
    plain = Plain(loaded(Path(file)))
    logits = plain.read(ids[:-1], range(199))[100:].astype(np.float64)
    plain.close()
    expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(99), ids[101:]]
    lag = model.side("lagkv")
    own_losses = [
        model.losses(model.loop(side, 200), engine.token_ids(ids), 100)
        for side in (model.uncapped(lag.plan), lag)
    ]
    np.testing.assert_allclose(own_losses[0], expected, atol=0.02)
    assert np.abs(own_losses[1] - expected).max() > 0.1


@pytest.mark.parametrize("policy", ["streaming_llm", "keydiff-window"])
def test_policies_are_measured_as_conversations_run_them(policy, file):
    pins = {"recent_tokens": 8}
    request = TuningRequest(file, TEXT, Sizes(CacheSettings(kv_budget="1MiB")), pins)
    model = bound(request)
    model.load("random")
    loop = model.loop(model.side(policy), 100)
    settings = CacheSettings(kv_budget="1MiB", evict_every=None)
    chat = LlamaRuntime.from_file(file, policy, settings, policy_options=pins).loop()
    for name in ("ranking", "budget", "positions", "nbytes"):
        assert getattr(loop.cache, name) == getattr(chat.cache, name)
    assert (loop.block, loop.every) == (chat.block, chat.every)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policies", "lagkv,snapkv"], "policy 'snapkv' looks at"),
        (["--dtype", "float32"], "--backend torch"),
        (["--memory-cap", "4GiB"], "give --budget-tokens, as `kvcap plan"),
        (["--backend", "onnxruntime"], "measured in PyTorch or by llama.cpp"),
    ],
)
def test_refusals(more, message, tune_command, capsys):
    capped = [part for part in tune_command if "--memory-cap" not in more or part not in SIZES[:2]]
    assert cli.run([*capped, *more]) == 2
    assert message in capsys.readouterr().err


def test_policies_that_observe_queries_are_left_out_and_said(file):
    notes: list[str] = []
    request = TuningRequest(file, TEXT, Sizes(CacheSettings(64, 32)), policies=("all",))
    policies = [side.policy for side in tune._sides(request, bound(request), notes.append)]
    assert {"streaming_llm", "lagkv", "knorm"} <= {*policies}
    assert "snapkv" not in policies
    assert any(note.startswith("snapkv is left out: policy 'snapkv' looks at") for note in notes)


def test_agreement_is_refused(file, tune_command, kvcap):
    assert "give --backend torch" in kvcap.refused(
        "eval", file, "--agreement", "-f", tune_command[3]
    )


def bound(request: TuningRequest) -> LlamaTuned:
    """Return the file of a request as a chat loads it, on one thread."""

    def load(policy: str) -> LlamaRuntime:
        settings = replace(request.sizes.cache, evict_every=None)
        return LlamaRuntime.from_file(
            request.model, policy, settings, policy_options=request.pins, threads=1
        )

    return LlamaTuned(request, load)
