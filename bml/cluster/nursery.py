"""Where the processes of a job are born: one process imports everything once, and forks the others.

`Nursery` is the launcher's side; `main` runs in the process that forks. It has one thread, no socket but the
launcher's, and nothing of the job. When the launcher is gone, so is it.

    launcher    b"F" with a socket     fork a process that serves the launcher on this socket
                b"K" and a process id  kill it, unless it has ended
    nursery     b"B" and a process id  it is born
                b"E", a process id and its return code, negative for a signal
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

from bml.errors import StartError

_WORD = struct.Struct("=cqq")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of a process that shares its machine with many: one BLAS thread."""
LONG_COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x400000"}
"""Environment of a process whose copies of 4 MiB and more do not read first what they overwrite. By itself
glibc goes by the size of the cache, and in a virtual machine may take that of all processors together."""
#: Ctrl-C is the launcher's to handle, also while this is still importing.
_ENTRY = "import signal; signal.signal(2, signal.SIG_IGN); from bml.cluster import nursery; nursery.main()"


def what_we_import() -> dict[str, str]:
    """Environment of a process that can import what this one can, the user's own modules too."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Nursery:
    """Makes processes that run bml.cluster.worker. One thread may use it. `close` ends all of them."""

    def __init__(self, prints: bool):
        ours, theirs = socket.socketpair()
        # Many servers share this machine's cores: one BLAS thread each, unless the user says otherwise.
        environment = {**ONE_THREAD, **LONG_COPIES, **os.environ, **what_we_import()}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if prints else subprocess.DEVNULL,
        )
        theirs.close()
        self._sock = ours
        self._alive: set[int] = set()
        self._returncodes: dict[int, int] = {}

    def fork(self, sock: socket.socket, within_s: float) -> int:
        """Make a process that serves the other end of `sock`, which is closed here; returns its id.

        Raises StartError if it does not come into being in time.
        """
        with sock, suppress(OSError):
            socket.send_fds(self._sock, [_WORD.pack(b"F", 0, 0)], [sock.fileno()])
        deadline = time.monotonic() + within_s
        while (word := self._read(deadline - time.monotonic())) is not None:
            if word[0] == b"B":
                self._alive.add(word[1])
                return word[1]
        raise StartError(f"no process could be made: {self._obstacle()}")

    def kill(self, process: int) -> None:
        """Kill a process, frozen or not; no effect if it has ended."""
        if process in self._alive:
            with suppress(OSError):
                self._sock.send(_WORD.pack(b"K", process, 0))

    def returncode(self, process: int) -> int | None:
        """Wait for the end of a process: its return code, negative for a signal; None if it is unknown."""
        while process in self._alive and self._read(None) is not None:
            pass
        return self._returncodes.pop(process, None)

    def close(self) -> None:
        """Kill every process and wait until all are gone. Idempotent."""
        for process in sorted(self._alive):
            self.kill(process)
        while self._alive and self._read(None) is not None:
            pass
        self._alive.clear()
        self._sock.close()
        self._process.wait()

    def _read(self, within_s: float | None) -> tuple[bytes, int, int] | None:
        """The nursery's next word; None if it says nothing in time, or nothing any more."""
        self._sock.settimeout(None if within_s is None else max(within_s, 1e-3))
        try:
            data = self._sock.recv(_WORD.size, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(data) < _WORD.size:
            self._alive.clear()  # they end when the launcher does, or have
            return None
        kind, process, code = _WORD.unpack(data)
        if kind == b"E":
            self._alive.discard(process)
            self._returncodes[process] = code
        return kind, process, code

    def _obstacle(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=0.5)  # its socket may end a moment before it does
            return f"{sys.executable} exited with status {status}"
        return "the machine is too busy to import bml in time"


def main() -> None:
    """Fork processes for the launcher at the other end of the socket given as the first argument."""
    from bml.cluster import worker

    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a child ends the wait
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([sock.fileno(), wake_read], [], [])
        if wake_read in ready:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
        _reap(children, sock)
        if sock.fileno() not in ready:
            continue
        try:
            data, descriptors, _, _ = socket.recv_fds(sock, _WORD.size, 1)
        except ConnectionResetError:  # the launcher went before it had read all
            return
        if len(data) < _WORD.size:
            return
        kind, process, _ = _WORD.unpack(data)
        if kind == b"K" and process in children:
            os.kill(process, signal.SIGKILL)
        if kind != b"F":
            continue
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (wake_read, wake_write):
                os.close(descriptor)
            sock.close()
            _be_born(worker.serve, descriptors[0])
        os.close(descriptors[0])
        children.add(child)
        sock.sendall(_WORD.pack(b"B", child, 0))


def _be_born(serve: object, descriptor: int) -> None:
    """Run as a process of its own would: with chance of its own, and an end of its own."""
    import numpy as np

    status = 1
    try:
        np.random.seed()  # unseeded users must not all draw alike
        assert callable(serve)
        serve(descriptor)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _reap(children: set[int], sock: socket.socket) -> None:
    while children:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        children.discard(process)
        with suppress(OSError):
            sock.sendall(_WORD.pack(b"E", process, os.waitstatus_to_exitcode(status)))
