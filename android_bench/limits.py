"""How much of this machine files and clients may take; generous beside what real phones send."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
FILE_BYTES = 512 * MIB  # of a plan.json or a result's file: 20 times the largest preset's samples
PARTS = 200_000  # lists and objects in one document; the largest preset has some ten thousand


@dataclass(frozen=True)
class Limits:
    """Of one start of the server."""

    result_bytes: int = 64 * MIB  # the largest preset's raw samples are some megabytes
    results: int = 1000
    stored_bytes: int = 4096 * MIB
    spare_bytes: int = 256 * MIB  # that stay free on the disk
    connections: int = 256  # a browser holds up to six
    uploads: int = 4  # at once, as each may take `result_bytes` of memory; the others try again
    head_seconds: float = 20.0  # until a request's first lines are there
    body_seconds: float = 180.0  # until its body is
    request_seconds: float = 600.0  # until its answer was read
