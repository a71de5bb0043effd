"""Runs a user's own task: `file:PATH`, one JSON object per line.

A line is `{"context": …, "question": …, "answers": […]}`, or `{"messages": […], "answers": […]}`
with the question as the last message of a conversation. It may have `"metric"`, a name in
`metrics.METRICS`, and `"classes"`, the labels of the metric `classification`. `file/METRIC:PATH`
sets the metric of lines without one.
"""

from __future__ import annotations

from functools import partial

from kvcap.lab.quality.metrics import load_metric
from kvcap.lab.quality.rows import Row, RowSample, RowsTask, find, rows_task
from kvcap.runtime.errors import KvcapError
from kvcap.runtime.session.messages import checked_messages

MAX_NEW_TOKENS = 64


def from_file(path: str, part: str = "") -> RowsTask:
    """Return the task of a JSONL file; `part` is the metric of rows without one ('contains').

    Raises:
        ValueError: there is no such file or metric, the file is empty, or a row is invalid.
        ExtraMissing: a metric's package is not installed.
    """
    if not path:
        raise ValueError("task 'file' needs a file; give file:PATH, or --data PATH")
    metric = part or "contains"
    load_metric(metric)
    return rows_task(find(path), partial(_sample, metric=metric), MAX_NEW_TOKENS)


def _sample(row: Row, metric: str) -> RowSample:
    name = row.text("metric") if "metric" in row.given else metric
    try:
        load_metric(name)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
    classes = row.texts("classes") if "classes" in row.given else ()
    if name == "classification" and not classes:
        raise ValueError(f"{row.where} has no 'classes'; the metric classification needs all names")
    answers = row.texts("answers")
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{row.where}: an answer is empty, which any reply would contain")
    if "messages" in row.given:
        try:
            *before, last = checked_messages(row.given["messages"])
        except KvcapError as error:
            raise ValueError(f"{row.where}: {error}") from error
        earlier = tuple((message["role"], message["content"]) for message in before)
        return RowSample(
            "",
            last["content"],
            answers,
            joint="",
            before=earlier,
            metric=name,
            classes=classes,
            where=row.where,
        )
    question = row.text("question")
    if not question.strip():
        raise ValueError(f"{row.where}: 'question' is empty")
    return RowSample(
        row.text("context"), question, answers, metric=name, classes=classes, where=row.where
    )
