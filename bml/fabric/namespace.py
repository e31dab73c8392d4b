"""Network namespaces by name, where `ip netns` keeps them. All but `names` and `path_of` needs root."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from bml.topology.errors import FabricError

FOLDER = Path("/run/netns")

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 4096, 16384, 1 << 20
_MNT_DETACH = 2
_OWN = b"/proc/thread-self/ns/net"
_T = TypeVar("_T")

_libc = ctypes.CDLL(None, use_errno=True)


def names() -> list[str]:
    """Every namespace that has a name."""
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []


def path_of(name: str) -> str:
    """File by which a namespace is entered."""
    return str(FOLDER / name)


def is_alive(name: str) -> bool:
    """Whether there is a namespace behind the name: after a restart its file may be left, and no mount."""
    try:
        return os.stat(path_of(name)).st_dev == os.stat(_OWN).st_dev
    except FileNotFoundError:
        return False


def create(name: str, prepare: Callable[[], None] | None = None) -> None:
    """Make a namespace. `prepare` is called inside before it gets its name.

    Raises FabricError if it exists or this process may not.
    """
    _prepare_folder()
    target = path_of(name)
    try:
        os.close(os.open(target, os.O_RDONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        raise FabricError(f"there is a network namespace {name} already") from None

    def make() -> None:
        _call("unshare", _libc.unshare(_CLONE_NEWNET), name)
        if prepare is not None:
            prepare()
        _call("mount", _libc.mount(_OWN, target.encode(), b"none", _MS_BIND, None), name)

    try:
        in_thread(make)
    except BaseException:
        os.unlink(target)
        raise


def remove(name: str) -> None:
    """Take the name away: the kernel destroys the namespace when nobody is inside. Idempotent."""
    _libc.umount2(path_of(name).encode(), _MNT_DETACH)
    with suppress(FileNotFoundError):
        os.unlink(path_of(name))


def enter(path: str) -> None:
    """Move the calling thread, and all that it will start, into the namespace behind this file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FabricError(f"there is no network namespace {path}: is the emulated fabric up?") from None
    try:
        _call("setns", _libc.setns(descriptor, _CLONE_NEWNET), path)
    finally:
        os.close(descriptor)


def inside(name: str, function: Callable[[], _T]) -> _T:
    """Call `function` in a thread of its own inside the namespace; sockets that it opens stay there."""

    def run() -> _T:
        enter(path_of(name))
        return function()

    return in_thread(run)


def processes(wanted: Iterable[str]) -> dict[int, str]:
    """Processes inside these namespaces: pid -> command."""
    inodes = {os.stat(path_of(name)).st_ino for name in wanted}
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if os.stat(process / "ns/net").st_ino in inodes:
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


def kill(name: str) -> int:
    """Kill every process inside a namespace, as if its machine had lost its power; returns how many."""
    killed: set[int] = set()
    while found := processes([name]).keys() - killed:
        for process in sorted(found):  # parents first, so that nobody is left to say that another died
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed |= found  # the children that one had a moment ago are found in the next round
    return len(killed)


def _prepare_folder() -> None:
    """Make the folder a shared mount, as `ip netns` does, so that others see what is mounted in it."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    folder = str(FOLDER).encode()
    if _libc.mount(b"", folder, b"none", _MS_SHARED | _MS_REC, None) != 0:
        _call("mount", _libc.mount(folder, folder, b"none", _MS_BIND | _MS_REC, None), str(FOLDER))
        _call("mount", _libc.mount(b"", folder, b"none", _MS_SHARED | _MS_REC, None), str(FOLDER))


def _call(what: str, result: int, name: str) -> None:
    if result != 0:
        why = os.strerror(ctypes.get_errno())
        raise FabricError(f"{what} of network namespace {name}: {why}; it needs root and CAP_SYS_ADMIN")


def in_thread(function: Callable[[], _T]) -> _T:
    """Call `function` in a thread of its own: a namespace belongs to a thread, and this one keeps its own.

    Ctrl-C does not end it half-way: the exception that it raises here comes when the function has returned.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="bml-namespace").start()
    interrupt: BaseException | None = None
    while not outcome.done():
        try:
            wait([outcome])  # a `join` that is interrupted takes the thread for ended
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    return outcome.result()
