"""Times many long conversations at one server, beside `transformers serve` with batching.

`clients` at once send a prompt of `lengths` random tokens each to a process of `kvcap serve`, over
plain HTTP. They read their answers until each has had `steps` tokens since the last answer began.
`tok_s` and the times between tokens (`p50_ms`, `p95_ms`) are of that span, in which all are
answered. `alone_tok_s` is that of a single client, without its prompt; `gain` is `tok_s` divided by
it. `read_s` are the seconds in which prompts were read, and `reading_p95_ms` is of the times
between tokens in that span.

The peer gets the same weights and prompts, and writes as many tokens. It keeps whole prompts, so it
may hold fewer clients: as many as fit into free memory, with the copies that its default attention,
SDPA, makes. Their prompts are read one by one before, for at most `READ_S` seconds, and come from
its prefix cache then; otherwise it would attend to all sequences with every token that it reads.
`why` explains fewer clients or missing figures. `ratio` is kvcap's `tok_s` divided by the row's.

kvcap's server is killed after `LIMIT_S` seconds, a peer's after `PEER_S`; `why` then tells how far
its clients had come. Until all answers have begun, progress is printed. Reads `lengths`, `budgets`,
`block_size`, `policies`, `clients`, `steps`, `repeats` (of the single client), `model` (of random
weights, whose tokens are words), `vs` and `peer_pythons`.
"""

from __future__ import annotations

import http.client
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.reports import device_name, versions
from kvcap.lab.peers.http_servers import (
    PeerServer,
    endless,
    kvcap_server,
    pieces,
    transformers_server,
)
from kvcap.lab.random_models import SHAPES, directory
from kvcap.runtime.errors import PeerFailed
from kvcap.runtime.memory.free_memory import free_memory

DEFAULTS = {
    "lengths": (32768,),
    "budgets": (2048,),
    "block_size": 1024,
    "model": "random-3b",
    "vs": ("transformers",),
}
COLUMNS = ("server", "clients", "n", "tok_s", "alone_tok_s", "gain", "p95_ms", "ratio", "why")
LIMIT_S = 400.0  # seconds for kvcap's server, with the loading of its model
PEER_S = 200.0  # seconds for the peer's server
PROGRESS_S = 10.0  # seconds between two lines of progress while prompts are read
ENDLESS = 32_000  # most tokens of an answer, which a client leaves once it has enough
READ_S = 60.0  # seconds for prompts that the peer reads before it answers
PAGE = 256  # tokens of a block of the peer's cache
PASS = 1024  # tokens that the peer reads at once
FREE = 0.25  # free share of the peer's cache; below 0.15 it reads no prompt, or forgets some
FAILURES = (PeerFailed, OSError, http.client.HTTPException)


def run(options: BenchmarkOptions) -> Result:
    """Return a row of kvcap and one of each peer, for every length and budget.

    Raises:
        ValueError: the model's tokens are no words, or a peer is unknown.
    """
    if options.model not in SHAPES:
        raise ValueError(f"--model {options.model}: give one of {', '.join(SHAPES)}")
    if unknown := set(options.vs) - {"transformers"}:
        raise ValueError(f"--vs {', '.join(unknown)}: transformers alone serves beside kvcap")
    machine = {
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": versions(),
    }
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        model = endless(directory(options.model, options.files), Path(folder, "endless"))
        for length in options.lengths:
            work = ClientLoad(
                model, length, options.clients, options.steps, options.repeats, options.block_size
            )
            policy, budgets = options.policies[0], options.budgets
            own = [_printed(_kvcap(work, budget, policy)) for budget in budgets]
            peers = [_printed(_peer(work, options.peer_pythons.get(name))) for name in options.vs]
            for budget, mine in zip(budgets, own, strict=True):
                for row in (mine, *peers):
                    both = row["tok_s"] and mine["tok_s"]
                    ratio = mine["tok_s"] / row["tok_s"] if both else ""
                    rows.append({**row, "budget": budget, "ratio": ratio})
    return Result(
        "clients",
        COLUMNS,
        [{**row, **machine} for row in rows],
        {"model": options.model, **machine},
    )


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row as soon as it is measured, and return it."""
    shown = ", ".join(f"{name} {row[name]}" for name in COLUMNS if row.get(name) not in ("", None))
    print(f"kvcap: {shown}", file=sys.stderr, flush=True)
    return row


@dataclass
class ClientLoad:
    """The load that clients put on a server: their number, and the tokens of each."""

    model: str  # a directory
    length: int  # tokens of a prompt
    clients: int
    steps: int  # tokens of each answer while all are answered
    repeats: int
    block: int  # tokens of a prompt that kvcap reads between two tokens of an answer
    prompts: list[str] = field(init=False, repr=False)  # random words for each client

    def __post_init__(self) -> None:
        words = self.config["vocab_size"]
        self.prompts = [
            " ".join(f"t{draw.randrange(3, words)}" for _ in range(self.length))
            for draw in map(Random, range(self.clients))
        ]

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the model's config, read from its file."""
        config: dict[str, Any] = json.loads(Path(self.model, "config.json").read_text())
        return config

    @property
    def most(self) -> int:
        """Return the most tokens of an answer, for which the peer reserves memory."""
        return self.clients * (math.ceil(self.length / self.block) + 2) + 2 * self.steps + 256


