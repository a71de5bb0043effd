"""Times a server under load: HTTP's cost per token, clients at once, and hostile clients.

Every row is measured at a process of `kvcap serve`, by clients that speak plain HTTP. The column
`row` names the kind:

- `overhead`: one client that reads a stream, alternating with a session in this process.
  `loop_us` is the processor time of the thread that serves HTTP, `work_us` that of all other
  threads, both per token. `loop_share` is the ratio of both, which should be at most 3 %.
- `together`: tokens per second of `clients` at once, and of clients one after another at a server
  that answers one at a time, in `repeats` turns; `ratio` is the median of the turns' ratios. For
  this row and `overhead` the model never ends an answer, so that each has `steps` tokens.
- `shared`: the time to the first token of a conversation with a system prompt of some four budgets,
  which an earlier one had, at a server that keeps copies behind system prompts (`ttft_ms`) and at
  one that keeps none (`read_ttft_ms`), in `repeats` turns; `ratio` is the median of the turns'
  ratios. `shared_tokens` of each prompt were copied.
- `load`: `conversations` of random length, up to 200 at once, under a memory cap. A tenth of the
  answers is left midway, and a tenth of the requests is hostile. `lost` counts requests without an
  answer, `foreign` answers with facts of another conversation; `peak_mib` is the process's peak.
- `killed`: the server is ended by SIGKILL at a random moment and started again, `kills` times.
  `dropped` counts saved conversations that could not be loaded, `restored` those that went on, with
  `reused` tokens that need not be read again; the last two are of servers that became idle.

Reads `budgets`, `steps`, `repeats` (turns of the first three rows), `conversations`, `kills`,
`model`.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import MIB
from kvcap.lab.peers.http_servers import PeerServer, endless, kvcap_server, pieces
from kvcap.lab.random_models import directory
from kvcap.runtime.errors import PeerFailed

DEFAULTS = {"budgets": (256,), "steps": 200, "repeats": 5, "model": "pocket"}
COLUMNS = (
    *("row", "clients", "requests", "tok_s", "ttft_ms", "ratio", "ratio_low", "ratio_high"),
    *("lost", "foreign", "peak_mib"),
)
CLIENTS, AT_ONCE = 8, 200
CAP_MIB = 1024
HOSTILE = (
    b"{",
    b"[" * 5000,
    b"\xff" * 99,
    b'{"messages": 1}',
    b'{"messages": [{"role": 5}]}',
    b'{"messages": [], "n": 1e999}',
    b'{"unknown": true}',
    b"null",
    b"",
)


def run(options: BenchmarkOptions) -> Result:
    """Return one row of each kind.

    Raises:
        PeerFailed: a server did not start, or ended.
    """
    model, budget = directory(options.model, options.files), options.budgets[0]
    with TemporaryDirectory() as folder:
        patient = endless(model, Path(folder, "endless"))
        with kvcap_server(patient, budget, "--max-together", "1") as server:
            overhead = _overhead(server, patient, budget, options.steps, options.repeats)
            with kvcap_server(patient, budget, "--max-together", str(CLIENTS)) as other:
                together = _together(server, other, options.steps, options.repeats)
        with (
            kvcap_server(model, budget, "--shared-prompts", "1") as server,
            kvcap_server(model, budget, "--shared-prompts", "0") as other,
        ):
            shared = _shared(server, other, 4 * budget, options.repeats)
        load = _load(model, budget, options.conversations)
        killed = _killed(model, budget, options.kills, Path(folder, "kept"))
    rows = [overhead, together, shared, load, killed]
    names = {name: None for row in rows for name in (*COLUMNS, *row)}
    return Result(
        "serve",
        COLUMNS,
        [{n: row.get(n, "") for n in names} for row in rows],
        {"model": options.model, "budget": budget},
    )


def _request_body(words: int, steps: int, number: int = 0) -> dict[str, Any]:
    text = f"Message {number}. " + "Tall grasses attract many bees. " * (words // 5)
    return {
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "temperature": 0,
        "max_tokens": steps,
    }


def _overhead(
    server: PeerServer, model: str, budget: int, steps: int, repeats: int
) -> dict[str, Any]:
    from kvcap.runtime.backends.pytorch.runtime import Runtime

    runtime = Runtime.from_pretrained(model, budget_tokens=budget)
    own, through, loops, works = list[float](), list[float](), list[float](), list[float]()
    for number in range(repeats + 1):
        session = runtime.session()
        session.set_generation(max_new_tokens=steps, temperature=0.0)
        list(session.send(_request_body(2 * budget, steps, number)["messages"][0]["content"]))
        turn = session.turn
        assert turn is not None
        stream = pieces(server.post(_request_body(2 * budget, steps, number)))
        next(stream)
        (begun, _), before = next(stream), server.processor()
        *_, (ended, _) = stream
        spent = {k: v - before.get(k, 0) for k, v in server.processor().items()}
        if number:  # the first turn warms up
            own.append(turn.decode_s / (steps - 1) * 1e3)
            through.append((ended - begun) / (steps - 1) * 1e3)
            loops.append(spent.pop(str(server.process.pid)) / (steps - 1) / 1e3)
            works.append(sum(spent.values()) / (steps - 1) / 1e3)
    ratios = [x / y for x, y in zip(through, own, strict=True)]
    return {
        "row": "overhead",
        "clients": 1,
        "requests": repeats,
        "tok_s": 1e3 / median(through),
        "ratio": median(ratios),
        "token_ms": median(through),
        "own_token_ms": median(own),
        "loop_us": median(loops),
        "work_us": median(works),
        "loop_share": median(x / y for x, y in zip(loops, works, strict=True)),
    }


def _seconds(server: PeerServer, steps: int, at_once: int) -> float:
    """Return the seconds that `CLIENTS` answers take, `at_once` of them at a time."""

    def answer(number: int) -> None:
        for _ in pieces(server.post(_request_body(400, steps, number))):
            pass

    answer(0)
    begun = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(answer, range(CLIENTS, 2 * CLIENTS)))
    return time.perf_counter() - begun


def _together(one: PeerServer, several: PeerServer, steps: int, repeats: int) -> dict[str, Any]:
    """Compare a server that answers `one` at a time with one for `several`, alternating."""
    serial, at_once = list[float](), list[float]()
    for _ in range(repeats):
        serial.append(_seconds(one, steps, 1))
        at_once.append(_seconds(several, steps, CLIENTS))
    tokens = CLIENTS * steps
    return {
        "row": "together",
        "clients": CLIENTS,
        "requests": CLIENTS * repeats,
        "tok_s": tokens / median(at_once),
        **_ratio(serial, at_once),
        "serial_tok_s": tokens / median(serial),
    }


def _ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, float]:
    """Return the median, least and greatest ratio of the times of each turn."""
    ratios = [x / y for x, y in zip(slower, faster, strict=True)]
    return {"ratio": median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}


def _first_token_s(server: PeerServer, words: int, number: int) -> float:
    """Return the seconds to the first token of a conversation with the system prompt of all."""
    body = _request_body(5, 1, number)
    system = {"role": "system", "content": _request_body(words, 1)["messages"][0]["content"]}
    body["messages"].insert(0, system)
    begun = time.perf_counter()
    first, *_ = (arrived for arrived, _ in pieces(server.post(body)))
    return first - begun


def _shared(copying: PeerServer, reading: PeerServer, words: int, repeats: int) -> dict[str, Any]:
    """Compare a server that copies a system prompt's slots with one that reads it, alternating."""
    copied, read = list[float](), list[float]()
    for number in range(repeats + 1):
        seconds = [_first_token_s(server, words, number) for server in (reading, copying)]
        if number:  # the first turn warms up, and leaves the copy
            read.append(seconds[0])
            copied.append(seconds[1])
    figures = copying.figures()
    return {
        "row": "shared",
        "clients": 1,
        "requests": repeats,
        "ttft_ms": median(copied) * 1e3,
        **_ratio(read, copied),
        "read_ttft_ms": median(read) * 1e3,
        "shared_tokens": int(figures["kvcap_shared_tokens_total"] / repeats),
    }


