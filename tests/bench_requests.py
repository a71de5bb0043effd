"""Makes requests to the server that phones open, for tests."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tools import PATIENCE

from kvcap.android_bench.documents import PLAN_FILE, plan_id
from kvcap.android_bench.server import vendor
from kvcap.android_bench.server.serving import Serving

vendored = pytest.mark.skipif(
    not all((folder / "VERSION").is_file() for folder in vendor.FOLDERS),
    reason=f"the page's libraries are not here: {vendor.COMMAND}",
)


def edited(folder: Path, target: Path, change: Any) -> Path:
    """Copy a plan, apply `change`, and make its id valid again; return the copy."""
    shutil.copytree(folder, target)
    plan = json.loads((target / PLAN_FILE).read_text())
    change(plan, target)
    for entry in plan["files"]:
        content = (target / entry["file"]).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    plan["id"] = plan_id(plan)
    (target / PLAN_FILE).write_text(json.dumps(plan))
    return target


def requested(serving: Serving, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """Return the status and text of a plain request."""
    host = serving.url.split("/")[2].split(":")[0]
    connection = http.client.HTTPConnection(host, serving.port, timeout=PATIENCE)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    return answer.status, text


def posted(serving: Serving, result: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    body = result if isinstance(result, bytes) else json.dumps(result).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "a test", **headers}
    status, text = requested(serving, "POST", "/results", body, **headers)
    return status, json.loads(text)
