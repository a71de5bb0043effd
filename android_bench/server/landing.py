"""Takes results that a browser sends: checks them against plan and device, and writes each once."""

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
    """Limits on how much of this machine the clients of one server may take.

    They are generous beside what phones send.
    """

    result_bytes: int = 64 * MIB  # the largest preset's raw samples are some megabytes
    results: int = 1000
    stored_bytes: int = 4096 * MIB
    spare_bytes: int = 256 * MIB  # bytes that stay free on the disk
    connections: int = 256  # a browser has up to six
    uploads: int = 4  # at once, as each may take `result_bytes` of memory; others try again
    head_seconds: float = 20.0  # for a request's line and headers to arrive
    body_seconds: float = 180.0  # for its body to arrive
    request_seconds: float = 600.0  # for the client to read its answer


class Landed(NamedTuple):
    """A result that was written."""

    path: Path
    result: dict[str, Any]


class Results:
    """A folder that results go to.

    Files are named by their content, so none is overwritten.
    """

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
        """Check a result, judge it and write it; one that is there already is left as it is.

        Args:
            body: JSON text.
            header: the user agent that sent it.

        Raises:
            ResultBroken: no result of this plan, or one whose source its device contradicts.
            ResultsFull: no more are taken.
        """
        found = parsed(body, "the result", ResultBroken)
        validate(found, BENCH, "the result", ResultBroken)
        if found["run"]["plan"] != self.plan:
            raise ResultBroken(f"the result is of plan {found['run']['plan']}, not {self.plan}")
        if strange := {cell["id"] for cell in found["cells"]} - self.rows:
            raise ResultBroken(f"the result has a cell that the plan has not: {min(strange)}")
        named = {row["id"] for row in found.get("decoders", [])}
        if strange := named - {self.decoder}:
            raise ResultBroken(f"the result has a decoder that the plan has not: {min(strange)}")
        where = origin(found["device"].get("signs", {}), header)
        if found["device"]["source"] != where.source:
            raise ResultBroken(
                f"the result says its source is {found['device']['source']!r}, "
                f"which its device does not bear out ({where.source}: {where.reason})"
            )
        return self._write(judged(found))

    def _write(self, found: dict[str, Any]) -> Landed:
        text = json.dumps(found, sort_keys=True)
        device = re.sub(r"[^A-Za-z0-9]+", "-", found["device"]["model"]).strip("-")[:40] or "device"
        started = re.sub(r"[^0-9T]", "", found["run"]["started"])[:15]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        landed = Landed(self.folder / f"{started}-{device}-{digest}.json", found)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.lock:
            if landed.path.exists():  # sent again, as the first answer did not reach the page
                return landed
            self._check_room(len(text))
            write_json(found, landed.path)
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
