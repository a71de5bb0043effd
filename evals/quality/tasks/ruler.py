"""Samples that RULER's own scripts prepared: `ruler/qa_1:DIR`, scored as RULER scores them.

`qa_1` asks about SQuAD and `qa_2` about HotpotQA. `DIR` is what `prepare.py` wrote, with
`qa_1/validation.jsonl`, prepared with `--model_template_type base`: the model's own chat template
is written here. Nothing is cut: `--lengths` must hold what RULER prepared, and the chat template.

Hsieh et al., 2024, https://arxiv.org/abs/2404.06654, https://github.com/NVIDIA/RULER.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import partial

from kvcap.evals.quality.rows import Row, RowSample, RowsTask, find, rows_task


@dataclass(frozen=True)
class RulerFormat:
    """A format in which RULER asks and scores the tasks of one generator."""

    asks: str  # how the question begins: the last place where this stands in a prompt
    opens: str  # how the answer begins, which RULER writes for the model
    max_new_tokens: int
    metric: str = "contains_all"


NIAH = RulerFormat(
    "What ", " The special magic", 128
)  # "What are all the special magic numbers for …"
FAMILIES = {
    **dict.fromkeys(
        (
            "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1",
            "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery",
        ),
        NIAH,
    ),
    "vt": RulerFormat("Question: Find all variables", " Answer:", 30),
    "cwe": RulerFormat("Question: What are the 10 most common words", " Answer:", 120),
    "fwe": RulerFormat("Question: Do not provide any explanation.", " Answer:", 50),
    **dict.fromkeys(
        ("qa_1", "qa_2"), RulerFormat("Answer the question based on", " Answer:", 32, "contains")
    ),
}  # fmt: skip
WRITTEN = re.compile(r"\[INST\]|<\||\[gMASK\]|<BOS_TOKEN>")  # how chat templates begin


def from_file(path: str, part: str = "") -> RowsTask:
    """Return the samples that RULER prepared of its task `part`, such as 'qa_1'.

    Args:
        path: of the folder that RULER's `prepare.py` wrote to, or of a JSONL.
        part: the task, by the name in RULER's `synthetic.yaml`.

    Raises:
        ValueError: no such task or file, or one that is not RULER's.
    """
    if part not in FAMILIES:
        close = difflib.get_close_matches(part, FAMILIES, n=1)
        hint = f"did you mean 'ruler/{close[0]}'?" if close else f"known: {', '.join(FAMILIES)}"
        raise ValueError(f"RULER has no task {part!r}; {hint}")
    if not path:
        raise ValueError(
            f"task 'ruler/{part}' needs the folder that RULER's prepare.py wrote; give "
            f"ruler/{part}:DIR, or --data DIR"
        )
    family = FAMILIES[part]
    return rows_task(
        find(path, f"{part}/validation.jsonl", f"{part}.jsonl", "validation.jsonl"),
        partial(_sample, family=family),
        family.max_new_tokens,
        read=_printable,
    )


def _sample(row: Row, family: RulerFormat) -> RowSample:
    text = row.text("input")
    if WRITTEN.match(text):
        raise ValueError(
            f"{row.where} was prepared with a chat template; prepare it with "
            "--model_template_type base, as the model's own template is written here"
        )
    context, found, question = text.rpartition(family.asks)
    if not found:
        raise ValueError(f"{row.where}: no {family.asks!r} in 'input'; is it of another task?")
    if "answer_prefix" in row.given:
        opening = row.text("answer_prefix")
    else:  # earlier versions of RULER leave it in the prompt
        question, begins, rest = question.partition(family.opens)
        opening = begins + rest
    shown = context.rstrip()
    return RowSample(
        shown,
        found + question,
        row.texts("outputs"),
        joint=context.removeprefix(shown),
        opening=opening,
        metric=family.metric,
        where=row.where,
    )


def _printable(reply: str) -> str:
    """Return a reply with line ends for control characters, as RULER reads it."""
    return re.sub(r"[\x00-\x1f]", "\n", reply.strip()).strip()
