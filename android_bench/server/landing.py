"""Takes results that a browser sends, checks them against plan and device, and writes each once."""

from __future__ import annotations

import hashlib
import json
import queue
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvcap.android_bench.documents import BENCH, parsed, validate, write_json
from kvcap.android_bench.errors import ResultBroken, ResultsFull
from kvcap.android_bench.results.judge import judged
from kvcap.android_bench.results.source import origin

MIB = 2**20


@dataclass(frozen=True)
class ClientLimits:
    """Limits on the memory, disk and time that clients of one server may use.

    They are far above what phones need.
    """

    result_bytes: int = 64 * MIB  # bytes of one result; the largest preset's has some megabytes
    results: int = 1000  # results that one server takes
    stored_bytes: int = 4096 * MIB  # bytes of all results together
    spare_bytes: int = 256 * MIB  # bytes that stay free on the disk
    connections: int = 256  # open connections; a browser has up to six
    uploads: int = 4  # uploads at once, each with up to `result_bytes` in memory; others try again
    head_seconds: float = 20.0  # for a request's line and headers to arrive
    body_seconds: float = 180.0  # for its body to arrive
    request_seconds: float = 600.0  # for the client to read its answer


class Landed(NamedTuple):
    """A result that was written to a file."""

    path: Path
    result: dict[str, Any]


class Results:
    """A folder that results are written to, in files named by their content."""

    def __init__(
        self, folder: Path, plan: Mapping[str, Any], limits: ClientLimits | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.limits = limits or ClientLimits()
        self.count = self.stored = 0  # results and their bytes since this server began
        self.plan = plan["id"]
        self.rows = {cell["id"] for cell in plan["cells"]}
        self.decoder = plan.get("decoder", {}).get("id")
        self.landed: queue.Queue[Landed] = queue.Queue()
        self.lock = threading.Lock()

    def take(self, body: bytes, header: str) -> Landed:
        """Check a result, judge it, and write it unless it was written before.

        Args:
            body: the result as JSON.
            header: the user agent of the request.

        Raises:
            ResultBroken: it is no result of this plan, or its device contradicts its source.
            ResultsFull: a limit on results or on the disk is reached.
        """
        result = parsed(body, "the result", ResultBroken)
        validate(result, BENCH, "the result", ResultBroken)
        if result["run"]["plan"] != self.plan:
            raise ResultBroken(f"the result is of plan {result['run']['plan']}, not {self.plan}")
        if strange := {cell["id"] for cell in result["cells"]} - self.rows:
            raise ResultBroken(f"the result has a cell that the plan has not: {min(strange)}")
        named = {row["id"] for row in result.get("decoders", [])}
        if strange := named - {self.decoder}:
            raise ResultBroken(f"the result has a decoder that the plan has not: {min(strange)}")
        where = origin(result["device"].get("signs", {}), header)
        if result["device"]["source"] != where.source:
            raise ResultBroken(
                f"the result says its source is {result['device']['source']!r}, "
                f"which its device does not bear out ({where.source}: {where.reason})"
            )
        return self._write(judged(result))

    def _write(self, result: dict[str, Any]) -> Landed:
        text = json.dumps(result, sort_keys=True)
        device = (
            re.sub(r"[^A-Za-z0-9]+", "-", result["device"]["model"]).strip("-")[:40] or "device"
        )
        started = re.sub(r"[^0-9T]", "", result["run"]["started"])[:15]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        landed = Landed(self.folder / f"{started}-{device}-{digest}.json", result)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.lock:
            if landed.path.exists():  # the page sends again if it did not get the first answer
                return landed
            self._check_room(len(text))
            write_json(result, landed.path)
            self.count, self.stored = self.count + 1, self.stored + len(text)
        self.landed.put(landed)
        return landed

    def _check_room(self, size: int) -> None:
        limits, free = self.limits, shutil.disk_usage(self.folder).free
        if self.count >= limits.results or self.stored + size > limits.stored_bytes:
            raise ResultsFull(
                f"{self.count} results are stored since kvcap android serve was "
                "started, which is all it takes; start it again"
            )
        if free - size < limits.spare_bytes:
            raise ResultsFull(
                f"the computer's disk is full: {free / 1e6:,.0f} MB are free, and "
                f"{limits.spare_bytes / 1e6:,.0f} MB are left so"
            )
