"""Compiles the inner loop on first use and keeps the result, so that every later run starts at once.

numba looks only at the file of the outermost function when it decides whether the code it kept is still valid. It would miss
a change in a function called from there, so the folder's name is a digest of all compiled sources: a new version never
loads old machine code. An image may bring code that it compiled for any processor of its kind (NUMBA_CPU_NAME=generic) in the
folder PLIMSOLL_COMPILED: it is copied into an empty cache, since numba writes beside what it reads. Without numba, or with
PLIMSOLL_COMPILE=0 in the environment, the same functions run as plain Python: at once, but about a hundred times slower, which
a server with light traffic does not notice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

SOURCES = (
    "admission.py", "clock.py", "compiled.py", "encoder.py", "groups.py", "layout.py", "open_loop.py", "pool.py",
    "queues.py", "scheduler.py", "trace.py",
)  # fmt: skip

try:
    if os.environ.get("PLIMSOLL_COMPILE") == "0":
        raise ImportError("not wanted")
    import numba

    HAS_NUMBA = True
except ImportError:  # pragma: no cover - the tests install it
    HAS_NUMBA = False


# References are not counted (_nrt): no function here makes or drops an array, and the counting took four fifths of the time.
_OPTIONS = {"nogil": True, "error_model": "numpy"}
_UNCOUNTED = {"_nrt": False}
_PART = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_MONTH_S = 30 * 86_400


def _jit(function: Callable[P, R], **options: object) -> Callable[P, R]:
    """Compiles with numba, where installed; without its undocumented options, should a release no longer know them."""
    if not HAS_NUMBA:  # pragma: no cover - the tests install it
        return function
    try:
        made: Callable[P, R] = numba.njit(**options, **_OPTIONS, **_UNCOUNTED)(function)
    except (KeyError, TypeError):  # pragma: no cover - a numba yet to come
        known = {name: value for name, value in options.items() if name == "cache"}
        made = numba.njit(**known, **_OPTIONS)(function)
    return made


def _made_ours(folder: Path) -> bool:
    """Makes the folder; True if nobody else can write to it, because machine code is loaded from it."""
    folder.mkdir(exist_ok=True, mode=0o700)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    if folder.stat().st_mode & 0o022:
        folder.chmod(0o700)
    return os.access(folder, os.W_OK)


def sources_digest() -> str:
    """A digest of the scheduler's sources, which names compiled code and kept results."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


@cache
def cache_folder() -> Path:
    """Returns the folder for compiled code: in the user's cache, or a private temporary one where that cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    for root in (Path(base) / "plimsoll", Path(tempfile.gettempdir()) / f"plimsoll-{os.getuid()}"):
        folder = root / "compiled" / sources_digest()
        try:
            root.mkdir(parents=True, exist_ok=True)
            if all(_made_ours(part) for part in (root, folder.parent, folder)):
                brought = Path(os.environ.get("PLIMSOLL_COMPILED") or "/nowhere") / folder.name
                if os.access(brought, os.R_OK | os.X_OK) and not any(folder.iterdir()):
                    shutil.copytree(brought, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
                    for part in (folder, *filter(Path.is_dir, folder.rglob("*"))):
                        part.chmod(0o700)  # an image's folder may be read-only
                for other in folder.parent.iterdir():  # code of older versions that nobody has used for a month
                    if other != folder and folder.stat().st_mtime - other.stat().st_mtime > _MONTH_S:
                        shutil.rmtree(other, ignore_errors=True)
                folder.touch()
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="plimsoll-compiled-"))


@contextmanager
def telling(say: Callable[[], None]) -> Iterator[None]:
    """A context that calls `say` once if something is compiled in it: that takes ten to twenty seconds."""
    if not HAS_NUMBA:  # pragma: no cover - the tests install it
        yield
        return
    from numba.core import event

    class Teller(event.Listener):  # type: ignore[misc]
        told = False

        def on_start(self, begun: event.Event) -> None:
            # Small functions are compiled before anybody has read a line about them.
            if not self.told and begun.data["dispatcher"].py_func.__name__ in ("advance", "go_on"):
                self.told = True
                say()

        def on_end(self, _event: object) -> None:
            pass

    teller = Teller()
    event.register("numba:compile", teller)
    try:
        yield
    finally:
        event.unregister("numba:compile", teller)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Makes numba compile this function when it is first called, and keep the result."""
    if not HAS_NUMBA:  # pragma: no cover - the tests install it
        return function
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = os.environ.get("NUMBA_CACHE_DIR") or str(cache_folder())
    try:
        return _jit(function, cache=True)
    finally:
        numba.config.CACHE_DIR = before


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Part of a compiled function: compiled with it, never called from Python or kept on its own."""
    return _jit(function, **_PART)


def hot(function: Callable[P, R]) -> Callable[P, R]:
    """A part that runs in every step: inlined, because many parts take less time than passing the arrays to them."""
    return _jit(function, forceinline=True, **_PART)


def wrapping(function: Callable[P, R]) -> Callable[P, R]:
    """A hot part whose numbers are meant to overflow; without numba it silences numpy's warning of that."""
    if HAS_NUMBA:
        return hot(function)

    @wraps(function)  # pragma: no cover - the tests install it
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(over="ignore"):
            return function(*args, **kwargs)

    return quiet


@hot
def wide(number: int | np.uint64) -> int:
    """The number as 64 bits. A function is compiled once for every mixture of types it is called with: this leaves only one."""
    return np.int64(number)  # type: ignore[return-value]


WIDE: tuple[int, ...] = tuple(np.int64(number) for number in range(3))  # type: ignore[misc]
"""Small numbers of that type: a bare 0 would be another."""
