"""`bml sim train`: simulates a data-parallel training, and prints what an iteration and the job take."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path

import click

from bml.cli.output import current
from bml.cli.values import FiniteRange
from bml.cluster.spec.constants import load_constants
from bml.lab.commands.sim.options import (
    check_numba,
    computation,
    damaged,
    model_layers,
    model_options,
    network_options,
    parse_rate,
    read_size,
)
from bml.lab.flows.training.iterations import Overlap
from bml.lab.flows.training.layers import bucketed
from bml.lab.flows.training.training import DETECT_S, VIEW_S, Part, Training
from bml.topology import UsageError

_LATER = re.compile(r"(.+)@([0-9]{1,9})")
_SLOW = re.compile(r"([0-9]{1,6})=([0-9]{1,6}(?:\.[0-9]{1,6})?)")
_MOST_ITERATIONS = 10**9


@click.command()
@click.argument("fabric")
@model_options(most_s=1e6)
@click.option(
    "--bucket",
    metavar="P",
    help="Bytes from which on gradients of neighbours go in one step, the first ones at 1 MiB, as with "
    "attach and DDP.  [default: a step for each layer]",
)
@click.option(
    "--iterations", type=click.IntRange(1, _MOST_ITERATIONS), default=1000, show_default=True, metavar="N"
)
@click.option(
    "--overlap",
    type=click.Choice([each.value for each in Overlap]),
    default="backward",
    show_default=True,
    help="Under which computation gradients are sent: forward is backward and the next forward pass.",
)
@click.option(
    "--order",
    type=click.Choice(["need", "begin"]),
    help="With --overlap forward: by priority, what the next pass needs first, or first in, first out.  "
    "[default: need]",
)
@click.option(
    "--slow-server", multiple=True, metavar="S=F", help="Server S computes F times as long; repeatable."
)
@click.option(
    "--fail",
    multiple=True,
    metavar="X[@N]",
    help="server:4, link:4/0, switch:0/2, core:3: dead from the start, or after N iterations; repeatable.",
)
@click.option(
    "--detect",
    "detect_s",
    type=FiniteRange(0, 1e6),
    default=DETECT_S,
    show_default=True,
    metavar="S",
    help="Seconds from a failure to its diagnosis: 0.63 if it is only silent.",
)
@click.option(
    "--view-change",
    "view_s",
    type=FiniteRange(0, 1e6),
    default=VIEW_S,
    show_default=True,
    metavar="S",
    help="Seconds from there to the next step.",
)
@network_options
@click.option(
    "--compare",
    "comparing",
    is_flag=True,
    help="Compare algorithms, and fabrics of one size, these without failures and slow parts.",
)
@click.option(
    "--prices",
    metavar="TEXT",
    help="With --compare: prices such as nic=1,port=2,cable=0.5; which fabric is best for one price.",
)
@click.option(
    "--mtbf", metavar="TEXT", help="With --prices: time to a failure, server=1y,link=90d,switch=5y."
)
@click.option("--mttr", metavar="TEXT", help="With --mtbf: time to repair, 4h or by kind as --mtbf.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def train(
    fabric: str,
    model: str,
    compute_s: float | None,
    bucket: str | None,
    iterations: int,
    overlap: str,
    order: str | None,
    slow_server: tuple[str, ...],
    fail: tuple[str, ...],
    detect_s: float,
    view_s: float,
    algorithm: str,
    rate: str,
    goodput: float,
    delay_s: float | None,
    constants: Path | None,
    link_rate: tuple[str, ...],
    slice_size: str | None,
    comparing: bool,
    prices: str | None,
    mtbf: str | None,
    mttr: str | None,
    as_json: bool,
) -> None:
    """Simulate a training on a modelled network, and print what an iteration and the job take.

    The gradient of a layer, or of a bucket, is one step, of the time that `bml sim` finds for it. When a part
    fails, all wait until that is noticed and the view has changed; then the survivors share the work on what
    is left.

    \b
    Example:
      bml sim train bcube:3x2 --model vgg19 --compute-s 0.3 --overlap forward
      bml sim train bcube:4x2 --model resnet50 --fail server:4@500
      bml sim train bcube:16x2 --model bert-base --compare
      bml sim train bcube:3x2 --model vgg19 --compare --prices port=2
    """
    check_numba()
    from bml.lab.commands.sim.chosen import chosen, show_choice, wanted_of
    from bml.lab.commands.sim.trained import Asked, answer, compared, show, show_tables
    from bml.lab.flows.training.wires import Network

    if order is not None and overlap != "forward":
        raise UsageError("--order is for --overlap forward: without it a pass waits for all gradients")
    wanted = wanted_of(comparing, prices, mtbf, mttr)
    known, _ = load_constants(constants)
    rate_bit = parse_rate(rate)
    hop_s = known.alpha_s if delay_s is None else delay_s
    parts = _parts(fabric, link_rate, fail)
    layers, bucket_nbytes = model_layers(model, compute_s), read_size("bucket", bucket)
    training = Training(
        layers=layers if bucket_nbytes is None else bucketed(layers, bucket_nbytes),
        iterations=iterations,
        parts=parts,
        overlap=Overlap(overlap),
        by_need=order != "begin",
        slow=_slow(slow_server, parts[0]),
        detect_s=detect_s,
        view_s=view_s,
    )
    training.check()
    network = Network(algorithm, rate_bit / 8 * goodput, hop_s, read_size("slice", slice_size), known)
    asked = Asked(model, training, network, rate_bit, goodput, computation(model, compute_s))
    if comparing:
        tables = compared(asked)
        if not as_json:
            show_tables(tables)  # what follows may take minutes
        choice = {} if wanted is None else {"choice": chosen(asked, *wanted)}
        if as_json:
            current().answer({**tables, **choice})
        elif choice:
            show_choice(choice["choice"])
        return
    report = answer(asked)
    current().answer(asdict(report)) if as_json else show(report)


def _parts(fabric: str, link_rate: tuple[str, ...], fail: tuple[str, ...]) -> list[Part]:
    """Return the parts of the run, from failures such as `server:4` and `server:4@500`.

    Raises:
        UsageError: a text is something else, a part fails twice, or the fabric has no such part.
    """
    struck: dict[int, list[str]] = {0: []}
    for text in fail:
        later = _LATER.fullmatch(text)
        if "@" in text and later is None:
            raise UsageError(f"'{text}' does not say when: write server:4@500, after 500 iterations")
        name, since = (later[1], int(later[2])) if later else (text, 0)
        if later and not since:
            raise UsageError(
                f"'{text}' strikes before the first iteration: write {name}, dead from the start"
            )
        if name in (each for names in struck.values() for each in names):
            raise UsageError(f"'{text}' strikes what has failed before: name {name} once")
        struck.setdefault(since, []).append(name)
    dead: list[str] = []
    parts = []
    for since in sorted(struck):
        dead += struck[since]
        parts.append(Part(since, damaged(fabric, link_rate, dead), tuple(struck[since])))
    return parts


def _slow(texts: tuple[str, ...], first: Part) -> dict[int, float]:
    """Read how many times as long servers compute. Raises UsageError for other texts and dead servers."""
    found: dict[int, float] = {}
    for text in texts:
        shape = _SLOW.fullmatch(text)
        factor = float(shape[2]) if shape else 0.0
        if shape is None or not (math.isfinite(factor) and factor > 0):
            raise UsageError(f"'{text}' is no slow server: write 4=1.5, server 4 computes 1.5 times as long")
        server = int(shape[1])
        if server not in first.fabric.servers:
            raise UsageError(f"--slow-server {text}: {first.fabric} has no live server {server}")
        found[server] = factor
    return found
