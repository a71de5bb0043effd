"""Times tokens per second on a CPU, alternating with other programs that users could run.

Every program, kvcap too, is a process of its own that loads once and uses the same cores, and runs
while the others wait. `prefill` reads `lengths` tokens from an empty cache until the first token of
the answer is known; `decode` writes `steps` tokens after `depths`. kvcap keeps as many slots as the
first of `budgets` and reads blocks of `block_size`; peers keep everything as they usually do.
Before decoding, caches are filled in ways that leave the time of a token the same: kvcap reads as
many tokens as fill its slots, llama.cpp reads the prompt once, others hold random numbers. `start`
times a new process in each round until it prints the first piece of text after a prompt of `starts`
words: `kvcap generate`, or a program that does the same with llama.cpp's library. Reads also
`repeats` (rounds), `threads`, `model` (a GGUF file too, which llama.cpp then runs itself),
`weights`, `backend`, `vs`, `peer_pythons`, `files` and the first of `policies`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.reports import device_name, versions
from kvcap.lab.peers.process import (
    MAIN,
    PEERS,
    STARTERS,
    Process,
    cores,
    first_piece,
    same_imports,
)
from kvcap.lab.random_models import SHAPES, directory
from kvcap.runtime.backends.llamacpp.rank import DEFAULT
from kvcap.runtime.cores import usable_cores
from kvcap.runtime.errors import PeerFailed
from kvcap.runtime.models import formats
from kvcap.runtime.models.gguf import is_gguf
from kvcap.runtime.models.names import is_export, names_gguf, resolve

DEFAULTS = {"lengths": (1024,), "depths": (0,), "repeats": 5, "threads": (len(usable_cores()),)}
COLUMNS = (
    "work", "backend", "weights", "threads", "n", "budget", "tok_s", "p50_ms", "p90_ms",
    "peak_bytes", "peer", "peer_weights", "peer_tok_s", "ratio", "peer_peak_bytes",
)  # fmt: skip
# llama.cpp's type of weights for kvcap's; other peers always run bfloat16.
GGUF = {"int4": "Q4_0", "int8": "Q8_0"}
AS_STORED = "gguf"  # the name for a GGUF file's weights in the bits that they have
FLOATS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
BACKENDS = ("llamacpp", "pytorch", "onnxruntime")
WARM_UP = 256  # tokens read before the first round


def run(options: BenchmarkOptions) -> Result:
    """Return a row for every work, type of weights, number of threads and peer.

    `tok_s` is the median over rounds; `p50_ms` and `p90_ms` are of a token (decode) or of the time
    to the first token (prefill). `ratio` is the median of the rounds' ratios, `ratio_least` and
    `ratio_most` are the least and the largest. A start has `processor_ms` too, of a program and
    those that it began, and `processor_ratio`, which is kvcap's divided by the peer's.
    `eviction_share` is eviction's share of kvcap's time, from a round of its own, if it can be
    measured.

    Raises:
        ValueError: unknown names, or too many threads.
        ExtraMissing, PeerFailed: a peer cannot be run.
    """
    _check(options)
    if names_gguf(options.model):
        options = replace(options, model=(model := resolve(options.model)))
    else:
        model = directory(options.model, options.files)
    works: list[tuple[str, int, int]] = [("start", n, 0) for n in options.starts if n]
    works += [("prefill", n, 0) for n in options.lengths if n]
    works += [("decode", n, options.steps) for n in options.depths if options.steps]
    rows: list[dict[str, Any]] = []
    for weights, threads in product(options.weights, options.threads):
        backend = options.backend or _usual_backend(model, weights)
        ours = _ours(options, model, weights, backend)
        for work, n, tokens in works:
            shared = {"threads": threads, "context": n + tokens + 1, "files": str(options.files)}
            programs = {name: _peer(options, model, name, weights) for name in options.vs}
            programs = {"kvcap": ours, **programs}
            with ExitStack() as stack:
                all_ = {
                    name: stack.enter_context(
                        Process(name, options.peer_pythons.get(name), {**settings, **shared})
                    )
                    for name, settings in programs.items()
                }
                if work == "start":  # the loaded programs only report their versions
                    stack.close()
                    rounds, share = _starts(programs, shared, options, n), None
                else:
                    rounds = _alternating(all_, work, n, tokens, options.repeats)
                    share = all_["kvcap"].measure(work, n, tokens, 0, evictions=True)["share"]
            row = {
                "work": work,
                "backend": backend,
                "weights": weights,
                "threads": threads,
                "n": n,
                "tokens": tokens or None,
                "budget": options.budgets[0],
                "block_size": options.block_size,
                "policy": ours["policy"],
                "turns": options.repeats,
                "model": Path(options.model).name,
                **_figures(rounds["kvcap"], work, n),
                "eviction_share": share,
            }
            for name in options.vs or (None,):
                other = {
                    "peer": name,
                    "peer_weights": name and programs[name]["weights"],
                    **_beside(rounds, name, work, n),
                }
                about: dict[str, Any] = {"versions": {**versions(), **all_["kvcap"].versions}}
                about["peer_versions"] = name and all_[name].versions
                rows.append({**row, **other, "device": _device(threads), **about})
                print(f"kvcap: {_line(rows[-1])}", file=sys.stderr, flush=True)
    return Result("cpu", COLUMNS, rows, {"model": options.model})


def _check(options: BenchmarkOptions) -> None:
    for name in (*options.vs, *options.peer_pythons):
        if name not in PEERS:
            raise ValueError(f"no peer is called {name!r}; known: {', '.join(PEERS)}")
        if options.starts and name in options.vs and name not in STARTERS:
            raise ValueError(
                f"starts are timed beside {', '.join(STARTERS[1:])} alone, not {name}: leave out "
                "--starts, or this peer"
            )
        if is_gguf(options.model) and name in options.vs and name != "llama.cpp":
            raise ValueError(f"of a GGUF file the peer is llama.cpp, not {name}")
    for threads in options.threads:
        cores(threads)
    check_backend(options.backend)
    if options.repeats < 1 or options.budgets[0] < 1 or options.block_size < 1:
        raise ValueError("rounds, slots and blocks are at least 1")


def _alternating(
    all_: Mapping[str, Process], work: str, n: int, tokens: int, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Run the programs one after another, `repeats` times; return their figures by program."""
    for process in all_.values():
        process.measure("prefill", min(n or 1, WARM_UP), 0, 0)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in all_}
    for seed in range(repeats):
        for name, process in all_.items():
            rounds[name].append(process.measure(work, n, tokens, seed))
    return rounds


