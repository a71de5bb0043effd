"""One answer, from the stream of its text to the screen or to JSON; `generate` and `chat` share it.

Ctrl-C and a reached cap end an answer early and never lose what was said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from kvcap.runtime.cli.console import CAP, INTERRUPTED, OK, columns, complain, dim
from kvcap.runtime.cli.live_meter import Meter, summary
from kvcap.runtime.cli.options import Output
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.session.stats import Stats, Turn

if TYPE_CHECKING:
    from kvcap.runtime.session.session import Session


def answer(
    session: Session,
    say: Callable[[], Iterator[str]],
    output: Output,
    meter: type[Meter] = Meter,
) -> int:
    """Print an answer as `session` says it.

    Args:
        session: whose figures are shown.
        say: `session.send`, `complete` or `regenerate` with what it is given.
        output: what the user asked to see.
        meter: what draws it.

    Returns:
        The exit code: 0, 4 where the cap ended it, 130 where Ctrl-C did.
    """
    last, said = session.turn, list[str]()
    code, refused, screen = OK, None, None
    try:
        with closing(cast(Any, say())) as pieces:
            screen = meter(lambda: session.stats, shown=not output.quiet)
            session.on_block = screen.reading
            for piece in pieces:
                said.append(piece)
                screen.write("" if output.json else piece)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except MemoryCapExceeded as error:
        code, refused = CAP, error
    finally:
        session.on_block = None
        if screen is not None:
            screen.clear()
            # Before anything else is said, also of an error that goes on from here.
            if said and not output.json:
                screen.end()
    text, stats = "".join(said), session.stats
    if session.turn is None or session.turn is last:  # refused before anything was read
        stats = replace(stats, turn=Turn(finish_reason="cap" if code == CAP else "interrupted"))
    if output.json:
        print(json.dumps(document(stats, text)), flush=True)
    elif screen is not None and not said and code != CAP:
        screen.end()
    if refused is not None:
        complain(refused)
    if not output.quiet:
        dim(summary(stats, empty=not text.strip(), width=columns()))
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
