"""Asks the sets of LongBench, such as `longbench/hotpotqa:DIR`, and scores by its own metrics.

`DIR` has the benchmark's JSONL files or its `data.zip`; without it, `data.zip` comes from the hub.
Prompts, lengths of answers and metrics are in `longbench_sets.py`. A prompt beyond the length is
cut in the middle, as by the benchmark's script: its first and last tokens stay. In contrast to the
script, the chat template's tokens count.

Bai et al., 2024, https://arxiv.org/abs/2308.14508.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvcap.evals.quality.prompts import prompt_ids
from kvcap.lab.quality.longbench_sets import EVEN, SETS, Set
from kvcap.lab.quality.rows import Row, RowSample, RowsTask, find, rows_task
from kvcap.runtime.errors import first_line

HUB = "zai-org/LongBench"  # the hub's repository of data sets
ARCHIVE = "data.zip"


def from_file(path: str, part: str = "") -> RowsTask:
    """Return the set `part` of LongBench, such as 'hotpotqa', or 'hotpotqa_e' of LongBench-E.

    Args:
        path: a folder of the benchmark's files, its archive, or the set's own JSONL; '' is the
            hub's archive.
        part: the set's name.

    Raises:
        ValueError: there is no such set or file, or the file is broken.
        ExtraMissing: the metric's package is not installed.
    """
    known = [*SETS, *(f"{name}_e" for name in EVEN)]
    if part not in known:
        close = difflib.get_close_matches(part, known, n=1)
        hint = f"did you mean 'longbench/{close[0]}'?" if close else f"known: {', '.join(known)}"
        raise ValueError(f"LongBench has no set {part!r}; {hint}")
    kind = SETS[part.removesuffix("_e")]
    file, member = f"{part}.jsonl", f"data/{part}.jsonl"
    return rows_task(
        find(path, file, member, ARCHIVE) if path else _from_hub(),
        partial(_sample, kind=kind),
        kind.max_new_tokens,
        member,
        fit=shorten,
        read=_first_line if kind.first_line else str,
    )


def shorten(sample: RowSample, tokenizer: Any, length: int) -> RowSample:
    """Return the sample with the middle of its prompt cut out, so that it fits `length` tokens.

    Raises:
        ValueError: the half of the prompt that stays at its end has no room for the question.
    """
    size = len(prompt_ids(tokenizer, sample))
    if size <= length:
        return sample
    tail = f"{sample.joint}{sample.question}"
    ids = tokenizer(f"{sample.context}{tail}")["input_ids"]
    least = 2 * len(tokenizer(tail)["input_ids"]) + size - len(ids)
    kept = length - (size - len(ids))  # tokens without those of the chat template
    while (half := kept // 2) > 0:
        head, rest = (
            tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for part in (ids[:half], ids[-half:])
        )
        if not rest.endswith(tail):
            break
        cut = replace(sample, context=head + rest.removesuffix(tail))
        over = len(prompt_ids(tokenizer, cut)) - length
        if over <= 0:
            return cut
        kept -= over  # the joined halves may have more tokens than both
    raise ValueError(
        f"{sample.where}: --lengths {length:,} leaves no room for the question in its last half; "
        f"give about {least + 2:,} or more"
    )


def _sample(row: Row, kind: Set) -> RowSample:
    before, _, after = kind.template.partition("{context}")
    ending = after.replace("{input}", row.text("input"))
    question = ending.lstrip()
    classes = row.given.get("all_classes")
    return RowSample(
        before + row.text("context"),
        question,
        row.texts("answers"),
        joint=ending.removesuffix(question),
        chat=kind.chat,
        metric=kind.metric,
        classes=row.texts("all_classes") if classes or kind.metric == "classification" else (),
        where=row.where,
    )


def _first_line(reply: str) -> str:
    return reply.lstrip("\n").split("\n")[0]


def _from_hub() -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(HUB, ARCHIVE, repo_type="dataset"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{ARCHIVE} of {HUB} cannot be fetched from the hub ({first_line(error)}); download it "
            "and give --data FOLDER"
        ) from error