def _starts(
    programs: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Any],
    options: BenchmarkOptions,
    words: int,
) -> dict[str, list[dict[str, Any]]]:
    """Start the programs one after another, first once untimed; return their figures by program."""
    random = options.model in SHAPES  # a random model's tokens are words
    text = " ".join(f"t{3 + i}" if random else "the" for i in range(words))
    prompt = {"text": text, "ids": list(range(3, 3 + words))}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for number in range(options.repeats + 1):
        for name, settings in programs.items():
            python = options.peer_pythons.get(name)
            took = first_piece(name, python, {**settings, **shared, **prompt})
            if number:
                rounds[name].append(took)
    return rounds


def _speeds(rounds: Sequence[Mapping[str, Any]], work: str, n: int) -> list[float]:
    """Return the tokens per second of each round."""
    done = [len(measured["seconds"]) if work == "decode" else n for measured in rounds]
    return [count / sum(measured["seconds"]) for count, measured in zip(done, rounds, strict=True)]


def _figures(rounds: Sequence[Mapping[str, Any]], work: str, n: int) -> dict[str, Any]:
    spent = [
        measured["processor_seconds"] for measured in rounds if measured.get("processor_seconds")
    ]
    times = sorted(1000 * second for measured in rounds for second in measured["seconds"])
    return {
        "tok_s": median(_speeds(rounds, work, n)),
        "p50_ms": median(times),
        "p90_ms": times[min(len(times) - 1, round(0.9 * len(times)))],
        **({"processor_ms": 1000 * median(spent)} if spent else {}),
        "peak_bytes": rounds[-1]["peak_bytes"],
        "kv_bytes": rounds[-1]["kv_bytes"],
    }


