"""`kvcap pull` and `kvcap models`: a hub on this machine, its cache, and what is kept there.

Commands run in processes of their own, as the hub's library reads the environment when imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_gguf
from fake_hub import FakeHub, fake_hub
from llama_reference import needs_library
from make import ran
from tools import ROOT

from kvcap.runtime.models.hub import GGUF_OF, SHORT
from kvcap.runtime.models.packaged import PACKAGED
from kvcap.runtime.types import BUILT_IN

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf.written(tmp_path_factory.mktemp("gguf")).read_bytes()


@pytest.fixture
def hub(gguf: bytes) -> Iterator[FakeHub]:
    files = {
        "Some/Tiny-GGUF": {
            "README.md": b"#",
            "tiny-Q4_K_M.gguf": gguf,
            "tiny-Q4_K_S.gguf": b"GGUF" + bytes(90),
            "big-Q8_0-00001-of-00002.gguf": gguf,
            "big-Q8_0-00002-of-00002.gguf": b"GGUF" + bytes(40),
            "mmproj-Q8_0.gguf": b"GGUF",
        },
        "Some/Model": {
            "config.json": b'{"model_type": "unknown"}',
            "model.safetensors": bytes(1000),
            "pytorch_model.bin": bytes(1000),
            "onnx/config.json": b"{}",
        },
    }
    with fake_hub(files) as server:
        yield server


@pytest.fixture
def kvcap(hub: FakeHub, tmp_path: Path) -> Run:
    """Return what runs a command beside the hub, with caches of its own."""
    outer = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    folders = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    folders |= {"NO_PROXY": "*", "no_proxy": "*", "HF_HUB_DISABLE_XET": "1"}

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return ran(
            [sys.executable, "-m", "kvcap", *arguments],
            env={**outer, "HF_ENDPOINT": hub.url, **folders, **more},
            cwd=ROOT,
        )

    return run


def fetched(hub: FakeHub) -> list[str]:
    return [Path(x.split()[1]).name for x in hub.requests if x.startswith("GET /Some")]


def test_short_names_mean_gguf_files_and_are_those_of_the_page() -> None:
    assert all(GGUF_OF.fullmatch(meant) for meant in SHORT.values())
    names = {*SHORT, *PACKAGED}
    assert len(names) == len(SHORT) + len(PACKAGED)
    assert not names & {*BUILT_IN}
    page = (ROOT / "docs" / "names.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| `([\w./:-]+)` \|", page, re.MULTILINE))
    packages = {name: x.package for name, x in PACKAGED.items()}
    assert {x: meant for x, meant in rows.items() if x in names} == {**packages, **SHORT}


@needs_library
def test_a_file_is_pulled_once_listed_planned_and_run(
    hub: FakeHub, kvcap: Run, gguf: bytes
) -> None:
    name = "Some/Tiny-GGUF:q4_k_m"
    done = kvcap("plan", name)
    assert done.returncode != 0
    assert f"kvcap pull {name} downloads it" in done.stderr
    assert fetched(hub) == []
    hub.cut = 1000  # the connection is lost once
    done = kvcap("pull", name)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert (path.name, path.read_bytes()) == ("tiny-Q4_K_M.gguf", gguf)
    assert fetched(hub) == 2 * ["tiny-Q4_K_M.gguf"]
    count = len(hub.requests)
    assert kvcap("pull", name).stdout == done.stdout
    assert len(hub.requests) == count
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert kvcap("plan", name, **offline).returncode == 0
    answered = kvcap(
        "generate", name, "Hi", "--budget-tokens", "64", "--max-new-tokens", "2", **offline
    )
    assert answered.returncode == 0, answered.stderr
    listed = json.loads(kvcap("models", "--json", **offline).stdout)
    row = next(x for x in listed if x["name"] == "Some/Tiny-GGUF:tiny-Q4_K_M")
    assert (row["path"], row["nbytes"], row["fits"]) == (str(path), len(gguf), True)
    assert kvcap("plan", row["name"], **offline).returncode == 0


def test_files_in_parts_and_repositories_come_whole(hub: FakeHub, kvcap: Run) -> None:
    done = kvcap("pull", "Some/Tiny-GGUF:Q8_0", "--json")
    assert json.loads(done.stdout)["path"].endswith("big-Q8_0-00001-of-00002.gguf")
    assert sorted(fetched(hub)) == [f"big-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub.requests.clear()
    folder = Path(kvcap("pull", "Some/Model").stdout.strip())
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    listed = kvcap("models", "--memory-cap", "4GiB").stdout
    for line in ("Some/Tiny-GGUF:big-Q8_0", "Some/Model", "pocket", "kvcap pull smollm2"):
        assert re.search(f"^{re.escape(line)}", listed, re.MULTILINE), listed


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Some/Tiny-GGUF:Q4", "give Some/Tiny-GGUF:tiny-Q4_K_M or Some/Tiny-GGUF:tiny-Q4_K_S"),
        ("Some/Tiny-GGUF", "holds GGUF files; give one of them, Some/Tiny-GGUF:big-Q8_0"),
        ("Some/Model:Q4_0", "holds no GGUF file"),
        ("Some/Other", "is no repository of"),
        ("smollm3", "is no name of a model"),
    ],
)
def test_what_cannot_be_pulled_says_what_can(name: str, says: str, kvcap: Run) -> None:
    done = kvcap("pull", name)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
