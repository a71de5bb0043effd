"""Exported decoders in ONNX Runtime: the same text and kept tokens as PyTorch's, the same caps."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make import DOOR, ran
from region_checks import BUDGET, check_regions, check_thoughts_leave
from tools import PATIENCE, made, operations, pocket_decoder, tiny_decoder  # noqa: F401

from kvcap.cli import run
from kvcap.policies import load_policy
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.backends.onnxruntime.loop import OrtCache
from kvcap.runtime.backends.onnxruntime.manifest import check, files_named, read
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.errors import (
    GraphBroken,
    ManifestError,
    MemoryCapExceeded,
    ModelFilesBroken,
    ModelNotFound,
    NotExportable,
    PlanInfeasible,
    SessionFileCorrupt,
    SessionFileForeign,
    ShapeError,
    TokenUnknown,
)
from kvcap.runtime.session.session import Session
from kvcap.runtime.session.settings import end_tokens

ROOT = Path(__file__).parents[4]
BLOCK, MOST = 32, 128
MODES = ("compact", "true")
STORY = (
    "Please remember: the code for the blue door is 4821. Seven kinds of mosses survive the cold "
    "near Porto. He believed that tall grasses attract many bees. The old ship left the harbour in "
    "the morning. The baker of Lund sells nine kinds of bread. Nobody saw the grey cat again, but "
    "the children still leave milk at the door. In winter the lake is quiet. "
)
FACT, QUESTION = (
    "Please remember: the code for the red door is 77.",
    "What is the code for the red door?",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Directories of pocket's decoder as kvcap exports it, by mode and budget."""

    def folder(mode: str, budget: int) -> Path:
        largest = pocket_decoder(tmp_path_factory, mode)
        if budget == MOST:
            return largest
        return made(
            tmp_path_factory,
            f"shared-{mode}-{budget}",
            lambda out: rebudgeted(largest, out, budget),
        )

    return folder


def rebudgeted(source: Path, folder: Path, budget: int) -> Path:
    """The same export for fewer slots: KeyDiff's graphs know no budget, the manifest says it."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["budget_tokens"], manifest["budgets"] = budget, [budget] * len(manifest["budgets"])
        for state in manifest["state"]:
            state["full"][2] = budget + manifest["block_size"]

    return rewritten(shutil.copytree(source, folder), change)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda _: None) -> Path:
    """The directory after a change of its manifest, which had its files' sizes and checksums."""
    manifest = json.loads((folder / "kvcap.json").read_text())
    for entry in manifest["files"]:
        path = folder / entry["file"]
        entry["bytes"] = path.stat().st_size
        entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    change(manifest)
    (folder / "kvcap.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_decoder(tmp_path_factory)


@functools.cache
def torch_run(model: str, policy: str, mode: str, budget: int, block: int, every: int) -> Any:
    """What PyTorch says, and which tokens each layer keeps, [K, N] in time order."""
    runtime = Runtime.from_pretrained(
        model,
        policy,
        budget_tokens=budget,
        block_size=block,
        dtype="float32",
        positions=mode,
        device="cpu",
        evict_every=every,
    )
    session = continued(runtime)
    rows = [layer.segments[0].positions[0] for layer in session.cache.capped_layers]
    return session.story_end, [row.sort(-1).values.numpy() for row in rows]


def continued(runtime: Any) -> Any:
    """A session that has read the story and written 200 tokens."""
    session = runtime.session()
    session.set_generation(do_sample=False, max_new_tokens=200)
    session.generation.eos_token_id = None
    session.story_end = "".join(session.complete(STORY))
    assert session.turn.completion_tokens == 200
    return session


def same_as_torch(runtime: OrtRuntime, model: str = "pocket", policy: str = "") -> None:
    session, plan = continued(runtime), runtime.plan
    policy = policy or plan.policy
    sizes = plan.budget_tokens, plan.block_size, runtime.every
    text, kept = torch_run(model, policy, plan.positions, *sizes)
    assert session.story_end == text
    assert session.cache.seen > plan.budget_tokens + 100
    for mine, theirs in zip(session.cache.positions, kept, strict=True):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "budget"), [("compact", 48), ("true", MOST)])
def test_decoders_say_and_keep_what_pytorch_does(exported, mode, budget):
    """With slots that are overwritten in place."""
    same_as_torch(OrtRuntime.from_directory(exported(mode, budget)))
    same_as_torch(OrtRuntime.from_directory(exported(mode, budget), evict_every=1))


