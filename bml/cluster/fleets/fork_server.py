"""The fork server: a process that imports everything once, and forks the processes of a job.

`ForkServer` is the launcher's side; `main` runs in the fork server, an agent (bml.cluster.process.agent) that
says {"is": "ready"} once everything is imported. It has one thread, a socket to the launcher, and nothing of
the job. It ends when the launcher is gone.
"""

from __future__ import annotations

import atexit
import errno
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NoReturn

from bml.cluster.fleets.preloading import preload
from bml.cluster.process.agent import Agent, packet
from bml.cluster.process.exiting import end_children, end_process
from bml.cluster.process.imports import what_we_import
from bml.cluster.process.output import outlive_readers
from bml.cluster.process.starting import SOCKET, Helper
from bml.errors import StartError
from bml.io.interruptible import Condition
from bml.io.limits import PROCESS_LIMIT

ENDING_S = 2.0
"""How long processes may take to end by themselves once their launcher is gone or has hung up, in seconds."""
IMPORTS_S = 600.0
"""How long its imports may take, in seconds: minutes, where the packages lie on a slow network."""
#: How long the fork server may take to obey when it is to end, in seconds; it may be stopped.
_ANSWERS_S = 2.0
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
            arguments = ["-P", "-c", _ENTRY, SOCKET, str(ending_s), json.dumps(list(modules))]
            self._helper = Helper(arguments, (), environment, prints, own_session=False)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._changed = Condition()
        self._ready = self._gone = False
        self._numbers = count(1)
        self._forked: dict[int, str] = {}
        """Number -> why it could not be forked; empty: it was."""
        self._alive: dict[int, int] = {}
        """Number -> a descriptor of the process, whose id may belong to another one once it is reaped."""
        self._returncodes: dict[int, int] = {}
        self.ends = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """A descriptor that can be read once a process has ended; see `heard`."""
        self._thread = threading.Thread(target=self._listen, name="bml-fork-server", daemon=True)
        self._thread.start()

    def fork(self, sock: socket.socket, within_s: float) -> int:
        """Make a process that serves the other end of `sock`, which is closed here; returns its number.

        The time counts from when everything is imported. Raises StartError if it is not forked in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._gone, IMPORTS_S)
            number = next(self._numbers)
        with sock:
            self._helper.send({"do": "start", "name": number}, [sock.fileno()])
        with self._changed:
            self._changed.wait_for(lambda: number in self._forked or self._gone, within_s)
            why = self._forked.get(number)
        if why is None:
            self.kill(number)  # it may still be forked
            raise StartError(f"no process could be made: {self._obstacle()}")
        if why:
            raise StartError(why)
        return number

    def kill(self, number: int) -> None:
        """Kill a process, frozen or not; no effect if it has ended."""
        with self._changed:
            descriptor = self._alive.get(number)
            if descriptor is not None:
                _signal(descriptor, signal.SIGKILL)
        if descriptor is None and number not in self._returncodes:  # it may still be forked
            with suppress(StartError):
                self._helper.send({"do": "signal", "names": [number], "number": signal.SIGKILL}, waits=False)

    def heard(self) -> None:
        """Make `ends` unreadable until another process has ended."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.ends)

    def has_ended(self, number: int) -> bool:
        """Whether a process has ended; others may still hold its descriptors."""
        return number in self._returncodes

    def returncode(self, number: int, within_s: float = ENDING_S) -> int | None:
        """Wait for the end of a process; return its return code, negative for a signal.

        Returns None if the fork server, which may be stopped, does not report it in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.has_ended(number) or self._gone, within_s)
            return self._returncodes.get(number)

    def close(self) -> None:
        """Kill every process and wait until all are gone. Idempotent."""
        with self._changed:
            for descriptor in () if self._gone else self._alive.values():
                _signal(descriptor, signal.SIGKILL)
            if not self._changed.wait_for(lambda: not self._alive or self._gone, _ANSWERS_S):
                self._helper.process.kill()  # it is stopped, and reports nothing
            self._end_orphans()
        with suppress(OSError):
            self._helper.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._helper.hang_up(ENDING_S + _ANSWERS_S)
        if self.ends >= 0:
            os.close(self.ends)
            self.ends = -1

    def _end_orphans(self) -> None:
        """End processes whose fork server was killed: they see that their line ends, or are killed."""
        wait, left = select.poll(), set(self._alive.values())
        for descriptor in left:
            _signal(descriptor, signal.SIGCONT)  # a stopped one sees nothing
            wait.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + ENDING_S
        while left and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in wait.poll(left_s * 1000):
                wait.unregister(descriptor)
                left.discard(descriptor)
        for descriptor in self._alive.values():
            _signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self._alive.clear()

    def _listen(self) -> None:
        """Take reports of forks and ends until the fork server is gone."""
        while (message := self._helper.receive()) is not None:
            with self._changed:
                self._note(message)
                self._changed.notify_all()
        with self._changed:
            self._gone = True  # its processes end with the launcher, or have ended
            self._changed.notify_all()

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"is": "ready"}:
                self._ready = True
            case {"is": "started", "name": number, "process": process}:
                self._forked[number] = ""
                with suppress(OSError):  # it has ended; or this process has no descriptor left
                    self._alive[number] = os.pidfd_open(process)
            case {"is": "cannot", "name": number, "why": why, "errno": error}:
                is_limit = error == errno.EAGAIN
                self._forked[number] = PROCESS_LIMIT if is_limit else f"no process could be made: {why}"
            case {"is": "ended", "name": number, "code": code}:
                if (descriptor := self._alive.pop(number, None)) is not None:
                    os.close(descriptor)
                self._returncodes[number] = code
                os.eventfd_write(self.ends, 1)

    def _obstacle(self) -> str:
        with suppress(subprocess.TimeoutExpired):  # its socket ends a moment before it does
            status = self._helper.process.wait(_EXITS_S if self._gone else 0)
            return f"{sys.executable} exited with status {status}"
        return "the machine is too busy" if self._ready else f"the imports took longer than {IMPORTS_S:g} s"


def _signal(descriptor: int, number: int) -> None:
    """Send a signal to the process of this descriptor, if it has not ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def main() -> None:
    """Fork processes for the launcher at the other end of the socket given as the first argument.

    The second argument says how long they may take to end once the launcher is gone, in seconds; the last has
    the modules that are imported before, see `preload`.
    """
    preload(sys.argv[3])
    from bml.cluster.process import worker

    launcher = socket.socket(fileno=int(sys.argv[1]))
    agent = Agent(launcher, partial(_run_forked, worker.serve), ending_s=float(sys.argv[2]))
    gc.collect()
    gc.freeze()
    with suppress(ConnectionError):  # the launcher has ended
        launcher.send(packet({"is": "ready"}))
    agent.run()


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


def _run_forked(
    serve: Callable[[int], None], _: dict[str, Any], descriptors: list[int], launcher: socket.socket
) -> NoReturn:
    """Run like a process of its own, with random numbers and an end of its own. See agent.Body."""
    raised: BaseException | None = None
    try:
        launcher.close()
        _forget_exit_handlers()
        draw_anew()
        outlive_readers()
        serve(descriptors[0])
    except BaseException as error:
        raised = error
    end_children()
    end_process(raised)
