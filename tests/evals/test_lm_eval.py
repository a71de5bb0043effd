"""The model that lm-evaluation-harness runs, beside its own on transformers.

`scripts/test-lm-eval` runs these where lm-eval is installed.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny_chat
import torch
from conftest import tiny_model
from make import argv, ran, saved_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcap
from kvcap import cli, pocket
from kvcap.evals import lm_eval as ours
from kvcap.evals.lm_eval import KvcapLM
from kvcap.lab.quality.longbench_sets import SETS
from kvcap.pocket.facts import facts
from kvcap.pocket.prose import filler
from kvcap.policies import PolicyError
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.errors import ChatTemplateMissing, ExtraMissing, UnsupportedModel

try:
    from lm_eval.api.instance import Instance
except ImportError:
    Instance = None
harness = pytest.mark.skipif(Instance is None, reason="scripts/test-lm-eval has lm-eval")
here = {"device": "cpu", "dtype": "float32"}
TEXT = " ".join(islice(filler(Random(0)), 40))
FACTS = [fact.statement for fact in facts(Random(0), 12)]


def requests(kind: str, *given: tuple[Any, ...]) -> list[Any]:
    return [Instance(kind, {}, args, index) for index, args in enumerate(given)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random models that know pocket's tokens."""
    make = tmp_path_factory.mktemp
    made = {x: str(saved_model(make(x), x)) for x in ("llama", "gemma2")}
    return {"pocket": str(pocket.path()), **made}


PAIRS = [
    (TEXT[:400], " and the seven"),
    (TEXT[:400], " or"),
    (TEXT[:400], " of"),
    (TEXT[:90], TEXT[90:420]),  # scored over several blocks
    ("", "Seven kinds of mosses"),
    ("The door ", "is blue."),  # the space goes to what follows
]


