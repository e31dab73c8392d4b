"""The fork server: a process that imports everything once, and forks the processes of a job.

`ForkServer` is the launcher's side; `main` runs in the fork server. That process has one thread, a socket to
the launcher, and nothing of the job. It ends when the launcher is gone.

    launcher    b"F" with a socket     fork a process that serves the launcher on this socket
                b"K" and a process id  kill it, unless it has ended
    fork server b"R"                   everything is imported
                b"B" and a process id  the process has been forked
                b"N"                   it could not be forked
                b"E", a process id and its return code, negative for a signal
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from bml.cluster.fleets.preloading import preload
from bml.cluster.process.exiting import end_children, end_process
from bml.cluster.process.imports import what_we_import
from bml.cluster.process.output import outlive_readers
from bml.cluster.process.starting import SOCKET, start_with_socket
from bml.errors import StartError
from bml.io.forks import close_whole
from bml.io.interruptible import Condition
from bml.io.limits import PROCESS_LIMIT

_WORD = struct.Struct("=cqq")
ENDING_S = 2.0
"""How long processes may take to end by themselves once their launcher is gone or has hung up, in seconds."""
IMPORTS_S = 600.0
"""How long its imports may take, in seconds: minutes, where the packages lie on a slow network."""
#: How long the fork server may take to obey when it is to end, in seconds; it may be stopped.
_ANSWERS_S = 2.0
#: How long its last messages may take to arrive after it was stopped, in seconds.
_STOPS_S = 0.1
#: How long the fork server may take to exit once its socket has ended, in seconds.
_EXITS_S = 10.0
_OPENMP, _MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
ONE_THREAD = dict.fromkeys((_OPENMP, "OPENBLAS_NUM_THREADS", _MKL), "1")
"""Environment of a process that shares its machine with many: one BLAS thread."""
LONG_COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x400000"}
"""Environment of a process whose copies of 4 MiB and more bypass the cache. The default of glibc is the size
of the cache, for which it may take that of all processors together in a virtual machine."""
#: The launcher handles Ctrl-C, the end of the terminal, and SIGTERM to all processes of the job, in which
#: servers leave, with the help of the coordinator. Here they are blocked until they are ignored: while Python
#: starts, they would end it with a traceback.
_LAUNCHERS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
_ENTRY = """
import signal
numbers = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
for number in numbers:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
from bml.cluster.fleets import fork_server
fork_server.main()
"""


def threads_of(n_cores: int, n_servers: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the numbers of threads of each of the servers of a machine, as variables.

    They share the cores for OpenMP and MKL, which PyTorch uses; numpy has one thread. A variable that is set
    in `environment` is left as it is, and MKL follows OpenMP.
    """
    openmp = environment.get(_OPENMP) or str(max(1, n_cores // max(1, n_servers)))
    return {**ONE_THREAD, _MKL: openmp, **environment, _OPENMP: openmp}


class ForkServer:
    """Makes processes that run bml.cluster.process.worker; any thread may use it. `close` ends all of them.

    The fork server is their parent: it notices the end of each at once, even if other processes still hold
    their descriptors.
    """

    def __init__(
        self,
        prints: bool,
        modules: Sequence[str] = (),
        n_servers: int | None = None,
        ending_s: float = ENDING_S,
    ):
        """`modules` are imported before anything is forked.

        Each of `n_servers` servers has its share of the cores; None: each process has one thread. Processes
        may take `ending_s` seconds to end once this process is gone.
        """
        n_cores = len(os.sched_getaffinity(0))
        threads = threads_of(n_cores, n_servers or n_cores, os.environ)
        environment = {**LONG_COPIES, **threads, **what_we_import()}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LAUNCHERS)
        try:
            self._process, self._sock = start_with_socket(
                ["-P", "-c", _ENTRY, SOCKET, json.dumps(list(modules)), str(ending_s)],
                environment,
                prints=prints,
                own_session=False,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._forking = threading.Lock()
        self._changed = Condition()
        self._ready = self._gone = False
        self._forked: deque[int | None] = deque()
        self._unwanted = 0
        self._alive: set[int] = set()
        self._returncodes: dict[int, int] = {}
        self.ends = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """A descriptor that can be read once a process has ended; see `heard`."""
        self._thread = threading.Thread(target=self._listen, name="bml-fork-server", daemon=True)
        self._thread.start()

    def fork(self, sock: socket.socket, within_s: float) -> int:
        """Make a process that serves the other end of `sock`, which is closed here; returns its id.

        The time counts from when everything is imported. Raises StartError if it is not forked in time.
        """
        with self._forking:  # processes are forked in the order of the requests
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._gone, IMPORTS_S)
            with sock, suppress(OSError):
                socket.send_fds(self._sock, [_WORD.pack(b"F", 0, 0)], [sock.fileno()])
            with self._changed:
                self._changed.wait_for(lambda: self._forked or self._gone, within_s)
                if self._forked:
                    process = self._forked.popleft()
                    if process is None:
                        raise StartError(PROCESS_LIMIT)
                    return process
                self._unwanted += 1  # it may still be forked
        raise StartError(f"no process could be made: {self._obstacle()}")

    def kill(self, process: int) -> None:
        """Kill a process, frozen or not; no effect if it has ended."""
        if process in self._alive:
            with suppress(OSError):
                self._sock.send(_WORD.pack(b"K", process, 0))

    def heard(self) -> None:
        """Make `ends` unreadable until another process has ended."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.ends)

    def has_ended(self, process: int) -> bool:
        """Whether a process has ended; others may still hold its descriptors."""
        return process in self._returncodes

    def returncode(self, process: int, within_s: float = ENDING_S) -> int | None:
        """Wait for the end of a process; return its return code, negative for a signal.

        Returns None if the fork server, which may be stopped, does not report it in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: process not in self._alive or self._gone, within_s)
            return self._returncodes.get(process)

    def close(self) -> None:
        """Kill every process and wait until all are gone. Idempotent."""
        with self._changed:
            alive = sorted(self._alive)
        for process in alive:
            self.kill(process)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._alive or self._gone, _ANSWERS_S):
                self._kill_without()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        close_whole(self._sock)
        try:
            self._process.wait(ENDING_S + _ANSWERS_S)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait()
        if self.ends >= 0:
            os.close(self.ends)
            self.ends = -1

    def _kill_without(self) -> None:
        """Kill every process and the fork server, which does not obey."""
        self._process.send_signal(signal.SIGSTOP)  # it reaps no process now, so these ids are still theirs
        self._changed.wait_for(lambda: not self._alive, _STOPS_S)
        for process in self._alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.kill()

    def _listen(self) -> None:
        """Take reports of forks and ends until the fork server is gone."""
        with suppress(OSError):
            while len(data := self._sock.recv(_WORD.size, socket.MSG_WAITALL)) == _WORD.size:
                self._note(*_WORD.unpack(data))
        with self._changed:
            self._gone = True  # its processes end with the launcher, or have ended
            self._changed.notify_all()

    def _note(self, kind: bytes, process: int, code: int) -> None:
        with self._changed:
            if kind == b"R":
                self._ready = True
            elif kind == b"N":
                self._take(None)
            elif kind == b"B":
                self._alive.add(process)
                self._returncodes.pop(process, None)  # of an older process with this id
                self._take(process)
            else:
                self._alive.discard(process)
                self._returncodes[process] = code
                os.eventfd_write(self.ends, 1)
            self._changed.notify_all()

    def _take(self, process: int | None) -> None:
        """A request to fork is answered: with a process, or with None if none can be made."""
        if not self._unwanted:
            self._forked.append(process)
            return
        self._unwanted -= 1
        if process is not None:
            self.kill(process)

    def _obstacle(self) -> str:
        with suppress(subprocess.TimeoutExpired):  # its socket ends a moment before it does
            status = self._process.wait(_EXITS_S if self._gone else 0)
            return f"{sys.executable} exited with status {status}"
        return "the machine is too busy" if self._ready else f"the imports took longer than {IMPORTS_S:g} s"


