"""The contenders: bml as a job, Gloo and OpenMPI as processes. They start once, then take orders."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bml.cluster.launcher.launch import start
from bml.cluster.launcher.result import Result
from bml.cluster.launcher.running import Job
from bml.errors import BmlError
from bml.lab.bench import room
from bml.lab.bench.children import Children
from bml.lab.bench.failing import fault_of
from bml.lab.bench.host import RankError, Ranks
from bml.lab.bench.ranks import Vector, serve
from bml.lab.bench.rows import Block, Traffic, completions
from bml.topology import Fabric
from bml.train.session import Session

PEERS = ("gloo", "openmpi", "openmpi-tcp")
START_S = 60.0
_DAMAGE_S = 30.0
_END_S = 10.0
_SAY_S = 10.0
_DETECT_S = 3.0
"""Long enough that no server is taken for dead on an overloaded machine, as in a benchmark it may be."""
_POLL_S = 0.05
_WITH_TORCH = "pip install torch (the CPU build will do, about 200 MB)"
_WITH_MPI = "apt-get install openmpi-bin, and pip install mpi4py"

_MPIRUN = (
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    # Ranks share cores, so a waiting rank must yield. Of its algorithms the ring is the fair one to compare.
    *("--mca", "mpi_yield_when_idle", "1"),
    *("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4"),
)
_MPI_TRANSPORT = {
    "openmpi": (),  # its default is shared memory
    "openmpi-tcp": ("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"),
}
_NIC = "f0"
_MPI_EMULATED = (
    *("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", _NIC),
    *("--mca", "oob_tcp_if_include", "m0", "--mca", "plm_rsh_no_tree_spawn", "1"),
)


Serve = Callable[[str, Session], None]
"""Carries out the orders of the host at a path, on a server of a job."""


class Contender(Protocol):
    """Ranks that do allreduce in one way."""

    who: str
    members: tuple[int, ...]
    """Ranks that take part."""

    def start(self) -> None:
        """Start the ranks and wait until they are connected. Raises BmlError."""
        ...

    def check(self, nbytes: int) -> int:
        """Do one allreduce of `nbytes`; return how many elements are wrong, on all ranks together."""
        ...

    def time(self, nbytes: int, times: int) -> Block:
        """Time `times` allreduces of `nbytes`, one after the other, after one that does not count."""
        ...

    def close(self) -> None:
        """End the ranks and leave nothing behind. Idempotent."""
        ...


class _Ordered:
    """The common part of contenders: ranks that take orders, and a check that they live."""

    def __init__(self, who: str, folder: Path, members: Sequence[int]):
        self.who = who
        self.members = tuple(members)
        self._ranks = Ranks(who, folder)

    def check(self, nbytes: int) -> int:
        """See Contender."""
        answers = self._ask(do="check", count=nbytes // 4, of=self.members)
        return sum(answer["wrong"] for answer in answers.values())

    def time(self, nbytes: int, times: int) -> Block:
        """See Contender."""
        answers = self._ask(do="time", count=nbytes // 4, times=times)
        ends_s = {rank: answer["ends_s"] for rank, answer in answers.items()}
        cpu_s, system_s = (
            sum(answer[which] for answer in answers.values()) / times for which in ("cpu_s", "system_s")
        )
        return Block(tuple(completions(ends_s)), cpu_s, system_s)

    def _ask(self, **order: Any) -> dict[int, Any]:
        return self._ranks.ask(self.members, self._well, **order)

    def _well(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class JobSettings:
    """The settings of bml's job, see bml.launch. `emulated` is the name of its emulated fabric, or None.

    `trace`: its servers record what they do when, see `Own.recorded`.
    """

    fabric: Fabric
    """The fabric with its failures, which are injected when the job has started."""
    algorithm: str = "auto"
    emulated: str | None = None
    trace: bool = False
    transport: str = "tcp"
    shared: bool = False
    """Whether results are read in place, if the transport can do that."""

    @property
    def faults(self) -> tuple[str, ...]:
        """The failures as faults that strike as soon as all servers have started."""
        return tuple(f"{fault_of(failure)}@t=0s" for failure in sorted(self.fabric.failures))


class Own(_Ordered):
    """Bml: a job of plain processes that lasts as long as the benchmark.

    `serve(path, session)` carries out orders on every server; by default it does allreduce.
    """

    WHO = "bml"

    def __init__(self, folder: Path, settings: JobSettings, serve: Serve | None = None):
        super().__init__(self.WHO, folder, settings.fabric.servers)
        self._settings = settings
        self._serve = serve or partial(_serve, shared=settings.shared)
        self._error: BmlError | None = None
        self._job: Job | None = None
        self._result: Result | None = None
        self._thread = threading.Thread(target=self._launch, name="bml-bench-job", daemon=True)

    def start(self) -> None:
        """See Contender; on a damaged fabric, when all survivors know the damage."""
        self._thread.start()
        self._ranks.gather(self.members, self._well, START_S)
        wanted = {str(failure) for failure in self._settings.fabric.failures}
        deadline = time.monotonic() + _DAMAGE_S
        while not all(wanted <= known for known in self._known().values()):
            if time.monotonic() > deadline:
                raise RankError(f"bml did not notice {', '.join(sorted(wanted))} in {_DAMAGE_S:g} s")
            time.sleep(_POLL_S)

    def time(self, nbytes: int, times: int) -> Block:
        """See Contender."""
        before = self._traffic()
        block = super().time(nbytes, times)
        after = self._traffic()
        return block if before is None or after is None else replace(block, traffic=after.since(before))

    @property
    def transport(self) -> str:
        """The transport that moves the data; if no server answers, the one that was asked for.

        On an overloaded machine a server that has just started may not answer the first time.
        """
        deadline = time.monotonic() + _SAY_S
        while not (all_said := self._transports()).keys() >= set(self.members):
            self._well()
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        names = {
            said["name"] + (" with zero-copy payloads" if said["zero_copy_to"] else "")
            for said in all_said.values()
        }
        return ", ".join(sorted(names)) or self._settings.transport

    def close(self) -> None:
        """See Contender."""
        self._ranks.close()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def recorded(self) -> dict[str, Any]:
        """Return the trace of its servers, once it is closed. Raises the error that ended the job."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise RankError(f"bml: the job did not end within {_END_S:g} s, so there is no trace of it")
        return self._result.trace

    def _transports(self) -> dict[int, dict[str, Any]]:
        """Return the status of the transport of every server that answers."""
        servers = {} if self._job is None else self._job.status()["servers"]
        return {server: said["transport"] for server, said in servers.items() if "transport" in said}

    def _traffic(self) -> Traffic | None:
        """Return the sums of the counters of all servers, or None if one does not answer."""
        said = self._transports()
        if not said.keys() >= set(self.members):
            return None
        counted = ([each[name] for name in Traffic._fields] for each in said.values())
        return Traffic(*map(sum, zip(*counted, strict=True)))

    def _known(self) -> dict[int, set[str]]:
        return {rank: set(answer["failures"]) for rank, answer in self._ask(do="failures").items()}

    def _well(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive():
            raise RankError("bml: the job has ended before the benchmark")

    def _launch(self) -> None:
        try:
            with start(
                partial(self._serve, self._ranks.path),
                self._settings.fabric.name,
                faults=self._settings.faults,
                launcher="processes",
                algorithm=self._settings.algorithm,
                detect_s=_DETECT_S,
                min_servers=len(self.members),
                emulated=self._settings.emulated or False,
                trace=self._settings.trace,
                transport=self._settings.transport,
                prints=False,
            ) as job:
                self._job = job
                self._result = job.wait()
        except BmlError as error:
            self._error = error


def _serve(path: str, session: Session, shared: bool) -> None:
    """Do allreduce on a server: it is a rank."""
    serve(path, session.server, OfSession(session, shared))


class OfSession:
    """A Session as a Collective: the contribution is in the session's memory, the result is new each time.

    With `shared` the result is read in place.
    """

    def __init__(self, session: Session, shared: bool = False):
        self._session = session
        self._shared = shared
        self._data: Any = None

    def prepare(self, data: Vector) -> None:
        """See Collective."""
        self._data = self._session.empty_like(data)
        self._data[...] = data

    def run(self) -> Vector:
        """See Collective."""
        result: Vector = self._session.allreduce(self._data, shared=self._shared)
        return result

    def failures(self) -> tuple[str, ...]:
        """See Collective."""
        return tuple(self._session.view.failures)


class _Processes(_Ordered):
    """A peer: processes of ours, on the loopback interface or, each with one NIC, on an emulated fabric."""

    def __init__(self, who: str, folder: Path, n_ranks: int, emulated: str | None):
        super().__init__(who, folder, range(n_ranks))
        self._folder = folder
        self._emulated = emulated
        self._children = Children(who, folder)

    def start(self) -> None:
        """See Contender."""
        self._spawn()
        self._ranks.gather(self.members, self._well, START_S)

    def close(self) -> None:
        """See Contender."""
        self._ranks.close()
        self._children.close()

    def _spawn(self) -> None:
        raise NotImplementedError

    def _well(self) -> None:
        self._children.check()


class Gloo(_Processes):
    """Gloo's ring over TCP."""

    program: tuple[str, ...] = ("-m", "bml.lab.bench.rank_gloo")
    """The arguments of Python before those of a rank."""

    def _spawn(self) -> None:
        for rank in self.members:
            script = [sys.executable, *self.program, self._ranks.path]
            meeting = [str(rank), str(len(self.members)), str(self._folder / f"{self.who}.meeting")]
            if self._emulated is None:
                self._children.start(script + meeting, {"GLOO_SOCKET_IFNAME": "lo"})
            else:
                inside = room.command(self._emulated, rank, script + meeting)
                self._children.start(inside, {"GLOO_SOCKET_IFNAME": _NIC})


class OpenMpi(_Processes):
    """OpenMPI's ring, over shared memory (`openmpi`) or TCP (`openmpi-tcp`, and on an emulated fabric)."""

    def _spawn(self) -> None:
        ranks = ["-np", str(len(self.members))]
        script = [sys.executable, "-m", "bml.lab.bench.rank_openmpi", self._ranks.path]
        if self._emulated is None:
            self._children.start([*_MPIRUN, *ranks, *_MPI_TRANSPORT[self.who], *script])
            return
        hosts = ["--host", ",".join(room.host(rank) for rank in self.members)]
        remote = ["--mca", "plm_rsh_agent", shlex.join(room.agent(self._emulated))]
        whole = [*_MPIRUN, *ranks, *hosts, *_MPI_EMULATED, *remote, *script]
        self._children.start(room.command(self._emulated, self.members[0], whole))


def peer(who: str, folder: Path, n_ranks: int, emulated: str | None = None) -> Contender:
    """Make the peer of this name, one of PEERS; `emulated` is the emulated fabric beside its network."""
    kind = Gloo if who == "gloo" else OpenMpi
    return kind(who, folder, n_ranks, emulated)


def missing(who: str) -> str | None:
    """Return why this peer cannot run here, and what to install; None if it can run."""
    if who == "gloo":
        return None if importlib.util.find_spec("torch") else f"torch is not installed: {_WITH_TORCH}"
    if shutil.which("mpirun") is None:
        return f"there is no mpirun: {_WITH_MPI}"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version:
        return f"mpirun is not OpenMPI's: {_WITH_MPI}"
    return None if importlib.util.find_spec("mpi4py") else f"mpi4py is not installed: {_WITH_MPI}"
