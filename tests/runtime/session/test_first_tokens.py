"""The tokens that stay as attention sink are the first 4 of the whole conversation, whatever comes.

With a system prompt these are `<bos>`, the template's opening and the prompt's first words. The
texts here are such that KeyDiff evicts some of them where no sinks are pinned.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import tiny_chat
from chat_templates import PLAIN, with_template
from tools import first_kept, tiny_decoder

from kvcap import Runtime
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime, PolicyRequest
from kvcap.runtime.cli.chat import Chat
from kvcap.runtime.cli.options import Output
from kvcap.runtime.session.session import Session

SYSTEM = "You keep the doors of a small town, and answer in one sentence."
NOUNS = (
    "harbour mosses baker winter lake grasses bees children milk sentence green silver engine wall "
    "paper storm lamp river stone garden window letter candle bridge mountain apple market clock"
)
OTHERS = " ".join(f"{a} {b}s" for a, b in pairwise(NOUNS.split()))
LONG = f"{OTHERS}, and the code for the blue door is 4821"
BUDGET, BLOCK = 32, 16


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory):
    def runtime(backend: str, sinks: int | None) -> Any:
        if backend == "onnxruntime":
            folder = tiny_decoder(tmp_path_factory, BUDGET, BLOCK) / "decoder"
            return OrtRuntime.from_directory(folder, PolicyRequest("keydiff", sink_tokens=sinks))
        if backend not in made:
            made[backend] = tiny_chat.save(tmp_path_factory.mktemp("model"))
        return Runtime.from_pretrained(
            made[backend],
            "keydiff",
            budget_tokens=BUDGET,
            block_size=BLOCK,
            device="cpu",
            dtype="float32",
            sink_tokens=sinks,
        )

    made: dict[str, str] = {}
    return runtime


def session_of(runtime: Any, system: str | None = SYSTEM) -> Session:
    session: Session = runtime.session(system, seed=0)
    session.set_generation(max_new_tokens=3, temperature=0.0)
    return session


def say(session: Session, text: str = LONG) -> Session:
    list(session.send(text))
    return session


def recalled(session: Session) -> Session:
    """A passage is read again behind the beginning, never in front of it."""
    say(session, OTHERS)
    return say(session, "What is the code for the blue door?")


def of_another_system_prompt(session: Session) -> Session:
    chat = Chat(session, Output(quiet=True))
    chat.run_script(["/system You sell bread.", OTHERS])
    assert session.system != SYSTEM
    return session


WAYS = {
    "said": lambda session: session,
    "recalled": recalled,
    "another system prompt": of_another_system_prompt,
}


# Of what else a conversation goes through: `test_lifecycles.py`.
@pytest.mark.parametrize("backend", ["torch", pytest.param("onnxruntime", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_the_first_tokens_of_the_conversation_stay(way, backend, runtimes):
    assert first_kept(WAYS[way](say(session_of(runtimes(backend, None)))))


@pytest.mark.parametrize("sinks", [None, 0])
def test_a_template_without_bos_keeps_its_opening(sinks, runtimes):
    runtime = runtimes("torch", sinks)
    runtime.tokenizer = with_template(
        runtime.tokenizer, PLAIN["text"].replace("{{ bos_token }}", "")
    )
    # A system prompt stays longer than other text, whatever the sinks.
    session = say(session_of(runtime, SYSTEM if sinks is None else None))
    assert session.read_ids[0] != runtime.tokenizer.bos_token_id
    assert first_kept(session) == (sinks is None)
