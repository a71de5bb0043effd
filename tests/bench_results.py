"""Makes results as phones send them, and puts faults into them, for tests."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kvcap.android_bench.documents import (
    BENCH,
    PLAN,
    plan_id,
)

EVIL = [
    "<img src=x onerror=alert(1)>", "a\n# Google Pixel 9\n| b | c |", "\x1b[2J\x1b]0;owned\x07",
    "\u202egnp.exe", "\ud800", "\x00", "\u2028- x", "$\\frac{", "_x", "[a](javascript:b)",
    "`</pre>`", "**b** _i_ ~~s~~", "&lt;b&gt;", "x" * 100_000, "小米 17", "", "# x", "1. x", "--",
]  # fmt: skip


DEEP = "@deep@"  # stands for deeply nested lists, which json.dumps cannot write


ODD = st.sampled_from(
    [*EVIL, DEEP, None, True, 0, -1, 1, 2, 0.5, 7.0, 1e-300, 1e308, 10**400, 2**63, -(2**63), [],
     {}, [[]], [0] * 5000, [None], {"a": 1}, {"<b>": "\x1b"}, float("inf"), float("nan")]
)  # fmt: skip


MUTATIONS = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(["set", "drop", "add", "twice", "word"]), ODD),
    min_size=1,
    max_size=3,
)


def result() -> dict[str, Any]:
    """Return a valid result of `plan`, from a computer's browser."""

    def cell(policy: str, n: int, form: str, **other: Any) -> dict[str, Any]:
        return {
            "id": f"{policy}.{form}.score.fp32.n{n}",
            "policy": policy,
            "formulation": form,
            "dtype": "fp32",
            "stage": "score",
            "n": n,
            "queries": 0,
            "budget": None,
            "model_sha256": "0" * 64,
            "opset": 18,
            "bytes": n * 64,
            "threads": 1,
            "provider_asked": "wasm",
            "provider_got": "wasm",
            "status": "ok",
            "reason": None,
            "load_ms": 1.0,
            "runs_per_sample": 1,
            "samples_us": [[n * 1.0, n * 1.2], [n * 1.1]],
            "parity": {"passed": True, "error": 0.0, "allowed": 1e-5},
            **other,
        }

    cells = [cell("keydiff", n, "stateless") for n in (32, 64, 128)]
    cells += [cell("tova", 64, "naive", queries=1), cell("h2o", 64, "naive", queries=2)]
    cells[-1] |= {"status": "failed", "reason": "out of memory"}
    for name in ("samples_us", "runs_per_sample", "parity", "load_ms"):
        del cells[-1][name]
    cells[0]["operators"] = [{"operator": "MatMul", "provider": "cpu", "count": 2, "us": 12.5}]
    evict = cell("tova", 64, "naive", stage="evict", budget=32, id="tova.naive.evict.fp32.n64")
    return {
        "schema": BENCH,
        "run": {
            "id": "0" * 8 + "-0000" * 3 + "-" + "0" * 12,
            "plan": plan()["id"],
            "preset": "quick",
            "reference": cells[0]["id"],
            "runner": "browser",
            "started": "2026-01-01T00:00:00Z",
            "finished": "2026-01-01T00:01:00.5Z",
            "runner_version": "1",
            "seed": 1,
            "complete": True,
            "interrupted": [],
        },
        "device": {
            "source": "host",
            "source_reason": "a computer's",
            "model": "AMD",
            "soc": "x",
            "abi": "x86_64",
            "cores": 2,
            "core_khz": [1, None],
            "android": None,
            "ram_bytes": 2**33,
            "user_agent": "",
            "gpu": None,
            "signs": {"platform": "x"},
        },
        "runtime": {
            "name": "onnxruntime-web",
            "version": "1.30.0",
            "timer_us": 0.01,
            "telemetry": False,
            "isolated": True,
            "cores": [1],
            "features": ["simd"],
        },
        "conditions": {
            when: {
                "governor": ["powersave"],
                "khz": [1],
                "thermal": {"0 cpu": 40.0},
                "battery_percent": 90,
                "charging": True,
                "screen_on": True,
                "load": 0.1,
            }
            for when in ("before", "after")
        },
        "memory": {"of": "WebAssembly", "peak_bytes": None, "reason": "no WebAssembly"},
        "shape": {
            "name": "small",
            "batch": 1,
            "kv_heads": 2,
            "heads": 4,
            "head_dim": 16,
            "block": 16,
        },
        "rules": plan()["rules"],
        "cells": [*cells, evict],
        "baselines": [
            {
                "id": "memcpy.n32",
                "bytes": 1024,
                "threads": 1,
                "runs_per_sample": 1,
                "samples_us": [[1.0], [2.0]],
            }
        ],
        "repeat": {
            "id": cells[0]["id"],
            "threads": 1,
            "provider_asked": "wasm",
            "samples_us": [32.0],
            "runs_per_sample": 1,
        },
    }


