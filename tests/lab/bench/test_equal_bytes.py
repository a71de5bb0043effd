"""`kvcap bench equal-bytes`: equal bytes, equal prompts, and context shift as in llama.cpp."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from llama_reference import needs_library

from kvcap import cli
from kvcap.evals.bench import options_for
from kvcap.lab.bench import equal_bytes as bench
from kvcap.lab.quality import equal_bytes
from kvcap.lab.quality.equal_bytes import ShiftedRuntime, SideWork, figures
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cores import usable_cores

pytestmark = needs_library
CORES = len(usable_cores())  # as many threads, so that one process measures at a time
GIVEN = {"lengths": (900, 600), "repeats": 5, "threads": (CORES,), "vs": ("llama.cpp",)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model."""
    return tiny_gguf.written(tmp_path_factory.mktemp("gguf"), trained=2048)


def test_all_rows_at_equal_bytes(file, tmp_path, capsys, monkeypatch):
    """Both sides have the same bytes and prompts; a second run measures nothing again."""

    def here(work: SideWork) -> dict[str, Any]:
        return {**asdict(work), **figures(work)}

    few = ("perplexity", "niah_single_2", "chat", "time")  # other tasks need long texts
    monkeypatch.setattr(bench, "KINDS", ("f16",))
    monkeypatch.setattr(bench, "ROWS", {row: bench.ROWS[row] for row in few})
    monkeypatch.setattr(bench, "TIMED", 1)
    monkeypatch.setattr(bench, "measured", here)
    monkeypatch.setattr(equal_bytes, "TURNS", 4)
    given = {**GIVEN, "model": str(file), "files": tmp_path, "budgets": (256,), "block_size": 32}
    rows = bench.run(options_for("equal-bytes", given)).rows
    assert [row["row"].partition(",")[0] for row in rows[:3]] == [*bench.ROWS.values()][:3]
    for row in rows:
        mine, its = (
            [(x["cells"], x["digest"], x["held_bytes"]) for x in row["measured"][f"{side} f16"]]
            for side in ("kvcap", "llama.cpp")
        )
        assert mine == its
        assert mine[0][2] <= row["measured"]["kvcap f16"][0]["kv_bytes"]
        assert row["kvcap q4_0"] == "–"
    counts = [[len(x["scores"]) for x in row["measured"]["kvcap f16"]] for row in rows[:3]]
    assert counts == [[1, 1], [4, 1], [2, 2]]  # texts, samples and facts of two pieces
    assert all(len({x["digest"] for x in row["measured"]["kvcap f16"]}) == 2 for row in rows[:3])
    assert [rows[-1]["kvcap f16"], rows[-1]["llama.cpp f16"]] == ["224", "256"]
    monkeypatch.setattr(bench, "measured", None)
    command = ["bench", "equal-bytes", "-m", str(file), "--files", str(tmp_path)]
    command += ["--budgets", "256", "--block-size", "32", "-r", "5", "-p", "900,600"]
    command += ["-t", str(CORES)]
    assert cli.run([*command, "--vs", "llama.cpp", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == json.loads(json.dumps(rows))


def test_a_process_of_its_own(file):
    sizes: dict[str, Any] = {
        "budget": 256,
        "kv_bytes": 1 << 20,
        "block_size": 32,
        "threads": 1,
        "length": 900,
    }
    work = SideWork(str(file), "time", "kvcap", "f16", policy=None, samples=1, **sizes)
    row = equal_bytes.measured(work)
    assert SideWork.of(row) == work
    assert row["recall"] > 0
    assert 0 < row["before_bytes"] < row["peak_bytes"]
    assert row["ttft_s"] > 0


def test_a_shift_drops_half_of_what_follows_the_first_tokens(file):
    sizes = CacheSettings(budget_tokens=224, block_size=32)
    runtime = ShiftedRuntime.from_file(file, None, sizes, threads=1)
    loop = runtime.loop()
    for token in range(256 + 1):
        assert loop.cache.held == token
        loop.read(np.array([[3 + token]]))
    assert loop.cache.tokens.tolist() == [0, 1, 2, 3, *range(4 + 126, 257)]
    assert loop.cache.cell_positions.tolist() == [*range(131)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vs": ("transformers",)}, "compares with llama.cpp alone"),
        ({"model": "pocket"}, "is no GGUF file"),
        ({"lengths": (64,)}, "two --lengths"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, message, file, tmp_path):
    options = {**GIVEN, "model": str(file), "files": tmp_path, **given}
    with pytest.raises(ValueError, match=message):
        bench.run(options_for("equal-bytes", options))
