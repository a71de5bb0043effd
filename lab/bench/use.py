"""Times what a user waits for: first answers of a machine, a process, a session, by policy.

Every process is started for its row, loads the model as `kvcap generate` does, and answers three
sessions: each reads a text of `lengths` words, which are `prompt_tokens` tokens, and writes
`steps`. `ttft` is the time from making the session to the first piece of text, `decode` the tokens
per second from then on. The column `run` names the case:

- `first`: a process on a machine where no kernel was compiled; `warmed`: after `kvcap warm`.
- `process`: the next process on that machine; `session`: its second session; `again`: its third.
- `slowly`: that process, for a reader that takes 1 ms for every piece of text, as a server or a
  terminal may; `sampled`: with temperature 0.7, top_k 50 and top_p 0.9. These rows have `decode`
  only, after short texts, as only the number of held tokens matters.
- `together`: 16 sessions of unequal history answered at once by that process (`runtime.batch`),
  with the tokens per second of all; `together-sampled`: the same with those sampling settings.

`load_ms` is from the start of the process until the model is loaded. Only the first of `policies`
has machines and processes of its own. One process answers the others one after another, in three
sessions each once their kernels are compiled; the second and the third have rows. A policy that
fails is left out, and the reason is printed. A policy that needs a table of heads gets one of
arbitrary numbers. An answer ends early after 30 seconds; Ctrl-C ends the benchmark with the rows
measured so far. Reads `lengths`, `budgets`, `policies`, `block_size`, `steps`, `repeats`, `model`,
`files`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.quality.tune import spelled_out
from kvcap.lab.peers.process import same_imports
from kvcap.lab.random_models import directory
from kvcap.runtime.errors import PeerFailed, first_line

DEFAULTS = {
    "lengths": (36_000,), "budgets": (2048,), "block_size": 512, "steps": 400, "repeats": 1,
    "model": "random-3b", "files": Path("out/use"),
}  # fmt: skip
COLUMNS = ("work", "policy", "run", "n", "budget", "ms", "tok_s", "load_ms", "turns", "execution")
LATER = ("process", "session", "again", "slowly", "sampled", "together", "together-sampled")
WARM, DECODED = LATER[1:3], LATER[3:]
TOGETHER = 16
PAUSE = 0.001  # seconds that a reader takes for a piece of text
DRAWN = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 50,
    "top_p": 0.9,
    "seed": 0,
    "eos_token_id": None,
}
MOST_SECONDS = 30
KERNELS = "TRITON_CACHE_DIR"  # the environment variable of Triton's folder of compiled kernels


def run(options: BenchmarkOptions) -> Result:
    """Return rows of `ttft` and `decode` for every policy, setting and run.

    Raises:
        ValueError: the model is no directory.
        PeerFailed: a process ended before it had answered.
    """
    model = directory(options.model, options.files)
    rows: list[dict[str, Any]] = []
    first, *others = spelled_out(options.policies)
    for budget, n in product(options.budgets, options.lengths):
        settings = {
            "model": model,
            "policy": first,
            "budget": budget,
            "block_size": options.block_size,
            "n": n,
            "steps": options.steps,
        }
        by_run: dict[tuple[str, str], list[dict[str, Any]]] = {}
        try:
            for _ in range(options.repeats):
                machine = ((first, run, answer) for run, answer in _machine(settings))
                for policy, run, answer in chain(machine, _of_others(settings, others)):
                    by_run.setdefault((policy, run), []).append(answer)
                    print(f"kvcap: {_line(answer, policy, run)}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("kvcap: interrupted; these are the rows so far", file=sys.stderr, flush=True)
        for (policy, run), answers in by_run.items():
            rows += _rows({**settings, "policy": policy}, run, answers, options.model)
    return Result("use", COLUMNS, rows, {"model": options.model})


def _machine(settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of a run and an answer, on a machine where no kernel was compiled."""
    with TemporaryDirectory(prefix="kvcap-use-") as empty:
        yield from zip(("first",), _answers(settings, empty, sessions=1), strict=True)
        yield from zip(LATER, _answers(settings, empty, sessions=3, together=TOGETHER), strict=True)
    if torch.cuda.is_available():
        with TemporaryDirectory(prefix="kvcap-use-") as empty:
            sizes = ["--budget-tokens", settings["budget"], "--block-size", settings["block_size"]]
            command = ["warm", settings["model"], "--policy", settings["policy"], *map(str, sizes)]
            deque(_process("from kvcap.cli import main; main()", command, empty))
            yield from zip(("warmed",), _answers(settings, empty, sessions=1), strict=True)


