"""Defines every error that kvcap raises by name, as one tree.

```
KvcapError
├── UnsupportedModel        the model, its attention or its positions cannot be run under a cap
├── PlanInfeasible          no setting fits what was asked; names the largest that does
├── MemoryCapExceeded       reading on would pass the cap; nothing was read
│   └── BlockTooLarge       one block does not fit the block's slots; read in smaller blocks
├── PositionMismatch        tokens arrived at positions the cache does not expect
├── CacheMismatch           a cache allocated for another batch size, type or device
├── PaddingUnsupported      a padded or custom attention mask
├── EmptyPrompt             nothing to read
├── TokenUnknown            a text has a token that the model has no embedding of; nothing was read
├── MessagesInvalid         no chat messages, or some that cannot follow the conversation
├── ModelNotFound           no directory, repository or config of that name
├── ModelFilesBroken        a model's files are missing, broken, or would have to run code
├── ChatTemplateMissing     the tokenizer has no chat template, or none that can be used
├── SchemaRefused           answers cannot be held to a JSON schema or regular expression
├── StoreFailed             the file for evicted tokens cannot be made
├── PinsTooLarge            pinned tokens need more slots than a head has; nothing was read
├── SessionNotSaved         the session's file cannot be written; an earlier one is as it was
├── SessionFileError        a session's file cannot be taken; nothing was changed
│   ├── SessionFileCorrupt  it is no session's file, was cut short, or was changed
│   ├── SessionFileForeign  it was saved by another model, or under settings that cannot take it
│   └── SessionFileNewer    it was saved by a newer kvcap
├── LogitsBroken            the model's logits are NaN or infinite; no token was drawn
├── SessionBroken           a forward pass failed half-way; reset the session
├── Busy                    more is asked of a server than can wait; says when to ask again
├── ConversationUnknown     a server has no such conversation of that owner in memory
├── ReaderTooSlow           a server's answer was ended, as nobody read it
├── ReplicaLost             the process of a cluster that answered has gone
├── PortTaken               a server cannot listen on its address
├── ExtraMissing            a package is not installed; names the extra that brings it
├── LibraryUnusable         a build of llama.cpp cannot be used; names what would work
├── CellsFailed             some cells of a sweep could not be measured; the others are kept
├── WorkersLost             processes that were to share work ended by themselves
├── NothingRecommended      every policy that was measured is worse than random eviction
├── PeerFailed              a benchmark's peer cannot be run, or ended; nothing was measured
├── NotExportable           there is no graph of that policy, stage or formulation
├── ExportExists            something else was exported to that place; nothing was replaced
├── ShapeError              a graph has other inputs or outputs than its manifest says
├── ToleranceError          a graph's results differ from its policy's
└── ManifestError           a manifest is missing, broken, or describes another file
    └── GraphBroken         ONNX Runtime cannot load the graph
PolicyError (ValueError)    no such policy or option, or pins that do not fit (kvcap.policies)
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KvcapError(Exception):
    """A base class of all named errors; those that bad input causes are `ValueError`s too."""


class UnsupportedModel(KvcapError, ValueError):
    """The model cannot be run under a cap; the message says which can."""


class PlanInfeasible(KvcapError, ValueError):
    """No setting fits what was asked; the message names what would.

    Args:
        message: what was asked, and what would fit.
        least: the same in bytes, by the name of the option that was too small, where it is known.
    """

    def __init__(self, message: str, **least: int) -> None:
        super().__init__(message)
        self.least = least


class MemoryCapExceeded(KvcapError):
    """Reading on would pass the cap. Nothing was read, and the session is as it was."""


class BlockTooLarge(MemoryCapExceeded, ValueError):
    """One block has more tokens than slots are kept free for it."""


class PositionMismatch(KvcapError, ValueError):
    """Tokens arrived at positions that the cache does not expect; logits would be wrong."""


class CacheMismatch(KvcapError, ValueError):
    """The cache is allocated for another batch size, type or device. Nothing was read."""


class PaddingUnsupported(KvcapError, ValueError):
    """A padded batch or a custom mask was given; as each head evicts its own, no mask can fit."""


class EmptyPrompt(KvcapError, ValueError):
    """There is nothing to read."""


class TokenUnknown(KvcapError, ValueError):
    """A text has a token that the model has no embedding of. Nothing was read."""


class MessagesInvalid(KvcapError, ValueError):
    """The messages are none, or cannot follow the conversation so far."""


class LogitsBroken(KvcapError):
    """The model's logits are NaN or infinite, as damaged weights give them. No token was drawn."""


