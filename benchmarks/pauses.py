"""How often are links paused, and how long does a step take? A sweep over buffers, rate control and seeds.

    python benchmarks/pauses.py
    python benchmarks/pauses.py --seeds 3 --buffer 375KB

The cases are those of the figure `pauses`: a Fat-Tree of 250 servers and a BCube of 256, 57.5 MB, 40 Gbit/s.
Simulated packet by packet, so any machine gives the same numbers, apart from the seconds that it took.
"""

from __future__ import annotations

import json
import time
from itertools import product

import click

from bml.lab.commands.quantities import parse_bytes
from bml.lab.figures.pauses import IN_ORDER, SHUFFLED, outcome_of
from bml.lab.figures.steps import DELAY_S
from bml.lab.packets.settings import Settings


@click.command()
@click.option(
    "--buffer", "buffers", multiple=True, default=("93750", "375KB", "1.5MB"), help="For each port."
)
@click.option("--seeds", type=click.IntRange(1, 100), default=1, help="Seeds of paths, marks and turns.")
def main(buffers: tuple[str, ...], seeds: int) -> None:
    """Print a line of JSON for each case."""
    for case, dcqcn, buffer, seed in product(
        (*IN_ORDER, *SHUFFLED), (True, False), map(parse_bytes, buffers), range(seeds)
    ):
        start_s = time.perf_counter()
        outcome = outcome_of(case, Settings(delay_s=DELAY_S, buffer_nbytes=buffer, dcqcn=dcqcn), seed)
        row = {
            "case": case,
            "dcqcn": dcqcn,
            "buffer": buffer,
            "seed": seed,
            "step_ms": round(outcome.seconds * 1e3, 3),
            "pauses": int(outcome.pauses.sum()),
            "paused_ms": round(float(outcome.paused_s.sum()) * 1e3, 3),
            "longest_queue": round(float(outcome.most_queued.max())),
            "crossings": outcome.n_crossings,
            "took_s": round(time.perf_counter() - start_s, 1),
        }
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
