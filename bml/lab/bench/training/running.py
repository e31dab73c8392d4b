"""Runs trainings on emulated fabrics: those of all contenders are up, and one job runs at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from string import ascii_lowercase

from bml import fabric as emulated
from bml.cluster.launcher.launch import launch
from bml.cluster.launcher.result import Result
from bml.errors import BmlError
from bml.fabric import EmulatedFabric
from bml.fabric.condition import short_burst
from bml.lab.bench.contest import OnProgress
from bml.lab.bench.failing import fault_of
from bml.lab.bench.training.asked import Comparison, Contender
from bml.lab.bench.training.replay import replay
from bml.lab.bench.training.rows import Run, iterations
from bml.lab.bench.training.work import middle_step, work

Wires = Mapping[str, EmulatedFabric]
"""Name of a fabric, such as bcube:3x2 -> the emulated fabric."""
_DETECT_S = 3.0
"""Long enough that no server is taken for dead on a busy machine. A killed process is noticed at once."""


@contextmanager
def wires(comparison: Comparison) -> Iterator[Wires]:
    """Bring up the fabrics of all contenders, with NICs of one rate; take them down at the end.

    Raises:
        FabricError: this process is not root's, or the kernel cannot.
        UsageError: a fabric or a rate cannot be emulated.
    """
    names = list(dict.fromkeys(each.fabric.name for each in comparison.contenders))
    with ExitStack() as at_end:
        made = {}
        for letter, name in zip(ascii_lowercase, names, strict=False):  # no more than MOST_FABRICS
            network = emulated.up(
                name,
                comparison.rate_bit,
                name=f"train{os.getpid()}{letter}",
                maker=os.getpid(),
                burst_nbytes=short_burst(comparison.rate_bit),
            )
            at_end.callback(network.down)
            made[name] = network
        yield made


def healthy(comparison: Comparison, wires: Wires, on_progress: OnProgress) -> dict[Contender, list[Run]]:
    """Let contenders take turns, a job each. Raises the error of a job, or BmlError if a sum was wrong."""
    found: dict[Contender, list[Run]] = {each: [] for each in comparison.contenders}
    order = comparison.contenders
    for turn in range(comparison.turns):
        start = turn % len(order)
        for each in order[start:] + order[:start]:
            on_progress(f"{each.who} on {each.fabric}: turn {turn + 1} of {comparison.turns}")
            found[each].append(_run(comparison, each, wires, comparison.run_iterations))
    return found


def failing(comparison: Comparison, wires: Wires, on_progress: OnProgress) -> Run:
    """Run the job in which parts fail, each in the middle of an iteration's largest step.

    Raises the error of the job, or BmlError if a failure never struck, or a sum was wrong.
    """
    n = comparison.failing_iterations
    on_progress(f"bml on {comparison.own.fabric}, {n} iterations with failures")
    replayed = work(comparison.layers, comparison.overlap, n)
    faults = [
        f"{fault_of(failure)}@step={middle_step(replayed, strike.iteration)}"
        for strike in comparison.strikes
        for failure in strike.failures
    ]
    return _run(comparison, comparison.own, wires, n, faults)


def _run(
    comparison: Comparison, contender: Contender, wires: Wires, n: int, faults: Sequence[str] = ()
) -> Run:
    name = contender.fabric.name
    before = _processor_times()
    result = launch(
        partial(replay, work(comparison.layers, comparison.overlap, n)),
        name,
        launcher="processes",
        algorithm=contender.algorithm,
        emulated=wires[name].name,
        detect_s=_DETECT_S,
        min_servers=None if faults else len(contender.fabric.servers),
        faults=faults,
        prints=False,
    )
    return _checked(result, contender, _used(before, _processor_times()))


def _checked(result: Result, contender: Contender, processors: float) -> Run:
    for fault, why in result.never_struck.items():
        raise BmlError(f"the fault {fault} never struck: {why}")
    wrong = sum(value["wrong"] for value in result.values.values())
    if wrong:
        raise BmlError(f"{contender.who} on {contender.fabric}: {wrong} elements of sums were wrong")
    return Run(iterations(result.values), len(result.report["views"]), processors)


def _processor_times() -> list[int]:
    """Return the times of all processors together, in ticks: user, nice, system, idle, iowait, …"""
    first = Path("/proc/stat").read_text().splitlines()[0]
    return [int(each) for each in first.split()[1:9]]


def _used(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the share of processor time that was neither idle nor of processes of lower priority."""
    spent = [now - then for then, now in zip(before, after, strict=True)]
    _, nice, _, idle, waiting, *_ = spent
    others = nice if os.getpriority(os.PRIO_PROCESS, 0) <= 0 else 0
    return 1 - (others + idle + waiting) / max(1, sum(spent))