def stock(folder: str, context: list[int], after: list[int]) -> tuple[float, bool]:
    """Return the likelihood from one pass of the plain model."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        scores = model(torch.tensor([context + after])).logits[0, len(context) - 1 : -1]
    wanted = torch.tensor(after)
    score = scores.log_softmax(-1).gather(1, wanted[:, None]).sum()
    return float(score), bool((scores.argmax(-1) == wanted).all())


@harness
@pytest.mark.parametrize("family", ["llama", "gemma2", "pocket"])
@pytest.mark.parametrize("given", [{"budget_tokens": 250}, {"policy": "full"}])
def test_likelihoods_are_the_uncapped_ones_where_all_fits(family, given, folders):
    lm = KvcapLM(folders[family], block_size=16, batch_size=3, **given, **here)
    scores = lm.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    for (context, after), (score, greedy) in zip(PAIRS, scores, strict=True):
        pair = (
            lm._encode_pair(context, after)
            if context
            else ([lm.prefix_token_id], lm.tok_encode(after, add_special_tokens=False))
        )
        assert score == pytest.approx(stock(folders[family], *pair)[0], rel=1e-4, abs=1e-3)
        assert greedy == stock(folders[family], *pair)[1]


@harness
def test_likelihoods_under_a_cap(folders):
    """Contexts of whole blocks are read as `kvcap.cap` reads them; batches change nothing."""
    lm = KvcapLM(folders["llama"], budget_tokens=24, block_size=16, **here)
    ids = lm.tok_encode(TEXT)
    pairs = [
        (None, ids[i : i + 64], ids[i + 64 : i + 64 + n])
        for i, n in ((0, 5), (7, 5), (9, 40), (11, 5))
    ]
    scores = lm._loglikelihood_tokens(pairs, disable_tqdm=True)
    model = tiny_model("llama", vocab_size=len(lm.tokenizer))
    for (_, context, after), (score, _) in zip(pairs, scores, strict=True):
        with kvcap.cap(model, 24, 16, sink_tokens=0), torch.no_grad():
            logits = model(torch.tensor([context + after])).logits[0, 63:-1].log_softmax(-1)
        expected = float(logits.gather(1, torch.tensor(after)[:, None]).sum())
        assert score == pytest.approx(expected, rel=1e-4, abs=1e-3)
        assert abs(score - stock(folders["llama"], context, after)[0]) > 0.1
    lm.batch_size = 4
    again = lm._loglikelihood_tokens(pairs, disable_tqdm=True)
    assert [x[0] for x in again] == pytest.approx([x[0] for x in scores], rel=1e-5)


@harness
def test_choices_of_one_token_are_read_once(monkeypatch):
    lm = KvcapLM("pocket", budget_tokens=64, **here)
    read, prefill = [], BlockLoop.prefill
    monkeypatch.setattr(
        BlockLoop, "prefill", lambda self, ids, *_: read.append(ids.shape) or prefill(self, ids)
    )
    ids = lm.tok_encode(TEXT)[:200]
    pairs = [(None, ids, [7, token]) for token in (5, 6, 9)] + [(None, ids, [8, 5])]
    scores = lm._loglikelihood_tokens(pairs, disable_tqdm=True)
    assert read == [(1, 200)] * 2
    alone = [lm._loglikelihood_tokens([pair], disable_tqdm=True)[0] for pair in pairs]
    assert scores == alone
    assert len({score for score, _ in scores}) == 4


@harness
def test_whole_texts_in_windows(folders):
    text = TEXT[:1300]
    lm = KvcapLM(folders["llama"], policy="full", block_size=16, max_length=100, **here)
    (score,) = lm.loglikelihood_rolling(requests("rolling", (text,)), disable_tqdm=True)
    ids, before, expected = lm.tok_encode(text), [lm.prefix_token_id], 0.0
    assert len(ids) > 200
    for start in range(0, len(ids), 100):
        if start + 100 <= len(ids):
            expected += stock(folders["llama"], before, ids[start : start + 100])[0]
            before = [ids[start + 99]]
        else:  # the last window is a whole one too, of which the end is scored
            after = ids[start:]
            expected += stock(folders["llama"], ids[-101 : -len(after)], after)[0]
    assert score == pytest.approx(expected, rel=1e-4)
    capped = KvcapLM(folders["llama"], budget_tokens=16, block_size=16, max_length=100, **here)
    (other,) = capped.loglikelihood_rolling(requests("rolling", (text,)), disable_tqdm=True)
    assert abs(other - score) > 1


@harness
def test_answers_are_those_of_generate_where_all_fits(folders):
    model = AutoModelForCausalLM.from_pretrained(folders["pocket"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders["pocket"])
    prompts = [*(f"{TEXT[:n]} {fact}" for n, fact in zip((40, 40, 90, 200), FACTS, strict=False))]
    batch = requests(
        "generate_until", *((p, {"until": ["\n"], "max_gen_toks": 12}) for p in prompts)
    )
    lm = KvcapLM("pocket", budget_tokens=400, batch_size=4, **here)
    answers = lm.generate_until(batch, disable_tqdm=True)
    for prompt, text in zip(prompts, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == expected.split("\n")[0]
    assert any(answers)


@harness
def test_answers_under_a_cap(folders):
    """Batches of prompts of all lengths answer as each prompt does alone."""
    given = {"until": ["zebra"], "max_gen_toks": 9}
    prompts = [(TEXT[i : i + n], given) for i, n in ((0, 500), (3, 500), (9, 300), (50, 500))]
    lm = KvcapLM(folders["llama"], budget_tokens=24, block_size=16, batch_size=3, **here)
    together = lm.generate_until(requests("generate_until", *prompts), disable_tqdm=True)
    lm.batch_size = 1
    alone = [
        lm.generate_until(requests("generate_until", prompt), disable_tqdm=True)[0]
        for prompt in prompts
    ]
    assert together == alone
    session = lm.runtime.session()
    session.set_generation(temperature=0.0, max_new_tokens=9)
    assert together[0] == "".join(session.complete(prompts[0][0]))


@harness
def test_texts_that_end_an_answer(folders):
    lm = KvcapLM(folders["llama"], budget_tokens=64, **here)

    def answer(**given: Any) -> str:
        prompts = requests("generate_until", (TEXT[:200], {"max_gen_toks": 30, **given}))
        (text,) = lm.generate_until(prompts, disable_tqdm=True)
        return text

    whole = answer(until=[])
    stop = whole[10:14]
    assert answer(until=["", "never said", stop]) == whole.partition(stop)[0]
    assert answer(until=stop) == whole.partition(stop)[0]
    assert len(answer(max_gen_toks=3)) < len(whole)


@harness
def test_draws_follow_the_seed(folders):
    given = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    prompts = [(TEXT[i : i + 200], given) for i in range(3)]

    def texts(seed: int) -> list[str]:
        torch.manual_seed(seed)
        lm = KvcapLM(folders["llama"], budget_tokens=64, **here)
        return lm.generate_until(requests("generate_until", *prompts), disable_tqdm=True)

    assert texts(1) == texts(1) != texts(2)


@harness
def test_long_requests_are_cut_with_a_warning(folders):
    lm = KvcapLM(folders["llama"], budget_tokens=64, max_length=50, **here)
    ids = lm.tok_encode(TEXT)[:90]
    with pytest.warns(UserWarning, match="cut to its last 48"):
        (cut,) = lm._loglikelihood_tokens([(None, ids[:87], ids[87:])], disable_tqdm=True)
    (short,) = lm._loglikelihood_tokens([(None, ids[39:87], ids[87:])], disable_tqdm=True)
    assert cut == short
    with pytest.raises(ValueError, match="does not fit max_length=50"):
        lm._loglikelihood_tokens([(None, ids[:1], ids)], disable_tqdm=True)


@harness
def test_chat_templates():
    lm = KvcapLM("pocket", budget_tokens=64, **here)
    user = {"role": "user", "content": "What is the code?"}
    stock_text = lm.tokenizer.apply_chat_template(
        [user], tokenize=False, add_generation_prompt=True
    )
    assert lm.apply_chat_template([user]) == stock_text
    begun = [user, {"role": "assistant", "content": "The code is"}]
    text = lm.apply_chat_template(begun, add_generation_prompt=False)
    assert text.endswith("The code is")
    assert text.startswith(stock_text)
    assert lm.tokenizer_name == "pocket"
    assert lm.chat_template(True) == lm.tokenizer.chat_template


@harness
def test_a_template_without_system_prompts(monkeypatch):
    lm = KvcapLM("pocket", budget_tokens=64, **here)
    lm.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    with pytest.warns(UserWarning, match="takes no system prompt"):
        assert lm.apply_chat_template(messages) == "Hello"
    lm.tokenizer.chat_template = None
    with pytest.raises(ChatTemplateMissing):
        lm.apply_chat_template(messages)


@harness
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"windw": 3}, PolicyError, "windw"),
        ({"policy": "keydif"}, PolicyError, "keydiff"),
        ({"batch_size": "auto"}, ValueError, "batch_size='auto'"),
        ({"budget_tokens": 64, "kv_budget": "1MiB"}, ValueError, "not both"),
        ({"policy": "full", "budget_tokens": 64}, ValueError, "never evicts"),
        ({"trust_remote_code": True}, ValueError, "is not run"),
        ({"kv_dtype": "int3"}, ValueError, "int3"),
        ({"max_gen_toks": 0}, ValueError, "max_gen_toks=0"),
    ],
)
def test_refusals(given, error, message):
    with pytest.raises(error, match=message):
        KvcapLM("pocket", **given, **here)


@harness
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_beams": 4}, UnsupportedModel, "num_beams"),
        ({"temprature": 1.0}, ValueError, "temprature"),
        ({"top_p": 7, "do_sample": True}, ValueError, "top_p=7"),
        ({"max_gen_toks": 4096}, ValueError, "max_gen_toks=4096"),
    ],
)
def test_settings_that_cannot_be_had(given, error, message):
    lm = KvcapLM("pocket", budget_tokens=64, max_length=300, **here)
    with pytest.raises(error, match=message):
        lm.generate_until(requests("generate_until", (TEXT[:90], given)), disable_tqdm=True)


def test_without_the_extra_it_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr(ours, "TemplateLM", object)
    with pytest.raises(ExtraMissing, match=r"pip install '\.\[lm-eval\]'"):
        KvcapLM("pocket")
    assert cli.run(["lm-eval", "--tasks", "hellaswag"]) == 1
    assert "'.[lm-eval]'" in capsys.readouterr().err


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
"""
MORE = {
    "multiple_choice": "doc_to_choice: choices",
    "generate_until": 'generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12}\n'
    "metric_list: [{metric: exact_match}]",
    "loglikelihood_rolling": "metric_list: [{metric: byte_perplexity}]",
}


