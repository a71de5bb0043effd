"""A model that no graph can run is refused by its config's JSON, before PyTorch is imported."""

from __future__ import annotations

import json

import pytest
from families import ALL, config_of, model_type
from make import in_python

from kvcap.export.decoder.refusal import refuse_by_config
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.config import ModelShape, is_listed
from kvcap.runtime.models.kinds import not_exportable

LISTED = [name for name in ALL if is_listed(model_type(name))]


@pytest.mark.parametrize("name", LISTED)
def test_the_json_says_what_the_config_says_or_nothing(name):
    config = config_of(name)
    shape = ModelShape.of(config)
    said = not_exportable(json.loads(config.to_json_string(use_diff=False)))
    assert said in ("", shape.not_exportable)
    known = shape.neither or (shape.latent is None and "experts" in shape.not_exportable)
    assert bool(said) or not known


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_local_experts": 8}, "every token chooses among experts"),
        ({"text_config": {"num_experts": 4}}, "every token chooses among experts"),
        ({"layer_types": ["conv", "full_attention", "conv"]}, "layers 0, 2 keep a recurrent state"),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
            "layers 2 to 3 read 0 and 1",
        ),
        *(
            (config, "")
            for config in (
                {},
                {"num_experts": 1},
                {"num_experts": "8", "layer_types": "conv", "text_config": 3},
                {"layer_types": [["conv"]]},
                {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 2},
                {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": "1"},
            )
        ),
    ],
)
def test_what_a_config_shows(config, why):
    assert not_exportable(config) == why


def test_a_repository_that_is_not_here_is_left_to_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    refuse_by_config("nobody/nothing")


def test_a_download_is_refused_too(monkeypatch, tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "mixtral", "num_local_experts": 8}')
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(file))
    with pytest.raises(NotExportable, match=r"in this mixtral there is .* among experts"):
        refuse_by_config("somebody/something")


def test_a_refusal_imports_neither_torch_nor_transformers(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 8}')
    code = (
        "import sys; from kvcap.cli import run; code = run(sys.argv[1:]); "
        "print(code, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    arguments = ["export", "decoder", str(tmp_path), "--out", str(tmp_path / "out")]
    done = in_python(code, *arguments)
    assert done.stdout == "2 []\n"
    assert "every token chooses among experts" in done.stderr
    assert "--backend torch" in done.stderr
