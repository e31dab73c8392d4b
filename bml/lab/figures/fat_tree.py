"""Fat-Tree beside BCube: times, numbers of switches, and flows that meet on one uplink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import mean, median

from bml.lab.figures.figure import Basis, How, Point, figure
from bml.lab.figures.sources import BML, HIPS_OR_LATER
from bml.lab.figures.steps import DELAY_S, NBYTES, RATE, WHOLE_S, counted, simulated
from bml.lab.flows.simulate import Conditions, traffic_of
from bml.schedule import plan
from bml.topology import Fabric, FatTree, bcube, parse
from bml.topology.fattree import AGGREGATION, EDGE, fat_tree, with_seed
from bml.topology.wiring import InnerLink

_FAT_TREE_MS, _BCUBE_MS = 22.9, 11.46
"""Published theoretical times, in milliseconds."""
SEEDS = 5
_CASES = (
    ("mesh, fattree:10", "fattree:10", "mesh", _FAT_TREE_MS),
    ("HiPS over its tiers, fattree:10", "fattree:10", "hips:tiers", _FAT_TREE_MS),
    ("ring, fattree:10", "fattree:10", "ring", _FAT_TREE_MS),
    ("ring both ways, bcube:16x2", "bcube:16x2", "ring:both", _BCUBE_MS),
    ("HiPS, bcube:16x2", "bcube:16x2", "bml", _BCUBE_MS),
)


@figure(
    "fat-tree-bcube",
    title="Fat-Tree of 250 servers beside BCube of 256",
    unit="milliseconds of a step",
    source=HIPS_OR_LATER,
    about="57.5 MB of parameters, 40 Gbit/s, 1 µs a hop, as published. On a Fat-Tree, where a server has "
    "one NIC, HiPS has meshes at an edge switch, in a pod, and over the core. Theory is the load of the "
    "busiest NIC, without start-ups. The simulation has paths chosen by hash (ECMP), the mean over five "
    "seeds, and rings in the order of ids.",
    reading="Theory agrees to the digits that are published. Simulated, a mesh on the Fat-Tree takes 15 % "
    "longer and HiPS 19 %, as flows collide inside; HiPS sends less through the core, but in fewer flows, "
    "so that chance evens out less. The rings have some 500 hops one after the other, each of 1 µs.",
)
def fat_tree_beside_bcube(delay_s: float = DELAY_S) -> list[Point]:
    """Return the times of a step by theory and by simulation, in milliseconds."""
    found = []
    for series, name, algorithm, published in _CASES:
        fabric = parse(name)
        theory = counted(fabric, algorithm) * WHOLE_S * 1e3
        played = _simulated(fabric, algorithm, delay_s) * WHOLE_S * 1e3
        found.append(Point(series, "theory", theory, How.theory, published, Basis.value))
        found.append(Point(series, "simulation", played, How.simulation, published, Basis.value))
    return found


def _simulated(fabric: Fabric, algorithm: str, delay_s: float) -> float:
    """Return the time in T; in a Fat-Tree, where paths collide by chance, the mean over SEEDS seeds."""
    seeded = [fabric]
    if isinstance(fabric.wiring, FatTree):
        seeded = [with_seed(fabric, seed) for seed in range(SEEDS)]
    return mean(simulated(each, algorithm, delay_s) for each in seeded)


@figure(
    "switch-count",
    title="Switches of the two fabrics",
    unit="parts",
    source=HIPS_OR_LATER,
    about="Counted in the fabrics of `fat-tree-bcube`.",
    reading="The Fat-Tree has 125 switches of ten ports, the BCube 32 of sixteen.",
)
def switch_counts() -> list[Point]:
    """Return servers and switches of both fabrics."""
    return [
        Point("servers", "fattree:10", fat_tree(10).n_servers, How.theory, 250, Basis.value),
        Point("servers", "bcube:16x2", bcube(16, 2).n_servers, How.theory, 256, Basis.value),
        Point("switches", "fattree:10", n_switches(fat_tree(10)), How.theory, 125, Basis.value),
        Point("switches", "bcube:16x2", n_switches(bcube(16, 2)), How.theory, 32, Basis.value),
    ]


@figure(
    "switch-share",
    title="Switches of a BCube as a share of those of a Fat-Tree",
    unit="switches per server of BCube over those of Fat-Tree",
    source=BML,
    about="Both are built of switches with n ports and are full; a BCube has k levels. The published value "
    "is k/5.",
    reading="Counted, the share is k/5 for any n.",
)
def switch_share(sizes: Sequence[int] = (4, 8, 16), depths: Sequence[int] = (2, 3, 4)) -> list[Point]:
    """Return the share for n in `sizes` and k in `depths`."""
    found = []
    for n in sizes:
        tree = fat_tree(n)
        for k in depths:
            cube = bcube(n, k)
            share = n_switches(cube) / cube.n_servers / (n_switches(tree) / tree.n_servers)
            found.append(Point(f"{n} ports", f"k = {k}", share, How.theory, k / 5, Basis.formula))
    return found


def n_switches(fabric: Fabric) -> int:
    """Count the switches of a healthy BCube or Fat-Tree, in a Fat-Tree those of all three layers."""
    if not isinstance(fabric.wiring, FatTree):
        return len(fabric.switches)
    servers = fabric.servers
    half = fabric.wiring.switch_ports // 2
    edges, pods = len(servers) // half, len(servers) // half**2
    return edges + pods * half + half**2


_FLOWS = (9.0, 19.0)
"""Published median and maximum of HiPS's flows on a link from an aggregation to a core switch."""
_LAYERS = {"edge to aggregation": EDGE, "aggregation to core": AGGREGATION}
_SENDERS = {"HiPS": "hips:tiers", "mesh": "mesh"}


