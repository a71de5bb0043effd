"""`kvcap bench cpu`: rounds of processes, rows beside peers, and peers that cannot be run."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make import argv, in_python
from safetensors.torch import save_file
from tools import script

from kvcap import cli
from kvcap.evals.bench import BenchmarkOptions, Result, options_for
from kvcap.lab.bench import cpu
from kvcap.lab.peers import serve, write_gguf
from kvcap.lab.peers.process import Process, cores, first_piece
from kvcap.runtime.backends.llamacpp.library import VARIABLE
from kvcap.runtime.errors import ExtraMissing, KvcapError, PeerFailed

SETTINGS = {"model": "nowhere", "files": "nowhere", "weights": "F16", "context": 8, "threads": 1}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("peer", [None, "transformers"])
def test_a_run_in_processes_of_their_own(peer, tmp_path, capsys):
    """A row has kvcap and its peer, and says what was run."""
    given = {"lengths": (0,), "depths": (40,), "steps": 3, "repeats": 2, "threads": (1,)}
    sizes = {"budgets": (32,), "block_size": 16, "files": tmp_path, "model": "random-tiny"}
    changes = {"weights": ("bf16",), "vs": (peer,) if peer else ()}
    result = cpu.run(options_for("cpu", {**given, **sizes, **changes}))
    (row,) = json.loads(json.dumps(result.as_dict()))["rows"]
    assert (row["work"], row["peer"]) == ("decode", peer)
    assert (row["backend"], row["weights"]) == ("pytorch", "bf16")
    assert (row["threads"], row["n"], row["tokens"], row["budget"]) == (1, 40, 3, 32)
    assert row["device"].endswith(", 1 threads")
    assert 0 < row["p50_ms"] <= row["p90_ms"]
    assert 0 < row["eviction_share"] < 1
    assert row["kv_bytes"] < 32 * 1024  # however long the prompt
    assert row["peak_bytes"] > 100 << 20  # PyTorch alone
    assert "torch" in row["versions"]
    if peer:
        assert row["peer_weights"] == "bf16"
        assert row["ratio_least"] <= row["ratio"] <= row["ratio_most"]
        # The peer's cache grows: 2 layers, 1 head of 64, bfloat16.
        assert row["peer_kv_bytes"] == (40 + 1 + 3) * 2 * 2 * 64 * 2
        assert row["peer_peak_bytes"] > 100 << 20
        assert "transformers" in row["peer_versions"]
    assert len(result.table().splitlines()) == 3
    out, err = capsys.readouterr()
    assert not out
    assert "decode 40, bf16, 1 threads" in err


class Toy:
    """A process that answers at a known speed, and says when it is asked."""

    def __init__(self, name: str, seconds: list[float], log: list[str]) -> None:
        self.name, self.seconds, self.log = name, seconds, log

    def measure(self, work: str, n: int, tokens: int, seed: int) -> dict[str, Any]:
        self.log.append(self.name)
        took = self.seconds[seed]
        return {"seconds": [took] * max(1, tokens), "peak_bytes": 7, "kv_bytes": 5}


def test_programs_alternate_and_ratios_are_of_the_same_round():
    log: list[str] = []
    # The machine slows down: by medians of each alone, the ratio would be 4 / 2 = 2 all the same;
    # of the same rounds it is 2, 4 and 1.
    processes: Any = {
        "kvcap": Toy("kvcap", [1, 2, 16], log),
        "transformers": Toy("transformers", [2, 8, 16], log),
    }
    rounds = cpu._alternating(processes, "decode", 9, 4, 3)
    assert log == ["kvcap", "transformers"] * 4  # once to warm up
    figures = cpu._beside(rounds, "transformers", "decode", 9)
    assert (figures["ratio"], figures["ratio_least"], figures["ratio_most"]) == (2, 1, 4)
    assert figures["peer_tok_s"] == 1 / 8
    assert cpu._figures(rounds["kvcap"], "decode", 9)["p90_ms"] == 16000
    # Prefill counts the tokens that were read.
    rounds = cpu._alternating(processes, "prefill", 9, 0, 3)
    assert cpu._figures(rounds["kvcap"], "prefill", 9)["tok_s"] == 9 / 2
    assert set(cpu._beside(rounds, None, "prefill", 9)) == set(figures)


class Counted:
    """A program that counts what it is asked for."""

    vocabulary, kv_bytes, packages = 11, 3, ()

    def __init__(self) -> None:
        self.done: list[Any] = []

    def fill(self, ids: list[int]) -> None:
        self.done.append(("fill", len(ids)))

    def prefill(self, ids: list[int]) -> None:
        assert all(0 <= token < 11 for token in ids)
        self.done.append(("prefill", len(ids)))

    def step(self) -> None:
        self.done.append("step")

    def eviction_seconds(self, work: Any) -> float | None:
        return None


def test_a_measurement_does_what_is_requested():
    program = Counted()
    figures = serve.measure(program, "prefill", 12, 0, 0)
    assert program.done == [("prefill", 12)]
    assert len(figures["seconds"]) == 1
    figures = serve.measure(program, "decode", 12, 2, 0)
    assert program.done[1:] == [("fill", 12), "step", "step", "step"]  # the first is not timed
    assert len(figures["seconds"]) == 2
    assert figures["kv_bytes"] == 3
    assert figures["peak_bytes"] > 0
    assert serve.measure(program, "decode", 1, 1, 0, evictions=True) == {"share": None}


def test_a_missing_library_is_an_error_of_the_benchmark(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ExtraMissing, match=f"llama.cpp cannot be run: no libllama .*{tmp_path}"):
        Process("llama.cpp", None, SETTINGS)


def test_an_error_that_names_no_package_is_said_as_it_is(tmp_path):
    """A module that stands for numpy raises as kvcap does where an extra is missing."""
    (tmp_path / "numpy.py").write_text("raise ImportError('this file needs two packages')")
    code = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]; "
        "from peers.run_llama_cpp import main; main()"
    )
    given = json.dumps({**SETTINGS, "cpus": cores(1)}) + "\n"
    done = in_python(code, tmp_path, Path(serve.__file__).parents[1], input=given, check=True)
    assert json.loads(done.stdout) == {"unusable": "this file needs two packages"}


def test_starts_are_of_new_processes(monkeypatch, capsys):
    """Each round starts every program once; the first of them is not counted."""
    log: list[tuple[str, str]] = []

    class Loaded:
        def __init__(self, *args: Any) -> None:
            self.versions: dict[str, str] = {}

        def __enter__(self) -> Loaded:
            return self

        def __exit__(self, *args: object) -> None:
            log.append(("closed", ""))

    def started(name: str, python: str | None, settings: dict[str, Any]) -> dict[str, Any]:
        log.append((name, settings["text"]))
        took = len(log) if name == "kvcap" else 2 * len(log)
        spent = 3.0 if name == "kvcap" else 2.0
        times = {"seconds": [took], "processor_seconds": spent}
        return {**times, "peak_bytes": 7, "kv_bytes": None}

    monkeypatch.setattr(cpu, "Process", Loaded)
    monkeypatch.setattr(cpu, "first_piece", started)
    given = {"starts": (3,), "lengths": (0,), "steps": 0, "repeats": 2, "threads": (1,)}
    changes = {"model": "pocket", "weights": ("bf16",), "vs": ("llama.cpp",)}
    (row,) = cpu.run(options_for("cpu", {**given, **changes})).rows
    pair = [("kvcap", "the the the"), ("llama.cpp", "the the the")]
    assert log == [("closed", "")] * 2 + pair * 3
    assert (row["work"], row["n"], row["tokens"]) == ("start", 3, None)
    assert row["p50_ms"] == 1000 * (5 + 7) / 2
    assert (row["ratio_least"], row["ratio_most"]) == (16 / 7, 12 / 5)
    assert (row["processor_ms"], row["peer_processor_ms"]) == (3000, 2000)
    assert row["processor_ratio"] == row["processor_ratio_most"] == 1.5
    assert "start 3, bf16, 1 threads" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"starts are timed beside llama\.cpp alone, not kvpress"):
        cpu.run(options_for("cpu", {**given, **changes, "vs": ("kvpress",)}))


@pytest.mark.slow
def test_a_start_of_the_command_itself():
    settings = {
        "model": "pocket",
        "text": "the the",
        "threads": 1,
        "budget": 64,
        "block_size": 16,
        "backend": "pytorch",
        "policy": "keydiff",
        "weights": "float32",
        "packed": None,
    }
    figures = first_piece("kvcap", None, settings)
    assert 0 < figures["seconds"][0] < 600
    assert figures["peak_bytes"] > 50 << 20
    with pytest.raises(PeerFailed, match=r"kvcap, run by .*, ended with code 2: .*nowhere"):
        first_piece("kvcap", None, {**settings, "model": "./nowhere"})


def test_peers_that_cannot_be_run_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"no peer is called 'ollama'; known: llama.cpp, "):
        cpu.run(BenchmarkOptions(vs=("ollama",)))
    with pytest.raises(PeerFailed, match=r"kvpress cannot be run by '/nowhere/python': No such"):
        Process("kvpress", "/nowhere/python", SETTINGS)
    silent = script(tmp_path / "python", "echo broken >&2\nexit 3")
    with pytest.raises(PeerFailed, match=r"kvpress, run by .*python, ended with code 3: broken"):
        Process("kvpress", str(silent), SETTINGS)
    with pytest.raises(ExtraMissing, match=r"kvpress needs the package kvpress, which .*lacks"):
        Process("kvpress", None, SETTINGS)
    with pytest.raises(ValueError, match=r"999 threads, but this process may use 1 to \d"):
        cores(999)


def test_weights_and_models_that_cannot_be_run(tmp_path):
    options = BenchmarkOptions(
        model="random-tiny", files=tmp_path, backend="pytorch", weights=("int3",)
    )
    with pytest.raises(ValueError, match="PyTorch runs no weights called 'int3': bf16"):
        cpu.run(options)
    with pytest.raises(ValueError, match="no backend is called 'tvm'"):
        cpu.run(BenchmarkOptions(backend="tvm"))
    with pytest.raises(KvcapError, match="no model is called 'random-7b'"):
        cpu.run(BenchmarkOptions(model="random-7b"))


def test_the_options_are_those_of_llama_bench(capsys, monkeypatch):
    given_options: list[BenchmarkOptions] = []

    def run(options: BenchmarkOptions) -> Result:
        given_options.append(options)
        return Result("cpu", ("work",), [{"work": "decode", "versions": {"a": "1"}}], {})

    monkeypatch.setattr(cpu, "run", run)
    more = ["--vs", "llama.cpp", "--peer-python", "llama.cpp=a=b", "--weights", "int8,int4"]
    line = [*argv("bench cpu -p 8,16 -n 4 -d 32,64 -r 7 -t 1,2 --starts 20"), *more]
    for output in ("md", "json", "csv"):
        assert cli.run([*line, "-m", "pocket", "-o", output]) == 0
        printed = capsys.readouterr().out
        if output == "csv":
            (row,) = csv.DictReader(StringIO(printed))
            assert row == {"work": "decode", "versions": '{"a": "1"}'}
        elif output == "json":
            assert json.loads(printed)["rows"][0]["work"] == "decode"
        else:
            assert printed.splitlines()[0] == "| work   |"
            assert len(printed.splitlines()) == 3
    first = given_options[0]
    assert (first.lengths, first.steps, first.depths) == ((8, 16), 4, (32, 64))
    assert (first.repeats, first.threads, first.model) == (7, (1, 2), "pocket")
    assert first.starts == (20,)
    assert (first.vs, first.weights) == (("llama.cpp",), ("int8", "int4"))
    assert first.peer_pythons == {"llama.cpp": "a=b"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cpu --peer-python llama.cpp", "give a peer and a Python"),
        ("cpu -t 0", "--threads 0: give one count"),
        ("prefill -t 1,2", "--threads 1,2: give one count"),
        ("cpu -o yaml", ": 'yaml' is not one of"),
    ],
)
def test_bad_options_are_refused(line, message, kvcap):
    assert message in kvcap.refused("bench", *line.split())


def test_gguf_rows_turn_as_the_checkpoints_do():
    """RoPE by halves over a projection is RoPE by neighbours over the same rows reordered."""
    rng = np.random.default_rng(0)
    queries, keys = rng.normal(size=(2, 2 * 8, 5))  # two heads of 8
    x, angles = rng.normal(size=5), rng.normal(size=(2, 4))

    def turned(rows: Any, angle: Any, neighbours: bool) -> Any:
        heads = (rows @ x).reshape(2, 8)
        a, b = (heads[:, ::2], heads[:, 1::2]) if neighbours else (heads[:, :4], heads[:, 4:])
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=1)

    def logits(rows: tuple[Any, Any], neighbours: bool) -> Any:
        q, k = (turned(r, angle, neighbours) for r, angle in zip(rows, angles, strict=True))
        return (q * k).sum(axis=1)

    mine = tuple(write_gguf._neighbours(rows, 2) for rows in (queries, keys))
    expected = logits((queries, keys), False)
    np.testing.assert_allclose(logits(mine, True), expected)
    assert np.abs(logits((queries, keys), True) - expected).max() > 0.1


def test_gguf_files_are_of_plain_llamas(tmp_path):
    none: Any = None  # the library, which is not reached
    weights = torch.arange(6.0).view(2, 3) - 2.5
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    tensors = {str(kind): weights.to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "model.safetensors")
    read = dict(write_gguf._tensors(tmp_path))
    assert read.keys() == tensors.keys()
    for array in read.values():
        np.testing.assert_array_equal(array, weights)
    names = {write_gguf._renamed(f"model.layers.3.{name}.weight") for name in write_gguf.PARTS}
    assert "blk.3.attn_q.weight" in names
    config = tmp_path / "config.json"
    for fault, facts in {
        "is qwen3": {"model_type": "qwen3"},
        "has yarn RoPE": {"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}},
        "has biases": {"model_type": "llama", "attention_bias": True},
    }.items():
        config.write_text(json.dumps(facts))
        with pytest.raises(ValueError, match=f"plain Llama models only; this one {fault}"):
            write_gguf.written(none, tmp_path, tmp_path, "Q4_0")
    with pytest.raises(ValueError, match="no GGUF file is written in Q2_K"):
        write_gguf.written(none, tmp_path, tmp_path, "Q2_K")