@pytest.mark.parametrize("ends", [[], [7]])
def test_an_answer_ends_at_what_the_manifest_does_not_name(copied, ends, kvcap):
    rewritten(copied, put(ends, "generation", "eos_token_id"))
    runtime = OrtRuntime.from_directory(copied)
    text = runtime.tokenizer.special_tokens_map["eos_token"]
    own = runtime.tokenizer.backend_tokenizer.token_to_id(text)
    assert end_tokens(runtime.session().generation) == {*ends, own}
    listed_ends = kvcap.document("plan", str(copied), *ALWAYS)["end_tokens"]
    assert [end["id"] for end in listed_ends] == [*ends, own]
    assert listed_ends[-1]["text"] == text


def test_python_takes_an_export_as_it_takes_a_model(exported, tmp_path, monkeypatch, capsys):
    """The documentation's example runs; what an export cannot do is refused by name."""
    (tmp_path / "pocket-onnx").symlink_to(exported("compact", MOST))
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "onnxruntime.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(capsys.readouterr().out.split()) > 3
    runtime = names["runtime"]
    assert isinstance(runtime, OrtRuntime)
    assert (runtime.plan.budget_tokens, runtime.every) == (MOST, BLOCK)
    other = Runtime.from_pretrained("pocket-onnx", policy="keydiff", evict_every=1, block_size=8)
    assert (other.plan.block_size, other.every) == (8, 1)
    for given, error, says in [
        ({"weights": "int4"}, NotExportable, "weights are as they are"),
        ({"device": "cuda"}, NotExportable, "runs on the CPU"),
        ({"policy": "knorm"}, NotExportable, "not in this export, which has keydiff"),
        ({"policy": load_policy("knorm")}, NotExportable, "by its name"),
        ({"sink_tokens": 9}, NotExportable, "sink_tokens=9"),
        ({"budget_tokens": 64}, NotExportable, "--budget-tokens 128"),
        ({"block_size": 4096}, NotExportable, "blocks of up to"),
        ({"dtype": "float16"}, NotExportable, "--dtype fp32"),
    ]:
        with pytest.raises(error, match=says):
            Runtime.from_pretrained("pocket-onnx", **given)


@pytest.mark.slow
def test_the_page_compares_speeds_of_the_same_work(exported, tmp_path, monkeypatch, capsys):
    """Its two commands read and evict the same tokens, and write the same ones."""
    page = (ROOT / "docs" / "onnxruntime.md").read_text()
    shell = re.findall(r"```sh\n(.*?)```", page.partition("## Compare the speed")[2], re.DOTALL)
    (tmp_path / "pocket-onnx").symlink_to(exported("compact", MOST))
    (tmp_path / "long.txt").write_text(STORY * 4)
    monkeypatch.chdir(tmp_path)
    runs = []
    for line in "".join(shell).splitlines():
        name, *arguments = line.replace("-tokens 300", "-tokens 30").split()
        if "--budget-tokens" in arguments:  # the export of the tests is smaller
            arguments[arguments.index("--budget-tokens") + 1] = str(MOST)
            arguments += ["--block-size", str(BLOCK)]
        assert (name, run(arguments)) == ("kvcap", 0)
        printed = json.loads(capsys.readouterr().out)
        same = "policy", "budget_tokens", "held_tokens", "evicted_tokens"
        threads = arguments[arguments.index("--threads") + 1]
        runs.append(
            (threads, printed["text"], printed["usage"], [printed["kv"][name] for name in same])
        )
    pytorch, ort = runs
    assert pytorch == ort


def test_an_export_has_the_calls_of_a_runtime(tiny):
    runtime = OrtRuntime.from_directory(tiny / "decoder")
    with pytest.raises(NotExportable, match="policy in its graphs"):
        runtime.with_policy(load_policy("snapkv"))
    assert runtime.free_idle() == 0


def test_a_token_beyond_the_embedding_is_refused_by_name(tiny):
    runtime = OrtRuntime.from_directory(tiny / "decoder")
    runtime.tokenizer.backend_tokenizer.add_tokens(["<extra>"])
    session = runtime.session()
    with pytest.raises(TokenUnknown, match=f"'<extra>', token {runtime.vocabulary:,} of the"):
        session.send("Hello <extra>")
    session.set_generation(max_new_tokens=2)
    assert "".join(session.send("Hello"))