@pytest.fixture(scope="module")
def local_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tasks of each kind, whose questions stand behind a text."""
    folder = tmp_path_factory.mktemp("tasks")
    stated = facts(Random(5), 6)
    rows = [
        {
            "question": f"{fact.statement} {TEXT[: 40 * i]} {fact.key.capitalize()} is",
            "choices": [f" {fact.value}", " green grass.", " 17"],
            "answer": 0,
            "value": fact.value,
        }
        for i, fact in enumerate(stated)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, more in MORE.items():
        target = "answer" if kind == "multiple_choice" else "value"
        if kind == "loglikelihood_rolling":
            target = '"{{question}}"'
        name = f"local_{kind}"
        text = TASK.format(name=name, data=data, kind=kind, target=target, more=more)
        (folder / f"{name}.yaml").write_text(text)
    return folder


NAMES = ",".join(f"local_{kind}" for kind in MORE)
# Without lm-eval's own tasks, thousands of files that each run reads.
ALONE = (
    "from functools import partialmethod; from lm_eval.tasks import TaskManager; "
    "TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)"
)


def evaluated(
    arguments: list[str], folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Return what `kvcap lm-eval` writes to its results."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(out / "cache"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager, "__init__", TaskManager.__init__)  # undone afterwards
    exec(ALONE)
    given = ["--tasks", NAMES, "--include_path", str(folder), "--output_path", str(out)]
    assert cli.run(["lm-eval", *arguments, *given, "--device", "cpu", "--seed", "0"]) == 0
    (file,) = (path for path in out.rglob("results_*.json"))
    return json.loads(file.read_text())


@harness
@pytest.mark.filterwarnings("ignore")
def test_lm_evals_command_line(local_tasks, tmp_path, monkeypatch):
    """Figures are those of lm-eval's own model where all fits; the results name the cap."""
    arguments = f"pretrained={pocket.path()},dtype=float32"
    plain = evaluated(
        ["--model", "hf", "--model_args", arguments, "--batch_size", "1"],
        local_tasks,
        tmp_path / "hf",
        monkeypatch,
    )
    mine = evaluated(
        ["--model_args", f"{arguments},budget_tokens=1024", "--batch_size", "4"],
        local_tasks,
        tmp_path / "mine",
        monkeypatch,
    )
    capped = evaluated(
        [
            "run",
            "--model",
            "kvcap",
            "--model_args",
            "pretrained=pocket,policy=snapkv,window=4,budget_tokens=12,block_size=16,positions=true,"
            "kv_dtype=int8,dtype=float32",
        ],
        local_tasks,
        tmp_path / "capped",
        monkeypatch,
    )

    def figures(results: Any) -> dict[str, float]:
        return {
            f"{task} {name}": value
            for task, row in results["results"].items()
            for name, value in row.items()
            if isinstance(value, float) and "stderr" not in name
        }

    assert len(figures(plain)) >= 4
    assert figures(mine) == pytest.approx(figures(plain), rel=1e-4)
    assert figures(capped) != pytest.approx(figures(plain), rel=1e-2)
    cap = capped["config"]["kvcap"]
    results = {
        "policy": "snapkv",
        "budget_tokens": 12,
        "block_size": 16,
        "positions": "true",
        "kv_dtype": "int8",
        "version": kvcap.__version__,
    }
    assert results.items() <= cap.items()
    assert cap["options"]["window"] == 4
    assert cap["kv_bytes"] > 0
    assert capped["config"]["model_args"]["budget_tokens"] == 12


