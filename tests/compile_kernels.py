"""Has Triton's compiler read the kernels that a policy launches on an H100, where there is no GPU.

An interpreter runs what a compiler refuses: variables whose types change in a loop or a branch.
Run by `tests/kernels/test_compiled.py` in a process of its own, in which nothing is interpreted;
prints how many kernels there were, and what the compiler says of those that it refuses. Arguments
are names of policies, of quantised slots 'keydiff:int8' and its like; 'quantised-token' has that
kernel compiled to the end for usual sizes instead, and prints the bytes that each variant spills;
'window' the kernels that score by a window, and prints the shared memory that each takes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from conftest import small_policy, tiny_config
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from kvcap.kernels import quantised_token
from kvcap.kernels.device import Target, pretending
from kvcap.kernels.launch import heard
from kvcap.kernels.variants import Launch
from kvcap.kernels.window import scores
from kvcap.policies.base import Observation
from kvcap.runtime.backends.pytorch.warm_up import Rehearsal
from kvcap.runtime.cache.pool import SHIFT, Segment, SlotPool
from kvcap.runtime.cache.slot_format import SlotFormat

HOPPER = Target(multiprocessors=132, shared_memory=232448, overlaps=True)
CONSUMER = Target(multiprocessors=82, shared_memory=101376, overlaps=False)  # an RTX 3090
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Driver:
    """What the compiler asks of a GPU's driver."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Read(Exception):
    """The compiler has read a kernel; what comes next takes long, and refuses little."""


def spilled(kind: str, size: int, slots: int) -> int:
    """Bytes of a thread's stack, in a token's kernel over so many slots of 8 KV heads."""
    pool = SlotPool(
        8 * (slots + 1), size, torch.bfloat16, "cpu", {SHIFT: torch.int32},
        slot_format=SlotFormat.of(kind),
    )  # fmt: skip
    segment, found = Segment(pool, 0, slots, 1, 1, 8), list[int]()
    heads = torch.zeros(1, 1, 40, size, dtype=torch.bfloat16).transpose(1, 2).split((24, 8, 8), 1)
    angles = (torch.zeros(1, 1, size, dtype=torch.bfloat16),) * 2
    table = torch.zeros(slots + 1, 2, size // 2, dtype=torch.float16)

    def hear(kernel: Any, args: Any, options: Any) -> bool:
        if kernel.fn.__name__ == "attend_quantised":
            launch = Launch.of(kernel, args, options)
            compiled = kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
            with NamedTemporaryFile(suffix=".cubin") as file:
                file.write(compiled.asm["cubin"])
                file.flush()
                told = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
            found.extend(int(x) for x in re.findall(r"STACK:(\d+)", told))
        return False

    with pretending(HOPPER), heard(hear):
        quantised_token.attend(
            *heads, angles, torch.zeros(1, dtype=torch.int32), segment.named(0, slots + 1), 0.1,
            torch.zeros(1, 8, size), table, summed=True,
        )  # fmt: skip
    (stack,) = found
    return stack


def of_quantised_token() -> None:
    driver.set_active(Driver())
    cases = product(("int8", "int8-int4", "int4"), (64, 128), (2048, 8192))
    print(json.dumps({"-".join(map(str, case)): spilled(*case) for case in cases}))


def shared_by(
    gpu: Target, kind: str, size: int, dtype: torch.dtype, window: int, group: Any
) -> list[int]:
    """Bytes of shared memory that the kernels of an epilogue take, over 2,560 slots."""
    found = list[int]()

    def hear(kernel: Any, args: Any, options: Any) -> bool:
        launch = Launch.of(kernel, args, options)
        compiled = kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
        found.append(compiled.metadata.shared)
        return False

    queries, keys = (
        torch.zeros(1, *shape, size, dtype=dtype) for shape in ((6, window), (2, 2560))
    )
    positions = torch.zeros(1, 2, 2560, dtype=torch.int32)
    obs = Observation(keys, keys, positions, 2560, 2048, queries=queries)
    with pretending(gpu), heard(hear):
        scores(obs, kind, group)
    return found


def of_windows() -> None:
    bf16, fp32, found = torch.bfloat16, torch.float32, {}
    cases = [("andpro", 128, bf16, 32, "mean"), ("dropkv", 256, bf16, 1, "mean"),
             ("dropkv", 256, fp32, 32, "mean"), ("joint", 128, bf16, 512, "sum"),
             ("joint", 256, bf16, 512, "max"), ("attention", 256, fp32, 32, None)]  # fmt: skip
    for capability, gpu in ((90, HOPPER), (86, CONSUMER)):
        driver.set_active(Driver(capability))
        for case in cases:
            found["-".join(map(str, (capability, *case)))] = [
                gpu.shared_memory, *shared_by(gpu, *case),
            ]  # fmt: skip
    print(json.dumps(found))


def main(policies: list[str]) -> None:
    read = ASTSource.make_ir

    def only_read(*args: Any, **options: Any) -> None:
        read(*args, **options)
        raise Read

    ASTSource.make_ir = only_read
    driver.set_active(Driver())
    known, refused = set(), {}

    def hear(kernel: Any, args: Any, options: Any) -> bool:
        launch = Launch.of(kernel, args, options)
        if launch.variant not in known:
            known.add(launch.variant)
            try:
                launch.compile()
            except Read:
                pass
            except Exception as error:
                refused[launch.variant[1]] = str(error)
        return False

    config = tiny_config("llama")
    for name in policies:
        policy, _, kind = name.partition(":")
        given = config, small_policy(policy, config), 64, 16, torch.bfloat16, "compact"
        Rehearsal(*given, target=HOPPER, kv_dtype=kind or None).run(hear)
    print(json.dumps({"kernels": sorted({str(x[1]) for x in known}), "refused": refused}))


if sys.argv[1:] == ["quantised-token"]:
    of_quantised_token()
elif sys.argv[1:] == ["window"]:
    of_windows()
else:
    main(sys.argv[1:])