def python(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    given = {"PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    env = {"PATH": "/usr/bin:/bin", **given, **env}
    return ran([sys.executable, *arguments], input=stdin, timeout=PATIENCE, env=env)


NO_TORCH = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'onnx')))\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["chat", "generate", "plan"])
def test_runs_where_neither_torch_nor_transformers_can_be_imported(tiny, exported, command):
    for folder in [tiny / "decoder", *([exported("true", MOST)] if command == "chat" else [])]:
        words = ["Hello!"] if command == "generate" else []
        limit = [] if command == "plan" else ["--max-new-tokens", "8"]
        arguments = [command, str(folder), *words, "--backend", "onnxruntime", "--json", *limit]
        code = f"{NO_TORCH}from kvcap.cli import run\nsys.exit(run({arguments!r}))"
        done = python("-c", code, stdin="Hello!\n/stats\n/mem\n")
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)


def test_without_pytorch_its_backend_is_missed_by_name():
    done = python("-c", f"{NO_TORCH}from kvcap.cli import run\nsys.exit(run(['generate', 'Hi']))")
    assert done.returncode == 1
    assert "torch is not installed" in done.stderr


def test_a_run_imports_neither_torch_nor_transformers_and_sends_nothing(tiny, tmp_path):
    arguments = ["generate", str(tiny / "decoder"), "Hello!", *ALWAYS, "--max-new-tokens", "3"]
    homes = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = (
        "import sys\nfrom kvcap.cli import main\ntry:\n    main()\nfinally:\n"
        "    assert not {'torch', 'transformers', 'onnx'} & set(sys.modules)"
    )
    done = python("-c", code, *arguments, ORT_DISABLE_TELEMETRY="0", **homes)
    assert done.returncode == 0, done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


