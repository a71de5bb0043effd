"""Joins Ray clusters, and says what a worker takes of their machines.

Every machine needs kvcap in the same version, and a model given as a directory at the same place.
Ray itself is imported when a cluster is joined, as it is an extra.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from kvcap.runtime.errors import first_line


@dataclass(frozen=True)
class Share:
    """A share of a cluster: its workers, and what each takes of its machine."""

    workers: int
    cpus: float
    gpus: float

    @classmethod
    def of(cls, nodes: list[dict[str, float]], workers: int | None, threads: int | None) -> Share:
        """Return one worker per GPU; without any, one per machine, or per `threads` of its CPUs.

        Args:
            nodes: what each machine has, by Ray's names `CPU` and `GPU`.
            workers: at most so many.
            threads: CPUs of a worker.

        Raises:
            ValueError: no machine has so many CPUs.

        >>> Share.of([{"CPU": 8}, {"CPU": 4}], workers=None, threads=None)
        Share(workers=3, cpus=4, gpus=0)
        """
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        cpus = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
        if gpus:
            return cls(min(gpus, workers or gpus), 0, 1)
        each = threads or min(cpus, default=1)
        fits = sum(count // each for count in cpus)
        if not fits:
            raise ValueError(
                f"no machine of the Ray cluster has {each} CPUs for a worker; they have "
                f"{', '.join(map(str, cpus)) or 'none'}; give --threads"
            )
        return cls(min(fits, workers or fits), each, 0)


def join(address: str | None, **more: Any) -> list[dict[str, float]]:
    """Become part of a cluster until `ray.shutdown()`; return what each of its machines has.

    Args:
        address: of an existing one; None finds one as Ray does (RAY_ADDRESS, one of this machine),
            or starts one; `local` starts one.
        more: for `ray.init`.

    Raises:
        ValueError: no cluster answers.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours is private
    try:
        _check_answers(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray-address {address}: no Ray cluster answers ({first_line(error)})"
        ) from error
    return machines()


def machines() -> list[dict[str, float]]:
    """Return the resources of each machine of the joined cluster, by Ray's names."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _check_answers(address: str | None) -> None:
    """Fail at once where nobody listens at HOST:PORT; Ray would try for minutes, and exit."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
