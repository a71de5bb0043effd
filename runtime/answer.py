"""One answer, from the stream of its text to the screen or to JSON; `generate` and `chat` share it.

Ctrl-C and a reached cap end an answer early and never lose what was said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.meter import Meter, summary
from kvcap.runtime.options import Output
from kvcap.runtime.screen import CAP, INTERRUPTED, OK, complain, dim
from kvcap.runtime.stats import Stats, Turn

if TYPE_CHECKING:
    from kvcap.runtime.session import Session


def answer(session: Session, say: Callable[[], Iterator[str]], output: Output) -> int:
    """Print an answer as `session` says it.

    Args:
        session: whose figures are shown.
        say: `session.send`, `complete` or `regenerate` with what it is given.
        output: what the user asked to see.

    Returns:
        The exit code: 0, 4 where the cap ended it, 130 where Ctrl-C did.
    """
    last, said, code = session.turn, list[str](), OK
    meter = Meter(lambda: session.stats, shown=not output.quiet)
    session.on_block = meter.reading
    try:
        with closing(cast(Any, say())) as pieces:
            for piece in pieces:
                said.append(piece)
                meter.write("" if output.json else piece)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except MemoryCapExceeded as error:
        code = CAP
        meter.clear()
        complain(error)
    finally:
        meter.clear()
        session.on_block = None
    stats = session.stats
    if session.turn is None or session.turn is last:  # refused before anything was read
        stats = replace(stats, turn=Turn(finish_reason="cap" if code == CAP else "interrupted"))
    if output.json:
        print(json.dumps(document(stats, "".join(said))), flush=True)
    elif said or code != CAP:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if not output.quiet:
        dim(summary(stats))
        if session.turn is not last and session.notice is not None:
            dim(session.notice)
    return code


def document(stats: Stats, text: str) -> dict[str, Any]:
    """The JSON of one answer; what was not timed is null."""
    turn = stats.turn or Turn()
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
            "ttft_s": turn.ttft_s or None,
            "prefill_tok_s": turn.prefill_tok_s or None,
            "decode_tok_s": turn.decode_tok_s or None,
        },
    }