PEAK = """
import re, sys
import numpy as np
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
runtime = OrtRuntime.from_directory(sys.argv[1])
loop, draws = runtime.loop(), np.random.default_rng(0)
held = loop.cache.nbytes
loop.prefill(draws.integers(6, 2560, (1, int(sys.argv[2]))))
for _ in range(40):
    loop.read(draws.integers(6, 2560, (1, 1)))
assert held == loop.cache.nbytes == runtime.plan.cache_bytes
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_memory_does_not_grow_with_the_conversation(exported):
    folder = exported("compact", 48)
    peaks = []
    for tokens in (1000, 8000):
        done = python("-c", PEAK, str(folder), str(tokens))
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 3 << 20


def test_a_process_under_a_cap(tiny):
    runtime = OrtRuntime.from_directory(tiny / "decoder", memory_cap="4GiB", budget_tokens=24)
    assert runtime.plan.total_bytes <= 4 << 30
    with pytest.raises(PlanInfeasible, match="more than the cap"):
        OrtRuntime.from_directory(tiny / "decoder", memory_cap="1MiB")
    runtime.memory_cap = 1 << 20  # as if the process had grown
    with pytest.raises(MemoryCapExceeded, match="above the cap"):
        list(runtime.session().send("Hello!"))


ALWAYS = ["--backend", "onnxruntime"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--budget-tokens", "64"], 2, "--budget-tokens 128"),
        (["--kv-budget", "64KiB"], 3, "more than 65,536"),
        (["--block-size", "33"], 2, "blocks of up to 32"),
        (["--positions", "true"], 2, "true positions is not in this export"),
        (["--sink-tokens", "3"], 2, "sink_tokens=3 is not in this export"),
        (["--sink-tokens", "0"], 2, "sink_tokens=0 is not in this export"),
        (["--memory-cap", "20MiB"], 3, "more than the cap"),
    ],
)
def test_what_a_shared_decoder_cannot_do_is_refused_by_name(exported, kvcap, options, code, says):
    folder = str(exported("compact", MOST))
    assert says in kvcap.refused("plan", folder, *ALWAYS, *options, code=code)


def test_directories_that_are_no_exports(tiny, tmp_path, kvcap):
    for model, says in (
        ("pocket", "export decoder pocket"),
        (str(tiny / "model"), "export decoder"),
        (str(tmp_path / "nowhere"), "no directory"),
    ):
        assert says in kvcap.refused("plan", model, *ALWAYS)
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(NotExportable, match="of another exporter"):
        OrtRuntime.from_directory(tmp_path)
    with pytest.raises(ModelNotFound):
        OrtRuntime.from_directory(tmp_path / "nowhere")


@pytest.fixture
def copied(tiny, tmp_path):
    return shutil.copytree(tiny / "decoder", tmp_path / "copy")


def test_the_family_of_a_model_is_that_of_its_manifest(copied):
    """Chats draw by the settings of a family; a manifest of another tool need not name one."""
    assert read(copied).kind.family == "llama"
    rewritten(copied, lambda manifest: manifest["model"].pop("family"))
    assert read(copied).kind.family == ""


def put(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    """Say something else in a manifest."""

    def change(part: Any) -> None:
        *above, last = keys
        for key in above:
            part = part[key]
        part[last] = value

    return change


def unlist(name: str) -> Callable[[dict[str, Any]], None]:
    """Leave a file out of a manifest."""
    return lambda manifest: manifest["files"].remove(
        next(entry for entry in manifest["files"] if entry["file"] == name)
    )


SHA = "0" * 64
BROKEN_MANIFESTS: list[tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    (put("kvcap.decoder/9", "schema"), ManifestError, "kvcap.decoder/9"),
    (put("else", "kind"), ManifestError, "kind"),
    (put("grouped", "kind"), ManifestError, "is no kvcap.decoder/2: kind"),
    (lambda manifest: manifest.pop("generation"), ManifestError, "generation"),
    (lambda manifest: manifest["model"].pop("layers"), ManifestError, "layers"),
    (lambda manifest: manifest["model"].pop("name"), ManifestError, "name"),
    (put(3, "model", "name"), ManifestError, "model/name"),
    (put("a\nb", "model", "name"), ManifestError, "model/name"),
    (put(0, "budget_tokens"), ManifestError, "budget_tokens"),
    (put(True, "budget_tokens"), ManifestError, "budget_tokens"),
    (put(24.0, "budget_tokens"), ManifestError, "budget_tokens"),
    (put(10**30, "budget_tokens"), ManifestError, "budget_tokens"),
    (put("other", "positions"), ManifestError, "positions"),
    (put("float8", "state", 0, "dtype"), ManifestError, "dtype"),
    (put([None], "inv_freq"), ManifestError, "inv_freq"),
    (put([1.0] * 7 + [float("inf")], "inv_freq"), ManifestError, "no JSON"),
    (put([1.0] * 300, "inv_freq"), ManifestError, "inv_freq"),
    (put(float("nan"), "policy", "parameters", "share"), ManifestError, "no JSON"),
    (put(-1, "policy", "pins", "sinks"), ManifestError, "sinks"),
    (put("hot", "generation", "temperature"), ManifestError, "temperature"),
    (put([2.5], "generation", "eos_token_id"), ManifestError, "eos_token_id"),
    (put("../model.onnx", "files", 0, "file"), ManifestError, "files/0/file"),
    (put("a/../../model.onnx", "files", 0, "file"), ManifestError, "files/0/file"),
    (put("/etc/passwd", "files", 0, "file"), ManifestError, "files/0/file"),
    (put("model\0.onnx", "files", 0, "file"), ManifestError, "files/0/file"),
    (put(-1, "files", 0, "bytes"), ManifestError, "files/0/bytes"),
    (lambda manifest: manifest["files"].append(manifest["files"][0]), ManifestError, "twice"),
    (put("gone.onnx", "graphs", "decoder", "file"), ManifestError, "not among its files"),
    (lambda manifest: manifest["files"].append({"file": "gone", "bytes": 1, "sha256": SHA}),
     ModelFilesBroken, "gone"),
    (put(1, "model", "layers"), ManifestError, "budgets: of"),
    (put("config.json", "graphs", "decoder", "file"), GraphBroken, "config.json"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "says"), BROKEN_MANIFESTS)
def test_a_manifest_that_is_not_the_decoders_is_refused(copied, change, error, says):
    rewritten(copied, change)
    with pytest.raises(error, match=says):
        OrtRuntime.from_directory(copied).session()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put(64, "budget_tokens"), "budgets: not budget_tokens, 64"),
        (lambda manifest: manifest["budgets"].pop(), "budgets: of 5 layers"),
        (put([0, 1], "evictors", 0, "layers"), "evictors: not one of each layer"),
        (put([True], "rotates"), "rotates"),
        (put(True, "queries_observed"), "queries_observed"),
        (put([0], "policy", "pins", "recents"), "recents"),
        (put([200] * 6, "policy", "pins", "recents"), "more than a layer's budget"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(exported, change, says):
    """Before anything of the decoder is loaded."""
    manifest = json.loads((exported("true", MOST) / "kvcap.json").read_text())
    check(manifest)
    change(manifest)
    with pytest.raises(ManifestError, match=says):
        check(manifest)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 3}', "\0"])
def test_a_manifest_that_is_none(copied, text):
    (copied / "kvcap.json").write_text(text)
    with pytest.raises(ManifestError):
        OrtRuntime.from_directory(copied)


@pytest.mark.slow
def test_broken_files_are_named(copied, exported, tmp_path):
    os.truncate(copied / "decoder.onnx", (copied / "decoder.onnx").stat().st_size - 100)
    with pytest.raises(ModelFilesBroken, match=r"decoder\.onnx"):
        OrtRuntime.from_directory(copied)
    rewritten(copied)
    with pytest.raises(GraphBroken, match=r"decoder\.onnx"):  # though the manifest agrees
        OrtRuntime.from_directory(copied)
    folder = shutil.copytree(exported("true", MOST), tmp_path / "shared")
    data = folder / "decoder.onnx.data"
    data.rename(tmp_path / "aside")
    with pytest.raises(ModelFilesBroken, match=r"decoder\.onnx\.data"):
        OrtRuntime.from_directory(folder)
    with pytest.raises(GraphBroken):
        Graph(folder / "decoder.onnx")
    shutil.copy(tmp_path / "aside", data)
    os.truncate(data, 1000)
    with pytest.raises(ModelFilesBroken, match="is not the file"):
        OrtRuntime.from_directory(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda manifest: manifest["state"].pop(), "lacks"),
        (lambda manifest: manifest["state"].append(manifest["state"][0]), "buffers"),
        (put(3, "state", 1, "full", 2), "with 3 slots"),
        (put([4], "state", 1, "full"), "values of layer 0"),
        (put(77, "state", 0, "layer"), "layer 77"),
    ],
)
def test_buffers_that_are_not_the_decoders_are_refused(exported, tmp_path, change, says):
    folder = rewritten(shutil.copytree(exported("true", MOST), tmp_path / "copy"), change)
    with pytest.raises(ManifestError, match=says):
        OrtRuntime.from_directory(folder).loop()


def addresses(decoder: Any) -> list[int]:
    return [x.ctypes.data for layer in decoder.layers for x in layer.buffers.values()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_nothing_held_is_copied(exported, mode):
    """Past and present are one memory, which only one node of the graph touches."""
    folder = exported(mode, MOST)
    graph = library("onnx").load(folder / "decoder.onnx", load_external_data=False).graph
    past = {x.name for x in graph.input if x.name.startswith(("keys", "values"))}
    present = {x.name for x in graph.output if x.name.startswith("present_")}
    assert {name.removeprefix("present_") for name in present} == past
    assert {n.op_type for n in graph.node if past & set(n.input)} == {"GroupQueryAttention"}
    assert {n.op_type for n in graph.node if present & set(n.output)} == {"GroupQueryAttention"}
    assert not {name for n in graph.node for name in n.input} & present

    loop = OrtRuntime.from_directory(folder, evict_every=4).loop()
    decoder, draws = loop.cache.decoder, np.random.default_rng(0)
    before = addresses(decoder)
    loop.prefill(draws.integers(6, 2560, (1, MOST)))
    for step in range(13):
        held = [
            {k: x.copy() for k, x in layer.views(layer.held, 0).items()} for layer in decoder.layers
        ]
        loop.read(draws.integers(6, 2560, (1, 1)))
        for layer, old in zip(decoder.layers, held, strict=True):
            slots = layer.held
            assert slots == MOST + (step + 1) % 4
            now = layer.views(slots, 0)
            same = (
                now["positions"][0] == old["positions"][0, :, :slots]
                if slots <= old["positions"].shape[2]
                else old["positions"][0] == now["positions"][0, :, : slots - 1]
            )
            if slots > MOST:  # nothing went: all is as it was, to the bit
                assert same.all()
                assert (now["keys"][:, :, :-1] == old["keys"]).all()
            else:  # at most four slots of a head were given up, and filled from behind
                assert (~same).sum(1).max() <= 4
                stays = now["values"][0][same]
                assert (stays == old["values"][0, :, :slots][same]).all()
                keys = now["keys"][0][same] == old["keys"][0, :, :slots][same]
                assert keys.all() == (mode == "true")
    assert addresses(decoder) == before


@pytest.mark.slow
def test_a_run_that_fails_half_way_empties_the_cache(exported, monkeypatch):
    loop = OrtRuntime.from_directory(exported("true", MOST), evict_every=1).loop()
    draws = np.random.default_rng(0)
    loop.prefill(draws.integers(6, 2560, (1, MOST)))
    assert loop.cache.held == MOST
    evictor, calls = Graph.run, []

    def failing(self: Graph, inputs: Any, outputs: Any) -> None:
        calls.append(self.name)
        if len(calls) == 3:
            raise ShapeError("not this time")
        evictor(self, inputs, outputs)

    with monkeypatch.context() as patched:
        patched.setattr(Graph, "run", failing)
        with pytest.raises(ShapeError):
            loop.read(draws.integers(6, 2560, (1, 1)))
    assert (loop.cache.seen, loop.cache.held) == (0, 0)
    loop.prefill(draws.integers(6, 2560, (1, MOST + 5)))
    assert loop.cache.held == MOST


@pytest.mark.slow
def test_evict_every_is_checked_and_planned(exported, kvcap):
    folder = exported("compact", MOST)
    held = set()
    for every in (None, 1, BLOCK):
        runtime = OrtRuntime.from_directory(folder, evict_every=every)
        assert runtime.every == (every or min(64, BLOCK))
        held.add(runtime.loop().cache.nbytes)
    assert len(held) == 1  # blocks have the spare slots anyway
    options = ["--evict-every", str(BLOCK + 1)]
    assert "evict every 1 to block_size" in kvcap.refused(
        "generate", str(folder), "Hi", *ALWAYS, *options, code=3
    )


@pytest.mark.slow
def test_weights_that_are_not_listed_are_not_loaded(exported, tmp_path):
    """A graph names the files of its weights; one that nobody vouched for is refused."""
    folder = shutil.copytree(exported("true", MOST), tmp_path / "shared")
    rewritten(folder, unlist("decoder.onnx.data"))
    with pytest.raises(GraphBroken, match=r"decoder\.onnx\.data.*does not list"):
        OrtRuntime.from_directory(folder)


def test_files_that_a_graph_names_are_found_wherever_they_stand(tmp_path):
    onnx = library("onnx")

    def tensor(name: str, location: str) -> Any:
        made = onnx.TensorProto(name=name, data_type=1, dims=[1], data_location=1)
        made.external_data.add(key="offset", value="0")
        made.external_data.add(key="location", value=location)
        return made

    inner = onnx.helper.make_graph([], "inner", [], [], [tensor("a", "a.data")])
    node = onnx.helper.make_node("If", ["x"], ["y"], then_branch=inner, value=tensor("b", "b.data"))
    graph = onnx.helper.make_graph([node], "g", [], [], [tensor("c", "c.data")])
    sparse = onnx.SparseTensorProto(values=tensor("d", "d.data"), dims=[1])
    graph.sparse_initializer.append(sparse)
    written, file = onnx.helper.make_model(graph).SerializeToString(), tmp_path / "x.onnx"
    file.write_bytes(written)
    assert files_named(file) == {"a.data", "b.data", "c.data", "d.data"}
    key, value = b"\x0a\x08location", b"\x12\x06a.data"
    file.write_bytes(written.replace(key + value, value + key))
    with pytest.raises(ValueError, match="in another way"):
        files_named(file)


def test_a_template_that_is_not_listed_is_not_used(copied):
    rewritten(copied, unlist("chat_template.jinja"))
    (copied / "special_tokens_map.json").write_text('{"bos_token": "evil"}')
    tokenizer = OrtRuntime.from_directory(copied).tokenizer
    assert tokenizer.chat_template is None
    assert "evil" not in tokenizer.special_tokens_map.values()
    rewritten(copied, unlist("tokenizer.json"))
    with pytest.raises(ModelFilesBroken, match=r"there is no tokenizer\.json"):
        OrtRuntime.from_directory(copied)


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and devices")
@pytest.mark.parametrize("name", ["kvcap.json", "tokenizer.json", "config.json", "decoder.onnx"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_is_no_file_is_refused_and_not_waited_for(copied, name, kind):
    (copied / name).unlink()
    if kind == "a pipe":
        os.mkfifo(copied / name)
    else:
        (copied / name).symlink_to("/dev/zero")
    with pytest.raises((ManifestError, ModelFilesBroken), match=kind):
        OrtRuntime.from_directory(copied)


def both(exported: Callable[[str, int], Path]) -> list[Any]:
    """Runtimes of the same settings: of the export, and of the model in PyTorch."""
    sizes = {"budget_tokens": 48, "block_size": 32, "evict_every": 32}
    return [
        OrtRuntime.from_directory(exported("compact", 48), evict_every=32),
        Runtime.from_pretrained("pocket", "keydiff", dtype="float32", device="cpu", **sizes),
    ]


def test_answers_are_held_to_a_schema_and_say_how_likely_tokens_were(exported, tmp_path):
    """The first answer is PyTorch's; later ones, past evictions and from a file, fit as well."""
    pytest.importorskip("llguidance")
    firsts, logprobs = [], []
    for runtime in both(exported):
        session = runtime.session()
        session.set_generation(max_new_tokens=60, json_schema=DOOR, logprobs=3, do_sample=False)
        firsts.append("".join(session.send(FACT)))
        logprobs.append(session.logprobs)
        json.loads("".join(session.send(STORY)))
        session.save(tmp_path / "s")
        loaded = type(session).load(runtime, tmp_path / "s")
        answers = ["".join(one.send(QUESTION)) for one in (session, loaded)]
        assert answers[0] == answers[1]
        assert set(json.loads(answers[0])) == {"door", "code"}
        assert session.turn.finish_reason == "stop"
    assert firsts[0] == firsts[1]
    assert json.loads(firsts[0])
    for one, other in zip(*logprobs, strict=True):
        assert one.token == other.token
        assert [x.logprob for x in (one, *one.top)] == pytest.approx(
            [x.logprob for x in (other, *other.top)], abs=1e-2
        )


