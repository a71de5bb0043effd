"""Finds a build of llama.cpp's library and calls its C interface by ctypes.

The layout of its structures depends on its version. `LAYOUTS` lists the versions that were tried;
any other one is refused by name, and so is a build whose defaults differ from its version's. Knows
no cache and no policy.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcap.runtime.errors import ExtraMissing, LibraryUnusable
from kvcap.runtime.interrupts import interrupts_deferred

if TYPE_CHECKING:  # imported where cells are read, as starts do without
    import numpy as np
    from numpy.typing import NDArray

VARIABLE = "LLAMA_CPP_LIB_PATH"  # llama-cpp-python reads the same variable
LIBRARY = re.compile(r"(lib)?llama(\.v?[\d.]+)?\.(so|dylib|dll)(\.[\d.]+)?")
MODULE = re.compile(r"xllamacpp\.(abi3\.so|pyd)")
GGML = re.compile(r"(lib)?ggml(-base)?(\.v?[\d.]+)?\.(so|dylib|dll)(\.[\d.]+)?")
SYSTEMS = {"linux": "linux", "darwin": "mac", "win32": "win"}
MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
NODE_FOLDERS = ("/usr/local/lib", "/usr/lib", "/opt/homebrew/lib")  # of npm's global packages
BREW = Path(os.environ.get("HOMEBREW_PREFIX", "/opt/homebrew"), "lib")
SYSTEM_FOLDERS = (BREW, "/usr/local/lib", "/usr/lib")
SPARE = 512  # bytes, so that a version with longer structures has room to write its own
PAGE = 256  # cells: a context has a multiple of so many
F16, Q8_0, Q4_0 = 1, 8, 2
CELL_TYPES = {None: F16, "q8_0": Q8_0, "q4_0": Q4_0}
"""Holds ggml's number of each type that cells can have, by the name of `--kv-dtype`."""


class ModelSettings(ctypes.Structure):
    """The library's structure `llama_model_params`."""

    _fields_ = (
        ("devices", c_void_p),
        ("buffer_types", c_void_p),
        ("gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress", c_void_p),
        ("progress_data", c_void_p),
        ("overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("extra_buffers", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
        ("spare", ctypes.c_ubyte * SPARE),
    )


class ContextSettings(ctypes.Structure):
    """The first part of the library's structure `llama_context_params`, the same in all versions.

    `switches` are six booleans, whose place `Layout` knows.
    """

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("context_type", c_int32),
        ("rope_scaling", c_int32),
        ("pooling", c_int32),
        ("attention", c_int32),
        ("flash_attention", c_int32),
        ("floats", c_float * 6),
        ("yarn_length", c_uint32),
        ("defrag", c_float),
        ("eval_callback", c_void_p),
        ("eval_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", c_void_p),
        ("abort_data", c_void_p),
        ("spare", ctypes.c_ubyte * SPARE),
    )


class LlamaBatch(ctypes.Structure):
    """The library's structure of tokens to read."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


class NumberType(ctypes.Structure):
    """The library's structure of what it knows of a type of numbers."""

    _fields_ = (
        ("name", c_char_p),
        ("numbers", c_int64),  # of a unit
        ("interleaved", c_int64),
        ("nbytes", c_size_t),  # of a unit
        ("quantised", c_bool),
        ("to_float", c_void_p),  # 0: they are float32
    )


class Layout(NamedTuple):
    """A record of what differs between versions of the library."""

    switches: int  # bytes before the booleans of a context's settings
    gap: int  # bytes between a state's number of layers and its first layer