@dataclass
class Count:
    """Counts of the requests of a load, by their results."""

    requests: int = 0
    lost: int = 0
    foreign: int = 0
    recalled: int = 0
    questions: int = 0
    left: int = 0
    hostile: int = 0
    failed: int = 0  # hostile requests that were not refused
    why: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **more: int) -> None:
        """Add to the counts of these names."""
        with self.lock:
            for name, by in more.items():
                setattr(self, name, getattr(self, name) + by)


def _answered(server: PeerServer, messages: Sequence[Any], count: Count, stop: int | None) -> str:
    """Return the answer to messages; retry while the server is busy; leave after `stop` pieces."""
    while True:
        response = server.post({"messages": messages, "stream": True, "temperature": 0})
        if response.status != 429:
            break
        response.read()
        time.sleep(float(response.headers["Retry-After"]) * random.uniform(0.2, 1))
    if response.status != 200:
        raise PeerFailed(response.read().decode()[:200])
    answer = ""
    for number, (_, text) in enumerate(pieces(response)):
        answer += text
        if number == stop:
            response.close()
            count.add(left=1)
            break
    return answer


def _converse(server: PeerServer, code: int, codes: frozenset[str], count: Count) -> None:
    draw = random.Random(code)
    messages: list[dict[str, str]] = []
    turns = [f"Please remember: the code for the blue door is {code}."]
    turns += ["Tall grasses attract many bees. " * draw.randint(1, 20)] * draw.randint(0, 2)
    turns += ["What is the code for the blue door?"]
    try:
        for number, text in enumerate(turns):
            if draw.random() < 0.1:
                response = server.post(draw.choice(HOSTILE))
                response.read()
                count.add(requests=1, hostile=1, failed=int(response.status not in (400, 413)))
            messages.append({"role": "user", "content": text})
            last = number == len(turns) - 1
            stop = draw.randint(0, 4) if draw.random() < 0.1 and not last else None
            answer = _answered(server, messages, count, stop)
            messages.append({"role": "assistant", "content": answer or "Yes."})
            others = (codes - {str(code)}) & set(re.findall(r"\d{4}", answer))
            count.add(requests=1, foreign=int(bool(others)))
        count.add(questions=1, recalled=int(str(code) in messages[-1]["content"]))
    except Exception as error:
        count.add(requests=1, lost=1)
        count.why.add(f"{type(error).__name__}: {error}"[:200])


