"""The Dockerfile and the compose file: their steps done here, as no Docker is needed for them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from make import free_port, ran
from tools import PATIENCE

from kvcap.runtime.units import parse_bytes

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
INSTRUCTIONS = re.findall(
    r"^([A-Z]+)[ ]+((?:[^\\\n]|\\.|\\\n)*)", re.sub(r"(?m)^#.*\n", "", DOCKERFILE), re.MULTILINE
)
BESIDE = 256 << 20  # bytes that the container holds beside the server


def given(instruction: str) -> list[str]:
    """Return what follows an instruction, wherever it stands in the Dockerfile."""
    return [re.sub(r"\\\n\s*", "", text) for name, text in INSTRUCTIONS if name == instruction]


def environment() -> dict[str, str]:
    pairs = (pair.partition("=") for pair in " ".join(given("ENV")).split())
    return {name: value for name, _, value in pairs}


def health_check(port: str) -> list[str]:
    (text,) = given("HEALTHCHECK")
    python, *rest = json.loads(text[text.index("[") :])
    assert python == "python"
    return [sys.executable, *(part.replace(":8000", f":{port}") for part in rest)]


@pytest.fixture
def service() -> dict[str, Any]:
    """Return the service of the compose file, with its defaults."""
    text = (ROOT / "docker" / "compose.yaml").read_text()
    while (given := re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", text)) != text:
        text = given
    composed = yaml.safe_load(text)
    assert "${" not in str(composed)
    return composed["services"]["kvcap"]


def test_the_container_is_of_a_user_without_rights(service):
    instructions = [name for name, _ in INSTRUCTIONS]
    assert given("USER") == ["kvcap"]
    assert instructions.index("USER") < instructions.index("ENTRYPOINT")
    assert "useradd --uid 10001" in given("RUN")[-1]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"]


def test_its_memory_is_the_cap_and_what_is_beside_it(service):
    cap = parse_bytes(service["environment"]["KVCAP_MEMORY_CAP"])
    limit = int(service["mem_limit"].removesuffix("m")) << 20
    assert limit == cap + BESIDE
    assert service["memswap_limit"] == service["mem_limit"]


def test_it_is_reached_from_this_machine_alone_and_with_a_key(service):
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert given("EXPOSE") == [environment()["KVCAP_PORT"]] == ["8000"]
    (secret,) = service["secrets"]
    assert service["environment"]["KVCAP_API_KEY_FILE"] == f"/run/secrets/{secret}"
    assert "KEY" not in " ".join(given("ENV") + given("ARG"))
    assert (ROOT / "docker" / ".gitignore").read_text() == "/api-key\n"


def test_conversations_and_models_outlive_it(service):
    volumes = json.loads(given("VOLUME")[0])
    assert [mount.partition(":")[2] for mount in service["volumes"]] == volumes
    assert environment()["KVCAP_KEEP"] in volumes
    assert environment()["HF_HOME"].startswith("/models/")


def test_what_is_copied_is_what_is_installed():
    """Every root folder that `src/kvcap` links to, and nothing of makers, tests or secrets."""
    lines = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    taken = {line[1:] for line in lines if line.startswith("!")}
    links = {path.name for path in (ROOT / "src" / "kvcap").iterdir() if path.is_symlink()}
    files = {"constraints.txt", "LICENSE", "README.md", "pyproject.toml", "docker/install.sh"}
    assert taken == links - {"lab"} | files | {"src"}


@pytest.mark.slow
def test_its_steps_make_a_server_that_answers(tmp_path):
    """Run its steps in a new environment that sees this one's packages, so torch comes once.

    Pip and what builds wheels are not installed anew, either: scripts/build-check does so.
    """
    source, made = tmp_path / "source", tmp_path / "kvcap"
    for name in (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines():
        path = ROOT / name.removeprefix("!")
        if not name.startswith("!"):
            continue
        target = source / path.relative_to(ROOT)
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True, ignore=shutil.ignore_patterns("__py*"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    (made / "bin" / "pip").symlink_to("python")  # the environment is there
    site = Path(sysconfig.get_path("purelib"))
    seen = "\n".join(path for path in sys.path if path.endswith("site-packages"))
    (made / "lib" / site.parent.name / "site-packages" / "parent.pth").write_text(seen)

    outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    step = given("RUN")[0].replace("/source", str(source)).replace("/opt/kvcap", str(made))
    subprocess.run(
        ["sh", "-c", step],
        check=True,
        env={**outer, "TORCH_INDEX": "", "PIP_NO_BUILD_ISOLATION": "0"},
    )

    port = str(free_port())
    keys = tmp_path / "api-key"
    keys.write_text("secret\n")
    inner = environment() | {"KVCAP_PORT": port, "KVCAP_API_KEY_FILE": str(keys)}
    for name, value in inner.items():
        value = value.replace("/opt/kvcap", str(made)).replace("$PATH", os.environ["PATH"])
        for volume in json.loads(given("VOLUME")[0]):
            value = value.replace(volume, str(tmp_path / volume[1:])) if value else value
        inner[name] = value
    inner["KVCAP_API_KEY_FILE"] = str(keys)
    command = json.loads(given("ENTRYPOINT")[0]) + json.loads(given("CMD")[0])
    assert subprocess.run(health_check(port), capture_output=True).returncode != 0
    server = subprocess.Popen(
        [str(made / "bin" / command[0]), *command[1:]], env={**outer, **inner}, cwd=tmp_path
    )
    try:
        until = time.monotonic() + PATIENCE
        while subprocess.run(health_check(port), capture_output=True).returncode:
            assert server.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "Hello!"}]}).encode(),
            {"Authorization": "Bearer secret", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        server.wait(PATIENCE)
    assert list((tmp_path / "sessions").glob("*.kvcap"))  # saved at its end

    inner.pop("KVCAP_API_KEY_FILE")
    open_to_all = ran(
        [str(made / "bin" / command[0]), *command[1:]], env={**outer, **inner}, cwd=tmp_path
    )
    assert open_to_all.returncode != 0
    assert "--api-key" in open_to_all.stderr
