"""What the flight recorder costs: steps with and without it in turn, inside one job.

    flock LOCK python benchmarks/recorder.py --fabric bcube:2x2 --transport tcp --nbytes 65536

Blocks of steps alternate on all servers at once. Beside the time on the wall, which on a loaded machine says
little, each block's processor time is taken, of all threads of the server.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import numpy as np

import bml
from bml.protocol.record.recorded import RecordedCore
from bml.protocol.server.core import ServerCore


def train(session: Any, nbytes: int, blocks: int, per_block: int) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds on the wall, seconds of the processor) a step, of each block with and without."""
    shell = session._communicator._shell
    core = shell.core
    recorded = core.handle_shared, core.flows, core.received
    plain = core._steps.handle_shared, core._watch.flows, partial(ServerCore.received, core)
    vector = session._communicator.empty(nbytes // 4, "float32")
    vector[...] = 1
    times: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for _ in range(10):
        session.allreduce(vector)
    for block in range(blocks):
        on = (block ^ block >> 1) & 1  # without, with, with, without: a drift of the machine cancels
        with shell.poller.guard:
            core.__class__ = RecordedCore if on else ServerCore
            core.handle_shared, core.flows, core.received = recorded if on else plain
        session.allreduce(vector)
        wall_s, processor_s = time.perf_counter(), time.process_time()
        for _ in range(per_block):
            session.allreduce(vector)
        took = time.perf_counter() - wall_s, time.process_time() - processor_s
        times["with" if on else "without"].append((took[0] / per_block, took[1] / per_block))
    with shell.poller.guard:
        core.__class__ = RecordedCore
        core.handle_shared, core.flows, core.received = recorded
    return times


def main() -> None:
    """Measure one size over one transport."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fabric", default="bcube:2x2")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--nbytes", type=int, default=65536)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--per-block", type=int, default=20)
    given = parser.parse_args()
    function = partial(train, nbytes=given.nbytes, blocks=given.blocks, per_block=given.per_block)
    result = bml.launch(function, given.fabric, launcher="processes", transport=given.transport, detect_s=10)
    for number, name in enumerate(("wall", "processor")):
        pairs = [
            (a[number], b[number])
            for times in result.values.values()
            for a, b in zip(times["without"], times["with"], strict=True)
        ]
        without, with_it = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratios = [b / a - 1 for a, b in pairs]
        low, high = np.quantile(ratios, (0.25, 0.75))
        print(
            f"{given.transport} {given.nbytes} bytes, {name}: without {without * 1e6:.1f} us, with "
            f"{with_it * 1e6:.1f} us a step; in pairs {statistics.median(ratios):+.2%} "
            f"(quartiles {low:+.1%}, {high:+.1%})"
        )


if __name__ == "__main__":
    main()
