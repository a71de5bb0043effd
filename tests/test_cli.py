"""The command line from outside: exit codes, what is on stdout, what on stderr."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_chat

from kvcap import cli

BUDGET = {
    *("--policy", "--policy-option", "--kv-budget", "--kv-budget-tokens", "--max-kv-size"),
    *("--block-size", "--prefill-chunk-size", "--sink-tokens", "--recent-tokens"),
    *("--positions", "--dtype", "--json", "--memory-cap", "--enforce", "--backend"),
}
ANSWER = {
    *("--evict-every", "--system-prompt", "--device", "--max-new-tokens", "--temp"),
    *("--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--stop", "--quiet", "-q"),
    *("--session", "--pin-system", "--on-full", "--compile"),
}
OPTIONS = {
    "chat": BUDGET | ANSWER | {"--no-commands"},
    "generate": BUDGET | ANSWER | {"--model", "-m", "--file", "-f", "--raw"},
    "plan": BUDGET,
    "policies": {"--json"},
    "eval": {"--json"},
    "demo": {"--json"},
    "bench": {"--block-size"},
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_chat.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def kvcap(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = cli.run(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def one_line(err: str) -> bool:
    return err.startswith("kvcap: ") and err.count("\n") == 1


def test_help_is_light_and_complete() -> None:
    program = (
        "import sys; from kvcap.cli import run; code = run(['--help']); "
        "print(code, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.endswith("0 []\n")
    assert all(f"  {name} " in out for name in OPTIONS)


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_in_the_help(command: str, kvcap: Any) -> None:
    code, out, _ = kvcap(command, "--help")
    assert code == 0
    assert {
        option for option in OPTIONS[command] if f"{option} " not in out.replace(",", " ")
    } == set()


def test_no_command_prints_the_help(kvcap: Any) -> None:
    code, out, err = kvcap()
    assert (code, err) == (0, "")
    assert "Usage: kvcap" in out


def test_generate_prints_the_answer_alone(model: str, kvcap: Any) -> None:
    code, out, err = kvcap("generate", model, "Hello!", "--max-new-tokens", "8")
    assert code == 0
    assert out.strip()
    assert err.startswith("seen ")
    assert kvcap("generate", model, "Hello!", "--max-new-tokens", "8", "-q") == (0, out, "")


def test_generate_takes_its_prompt_in_every_way(model: str, kvcap: Any, tmp_path: Path) -> None:
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
    ]
    assert ways == [ways[0]] * len(ways)
    assert ways[0][0] == 0


def test_generate_json(model: str, kvcap: Any) -> None:
    budget = ("--kv-budget-tokens", "16", "--block-size", "8")
    code, out, _ = kvcap(
        "generate", model, "word " * 60, "--json", "--max-new-tokens", "8", *budget
    )
    document = json.loads(out)
    assert code == 0
    assert set(document) == {"text", "finish_reason", "usage", "kv", "timing"}
    assert document["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == 8
    kv, read = document["kv"], document["usage"]["prompt_tokens"] + 7  # the last is not read
    assert (kv["policy"], kv["budget_tokens"], kv["held_tokens"]) == ("keydiff", 16, 16)
    assert kv["evicted_tokens"] == read - 16
    assert kv["bytes"] <= kv["cap_bytes"] == kv["peak_bytes"]
    assert set(document["timing"]) == {"ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert all(value > 0 for value in document["timing"].values())


def test_sampling_is_repeatable(model: str, kvcap: Any) -> None:
    def draw(seed: str) -> str:
        out: str = kvcap("generate", model, "Hi", "--temp", "1.5", "--seed", seed, "-q")[1]
        return out

    assert draw("1") == draw("1") != draw("2")


def test_stop_and_raw(model: str, kvcap: Any) -> None:
    _, whole, _ = kvcap("generate", model, "Hi", "--raw", "-q", "--max-new-tokens", "20")
    stop = whole.strip().split()[1]
    _, cut, _ = kvcap("generate", model, "Hi", "--raw", "-q", "--stop", stop)
    assert cut.strip() == whole.partition(stop)[0].strip()


def test_the_environment_sets_options(
    model: str, kvcap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCAP_MODEL", model)
    monkeypatch.setenv("KVCAP_POLICY", "h2o")
    monkeypatch.setenv("KVCAP_KV_BUDGET_TOKENS", "32")
    monkeypatch.setenv("KVCAP_JSON", "1")
    _, out, _ = kvcap("plan")
    assert (json.loads(out)["policy"], json.loads(out)["budget_tokens"]) == ("h2o", 32)
    assert json.loads(kvcap("plan", "--policy", "full")[1])["policy"] == "full"


def test_plan(model: str, kvcap: Any) -> None:
    code, out, _ = kvcap("plan", model, "--kv-budget", "64KiB", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["fits"] is True
    assert 0 < document["cache_bytes"] <= 64 * 1024
    code, out, _ = kvcap("plan", model, "--kv-budget", "64KiB")
    assert code == 0
    assert f"{document['cache_bytes']:,}" in out
    assert "exact" in out
    assert "estimate" in out


def test_plan_that_cannot_be(model: str, kvcap: Any) -> None:
    code, out, err = kvcap("plan", model, "--kv-budget", "100", "--json")
    assert code == 3
    assert json.loads(out)["fits"] is False
    assert "the least that works" in json.loads(out)["error"]
    assert one_line(err)
    assert kvcap("plan", model, "--kv-budget", "100")[:2] == (3, "")
    assert kvcap("generate", model, "Hi", "--kv-budget", "100")[:2] == (3, "")


def test_policies(kvcap: Any) -> None:
    code, out, _ = kvcap("policies", "--json")
    rows = {row["name"]: row for row in json.loads(out)["policies"]}
    assert code == 0
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
        (["--policy-option", "anchor=middle"], 2, "anchor='middle' will not work"),
        (["--policy-option", "anchor"], 2, "'anchor' is not KEY=VALUE"),
        (["--kv-budget-tokens", "0"], 2, "--kv-budget-tokens"),
        (["--kv-budget-tokens", "8", "--sink-tokens", "9"], 2, "at least 9"),
        (["--kv-budget-tokens", "8", "--kv-budget", "1MiB"], 2, "not both"),
        (["--kv-budget", "lots"], 2, "'lots' is not a size"),
        (["--block-size", "0"], 2, "--block-size"),
        (["--positions", "relative"], 2, "--positions"),
        (["--dtype", "int8"], 2, "use one of float32"),
        (["--device", "abacus"], 2, "device 'abacus' cannot be used here"),
        (["--evict-every", "1000"], 3, "evict_every=1000"),
        (["--top-p", "1.5"], 2, "--top-p"),
        (["--temp", "-1"], 2, "--temp"),
        (["--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["--raw", "--system-prompt", "Be kind."], 2, "--raw"),
        (["--policy", "full", "--kv-budget-tokens", "4"], 4, "0 of 4 slots are in use"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_bad_options_end_with_one_line(
    arguments: list[str], code: int, says: str, model: str, kvcap: Any
) -> None:
    got, out, err = kvcap("generate", model, "Hello there, how are you?", "-q", *arguments)
    assert (got, out) == (code, "")
    assert one_line(err)
    assert says in err


@pytest.mark.parametrize("prompt", [[], [""], [" \n"], ["-"], ["-f", "-"], ["pocket"]])
def test_no_prompt(prompt: list[str], model: str, kvcap: Any) -> None:
    code, out, err = kvcap("generate", "-m", model, *prompt)
    assert (code, out) == (2, "")
    assert one_line(err)


def test_files_that_are_no_prompt(model: str, kvcap: Any, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    for name, says in [("none", "No such file"), ("", "directory"), ("latin", "UTF-8")]:
        code, out, err = kvcap("generate", model, "-f", str(tmp_path / name))
        assert (code, out) == (2, "")
        assert says in err
    assert "NUL" in kvcap("generate", model, "-f", str(tmp_path / "binary"))[2]
    assert kvcap("generate", model, "-f", "-", stdin=b"\xff\xfe")[0] == 2


def test_models_that_cannot_be(kvcap: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    code, out, err = kvcap("plan", str(tmp_path))
    assert (code, out) == (2, "")
    assert "model type 'gpt2' is not supported" in err
    code, out, err = kvcap("chat", str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert "no model at" in err
    (tmp_path / "config.json").write_text("{")
    assert kvcap("plan", str(tmp_path))[0] == 2


def test_a_base_model_is_named_as_such(kvcap: Any, tmp_path: Path) -> None:
    base = tiny_chat.save(tmp_path, template=False)
    code, out, err = kvcap("generate", base, "Hi", "-q")
    assert (code, out) == (2, "")
    assert "--raw" in err
    code, out, err = kvcap("chat", base, "-q")
    assert (code, out) == (2, "")
    assert one_line(err)
    assert kvcap("generate", base, "Hi", "--raw", "--max-new-tokens", "2")[0] == 0


def test_a_reached_cap_keeps_what_was_said(model: str, kvcap: Any) -> None:
    cap = ("--policy", "full", "--kv-budget-tokens", "24")
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
def test_what_a_full_cache_does(
    on_full: str, code: int, reason: str, model: str, kvcap: Any
) -> None:
    options = ("--kv-budget-tokens", "24", "--max-new-tokens", "40", "--on-full", on_full)
    got, out, err = kvcap("generate", model, "Hi", "--json", "-q", *options)
    document = json.loads(out)
    assert (got, document["finish_reason"]) == (code, reason)
    assert (document["kv"]["evicted_tokens"] == 0) == (on_full != "evict")
    assert one_line(err) if on_full == "error" else not err


def test_debug_shows_the_traceback(kvcap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCAP_DEBUG", "1")
    assert "Traceback" in kvcap("plan", "pocket", "--policy", "nothing")[2]


def test_unexpected_errors_are_one_line(kvcap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("out of paper\ndetails")

    monkeypatch.setattr("kvcap.runtime.model_files.resolve", fail)
    assert kvcap("plan") == (1, "", "kvcap: out of paper\n")
