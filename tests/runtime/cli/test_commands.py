"""The command line from outside: exit codes, what is on stdout, what on stderr."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_chat
import torch
from make import in_python

from kvcap import cli, dtypes, policies
from kvcap.runtime.cli import commands
from kvcap.runtime.cli.options import policy_names

BUDGET = {
    *("--policy", "--policy-option", "--kv-budget", "--budget-tokens"),
    *("--block-size", "--sink-tokens", "--recent-tokens"),
    *("--positions", "--dtype", "--json", "--memory-cap", "--enforce", "--backend"),
    "--kv-dtype",
}
ANSWER = {
    *("--evict-every", "--system-prompt", "--device", "--max-new-tokens"),
    *("--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--stop", "--quiet", "-q"),
    *("--session", "--pin-system", "--on-full", "--threads"),
    *("--repetition-penalty", "--json-schema", "--regex", "--logprobs"),
    *("--template-option", "--recall", "--recall-store"),
}
OPTIONS = {
    "chat": BUDGET | ANSWER | {"--no-commands"},
    "generate": BUDGET | ANSWER | {"--model", "-m", "--file", "-f", "--raw"},
    "plan": BUDGET | {"--context", "--serve", "--shared-prompts", "--recall", "--recall-store"},
    "warm": (BUDGET - {"--json", "--backend"}) | {"--device", "--evict-every"},
    "policies": {"--json"},
    "eval": {"--json", "--threads", "--block-size", "--kv-dtype"},
    "demo": {"--json", "--threads", "--block-size", "--budget-tokens"},
    "bench": {"--block-size", "--threads"},
}


def one_line(err: str) -> bool:
    return err.startswith("kvcap: ") and err.count("\n") == 1


def test_quantised_slots_are_planned_taken_and_refused_by_name(kvcap, model):
    plans = {}
    for kind in ("int8", "int8-int4", "int4"):
        given = ("--kv-budget", "40KiB", "--block-size", "16", "--kv-dtype", kind)
        plans[kind] = kvcap.document("plan", model, *given)
        assert plans[kind]["kv_dtype"] == kind
        assert kvcap("generate", model, "Hello!", *given, "--max-new-tokens", "3")[0] == 0
    assert plans["int8"]["budget_tokens"] < plans["int8-int4"]["budget_tokens"]
    assert plans["int8-int4"]["budget_tokens"] < plans["int4"]["budget_tokens"]
    assert "int5" in kvcap.refused("plan", model, "--kv-dtype", "int5")
    assert "kvcap export decoder" in kvcap.refused(
        "plan", model, "--kv-dtype", "int8", "--backend", "onnxruntime"
    )


def test_help_is_light_and_complete():
    program = (
        "import sys; from kvcap.cli import run; code = run(['--help']); "
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn'}; "
        "print(code, [*heavy & sys.modules.keys()])"
    )
    out = in_python(program, check=True).stdout
    assert out.endswith("0 []\n")
    assert all(f"  {name} " in out for name in OPTIONS)


@pytest.mark.parametrize(
    ("variables", "spins"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "9"}, "9"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
        ({"KMP_BLOCKTIME": "9"}, None),
    ],
)
def test_threads_sleep_while_they_wait_unless_the_user_says_how(variables, spins, monkeypatch):
    others = {name: value for name, value in os.environ.items() if name not in cli.WAITING}
    monkeypatch.setattr(os, "environ", {**others, **variables})
    seen = []
    monkeypatch.setattr(cli, "run", lambda: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    monkeypatch.setattr(warnings, "filters", [*warnings.filters])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(SystemExit):
        cli.main()
    assert seen == [spins]  # before any command may import torch


def test_no_command_prints_the_help(kvcap):
    code, out, err = kvcap()
    assert (code, err) == (0, "")
    assert "Usage: kvcap" in out


def test_generate_prints_the_answer_alone(model, kvcap):
    code, out, err = kvcap("generate", model, "Hello!", "--max-new-tokens", "8")
    assert code == 0
    assert out.strip()
    assert err.startswith("seen ")
    assert kvcap("generate", model, "Hello!", "--max-new-tokens", "8", "-q") == (0, out, "")


def test_generate_takes_its_prompt_in_every_way(model, kvcap, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Hello!\n", encoding="utf-8")
    rest = ("--max-new-tokens", "8", "-q")
    ways = [
        kvcap("generate", model, "Hello!", *rest),
        kvcap("generate", "Hello!", "-m", model, *rest),
        kvcap("generate", model, "-f", str(file), *rest),
        kvcap("generate", "-m", model, "-f", str(file), *rest),
        kvcap("generate", model, "-f", "-", *rest, stdin=b"Hello!\n"),
        kvcap("generate", model, "-", *rest, stdin=b"Hello!\r\n"),
        kvcap("generate", "-m", model, *rest, stdin=b"Hello!\n"),
        kvcap("generate", model, *rest, stdin=b"Hello!\n"),
    ]
    assert ways == [ways[0]] * len(ways)
    assert ways[0][0] == 0


@pytest.mark.parametrize(("every", "waiting"), [((), 7), (("--evict-every", "1"), 0)])
def test_generate_json(every, waiting, model, kvcap):
    """On a CPU an answer evicts every 64 tokens, or every block, from slots of the same bytes."""
    budget = ("--budget-tokens", "16", "--block-size", "8", "--device", "cpu", *every)
    document = kvcap.document("generate", model, "word " * 60, "--max-new-tokens", "8", *budget)
    assert set(document) == {"text", "finish_reason", "usage", "recalled", "kv", "timing"}
    assert document["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == 8
    kv, read = document["kv"], document["usage"]["prompt_tokens"] + 7  # the last is not read
    assert (kv["policy"], kv["budget_tokens"], kv["held_tokens"]) == ("lagkv", 16, 16)
    assert kv["waiting_tokens"] == waiting  # for the next eviction
    assert kv["evicted_tokens"] == read - 16 - waiting
    assert kv["bytes"] <= kv["cap_bytes"] == kv["peak_bytes"]
    assert set(document["timing"]) == {"ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert all(value > 0 for value in document["timing"].values())


def test_answers_fit_a_schema_however_it_is_given(model, kvcap, tmp_path):
    pytest.importorskip("llguidance")
    schema = '{"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}'
    (tmp_path / "s.json").write_text(schema)
    rest = ("generate", model, "Hello!", "-q", "--max-new-tokens", "60", "--json-schema")
    ways = [
        kvcap(*rest, schema),
        kvcap(*rest, str(tmp_path / "s.json")),
        kvcap(*rest, "-", stdin=schema.encode()),
    ]
    assert ways == [ways[0]] * 3
    assert ways[0][::2] == (0, "")
    assert set(json.loads(ways[0][1])) <= {"a", "b"}
    document = kvcap.document(*rest[:-1], "--regex", "[0-9]{4}", "--logprobs", "2")
    assert (len(document["text"]), document["finish_reason"]) == (4, "stop")
    assert "".join(one["token"] for one in document["logprobs"]) == document["text"]
    assert {len(one["top_logprobs"]) for one in document["logprobs"]} == {2}
    document = kvcap.document(*rest, schema, "--stop", "]")
    assert (document["stop_string"], document["finish_reason"]) == ("]", "stop")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--json-schema", "nofile.json"), "cannot read 'nofile.json'"),
        (("--json-schema", "-"), "stdin is empty, or was the prompt"),
        (("--json-schema", "{"), "there is no JSON schema in --json-schema"),
        (("--json-schema", '{"not": {}}'), 'held to this JSON schema: Unimplemented keys: ["not"]'),
        (("--json-schema", "{}", "--regex", "a"), "json_schema or to regex"),
        (("--regex", "("), "unclosed group"),
        (("--logprobs", "2"), "--logprobs is printed in the document of --json"),
    ],
)
def test_what_answers_cannot_be_held_to_is_wrong_input(model, kvcap, given, says):
    pytest.importorskip("llguidance")
    assert says in kvcap.refused("generate", model, "Hello!", *given)
    if "-" in given:  # so is a schema of which stdin is to be the conversation as well
        err = kvcap.refused("chat", model, *given, stdin=b"Hello!")
        assert "stdin is the conversation" in err


def test_options_of_the_chat_template_are_given(tmp_path, kvcap):
    """Values are JSON, or a text; each is asked for by a template that fails without it."""
    folder = tiny_chat.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if enable_thinking is not false or mood != 'kind' %}{{ raise_exception('no options') }}"
        "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    ways = ("generate", folder, "Hello!", "-q", "--max-new-tokens", "2", "--template-option")
    code, _, err = kvcap(*ways, "enable_thinking=false", "--template-option", "mood=kind")
    assert (code, err) == (0, "")
    for given, says in (
        (("enable_thinking=False", "--template-option", "mood=kind"), "no options"),
        (("enable_thinking",), "'enable_thinking' is not KEY=VALUE"),
        (("tools=[]",), "without messages, tools"),
        (("mood=kind", "--raw"), "leave --raw out"),
    ):
        assert says in kvcap.refused(*ways, *given)


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_one_of_several_named_templates_is_taken(command, tmp_path, kvcap):
    """None of them is called default, so that one must be named."""
    folder = tiny_chat.save(tmp_path)
    named = tmp_path / "additional_chat_templates"
    named.mkdir()
    template = tmp_path / "chat_template.jinja"
    (named / "rag.jinja").write_text(template.read_text())
    (named / "other.jinja").write_text("{{ raise_exception('not this one') }}")
    template.unlink()
    way: Any = ("chat", folder) if command == "chat" else ("generate", folder, "Hello!")
    given = {"stdin": b"Hello!\n"} if command == "chat" else {}
    way += ("-q", "--max-new-tokens", "2")
    code, out, err = kvcap(*way, "--template-option", "chat_template=rag", **given)
    assert code == 0, err
    assert out.strip()
    for more, says in (
        ((), "name one by the template option chat_template"),
        (("--template-option", "chat_template=default"), "there is: other, rag"),
        (("--template-option", "chat_template=other"), "not this one"),
    ):
        assert says in kvcap.refused(*way, *more, **given)


def test_a_chat_that_cannot_begin_leaves_no_session(tmp_path, kvcap):
    folder, file = tiny_chat.save(tmp_path), tmp_path / "s"
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('not this one') }}")
    assert "not this one" in kvcap.refused(
        "chat", folder, "-q", "--session", str(file), stdin=b"Hello!\n"
    )
    assert not file.exists()


@pytest.mark.slow
def test_sampling_is_repeatable(model, kvcap):
    def draw(seed: str) -> str:
        out: str = kvcap("generate", model, "Hi", "--temperature", "1.5", "--seed", seed, "-q")[1]
        return out

    assert draw("1") == draw("1") != draw("2")


def test_stop_and_raw(model, kvcap):
    _, whole, _ = kvcap("generate", model, "Hi", "--raw", "-q", "--max-new-tokens", "20")
    stop = whole.strip().split()[1]
    _, cut, _ = kvcap("generate", model, "Hi", "--raw", "-q", "--stop", stop)
    assert cut.strip() == whole.partition(stop)[0].strip()


def test_the_environment_sets_options(model, kvcap, monkeypatch):
    monkeypatch.setenv("KVCAP_MODEL", model)
    monkeypatch.setenv("KVCAP_POLICY", "h2o")
    monkeypatch.setenv("KVCAP_BUDGET_TOKENS", "32")
    monkeypatch.setenv("KVCAP_JSON", "1")
    _, out, _ = kvcap("plan")
    assert (json.loads(out)["policy"], json.loads(out)["budget_tokens"]) == ("h2o", 32)
    assert json.loads(kvcap("plan", "--policy", "full")[1])["policy"] == "full"


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("KV_BUDGET", "lots", "'lots' is not a size"),
        ("BUDGET_TOKENS", "few", "--budget-tokens"),
        ("POLICY", "keydif", "did you mean 'keydiff'?"),
        ("DEVICE", "abacus", "device 'abacus'"),
        ("DTYPE", "int8", "dtype 'int8'"),
        ("MODEL", "pokcet", "did you mean 'pocket'?"),
        ("ON_FULL", "burst", "--on-full"),
    ],
)
def test_bad_values_are_named_with_the_variable_they_come_from(
    variable, value, says, kvcap, monkeypatch
):
    monkeypatch.setenv(f"KVCAP_{variable}", value)
    monkeypatch.setenv("KVCAP_SINK_TOKENS", "4")  # is no part of it
    err = kvcap.refused("generate", "Hello!")
    assert says in err
    assert f"the environment says KVCAP_{variable}={value!r}" in err
    assert "SINK" not in err


def test_two_budgets_of_which_the_environment_sets_one(kvcap, monkeypatch):
    monkeypatch.setenv("KVCAP_KV_BUDGET", "64KiB")
    message = "kvcap: give --kv-budget or --budget-tokens, not both"
    source = "the environment says KVCAP_KV_BUDGET='64KiB'"
    code, _, err = kvcap("generate", "Hello!", "--budget-tokens", "64")
    assert (code, err) == (2, f"{message} ({source})\n")


def test_a_message_does_not_get_a_second_parenthesis(kvcap, monkeypatch):
    def refuse(*_: Any) -> None:
        raise ValueError("no policy 'h2o' here (there is one)")

    monkeypatch.setenv("KVCAP_POLICY", "h2o")
    monkeypatch.setattr(commands, "planned", refuse)
    assert kvcap("plan")[2] == (
        "kvcap: no policy 'h2o' here (there is one); the environment says KVCAP_POLICY='h2o'\n"
    )


def test_the_command_line_is_not_blamed_on_the_environment(model, kvcap, monkeypatch):
    monkeypatch.setenv("KVCAP_POLICY", "h2o")
    assert "environment" not in kvcap("plan", model, "--policy", "keydif")[2]


@pytest.mark.parametrize("dtype", ["float16", "fp16", "half", "FP16", "torch.float16"])
def test_types_have_the_names_that_people_use(dtype, model, kvcap):
    assert kvcap.document("plan", model, "--dtype", dtype)["dtype"] == "float16"
    assert dtypes.short(dtype) == "fp16"


def test_threads_are_those_that_compute(model, kvcap):
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            options = ("--threads", str(count), "--max-new-tokens", "2", "-q")
            assert kvcap("generate", model, "Hi", *options)[0] == 0
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_a_repetition_penalty_changes_what_is_said(model, kvcap):
    rest = ("--raw", "-q", "--temperature", "0", "--max-new-tokens", "30")
    plain = kvcap("generate", model, "word word word", *rest)
    assert kvcap("generate", model, "word word word", *rest, "--repetition-penalty", "1") == plain
    below = kvcap("generate", model, "word word word", *rest, "--repetition-penalty", "0.01")
    assert below[0] == 0
    assert below[1] != plain[1]  # says again what was said


def test_the_shell_completes_names(kvcap, monkeypatch):
    assert set(policy_names("")) == set(policies.policies())
    assert policy_names("keydiff-") == ["keydiff-window"]
    parts = {name.partition("+")[2] for name in policy_names("h2o+")}
    assert parts == set(policies.companions())
    assert policy_names("snapkv+adakv+critical") == ["snapkv+adakv+criticalkv"]
    program = (
        "import sys\nfrom kvcap.cli import run\n"
        "try:\n    run()\n"
        "finally:\n    print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    words = {"COMP_WORDS": "kvcap chat --policy pyr", "COMP_CWORD": "3"}
    for name, value in {**words, "_KVCAP_COMPLETE": "bash_complete"}.items():
        monkeypatch.setenv(name, value)
    out = in_python(program, check=True).stdout
    assert out.split() == ["plain,pyramidkv", "[]"]


def test_completion_is_installed_once_for_the_shell_that_is_used(kvcap, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for shell, file in {
        "/bin/zsh": ".zshrc",
        "fish": ".config/fish/completions/kvcap.fish",
    }.items():
        monkeypatch.setenv("SHELL", shell)
        line = kvcap("--show-completion")[1]
        assert "_KVCAP_COMPLETE" in line
        for _ in range(2):
            assert file in kvcap("--install-completion")[1]
        assert (tmp_path / file).read_text().strip() == line.strip()
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    code, _, err = kvcap("--show-completion")
    assert (code, "bash, zsh, fish" in err) == (2, True)


@pytest.mark.parametrize("command", [*OPTIONS, "export scorer", "export decoder", "android plan"])
def test_help_has_every_option_and_reads_well_at_80_columns(command, kvcap, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    code, out, _ = kvcap(*command.split(), "--help")
    assert code == 0
    words = out.replace(",", " ")
    assert not {option for option in OPTIONS.get(command, ()) if f"{option} " not in words}
    assert "\\b" not in out
    assert "\b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_plan_says_why_blocks_are_larger_on_a_gpu(kvcap, monkeypatch):
    monkeypatch.setattr("kvcap.runtime.models.devices.best_device", lambda: "cuda")
    code, out, _ = kvcap("plan", "pocket", "--budget-tokens", "1024")
    assert code == 0
    assert "1,024 slots + blocks of 512 (the default on CUDA from 1,024 slots on, " in out
    assert "blocks of 128, " in kvcap("plan", "pocket")[1]


def test_plan(model, kvcap):
    document = kvcap.document("plan", model, "--kv-budget", "64KiB")
    assert document["fits"] is True
    assert 0 < document["cache_bytes"] <= 64 * 1024
    code, out, _ = kvcap("plan", model, "--kv-budget", "64KiB")
    assert code == 0
    assert f"{document['cache_bytes']:,}" in out
    assert "exact" in out
    assert "estimate" in out


def test_plan_says_what_waits_for_the_next_eviction(model, kvcap):
    """Slots above the budget that an answer uses, at most, in no more bytes."""

    def planned(*options: str) -> str:
        code, out, _ = kvcap("plan", model, "--budget-tokens", "32", *options)
        assert code == 0
        return out

    assert "32 of 32 slots + 63 waiting for the next eviction" in planned()
    assert "+ 15 waiting for the next eviction" in planned("--block-size", "16")
    assert "waiting" not in planned("--policy", "full")


def test_plan_says_what_an_uncapped_cache_takes_and_the_least_that_works(model, kvcap):
    document = kvcap.document("plan", model)
    shape = json.loads(Path(model, "config.json").read_text())
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
    trained = shape["max_position_embeddings"]
    assert document["uncapped_tokens"] == trained
    assert document["uncapped_bytes"] == token * trained
    longer = kvcap.document("plan", model, "--context", "5000")
    assert (longer["uncapped_tokens"], longer["uncapped_bytes"]) == (5000, 5000 * token)
    least = str(document["least_kv_budget"])
    assert kvcap("plan", model, "--kv-budget", least)[0] == 0
    less = kvcap.document("plan", model, "--kv-budget", str(int(least) - 1), code=3)
    assert less["least_kv_budget"] == int(least)
    assert document["least_memory_cap"] % (1 << 20) == 0
    assert kvcap.document("plan", model, "--memory-cap", "1MiB", code=3)["least_memory_cap"]
    out = kvcap("plan", model, "--context", "5000")[1]
    assert "keys and values of 5,000 tokens would take" in out
    assert f"{5000 * token:,} bytes" in out
    assert f"--kv-budget {least}, or --memory-cap" in out
    assert "rehears" not in out


def test_plan_that_cannot_be(model, kvcap):
    code, out, err = kvcap("plan", model, "--kv-budget", "100", "--json")
    assert code == 3
    assert json.loads(out)["fits"] is False
    assert "the least that works" in json.loads(out)["error"]
    assert one_line(err)
    assert kvcap("plan", model, "--kv-budget", "100")[:2] == (3, "")
    assert kvcap("generate", model, "Hi", "--kv-budget", "100")[:2] == (3, "")


def test_policies(kvcap):
    rows = {row["name"]: row for row in kvcap.document("policies")["policies"]}
    assert {"keydiff", "h2o", "full"} <= set(rows)
    assert rows["h2o"]["state_bytes_per_slot"] == 4
    assert rows["h2o"]["window_queries"] is None
    assert rows["keydiff"]["options"]["anchor"] == "mean"
    assert rows["keydiff"]["parts"][0]["formula"]
    code, out, _ = kvcap("policies")
    assert code == 0
    assert all(name in out for name in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--policy", "keydif"], 2, "did you mean 'keydiff'?"),
        (["--policy", "snapkv", "--policy-option", "windo=8"], 2, "did you mean 'window'?"),
        (["--policy-option", "lag=1"], 2, "lag=1 will not work"),
        (["--policy-option", "anchor"], 2, "'anchor' is not KEY=VALUE"),
        (["--budget-tokens", "0"], 2, "--budget-tokens"),
        (["--budget-tokens", "8", "--sink-tokens", "9"], 2, "at least 9"),
        (["--budget-tokens", "8", "--kv-budget", "1MiB"], 2, "not both"),
        (["--kv-budget", "lots"], 2, "'lots' is not a size"),
        (["--block-size", "0"], 2, "--block-size"),
        (["--positions", "relative"], 2, "--positions"),
        (["--dtype", "int8"], 2, "use one of float32"),
        (["--device", "abacus"], 2, "device 'abacus' cannot be used here; use cpu"),
        (["--device", "gpu"], 2, "GPUs of NVIDIA and AMD are called cuda"),
        (["--device", "meta"], 2, "device 'meta' cannot be used here"),
        (
            ["--policy", "snapkv", "--policy-option", "window=abc"],
            2,
            "window='abc' will not work; expected a whole number, such as 32",
        ),
        (["--policy", "h2o", "--policy-option", "recent=most"], 2, "expected a number, such as"),
        (["--policy-option", "sink_tokens=few"], 2, "sink_tokens='few' will not work"),
        (["--threads", "0"], 2, "--threads"),
        (["--repetition-penalty", "0"], 2, "--repetition-penalty"),
        (["--evict-every", "1000"], 3, "evict_every=1000"),
        (["--top-p", "1.5"], 2, "--top-p"),
        (["--temperature", "-1"], 2, "--temperature"),
        (["--temperature", "nan"], 2, "nan is no number"),
        (["--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["--raw", "--system-prompt", "Be kind."], 2, "--raw"),
        (["--policy", "full", "--budget-tokens", "4"], 4, "0 of 4 slots are in use"),
        (["--enforce", "rlimit"], 2, "give one, such as --memory-cap 2GiB"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_bad_options_end_with_one_line(arguments, code, says, model, kvcap):
    assert says in kvcap.refused(
        "generate", model, "Hello there, how are you?", "-q", *arguments, code=code
    )


@pytest.mark.parametrize("prompt", [[], [""], [" \n"], ["-"], ["-f", "-"], ["pocket"]])
def test_no_prompt(prompt, model, kvcap):
    kvcap.refused("generate", "-m", model, *prompt)


def test_texts_of_another_code_are_refused_wherever_they_are(model, kvcap, tmp_path):
    """Arguments hold a lone surrogate for each byte that is no UTF-8, as Python reads them."""
    short = ("--max-new-tokens", "2")
    for given in (
        ("Hell\udce9",),
        ("Hell\udce9", "--raw"),
        ("Hello", "--system-prompt", "Hell\udce9"),
    ):
        err = kvcap.refused("generate", "-m", model, *given, *short)
        assert "'Hell\\udce9' cannot be read: at letter 5 it has the byte 0xe9, which is no" in err
        assert "iconv -f LATIN1 -t UTF-8" in err
    assert "stdin is not UTF-8 text (at byte 4); convert it, as iconv -f LATIN1" in kvcap.refused(
        "generate", "-m", model, *short, stdin=b"Hell\xe9\n"
    )
    (tmp_path / "wide").write_text("Hello", encoding="utf-16")
    assert "iconv -f UTF-16 -t" in kvcap("generate", "-m", model, "-f", str(tmp_path / "wide"))[2]


def in_a_shell(command: str, **environment: str) -> tuple[int, str, str]:
    """Run a line of the shell that begins with `kvcap`; returns its code, stdout and stderr."""
    line = command.replace("kvcap", f"{shlex.quote(sys.executable)} -m kvcap", 1)
    environment = {**os.environ, **environment}
    run = subprocess.run(["sh", "-c", line], capture_output=True, encoding="utf-8", env=environment)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the streams")
@pytest.mark.parametrize(
    ("command", "code", "answers"),
    [
        ("generate {} Hello 2>&-", 0, True),
        ("chat {} -q <&- >&-", 0, False),
        ("generate {} - <&- 2>&-", 2, False),
    ],
)
def test_closed_streams_are_empty_ones(command, code, answers, model):
    got, out, err = in_a_shell(f"kvcap {command.format(shlex.quote(model))} --max-new-tokens 2")
    assert (got, bool(out), err) == (code, answers, "")


@pytest.mark.skipif(os.name != "posix", reason="Python reads arguments by the locale")
def test_arguments_in_utf_8_are_read_in_any_locale():
    code, _, err = in_a_shell("kvcap policies 'Tür'", LC_ALL="C", PYTHONUTF8="0")
    assert (code, "'Tür'" in err) == (2, True)


def test_a_line_of_another_code_is_refused_and_the_chat_goes_on(model, kvcap):
    lines = b"Hello!\nHell\xe9\n/system \xff\n/system caf\xc3\xa9\n/system\nHi!\n/stats\n"
    code, out, err = kvcap("chat", model, "--max-new-tokens", "2", "--json", stdin=lines)
    assert code == 2
    assert len(out.splitlines()) == 2
    assert err.count("cannot be read") == 2
    assert "'Hell\\udce9'" in err
    assert "\ncaf\u00e9\n" in err
    assert "2 turns ·" in err


def test_a_mark_of_the_byte_order_is_no_letter(model, kvcap, tmp_path):
    """Windows writes one at the beginning of files and pipes."""
    mark, short = b"\xef\xbb\xbf", ("--max-new-tokens", "2")
    (tmp_path / "marked").write_bytes(mark + b"Hello!\n")
    tokens = {
        kvcap.document(*command, *short, stdin=stdin)["usage"]["prompt_tokens"]
        for command, stdin in [
            (("generate", "-m", model), b"Hello!\n"),
            (("generate", "-m", model), mark + b"Hello!\n"),
            (("generate", "-m", model, "-f", str(tmp_path / "marked")), b""),
            (("chat", model), mark + b"Hello!\n"),
            (("chat", model), b"/read %s\n" % str(tmp_path / "marked").encode()),
        ]
    }
    assert len(tokens) == 1
    code, _, err = kvcap("chat", model, stdin=mark + b"/stats\n")
    assert code == 0
    assert "no answer yet" in err


def test_models_that_cannot_be(kvcap, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "model type 'gpt2' is not supported" in kvcap.refused("plan", str(tmp_path))
    assert "there is no directory" in kvcap.refused("chat", str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    assert kvcap("plan", str(tmp_path))[0] == 2


def test_an_export_is_run_by_its_own_backend(kvcap, tmp_path):
    (tmp_path / "kvcap.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    for command in (["plan"], ["generate", "-f", "-"], ["chat"]):
        code, out, err = kvcap(*command, str(tmp_path), stdin=b"Hello!")
        assert (code, out) == (2, "")
        assert "and this kvcap reads" in err  # its manifest was read
    for command in (["plan"], ["generate", "-f", "-"], ["chat"]):
        assert "is an exported decoder, which ONNX Runtime runs" in kvcap.refused(
            *command, str(tmp_path), "--backend", "torch", stdin=b"Hello!"
        )
    for model, says in [
        ("pocket", "kvcap export decoder pocket -o pocket-onnx"),
        ("Someone/A-Model", "kvcap export decoder Someone/A-Model -o A-Model-onnx"),
        ("pokcet", "did you mean 'pocket'?"),
    ]:
        assert says in kvcap.refused("plan", model, "--backend", "onnxruntime")


def test_a_base_model_is_named_as_such(kvcap, tmp_path):
    base = tiny_chat.save(tmp_path, template=False)
    assert "--raw" in kvcap.refused("generate", base, "Hi", "-q")
    kvcap.refused("chat", base, "-q")
    assert kvcap("generate", base, "Hi", "--raw", "--max-new-tokens", "2")[0] == 0


def test_full_without_a_budget_goes_on_to_the_end_of_the_models_context(kvcap):
    """Not to the 256 slots that other policies have."""
    plan = kvcap("plan", "pocket", "--policy", "full")[1]
    assert "16,384 slots of a context of 16,384 tokens" in plan
    arguments = ("The door is blue. " * 60, "--max-new-tokens", "3", "-q")
    document = kvcap.document("generate", "pocket", *arguments, "--policy", "full")
    assert document["kv"]["held_tokens"] > 300


def test_a_reached_cap_keeps_what_was_said(model, kvcap):
    cap = ("--policy", "full", "--budget-tokens", "24")
    code, out, err = kvcap("generate", model, "Hi", "--json", "-q", *cap)
    document = json.loads(out)
    assert code == 4
    assert document["finish_reason"] == "cap"
    assert document["kv"]["held_tokens"] == 24
    assert document["usage"]["completion_tokens"] > 1
    assert one_line(err)


@pytest.mark.parametrize(
    ("on_full", "code", "reason"),
    [("evict", 0, "length"), ("stop", 0, "full"), ("error", 4, "cap")],
)
def test_what_a_full_cache_does(on_full, code, reason, model, kvcap):
    sizes = ("--budget-tokens", "24", "--evict-every", "1", "--max-new-tokens", "40")
    options = (*sizes, "--on-full", on_full)
    got, out, err = kvcap("generate", model, "Hi", "--json", "-q", *options)
    document = json.loads(out)
    assert (got, document["finish_reason"]) == (code, reason)
    assert (document["kv"]["evicted_tokens"] == 0) == (on_full != "evict")
    assert one_line(err) if on_full == "error" else not err


def test_unexpected_errors_are_one_line(kvcap, monkeypatch):
    def fail(_: Any) -> None:
        raise RuntimeError("out of paper\ndetails")

    monkeypatch.setattr("kvcap.runtime.cli.commands.resolve", fail)
    assert kvcap("plan") == (1, "", "kvcap: out of paper\n")
    monkeypatch.setenv("KVCAP_DEBUG", "1")
    assert "Traceback" in kvcap("plan")[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to warm")
def test_kernels_are_warmed_for_a_gpu_alone(kvcap):
    assert "on cpu the model runs without them" in kvcap.refused(
        "warm", "pocket", "--budget-tokens", "64"
    )
