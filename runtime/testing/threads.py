"""Extends PyTorch's count of memory to every Python thread; PyTorch itself counts in one.

PyTorch finds the profiler that an allocation is reported to in thread-local state. It hands that to
its own worker threads (as of a backward pass) but not to Python's. The profiler's option
`profile_all_threads` loses memory events altogether (pytorch/pytorch#166121). So each Python thread
is made to share the state when it next runs: new ones by `threading.setprofile`, those that run
already by `threading.setprofile_all_threads`, or its equivalent before Python 3.12.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

Hook = Callable[[FrameType, str, Any], None]
LIBRARIES = {"linux": "libc10.so", "darwin": "libc10.dylib", "win32": "c10.dll"}
STATE = "ThreadLocalDebugInfo"
ITANIUM = (
    f"_ZN3c1020{STATE}7currentEv",
    f"_ZN3c1020{STATE}22_forceCurrentDebugInfoESt10shared_ptrIS0_E",
)
MICROSOFT = (
    f"?current@{STATE}@c10@@SA?AV?$shared_ptr@V{STATE}@c10@@@std@@XZ",
    f"?_forceCurrentDebugInfo@{STATE}@c10@@SAXV?$shared_ptr@V{STATE}@c10@@@std@@@Z",
)
PATIENCE = 5.0  # seconds to wait for a thread that goes on running


class ThreadsNotCounted(RuntimeError):
    """An error that says that this build of PyTorch cannot count other threads' allocations."""


class _Pointer(ctypes.Structure):
    """A `std::shared_ptr` with one word more, so that every ABI returns it through memory."""

    _fields_ = (("object", ctypes.c_void_p), ("count", ctypes.c_void_p), ("_", ctypes.c_void_p))


class _State:
    """A pair of PyTorch's functions that read and replace a thread's state."""

    def __init__(self) -> None:
        try:
            name = LIBRARIES["linux" if sys.platform.startswith("linux") else sys.platform]
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            current, force = MICROSOFT if sys.platform == "win32" else ITANIUM
            # A new reference to the state of this thread.
            self.current = library[current]
            self._force = library[force]
        except (KeyError, OSError, AttributeError) as error:
            raise ThreadsNotCounted(
                f"PyTorch {torch.__version__} does not offer what counting in every thread needs "
                f"({error}); measure in a fresh process: process_peak, or process=True"
            ) from error
        self.current.restype, self.current.argtypes = _Pointer, ()
        self._force.restype, self._force.argtypes = None, (ctypes.POINTER(_Pointer),)

    def replace(self, state: _Pointer) -> None:
        """Make `state` this thread's; its reference passes to the thread."""
        self._force(_Pointer(state.object, state.count, None))


class SharedCount:
    """A link that reports the allocations of every Python thread to this thread's profiler.

    Args:
        record: called in each other thread once it counts, with the frame that runs there; returns
            the profile function that the thread has until the end, or None.
    """

    def __init__(self, record: Callable[[FrameType], Hook | None] = lambda frame: None) -> None:
        self._record = record
        self._api = _State()
        self._on = False
        self._counting: dict[int, int] = {}  # ident → native id, of threads that share the state

    def start(self) -> None:
        """Share the state of this thread, whose profiler is on, with all others."""
        self._state = self._api.current()
        self._main, self._on = threading.get_ident(), True
        self._before = threading.getprofile()
        threading.setprofile(self._join)
        _in_running_threads(self._join)

    def stop(self) -> None:
        """Stop counting in all other threads; to be called before the profiler is switched off."""
        threading.setprofile(self._before)
        self._on = False
        if self._alive():
            _in_running_threads(self._leave)
        # The profiler's lists must not be read while a thread writes to them.
        until, quiet = time.monotonic() + PATIENCE, 0
        while quiet < 3 and self._alive() and time.monotonic() < until:
            quiet = 0 if any(map(_runs, self._alive())) else quiet + 1
            time.sleep(0.001)

    def release(self) -> None:
        """Give the reference to the profiler's state back, once the profiler is switched off."""
        own = self._api.current()
        self._api.replace(self._state)
        self._api.replace(own)

    def _alive(self) -> list[int]:
        frames = sys._current_frames()
        return [native for ident, native in list(self._counting.items()) if ident in frames]

    def _join(self, frame: FrameType, event: str, arg: Any) -> None:
        """Share the state with another thread, in which Python calls this hook."""
        if not self._on or threading.get_ident() == self._main:
            sys.setprofile(None)
            return
        self._api.replace(self._state)  # the reference is borrowed,
        self._api.current()  # takes a reference that is never given back: it is owned then
        self._counting[threading.get_ident()] = threading.get_native_id()
        then = self._record(frame) or self._before
        sys.setprofile(then)
        if then is not None:
            then(frame, event, arg)  # type: ignore[arg-type]

    def _leave(self, frame: FrameType, event: str, arg: Any) -> None:
        sys.setprofile(None)
        if self._counting.pop(threading.get_ident(), None) is not None:
            self._api.replace(_Pointer())


def _runs(native: int) -> bool:
    """Return whether a thread is running; one that waits allocates nothing."""
    try:
        status = Path(f"/proc/self/task/{native}/stat").read_text()
    except OSError:
        return not sys.platform.startswith("linux")
    return status.rpartition(")")[2].split()[0] == "R"


def _in_running_threads(hook: Hook) -> None:
    """Make every other thread that runs Python call `hook` at its next call or return."""
    if sys.version_info >= (3, 12):
        new, own = threading.getprofile(), sys.getprofile()
        threading.setprofile_all_threads(hook)
        threading.setprofile(new)
        sys.setprofile(own)
        return
    _pending[:] = [hook]
    api = ctypes.pythonapi
    for name in (
        "PyInterpreterState_Get",
        "PyInterpreterState_ThreadHead",
        "PyThreadState_Next",
        "PyThreadState_Get",
    ):
        getattr(api, name).restype = ctypes.c_void_p
    here = api.PyThreadState_Get()
    thread = api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    while thread:
        if thread != here:
            api._PyEval_SetProfile(ctypes.c_void_p(thread), _AS_TRACE_FUNCTION, None)
        thread = api.PyThreadState_Next(ctypes.c_void_p(thread))


def _adopt(*_: Any) -> int:
    """Install the latest hook in a thread that ran already."""
    sys.setprofile(_pending[-1])
    return 0


_pending: list[Hook] = []
_AS_TRACE_FUNCTION = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
)(_adopt)