class Gate:
    """A gate that opens once `many` clients have come."""

    def __init__(self, many: int) -> None:
        self.many, self.come_so_far = many, 0
        self._lock, self._open = threading.Lock(), threading.Event()

    def come(self) -> None:
        """Count one more client."""
        with self._lock:
            self.come_so_far += 1
            if self.come_so_far == self.many:
                self._open.set()

    @property
    def is_open(self) -> bool:
        """Return whether all clients have come."""
        return self._open.is_set()


class Clients:
    """A group of clients that ask one server at once, each with a thread and a prompt of its own.

    Args:
        server: the server that they ask.
        prompts: one prompt for each client.
        tokens: most tokens of an answer.
        steps: tokens that each reads once all answers have begun.
    """

    def __init__(self, server: PeerServer, prompts: Sequence[str], tokens: int, steps: int) -> None:
        self.server, self.prompts, self.tokens, self.steps = server, prompts, tokens, steps
        self.began, self.enough = Gate(len(prompts)), Gate(len(prompts))
        self.times = [list[float]() for _ in prompts]  # times of each client's tokens
        self.failure: PeerFailed | None = None  # the failure of the first client that failed
        self.ended = threading.Event()
        self.started = time.perf_counter()

    def __str__(self) -> str:
        tokens, seconds = sum(map(len, self.times)), time.perf_counter() - self.started
        return (
            f"{self.began.come_so_far} of {len(self.prompts)} clients had begun and {tokens:,} "
            f"tokens had come after {seconds:.0f} s"
        )

    def read(self) -> None:
        """Run all clients; print every `PROGRESS_S` seconds how many answers have begun.

        Raises:
            PeerFailed: a client failed; the message tells how far all had come.
        """
        with ThreadPoolExecutor(len(self.prompts) + 1) as threads:
            threads.submit(self._print_progress)
            try:
                each = zip(self.prompts, self.times, strict=True)
                wait([threads.submit(self._answer, prompt, times) for prompt, times in each])
            finally:
                self.ended.set()
        if self.failure is not None:
            raise self.failure

    def _print_progress(self) -> None:
        while not (self.ended.wait(PROGRESS_S) or self.began.is_open):
            print(f"kvcap: {self}", file=sys.stderr, flush=True)

    def _answer(self, prompt: str, times: list[float]) -> None:
        try:
            self._follow(_ask(self.server, prompt, self.tokens), times)
        except Exception as error:
            if self.failure is None:
                self.failure = PeerFailed(f"{str(error) or type(error).__name__}; {self}")
                self.server.process.kill()  # the other answers are of no use any more

    def _follow(self, response: http.client.HTTPResponse, times: list[float]) -> None:
        together = 0
        for at, text in pieces(response):
            if text:
                times.append(at)
                if len(times) == 1:
                    self.began.come()
                together += self.began.is_open
                if together == self.steps:
                    self.enough.come()
            if self.enough.is_open:
                response.close()
                return
        raise PeerFailed("an answer ended before all clients had answered together")


def _ask(server: PeerServer, prompt: str, tokens: int) -> http.client.HTTPResponse:
    return server.post(
        {"prompt": prompt, "stream": True, "temperature": 0, "max_tokens": tokens}, "completions"
    )


def _alone(server: PeerServer, work: ClientLoad) -> float:
    """Return the tokens per second of one client, after answers that warm the server up."""
    rates = list[float]()
    for _ in range(work.repeats + 1):
        stream = pieces(_ask(server, work.prompts[0], work.steps + 1))
        times = [at for at, text in stream if text]
        rates.append((len(times) - 1) / (times[-1] - times[0]))
    return median(rates[1:])


