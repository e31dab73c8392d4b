"""Decides where spares wait, and which of them takes which address of the fabric. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface

from bml.cluster.fleets.placement import Machine
from bml.topology import Fabric


@dataclass(frozen=True)
class Waiting:
    """A spare. `node`: of Ray, on which it is. `is_ready`: it has done its imports.

    `networks`: its addresses at each level with the lengths of their prefixes, such as "10.10.3.1/24". None:
    they are not known, or it gets those of the server whose place it takes.
    """

    node: str
    is_ready: bool
    networks: tuple[str, ...] | None = None


def nodes_for_spares(count: int, homes: Mapping[int, str], machines: Sequence[Machine]) -> list[str]:
    """Return the node of each spare: those without servers first, then those with the fewest, evenly.

    `homes` are the nodes of the servers. Machines without CPUs get no spares if there are others.
    """
    usable = sorted(each for each in machines if each.cpus > 0) or sorted(machines)
    servers, spares = Counter(homes.values()), Counter[str]()
    for _ in range(count):
        node = min(usable, key=lambda each: (servers[each.node], spares[each.node])).node
        spares[node] += 1
    return list(spares.elements())


def is_plugged_in(
    server: int, networks: Sequence[str], fabric: Fabric, nics: Mapping[int, Sequence[str]]
) -> bool:
    """Whether a spare with these networks is plugged in at the address of this server.

    It is if, at every level, it is in one network with the NICs of all servers of that switch, as far as
    their addresses (`nics`, one a level) are known.
    """
    for level, text in enumerate(networks):
        network = ip_interface(text).network
        mates = [each for each in fabric.neighbours(server, level) if each in nics]
        if any(ip_address(nics[each][level]) not in network for each in mates):
            return False
    return True


def choose(
    lost: int,
    free: Collection[int],
    waiting: Mapping[int, Waiting],
    home: str,
    fabric: Fabric,
    nics: Mapping[int, Sequence[str]],
) -> tuple[int, int] | None:
    """Return which spare replaces a lost server, and the address that it takes; None: there is no spare.

    A spare takes the address of the lost server where it is plugged in there, else another `free` one. If it
    seems to be plugged in nowhere, as where switches route, it takes that of the lost server. `home`: the
    node of the lost server, on which the next process may be lost, too. `nics`: the addresses of the others.
    """

    def ranked() -> Iterator[tuple[tuple[bool, bool, bool], int, int]]:
        for number, spare in sorted(waiting.items()):
            address = _address(lost, free, spare, fabric, nics)
            moves = address is None or address != lost
            yield (
                (not spare.is_ready, moves, spare.node == home),
                number,
                lost if address is None else address,
            )

    best = min(ranked(), default=None)
    return best and best[1:]


def _address(
    lost: int, free: Collection[int], spare: Waiting, fabric: Fabric, nics: Mapping[int, Sequence[str]]
) -> int | None:
    """Return the address at which a spare is plugged in; None: it seems to be nowhere."""
    if spare.networks is None:
        return lost
    for server in (lost, *sorted(free)):
        if is_plugged_in(server, spare.networks, fabric, nics):
            return server
    return None
