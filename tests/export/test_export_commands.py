"""`kvcap export decoder` says why it refuses options that PyTorch has and exports do not."""

from __future__ import annotations

import pytest

from kvcap.cli import run


@pytest.mark.parametrize(("options", "says"), [
    (["--kv-dtype", "int4"], ["one scale for each channel", "use int8"]),
    (["--kv-dtype", "int8-int4"], ["one scale for each channel", "use int8"]),
    (["--positions", "auto"], ["has them of one kind", "'compact' or 'true'"]),
])  # fmt: skip
def test_what_only_pytorch_has_is_refused_with_the_reason(options, says, tmp_path, capsys):
    assert run(["export", "decoder", "pocket", *options, "-o", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(text in line for text in says)
    assert not (tmp_path / "out").exists()


def test_a_decoder_is_refused_a_place_below_a_file_before_anything_is_read(tmp_path, kvcap):
    (file := tmp_path / "file").touch()
    assert "is a file, not a folder" in kvcap.refused(
        "export", "decoder", "no-model", "-o", str(file / "out")
    )
