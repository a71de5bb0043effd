"""Workers that are actors of a Ray cluster, on as many machines as it has.

Every machine needs kvcap in the same version, and a model given as a directory at the same place.
"""

from __future__ import annotations

import logging
import os
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kvcap.evals.quality.workers import Failed, Job, Worker, attempt
from kvcap.runtime.errors import ExtraMissing, first_line


def require_ray() -> None:
    """Refuse early.

    Raises:
        ExtraMissing: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ExtraMissing("--engine ray needs Ray; run: pip install kvcap[ray]")


@dataclass(frozen=True)
class Share:
    """The workers of a cluster, and what each takes of its machine."""

    workers: int
    cpus: float
    gpus: float

    @classmethod
    def of(cls, nodes: list[dict[str, float]], workers: int | None, threads: int | None) -> Share:
        """One worker per GPU; without any, one per machine, or per `threads` of its CPUs.

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


def _check_answers(address: str | None) -> None:
    """Fail at once where nobody listens at HOST:PORT; Ray would try for minutes, and exit."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


class RayCluster:
    """The engine of a Ray cluster: an existing one, or one started on this machine.

    Args:
        job: what workers do.
        workers: at most so many; as many as the cluster has room for.
        threads: CPUs of a worker, where there are no GPUs.
        address: of an existing cluster; None finds one as Ray does (RAY_ADDRESS, one of this
            machine), or starts one.

    Raises:
        ExtraMissing: Ray is not installed.
        ValueError: no cluster answers, or none of its machines is large enough.
    """

    def __init__(
        self,
        job: Job,
        workers: int | None = None,
        threads: int | None = None,
        address: str | None = None,
    ) -> None:
        require_ray()
        import ray

        self._job = job
        self._connected = not ray.is_initialized()
        if self._connected:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours is private
            try:
                _check_answers(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"--ray-address {address}: no Ray cluster answers ({first_line(error)})"
                ) from error
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._share = Share.of(nodes, workers, threads)
        except BaseException:
            self.close()
            raise
        self.workers = self._share.workers

    def start(self, number: int) -> Worker:
        """An actor that makes the job ready as soon as a machine has room for it."""
        return _RayWorker(self._job, number, self._share)

    def close(self) -> None:
        """Leave the cluster; one started here ends."""
        import ray

        if self._connected:
            ray.shutdown()


class _RayWorker:
    def __init__(self, job: Job, number: int, share: Share) -> None:
        import ray

        self.number = number
        actor = ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0)(_Actor)
        self._actor = actor.remote(job)
        self.ready: Future[Failed | None] = self._actor.load.remote(number).future()

    def submit(self, message: Any) -> Future[Any]:
        future: Future[Any] = self._actor.run.remote(message).future()
        return future

    def close(self) -> None:
        import ray

        ray.kill(self._actor)


class _Actor:
    """A worker's side."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def load(self, number: int) -> Any:
        return attempt(self._job.load, number)

    def run(self, message: Any) -> Any:
        return attempt(self._job.run, message)