@figure(
    "uplink-flows",
    title="Flows on the uplinks of a Fat-Tree",
    unit="flows of an uplink",
    source=HIPS_OR_LATER,
    about="Connections of HiPS over the tiers of `fattree:10`, and of a mesh over all: every switch on the "
    "way up chooses the uplink of each by a hash (ECMP). There are 250 links from edge to aggregation "
    "switches, and 250 from there to the core. Mean over five seeds. Published are HiPS's flows on the "
    "links to the core.",
    reading="In HiPS each server has a connection to nine others over the core, 2,250 on 250 links: the "
    "median is the mean, 9, as published, and chance puts 18 on the busiest, published are 19. A mesh has "
    "225 there.",
    log=True,
)
def uplink_flows(algorithms: Sequence[str] = tuple(_SENDERS), seeds: int = 5) -> list[Point]:
    """Return median and maximum of the flows of an uplink in each layer, over seeds."""
    found = []
    for name in algorithms:
        for where, layer in _LAYERS.items():
            counts = [flows_of_uplinks(fat_tree(10), _SENDERS[name], layer, seed) for seed in range(seeds)]
            values = mean(median(each) for each in counts), mean(max(each) for each in counts)
            for at, value, published in zip(("median", "maximum"), values, _FLOWS, strict=True):
                known = (name, layer) == ("HiPS", AGGREGATION)
                compared = (published, Basis.value) if known else ()
                found.append(Point(f"{name}, {where}", at, value, How.simulation, *compared))
    return found


def flows_of_uplinks(fabric: Fabric, algorithm: str, layer: int, seed: int) -> list[int]:
    """Count the connections of an algorithm on every link up from a layer; `seed` is that of ECMP's hash."""
    seeded = with_seed(fabric, seed)
    assert isinstance(fabric.wiring, FatTree)
    links = (link for pair in _connections(fabric, algorithm) for link in seeded.inner_path(*pair))
    return _counts((link for link in links if _rises_from(layer, link)), fabric.wiring.switch_ports**3 // 4)


def _rises_from(layer: int, link: InnerLink) -> bool:
    """Whether an inner link leads from this layer to the one above."""
    (lower, _), (upper, _) = link
    return (lower, upper) == (layer, layer + 1)


def _connections(fabric: Fabric, algorithm: str) -> list[tuple[int, int]]:
    """The pairs of servers of which the first sends to the second."""
    traffic, _ = traffic_of(plan(fabric, algorithm), Conditions(NBYTES, RATE, whole=True))
    sends = traffic.sender >= 0
    return sorted({*zip(traffic.sender[sends].tolist(), traffic.receiver[sends].tolist(), strict=True)})


def _counts(links: Iterable[object], n_links: int) -> list[int]:
    """How often each link is there, with a 0 for every link that is not."""
    count = Counter(links)
    return [*count.values(), *[0] * (n_links - len(count))]
