"""Prints one answer, as text while it is written or as JSON, for `generate` and `chat`.

Ctrl-C and a reached cap end an answer early; the text so far is never lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

from kvcap.runtime.cli.console import CAP, INTERRUPTED, OK, columns, complain, dim
from kvcap.runtime.cli.live_meter import Meter, summary
from kvcap.runtime.cli.options import Output
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.recall.recall import Passage
from kvcap.runtime.session.session import Session
from kvcap.runtime.session.stats import Stats, Turn


def print_answer(
    session: Session,
    say: Callable[[], Iterator[str]],
    output: Output,
    meter: type[Meter] = Meter,
) -> int:
    """Print an answer while `session` writes it.

    Args:
        session: whose figures are shown.
        say: begins the answer: `session.send`, `complete` or `regenerate` with its arguments.
        output: the parts of the answer that the user wants to see.
        meter: draws text and figures.

    Returns:
        The exit code: 0, 4 where the cap ended it, 130 where Ctrl-C did.
    """
    last, written = session.turn, list[str]()
    code, refused, screen = OK, None, None
    try:
        with closing(cast(Any, say())) as pieces:
            screen = meter(lambda: session.stats, shown=not output.quiet)
            session.on_block = screen.reading
            for piece in pieces:
                written.append(piece)
                screen.write("" if output.json else piece)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except MemoryCapExceeded as error:
        code, refused = CAP, error
    finally:
        session.on_block = None
        if screen is not None:
            screen.clear()
            # Before anything else is printed, even if another error is on its way out.
            if written and not output.json:
                screen.end()
    text, stats, begun = "".join(written), session.stats, session.turn is not last
    if session.turn is None or not begun:  # refused before anything was read
        stats = replace(stats, turn=Turn(finish_reason="cap" if code == CAP else "interrupted"))
    passages = session.recall.passages if stats.turn and stats.turn.recalled_tokens else []
    if output.json:
        document = as_document(stats, text, passages)
        if begun and session.logprobs:
            document["logprobs"] = [one.as_dict() for one in session.logprobs]
        print(json.dumps(document), flush=True)
    elif screen is not None and not written and code != CAP:
        screen.end()
    if refused is not None:
        complain(refused)
    if not output.quiet:
        dim(summary(stats, empty=not text.strip(), width=columns()))
        if stats.turn and passages:
            dim(f"recalled {recalled(len(passages), stats.turn.recalled_tokens)}")
        _print_notice(session.notice if begun else None)
    return code


def _print_notice(notice: str | None) -> None:
    if notice is not None:
        dim(notice)


def recalled(passages: int, tokens: int) -> str:
    """Say how many passages were read again, and how many tokens that took.

    >>> recalled(2, 192)
    '2 passages, 192 tokens'
    """
    return f"{passages:,} passage{'' if passages == 1 else 's'}, {tokens:,} tokens"


def as_document(stats: Stats, text: str, passages: Sequence[Passage]) -> dict[str, Any]:
    """Return the JSON document of one answer; times that were not measured are null.

    Args:
        stats: of the conversation, once it was answered.
        text: of the answer.
        passages: that were read again for it.
    """
    turn = stats.turn or Turn()
    stopped = {"stop_string": turn.stop_string} if turn.stop_string is not None else {}
    return {
        "text": text,
        "finish_reason": turn.finish_reason,
        **stopped,
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
            "recalled": turn.recalled_tokens,
        },
        "recalled": [
            {"tokens": list(one.span), "text": one.text, "score": one.score} for one in passages
        ],
        "kv": {
            "policy": stats.policy,
            "budget_tokens": stats.budget_tokens,
            "held_tokens": stats.held_tokens,
            "waiting_tokens": stats.waiting_tokens,
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