def _beside(
    rounds: Mapping[str, Sequence[Mapping[str, Any]]], name: str | None, work: str, n: int
) -> dict[str, Any]:
    """Return the peer's figures, and kvcap's speed divided by its; all None without a peer."""
    if name is None:
        empty = ("tok_s", "p50_ms", "p90_ms", "peak_bytes", "kv_bytes")
        return {f"peer_{key}": None for key in empty} | dict.fromkeys(
            ("ratio", "ratio_least", "ratio_most")
        )
    mine, its = (_speeds(rounds[who], work, n) for who in ("kvcap", name))
    ratios = [a / b for a, b in zip(mine, its, strict=True)]
    both = [
        [measured.get("processor_seconds") for measured in rounds[who]] for who in ("kvcap", name)
    ]
    shares = [a / b for a, b in zip(*both, strict=True) if a and b]
    spent = {
        f"processor_ratio{end}": of(shares)
        for end, of in (("", median), ("_least", min), ("_most", max))
        if shares
    }
    return {f"peer_{key}": value for key, value in _figures(rounds[name], work, n).items()} | {
        "ratio": median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        **spent,
    }


def _line(row: Mapping[str, Any]) -> str:
    line = f"{row['work']} {row['n']}, {row['weights']}, {row['threads']} threads: "
    line += f"{row['tok_s']:.1f} tok/s"
    if row["peer"] is None:
        return line
    peer = f"{row['peer']} {row['peer_weights']} {row['peer_tok_s']:.1f}"
    return f"{line}; {peer}; {row['ratio']:.2f} ×"


def _device(threads: int) -> str:
    """Return the name of the CPU, with the row's number of threads."""
    return f"{device_name('cpu').rpartition(', ')[0]}, {threads} threads"


def _usual_backend(model: str, weights: str) -> str:
    """Return the backend that suits a model and its weights, as commands choose it."""
    if is_gguf(model):
        return "llamacpp"
    return "pytorch" if weights in FLOATS else "onnxruntime"


def _peer(options: BenchmarkOptions, model: str, name: str, weights: str) -> dict[str, Any]:
    kind = GGUF.get(weights, "F16") if name == "llama.cpp" else "bf16"
    if is_gguf(model):
        kind = AS_STORED
    return {"model": model, "weights": kind, "budget": options.budgets[0]}


def _ours(options: BenchmarkOptions, model: str, weights: str, backend: str) -> dict[str, Any]:
    """Return the settings of kvcap's own process; export a decoder for ONNX Runtime, once."""
    budget, block, policy = options.budgets[0], options.block_size, options.policies[0]
    settings = {"backend": backend, "budget": budget, "block_size": block, "policy": policy}
    if backend == "llamacpp":
        if not is_gguf(model):
            raise ValueError(f"llama.cpp runs GGUF files, and {model} is none")
        chosen = options.policies != BenchmarkOptions.policies
        policy = policy if chosen else DEFAULT
        return {**settings, "model": model, "weights": AS_STORED, "policy": policy}
    if backend == "pytorch":
        known = (*FLOATS, *formats.NAMES)
        if weights not in known:
            raise ValueError(
                f"PyTorch runs no weights called {weights!r}: {', '.join(known)}; "
                "with --backend onnxruntime, what kvcap export decoder --dtype takes"
            )
        packed = weights if weights in formats.NAMES else None
        dtype = FLOATS.get(weights, "bfloat16")
        return {**settings, "model": model, "weights": dtype, "packed": packed}
    if is_export(model):
        return {**settings, "model": model, "weights": weights}
    sizes = {"--budget-tokens": str(budget), "--block-size": str(block)}
    out = exported(model, options.files, {"--dtype": weights, "--policy": policy, **sizes})
    return {**settings, "model": str(out), "weights": weights}


def check_backend(name: str | None, known: Sequence[str] = BACKENDS) -> None:
    """Refuse an unknown backend; None means the one that suits the weights.

    Raises:
        ValueError: there is no such backend.
    """
    if name not in (None, *known):
        raise ValueError(f"no backend is called {name!r}: {' or '.join(known)}")


def exported(model: str, files: Path, settings: Mapping[str, str]) -> Path:
    """Return the model's export in `files`; make it by `kvcap export decoder` if it is missing.

    Raises:
        PeerFailed: the model cannot be exported with these options.
    """
    out = Path(files, "-".join((Path(model).name, *settings.values())))
    if not out.exists():
        print(f"kvcap: exporting {out.name} ...", file=sys.stderr, flush=True)
        command = ["export", "decoder", model, *(x for pair in settings.items() for x in pair)]
        done = subprocess.run(
            [sys.executable, "-c", same_imports() + MAIN, *command, "--quick", "--out", str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().removeprefix("kvcap: ") or f"code {done.returncode}"
            raise PeerFailed(f"{out.name} cannot be exported: {reason}")
    return out
