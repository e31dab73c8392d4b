"""Network namespaces by name, as `ip netns` keeps them. All functions but `names` and `path_of` need root."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from bml.io.interruptible import Aside
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
    """The file by which a namespace is entered."""
    return str(FOLDER / name)


def is_alive(name: str) -> bool:
    """Whether there is a namespace behind this name: after a restart its file may be left without a mount."""
    try:
        return os.stat(path_of(name)).st_dev == os.stat(_OWN).st_dev
    except FileNotFoundError:
        return False


def create(name: str, prepare: Callable[[], None] | None = None) -> None:
    """Make a namespace; `prepare` is called inside before the namespace gets its name.

    Raises FabricError if the name is used already, or if this process may not make namespaces.
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
    """Remove the name; the kernel destroys the namespace when no process is inside. Idempotent."""
    _libc.umount2(path_of(name).encode(), _MNT_DETACH)
    with suppress(FileNotFoundError):
        os.unlink(path_of(name))


def enter(path: str) -> None:
    """Move the calling thread, and all processes that it will start, into the namespace of this file.

    Raises FabricError if there is no such namespace, or if this process may not.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FabricError(f"there is no network namespace {path}: is the emulated fabric up?") from None
    try:
        _call("setns", _libc.setns(descriptor, _CLONE_NEWNET), path)
    finally:
        os.close(descriptor)


def inside(name: str, function: Callable[[], _T]) -> _T:
    """Call `function` inside the namespace, in a thread of its own; sockets that it opens stay there.

    Returns what `function` returns, and raises what it raises.
    """

    def run() -> _T:
        enter(path_of(name))
        return function()

    return in_thread(run)


def processes(wanted: Iterable[str]) -> dict[int, str]:
    """The processes inside these namespaces: pid -> command."""
    inodes = {os.stat(path_of(name)).st_ino for name in wanted}
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if os.stat(process / "ns/net").st_ino in inodes:
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


def kill(name: str) -> int:
    """Kill every process inside a namespace, as if its machine had lost power; returns their number."""
    killed: set[int] = set()
    while found := processes([name]).keys() - killed:
        for process in sorted(found):  # parents first: they must not report the deaths of children
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed |= found  # children that were forked meanwhile are found in the next round
    return len(killed)


def _prepare_folder() -> None:
    """Make the folder a shared mount, as `ip netns` does, so that other processes see the mounts in it."""
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
    """Call `function` in a thread of its own: a namespace belongs to a thread, and the caller keeps its own.

    Ctrl-C does not interrupt the function: its exception is raised here when the function has returned.
    """
    call = Aside(function, "bml-namespace")
    interrupt: BaseException | None = None
    while not call.is_over:
        try:
            call.result()
        except BaseException as error:
            if interrupt is None and not call.is_over:
                interrupt = error
    if interrupt is not None:
        raise interrupt
    return call.result()