def test_evicted_text_is_recalled_as_in_pytorch_and_after_a_restart(exported, tmp_path):
    outcomes = []
    for runtime in both(exported):
        session = runtime.session()
        session.set_generation(max_new_tokens=12, do_sample=False)
        bread = (f"A baker of Lund sells {number} kinds of bread." for number in range(40))
        for text in (FACT, " ".join(bread)):
            list(session.send(text))
        assert session.recall.store.limit == runtime.plan.recall_store == 8 << 20
        session.recall.limit = 40  # beside the sinks of the export, too, a head holds it
        session.save(tmp_path / "s")
        loaded = Session.load(runtime, tmp_path / "s")
        loaded.recall.limit = 40
        for one in (session, loaded):
            list(one.send(QUESTION))
            assert 0 < one.turn.recalled_tokens <= 40
            assert "the code for the red door is 77" in one.recall.passages[0].text
            assert one.stats.held_tokens <= 48
            assert not one.cache.pinned_spans
            outcomes.append((one.messages, one.recall.passages, one.recall.spans, one.read_ids))
        session.save(tmp_path / "s")
        loaded = Session.load(runtime, tmp_path / "s")
        loaded.recall.limit = 40
        assert loaded.recall.spans == session.recall.spans
        assert loaded.search("red door") == session.search("red door") != []
    assert outcomes == [outcomes[0]] * 4