def _together(server: PeerServer, work: ClientLoad, clients: int, tokens: int) -> dict[str, Any]:
    """Return the figures of `clients` at once, whose answers have at most `tokens` tokens.

    Raises:
        PeerFailed: a client failed, or its answer ended too early.
    """
    at_once = Clients(server, work.prompts[:clients], tokens, work.steps)
    at_once.read()
    series = at_once.times
    start, end = max(times[0] for times in series), min(times[-1] for times in series)
    inside = [[at for at in times if start <= at <= end] for times in series]
    before = [[at for at in times if at <= start] for times in series]
    steps, reading = _gaps(inside), _gaps(before)
    return {
        "tok_s": sum(map(len, inside)) / (end - start),
        "p50_ms": median(steps),
        "p95_ms": _p95(steps),
        "most_ms": max(steps),
        "read_s": start - at_once.started,
        "reading_p95_ms": _p95(reading) if len(reading) > 1 else "",
    }


def _gaps(series: Sequence[Sequence[float]]) -> list[float]:
    """Return the milliseconds between neighbouring times of each series, in one list."""
    return [(later - sooner) * 1e3 for times in series for sooner, later in pairwise(times)]


def _p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1]


def _row(work: ClientLoad, server: str) -> dict[str, Any]:
    """Return a row without figures."""
    blank = dict.fromkeys(
        (
            "tok_s",
            "alone_tok_s",
            "gain",
            "p50_ms",
            "p95_ms",
            "most_ms",
            "read_s",
            "reading_p95_ms",
            "ratio",
            "why",
        ),
        "",
    )
    return {"server": server, "clients": work.clients, "n": work.length, **blank}


def _kvcap(work: ClientLoad, budget: int, policy: str) -> dict[str, Any]:
    row, many = _row(work, "kvcap"), str(work.clients)
    try:
        with kvcap_server(
            work.model,
            budget,
            "--block-size",
            str(work.block),
            "--policy",
            policy,
            "--max-together",
            many,
            "--max-conversations",
            many,
            "--max-queue",
            many,
            limit_s=LIMIT_S,
        ) as server:
            row["alone_tok_s"] = _alone(server, work)
            row |= _together(server, work, work.clients, ENDLESS)
            row["gain"] = row["tok_s"] / row["alone_tok_s"]
    except FAILURES as error:
        row["why"] = f"{type(error).__name__}: {error}"[:500]
    return row


def _peer(work: ClientLoad, python: str | None) -> dict[str, Any]:
    """Return the row of transformers, with half as many clients if the first try fails."""
    fitting = min(work.clients, _fitting(work))
    row, until = _row(work, "transformers"), time.monotonic() + PEER_S
    whys = [] if fitting == work.clients else [f"{fitting} of {work.clients} fit into its memory"]
    for clients in dict.fromkeys((fitting, fitting // 2)):
        if clients < 1:
            break
        try:
            row |= _peer_figures(work, clients, python, until, whys)
            break
        except FAILURES as error:
            whys.append(f"{clients} clients: {type(error).__name__}: {error}"[:500])
    row["why"] = "; ".join(whys)
    return row


def _peer_figures(
    work: ClientLoad, clients: int, python: str | None, until: float, whys: list[str]
) -> dict[str, Any]:
    blocks = math.ceil(clients * math.ceil((work.length + work.most) / PAGE) / (1 - FREE)) + 1
    with transformers_server(
        work.model,
        "--device",
        "cuda" if torch.cuda.is_available() else "cpu",
        "--cb-block-size",
        str(PAGE),
        "--cb-num-blocks",
        str(blocks),
        "--cb-max-batch-tokens",
        str(PASS),
        python=python,
        limit_s=max(1.0, until - time.monotonic()),
    ) as server:
        alone = _alone(server, work)
        began, ready = time.monotonic(), 1  # `_alone` has read the first prompt
        while ready < clients and time.monotonic() < began + READ_S:
            # With a second token, the last block of the prompt is cached, too.
            list(pieces(_ask(server, work.prompts[ready], 2)))
            ready += 1
        if ready < clients:
            whys.append(f"{ready} of {clients} prompts were read in {READ_S:.0f} s")
        figures = _together(server, work, ready, work.most)
    return {"clients": ready, "alone_tok_s": alone, **figures, "gain": figures["tok_s"] / alone}


def _fitting(work: ClientLoad) -> int:
    """Return how many clients' prompts and answers transformers can hold in free memory.

    It needs keys and values in 16 bits, and for one layer at a time a copy of them and another one
    repeated for every query head, and the mask.
    """
    config = work.config
    heads, queries = config["num_key_value_heads"], config["num_attention_heads"]
    vector = 2 * 2 * config["head_dim"]  # bytes of a key and a value
    kept = vector * heads * config["num_hidden_layers"] + 2 * PASS
    token = kept / (1 - FREE) + vector * (heads + queries)
    cuda = torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if cuda else free_memory().nbytes
    weights = sum(file.stat().st_size for file in Path(work.model).glob("*.safetensors"))
    return int(0.9 * (free - weights) / (token * (work.length + work.most)))
