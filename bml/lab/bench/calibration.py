"""Measures the constants of the cost model on this machine, between plain processes."""

from __future__ import annotations

import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bml.lab.bench.children import Children
from bml.lab.bench.fit import Sample, Work, addition, fit, pull
from bml.lab.bench.host import Ranks
from bml.schedule.select.model import Constants

PROBES = 4
_START_S = 30.0
_ROUNDS = 7
_KIB, _MIB = 1 << 10, 1 << 20


class Experiment(NamedTuple):
    """An order to probe 0: how often it is given in a round, and what the model says of it."""

    what: str
    order: dict[str, Any]
    times: int
    work: Work


def _pull(senders: int, nbytes: int, text: str, times: int) -> Experiment:
    order = {"do": "pull", "senders": senders, "nbytes": nbytes}
    return Experiment(f"{text} from {senders}", order, times, pull(senders, nbytes))


def _addition(partials: int, nbytes: int, text: str, times: int) -> Experiment:
    what = f"add {partials} x {text}" if partials else f"copy {text}"
    order = {"do": "add", "partials": partials, "nbytes": nbytes}
    return Experiment(what, order, times, addition(partials, nbytes))


EXPERIMENTS = (
    _pull(1, 8, "8 B", 200),
    _pull(1, 64 * _KIB, "64 KiB", 50),
    _pull(1, _MIB, "1 MiB", 10),
    _pull(1, 8 * _MIB, "8 MiB", 3),
    _pull(2, 2 * _MIB, "2 MiB", 3),
    _pull(2, 8 * _MIB, "8 MiB", 3),
    _pull(3, 2 * _MIB, "2 MiB", 3),
    _pull(3, 8 * _MIB, "8 MiB", 2),
    _addition(0, 16 * _MIB, "16 MiB", 2),
    _addition(1, 16 * _MIB, "16 MiB", 2),
    _addition(2, 16 * _MIB, "16 MiB", 2),
    _addition(4, 16 * _MIB, "16 MiB", 2),
)
"""They vary start-up, bytes over a NIC, the number of senders, memory and arithmetic."""


@dataclass(frozen=True)
class Calibration:
    """The measured medians, the constants that were fitted to them, and how long it took."""

    constants: Constants
    samples: tuple[Sample, ...]
    seconds: float


def calibrate(on_progress: Callable[[str], None] = lambda text: None) -> Calibration:
    """Measure, and fit the constants; takes a few seconds on a quiet machine.

    Experiments take turns, so that a burst of other load hits all of them; medians are fitted.
    Raises RankError if a probe fails.
    """
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bml-bench-") as folder:
        ranks, children = Ranks("probe", Path(folder)), Children("probe", Path(folder))
        try:
            on_progress("starting probes")
            _start(ranks, children)
            times: dict[str, list[float]] = {each.what: [] for each in EXPERIMENTS}
            for turn in range(_ROUNDS):
                for each in EXPERIMENTS:
                    on_progress(f"{each.what}, round {turn + 1} of {_ROUNDS}")
                    answer = ranks.ask([0], children.check, times=each.times, **each.order)
                    times[each.what] += answer[0]["seconds"]
        finally:
            ranks.close()
            children.close()
    samples = tuple(Sample(each.what, each.work, statistics.median(times[each.what])) for each in EXPERIMENTS)
    return Calibration(fit(samples), samples, time.monotonic() - start_s)


def _start(ranks: Ranks, children: Children) -> None:
    all_probes = range(PROBES)
    for index in all_probes:
        children.start([sys.executable, "-m", "bml.lab.bench.probe", ranks.path, str(index)])
    ranks.gather(all_probes, children.check, _START_S)
    listening = ranks.ask(all_probes, children.check, token=secrets.token_hex(32))
    endpoints = [listening[index]["endpoint"] for index in all_probes]
    ranks.ask(all_probes, children.check, endpoints=endpoints)
