"""Measure recall: exact match of the model's greedy answers, by task and length.

An answer counts when the model's most likely token is right at each of its places, the end of the
turn included, given the true text before it; greedy decoding would then write just this answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokens

from kvcap.lab.pocket.corpus import TASKS, Message, facts, passage
from kvcap.lab.pocket.vocabulary import ASSISTANT, END, render
from kvcap.pocket import path

Talk = tuple[list[Message], list[int]]  # a conversation and which of its messages are scored
_QUESTIONS = 8


def stated(rng: Random, tokens: int, unfamiliar: float = 0.0) -> Talk:
    """Make a talk of eight facts, one a turn, then filler turns, then eight questions."""
    known = facts(rng, _QUESTIONS)
    talk: list[Message] = []
    for fact in known:
        talk += _turn(f"Please remember: {fact.key} is {fact.value}.", "Okay.")
    room = tokens - 35 * _QUESTIONS
    while room > 0:
        talk += _turn(" ".join(passage(rng, min(room, 500), unfamiliar)), "Okay.")
        room -= 500
    start = len(talk)
    for fact in rng.sample(known, _QUESTIONS):
        talk += _turn(fact.question, fact.answer)
    return talk, list(range(start + 1, len(talk), 2))


def pasted(rng: Random, tokens: int, unfamiliar: float = 0.0) -> Talk:
    """Make a talk of one pasted text with eight facts at random depths, then eight questions."""
    known = facts(rng, _QUESTIONS)
    text = passage(rng, tokens - 35 * _QUESTIONS, unfamiliar)
    for fact in known:
        text.insert(rng.randint(0, len(text)), fact.statement)
    chosen = rng.sample(known, _QUESTIONS)
    talk = _turn(f"{' '.join(text)}\n\n{chosen[0].question}", chosen[0].answer)
    for fact in chosen[1:]:
        talk += _turn(fact.question, fact.answer)
    return talk, list(range(1, len(talk), 2))


def _turn(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _first_answer(name: str) -> Callable[[Random, int], Talk]:
    def make(rng: Random, tokens: int) -> Talk:
        talk = TASKS[name](rng, tokens)[:2]
        return talk, [1]

    return make


PROBES: dict[str, Callable[[Random, int], Talk]] = {
    "told": stated,
    "pasted": pasted,
    "told, odd filler": lambda rng, tokens: stated(rng, tokens, 1.0),
    "pasted, odd filler": lambda rng, tokens: pasted(rng, tokens, 1.0),
    **{
        name: _first_answer(name)
        for name in ("multi_key", "multi_value", "multi_query", "needle", "variables")
    },
    "phone_book": _first_answer("phone_book"),
    "frequent": _first_answer("frequent"),
}


@torch.inference_mode()
def score(model: PreTrainedModel, tokenizer: Tokens, talk: Talk) -> list[bool]:
    """Return for each scored message of ``talk`` whether the model would say just that."""
    messages, wanted = talk
    ids = tokenizer(render(messages), return_tensors="pt").input_ids.to(model.device)
    guess = model(ids, use_cache=False).logits[0, :-1].argmax(-1)
    right = guess == ids[0, 1:]
    assistant, end = tokenizer.convert_tokens_to_ids([ASSISTANT, END])
    ends = (ids[0] == end).nonzero()[:, 0].tolist()
    starts = [
        ((ids[0, :stop] == assistant).nonzero()[-1, 0].item(), stop)
        for stop in (ends[i] for i in wanted)
    ]
    return [bool(right[start:stop].all()) for start, stop in starts]


def recall(
    model: PreTrainedModel, tokenizer: Tokens, probe: str, tokens: int, questions: int
) -> tuple[float, int]:
    """Return the share of right answers and their number, for texts of about ``tokens`` tokens."""
    rng = Random(f"evaluate/{probe}/{tokens}")
    results: list[bool] = []
    while len(results) < questions:
        results += score(model, tokenizer, PROBES[probe](rng, tokens))
    return sum(results) / len(results), len(results)


def main() -> None:
    """Print a table of recall by probe and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=path())
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--probes", nargs="+", default=list(PROBES), choices=list(PROBES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device).eval()
    print("| task |", " | ".join(f"{n:,}" for n in args.lengths), "|")
    for probe in args.probes:
        cells = (recall(model, tokenizer, probe, n, args.questions) for n in args.lengths)
        print(
            f"| {probe} |", " | ".join(f"{share:.2f} ({n})" for share, n in cells), "|", flush=True
        )


if __name__ == "__main__":
    main()
