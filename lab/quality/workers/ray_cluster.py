"""Runs workers as actors of a Ray cluster, on as many machines as it has."""

from __future__ import annotations

from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from kvcap.lab.quality.workers import Failed, Worker, WorkerJob, attempt
from kvcap.runtime.cluster import Share, join, machines
from kvcap.runtime.errors import ExtraMissing, how_to_install


def require_ray() -> None:
    """Check for Ray, before anything runs.

    Raises:
        ExtraMissing: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ExtraMissing(f"--engine ray needs Ray; {how_to_install('ray')}")


class RayCluster:
    """An engine that uses a Ray cluster: an existing one, or one started on this machine.

    Args:
        job: the job of the workers.
        workers: most workers; None: as many as the cluster has room for.
        threads: CPUs of a worker, if there are no GPUs.
        address: address of an existing cluster; None finds one as Ray does (RAY_ADDRESS, or one of
            this machine), or starts one.

    Raises:
        ExtraMissing: Ray is not installed.
        ValueError: no cluster answers, or no machine of it is large enough.
    """

    def __init__(
        self,
        job: WorkerJob,
        workers: int | None = None,
        threads: int | None = None,
        address: str | None = None,
    ) -> None:
        require_ray()
        import ray

        self._job = job
        self._connected = not ray.is_initialized()
        nodes = join(address) if self._connected else machines()
        try:
            self._share = Share.of(nodes, workers, threads)
        except BaseException:
            self.close()
            raise
        self.workers = self._share.workers

    def start(self, number: int) -> Worker:
        """Start an actor that loads the job as soon as a machine has room for it."""
        return _RayWorker(self._job, number, self._share)

    def close(self) -> None:
        """Leave the cluster; one started here ends."""
        import ray

        if self._connected:
            ray.shutdown()


class _RayWorker:
    def __init__(self, job: WorkerJob, number: int, share: Share) -> None:
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
    """The actor that Ray runs for a worker."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job

    def load(self, number: int) -> Any:
        return attempt(self._job.load, number)

    def run(self, message: Any) -> Any:
        return attempt(self._job.run, message)