def test_the_index_of_evicted_text_is_planned(tiny):
    folder, mib = tiny / "decoder", 1 << 20
    plans = [
        OrtRuntime.from_directory(folder, memory_cap="4GiB", recall_store=size).plan
        for size in (None, "1MiB", 0)
    ]
    assert [plan.recall_store for plan in plans] == [8 * mib, mib, 0]
    vectors = plans[0].word_vectors
    index = [8 * mib + vectors, mib + vectors, 0]
    assert [plan.run_bytes - plans[2].run_bytes for plan in plans] == index
    switched = OrtRuntime.from_directory(folder, recall_store="1MiB").with_budget(24)
    assert switched.session().recall.store.limit == mib


@pytest.mark.slow
def test_sessions_of_others_are_refused_and_change_nothing(exported, tiny, tmp_path):
    runtime = OrtRuntime.from_directory(tiny / "decoder")
    session = runtime.session()
    session.set_generation(max_new_tokens=4)
    list(session.send(FACT))
    session.save(tmp_path / "mine")
    torch_runtime = Runtime.from_pretrained(str(tiny / "model"), budget_tokens=24, block_size=8)
    other = torch_runtime.session()
    other.set_generation(max_new_tokens=4)
    list(other.send(FACT))
    other.save(tmp_path / "torch")
    before = (session.cache.seen, list(session.messages))
    with pytest.raises(SessionFileForeign, match="--backend torch"):
        session.restore(tmp_path / "torch")
    with pytest.raises(SessionFileForeign, match="--backend onnxruntime"):
        other.restore(tmp_path / "mine")
    smaller = OrtRuntime.from_directory(rebudgeted(tiny / "decoder", tmp_path / "smaller", 20))
    with pytest.raises(SessionFileForeign, match="budget_tokens"):
        smaller.session().restore(tmp_path / "mine")
    other_one = OrtRuntime.from_directory(exported("compact", 48))
    with pytest.raises(SessionFileForeign, match="another model"):
        other_one.session().restore(tmp_path / "mine")
    data = bytearray((tmp_path / "mine").read_bytes())
    data[-5] ^= 1
    (tmp_path / "mine").write_bytes(data)
    with pytest.raises(SessionFileCorrupt):
        session.restore(tmp_path / "mine")
    assert (session.cache.seen, session.messages) == before


