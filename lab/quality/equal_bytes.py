"""Measures one side of `kvcap bench equal-bytes`: some samples of a row, in a process of its own.

Both sides run by llama.cpp's library, with equally many cells in equally many bytes, and read the
same tokens. PyTorch is imported for rows of quality alone, so that a process' peak is without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvcap.evals.quality.prompts import (
    Sample,
    has_template,
    prompt_ids,
    prompt_parts,
    tokens_to_say,
)
from kvcap.evals.quality.text import has_word, number_facts
from kvcap.lab.peers.llama_versions import described
from kvcap.lab.peers.process import same_imports
from kvcap.lab.peers.serve import peak
from kvcap.lab.quality.tasks import load_task, make_samples
from kvcap.runtime.backends.llamacpp.loop import LlamaCache, LlamaLoop
from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import PeerFailed
from kvcap.runtime.memory.free_memory import process_bytes
from kvcap.runtime.session.session import Session
from kvcap.runtime.session.settings import end_tokens

KVCAP, SHIFTED = "kvcap", "llama.cpp"
SIDES = (KVCAP, SHIFTED)
PERPLEXITY, CHAT, TIME = "perplexity", "chat", "time"
KEPT = 4  # first tokens that a context shift leaves, as many as kvcap pins
SEED = 7  # of prompts
SCORED = 4  # of a text the last part of so many is scored
PIECE = 4  # samples of a process, for which there is one text, and one chat
TURNS = 20  # of a chat: by turns a fact and other text
TEXT_TURN = 250  # about the tokens of other text in a turn
REPLY, ANSWER, DECODED = 16, 32, 32  # tokens


@dataclass(frozen=True)
class SideWork:
    """A description of one measurement, by which its result is known again."""

    model: str
    row: str  # PERPLEXITY, CHAT, TIME or a task
    side: str
    cells: str  # their type: f16, q8_0 or q4_0
    budget: int  # cells of float16 whose bytes both sides have
    kv_bytes: int
    policy: str | None
    block_size: int
    threads: int
    length: int  # tokens of a prompt or text
    samples: int  # of the whole row
    text: str | None = None  # a file, for perplexity
    first: int = 0  # sample; this one and those that follow are measured, a PIECE of them
    turn: int = 0  # of several that are timed

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> SideWork:
        """Return the work that a measured row names."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