class ModelNotFound(KvcapError, OSError):
    """No model of that name can be reached."""


class ModelFilesBroken(KvcapError, ValueError):
    """A model's files are missing, broken, or would have to run code. None was executed."""


class ChatTemplateMissing(KvcapError, ValueError):
    """The tokenizer has no chat template, or one that fails or does not separate its turns."""


class SchemaRefused(KvcapError, ValueError):
    """Answers cannot be held to a JSON schema or a regular expression; the message says why."""


class StoreFailed(KvcapError, OSError):
    """The file that holds evicted tokens cannot be made."""


class PinsTooLarge(KvcapError, ValueError):
    """Pinned tokens need more slots than a head has. Nothing was read."""


class SessionNotSaved(KvcapError, OSError):
    """The session's file cannot be written; an earlier one of that name is as it was."""


class SessionFileError(KvcapError, ValueError):
    """A session's file cannot be taken. Nothing was changed."""


class SessionFileCorrupt(SessionFileError):
    """The file is no session's, was cut short, or was changed since it was saved."""


class SessionFileForeign(SessionFileError):
    """It was saved by another model, or under settings that this runtime cannot continue."""


class SessionFileNewer(SessionFileError):
    """It was saved by a newer kvcap, whose format this one does not know."""


class SessionBroken(KvcapError):
    """A forward pass failed half-way, so layers disagree on what was read; reset the session."""


class Busy(KvcapError):
    """More is asked of a server than can wait. Nothing was done.

    Args:
        message: what is busy.
        retry_after_s: seconds after which to ask again.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConversationUnknown(KvcapError, LookupError):
    """A server has no such conversation of that owner in memory."""


class ReaderTooSlow(KvcapError):
    """A server's answer was ended, as nobody read it; what was written of it can be read."""


class ReplicaLost(KvcapError):
    """The process of a cluster that answered has gone, or none is up; what was saved goes on."""


class PortTaken(KvcapError, ValueError):
    """A server cannot listen on the address; nothing was served."""


class ExtraMissing(KvcapError, ImportError):
    """A package is not installed; the message names the extra that brings it."""


IN_A_CHECKOUT = "comes with kvcap's repository, not with its package; run it in a checkout"
"""Says where commands and benchmarks of kvcap's makers are."""


def how_to_install(extra: str) -> str:
    """Return how a user installs one of kvcap's extras, which no package index has."""
    return f"run in kvcap's checkout: pip install '.[{extra}]'"


class LibraryUnusable(KvcapError, ValueError):
    """A build of llama.cpp's library cannot be loaded, or is of a version that was not tried."""


class PeerFailed(KvcapError, RuntimeError):
    """A program that a benchmark measures cannot be run, or ended; the message has its words."""


class CellsFailed(KvcapError, RuntimeError):
    """Some cells of a sweep could not be measured; the message says which, and why.

    Args:
        message: which cells failed, and why.
        cells: of the same sweep, that were measured.
    """

    def __init__(self, message: str, cells: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.cells = list(cells)


class WorkersLost(KvcapError, RuntimeError):
    """Processes that were to share work ended by themselves, for want of memory perhaps."""


class NothingRecommended(KvcapError, RuntimeError):
    """Every policy that was measured is worse than random; the message says what to try."""


class NotExportable(KvcapError, ValueError):
    """There is no graph of that policy, stage or formulation; the message says what there is."""


class ExportExists(KvcapError, ValueError):
    """Something else was exported to that place, and nothing was replaced."""


class ShapeError(KvcapError):
    """A graph has other inputs or outputs than its manifest says."""


class ToleranceError(KvcapError):
    """A graph's scores differ from its policy's, are not finite, or keep other slots."""


class ManifestError(KvcapError, ValueError):
    """A manifest is missing, cannot be read, or describes another file."""


class GraphBroken(ManifestError):
    """ONNX Runtime cannot load the graph."""


def first_line(error: Exception | str) -> str:
    """Return the first line of what an error says, for a message of one line.

    Where PyTorch or transformers is missing, as behind `make chat`, it says how to install it.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
        return (
            f"{error.name} is not installed, and only GGUF files and exports do without it; run in "
            "kvcap's checkout: make setup, or pip install ."
        )
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
