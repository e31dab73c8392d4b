"""All-reduces of tensors on a GPU beside the same from host memory, and what cutting them into slices costs.

    python benchmarks/gpu.py --ranks 2 --sizes 16MiB,64MiB

Without a GPU a simulated bus stands for it: copies take the time that they take at `--bus-gbs`, and none of
the processor's, as those of a GPU. Ranks are processes on this host; the ways take turns, so that other load
hits all alike.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bml.lab.commands.quantities import parse_bytes
from bml.torch.devices import slices
from bml.torch.devices.staging import Staging

HOST, GPU = "host memory", "GPU"
WHOLE, SLICED = "simulated bus, one piece", "simulated bus, slices"
CUTS = (2, 4, 8)


class TimedMark:
    """A point in the work of a simulated bus."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.set, self.is_reached = self._reached.set, self._reached.is_set

    def wait(self) -> None:
        self._reached.wait()


class SimulatedBus:
    """A device whose copies take time and move nothing; see bml.torch.devices.device.Device."""

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s = bytes_per_s
        self._streams = {way: queue.SimpleQueue[Any]() for way in ("out", "in")}
        for stream in self._streams.values():
            threading.Thread(target=self._run, args=[stream], daemon=True).start()

    def mark(self) -> TimedMark:
        made = TimedMark()
        made.set()
        return made

    def follow(self, mark: Any) -> None:
        pass

    def copy_out(self, source: Any, into: Any, after: Any) -> TimedMark:
        return self._copy("out", into.nbytes)

    def copy_in(self, source: Any, into: Any, after: Any) -> TimedMark:
        return self._copy("in", into.nbytes)

    def pin(self, pages: Any) -> None:
        pass

    unpin = pin

    def future(self) -> Any:
        return torch.futures.Future()

    def find(self, tensor: Any) -> SimulatedBus:
        return self

    def _copy(self, way: str, nbytes: int) -> TimedMark:
        mark = TimedMark()
        self._streams[way].put((mark, time.monotonic(), nbytes / self._bytes_per_s))
        return mark

    def _run(self, stream: Any) -> None:
        free_s = 0.0
        while True:
            mark, asked_s, takes_s = stream.get()
            free_s = max(free_s, asked_s) + takes_s
            time.sleep(max(0.0, free_s - time.monotonic()))
            mark.set()


def ways(nbytes: int, bus_gbs: float) -> dict[str, Callable[[], None]]:
    """An all-reduce of so many bytes in each way, from its call until its result is where it began."""
    group, x = dist.group.WORLD, torch.ones(nbytes // 4)
    base, own = slices._BASE_NBYTES, group.staging
    bus = SimulatedBus(bus_gbs * 1e9)
    simulated = Staging(group, bus, group._empty)

    def cut(n: int) -> None:
        for work in [dist.all_reduce(each, async_op=True) for each in slices.cut(x, n)]:
            work.wait()

    def over_bus(base_nbytes: int) -> None:
        group.staging, slices._BASE_NBYTES = simulated, base_nbytes
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        work.came.wait()
        group.staging, slices._BASE_NBYTES = own, base

    found: dict[str, Callable[[], None]] = {HOST: lambda: cut(1)}
    found |= {f"{HOST}, {n} steps": lambda n=n: cut(n) for n in CUTS}
    found |= {WHOLE: lambda: over_bus(1 << 50), SLICED: lambda: over_bus(base)}
    if torch.cuda.is_available():
        on_gpu = x.cuda()

        def gpu() -> None:
            dist.all_reduce(on_gpu)
            torch.cuda.current_stream().synchronize()

        found[GPU] = gpu
    return found


def serve(sizes: list[int], bus_gbs: float, turns: int) -> None:
    """Measure as one rank; rank 0 prints the milliseconds of the fastest fifth, by size and way."""
    torch.set_num_threads(1)
    dist.init_process_group("bml")
    rows = []
    for nbytes in sizes:
        found = ways(nbytes, bus_gbs)
        times: dict[str, list[float]] = {name: [] for name in found}
        for turn in range(turns + 2):
            for name, way in found.items():
                dist.barrier()
                begun_s = time.monotonic()
                way()
                if turn >= 2:
                    times[name].append(1e3 * (time.monotonic() - begun_s))
        fast = {name: statistics.quantiles(each, n=5)[0] for name, each in times.items()}
        rows.append({"nbytes": nbytes, **fast})
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def run(ranks: int, arguments: list[str]) -> Any:
    """Start the ranks; returns what rank 0 printed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    there = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments, "--serve"],
            env={**os.environ, **there, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    return json.loads(outputs[0])


@click.command()
@click.option("--ranks", default=2, show_default=True, help="Ranks on this host.")
@click.option("--sizes", default="16MiB,64MiB", show_default=True)
@click.option("--bus-gbs", default=12.0, show_default=True, help="GB/s of the simulated bus, each way.")
@click.option("--turns", default=40, show_default=True)
@click.option("--serve", "serves", is_flag=True, hidden=True)
def main(ranks: int, sizes: str, bus_gbs: float, turns: int, serves: bool) -> None:
    """Measure all-reduces from a GPU and from host memory."""
    if serves:
        serve([parse_bytes(each) for each in sizes.split(",")], bus_gbs, turns)
        return
    rows = run(ranks, ["--sizes", sizes, "--bus-gbs", str(bus_gbs), "--turns", str(turns)])
    if GPU not in rows[0]:
        click.echo("There is no GPU here (or PyTorch without CUDA): a simulated bus stands for it.")
    table = Table("size", "way", "ms, fastest fifth", f"over {HOST}")
    for row in rows:
        for name in [each for each in row if each != "nbytes"]:
            size = f"{row['nbytes'] >> 20} MiB"
            table.add_row(size, name, f"{row[name]:.1f}", f"{row[name] / row[HOST]:.2f}")
        one_more = np.median([(row[f"{HOST}, {n} steps"] - row[HOST]) / (n - 1) for n in CUTS])
        table.add_row("", "one more step", f"{one_more:.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
