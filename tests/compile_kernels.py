"""Has Triton's compiler read the kernels that a policy launches on an H100, where there is no GPU.

An interpreter runs what a compiler refuses: variables whose types change in a loop or a branch.
Run by `tests/kernels/test_compiled.py` in a process of its own, in which nothing is interpreted;
prints how many kernels there were, and what the compiler says of those that it refuses.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from conftest import small_policy, tiny_config
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from kvcap.kernels.device import Target
from kvcap.kernels.variants import Launch
from kvcap.runtime.backends.pytorch.warm_up import Rehearsal

HOPPER = Target(multiprocessors=132, shared_memory=232448, overlaps=True)


class Driver:
    """What the compiler asks of a GPU's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Read(Exception):
    """The compiler has read a kernel; what comes next takes long, and refuses little."""


def main(policies: list[str]) -> None:
    read = ASTSource.make_ir

    def only_read(*args: Any, **options: Any) -> None:
        read(*args, **options)
        raise Read

    ASTSource.make_ir = only_read
    driver.set_active(Driver())
    heard, refused = set(), {}

    def hear(kernel: Any, args: Any, options: Any) -> bool:
        launch = Launch.of(kernel, args, options)
        if launch.variant not in heard:
            heard.add(launch.variant)
            try:
                launch.compile()
            except Read:
                pass
            except Exception as error:
                refused[launch.variant[1]] = str(error)
        return False

    config = tiny_config("llama")
    for policy in policies:
        given = config, small_policy(policy, config), 64, 16, torch.bfloat16, "compact"
        Rehearsal(*given, target=HOPPER).run(hear)
    print(json.dumps({"kernels": sorted({str(x[1]) for x in heard}), "refused": refused}))


main(sys.argv[1:])
