"""`bml sim train --compare --prices`: which fabric is the best one for a price, and what decides that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bml.cli.tables import print_table
from bml.lab.commands.sim.options import check_prices
from bml.lab.commands.sim.trained import Asked, ms
from bml.lab.flows.prices import Prices, equal_in_size, read_prices
from bml.lab.survey.choice import CLEARLY, Assumed, Offer, alike, best, changes, offers
from bml.lab.survey.reliability import KINDS, read_dead_shares
from bml.topology import UsageError

Wanted = tuple[Prices, Mapping[str, float]]
"""Prices, and the share of time for which a part of each kind is dead."""


def wanted_of(comparing: bool, prices: str | None, mtbf: str | None, mttr: str | None) -> Wanted | None:
    """Read the options; None without prices.

    Raises:
        UsageError: a text cannot be read, or an option stands without the one that it belongs to.
    """
    check_prices(comparing, prices)
    dead = read_dead_shares(mtbf, mttr)
    if prices is None and dead is not None:
        raise UsageError("--mtbf and --mttr are for --prices: which fabric is the best one for a price")
    return None if prices is None else (read_prices(prices), dead or dict.fromkeys(KINDS, 0.0))


def chosen(asked: Asked, prices: Prices, dead: Mapping[str, float]) -> dict[str, Any]:
    """Return what the training takes on fabrics of one price, the best, and other assumptions, for JSON."""
    fabrics = list(equal_in_size(asked.training.parts[0].fabric))
    assumed = Assumed(asked.training, asked.network, prices, dead)
    found = offers(fabrics, assumed)
    first = best(found)
    others = changes(fabrics, assumed, first) if first else ()
    return {
        "prices": str(prices),
        "dead": dict(dead),
        "offers": [_shown(each, asked.goodput) for each in found],
        "best": first.fabric if first else "",
        "alike": alike(found, first) if first else [],
        "changes": [{**asdict(each), "decides": each.decides} for each in others],
    }


def _shown(offer: Offer, goodput: float) -> dict[str, Any]:
    told = asdict(offer)
    return {"fabric": told.pop("fabric"), "rate_bit": told.pop("rate") * 8 / goodput, **told}


def show_choice(choice: dict[str, Any]) -> None:
    """Print the fabrics for one price, the best of them, and what decides."""
    console = Console(markup=False)
    table = Table(title="for the price of the first: milliseconds of an iteration")
    table.add_column("fabric")
    for head in ("Gbit/s", "whole", *(f"{kind} dead" for kind in KINDS), "mean"):
        table.add_column(head, justify="right")
    for row in choice["offers"]:
        broken = (ms(row["broken_s"][kind]) if kind in row["broken_s"] else "" for kind in KINDS)
        rate = f"{row['rate_bit'] / 1e9:.3g}"
        table.add_row(row["fabric"], rate, ms(row["healthy_s"]), *broken, ms(row["mean_s"]))
    print_table(table, console)
    console.print(
        f"prices: {choice['prices']}, for one rate; NICs of other rates cost in proportion", soft_wrap=True
    )
    for line in _lines(choice):
        console.print(line, soft_wrap=True)


def _lines(choice: dict[str, Any]) -> Iterator[str]:
    by = (
        "by the mean"
        if any(choice["dead"].values())
        else "while nothing fails; --mtbf and --mttr weigh failures"
    )
    near = f" ({', '.join(choice['alike'])} within {CLEARLY:.0%})" if choice["alike"] else ""
    yield f"best: {choice['best'] or 'none'}{near}, {by}"
    most = max(choice["offers"], key=lambda each: each["left_out"])
    if most["left_out"] > CLEARLY:
        share = f"{most['left_out']:.0%} with {most['fabric']}"
        yield f"left out: time in which two parts and more are dead, {share}"
    same: dict[str, list[str]] = {}
    for each in choice["changes"]:
        if each["decides"]:
            yield f"what decides: {each['what']}; {each['to']}, {each['best']} takes {each['less']:.0%} less"
        else:
            same.setdefault(each["what"], []).append(each["to"])
    if same:
        texts = ", ".join(f"{what} {' and '.join(to)}" for what, to in same.items())
        yield f"it stays the best, or within {CLEARLY:.0%}, with {texts}"
