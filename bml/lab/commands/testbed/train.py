"""`bml bench train`: trainings on the emulated fabric beside other algorithms and beside predictions."""

from __future__ import annotations

import time

import click

from bml import fabric as emulated
from bml.cli.output import current
from bml.cluster.spec.constants import constants_of_emulated, load_constants
from bml.lab.bench.training.asked import (
    OWN,
    Comparison,
    Contender,
    contenders,
    read_scale,
    scaled_down,
    strikes,
    usual_scale,
)
from bml.lab.bench.training.rows import compared, failure_rows, row
from bml.lab.commands.sim.options import check_numba, model_layers, model_options, read_size
from bml.lab.commands.testbed.printed import Answer, show
from bml.lab.commands.testbed.progress import progress, warn_if_busy
from bml.lab.commands.testbed.room import check_room
from bml.lab.flows.training.iterations import Overlap
from bml.lab.flows.training.layers import bucketed
from bml.lab.flows.training.training import ViewTimes
from bml.schedule.select.model import Constants
from bml.topology import parse

_RATE = "20mbit"
"""At which nine servers with two NICs keep two cores busy for two thirds of the time."""
_BUCKET = "25MiB"
_COPIES = 8
"""Vectors of all gradients that a server has at most, with its patterns and results."""


@click.command()
@model_options(most_s=1e3)
@click.option("--fabric", default="bcube:3x2", show_default=True, help="Such as bcube:3x2 or torus:3x2.")
@click.option(
    "--against",
    metavar="A[@F],…",
    help="Algorithms to compare, on the fabric after the next @, else on --fabric: ring,mesh,ps@switch:9; "
    "'' for none.  [default: ring,mesh on one switch]",
)
@click.option(
    "--fail", multiple=True, metavar="X@N", help="server:4@20: bml alone, fails in iteration 20; repeatable."
)
@click.option("--rate", default=_RATE, show_default=True, metavar="B", help="Rate of every NIC, each way.")
@click.option(
    "--scale",
    metavar="R",
    help="Share of each gradient's bytes that is sent, such as 1/8.  [default: 2.5 MiB in all at most]",
)
@click.option(
    "--bucket",
    default=_BUCKET,
    show_default=True,
    metavar="P",
    help="Bytes of the model from which on gradients of neighbours go in one step, the first ones at 1 MiB.",
)
@click.option(
    "--overlap",
    type=click.Choice([Overlap.none.value, Overlap.backward.value]),
    default=Overlap.none.value,
    show_default=True,
    help="Under which computation gradients are sent.",
)
@click.option(
    "--iterations",
    type=click.IntRange(1, 10_000),
    default=4,
    show_default=True,
    metavar="N",
    help="Of a turn, and after a failure; two more warm up.",
)
@click.option(
    "--turns", type=click.IntRange(1, 100), default=3, show_default=True, metavar="N", help="Runs of each."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def train(
    model: str,
    fabric: str,
    against: str | None,
    fail: tuple[str, ...],
    rate: str,
    scale: str | None,
    compute_s: float | None,
    bucket: str,
    overlap: str,
    iterations: int,
    turns: int,
    as_json: bool,
) -> None:
    """Train on the emulated fabric, and compare times with others.

    Others are other algorithms, and what was predicted.

    Network namespaces are the servers, and cables have a real rate; that needs root. Servers sleep as long
    as the model computes, and sum gradients of its sizes at --scale. Contenders take turns on wires of
    equal NICs, and every server checks the sums. `gst_s` is what an iteration takes from the end of backward
    until all gradients are sums, `reduction` by how much less that is with bml. Predictions are those of
    `bml sim train`, with the constants of `bml bench calibrate` or defaults: nothing that this command
    measures is in them. The survivors of a failure share its work.

    \b
    Example:
      bml bench train --model vgg19
      bml bench train --model resnet50 --against ring --fail server:4@10
      bml bench train --model alexnet --against ps@switch:9 --scale 1/32
    """
    start_s = time.monotonic()
    check_numba()
    shape = parse(fabric)
    text = f"ring,mesh@switch:{shape.n_servers}" if against is None else against
    layers = bucketed(model_layers(model, compute_s), read_size("bucket", bucket) or 1)
    share = usual_scale(sum(each.nbytes for each in layers)) if scale is None else read_scale(scale)
    comparison = Comparison(
        model=model,
        layers=scaled_down(layers, share),
        scale=share,
        rate_bit=emulated.parse_rate(rate),
        overlap=Overlap(overlap),
        own=Contender(OWN, "auto", shape),
        against=contenders(text, shape),
        strikes=strikes(fail),
        iterations=iterations,
        turns=turns,
    )
    comparison.check()
    gradients = f"{comparison.nbytes >> 20} MiB of gradients"
    check_room(shape.n_servers, _COPIES * comparison.nbytes, gradients, "give a smaller --scale")
    found = _measure(comparison)
    if as_json:
        current().answer({**found.as_json(), "seconds": round(time.monotonic() - start_s, 3)})
    else:
        show(found)


def _measure(comparison: Comparison) -> Answer:
    """Bring up the fabrics, predict, run everything on them, and take them down."""
    from bml.lab.bench.training import predicted
    from bml.lab.bench.training.running import failing, healthy, wires

    constants = _constants(comparison)
    with progress() as on_progress:
        warn_if_busy()
        on_progress("bringing up the fabrics")
        with wires(comparison) as up:
            on_progress("predicting")
            expected = {
                each: predicted.healthy(comparison, each, constants) for each in comparison.contenders
            }
            after = predicted.failing(comparison, constants) if comparison.strikes else []
            click.echo(_duration(comparison, [*expected.values()], after), err=True)
            # First, as it can end with an error: a server is taken for dead on a busy machine.
            failed = failure_rows(comparison, failing(comparison, up, on_progress), after) if after else []
            runs = healthy(comparison, up, on_progress)
    rows = compared([row(comparison, each, runs[each], expected[each]) for each in comparison.contenders])
    return Answer(comparison, rows, failed)


def _duration(comparison: Comparison, expected: list[ViewTimes], after: list[ViewTimes]) -> str:
    """Say how long all iterations take together, if they take what was predicted."""
    turn_s = comparison.run_iterations * sum(each.iteration_s for each in expected)
    failing_s = sum(view.iterations * view.iteration_s for view in after)
    return f"about {comparison.turns * turn_s + failing_s:.0f} s of iterations, and the starts of jobs"


def _constants(comparison: Comparison) -> Constants:
    """Return the constants of servers on the emulated fabric, as jobs there have them."""
    goodput = comparison.rate_bit / 8 * emulated.GOODPUT
    return constants_of_emulated(load_constants()[0], goodput, comparison.own.fabric.n_servers)