def main() -> None:
    """Fork processes for the launcher at the other end of the socket given as the first argument.

    The second argument has the modules that are imported before that, see `preload`; the third says how long
    processes may take to end once the launcher is gone, in seconds.
    """
    preload(sys.argv[2])
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a child wakes it
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    with suppress(ConnectionError):  # the launcher ended before it had read everything
        sock.sendall(_WORD.pack(b"R", 0, 0))
        _obey(sock, (wake_read, wake_write), children)
    _end_all(children, sock, wake_read, float(sys.argv[3]))


def _obey(sock: socket.socket, wake: tuple[int, int], children: set[int]) -> None:
    """Carry out the launcher's orders until it is gone."""
    from bml.cluster.process import worker

    while True:
        ready, _, _ = select.select([sock.fileno(), wake[0]], [], [])
        _reap(children, sock, wake[0])
        if sock.fileno() not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(sock, _WORD.size, 1)
        if len(data) < _WORD.size:
            return
        kind, process, _ = _WORD.unpack(data)
        if kind == b"K" and process in children:
            os.kill(process, signal.SIGKILL)
        if kind != b"F":
            continue
        os.set_inheritable(descriptors[0], False)  # processes of a training function must not inherit it
        try:
            child = os.fork()
        except OSError:
            os.close(descriptors[0])
            sock.sendall(_WORD.pack(b"N", 0, 0))
            continue
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in wake:
                os.close(descriptor)
            sock.close()
            _run_forked(worker.serve, descriptors[0])
        os.close(descriptors[0])
        children.add(child)
        sock.sendall(_WORD.pack(b"B", child, 0))


def _end_all(children: set[int], sock: socket.socket, wake_read: int, within_s: float) -> None:
    """End all processes after the launcher: running ones end by themselves, stopped ones are killed."""
    deadline = time.monotonic() + within_s
    while children and (left_s := deadline - time.monotonic()) > 0:
        select.select([wake_read], [], [], left_s)
        _reap(children, sock, wake_read)
    for child in children:
        os.kill(child, signal.SIGKILL)


def draw_anew() -> None:
    """Seed the random numbers of numpy and torch, else all forked servers would draw the same ones.

    Python seeds its own in every process that it forks.
    """
    import numpy as np

    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()


def _forget_exit_handlers() -> None:
    """Forget those of the parent; what the program of this process adds is run at its end."""
    atexit._clear()
    finalize: Any = weakref.finalize  # it registers itself once, for all finalizers
    finalize._registry.clear()
    finalize._registered_with_atexit = False
    atexit.register(logging.shutdown)


def _run_forked(serve: object, descriptor: int) -> None:
    """Run like a process of its own, with random numbers and an end of its own."""
    try:
        _forget_exit_handlers()
        draw_anew()
        outlive_readers()
        assert callable(serve)
        serve(descriptor)
    except BaseException as error:
        end_children()
        end_process(error)
    end_children()
    end_process(None)


def _reap(children: set[int], sock: socket.socket, wake_read: int) -> None:
    with suppress(BlockingIOError):
        os.read(wake_read, 4096)
    while children:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        children.discard(process)
        with suppress(OSError):
            sock.sendall(_WORD.pack(b"E", process, os.waitstatus_to_exitcode(status)))