def _load(model: str, budget: int, conversations: int) -> dict[str, Any]:
    count, sizes = Count(), list[int]()
    codes = random.Random(0).sample(range(1000, 10000), conversations)
    known = frozenset(map(str, codes))
    with kvcap_server(model, budget, "--memory-cap", f"{CAP_MIB}MiB") as server:
        begun = time.perf_counter()
        with ThreadPoolExecutor(min(AT_ONCE, conversations)) as threads:
            for _ in threads.map(lambda code: _converse(server, code, known, count), codes):
                sizes.append(server.memory("VmRSS"))
        seconds, peak, figures = (
            time.perf_counter() - begun,
            server.memory("VmHWM"),
            server.figures(),
        )
    return {
        "row": "load",
        "clients": min(AT_ONCE, conversations),
        "requests": count.requests,
        "tok_s": figures["kvcap_completion_tokens_total"] / seconds,
        "lost": count.lost,
        "foreign": count.foreign,
        "peak_mib": peak / MIB,
        "cap_mib": CAP_MIB,
        "conversations": conversations,
        "recalled": count.recalled / max(1, count.questions),
        "left": count.left,
        "hostile": count.hostile,
        "not_refused": count.failed,
        "mib_at_half": sizes[len(sizes) // 2] / MIB,
        "mib_at_end": sizes[-1] / MIB,
        "places": int(figures["kvcap_places"]),
        "answering": int(figures["kvcap_answering"]),
        "why": "; ".join(sorted(count.why)),
    }


def _killed(model: str, budget: int, kills: int, kept: Path) -> dict[str, Any]:
    draw, count = random.Random(1), Count()
    codes = [draw.randint(1000, 9999) for _ in range(4)]
    known = frozenset(map(str, codes))
    chats: list[list[dict[str, str]]] = [[] for _ in codes]
    dropped = reused = restored = 0.0
    for _ in range(kills):
        with kvcap_server(model, budget, "--keep", str(kept)) as server:
            timer = threading.Timer(
                draw.uniform(0.5, 12), os.kill, (server.process.pid, signal.SIGKILL)
            )
            timer.start()
            figures: dict[str, float] = {}
            try:
                for who in draw.sample(range(len(codes)), len(codes)):
                    first = f"Please remember: the code for the blue door is {codes[who]}."
                    text = "What is the code for the blue door?" if chats[who] else first
                    messages = [*chats[who], {"role": "user", "content": text}]
                    answer = _answered(server, messages, count, None)
                    chats[who] = [*messages, {"role": "assistant", "content": answer}]
                    others = (known - {str(codes[who])}) & set(re.findall(r"\d{4}", answer))
                    count.add(requests=1, foreign=int(bool(others)))
                while True:  # waits until conversations are saved, as an idle server does
                    figures = server.figures()
                    time.sleep(0.2)
            except (OSError, http.client.HTTPException, PeerFailed):
                dropped += figures.get("kvcap_dropped_total", 0)
                restored += figures.get("kvcap_restored_total", 0)
                reused += figures.get("kvcap_reused_tokens_total", 0)
            timer.join()
    return {
        "row": "killed",
        "clients": 1,
        "requests": count.requests,
        "kills": kills,
        "foreign": count.foreign,
        "dropped": int(dropped),
        "restored": int(restored),
        "reused": int(reused),
    }