class ShiftedCache(LlamaCache):
    """A cache of llama.cpp that is full before it frees cells, and shifts as its own tools do.

    They keep the first tokens, drop half of the rest, and move the other half up.
    """

    def evict(self) -> None:
        """Drop the older half of all tokens behind the first ones."""
        stays = np.ones(self.held, bool)
        stays[KEPT : KEPT + (self.held - KEPT) // 2] = False
        self._keep(stays)


class ShiftedRuntime(LlamaRuntime):
    """A GGUF file whose conversations use all their cells, and shift their context."""

    def loop(self) -> LlamaLoop:
        """Return a loop over an empty context."""
        context, plan = self.make_context(1), self.plan
        cache = ShiftedCache(context, self.ranking, context.cells, plan.positions)
        return LlamaLoop(cache, plan.block_size, 1)


def measured(work: SideWork) -> dict[str, Any]:
    """Measure in a new process; return the work with its figures.

    Raises:
        PeerFailed: the process ended before.
    """
    done = subprocess.run(
        [sys.executable, "-c", f"{same_imports()}from {__name__} import main; main()"],
        input=json.dumps(asdict(work)),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    if done.returncode:
        raise PeerFailed(
            f"{work.side} with {work.cells} cells ended with code {done.returncode} in row "
            f"{work.row}: {last}"
        )
    return {**asdict(work), **json.loads(last)}


def main() -> None:
    """Read a work from stdin, and print its figures as a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that output of libraries does not mix with the answer
    result = figures(SideWork.of(json.load(sys.stdin)))
    print(json.dumps(result), file=answers, flush=True)


def figures(work: SideWork) -> dict[str, Any]:
    """Load the model, and return the figures of the work."""
    before = process_bytes()
    runtime = _runtime(work)
    session = runtime.session(seed=0)
    how = {PERPLEXITY: _perplexity, CHAT: _chat, TIME: _time}.get(work.row, _answers)
    scores = how(work, session)
    library = runtime.gguf.library
    return {
        **scores,
        "slots": session.loop.cache.budget,
        "held_bytes": session.cache.nbytes,
        "recall": session.recall.limit,
        "before_bytes": before,  # of Python and kvcap
        "peak_bytes": peak(),
        "versions": {**described(library.file), "library": library.label},
    }


def _runtime(work: SideWork) -> LlamaRuntime:
    """Return the file with as many cells as the bytes hold; llama.cpp itself recalls nothing."""
    kind: Any = None if work.cells == "f16" else work.cells
    sizes = CacheSettings(
        kv_budget=work.kv_bytes, block_size=work.block_size, kv_dtype=kind, evict_every=None
    )
    mine = work.side == KVCAP
    return (LlamaRuntime if mine else ShiftedRuntime).from_file(
        work.model,
        work.policy if mine else None,
        sizes,
        threads=work.threads,
        recall_store=None if mine else 0,
        all_logits=work.row == PERPLEXITY,
    )


def _samples(work: SideWork, session: Session, task: str, each: int = 1) -> list[Sample]:
    """Return this piece's samples, one for every `each` samples of the row."""
    start, stop = work.first // each, -(-min(work.first + PIECE, work.samples) // each)
    count = -(-work.samples // each)  # depths depend on it
    return make_samples(task, session.runtime.tokenizer, work.length, count, SEED)[start:stop]


def _digest(prompts: Sequence[Sequence[int]]) -> int:
    """Return a number that differs if any token does: both sides must have read the same."""
    return zlib.crc32(json.dumps([list(map(int, ids)) for ids in prompts]).encode())


def _perplexity(work: SideWork, session: Session) -> dict[str, Any]:
    """Return the mean loss over a text's last part, its unit and the prompt's digest."""
    from kvcap.evals.quality.llama_answering import losses

    task = "perplexity" if work.text is None else f"perplexity:{work.text}"
    (text,) = _samples(work, session, task, PIECE)
    ids, start = np.array(text.ids, np.int64)[None], work.length - work.length // SCORED
    loss = losses(session.loop, [ids[:, :start], ids[:, start:]]).mean()  # type: ignore[arg-type]
    return {"unit": "perplexity", "scores": [float(loss)], "digest": _digest([text.ids or ()])}


def _answers(work: SideWork, session: Session) -> dict[str, Any]:
    """Return the scores of answers to a task's questions."""
    from kvcap.evals.quality.answering import split_at_question
    from kvcap.evals.quality.llama_answering import answer

    task, tokenizer = load_task(work.row), session.runtime.tokenizer
    samples = _samples(work, session, work.row)
    limit = task.MAX_NEW_TOKENS
    if not has_template(tokenizer):  # a base model does not end its answer
        limit = min(limit, max(tokens_to_say(tokenizer, sample) for sample in samples))
    prompts, scores = [prompt_ids(tokenizer, sample) for sample in samples], []
    stops = end_tokens(session.runtime.generation)
    recall = session.recall if session.recall.limit else None
    loop: Any = session.loop
    for sample, ids in zip(samples, prompts, strict=True):
        loop.cache.reset()
        parts: tuple[Any, ...] = (ids,)
        if recall is not None:
            _, parts = split_at_question(tokenizer, recall, (sample, parts))
        read = [np.array([part], np.int64) for part in parts]
        reply = answer(loop, read, limit, stops, recall)
        scores.append(task.score(sample, tokenizer.backend_tokenizer.decode(reply)))
    return {"unit": "share", "scores": scores, "digest": _digest(prompts)}


def _chat(work: SideWork, session: Session) -> dict[str, Any]:
    """Return which facts of a chat are known at its end."""
    from kvcap.evals.quality.demo import licences

    messages, needless = list[str](), 0

    def say(text: str, limit: int) -> str:
        session.set_generation(do_sample=False, max_new_tokens=limit)
        messages.append(text)
        return "".join(session.send(text))

    rng, paragraphs = Random(f"equal-bytes/{SEED}/{work.first // PIECE}"), licences()
    facts = number_facts(rng, TURNS // 2)
    for fact in facts:
        say(f"Please remember: {fact.key} is {fact.value}.", REPLY)
        text = next(paragraphs)
        while len(session.encode(text)) < TEXT_TURN:
            text += f"\n\n{next(paragraphs)}"
        say(text, REPLY)
        needless += bool(session.turn and session.turn.recalled_tokens)
    shuffled = rng.sample(facts, len(facts))
    return {
        "unit": "share",
        "scores": [float(has_word(say(x.question, ANSWER), x.value)) for x in shuffled],
        "needless": needless,  # messages of other text for which some was recalled
        "digest": _digest([session.encode(text) for text in messages]),
    }


def _time(work: SideWork, session: Session) -> dict[str, Any]:
    """Return the seconds until a question's first token, and tokens a second from then on."""
    (sample,) = _samples(replace(work, samples=1), session, "niah_single_2")
    text, question = map(list, prompt_parts(session.runtime.tokenizer, sample, "after"))
    loop, recall = session.loop, session.recall
    loop.prefill(np.array([text], np.int64))
    began = time.perf_counter()
    again = recall.insert(loop.cache, question, text, len(text)) if recall.limit else []
    token = int(loop.prefill(np.array([[*again, *question]], np.int64))[0].argmax())
    first = time.perf_counter()
    for _ in range(DECODED):
        token = int(loop.read(np.array([[token]], np.int64))[0].argmax())
    took = time.perf_counter() - first
    return {
        "ttft_s": first - began,
        "decode_tok_s": DECODED / took,
        "digest": _digest([text, question]),
    }


def read_rows(file: Path) -> dict[SideWork, dict[str, Any]]:
    """Return the rows of a file by their work; a last line that is cut is left out."""
    rows: dict[SideWork, dict[str, Any]] = {}
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    for line in lines:
        row = json.loads(line)
        rows[SideWork.of(row)] = row
    return rows
