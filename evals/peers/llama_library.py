"""Finds a build of llama.cpp's library, and calls it by ctypes.

Structures differ between versions; only fields that are in the same place in all of them are read
or written, so that builds of different ages work. Knows no benchmark.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from .serve import Unusable

VARIABLE = "LLAMA_CPP_LIB_PATH"  # llama-cpp-python reads the same variable
LIBRARY = re.compile(r"(lib)?llama(\.v[\d.]+)?\.(so|dylib|dll)(\.[\d.]+)?")
GGML = re.compile(r"(lib)?ggml(\.v[\d.]+)?\.(so|dylib|dll)(\.[\d.]+)?")
SYSTEMS = {"linux": "linux", "darwin": "mac", "win32": "win"}
MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
SPARE = 1024  # bytes, more than any version's structure of settings has
# Defaults of the last settings of a context, which every version has in this order: embeddings,
# offload_kqv, no_perf, op_offload, swa_full, kv_unified.
SWITCHES, SLIDING_WHOLE = bytes((0, 1, 1, 1, 1, 0)), 4
FTYPES = {"Q4_0": 2, "Q8_0": 7}
NO_TOKENIZER = 0


class LlamaSettings(ctypes.Structure):
    """A structure of settings with known first numbers, and room for the rest."""

    _fields_ = (("numbers", c_uint32 * 6), ("rest", ctypes.c_ubyte * (SPARE - 24)))


class LlamaBatch(ctypes.Structure):
    """llama.cpp's structure of tokens to read."""

    _fields_ = (
        ("n_tokens", c_int32), ("token", c_void_p), ("embd", c_void_p), ("pos", c_void_p),
        ("n_seq_id", c_void_p), ("seq_id", c_void_p), ("logits", c_void_p),
    )  # fmt: skip


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (LlamaSettings, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, LlamaSettings)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_n_embd": (c_int32, (c_void_p,)),
    "llama_model_n_head": (c_int32, (c_void_p,)),
    "llama_model_n_head_kv": (c_int32, (c_void_p,)),
    "llama_model_n_layer": (c_int32, (c_void_p,)),
    "llama_model_quantize": (c_uint32, (c_char_p, c_char_p, POINTER(LlamaSettings))),
    "llama_model_quantize_default_params": (LlamaSettings, ()),
    "llama_context_default_params": (LlamaSettings, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, LlamaSettings)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_batch_get_one": (LlamaBatch, (c_void_p, c_int32)),
    "llama_decode": (c_int32, (c_void_p, LlamaBatch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_state_get_size": (c_size_t, (c_void_p,)),
    "llama_sampler_init_greedy": (c_void_p, ()),
    "llama_sampler_sample": (c_int32, (c_void_p, c_void_p, c_int32)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_type": (c_int32, (c_void_p,)),
    "llama_tokenize": (
        c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    ),
}  # fmt: skip


def found() -> Path:
    """Return llama.cpp's library: that of `VARIABLE`, of llama-cpp-python, or of npm's build.

    Raises:
        Unusable: there is none; the message lists the places.
    """
    given = os.environ.get(VARIABLE)
    places = (Path(given),) if given else tuple(_places())
    for place in places:
        for folder in _folders(place):
            for file in sorted(folder.iterdir()) if folder.is_dir() else ():
                if LIBRARY.fullmatch(file.name):
                    return file
    if given:
        raise Unusable(
            f"no libllama lies in {given}, which {VARIABLE} names; give the folder of "
            f"llama-cpp-python's libraries, or one where `npm install node-llama-cpp` was run"
        )
    raise Unusable(
        "no library of llama.cpp was found: llama-cpp-python is not installed for "
        f"{sys.executable}, and no node_modules/@node-llama-cpp/{_npm_name()} lies in {Path.cwd()} "
        "or above it; run `npm install node-llama-cpp` or `pip install llama-cpp-python`, or name "
        f"the folder of libllama in {VARIABLE}"
    )


def _places() -> Iterator[Path]:
    if spec := importlib.util.find_spec("llama_cpp"):
        yield from map(Path, spec.submodule_search_locations or ())
    here = Path.cwd()
    yield from (here, *here.parents)


def _folders(place: Path) -> Iterator[Path]:
    """Yield folders in which a library can lie below a place, as packages of Python or npm do."""
    name = _npm_name()
    yield place
    yield place / "lib"
    for package in (
        Path("node_modules", "@node-llama-cpp", name),
        Path("@node-llama-cpp", name),
        Path("package"),
        Path(),
    ):
        yield place / package / "bins" / name


def _npm_name() -> str:
    """Return npm's name for this kind of machine without a GPU, such as 'linux-x64'."""
    machine = platform.machine().lower()
    return f"{SYSTEMS.get(sys.platform, sys.platform)}-{MACHINES.get(machine, machine)}"


def described(file: Path) -> dict[str, str]:
    """Return the version of the library's package, and llama.cpp's own if it is known."""
    for folder in file.parents[:3]:
        about = folder / "package.json"
        if about.exists():
            package = json.loads(about.read_text())
            versions = {str(package["name"]): str(package["version"])}
            built = file.parent / "_nlcBuildMetadata.json"
            if built.exists():
                release = json.loads(built.read_text())["buildOptions"]["llamaCpp"]["release"]
                versions["llama.cpp"] = str(release)
            return versions
    from importlib.metadata import PackageNotFoundError, version

    try:
        return {"llama-cpp-python": version("llama-cpp-python")}
    except PackageNotFoundError:
        return {"llama.cpp": str(file)}


class Library:
    """The loaded library of llama.cpp, with its fastest code for this CPU.

    Args:
        file: the library; by default the result of `found`.

    Raises:
        Unusable: there is no library, or it has another interface.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or found()
        try:
            ggml = [
                ctypes.CDLL(str(beside), ctypes.RTLD_GLOBAL)
                for beside in sorted(self.file.parent.iterdir())
                if GGML.fullmatch(beside.name)
            ]
            self.calls: Any = ctypes.CDLL(str(self.file))
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(self.calls, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise Unusable(f"{self.file} cannot be used: {error}; give another build") from error
        for library in ggml:  # npm's build has a library for each kind of CPU
            load = getattr(library, "ggml_backend_load_all_from_path", None)
            if load is not None:
                load.restype, load.argtypes = None, (c_char_p,)
                load(str(self.file.parent).encode())
                break
        self.calls.llama_backend_init()

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of the library, and the name of its code for this CPU."""
        maps = Path("/proc/self/maps")
        chosen = re.search(r"ggml-cpu-(\w+)\.so", maps.read_text() if maps.exists() else "")
        return {**described(self.file), **({"ggml-cpu": chosen[1]} if chosen else {})}

    def quantise(self, whole: Path, out: Path, kind: str) -> None:
        """Write the GGUF file `whole` to `out` with weights of another type, one of `FTYPES`."""
        settings = self.calls.llama_model_quantize_default_params()
        settings.numbers[1] = FTYPES[kind]
        if self.calls.llama_model_quantize(str(whole).encode(), str(out).encode(), byref(settings)):
            raise RuntimeError(f"llama.cpp cannot quantise {whole.name} to {kind}")


class Context:
    """A model loaded for the CPU, with room for `tokens` tokens of one sequence."""

    def __init__(self, library: Library, file: Path, tokens: int, threads: int) -> None:
        self.calls = calls = library.calls
        model = calls.llama_model_default_params()
        model.numbers[4] = 0  # the number of layers on a GPU, which follows two pointers
        self.model = calls.llama_model_load_from_file(str(file).encode(), model)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file.name}")
        self.context = calls.llama_init_from_model(self.model, self._settings(tokens))
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {tokens} tokens")
        calls.llama_set_n_threads(self.context, threads, threads)
        self.vocabulary = calls.llama_model_get_vocab(self.model)
        self.memory = calls.llama_get_memory(self.context)
        self.batch = calls.llama_n_batch(self.context)

    def _settings(self, tokens: int) -> LlamaSettings:
        """Return settings of a context whose sliding layers keep only their windows."""
        settings: LlamaSettings = self.calls.llama_context_default_params()
        raw = bytes(settings)
        if (*settings.numbers[:4],) != (512, 2048, 512, 1) or raw.count(SWITCHES) != 1:
            raise Unusable(
                "this build of llama.cpp orders the settings of a context otherwise than builds "
                "of 2025 and 2026 do; give another"
            )
        settings.numbers[0] = tokens
        at = ctypes.addressof(settings) + raw.index(SWITCHES) + SLIDING_WHOLE
        c_bool.from_address(at).value = False
        return settings

    def read(self, ids: Sequence[int]) -> None:
        """Read tokens that follow those read before."""
        for first in range(0, len(ids), self.batch):
            part = ids[first : first + self.batch]
            tokens = (c_int32 * len(part))(*part)
            batch = self.calls.llama_batch_get_one(ctypes.addressof(tokens), len(part))
            if failed := self.calls.llama_decode(self.context, batch):
                raise RuntimeError(f"llama.cpp refused {len(part)} tokens with code {failed}")

    def cut(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        if not tokens:
            self.calls.llama_memory_clear(self.memory, False)
        elif not self.calls.llama_memory_seq_rm(self.memory, 0, tokens, -1):
            raise RuntimeError(f"llama.cpp does not go back to {tokens} tokens")
        if self.calls.llama_memory_seq_pos_max(self.memory, 0) != tokens - 1:
            raise RuntimeError(f"llama.cpp does not hold {tokens} tokens")

    def tokens(self, text: str) -> list[int] | None:
        """Return the tokens of a text; None if the file has no tokenizer."""
        if self.calls.llama_vocab_type(self.vocabulary) == NO_TOKENIZER:
            return None
        raw = text.encode()
        room = (c_int32 * (len(raw) + 8))()
        count = self.calls.llama_tokenize(
            self.vocabulary, raw, len(raw), room, len(room), True, False
        )
        return list(room[:count])
