"""Asks samples that RULER's own scripts prepared, such as `ruler/qa_1:DIR`, and scores like RULER.

`qa_1` asks about SQuAD and `qa_2` about HotpotQA. `DIR` is the output of `prepare.py`, with
`qa_1/validation.jsonl`, prepared with `--model_template_type base`, as kvcap adds the model's own
chat template. Prompts are not cut, so `--lengths` must have room for them and the chat template.

Hsieh et al., 2024, https://arxiv.org/abs/2404.06654, https://github.com/NVIDIA/RULER.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import partial

from kvcap.lab.quality.rows import Row, RowSample, RowsTask, find, rows_task


@dataclass(frozen=True)
class RulerFormat:
    """The format in which RULER asks and scores the tasks of one generator."""

    asks: str  # the beginning of the question, at its last occurrence in a prompt
    opens: str  # the beginning of the answer, which RULER writes for the model
    max_new_tokens: int
    metric: str = "contains_all"


NIAH = RulerFormat(
    "What ", " The special magic", 128
)  # as in "What are all the special magic numbers for …"
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
WRITTEN = re.compile(r"\[INST\]|<\||\[gMASK\]|<BOS_TOKEN>")  # beginnings of chat templates


def from_file(path: str, part: str = "") -> RowsTask:
    """Return the samples that RULER prepared for its task `part`, such as 'qa_1'.

    Args:
        path: the folder that RULER's `prepare.py` wrote to, or a JSONL file.
        part: the task, by its name in RULER's `synthetic.yaml`.

    Raises:
        ValueError: there is no such task or file, or the file is not RULER's.
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
    context, separator, question = text.rpartition(family.asks)
    if not separator:
        raise ValueError(f"{row.where}: no {family.asks!r} in 'input'; is it of another task?")
    if "answer_prefix" in row.given:
        opening = row.text("answer_prefix")
    else:  # earlier versions of RULER leave the opening in the prompt
        question, begins, rest = question.partition(family.opens)
        opening = begins + rest
    shown = context.rstrip()
    return RowSample(
        shown,
        separator + question,
        row.texts("outputs"),
        joint=context.removeprefix(shown),
        opening=opening,
        metric=family.metric,
        where=row.where,
    )


def _printable(reply: str) -> str:
    """Return a reply with line ends in place of control characters, as RULER reads it."""
    return re.sub(r"[\x00-\x1f]", "\n", reply.strip()).strip()
