"""The options that `bml sim`, `bml sim train` and others have in common, and how their texts are read."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from bml.cli.values import FiniteRange
from bml.lab.commands.quantities import parse_bytes, parse_rates
from bml.lab.flows.training.layers import (
    FLOPS,
    SAMPLES,
    Layer,
    assumed_s,
    computed_s,
    read_layers,
    scaled,
    spread,
)
from bml.lab.flows.training.networks import NETWORKS
from bml.schedule import ALGORITHMS
from bml.topology import Fabric, UsageError, parse
from bml.topology.fattree import is_inner, without_inner

Command = Callable[..., Any]

_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([kmgt])bit(?:/s)?", re.IGNORECASE)
_UNIT = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

_NETWORK = (
    click.option("--algorithm", default="auto", show_default=True, help=f"One of {', '.join(ALGORITHMS)}."),
    click.option("--rate", default="10gbit", show_default=True, metavar="B", help="Rate of a NIC, each way."),
    click.option(
        "--goodput",
        type=FiniteRange(0.001, 1),
        default=1.0,
        show_default=True,
        help="Share of the rate that is not headers: 0.954 for TCP over Ethernet.",
    ),
    click.option("--delay", "delay_s", type=FiniteRange(0, 10), metavar="S", help="Seconds of a hop."),
    click.option("--constants", type=click.Path(path_type=Path), help="File of the cost model's constants."),
    click.option(
        "--link-rate",
        multiple=True,
        metavar="S/L=R",
        help="Rate of a link in units of B: 4/0=1/10; repeatable.",
    ),
    click.option("--slice", "slice_size", metavar="P", help="The largest slice.  [default: that of a job]"),
)


def network_options(command: Command) -> Command:
    """Give a command the options of the network and its schedules."""
    for option in reversed(_NETWORK):
        command = option(command)
    return command


def model_options(most_s: float) -> Callable[[Command], Command]:
    """Give a command the options that `model_layers` reads; computation may take up to `most_s` seconds."""
    model = click.option(
        "--model", required=True, metavar="M", help=f"{', '.join(NETWORKS)}, or a JSON file of layers."
    )
    compute = click.option(
        "--compute-s",
        type=FiniteRange(0, most_s, min_open=True),
        metavar="S",
        help="Seconds of forward and backward of an iteration.  "
        "[default: 32 samples at 10 Tflop/s, or those of the file]",
    )
    return lambda command: model(compute(command))


def damaged(fabric: str, link_rate: tuple[str, ...], failures: Iterable[str]) -> Fabric:
    """Return a fabric with slow links and without what failed, inner switches of a Fat-Tree included.

    Raises:
        UsageError: a text is something else, or the fabric has no such part.
    """
    known = tuple(failures)
    inner = [text for text in known if is_inner(text)]
    broken = parse(fabric).with_rates(parse_rates(link_rate)).without(*(x for x in known if x not in inner))
    return without_inner(broken, inner)


def read_size(option: str, text: str | None) -> int | None:
    """Read the size of a slice or a bucket. Raises UsageError for a text that is no size, and for 0."""
    nbytes = None if text is None else parse_bytes(text)
    if nbytes == 0:
        raise UsageError(f"--{option} {text}: a {option} has at least 1 byte")
    return nbytes


def check_prices(comparing: bool, prices: str | None) -> None:
    """Raise UsageError for prices without a comparison."""
    if prices is not None and not comparing:
        raise UsageError("--prices is for --compare: add that, or leave out the prices")


def check_numba() -> None:
    """Raise UsageError without numba, which only simulations need: it takes 200 MB."""
    if importlib.util.find_spec("numba") is None:
        raise UsageError("simulation needs numba: pip install 'bml[sim]'")


def model_layers(model: str, compute_s: float | None) -> list[Layer]:
    """Return the layers of a known network or of a file.

    Raises:
        UsageError: there is no such network or file, the file has something else, or computes nothing.
    """
    if model in NETWORKS:
        shapes = NETWORKS[model]()
        return spread(shapes, assumed_s(shapes) if compute_s is None else compute_s)
    path = Path(model)
    if not path.is_file():
        raise UsageError(f"'{model}' is no file, and no model: write one of {', '.join(NETWORKS)}")
    try:
        layers = read_layers(path.read_text(), model)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{model} cannot be read: {error}") from None
    if compute_s is None:
        return layers
    known_s = computed_s(layers)
    if not known_s:
        raise UsageError(f"--compute-s cannot be spread over {model}: no layer computes for any time")
    return scaled(layers, compute_s / known_s)


def computation(model: str, compute_s: float | None) -> str:
    """Say where the time of computation comes from that `model_layers` gives the layers."""
    if compute_s is not None:
        return "given by --compute-s"
    if model in NETWORKS:
        return f"of {SAMPLES} samples a server at {FLOPS / 1e12:g} Tflop/s; --compute-s sets it"
    return f"of {model}"


def nics(rate_bit: float) -> str:
    """Name NICs by their rate."""
    return f"NICs of {rate_bit / 1e9:g} Gbit/s"


def rate_of(rate_bit: float, goodput: float) -> str:
    """Return the rate of a NIC as it stands in a table."""
    return f"{rate_bit / 1e9:g} Gbit/s, of which {goodput:.1%} is payload"


def parse_rate(text: str) -> float:
    """Read a rate such as `200mbit`, `25gbit` or `1.6tbit`; return bits per second.

    Raises:
        UsageError: the text is no rate, or one of 0.
    """
    found = _RATE.fullmatch(text.strip())
    rate_bit = float(Fraction(found[1]) * _UNIT[found[2].lower()]) if found else 0.0
    if not rate_bit:
        raise UsageError(f"'{text}' is no rate: write it like 200mbit, 25gbit or 1.6tbit")
    return rate_bit
