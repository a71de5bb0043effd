r"""Asks competition mathematics: `math:PATH`, a `{"problem": …, "answer": …}` per line (MATH-500).

The model writes its reasoning, so the policy evicts the model's own text more than the prompt. The
last `\boxed{}` is compared with the answer. `--max-new-tokens` limits the text.

Hendrycks et al., 2021, https://arxiv.org/abs/2103.03874. The 500 problems:
Lightman et al., 2023, https://arxiv.org/abs/2305.20050.
"""

from __future__ import annotations

from kvcap.lab.quality.rows import Row, RowSample, RowsTask, find, rows_task

MAX_NEW_TOKENS = 2048
ASKS = "Please reason step by step, and put your final answer within \\boxed{}."


def from_file(path: str, part: str = "") -> RowsTask:
    """Return the task of a JSONL file of problems.

    Raises:
        ValueError: there is no such file, it is empty, or a row has no problem or answer.
    """
    if part:
        raise ValueError(f"task 'math' has no part {part!r}; give math:PATH")
    if not path:
        raise ValueError("task 'math' needs a file; give math:PATH, or --data PATH")
    return rows_task(find(path, "test.jsonl"), _sample, MAX_NEW_TOKENS)


def _sample(row: Row) -> RowSample:
    question = f"{row.text('problem')}\n\n{ASKS}"
    return RowSample("", question, row.texts("answer"), joint="", metric="math", where=row.where)