@harness
def test_lm_evals_own_model_with_kvcaps_attention_warns(local_tasks, tmp_path):
    """`--model hf` has no cache of kvcap's: it runs uncapped, and says so."""
    done = ran(
        argv(
            "{} -c {} lm-eval --model hf --model_args {} --tasks local_multiple_choice "
            "--include_path {} --limit 1 --device cpu",
            sys.executable,
            f"{ALONE}; from kvcap.cli import main; main()",
            f"pretrained={pocket.path()},attn_implementation=kvcap,dtype=float32",
            local_tasks,
        ),
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("runs without a BudgetCache") == 1


@harness
def test_a_model_without_a_chat_template_evaluates(tmp_path):
    where = tiny_chat.save(tmp_path / "model", template=False)
    lm = KvcapLM(where, budget_tokens=32, **here)
    assert lm.loglikelihood(requests("loglikelihood", ("A word", " or")), disable_tqdm=True)


@harness
def test_the_name_is_known_wherever_kvcap_is_imported():
    from lm_eval.api.registry import get_model

    assert get_model("kvcap") is KvcapLM


@harness
def test_sets_of_longbench_are_asked_as_the_page_says():
    """Sets of the first row of docs/lm-eval.md are asked as `kvcap eval` does, and no others."""
    import lm_eval
    import yaml
    from jinja2 import Template

    class Loader(yaml.SafeLoader):
        """Reads names of functions as texts."""

    Loader.add_constructor("!function", lambda loader, node: node.value)
    folder, same = Path(lm_eval.__file__).parent / "tasks/longbench", set()
    for name, longbench_set in SETS.items():
        task = yaml.load((folder / f"{name}.yaml").read_text(), Loader)
        template = Template(task["doc_to_text"], keep_trailing_newline=True)
        prompt = template.render(context="{context}", question="{input}")
        assert task["generation_kwargs"]["max_gen_toks"] == longbench_set.max_new_tokens
        same |= {name} if prompt == longbench_set.template else set()
    page = (Path(__file__).parents[2] / "docs/lm-eval.md").read_text()
    (row,) = (line for line in page.splitlines() if "the same numbers" in line)
    assert same == {*row.split("|")[1].split("`")[3::2]}
