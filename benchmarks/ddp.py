"""Training steps of PyTorch: DistributedDataParallel with bml and with Gloo, and `bml.torch.attach`.

    python benchmarks/ddp.py --ranks 2 --sizes 1MiB,16MiB,64MiB
    python benchmarks/ddp.py --fabric bcube:2x2 --rate 100mbit --sizes 16MiB       # needs root

A step is forward and backward of a model of 16 layers that computes little; it ends when all gradients are
means over all ranks. Sizes are those of the gradients. Ranks start once and take turns, so that other load
hits all alike. Without `--rate` all ranks are on this host. With it they are in network namespaces: bml has
all NICs of the fabric, and Gloo has one NIC of the same rate.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click
import training_ranks
from rich.console import Console
from rich.table import Table

from bml import fabric as emulated
from bml.lab.bench.contenders import Contender, Gloo, JobSettings, Own
from bml.lab.bench.rows import Block, iterations
from bml.lab.commands.quantities import parse_bytes
from bml.topology import parse

BLOCK_S, FEWEST, MOST = 0.4, 3, 60


class Ddp(Gloo):
    """Processes that train with DDP and one of its backends."""

    def __init__(self, backend: str, views: bool, folder: Path, n_ranks: int, emulated: str | None):
        super().__init__(backend, folder, n_ranks, emulated)
        self.program = (training_ranks.__file__, backend, "views" if views else "copies")


class Attached(Own):
    """A job whose servers train an attached model."""

    WHO = "attach"

    def __init__(self, folder: Path, settings: JobSettings):
        super().__init__(folder, settings, training_ranks.serve_attached)


def measure(contenders: list[Contender], nbytes: int, turns: int) -> dict[str, Any]:
    """Median and fastest fifth of the steps of each contender, and processor time of all ranks."""
    blocks: dict[str, list[Block]] = {each.who: [] for each in contenders}
    times: dict[str, int] = {}
    for each in contenders:
        if wrong := each.check(nbytes):
            raise SystemExit(f"{each.who}: {wrong} elements are wrong")
        times[each.who] = iterations(min(each.time(nbytes, FEWEST).steps_s), BLOCK_S, FEWEST, MOST)
    for turn in range(turns):
        start = turn % len(contenders)
        for each in contenders[start:] + contenders[:start]:
            blocks[each.who].append(each.time(nbytes, times[each.who]))
    row: dict[str, Any] = {"nbytes": nbytes}
    for who, found in blocks.items():
        steps_s = [step_s for block in found for step_s in block.steps_s]
        row[who] = {
            "median_s": statistics.median(steps_s),
            "fast_s": statistics.quantiles(steps_s, n=5)[0],
            "cpu_s": statistics.median(block.cpu_s for block in found),
        }
    return row


def started(stack: ExitStack, make: Callable[[Path], Contender]) -> Contender:
    """A contender that is up, until the stack is closed."""
    contender = make(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp-"))))
    stack.enter_context(closing(contender))
    contender.start()
    return contender


@click.command()
@click.option("--ranks", default=2, show_default=True, help="Ranks on this host.")
@click.option("--fabric", "shape", default="bcube:2x2", show_default=True, help="With --rate.")
@click.option("--rate", help="Emulate the fabric, at this rate of every NIC.")
@click.option("--sizes", default="1MiB,4MiB,16MiB,64MiB", show_default=True)
@click.option("--views", is_flag=True, help="DDP with gradient_as_bucket_view=True.")
@click.option("--turns", default=6, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    ranks: int, shape: str, rate: str | None, sizes: str, views: bool, turns: int, as_json: bool
) -> None:
    """Measure training steps with bml and with Gloo."""
    rows = []
    with ExitStack() as stack:
        name = None
        backends = ["gloo", "bml"]
        if rate is not None:
            network = emulated.up(shape, rate, name="ddp")
            stack.callback(network.down)
            name, backends, ranks = network.name, ["gloo"], parse(shape).n_servers
        settings = JobSettings(
            parse(shape if name else f"switch:{ranks}"), emulated=name, transport="auto", shared=True
        )
        with_ddp = [
            started(stack, lambda folder, backend=backend: Ddp(backend, views, folder, ranks, name))
            for backend in backends
        ]
        for nbytes in map(parse_bytes, sizes.split(",")):
            with ExitStack() as job:
                attached = started(job, lambda folder: Attached(folder, settings))
                rows.append(measure([*with_ddp, attached], nbytes, turns))
    if as_json:
        click.echo(json.dumps({"ranks": ranks, "rate": rate, "views": views, "rows": rows}))
        return
    table = Table("size", "who", "step", "fastest fifth", "processor", "Gloo takes")
    for row in rows:
        gloo = row["gloo"]
        for who, found in row.items():
            if who != "nbytes":
                times = [f"{found[key] * 1000:.2f} ms" for key in ("median_s", "fast_s", "cpu_s")]
                ratio = f"{gloo['median_s'] / found['median_s']:.2f} x"
                table.add_row(f"{row['nbytes'] / 2**20:g} MiB", who, *times, ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
