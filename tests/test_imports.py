"""Which folder may import which: the table of the README, enforced."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "policies": set(),
    "kernels": {"policies"},
    "runtime": {"policies", "kernels", "pocket"},
    "export": {"policies", "runtime"},
    "android_bench": {"export"},
    "pocket": set(),
    "evals": {"runtime", "policies", "kernels", "pocket"},
}
ONLY_IN = {  # heavy or optional packages, and the one place each is imported
    "triton": {"kernels"},
    "onnx": {"export", "runtime"},
    "onnxruntime": {"export", "runtime"},
    "optimum": {"export"},
    "starlette": {"android_bench"},
    "adbutils": {"android_bench"},
    "matplotlib": {"evals", "android_bench"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_what_the_table_allows(folder):
    assert modules(folder)
    for path in modules(folder):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "kvcap" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                assert parts[1] in MAY_IMPORT[folder] | {folder}, f"{path} imports {name}"
            assert parts[0] not in MAY_IMPORT, f"{path}: import kvcap.{name}"
            assert folder in ONLY_IN.get(parts[0], {folder}), f"{path} imports {name}"


def test_a_forbidden_import_would_be_seen(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("from kvcap import evals\nimport triton\n")
    assert {"kvcap.evals", "triton"} <= imports(file)


def test_the_source_links_point_to_the_root_folders():
    for folder in MAY_IMPORT:
        link = ROOT / "src" / "kvcap" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11)
        else [sys.executable, "-I", "-c", code],
        capture_output=True, text=True, cwd=cwd, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def test_importing_kvcap_loads_neither_torch_nor_transformers():
    done = python("import kvcap, sys; assert not {'torch', 'transformers'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "asks",
    [
        "x = torch.zeros(1, 1, 1, 64); kernels.decode.covers(x, x, x)",
        "kernels.evict.covers(torch.zeros(1, 1, 5, dtype=torch.int32), 1)",
    ],
)
def test_asking_a_kernel_imports_no_triton_and_touches_no_device(asks):
    done = python(
        f"import os, sys, torch; os.environ['TRITON_INTERPRET'] = '1'; "
        f"from kvcap import kernels; from kvcap.kernels import decode, evict; "
        f"{asks}; assert 'triton' not in sys.modules; assert not torch.cuda.is_initialized()"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_kvcap_makes_its_attention_known():
    for code in (
        "import kvcap; from transformers import AttentionInterface as A; "
        "import transformers.modeling_utils; assert 'kvcap' in A().valid_keys()",
        "import transformers.modeling_utils; import kvcap; "
        "assert 'kvcap' in transformers.AttentionInterface().valid_keys()",
    ):
        done = python(code)
        assert done.returncode == 0, done.stderr


def test_root_folders_do_not_shadow_packages_in_a_checkout():
    """`python -m kvcap` from the repository's root must not import ./kernels as `kernels`."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, runpy\nsys.argv = ['kvcap', '--help']\n"
         "try:\n    runpy.run_module('kvcap', run_name='__main__', alter_sys=True)\n"
         "except SystemExit as e:\n    assert not e.code, e.code\n"
         "assert sys.path[0] != '', sys.path"],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_had():
    import kvcap

    for name in kvcap.__all__:
        assert getattr(kvcap, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        kvcap.Nothing  # noqa: B018
