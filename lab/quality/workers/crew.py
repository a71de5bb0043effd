"""Decides where the workers of a sweep run, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvcap.lab.quality.workers import Here, WorkerEngine, WorkerJob
from kvcap.lab.quality.workers.processes import Processes
from kvcap.lab.quality.workers.ray_cluster import RayCluster, require_ray
from kvcap.runtime.errors import PlanInfeasible
from kvcap.runtime.memory.free_memory import free_memory
from kvcap.runtime.units import format_bytes

Place = Literal["local", "ray"]


@dataclass(frozen=True)
class Crew:
    """The workers that a user asks for; a single local worker is this process itself."""

    engine: Place = "local"
    workers: int | None = None  # None: one per GPU, or one; on a cluster, as many as fit
    threads: int | None = None  # CPU threads of all local workers, or of each on a cluster
    ray_address: str | None = None  # see `RayCluster`

    def check(self) -> None:
        """Refuse settings that cannot be used.

        Raises:
            ValueError: naming the option.
            ExtraMissing: Ray is not installed.
        """
        if self.engine not in get_args(Place):
            raise ValueError(f"--engine {self.engine!r}: give {' or '.join(get_args(Place))}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers {self.workers} will not work, give 1 or more")
        if self.engine == "ray":
            require_ray()
        elif self.ray_address is not None:
            raise ValueError(
                f"--ray-address {self.ray_address} needs --engine ray; add that, or leave it out"
            )

    def local_workers(self, device: str | None) -> int:
        """Return the number of processes of this machine for a device."""
        return self.workers or max(1, gpus_of(device))

    def alone(self, device: str | None) -> bool:
        """Return whether no two workers share a GPU, so that times mean something."""
        gpus = gpus_of(device)
        return self.engine != "local" or gpus == 0 or self.local_workers(device) <= gpus

    def check_memory(self, device: str | None, each: int) -> None:
        """Refuse more processes than memory has room for; a GPU's memory is not checked.

        Args:
            device: the device of the models.
            each: least bytes of a worker.

        Raises:
            PlanInfeasible: naming how many fit.
        """
        import torch

        count, free = self.local_workers(device), free_memory().nbytes
        on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
        if self.engine == "local" and on_cpu and count > 1 and count * each > free:
            raise PlanInfeasible(
                f"--workers {count}: each takes {format_bytes(each)} at least, and "
                f"{format_bytes(free)} are free; give --workers {max(1, free // each)}"
            )

    def local_threads(self, device: str | None) -> int | None:
        """Return the CPU threads of each local worker; None leaves them to PyTorch."""
        import torch

        count = self.local_workers(device)
        return max(1, (self.threads or torch.get_num_threads()) // count) if count > 1 else None

    def start(self, job: WorkerJob, device: str | None) -> WorkerEngine:
        """Make the engine that does a job.

        Raises:
            ValueError: no Ray cluster answers, or it has no machine that is large enough.
        """
        if self.engine == "ray":
            return RayCluster(job, self.workers, self.threads, self.ray_address)
        count = self.local_workers(device)
        return Here(job) if count == 1 else Processes(job, count)


def gpus_of(device: str | None) -> int:
    """Return the number of GPUs of this machine that workers on a device share."""
    import torch

    if device is not None and device.startswith("cuda:"):
        return 1
    return torch.cuda.device_count() if device in (None, "cuda") else 0
