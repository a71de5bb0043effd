"""Evaluations measure policies as in their papers; sinks are added where they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_model

from kvcap import cli
from kvcap.lab import analyze
from kvcap.lab.quality import agreement, measuring, sweep
from kvcap.lab.quality.cells import Setting
from kvcap.lab.texts import Text

CONFIG = tiny_model("llama").config


def setting(policy: str, **options: Any) -> Setting:
    return Setting(
        "pocket",
        "float32",
        "niah_single",
        400,
        policy,
        "compact",
        64,
        2,
        0,
        16,
        options=tuple(options.items()),
    )


@pytest.mark.parametrize(("policy", "options", "sinks"), [
    ("keydiff", {}, 0), ("keydiff", {"sink_tokens": 4}, 4), ("keydiff", {"sink_tokens": 0}, 0),
    ("streaming_llm", {}, 4), ("streaming_llm", {"sink_tokens": 6}, 6),
    ("obcache-h2o", {}, 4),  # of its paper
])  # fmt: skip
def test_caches_of_cells_pin_what_the_paper_pins(policy, options, sinks):
    for new_cache in (measuring.new_cache, lambda *given: agreement._new_cache(*given, 400)):
        assert new_cache(CONFIG, setting(policy, **options)).sinks == sinks


@pytest.mark.parametrize(("options", "kept"), [({}, False), ({"sink_tokens": 4}, True)])
def test_so_do_diagnostics(options, kept):
    ids = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:80] + 3
    ids[:20] = 5  # all alike, so that keydiff evicts them first
    text = Text(tiny_model("llama"), "tiny", "text", ids.tolist(), [""] * 80)
    for layer in text.kept("keydiff", 32, 16, options):
        assert bool(layer[:, :4].all()) == kept


@pytest.mark.parametrize(("given", "options"), [
    ([], {}), (["--sink-tokens", "4"], {"sink_tokens": 4}),
    (["--sink-tokens", "0", "--policy-option", "window=16"], {"sink_tokens": 0, "window": 16}),
])  # fmt: skip
def test_the_option_of_the_commands(given, options, monkeypatch, tmp_path):
    seen = []

    def stop(*arguments: Any, **_: Any) -> None:
        seen.append(arguments)
        raise ValueError("seen")

    monkeypatch.setattr(sweep, "run", stop)
    monkeypatch.setattr(analyze, "run", stop)
    names = ["--policies", "keydiff,snapkv", "--out", str(tmp_path)]
    assert cli.run(["eval", "pocket", *names, *given]) == 2
    assert cli.run(["analyze", "pocket", "kept", *names, "--tokens", "64", *given]) == 2
    assert seen[0][0].options == seen[1][2].policy_options == options