def test_thoughts_and_results_leave_first_and_the_system_prompt_last(exported):
    check_regions(OrtRuntime.from_directory(exported("compact", BUDGET)))


def test_closed_thoughts_leave_as_the_template_leaves_them_out(exported, tmp_path):
    runtime = OrtRuntime.from_directory(exported("compact", BUDGET))

    def keys(cache: OrtCache) -> Any:
        layer = cache.decoder.layers[0]
        order = layer.buffers["positions"][0, :, : layer.held].argsort(axis=1)
        return np.take_along_axis(layer.buffers["keys"][0], order[..., None], axis=1)

    check_thoughts_leave(runtime, tmp_path / "s", keys, "the sea")


def test_when_the_budget_is_full(tiny):
    session = OrtRuntime.from_directory(tiny / "decoder").session()
    session.on_full = "error"
    with pytest.raises(MemoryCapExceeded, match="raise the budget"):
        list(session.send(STORY))
    assert session.cache.seen == 0
    session.on_full = "stop"
    list(session.send("Hi"))
    assert session.turn.finish_reason == "full"
    assert session.stats.evicted_tokens == 0


def test_refused_memory_empties_the_cache_and_says_so(tiny, monkeypatch):
    session = OrtRuntime.from_directory(tiny / "decoder").session()
    session.set_generation(max_new_tokens=2)
    list(session.send("Hi"))

    def refused(*_: Any) -> None:
        raise MemoryCapExceeded("the system refused memory to x")

    with monkeypatch.context() as patched:
        patched.setattr(Graph, "run_bound", refused)
        with pytest.raises(MemoryCapExceeded, match="read again"):
            list(session.send("Hi"))
    assert session.cache.seen == 0
    assert list(session.send("Hi"))


