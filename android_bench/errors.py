"""Every error of android_bench by name, as one tree; `ValueError` is what a user can get wrong.

```
AndroidError
├── PlanBroken       no plan, another schema, or files that are missing or were changed
├── PlanExists       the folder holds something already
├── ResultBroken     no result, another schema, or one that contradicts itself
├── RunFailed        the runner ended without a result
├── NotComparable    results that have no cell in common, or of other shapes
└── Regressed        a cell is slower than its baseline by more than was allowed
```
"""

from __future__ import annotations


class AndroidError(Exception):
    """Base of all."""


class PlanBroken(AndroidError, ValueError):
    """The folder holds no plan that can be run."""


class PlanExists(AndroidError, ValueError):
    """A plan is written into a new or empty folder only."""


class ResultBroken(AndroidError, ValueError):
    """The file is no result, or its parts contradict each other."""


class RunFailed(AndroidError):
    """The runner ended without a result."""


class NotComparable(AndroidError, ValueError):
    """The results cannot stand side by side."""


class Regressed(AndroidError):
    """A cell became slower by more than was allowed."""