LAYOUTS = {"0.5": Layout(128, 0), "0.6": Layout(136, 8)}
"""Holds what differs, by the first two numbers of a version."""
SWITCHES = bytes((0, 1, 1, 1, 1, 0))
"""Holds the defaults of embeddings, offload_kqv, no_perf, op_offload, swa_full and kv_unified."""
SLIDING_WHOLE = 4  # the offset of swa_full among them
MODEL_DEFAULTS = {"split_mode": 1, "load_mode": -1, "lazy_mode": 1, "main_gpu": 0, "no_alloc": 0}
CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max": 0,
    "n_threads": 4, "n_threads_batch": 4, "rope_scaling": -1, "flash_attention": -1,
    "type_k": F16, "type_v": F16,
}  # fmt: skip
ToFloat = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
LogFunction = CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LogFunction, c_void_p)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_version": (c_char_p, ()),
    "llama_model_default_params": (ModelSettings, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelSettings)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_n_layer": (c_int32, (c_void_p,)),
    "llama_model_n_head": (c_int32, (c_void_p,)),
    "llama_model_n_embd": (c_int32, (c_void_p,)),
    "llama_model_n_swa": (c_int32, (c_void_p,)),
    "llama_model_n_params": (ctypes.c_uint64, (c_void_p,)),
    "llama_model_size": (ctypes.c_uint64, (c_void_p,)),
    "llama_model_desc": (c_int32, (c_void_p, c_char_p, c_size_t)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_has_decoder": (c_bool, (c_void_p,)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "llama_context_default_params": (ContextSettings, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextSettings)),
    "llama_free": (None, (c_void_p,)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_can_shift": (c_bool, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_add": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, LlamaBatch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_type": (c_int32, (c_void_p,)),
    "llama_vocab_get_attr": (c_int32, (c_void_p, c_int32)),
    "llama_token_to_piece": (
        c_int32, (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool),
    ),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_vocab_bos": (c_int32, (c_void_p,)),
    "llama_vocab_eos": (c_int32, (c_void_p,)),
    "llama_vocab_pad": (c_int32, (c_void_p,)),
    "llama_tokenize": (
        c_int32, (c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool),
    ),
    "llama_detokenize": (
        c_int32, (c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_bool, c_bool),
    ),
}  # fmt: skip


def find_library() -> Path | None:
    """Return the file of the best build that is there, or None.

    The place that `LLAMA_CPP_LIB_PATH` names comes first. Then come builds with code for each kind
    of CPU (npm's `@node-llama-cpp`, installed globally), which were measured to be faster, then
    those of Python's packages, Homebrew and the system.

    Raises:
        LibraryUnusable: `LLAMA_CPP_LIB_PATH` names a place without one.
    """
    if given := os.environ.get(VARIABLE):
        if (file := next(_libraries_in(Path(given)), None)) is not None:
            return file
        raise LibraryUnusable(
            f"no libllama lies in {given}, which {VARIABLE} names; give the library, its folder, "
            "or one where `npm install node-llama-cpp` was run"
        )
    return next((file for path in _candidates() for file in _libraries_in(path)), None)


def _candidates() -> Iterator[Path]:
    """Yield files and folders that may have a library, the best first; never the current folder."""
    yield from map(Path, NODE_FOLDERS)
    for package in ("llama_cpp", "xllamacpp"):
        if spec := importlib.util.find_spec(package):
            yield from (Path(folder) for folder in spec.submodule_search_locations or ())
    machine = platform.machine()
    yield from (Path(folder) for folder in (*SYSTEM_FOLDERS, f"/usr/lib/{machine}-linux-gnu"))


def _libraries_in(path: Path) -> Iterator[Path]:
    """Yield the library at a path: the file itself, or files in the folders of packages below."""
    if path.is_file():
        yield path
    name = npm_name()
    for folder in (
        path,
        path / "lib",
        *(
            path / package / "bins" / name
            for package in (
                Path("node_modules", "@node-llama-cpp", name),
                Path("node_modules", "node-llama-cpp", "node_modules", "@node-llama-cpp", name),
                Path("@node-llama-cpp", name),
                Path("package"),
                Path(),
            )
        ),
    ):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if LIBRARY.fullmatch(file.name) or MODULE.fullmatch(file.name):
                yield file


def npm_name() -> str:
    """Return npm's name for this kind of machine without a GPU, such as 'linux-x64'."""
    machine = platform.machine().lower()
    return f"{SYSTEMS.get(sys.platform, sys.platform)}-{MACHINES.get(machine, machine)}"


class Library:
    """A loaded library of llama.cpp, with its fastest code for this CPU.

    Args:
        file: the library.

    Raises:
        LibraryUnusable: it cannot be loaded, or is of a version that was not tried.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[str] = []
        """Holds what the library wrote to its log since `take_log` was last called."""
        try:
            self._beside = beside = [
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
                for path in sorted(file.parent.iterdir(), key=lambda p: "base" not in p.name)
                if GGML.fullmatch(path.name)
            ]
            self.calls: Any = ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(self.calls, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise self._unusable(f"it cannot be used: {error}") from error
        self._log = LogFunction(self._note)  # the library keeps no reference
        self.calls.llama_log_set(self._log, None)
        self.version: str = self.calls.llama_version().decode()
        self.layout = self._known_layout()
        self._check_defaults()
        with interrupts_deferred():  # one amid the library's call of `_note` would be lost
            for library in beside:  # npm's build has a library for each kind of CPU
                load = getattr(library, "ggml_backend_load_all_from_path", None)
                if load is not None:
                    load.restype, load.argtypes = None, (c_char_p,)
                    load(str(file.parent).encode())
                    break
            self.calls.llama_backend_init()

    def _note(self, level: int, text: bytes, _: Any) -> None:
        """Keep a line of the log."""
        self.lines.append(text.decode("utf-8", "replace"))

    def take_log(self) -> str:
        """Return the log since the last call, and begin it anew."""
        text = "".join(self.lines)
        self.lines.clear()
        return text

    @property
    def label(self) -> str:
        """Return the version of the library, and its code for this CPU where it says so."""
        maps = Path("/proc/self/maps")
        code = re.search(r"ggml-cpu-(\w+)\.so", maps.read_text() if maps.exists() else "")
        return f"llama.cpp {self.version}" + (f", code for {code[1]}" if code else "")

    def model_settings(self) -> ModelSettings:
        """Return the default settings of a model."""
        settings: ModelSettings = self.calls.llama_model_default_params()
        return settings

    def context_settings(self, *, sliding_whole: bool = False) -> ContextSettings:
        """Return the default settings of a context, whose sliding layers keep only their windows.

        Args:
            sliding_whole: whether sliding layers keep as many cells as others.
        """
        settings: ContextSettings = self.calls.llama_context_default_params()
        address = ctypes.addressof(settings) + self.layout.switches + SLIDING_WHOLE
        c_bool.from_address(address).value = sliding_whole
        return settings

    def type_of(self, kind: int) -> NumberType:
        """Return the library's description of its type of numbers `kind`."""
        known = self.symbol("ggml_get_type_traits", POINTER(NumberType), (ctypes.c_int,))
        number_type: NumberType = known(kind)[0]
        return number_type

    def floats(self, rows: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
        """Return the float32 numbers of rows of bytes of the type `kind`, by its own conversion."""
        import numpy as np

        known, source = self.type_of(kind), np.ascontiguousarray(rows)
        if not known.to_float:
            return source.view(np.float32)
        numbers = np.empty((len(rows), rows.shape[1] // known.nbytes * known.numbers), np.float32)
        ToFloat(known.to_float)(source.ctypes.data, numbers.ctypes.data, numbers.size)
        return numbers

    def symbol(self, name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
        """Return a function of ggml, which some builds have in a library of its own.

        Raises:
            LibraryUnusable: it has none of that name.
        """
        for library in (self.calls, *self._beside):
            function = getattr(library, name, None)
            if function is not None:
                function.restype, function.argtypes = result, arguments
                return function
        raise self._unusable(f"it has no {name}")

    def _known_layout(self) -> Layout:
        layout = LAYOUTS.get(".".join(self.version.split(".")[:2]))
        if layout is None:
            raise self._unusable(
                f"it is version {self.version}, and kvcap was tried with {', '.join(LAYOUTS)}"
            )
        return layout

    def _check_defaults(self) -> None:
        """Refuse a build whose structures do not hold the known defaults where they should."""
        model, context = self.model_settings(), self.calls.llama_context_default_params()
        wrong = [name for name, value in MODEL_DEFAULTS.items() if getattr(model, name) != value]
        wrong += [k for k, value in CONTEXT_DEFAULTS.items() if getattr(context, k) != value]
        offset = self.layout.switches
        if bytes(context)[offset : offset + len(SWITCHES)] != SWITCHES:
            wrong.append("swa_full")
        if wrong:
            raise self._unusable(
                f"it says that it is version {self.version}, and its settings are laid out "
                f"otherwise ({', '.join(wrong)})"
            )

    def _unusable(self, why: str) -> LibraryUnusable:
        return LibraryUnusable(
            f"{self.file}: {why}; name another build of llama.cpp in {VARIABLE}, or "
            "pip install xllamacpp"
        )


def load_library(file: Path | None = None) -> Library:
    """Return the library in `file`, or the best that is there; each is loaded once.

    Raises:
        ExtraMissing: there is none.
        LibraryUnusable: it cannot be used.
    """
    path = file or find_library()
    if path is None:
        raise ExtraMissing(
            "llama.cpp's library, which runs GGUF files, was not found; run: pip install "
            f"xllamacpp, or name the library of another build in {VARIABLE}"
        )
    return _loaded(path.resolve())


@functools.cache
def _loaded(file: Path) -> Library:
    """Return the library in a file, the same object each time, since a library has one log."""
    return Library(file)
