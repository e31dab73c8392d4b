"""Lets contenders take turns, a block of steps each, so that other load hits all of them alike."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bml.errors import BmlError
from bml.lab.bench import rows
from bml.lab.bench.contenders import Contender, JobSettings, Own, missing, peer
from bml.lab.bench.rows import Block, Row
from bml.schedule import Schedules, bound, plan
from bml.schedule.select.model import Constants
from bml.topology import Fabric, parse

OnProgress = Callable[[str], None]
_T = TypeVar("_T")

FEWEST, MOST = 2, 30
"""Limits of the steps of a block. With more, sums of peers that work in place would overflow float32."""


@dataclass(frozen=True)
class Settings:
    """The settings of a contest; see `bml bench allreduce --help`.

    `block_s` is about how long a contender keeps its turn, `repetitions` how often it has one per size.
    The `constants` of the cost model give the theory, or on an emulated fabric the `goodput` of its NICs in
    bytes/s; `peer_goodput` is that of the one NIC that each peer has in the network beside it.
    """

    job: JobSettings
    sizes: tuple[int, ...]
    peers: tuple[str, ...]
    constants: Constants
    repetitions: int = 5
    block_s: float = 0.3
    goodput: float | None = None
    peer_goodput: float | None = None


class _Plan(NamedTuple):
    """A contender at one size: how many elements were wrong, and how many steps a turn has."""

    wrong: int
    steps: int


@dataclass
class Contest:
    """A running benchmark.

    `absent` has the reason for every peer that does not take part, or no longer does. `transport` is the one
    that bml uses.
    """

    settings: Settings
    on_progress: OnProgress
    absent: dict[str, str] = field(default_factory=dict)
    contenders: list[Contender] = field(default_factory=list)
    transport: str = ""
    _own: Own | None = None

    def measure(self) -> Iterator[list[Row]]:
        """Measure one size after the other; yields the rows of each, that of bml first."""
        for nbytes in self.settings.sizes:
            yield self._size(nbytes)

    def start(self, folder: Path) -> None:
        """Start bml and every peer that can run here. Raises BmlError if bml does not start."""
        members = len(self.settings.job.fabric.servers)
        own = self._own = Own(folder, self.settings.job)
        self.contenders.append(own)
        self._turn(own, "starting", own.start)
        self.transport = own.transport
        for who in self.settings.peers:
            why = missing(who)
            if why is not None:
                self.absent[who] = why
                continue
            other = peer(who, folder, members, self.settings.job.emulated)
            self.contenders.append(other)
            self._turn(other, "starting", other.start)

    def close(self) -> None:
        """End all contenders. Idempotent."""
        while self.contenders:
            self.contenders.pop().close()

    def trace(self) -> dict[str, Any]:
        """Return the trace of bml's servers for Perfetto, once it is closed. Raises the error of its job."""
        assert self._own is not None
        return self._own.recorded()

    def _size(self, nbytes: int) -> list[Row]:
        text, settings = rows.size_text(nbytes), self.settings
        plans: dict[str, _Plan] = {}
        blocks: dict[str, list[Block]] = {}
        for each in list(self.contenders):
            ready = self._turn(each, f"{text}, checking", partial(_ready, each, nbytes, settings.block_s))
            if ready is not None:
                plans[each.who] = ready
        for number in range(settings.repetitions):
            start = number % len(self.contenders)
            for each in self.contenders[start:] + self.contenders[:start]:
                what = f"{text}, repetition {number + 1} of {settings.repetitions}"
                block = self._turn(each, what, partial(each.time, nbytes, plans[each.who].steps))
                if block is not None:
                    blocks.setdefault(each.who, []).append(block)
        return self._rows(nbytes, blocks, plans)

    def _turn(self, each: Contender, what: str, work: Callable[[], _T]) -> _T | None:
        """Let one contender work. A peer that fails leaves the contest, and the others go on."""
        self.on_progress(f"{each.who}: {what}")
        try:
            return work()
        except BmlError as error:
            each.close()
            self.contenders.remove(each)
            if each.who == Own.WHO:
                raise
            self.absent[each.who] = str(error)
            return None

    def _rows(self, nbytes: int, blocks: dict[str, list[Block]], plans: dict[str, _Plan]) -> list[Row]:
        made = [
            rows.row(
                each.who,
                nbytes,
                len(each.members),
                blocks[each.who],
                plans[each.who].wrong,
                theory_s(each.who, nbytes, self.settings),
                bound_s(each.who, nbytes, self.settings),
            )
            for each in self.contenders
        ]
        own = made[0]
        return [
            replace(each, speedup=each.median_s / own.median_s, cpu_speedup=each.cpu_s / own.cpu_s)
            for each in made
        ]


def _ready(each: Contender, nbytes: int, block_s: float) -> _Plan:
    """Check the result at this size, warm up, and find out how many steps fill a turn."""
    wrong = each.check(nbytes)
    return _Plan(wrong, rows.iterations(min(each.time(nbytes, 2).steps_s), block_s, FEWEST, MOST))


@contextmanager
def contest(settings: Settings, on_progress: OnProgress) -> Iterator[Contest]:
    """Start all contenders, and end them at the end, also after an error."""
    with tempfile.TemporaryDirectory(prefix="bml-bench-") as folder:
        running = Contest(settings, on_progress)
        try:
            running.start(Path(folder))
            yield running
        finally:
            running.close()


def theory_s(who: str, nbytes: int, settings: Settings) -> float:
    """Return the seconds that a step should take: by bml's plan, or by a ring over one NIC for a peer.

    They are those of the cost model, or of the bytes alone if the goodput of a NIC is known.
    """
    job = settings.job
    if who == Own.WHO:
        made = Schedules(job.fabric, job.algorithm, settings.constants).for_nbytes(nbytes)
    else:
        made = plan(_one_switch(settings), "ring:one")
    goodput = settings.goodput if who == Own.WHO else settings.peer_goodput
    if goodput is not None:
        return float(made.gst()) * nbytes / goodput
    return made.counts().seconds(nbytes, settings.constants)


def bound_s(who: str, nbytes: int, settings: Settings) -> float:
    """Return the lower bound, in seconds, of all schedules of trees, without start-ups."""
    fabric, goodput = settings.job.fabric, settings.goodput
    if who != Own.WHO:
        fabric, goodput = _one_switch(settings), settings.peer_goodput
    byte_s = settings.constants.beta_s if goodput is None else 1 / goodput
    return float(bound(fabric)) * nbytes * byte_s


def _one_switch(settings: Settings) -> Fabric:
    """Return the fabric of peers: one NIC each, on one switch."""
    return parse(f"switch:{len(settings.job.fabric.servers)}")


def busy() -> str | None:
    """Return a warning if other processes keep this machine busy."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores / 2:
        return None
    return f"this machine is busy (load {load:.1f} on {cores} cores): trust ratios rather than times"
