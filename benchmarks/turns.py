"""What two jobs on one fabric would gain by taking turns: a calculation, without a network.

    python benchmarks/turns.py

Each job computes and communicates in turn. While both communicate, each gets a share of the NICs: half, or
nine tenths where one is urgent and the other is not. A cycle is one computation and one communication. The
table has the mean cycle over random beginnings, over that of a job that has the fabric for itself.
"""

from __future__ import annotations

import random
import statistics

import click
from rich.console import Console
from rich.table import Table

_CYCLES, _BEGINNINGS = 400, 60
_EQUAL, _URGENT = 0.5, 0.9


def cycles(compute: float, share: float, later: float, wander: float, rng: random.Random) -> list[float]:
    """Mean cycle of both jobs, of which the second begins `later`; communicating alone takes 1.

    The time of a computation wanders by up to the fraction `wander`.
    """
    left, computes = [compute, compute + later], [True, True]
    ends: list[list[float]] = [[], []]
    now = 0.0
    while min(map(len, ends)) < _CYCLES:
        shared = not any(computes)
        speeds = [1.0 if not shared else (1 - share if job else share) for job in (0, 1)]
        step = min(rest / speed for rest, speed in zip(left, speeds, strict=True))
        now += step
        for job in (0, 1):
            left[job] -= speeds[job] * step
            if left[job] > 1e-12:
                continue
            if not computes[job]:
                ends[job].append(now)
            computes[job] = not computes[job]
            left[job] = compute * (1 + wander * rng.uniform(-1, 1)) if computes[job] else 1.0
    half = _CYCLES // 2  # the first half counts as settling
    return [(end[_CYCLES - 1] - end[half - 1]) / (_CYCLES - half) for end in ends]


def means(compute: float, share: float, wander: float) -> list[float]:
    """The mean cycles of both jobs over that of a job alone, over random beginnings of the second."""
    rng = random.Random(0)
    alone = compute + 1
    found = [cycles(compute, share, rng.uniform(0, alone + 1), wander, rng) for _ in range(_BEGINNINGS)]
    return [statistics.mean(each) / alone for each in zip(*found, strict=True)]


@click.command()
@click.option("--wander", default=0.05, show_default=True, help="Of a computation, as a fraction.")
def main(wander: float) -> None:
    """Print the calculation."""
    table = Table("computation / communication", "turns", "equal shares", "urgent", "the other")
    for compute in (0.5, 1.0, 2.0):
        turns = max(compute + 1, 2) / (compute + 1)
        values = [turns, means(compute, _EQUAL, wander)[0], *means(compute, _URGENT, wander)]
        table.add_row(f"{compute:g}", *(f"{value:.2f}" for value in values))
    Console().print(table)


if __name__ == "__main__":
    main()
