"""`bml sim --compare`: algorithms on one fabric, and fabrics of one size, also for the price of the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bml.cli.tables import print_table
from bml.lab.commands.sim.answer import conditions, planned
from bml.lab.commands.sim.asked import Asked
from bml.lab.commands.sim.options import nics
from bml.lab.flows.prices import Prices, equal_in_size, parts_of
from bml.lab.flows.simulate import simulate
from bml.schedule import ALGORITHMS
from bml.topology import FabricError, UsageError


def compared(asked: Asked, prices: Prices) -> dict[str, Any]:
    """Simulate a step with every algorithm, and on fabrics of about this size; return both tables.

    `gst_s` is None where something cannot work, and `why` says why. A fabric's `price` is in units of that of
    the one asked for; `equal_price_gst_s` is the time with NICs of the rate that the same price buys.

    Raises:
        UsageError: there is no such algorithm.
    """
    names = (
        [name for name in ALGORITHMS if name != "auto"] if asked.algorithm == "auto" else [asked.algorithm]
    )
    algorithms = [{"algorithm": name, **_timed(replace(asked, algorithm=name))} for name in names]
    own = prices.of(parts_of(asked.fabric))
    fabrics = []
    for other in equal_in_size(asked.fabric):
        parts = parts_of(other)
        price = prices.of(parts) / own
        there = replace(asked, fabric=other, failures=())
        found = _timed(there)
        bought = _timed(replace(there, rate_bit=asked.rate_bit / float(price)))
        fabrics.append(
            {
                "fabric": other.name,
                "servers": other.n_servers,
                "nic_ports": parts.nics,
                "switch_ports": parts.ports,
                "cables": parts.cables,
                "price": round(float(price), 4),
                **found,
                "equal_price_gst_s": bought["gst_s"],
            }
        )
    return {
        "fabric": str(asked.fabric),
        "nbytes": asked.nbytes,
        "rate_bit": asked.rate_bit,
        "prices": str(prices),
        "algorithms": algorithms,
        "fabrics": fabrics,
    }


def _timed(asked: Asked) -> dict[str, Any]:
    try:
        made = planned(asked)
        return {"by": made.algorithm, "gst_s": simulate(made, conditions(asked)).seconds, "why": ""}
    except (FabricError, UsageError) as error:
        return {"by": asked.algorithm, "gst_s": None, "why": str(error)}


def show_tables(tables: dict[str, Any]) -> None:
    """Print both tables, and below them why something has no time."""
    console = Console(markup=False)
    table = Table(title=f"{tables['fabric']}: a step of {tables['nbytes']} bytes")
    table.add_column("algorithm")
    table.add_column("ms", justify="right")
    for row in tables["algorithms"]:
        table.add_row(row["algorithm"], _ms(row["gst_s"]))
    print_table(table, console)
    table = Table(title=f"whole fabrics of about this size; prices: {tables['prices']}")
    table.add_column("fabric")
    table.add_column("algorithm")
    for head in ("servers", "price", "ms", "same price"):
        table.add_column(head, justify="right")
    for row in tables["fabrics"]:
        numbers = str(row["servers"]), f"{row['price']:.3f}"
        table.add_row(row["fabric"], row["by"], *numbers, _ms(row["gst_s"]), _ms(row["equal_price_gst_s"]))
    print_table(table, console)
    console.print(f"{nics(tables['rate_bit'])}: other rates may change the order", soft_wrap=True)
    for row in [*tables["algorithms"], *tables["fabrics"]]:
        if row["why"]:
            console.print(f"- {row.get('fabric') or row['algorithm']}: {row['why']}", soft_wrap=True)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"
