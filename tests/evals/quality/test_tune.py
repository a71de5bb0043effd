"""`kvcap tune` from a text to a command that runs, on small models; refusals; the time limit."""

from __future__ import annotations

import io
import json
import shlex
import sys
import time
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_chat
import torch
from conftest import tiny_model
from make import argv, saved_model
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from kvcap import cli
from kvcap.evals.quality import recommend, tune
from kvcap.evals.quality.tune import TuningRequest
from kvcap.evals.quality.tune_torch import TorchTuned
from kvcap.pocket.prose import filler
from kvcap.policies import load_policy
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.models.files import encode, load_tokenizer
from kvcap.runtime.planning.plan import Sizes

TEXT = " ".join(islice(filler(Random(0)), 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a random base model, which has pocket's tokens and no template."""
    path = tmp_path_factory.mktemp("model")
    return str(saved_model(path, template=False, max_position_embeddings=512))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "a text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer pieces and facts than minutes would allow."""
    monkeypatch.setattr(tune, "MOST_ROUNDS", 3)


def command(model: str, file: str, *more: str) -> list[str]:
    small = ["--budget-tokens", "48", "--block-size", "16", "--device", "cpu"]
    return ["tune", model, "-f", file, *small, "--policies", "snapkv,streaming_llm", *more]


def request(model: str, **changes: Any) -> TuningRequest:
    sizes = Sizes(CacheSettings(48, 16))
    return TuningRequest(
        **{"model": model, "text": TEXT, "sizes": sizes, "device": "cpu", **changes}
    )


def load(model: str, policy: str, **pins: int) -> Runtime:
    eviction = load_policy(policy, **pins)
    return Runtime.from_pretrained(
        model, budget_tokens=48, block_size=16, policy=eviction, device="cpu", evict_every=None
    )


def tuned(given: TuningRequest) -> TorchTuned:
    return TorchTuned(given, lambda policy: load(given.model, policy, **given.pins))


def sides(given: TuningRequest, notes: list[str] | None = None) -> list[Any]:
    return tune._sides(given, tuned(given), [].append if notes is None else notes.append)


def test_the_last_line_is_a_command_that_runs(file, tmp_path, capsys):
    folder = tiny_chat.save(tmp_path / "model", template=False)
    assert cli.run(command(folder, file, "--length", "160", "--dtype", "float32")) == 0
    out, noted = capsys.readouterr()
    lines = out.splitlines()
    assert "3 pieces of 160 tokens of a text of 732, the last 80 of each scored; " in lines[0]
    assert "3 facts, one in 512 tokens each (niah_single_2, asked in plain text)" in lines[0]
    assert "this takes at most 5 minutes" in noted
    assert "measuring snapkv, streaming_llm, random, full on pieces of 160 tokens" in noted
    assert "of 5 minutes" in noted.partition("measuring ")[2]
    table, _, sentences = out.partition("\n\n")[2].partition("\n\n")
    assert table.count(" dropped: ") == 1
    assert table.count(" chosen ") == 2  # a heading has it, too
    assert sentences.count(" is dropped: ") == sentences.count(" is chosen, ") == 1
    for policy in ("snapkv", "streaming_llm", "random", "full"):
        assert sum(line.startswith(f"{policy} ") for line in table.splitlines()) == 1
    assert "has no chat template" in noted
    given = shlex.split(lines[-1])
    assert given[:6] == ["kvcap", "generate", folder, "--file", file, "--raw"]
    assert given[6] == "--policy"
    assert given[7] in ("snapkv", "streaming_llm")
    assert given[8:] == argv(
        "--budget-tokens 48 --block-size 16 --dtype float32 --device cpu --recall 24"
    )
    assert cli.run([*given[1:], "--max-new-tokens", "1"]) == 0


def test_one_json_document_and_a_chat(file, tmp_path, kvcap, monkeypatch):
    model = tiny_chat.save(tmp_path / "model")
    document = kvcap.document(*command(model, file, "--length", "160", "--threads", "1"))
    rows = {row["policy"]: row for row in document["rows"]}
    assert [*rows] == ["snapkv", "streaming_llm", "random", "full"]
    assert (document["pieces"], document["samples"], document["length"]) == (3, 3, 160)
    assert all(len(row["losses"]) == 3 and row["perplexity"] > 1 for row in rows.values())
    assert all(len(row["facts"]) == 3 and row["read_ms"] > 0 for row in rows.values())
    for policy, row in rows.items():
        assert (row["dropped"] is None) == (policy in ("random", "full", document["policy"]))
        assert (row["slots"], row["kv_bytes"] is None) == (
            (None, True) if policy == "full" else (48, False)
        )
    chosen = document["policy"]
    assert document["command"] == argv(
        "kvcap chat {} --policy {} --budget-tokens 48 --block-size 16 --device cpu "
        "--threads 1 --recall auto",
        model,
        chosen,
    )
    assert shlex.split(document["command_line"]) == document["command"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n")))
    assert cli.run([*document["command"][1:], "--max-new-tokens", "1"]) == 0


def test_losses_are_those_of_the_pieces(folder):
    given = request(folder, policies=("streaming_llm",), length=100)
    tuning = tune.tune(given, tuned(given), time.perf_counter())
    opening, ids = encode(load_tokenizer(folder), TEXT)
    pieces = [torch.tensor([piece]) for piece in tune._pieces(opening, ids, 100)]
    model = tiny_model(
        "llama",
        "eager",
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        max_position_embeddings=512,
    )
    with torch.no_grad():
        expected = [
            float(cross_entropy(model(piece).logits[0, 50:-1], piece[0, 51:])) for piece in pieces
        ]
    capped, _, full = tuning.rows
    assert full.losses == pytest.approx(expected, abs=1e-4)
    assert capped.losses != pytest.approx(expected, abs=1e-4)


def test_facts_are_asked_for_with_recall_as_in_a_chat(tmp_path, kvcap):
    long = tmp_path / "long.txt"
    long.write_text(" ".join(islice(filler(Random(1)), 150)))
    given = ["tune", "pocket", "-f", str(long), "--policies", "streaming_llm"]
    document = kvcap.document(*given, "--device", "cpu", "--length", "768")
    row = document["rows"][0]
    assert (row["slots"], row["facts_found"], document["recall"]) == (256, 1, 128)
    assert len(row["losses"]) == document["pieces"] * 384 // tune.PASSAGE
    assert document["command"][-4:] == ["--budget-tokens", "256", "--recall", "auto"]


@pytest.mark.parametrize("more", [[], ["--backend", "torch", "--weights", "int8"]])
def test_the_model_is_loaded_as_chat_loads_it(more, folder, file, monkeypatch):
    """Compare all that is given to the loader: weights, types, sizes, and how answers evict."""
    loaded = []

    def record(*given: Any, **named: Any) -> None:
        named.pop("recall_store")  # of a conversation's text, which tune has none of
        loaded.append((given, named))
        raise ValueError("seen")

    monkeypatch.setattr(Runtime, "from_pretrained", record)
    given = command(folder, file, "--dtype", "bfloat16", "--sink-tokens", "2", *more)
    assert cli.run(given) == 2
    at = given.index("--policies")
    assert cli.run(["chat", folder, *given[4:at], "--policy", "snapkv", *given[at + 2 :]]) == 2
    assert len(loaded) == 2
    assert loaded[0] == loaded[1]


def test_an_export_is_refused_before_it_is_made(folder, file, kvcap):
    assert "policies are measured in PyTorch or by llama.cpp" in kvcap.refused(
        *command(folder, file, "--weights", "int8")
    )


def test_nothing_is_recommended_where_random_is_better(folder, file, capsys, monkeypatch):
    monkeypatch.setattr(recommend, "SAME", -10.0)  # no cost is below that of random eviction
    given = command(folder, file, "--length", "100")
    assert cli.run(given) == 1
    out, noted = capsys.readouterr()
    assert "snapkv is worse than random eviction" in out
    assert "kvcap generate" not in out
    assert out.endswith("\n\n")  # no sentence stands where a script reads the command
    assert "give a larger budget" in noted
    assert cli.run([*given, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["policy"], document["command"], document["command_line"]) == (None,) * 3
    assert len(document["rows"]) == 4


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (" \n", [], "the text is empty"),
        (
            "A few words.",
            [],
            "the text has 4 tokens, and a budget of 48 slots (--budget-tokens) needs at least "
            "192, 2 pieces of 96; give a longer text, or a smaller --budget-tokens",
        ),
        (
            TEXT,
            ["--budget-tokens", "250"],
            "a budget of 250 slots (--budget-tokens) needs at least 1,000, 2 pieces of 500",
        ),
        (TEXT, ["--budget-tokens", "300"], "the model was trained on 512 at once; give a sm"),
        (TEXT, ["--length", "90"], "under a budget of 48 slots (--budget-tokens) give one from"),
        (TEXT, ["--length", "513"], "from 96 to 512 tokens"),
        (TEXT, ["--length", "500"], "give a longer text, or a smaller --length"),
        (TEXT, ["--policies", "random,full"], "name at least one other policy"),
        (TEXT, ["--policies", "keydif"], "keydiff"),
        (TEXT, ["--policies", "snapkv,headkv"], "headkv needs a table"),
        (TEXT, ["--kv-budget", "1MiB"], "not both"),
    ],
)
def test_refusals_come_before_the_model_is_loaded(
    text, more, message, folder, tmp_path, kvcap, monkeypatch
):
    monkeypatch.setattr(Runtime, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    file = tmp_path / "text.txt"
    file.write_text(text)
    assert message in kvcap.refused(*command(folder, str(file), *more))


def test_too_little_time_is_refused_and_says_how_much_would_do(folder, file, capsys, monkeypatch):
    monkeypatch.setattr(tune, "_pace", lambda *_: tune._Pace(predict=2.0, read=1.0, write=1.0))
    monkeypatch.setattr(tune, "_measure", lambda *_: pytest.fail("measured"))
    assert cli.run(command(folder, file)) == 2
    err = capsys.readouterr().err
    assert "--minutes 5 are too few: the model reads 1 tokens a second here" in err
    assert "give --minutes 58, or a smaller budget" in err


@pytest.mark.parametrize(
    ("seconds", "expected"), [(10, [0, 1, 2, 3, 4]), (30, [0, 1, 2]), (99, [0]), (999, [0])]
)
def test_rounds_go_on_as_long_as_another_one_fits(seconds, expected, monkeypatch):
    now = 7.0
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(tune, "MOST_ROUNDS", 5)
    done = []
    for number in tune._Clock(7.0, minutes=100 / 60).rounds():
        done.append(number)
        now += seconds
    assert done == expected


@pytest.mark.parametrize(
    ("seconds", "candidates", "length"),
    [
        (0.001, 5, 352),  # half of the text
        (0.03, 5, 176),  # what there is time for
        (0.06, 5, 96),  # the least
        (0.12, 3, 96),  # fewer candidates
        (0.2, 2, 96),
        (0.3, 2, 96),  # one round
    ],
)
def test_as_much_is_measured_as_the_time_allows(seconds, candidates, length, folder, monkeypatch):
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    given, clock = request(folder), tune._Clock(0.0, minutes=5)
    all_sides = sides(given)
    pace = tune._Pace(predict=seconds, read=seconds, write=0.0)
    size = tune._Size(text=732, trained=512, block=16, facts=96)
    measured, fitted, minutes = tune._fit(given, clock, all_sides, size, pace)
    assert [side.policy for side in measured[-2:]] == ["random", "full"]
    assert [*measured[:-2]] == all_sides[:candidates]
    assert fitted == length
    assert 0 < minutes <= 5


def test_pieces_do_not_overlap_and_begin_as_texts_do(monkeypatch):
    monkeypatch.setattr(tune, "MOST_ROUNDS", 12)
    pieces = tune._pieces([1], range(100, 1100), 91)
    assert len(pieces) == 11
    assert all(len(piece) == 91 and piece[0] == 1 for piece in pieces)
    tokens = [token for piece in pieces for token in piece[1:]]
    assert sorted(tokens) == list(range(100, 1090))
    assert tokens != sorted(tokens)  # the first ones are spread over the text


def test_policies_are_measured_as_conversations_run_them(folder):
    given = request(folder, policies=("streaming_llm", "keydiff"), pins={"recent_tokens": 8})
    model = tuned(given)
    model.load("streaming_llm")
    caches = {side.policy: model.loop(side, 100).cache for side in sides(given)}
    assert [*caches] == ["streaming_llm", "keydiff", "random", "full"]
    for policy in ("streaming_llm", "keydiff"):
        chat = load(folder, policy, recent_tokens=8).new_cache()
        assert caches[policy].eviction == chat.eviction
        assert caches[policy].layout.positions == chat.layout.positions
        sizes = [cache.layout.nbytes(1, torch.float32) for cache in (caches[policy], chat)]
        assert sizes[0] == sizes[1]
        assert caches[policy].evict_every == chat.evict_every == 16
    assert caches["full"].layout.budget_tokens == 100


def test_equal_bytes_give_policies_their_own_slots(folder):
    given = request(
        folder, policies=("snapkv", "lagkv"), sizes=Sizes(CacheSettings(kv_budget="64KiB"))
    )
    snapkv, lagkv = (side.plan for side in sides(given)[:2])
    assert snapkv.cache_bytes <= 64 << 10
    assert lagkv.cache_bytes <= 64 << 10
    assert snapkv.budget_tokens < lagkv.budget_tokens  # it keeps queries beside
    assert given.budget_option == "--kv-budget"


@pytest.mark.parametrize("policies", [(), ("all",)])
def test_candidates_that_cannot_be_run_are_left_out_and_said(policies, folder, monkeypatch):
    monkeypatch.setattr(TorchTuned, "candidates", ("headkv", "streaming_llm"))
    monkeypatch.setattr(tune, "spelled_out", lambda names: ["headkv", "streaming_llm", "full"])
    notes: list[str] = []
    candidates = [side.policy for side in sides(request(folder, policies=policies), notes)]
    assert candidates == ["streaming_llm", "random", "full"]
    (note,) = notes
    assert note.startswith("headkv is left out: headkv needs a table")
