"""One answer, from the stream of its text to the screen or to JSON; `generate` and `chat` share it.

Ctrl-C and a reached cap end an answer early and never lose what was said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.meter import Meter, summary
from kvcap.runtime.options import Output
from kvcap.runtime.screen import CAP, INTERRUPTED, OK, complain, dim
from kvcap.runtime.stats import Turn

if TYPE_CHECKING:
    from kvcap.runtime.session import Session


def answer(session: Session, pieces: Iterator[str], output: Output) -> int:
    """Print what `pieces` yields as `session` says it.

    Args:
        session: whose figures are shown.
        pieces: from `session.send`, `complete` or `regenerate`, not yet started.
        output: what the user asked to see.

    Returns:
        The exit code: 0, 4 where the cap ended it, 130 where Ctrl-C did.
    """
    before, last, said, code = session.stats, session.turn, list[str](), OK
    meter = Meter(lambda: session.stats, shown=not output.quiet)
    session.on_block = meter.reading
    try:
        with closing(cast(Any, pieces)):
            for piece in pieces:
                said.append(piece)
                meter.write("" if output.json else piece)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except MemoryCapExceeded as error:
        code = CAP
        if session.turn is last:  # refused before anything was read
            session.turn = Turn()
        session.turn.finish_reason = "cap"
        meter.clear()
        complain(error)
    finally:
        meter.clear()
        session.on_block = None
    if output.json:
        print(json.dumps(document(session, "".join(said))), flush=True)
    elif said or code != CAP:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if not output.quiet:
        now = session.stats
        lost = now.evicted_tokens - (
            0 if now.seen_tokens < before.seen_tokens else before.evicted_tokens
        )
        dim(summary(now, lost))
    return code


def document(session: Session, text: str) -> dict[str, Any]:
    """The JSON of one answer."""
    stats, turn = session.stats, session.turn
    return {
        "text": text,
        "finish_reason": turn.finish_reason,
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
        },
        "kv": {
            "policy": stats.policy,
            "budget_tokens": stats.budget_tokens,
            "held_tokens": stats.held_tokens,
            "evicted_tokens": stats.evicted_tokens,
            "bytes": stats.bytes,
            "cap_bytes": stats.cap_bytes,
            "peak_bytes": stats.peak_bytes,
        },
        "timing": {
            "ttft_s": turn.ttft_s,
            "prefill_tok_s": turn.prefill_tok_s,
            "decode_tok_s": turn.decode_tok_s,
        },
    }
