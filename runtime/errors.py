"""Every error kvcap raises by name, as one tree.

```
KvcapError
├── UnsupportedModel        the model, its attention or its positions cannot be run under a cap
├── PlanInfeasible          no setting fits what was asked; names the largest that does
├── MemoryCapExceeded       the cap would be passed; nothing was read, the session is as it was
│   └── BlockTooLarge       one block does not fit the block's slots; read in smaller blocks
├── PositionMismatch        tokens arrived at positions the cache does not expect
├── PaddingUnsupported      a padded or custom attention mask
├── EmptyPrompt             nothing to read
├── ModelNotFound           no directory, repository or config of that name
├── ModelFilesBroken        a model's files are missing, broken, or would have to run code
├── ChatTemplateMissing     the tokenizer has no chat template, or none that can be used
├── StoreFailed             the file for evicted tokens cannot be made
├── PinsTooLarge            pinned tokens need more slots than a head has; nothing was read
├── SessionNotSaved         the session's file cannot be written; an earlier one is as it was
├── SessionFileError        a session's file cannot be taken; nothing was changed
│   ├── SessionFileCorrupt  it is no session's file, was cut short, or is not what was saved
│   ├── SessionFileForeign  it was saved by another model, or under settings that cannot take it
│   └── SessionFileNewer    it was saved by a newer kvcap
├── SessionBroken           a forward pass failed half-way; reset the session
├── ExtraMissing            a package is not installed; names the extra that brings it
├── NotExportable           a policy, stage or formulation of which there is no graph
├── ExportExists            something else was exported to that place; nothing was replaced
├── ShapeError              a graph takes or gives other tensors than its manifest says
├── ToleranceError          a graph computes something else than its policy
└── ManifestError           no manifest, one that cannot be read, or another file's
    └── GraphBroken         the file is no graph that can be loaded
PolicyError (ValueError)    a policy, an option, or pins that do not fit; from kvcap.policies
```
"""

from __future__ import annotations


class KvcapError(Exception):
    """Base of all; also a `ValueError` where bad input is the cause."""


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
    """Reading on would pass the cap. Nothing was read: the session is as it was."""


class BlockTooLarge(MemoryCapExceeded, ValueError):
    """One block is larger than the slots kept free for it."""


class PositionMismatch(KvcapError, ValueError):
    """Tokens arrived at positions the cache does not expect; logits would be wrong."""


class PaddingUnsupported(KvcapError, ValueError):
    """A padded batch or a custom mask; slots are evicted per head, so no mask can follow them."""


class EmptyPrompt(KvcapError, ValueError):
    """Nothing to read."""


class ModelNotFound(KvcapError, OSError):
    """No model of that name can be reached."""


class ModelFilesBroken(KvcapError, ValueError):
    """A model's files are missing, broken, or would have to run code. None was executed."""


class ChatTemplateMissing(KvcapError, ValueError):
    """The tokenizer has no chat template, or one that fails or whose turns cannot be told apart."""


class StoreFailed(KvcapError, OSError):
    """The file that holds evicted tokens cannot be made."""


class PinsTooLarge(KvcapError, ValueError):
    """Pinned tokens need more slots than a head has. Nothing was read."""


class SessionNotSaved(KvcapError, OSError):
    """The session's file cannot be written; an earlier one of that name is as it was."""


class SessionFileError(KvcapError, ValueError):
    """A session's file cannot be taken. Nothing was changed."""


class SessionFileCorrupt(SessionFileError):
    """No session's file, cut short, or not what was saved."""


class SessionFileForeign(SessionFileError):
    """Saved by another model, or under settings that this runtime cannot continue from."""


class SessionFileNewer(SessionFileError):
    """Saved by a newer kvcap, whose format this one does not know."""


class SessionBroken(KvcapError):
    """A forward pass failed half-way, layers disagree on what was read."""


class ExtraMissing(KvcapError, ImportError):
    """A package is not installed; the message names the extra that brings it."""


class NotExportable(KvcapError, ValueError):
    """There is no graph of that policy, stage or formulation; the message says what there is."""


class ExportExists(KvcapError, ValueError):
    """Something else was exported to that place. It is as it was."""


class ShapeError(KvcapError):
    """A graph takes or gives other tensors than its manifest says."""


class ToleranceError(KvcapError):
    """A graph computes something else than its policy, keeps other slots, or is not finite."""


class ManifestError(KvcapError, ValueError):
    """An exported file's manifest is missing, cannot be read, or is another file's."""


class GraphBroken(ManifestError):
    """The file is no graph that ONNX Runtime can load."""


def first_line(error: Exception) -> str:
    """What an error says, for a message of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