def test_a_cache_is_freed_when_its_session_is_dropped(exported, tmp_path):
    """By counting references: Python's cyclic collector rests."""
    runtime, freed = OrtRuntime.from_directory(exported("compact", 48)), []
    gc.collect()
    gc.disable()
    try:
        for stopped in (False, True):
            session = runtime.session()
            session.set_generation(max_new_tokens=4)
            pieces = session.send(FACT)
            next(pieces)
            if not stopped:
                list(pieces)
                session.save(tmp_path / "chat")
                session = Session.load(runtime, tmp_path / "chat")
            freed += [weakref.ref(session.cache), weakref.ref(session.cache.decoder)]
            del session, pieces
        assert [gone() for gone in freed] == [None] * 4
    finally:
        gc.enable()


def test_the_chats_commands(tiny, tmp_path, kvcap):
    lines = f"""Hello!
/stats
/mem
/pin Hi.
/pin
/save {tmp_path / "s"}
/policy keydiff
/regen
/set temperature 0.5
/system Be kind.
/policy random
/load {tmp_path / "s"}
/clear
/exit
"""
    given = (*ALWAYS, "--max-new-tokens", "4")
    code, _, err = kvcap("chat", str(tiny / "decoder"), *given, stdin=lines.encode())
    assert code == 2
    assert "\nONNX Runtime " in err
    assert "policy keydiff, 24 slots" in err
    assert "policy 'random' with compact positions is not in this export" in err
    assert "temperature = 0.5" in err
    assert "the conversation is forgotten" in err
    assert err.count("kvcap: ") == 1


@pytest.mark.slow
def test_another_budget_is_refused(exported):
    fixed = OrtRuntime.from_directory(exported("true", MOST))
    assert fixed.with_budget(MOST).plan.budget_tokens == MOST
    with pytest.raises(NotExportable, match="which is in its graph"):
        fixed.with_budget(64)
    assert len(repr(fixed)) < 250


def test_an_export_compares_texts_by_its_embedding_table(exported, tmp_path):
    """One that was made before has none, and plans no memory for it."""
    runtime = OrtRuntime.from_directory(exported("compact", MOST))
    table = Runtime.from_pretrained("pocket").model.get_input_embeddings().weight
    assert np.array_equal(runtime.meaning._rows([7, 300]), table[[7, 300]].detach().float().numpy())
    assert runtime.session().recall._meaning() is runtime.meaning
    assert runtime.plan.word_vectors
    earlier = shutil.copytree(exported("compact", MOST), tmp_path / "earlier")
    rewritten(earlier, lambda manifest: manifest["graphs"].pop("embeddings"))
    OrtRuntime.from_directory(earlier, recall_store=0)  # nothing is recalled, and nothing missing
    with pytest.warns(UserWarning, match="found by words alone.*: kvcap export decoder pocket -o"):
        without = OrtRuntime.from_directory(earlier)
    assert without.meaning is None
    assert not without.plan.word_vectors
