r"""Asks competition mathematics: `math:PATH`, one `{"problem": …, "answer": …}` a line (MATH-500).

The model thinks in writing, so that the policy acts on its own answer more than on the prompt; the
last `\boxed{}` is compared with the answer. `--max-new-tokens` says how much it may write.

Hendrycks et al., 2021, https://arxiv.org/abs/2103.03874. The 500 problems:
Lightman et al., 2023, https://arxiv.org/abs/2305.20050.
"""

from __future__ import annotations

from kvcap.evals.quality.rows import Row, RowSample, RowsTask, find, rows_task

MAX_NEW_TOKENS = 2048
ASKS = "Please reason step by step, and put your final answer within \\boxed{}."


def from_file(path: str, part: str = "") -> RowsTask:
    """Return the problems of a JSONL.

    Raises:
        ValueError: no such file, an empty one, or a row without problem or answer.
    """
    if part:
        raise ValueError(f"task 'math' has no part {part!r}; give math:PATH")
    if not path:
        raise ValueError("task 'math' needs a file; give math:PATH, or --data PATH")
    return rows_task(find(path, "test.jsonl"), _sample, MAX_NEW_TOKENS)


def _sample(row: Row) -> RowSample:
    asked = f"{row.text('problem')}\n\n{ASKS}"
    return RowSample("", asked, row.texts("answer"), joint="", metric="math", where=row.where)