FILES = {"models/m.onnx": b"graph", "expected/e.f32": b"numbers"}


def plan() -> dict[str, Any]:
    """Return a plan of the cells of `result`; its files are not real."""

    def cell(name: str) -> dict[str, Any]:
        policy, form, stage, dtype, size = name.split(".")
        n = int(size[1:])
        fills = [
            {"kind": "hash", "seed": 1, "scale": 0.5, "offset": -1.0},
            {"kind": "constant", "value": 1},
            {"kind": "permutation", "multiplier": 7, "first": 3},
            {"kind": "file", "file": "expected/e.f32"},
        ]
        checks = [
            {"kind": "values", "file": "expected/e.f32", "allowed": 0.1},
            {"kind": "slots", "file": "expected/e.f32"},
            {"kind": "rows", "of": "in0"},
            {"kind": "by_slot", "file": "expected/e.f32", "allowed": 0.1},
        ]
        ports = [
            [
                {"name": f"{way}{i}", "dtype": "float32", "shape": [1, n], kind: one}
                for i, one in enumerate(ones)
            ]
            for way, kind, ones in (("in", "fill", fills), ("out", "check", checks))
        ]
        return {
            "id": name,
            "policy": policy,
            "formulation": form,
            "dtype": dtype,
            "stage": stage,
            "n": n,
            "queries": 0,
            "budget": None,
            "model": "models/m.onnx",
            "opset": 18,
            "bytes": 8 * n * 4,
            "inputs": ports[0],
            "outputs": ports[1],
        }

    names = [f"keydiff.stateless.score.fp32.n{n}" for n in (32, 64, 128)]
    names += ["tova.naive.score.fp32.n64", "h2o.naive.score.fp32.n64", "tova.naive.evict.fp32.n64"]
    document = {
        "schema": PLAN, "id": "", "preset": "quick", "producer": {"kvcap": "1"}, "threads": [1, 2],
        "shape": {"name": "small", "batch": 1, "kv_heads": 2, "heads": 4, "head_dim": 16,
                  "block": 16},
        "rules": {"warmup_runs": 5, "warmup_seconds": 0.5, "min_runs": 3, "min_seconds": 0.0001,
                  "rounds": 2, "max_drift": 0.1, "max_timer_share": 0.02, "seed": 1},
        "reference": names[0], "generator": {"name": "hash11", "rule": "x", "check": [1, 2]},
        "csv": ["id", "p50_us"],
        "files": [{"file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                  for name, data in FILES.items()],
        "baselines": [{"id": "memcpy.n32", "bytes": 1024}],
        "formulations": {"naive": "as traced"},
        "cells": [cell(name) for name in names],
    }  # fmt: skip
    return {**document, "id": plan_id(document)}


def entries(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a document."""
    pairs, waiting = [], [value]
    while waiting:
        holder = waiting.pop()
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            pairs.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return pairs


def mutated(document: dict[str, Any], mutations: list[tuple[int, str, Any]]) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    for where, act, given in mutations:
        odd = copy.deepcopy(given)  # a list put into itself would be a circle
        every = entries(changed)
        holder, key = every[where % len(every)]
        if act == "word":  # a string in place of a string is likely to be accepted
            texts = [(h, k) for h, k in every if isinstance(h[k], str)]
            holder, key = texts[where % len(texts)]
            holder[key] = EVIL[where % len(EVIL)]
        elif act == "drop":
            del holder[key]
        elif act == "twice" and isinstance(holder, list):
            holder.append(holder[key])
        elif act == "add" and isinstance(holder, dict):
            holder[str(odd)[:30] or "extra"] = odd
        else:
            holder[key] = odd
    return changed


def written(document: Any) -> bytes:
    """Return a document as JSON, with NaN, infinity, and nested lists for `DEEP`."""
    text = json.dumps(document).replace("Infinity", "1e999")
    return text.replace(f'"{DEEP}"', "[" * 800 + "]" * 800).encode()


def put(folder: Path) -> Path:
    """Write the files of `plan` into a folder."""
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "plan.json").write_text(json.dumps(plan()))
    return folder