def _of_others(
    settings: Mapping[str, Any], policies: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield policy, run and answer, of one process that answers under one policy after another."""
    if not policies:
        return
    with TemporaryDirectory(prefix="kvcap-use-") as empty:
        answers = _answers(settings, empty, sessions=3, others=policies)
        for policy, answer, *later in zip(policies, answers, answers, answers, strict=True):
            if why := answer.get("failed"):
                print(f"kvcap: {policy} gave no answer: {why}", file=sys.stderr, flush=True)
            else:
                yield from ((policy, *measured) for measured in zip(WARM, later, strict=True))


def _answers(
    settings: Mapping[str, Any],
    kernels: str,
    sessions: int,
    together: int = 0,
    others: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the figures that a process prints of its `sessions`, and of `together` at once.

    With `others`, it has so many sessions under each of these policies instead.
    """
    code = "from kvcap.lab.bench.use import answer; answer()"
    given = {**settings, "sessions": sessions, "together": together, "others": list(others)}
    given["started"] = time.time()
    yield from map(json.loads, _process(code, [json.dumps(given)], kernels))


def _process(code: str, arguments: list[str], kernels: str) -> Iterator[str]:
    """Yield the lines that a Python process prints for `code`, with that folder of kernels."""
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-c", same_imports() + code, *arguments],
            env={**os.environ, KERNELS: kernels},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield from process.stdout
        except BaseException:
            process.kill()
            raise
        if process.wait():
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise PeerFailed(f"a process ended with code {process.returncode}: {last[0]}")


def answer() -> None:
    """Answer the sessions of the settings in the process's argument; print the time of each."""
    from kvcap.evals.reports import device_name, versions
    from kvcap.runtime.backends.pytorch.runtime import Runtime
    from kvcap.runtime.session.settings import copied

    settings = json.loads(sys.argv[1])
    runtime = Runtime.from_pretrained(
        settings["model"],
        settings["policy"],
        budget_tokens=settings["budget"],
        block_size=settings["block_size"],
    )
    load_ms = 1000 * (time.time() - settings["started"])
    runtime.generation.do_sample, runtime.generation.max_new_tokens = False, settings["steps"]
    words = runtime.tokenizer.convert_ids_to_tokens(range(runtime.vocabulary))[3:]
    about = {
        "load_ms": load_ms,
        "device": device_name(runtime.model.device),
        "versions": versions(),
    }

    def say(answers: list[dict[str, Any]]) -> None:
        for one in answers:
            print(json.dumps(one | about), flush=True)

    def of(policy: str) -> list[dict[str, Any]]:
        its = runtime if policy == settings["policy"] else _under(runtime, policy)
        if settings["others"] and its.model.device.type == "cuda":
            its.warm()
        each = range(settings["sessions"])
        return [_answered(its, words, i, settings["n"], its.generation) for i in each]

    def of_other(policy: str) -> list[dict[str, Any]]:
        try:
            return of(policy)
        except Exception as error:
            return [{"failed": first_line(error)}] * int(settings["sessions"])

    for policy in settings["others"]:
        say(of_other(policy))
    if not settings["others"]:
        say(mine := of(settings["policy"]))
        if settings["together"]:
            usual, short = runtime.generation, _short(settings)
            (drawn := copied(usual)).update(**DRAWN)
            for figures in (
                _answered(runtime, words, 0, short, usual, PAUSE),
                _answered(runtime, words, 0, short, drawn),
                _together(runtime, words, settings, usual),
                _together(runtime, words, settings, drawn),
            ):
                say([{**mine[-1], **figures, "ttft_ms": None}])


def _under(runtime: Any, policy: str) -> Any:
    """Return a runtime of the same model under another policy."""
    options = runtime.policies()[policy]
    if "table" not in options:
        return runtime.with_policy_name(policy, {})
    from kvcap.runtime.models.config import ModelShape

    shape = ModelShape.of(runtime.model.config.get_text_config(decoder=True))
    layers, heads = range(len(shape.capped)), range(shape.heads)
    scores = [[1 + (7 * layer + 3 * head) % 5 for head in heads] for layer in layers]
    table = Path(os.environ[KERNELS], "heads.json")
    table.write_text(json.dumps({"model": runtime.name, "kind": "heads", "scores": scores}))
    return runtime.with_policy_name(policy, {"table": str(table)})


def _answered(
    runtime: Any,
    words: Sequence[str],
    number: int,
    n: int,
    generation: Any,
    pause: float = 0.0,
) -> dict[str, Any]:
    """Return how fast a session answers a random text.

    Args:
        runtime: the model and its cap.
        words: the model's tokens that are words.
        number: seed of the text.
        n: words of the text.
        generation: settings of the answer.
        pause: seconds that the reader takes after every piece of text.
    """
    from random import Random

    text = " ".join(Random(number).choices(words, k=n))
    begun = time.perf_counter()
    session = runtime.session(generation=generation)
    pieces = session.complete(text)
    next(pieces)
    first = time.perf_counter()
    for _ in pieces:
        if pause:
            time.sleep(pause)
        if time.perf_counter() - first > MOST_SECONDS:
            break
    last, stats = time.perf_counter(), session.stats
    assert stats.turn is not None
    return {
        "ttft_ms": 1000 * (first - begun),
        "tok_s": (stats.turn.completion_tokens - 1) / (last - first),
        "tokens": stats.turn.completion_tokens,
        "prompt_tokens": stats.turn.prompt_tokens,
        "execution": stats.execution or "eager",
    }


def _short(settings: Mapping[str, Any]) -> int:
    """Return how many words fill all slots."""
    return int(settings["budget"] + 2 * settings["block_size"])


def _together(
    runtime: Any, words: list[str], settings: Mapping[str, Any], generation: Any
) -> dict[str, Any]:
    """Return the tokens per second of all sessions together, once all answers have begun."""
    from random import Random

    batch = runtime.batch(settings["together"])
    for number in range(settings["together"]):
        tokens = _short(settings) + 100 * number
        session = runtime.session(generation=generation)
        text = " ".join(Random(number).choices(words, k=tokens))
        pieces = session.complete(text)
        next(pieces)  # reads the prompt
        batch.add(session, pieces)
    for _ in range(settings["together"]):  # every step begins one more answer
        batch.step()
    begun, tokens, going = time.perf_counter(), 0, True
    while going and time.perf_counter() - begun < MOST_SECONDS:
        ended = [progress for progress in batch.step() if progress.ended]
        going = not ended
        tokens += going * settings["together"]
    seconds = time.perf_counter() - begun
    how = "by turns: " + batch.why_one_by_one if batch.why_one_by_one else "at once"
    return {"tok_s": tokens / seconds, "tokens": tokens, "execution": how}


def _rows(
    settings: Mapping[str, Any], run: str, answers: list[dict[str, Any]], model: str
) -> Iterator[dict[str, Any]]:
    shared = {name: settings[name] for name in ("policy", "n", "budget", "block_size")}
    about = {name: answers[0][name] for name in ("execution", "device", "versions")}
    works = [("ttft", "ttft_ms"), ("decode", "tok_s")]
    shared["sessions"] = TOGETHER if run.startswith("together") else 1
    for work, name in works[run in DECODED :]:
        values = [answer[name] for answer in answers]
        figures: dict[str, Any] = {"ms": None, "tok_s": None, "load_ms": None}
        if work == "ttft":
            figures["ms"] = median(values)
            figures["load_ms"] = median(answer["load_ms"] for answer in answers)
            figures["prompt_tokens"] = median(answer["prompt_tokens"] for answer in answers)
        else:
            figures["tok_s"] = median(values)
            figures["tokens"] = answers[0]["tokens"]
        spread = {"least": min(values), "most": max(values), "turns": len(values)}
        yield {"work": work, "run": run, **shared, **figures, **spread, "model": model, **about}


def _line(answer: Mapping[str, Any], policy: str, run: str) -> str:
    first = "" if answer["ttft_ms"] is None else f"{answer['ttft_ms']:.0f} ms to the first token, "
    return f"{policy}, {run}: {first}{answer['tok_s']:.0f} tokens/s, {answer['execution']}"
