"""Which folder and which room may import which: the tables of docs/architecture.md, enforced."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from make import in_python, ran
from tools import tiny_decoder

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "policies": set(),
    "kernels": {"policies"},
    "runtime": {"policies", "kernels", "pocket"},
    "export": {"policies", "runtime"},
    "android_bench": {"export", "runtime"},
    "pocket": set(),
    "evals": {"runtime", "policies", "kernels", "pocket"},
    "serve": {"runtime", "policies", "kernels", "pocket"},
    "lab": {"runtime", "policies", "kernels", "pocket", "evals", "android_bench"},
}
ONLY_IN = {  # heavy or optional packages, and the one place each is imported
    "triton": {"kernels"},
    "onnx": {"export", "runtime"},
    "onnxruntime": {"export", "runtime"},
    "starlette": {"android_bench", "serve"},
    "uvicorn": {"android_bench", "serve"},
    "pydantic": {"serve"},
    "prometheus_client": {"serve"},
    "llguidance": {"runtime"},
    "adbutils": {"android_bench"},
    "matplotlib": {"lab", "android_bench"},
    "ray": {"lab", "runtime", "serve"},
    "rouge_score": {"lab"},
    "rapidfuzz": {"lab"},
    "jieba": {"lab"},
    "lm_eval": {"evals"},
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*(("kvcap", *above) if above else ()), *filter(None, [node.module])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


# Rooms of runtime/ from the ground up: each may import those before it, at any place of a file.
ROOMS = (
    "types", "errors", "units", "cores", "interrupts", "files", "cluster", "memory", "attention",
    "models", "cache", "recall", "planning", "session", "backends", "testing", "cli",
)  # fmt: skip


def module_graph(folder: str) -> dict[str, set[str]]:
    """Every module of a folder and the modules of it that it imports, lazily or for types too."""
    names = {}
    for path in modules(folder):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(("kvcap", *(p for p in parts if p != "__init__")))] = path
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        imported = imports(path) & names.keys() - {name, f"kvcap.{folder}"}
        # `from package import module` names both; only the module is meant.
        graph[name] = {x for x in imported if not any(y.startswith(f"{x}.") for y in imported)}
    return graph


def room(name: str) -> str:
    return name.split(".")[2] if name.count(".") > 1 else ""


def test_rooms_import_only_what_lies_below_them():
    for name, imported in module_graph("runtime").items():
        if not room(name):
            continue
        for other in imported:
            assert ROOMS.index(room(other)) <= ROOMS.index(room(name)), f"{name} imports {other}"


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Cycles of a graph, one for every part of it that has any."""
    left = {name: set(others) for name, others in graph.items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        for name in free:
            del left[name]
    circles = []
    while left:
        path = [next(iter(left))]
        while (after := next(iter(left[path[-1]] & left.keys()))) not in path:
            path.append(after)
        circles.append([*path[path.index(after) :], after])
        for name in path:
            del left[name]
        while free := {name for name, others in left.items() if not others & left.keys()}:
            for name in free:
                del left[name]
    return circles


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_no_modules_of_a_folder_import_each_other_in_a_circle(folder):
    assert not cycles(module_graph(folder))


def test_nothing_of_the_runtime_imports_kvcap_itself():
    """Whose names import the runtime; what lies beside it in src/kvcap may be imported."""
    beside = {
        "kvcap.__version__",
        "kvcap.dtypes",
        "kvcap.import_hooks",
        "kvcap.schema",
        "kvcap.sinks",
    }
    for path in modules("runtime"):
        for name in imports(path) - beside:
            parts = name.split(".")
            public = parts[0] == "kvcap" and len(parts) == 2 and parts[1] not in MAY_IMPORT
            assert not public, f"{path} imports {name}"


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


def test_the_source_links_point_to_the_root_folders():
    for folder in MAY_IMPORT:
        link = ROOT / "src" / "kvcap" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return ran(
        [sys.executable, "-P", "-c", code]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-I", "-c", code],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )


def test_importing_kvcap_loads_neither_torch_nor_transformers():
    done = python("import kvcap, sys; assert not {'torch', 'transformers'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


COMMANDS = {  # which of kvcap's own commands a command need not import
    f"kvcap.{folder}.commands" for folder in ("android_bench", "evals", "export", "lab", "serve")
}
HEAVY = {  # other packages whose import takes long, and rooms of kvcap that bring them or are large
    "huggingface_hub", "jinja2", "lm_eval", "matplotlib", "numpy", "onnx", "onnxruntime",
    "onnxscript", "prompt_toolkit", "ray", "rich.console", "safetensors", "sqlite3", "starlette",
    "tokenizers", "torch", "torch._dynamo", "transformers", "transformers.modeling_utils", "triton",
    "pydantic", "typer", "uvicorn",
    *COMMANDS, "kvcap.android_bench.runner", "kvcap.evals.bench", "kvcap.evals.quality",
    "kvcap.export.decoder", "kvcap.lab.bench", "kvcap.policies",
    "kvcap.runtime.backends.onnxruntime", "kvcap.runtime.backends.pytorch",
    "kvcap.runtime.session.session", "kvcap.serve.app",
}  # fmt: skip
MODELS = {  # of transformers, and what their code brings
    "huggingface_hub", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "torch._dynamo",
    "transformers", "transformers.modeling_utils", "triton", "kvcap.policies",
    "kvcap.runtime.session.session",
}  # fmt: skip
MAY_LOAD: dict[str, set[str]] = {  # of the heavy ones, by what is run; DIR is an exported decoder
    "--help": COMMANDS,
    "policies": {"kvcap.evals.commands", "rich.console"},
    "policies keydiff-window": {"kvcap.evals.commands", "rich.console"},
    "plan pocket": {*MODELS, "rich.console"},
    "tune --help": {"kvcap.evals.commands"},
    "generate pocket Hello --max-new-tokens 1 -q": {
        *MODELS, "sqlite3", "kvcap.runtime.backends.pytorch",
    },
    "generate DIR Hello --backend onnxruntime --max-new-tokens 1 -q": {
        "jinja2", "numpy", "onnxruntime", "safetensors", "sqlite3", "tokenizers",
        "kvcap.runtime.backends.onnxruntime", "kvcap.runtime.session.session",
    },
    "export --help": {"kvcap.export.commands"},
    "serve --help": {"kvcap.serve.commands"},
    "bench --help": {"kvcap.lab.commands"},
    "eval --help": {"kvcap.lab.commands"},
}  # fmt: skip
COMMAND = """
import gc, json, sys
from kvcap.cli import main
sys.argv = ["kvcap", *{words}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
looks = gc.get_stats()[2]["collections"]
names = sys.modules.get("transformers.utils.import_utils")
known = names.create_import_structure_from_path.cache_info()._asdict() if names else None
print(json.dumps([sorted({heavy} & sys.modules.keys()), looks, known]))
"""


@pytest.mark.parametrize(
    "command",
    [pytest.param(x, marks=[pytest.mark.slow] if "DIR" in x else []) for x in MAY_LOAD],
)
def test_a_command_imports_only_what_it_needs(command, tmp_path_factory):
    words = command.split()
    if "DIR" in words:
        words[words.index("DIR")] = str(tiny_decoder(tmp_path_factory) / "decoder")
    done = python(COMMAND.format(words=words, heavy=HEAVY))
    assert done.returncode == 0, done.stderr
    imported, collections, known = json.loads(done.stdout.splitlines()[-1])
    assert {*imported} <= MAY_LOAD[command]
    assert collections <= 1, "of all objects, while imports make them"
    if known is not None:
        assert known["hits"] > known["misses"] / 2, "most folders of transformers are read once"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "asks",
    [
        "x = torch.zeros(1, 1, 1, 64); kernels.decode.covers(x, x, x)",
        "kernels.rows.covers([torch.zeros(5, 8)] * 2 + [torch.zeros(5, dtype=torch.int32)])",
    ],
)
def test_asking_a_kernel_imports_no_triton_and_touches_no_device(asks):
    done = python(
        f"import os, sys, torch; os.environ['TRITON_INTERPRET'] = '1'; "
        f"from kvcap import kernels; from kvcap.kernels import decode, rows; "
        f"{asks}; assert 'triton' not in sys.modules; assert not torch.cuda.is_initialized()"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow(ci=0)
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
    done = in_python(
        "import sys, runpy\nsys.argv = ['kvcap', '--help']\n"
        "try:\n    runpy.run_module('kvcap', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as e:\n    assert not e.code, e.code\n"
        "assert sys.path[0] != '', sys.path",
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_had():
    import kvcap

    for name in kvcap.__all__:
        assert getattr(kvcap, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        kvcap.Nothing  # noqa: B018


def named_by(script: Path) -> set[tuple[str, str]]:
    """Return what a script imports of kvcap: modules, and a name of each."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvcap")
        for alias in node.names
    }


def test_scripts_import_what_there_is():
    scripts = [x for x in (ROOT / "scripts").iterdir() if x.is_file()]
    written = [x for x in scripts if "python" in x.read_text().partition("\n")[0]]
    assert len(written) > 10
    for module, name in sorted(set[tuple[str, str]]().union(*map(named_by, written))):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
