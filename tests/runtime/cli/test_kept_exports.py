"""`--weights`: a model is exported once, and found again as long as nothing in it has changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.exceptions import Exit
from make import argv

from kvcap import pocket
from kvcap.cli import run
from kvcap.export.decoder.manifest import file_facts
from kvcap.runtime.backends.onnxruntime.manifest import SCHEMA
from kvcap.runtime.cli import kept_exports
from kvcap.runtime.cli.kept_exports import cache_folder, identity, kept_export
from kvcap.runtime.cli.options import Budget
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.types import MANIFEST


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return commands that would have exported; each leaves a manifest alone."""
    commands = []

    def export(command, **_):
        commands.append(command)
        out = Path(command[command.index("-o") + 1])
        out.mkdir()
        (out / MANIFEST).write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_exports.subprocess, "run", export)
    monkeypatch.setattr(kept_exports, "_is_whole", lambda out: (out / MANIFEST).is_file())
    return commands


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(pocket.path(), tmp_path / "model")


def test_the_cache_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvcap" / "exports"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # is to be ignored
    assert cache_folder() == Path.home() / ".cache" / "kvcap" / "exports"


def test_an_export_is_listed_and_removed_by_the_name_that_the_user_gave(made, monkeypatch, kvcap):
    def models() -> list[str]:
        return sorted(one["model"] for one in kvcap.document("cache", "list"))

    kept_export("pocket", "int8", Budget())
    downloaded = {"repository": "models--Qwen--Qwen3--0.6B", "revision": "1"}
    monkeypatch.setattr(kept_exports, "_model", lambda model: downloaded)
    kept_export("Qwen/Qwen3--0.6B", "int8", Budget())
    assert models() == ["Qwen/Qwen3--0.6B", "pocket"]
    assert kvcap("cache", "clear", "pocket")[0] == 0
    assert models() == ["Qwen/Qwen3--0.6B"]
    assert kvcap("cache", "clear", "Qwen/Qwen3--0.6B")[0] == 0
    assert models() == []


def test_exports_of_a_model_share_their_weights_and_are_told_apart(made, monkeypatch, kvcap):
    def export(command, **_):
        out = Path(command[command.index("-o") + 1])
        out.mkdir()
        (out / "graph").write_text(" ".join(command))
        (out / "weights").write_bytes(bytes([len(command)]) * 2_000_000)
        (out / MANIFEST).write_text(json.dumps(file_facts(out)))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(kept_exports.subprocess, "run", export)
    first, second = (kept_export("pocket", "int8", Budget(budget_tokens=n)) for n in (64, 128))
    other = kept_export("pocket", "int4", Budget(policy="knorm", sink_tokens=2))
    assert (first / "weights").samefile(second / "weights")
    assert not (first / "weights").samefile(other / "weights")
    *rows, total = kvcap("cache", "list")[1].splitlines()
    labels = sorted(row.partition("pocket: ")[2] for row in rows)
    assert labels == [
        "int4, knorm, 256 slots, blocks of 128, sink_tokens 2, made just now",
        "int8, lagkv, 128 slots, blocks of 128, made just now",
        "int8, lagkv, 64 slots, blocks of 128, made just now",
    ]
    assert [float(row.split()[0]) for row in (*rows, total)] == [1.9, 1.9, 1.9, 3.8]
    assert "removed 3 folders, 3.8 MiB" in kvcap("cache", "clear", "pocket")[1]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_plan_exports_nothing_and_says_the_bytes_that_an_export_has(
    weights, tmp_path, monkeypatch, kvcap
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = argv("plan pocket --weights {} --budget-tokens 40 --block-size 16", weights)

    before = kvcap.document(*given)
    assert not cache_folder().exists()
    assert before.pop("weights_from") == "config, estimated"
    kept_export("pocket", weights, Budget(budget_tokens=40, block_size=16), quiet=True)
    after = kvcap.document(*given)
    assert after.pop("weights_from") == "the manifest"
    assert before["weights"] == pytest.approx(after["weights"], rel=0.02)
    assert before["cache_bytes"] == after["cache_bytes"]
    moving = {"weights", "total_bytes", "free_bytes", "least_memory_cap"}
    assert {k: x for k, x in before.items() if k not in moving} == {
        k: x for k, x in after.items() if k not in moving
    }


def test_it_is_made_once_and_again_when_something_in_it_differs(model, made, capsys):
    first = kept_export(str(model), "int4", Budget())
    assert "once" in capsys.readouterr().err
    assert kept_export(str(model), "int4", Budget()) == first
    assert len(made) == 1
    assert capsys.readouterr().err == ""
    budgets = [
        *({"budget_tokens": 64}, {"block_size": 16}, {"positions": "true"}, {"policy": "knorm"}),
        *({"sink_tokens": 4}, {"policy_option": ["anchor=median"]}),
    ]
    others = [kept_export(str(model), "int4", Budget(**given)) for given in budgets]
    others.append(kept_export(str(model), "int8", Budget()))
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    others.append(kept_export(str(model), "int4", Budget()))
    assert len({first, *others}) == len(made) == 1 + len(others)


def test_the_versions_that_made_it_count(model, monkeypatch):
    before = identity(str(model), "int4", Budget())
    monkeypatch.setattr(kept_exports, "_version", lambda package: f"newer {package}")
    assert identity(str(model), "int4", Budget()) != before


def test_the_command_is_told_everything(model, made):
    """An export pins the usual sinks unless the budget names a number, which may be 0."""
    for budget in (Budget(policy="knorm", sink_tokens=0, block_size=32), Budget()):
        kept_export(str(model), "int8", budget)
    given, usual = (" ".join(command[command.index("export") :]) for command in made)
    assert given.startswith(f"export decoder {model} --dtype int8 --policy knorm")
    assert "--budget-tokens 256 --block-size 32 --sink-tokens 0" in given
    assert "--sink-tokens" not in usual


def test_a_text_is_known_by_what_it_says(model, made, tmp_path):
    texts = [tmp_path / f"{i}.txt" for i in range(3)]
    for file, text in zip(texts, ("one", "one", "other"), strict=True):
        file.write_text(text)
    plain = kept_export(str(model), "int4", Budget())
    exports = [kept_export(str(model), "int4", Budget(), calibrate=file) for file in texts]
    assert exports[0] == exports[1]
    assert len({plain, *exports}) == len(made) == 3
    assert [c[c.index("--calibrate") + 1] for c in made[1:]] == [str(texts[0]), str(texts[2])]


def test_where_it_is_and_how_it_is_deleted_is_told(model, made, capsys):
    folder = kept_export(str(model), "int4", Budget()).parent
    assert f"kept in {folder}" in capsys.readouterr().err.replace("\n", "")
    shutil.rmtree(folder)
    kept_export(str(model), "int4", Budget(), quiet=True)
    assert len(made) == 2
    assert capsys.readouterr().err == ""


def test_what_a_killed_export_left_never_counts(model, made):
    out = kept_export(str(model), "int4", Budget())
    shutil.rmtree(out)
    left = out.parent / ".kvcap-left" / "decoder"
    left.mkdir(parents=True)
    (left / MANIFEST).write_text("{}")
    kept_export(str(model), "int4", Budget())
    assert len(made) == 2
    assert not left.exists()


def test_an_export_is_whole_by_its_files_sizes(tmp_path):
    """Loading a kept export checks its files once; finding it compares their sizes alone."""
    graph = tmp_path / "decoder.onnx"
    graph.write_text("graph")
    manifest = {"schema": SCHEMA, "files": [{"file": graph.name, "bytes": 5, "sha256": ""}]}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert kept_exports._is_whole(tmp_path)
    graph.write_text("cut")
    assert not kept_exports._is_whole(tmp_path)
    graph.unlink()
    assert not kept_exports._is_whole(tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [
        "{}", "[]", "cut", "null", '{"schema": "SCHEMA", "files": []}',
        '{"schema": "kvcap.decoder/0", "files": [{"file": "kvcap.json", "bytes": 73}]}',
    ],
)  # fmt: skip
def test_an_export_without_a_manifest_of_this_kvcap_is_made_again(manifest, tmp_path):
    assert not kept_exports._is_whole(tmp_path)
    (tmp_path / MANIFEST).write_text(manifest.replace("SCHEMA", SCHEMA))
    assert not kept_exports._is_whole(tmp_path)


def test_two_at_once_make_it_once(model, made, capsys):
    started = threading.Barrier(2)

    def one(_):
        started.wait()
        return kept_export(str(model), "int4", Budget())

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, range(2))
    assert len(made) == 1
    assert first == second


