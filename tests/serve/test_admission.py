"""How many conversations a server takes on: arithmetic beforehand, and the process held to it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import tiny_chat
from chat_templates import TOOLS
from make import in_python
from server_chats import admitted, ask, serve, text_of, user
from tools import ROOT
from transformers import AutoTokenizer

from kvcap.cli import run
from kvcap.runtime.cli.options import Budget, Run, Running
from kvcap.runtime.errors import ChatTemplateMissing, PlanInfeasible
from kvcap.runtime.models.devices import best_device
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.planning.serving import CAPPED_BODY, ServingPlan, Shared
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.serve.admission import CapWatch, open_conversations

MIB = 1 << 20


@pytest.fixture(scope="module")
def one(chat_model: str) -> MemoryPlan:
    from kvcap.runtime.models.files import load_config
    from kvcap.runtime.models.names import resolve

    plan = MemoryPlan.of(load_config(resolve(chat_model)), budget_tokens=64, rehearse=True)
    return replace(plan, baseline=300 * MIB)


def shared(number: int) -> Shared:
    return Shared(number * 10 * MIB, number * MIB)


def test_as_many_fit_as_the_cap_has_bytes_for(one):
    for cap in (620 * MIB, 621 * MIB, 1000 * MIB):
        plan = ServingPlan.of(one, shared, cap=cap)
        assert plan.total_bytes <= cap < plan.total_bytes + plan.place_bytes
        parts = plan.as_dict()
        assert parts["total_bytes"] == (
            parts["fixed_bytes"] + parts["places"] * parts["place_bytes"]
        )
        assert parts["fixed_bytes"] == (
            300 * MIB
            + one.weights
            + parts["serving_bytes"]
            + parts["rows_bytes"]
            + parts["passes_bytes"]
            + parts["restoring_bytes"]
            + parts["tokenising_bytes"]
            + parts["shared_prompt_bytes"]
        )
    assert plan.together == 8
    assert ServingPlan.of(one, shared, cap=1000 * MIB, places=9).places == 9
    assert ServingPlan.of(one, shared).places == 64  # without a cap
    longer = ServingPlan.of(one, shared, cap=1000 * MIB, body=2 * CAPPED_BODY)
    assert longer.fixed_bytes - plan.fixed_bytes == one.tokenising * CAPPED_BODY


def test_shared_prompts_take_their_part_of_the_cap(one):
    """Copies take no place of a conversation by default; a number asked for is kept to."""
    none, plan = (
        ServingPlan.of(one, shared, cap=1 << 40, together=1, shared_prompts=n) for n in (0, 9)
    )
    assert none.shared_prompt_bytes == 0
    assert plan.fixed_bytes - none.fixed_bytes == plan.as_dict()["shared_prompt_bytes"]
    assert plan.shared_prompt_bytes == 9 * one.cache_bytes
    assert none.places - 9 <= plan.places < none.places
    for conversations in (1, 7, 8, 17, 31, 32, 500):
        cap = none.fixed_bytes + (conversations + 1) * none.place_bytes - 1
        usual = ServingPlan.of(one, shared, cap=cap, together=1)
        assert usual.shared_prompts == min(4, conversations // 8)
        assert conversations - usual.shared_prompts <= usual.places <= conversations
        assert usual.total_bytes <= cap
        every = ServingPlan.of(one, shared, cap=cap, together=1, places=conversations)
        assert (every.places, every.shared_prompts) == (conversations, 0)
    assert ServingPlan.of(one, shared).shared_prompts == 4  # without a cap
    least = none.fixed_bytes + none.place_bytes
    with pytest.raises(PlanInfeasible, match="or lower --shared-prompts, the KV budget"):
        ServingPlan.of(one, shared, cap=least, together=1, shared_prompts=9)


def test_the_index_of_a_conversation_is_planned_beside_its_cache(one):
    without, plan = (ServingPlan.of(one, shared, cap=1 << 40, index=n) for n in (0, MIB))
    assert plan.place_bytes - without.place_bytes == plan.as_dict()["index_bytes"] == MIB
    assert plan.places < without.places
    assert plan.fixed_bytes == without.fixed_bytes + one.word_vectors
    with pytest.raises(PlanInfeasible, match="or lower --recall-store, the KV budget"):
        ServingPlan.of(one, shared, cap=300 * MIB, index=MIB)


@pytest.mark.parametrize(("words", "tokens", "nbytes"), [("auto", 32, MIB), ("off", 0, 0)])
def test_a_server_is_planned_with_the_indexes_that_its_sessions_may_have(
    chat_model, words, tokens, nbytes
):
    opened = admitted(chat_model, recall=RecallSettings.parse(words, "1MiB"))
    session = opened.scheduler._new_session()
    opened.scheduler.close()
    assert opened.plan.index == nbytes
    assert session.recall.limit == tokens
    assert session.recall.store.limit == MIB


def test_fewer_are_answered_at_once_where_more_do_not_fit(one):
    base = ServingPlan.of(one, lambda _: Shared(), cap=1 << 40).fixed_bytes
    plan = ServingPlan.of(one, shared, cap=base + 25 * MIB)
    assert plan.together == 2
    with pytest.raises(PlanInfeasible, match=r"8 conversations takes .*; raise the cap to"):
        ServingPlan.of(one, shared, cap=base + 25 * MIB, together=8)


def test_not_even_one_is_refused_with_what_would_do(one):
    with pytest.raises(PlanInfeasible, match="so that 0 fit") as refused:
        ServingPlan.of(one, shared, cap=300 * MIB)
    least = refused.value.least["least_memory_cap"]
    assert ServingPlan.of(one, shared, cap=least).places >= 1
    with pytest.raises(PlanInfeasible, match="takes"):
        ServingPlan.of(one, shared, cap=500 * MIB, places=100_000)


@pytest.mark.parametrize("copies", [9, 0])
def test_plan_counts_copies_as_the_server_does(chat_model, capsys, kvcap, copies):
    given = ["plan", chat_model, "--budget-tokens", "64", "--shared-prompts", str(copies)]
    assert run([*given, "--serve", "--json"]) == 0
    served = json.loads(capsys.readouterr().out)["serve"]
    opened = admitted(chat_model, running=Running(), shared_prompts=copies)
    opened.scheduler.close()
    assert served["shared_prompts"] == opened.plan.shared_prompts == copies
    assert served["shared_prompt_bytes"] == opened.plan.shared_prompt_bytes
    assert f"--shared-prompts {copies} needs --serve" in kvcap.refused(*given)


def test_plan_serve_says_how_many_fit(chat_model, capsys):
    given = ["plan", chat_model, "--serve", "--budget-tokens", "64", "--memory-cap"]
    assert run([*given, "4GiB", "--json"]) == 0
    served = json.loads(capsys.readouterr().out)["serve"]
    assert served["total_bytes"] <= served["cap"] == 4 << 30
    assert served["places"] > 100
    assert served["index_bytes"] == MIB
    assert (served["rows_bytes"] > 0) is (best_device() != "cpu")  # a CPU rotates in place
    assert run([*given, "64MiB", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["least_memory_cap"] > 64 * MIB
    assert run([*given, "auto"]) == 0
    assert "conversations fit in memory under" in capsys.readouterr().out


@pytest.mark.parametrize(("every", "dtype"), [(None, "float32"), (None, "bfloat16"), (1, None)])
def test_rows_are_planned_to_the_byte(chat_model, every, dtype):
    """A plan counts the rotated keys of conversations that share passes, as they do on a CPU."""
    budget = Budget(budget_tokens=64, dtype=dtype)
    running = Running(device="cpu", evict_every=every)
    opened = admitted(chat_model, budget, running, together=3, places=5)
    opened.scheduler.close()
    assert opened.scheduler.batch.why_one_by_one is None
    assert opened.plan.shared.rows == opened.scheduler.batch.nbytes
    assert (opened.plan.shared.rows > 0) is (dtype == "bfloat16")
    assert opened.plan.shared.workspace > 0
    assert (opened.plan.places, opened.plan.together) == (5, 3)
    assert opened.scheduler.limits.places == 5


def test_a_server_whose_tokenizer_has_no_default_template_starts_and_says_so(tmp_path, capsys):
    folder = tiny_chat.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"tool_use": TOOLS["own turn"], "rag": TOOLS["own turn"]}
    tokenizer.save_pretrained(folder)
    (tmp_path / "chat_template.jinja").unlink()
    budget = Budget(budget_tokens=400, dtype="float32")
    opened = open_conversations(Run(folder, budget=budget, running=Running(device="cpu")))
    assert "rag, tool_use, and none is the 'default'" in capsys.readouterr().err
    tool = {"type": "function", "function": {"name": "add"}}

    async def chat(s: Any) -> None:
        assert await text_of(s.submit(ask(user("Hello!"), tools=(tool,))))
        with pytest.raises(ChatTemplateMissing, match="none is the 'default'"):
            await text_of(s.submit(ask(user("Hello!"))))

    serve(opened.scheduler, chat)


def test_nothing_is_loaded_where_not_one_conversation_fits(chat_model, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcap.serve.admission.load_for_chat", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="give one, such as --memory-cap 2GiB"):
        admitted(chat_model, Budget(enforce="rlimit"))
    with pytest.raises(PlanInfeasible, match="so that 0 fit"):
        admitted(chat_model, Budget(memory_cap="64MiB"), folder=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_no_more_are_made_once_the_process_has_grown(one):
    plan = ServingPlan.of(replace(one, baseline=0), shared, cap=1 << 40)

    class Runtime:
        model = None

    watch = CapWatch.of(plan, Runtime())
    assert watch.has_room()
    watch.cap = 1
    assert not watch.has_room()


PROGRAM = """
import asyncio, sys
from kvcap.runtime.cli.options import Budget
from server_chats import admitted, ask, text_of, until, user
cap = int(sys.argv[2])
opened = admitted(
    sys.argv[1], Budget(memory_cap=str(cap), budget_tokens=4096), folder=sys.argv[3]
)
async def main():
    s, n = opened.scheduler, opened.plan.places
    async def one(i):
        reply = s.submit(ask(user(f"{i} says. " * (5 + 60 * (i % 9))), tokens=3))
        await text_of(reply)
    async def longest():
        reply = s.submit(ask(user("7" * opened.plan.body), tokens=3))
        await until(lambda: s.figures().answering)  # its prompt is made
        await reply.aclose()
    await longest()
    asked = iter(range(n + n // 2))
    async def client():
        for i in asked:
            await one(i)
    await asyncio.gather(*(client() for _ in range(12)))
    await longest()
    f = s.figures()
    await s.aclose()
    peak = next(int(x.split()[1]) << 10 for x in open("/proc/self/status") if "VmHWM" in x)
    print(n, s._pool.made, f.failed, f.answered, peak)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_with_all_its_conversations_stays_within_its_cap(tmp_path):
    """And they need most of it: the plan is no idle bound."""
    folder = tiny_chat.save(tmp_path / "model")
    # Planned beside the same modules as the program's, which take memory, too.
    code = "import sys, server_chats; from kvcap.cli import run; run(sys.argv[1:])"
    path = f"{ROOT / 'src'}:{ROOT / 'tests'}"

    def python(*given: str) -> str:
        done = in_python(
            *given,
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": path,
                "PYTHONSAFEPATH": "1",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )
        return done.stdout or done.stderr

    wanted = ("plan", folder, "--serve", "--json", "--budget-tokens", "4096", "--memory-cap")
    least = json.loads(python(code, *wanted, "64MiB"))["least_memory_cap"]
    cap = least + 16 * MIB
    figures = python(PROGRAM, folder, str(cap), str(tmp_path / "kept"))
    planned, made, failed, answered, peak = map(int, figures.split())
    assert failed == 0
    assert answered == planned + planned // 2
    assert made > planned // 2
    assert peak <= cap