def test_an_export_that_fails_ends_with_its_code(model, made, monkeypatch):
    monkeypatch.setattr(
        kept_exports.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2)
    )
    with pytest.raises(Exit) as error:
        kept_export(str(model), "int4", Budget())
    assert error.value.exit_code == 2


def test_no_room_on_the_disk(model, made, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(kept_exports.shutil, "disk_usage", lambda _: usage(1, 1, 1 << 20))
    with pytest.raises(NotExportable, match=r"takes up to .* 1.0 MiB are free.*XDG_CACHE_HOME"):
        kept_export(str(model), "int4", Budget())
    assert not made


def test_what_cannot_be(model, made, tmp_path, kvcap):
    export = tmp_path / "export"
    export.mkdir()
    (export / MANIFEST).write_text("{}")
    with pytest.raises(NotExportable, match="exported decoder already"):
        kept_export(str(export), "int4", Budget())
    with pytest.raises(NotExportable, match="--budget-tokens"):
        kept_export(str(model), "int4", Budget(kv_budget="1MiB"))
    text = tmp_path / "text.txt"
    text.write_text("A text.")
    wrong = {"int3": ["--weights", "int3"],
             "--calibrate is for exports": ["--weights", "int4", "--backend", "torch",
                                            "--calibrate", str(text)],
             "--calibrate is for --weights int4": ["--weights", "int8", "--calibrate", str(text)],
             "add that": ["--calibrate", str(text)],
             "No such file": ["--weights", "int4", "--calibrate", str(tmp_path / "none")],
    }  # fmt: skip
    for says, arguments in wrong.items():
        assert says in kvcap.refused("generate", "pocket", "Hello!", *arguments)
    assert not made


@pytest.mark.slow(ci=0)
def test_one_command_answers_and_a_model_without_a_graph_says_why(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = ["generate", "pocket", "Hello!", "--weights", "int4", "--max-new-tokens", "4"]
    assert run(given) == 0
    first = capfd.readouterr()
    assert "kept in" in first.err
    assert run(given) == 0
    assert capfd.readouterr().out == first.out
    assert run([*given, "--policy", "adakv"]) == 2
    assert "unequally" in capfd.readouterr().err
