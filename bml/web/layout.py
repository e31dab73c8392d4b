"""Where the parts of a fabric stand on the page: plain numbers, made once for a fabric.

A switch is a small box with lines, its bus; a NIC is a short line from its server to the bus. Servers of a
BCube and a torus stand in a grid by their first two digits, blocks of that grid by the next two. NICs of
further levels are *quiet*: the page draws them only when they are not well, or their server is selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import mean

from bml.topology import BCube, Fabric, Graph, Torus
from bml.topology.fattree import FatTree

Point = tuple[float, float]
Line = tuple[Point, ...]

MOST_IN_FULL = 36
"""Servers of the largest fabric whose tiles have room for a phase, and whose NICs have room for a rate."""
_WIDEST = 950.0
_MARGIN = 16.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a drawing: of a server's tile, from tile to tile, of a switch, and of the gap to its bus."""

    tile: Point
    pitch: Point
    switch: Point
    bus: float
    full: bool


_FULL = Sizes((92.0, 56.0), (178.0, 122.0), (52.0, 24.0), 30.0, True)
_COMPACT = Sizes((32.0, 24.0), (50.0, 44.0), (34.0, 18.0), 9.0, False)


@dataclass(frozen=True)
class ServerPlace:
    """The centre of a server's tile. `address`: its digits, the first digit first."""

    server: int
    x: float
    y: float
    address: str


@dataclass(frozen=True)
class NicPlace:
    """The line of a NIC, from its server. `side` of the server: where the text of its rate has room."""

    server: int
    level: int
    group: int
    line: Line
    side: str
    quiet: bool = False


@dataclass(frozen=True)
class SwitchPlace:
    """The centre of a switch, or of a cable of a torus, and its lines."""

    level: int
    group: int
    x: float
    y: float
    members: tuple[int, ...]
    bus: tuple[Line, ...] = ()
    quiet: bool = False


@dataclass(frozen=True)
class Label:
    """A text, centred."""

    x: float
    y: float
    text: str


@dataclass
class Layout:
    """A whole drawing, from (0, 0) to (`width`, `height`). `is_cable`: a switch is a cable with two ends.

    `inner`: boxes (centres) and `inner_lines`: lines inside of a network that servers see as one switch.
    """

    name: str
    sizes: Sizes
    is_cable: bool = False
    width: float = 0.0
    height: float = 0.0
    servers: list[ServerPlace] = field(default_factory=list)
    nics: list[NicPlace] = field(default_factory=list)
    switches: list[SwitchPlace] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    inner: list[Label] = field(default_factory=list)
    inner_lines: list[Line] = field(default_factory=list)


def layouts(fabric: Fabric) -> list[Layout]:
    """Lay out a fabric, the largest drawing first; what is dead in it is laid out, too."""
    return [_layout(fabric, sizes) for sizes in (_FULL, _COMPACT)[fabric.n_servers > MOST_IN_FULL :]]


def _layout(fabric: Fabric, sizes: Sizes) -> Layout:
    wiring = fabric.wiring
    made = Layout(fabric.name, sizes, is_cable=isinstance(wiring, Torus))
    if isinstance(wiring, Torus):
        _torus(made, fabric, wiring)
    elif isinstance(wiring, FatTree):
        _fat_tree(made, fabric, wiring)
    elif isinstance(wiring, BCube) and wiring.levels > 1:
        _bcube(made, fabric, wiring)
    elif isinstance(wiring, Graph):
        _two_rows(made, fabric)
    else:
        _rows(made, fabric)
    return _framed(made)


def _framed(made: Layout) -> Layout:
    """Move everything into view: the least x and y become the margin."""
    tile, switch = made.sizes.tile, made.sizes.switch
    boxes = [(each.x, each.y, tile) for each in made.servers]
    boxes += [(each.x, each.y, switch) for each in made.switches]
    boxes += [(each.x, each.y, (0.0, 16.0)) for each in (*made.labels, *made.inner)]
    lines = [line for each in made.switches for line in each.bus] + made.inner_lines
    points = [point for line in [*lines, *(nic.line for nic in made.nics)] for point in line]
    room = 46.0 if made.sizes.full and any(nic.side == "right" for nic in made.nics) else 0.0
    left = min([x - w / 2 for x, _, (w, _) in boxes] + [x for x, _ in points]) - _MARGIN
    top = min([y - h / 2 for _, y, (_, h) in boxes] + [y for _, y in points]) - _MARGIN
    right = max([x + w / 2 for x, _, (w, _) in boxes] + [x + room for x, _ in points]) + _MARGIN
    bottom = max([y + h / 2 for _, y, (_, h) in boxes] + [y for _, y in points]) + _MARGIN
    return _moved(made, left, top, right - left, bottom - top)


def _moved(made: Layout, left: float, top: float, width: float, height: float) -> Layout:
    def at(x: float, y: float) -> Point:
        return round(x - left, 1), round(y - top, 1)

    def along(line: Line) -> Line:
        return tuple(at(*point) for point in line)

    return Layout(
        made.name,
        made.sizes,
        made.is_cable,
        round(width, 1),
        round(height, 1),
        [ServerPlace(each.server, *at(each.x, each.y), each.address) for each in made.servers],
        [NicPlace(n.server, n.level, n.group, along(n.line), n.side, n.quiet) for n in made.nics],
        [
            SwitchPlace(s.level, s.group, *at(s.x, s.y), s.members, tuple(map(along, s.bus)), s.quiet)
            for s in made.switches
        ],
        [Label(*at(each.x, each.y), each.text) for each in made.labels],
        [Label(*at(each.x, each.y), each.text) for each in made.inner],
        [along(line) for line in made.inner_lines],
    )


# --- grids ---------------------------------------------------------------------------------------


def _grid(fabric: Fabric, sizes: Sizes, ports: int) -> Callable[[int], Point]:
    """Places by digits: the first goes right, the second down, the next two move whole blocks alike."""
    gap_x, gap_y = sizes.switch[0] + sizes.bus + 14, sizes.switch[1] + sizes.bus + 22

    def at(server: int) -> Point:
        x = y = 0.0
        across, down = sizes.pitch
        for i, digit in enumerate(fabric.address(server)):
            if i % 2 == 0:
                x, across = x + digit * across, across * ports + gap_x
            else:
                y, down = y + digit * down, down * ports + gap_y
        return x, y

    return at


def _add_servers(made: Layout, fabric: Fabric, at: Callable[[int], Point]) -> None:
    for server in range(fabric.n_servers):
        address = ".".join(map(str, fabric.address(server)))
        made.servers.append(ServerPlace(server, *at(server), address))


def _bcube(made: Layout, fabric: Fabric, wiring: BCube) -> None:
    """Level 0: a bus above each row. Level 1: a bus right of each column. Further levels: a strip below."""
    sizes = made.sizes
    (w, h), (sw, sh), gap = sizes.tile, sizes.switch, sizes.bus
    at = _grid(fabric, sizes, wiring.ports)
    _add_servers(made, fabric, at)
    for group in range(wiring.n_groups(0)):
        members = wiring.members(0, group)
        (first, y), (last, _) = at(members[0]), at(members[-1])
        y -= h / 2 + gap
        x = first - w / 2 - sw / 2 - 8
        bus = ((x + sw / 2, y), (last - w / 4, y))
        made.switches.append(SwitchPlace(0, group, x, y, members, (bus,)))
        for server in members:
            top = at(server)[0] - w / 4, at(server)[1] - h / 2
            made.nics.append(NicPlace(server, 0, group, (top, (top[0], y)), "top"))
    for group in range(wiring.n_groups(1)):
        members = wiring.members(1, group)
        (x, first), (_, last) = at(members[0]), at(members[-1])
        x += w / 2 + gap * 0.75
        y = first - h / 2 - gap - sh / 2 - (14 if sizes.full else 8)
        made.switches.append(SwitchPlace(1, group, x, y, members, (((x, y + sh / 2), (x, last)),)))
        for server in members:
            right = at(server)[0] + w / 2, at(server)[1]
            made.nics.append(NicPlace(server, 1, group, (right, (x, right[1])), "right"))
    _strips(made, fabric, wiring, at)


def _strips(made: Layout, fabric: Fabric, wiring: BCube, at: Callable[[int], Point]) -> None:
    """Switches of levels 2 and up, in rows below the servers."""
    (w, h), (sw, sh) = made.sizes.tile, made.sizes.switch
    left = min(each.x for each in made.switches)
    right = max(max(each.x for each in made.servers), left + 12 * (sw + 8))
    y = max(each.y for each in made.servers) + h / 2 + 26
    for level in range(2, wiring.levels):
        made.labels.append(Label(left + 24, y, f"level {level}"))
        x, y = left, y + 12 + sh
        for group in range(wiring.n_groups(level)):
            if x > right:
                x, y = left, y + sh + 8
            members = wiring.members(level, group)
            made.switches.append(SwitchPlace(level, group, x, y, members))
            for server in members:
                corner = at(server)[0] - w / 2 + 5 * (level - 1), at(server)[1] + h / 2
                made.nics.append(NicPlace(server, level, group, (corner, (x, y - sh / 2)), "", quiet=True))
            x += sw + 8
        y += sh + 14


def _torus(made: Layout, fabric: Fabric, wiring: Torus) -> None:
    """Cables of dimensions 0 and 1 go right and down by half the way; those that close a ring go out."""
    sizes = made.sizes = replace(made.sizes, pitch=(made.sizes.pitch[0] * 1.2, made.sizes.pitch[1]))
    (w, h), (across, down) = sizes.tile, sizes.pitch
    at = _grid(fabric, sizes, wiring.size)
    if wiring.dimensions == 1:
        columns = min(wiring.size, 8 if sizes.full else 20)

        def at(server: int) -> Point:
            return server % columns * across, server // columns * down

    _add_servers(made, fabric, at)
    done: set[tuple[int, int]] = set()
    for server in range(fabric.n_servers):
        x, y = at(server)
        for dimension in range(wiring.dimensions):
            for direction in (1, -1):
                _, level, to = wiring.step(server, dimension, direction)
                group = wiring.group(server, level)
                if dimension > 1:
                    tx, ty = at(to)
                    end = (x + tx) / 2, (y + ty) / 2
                    line: Line = ((x, y + h / 2), end)
                elif dimension == 0:
                    end = x + direction * across / 2, y
                    line = ((x + direction * w / 2, y), end)
                else:
                    end = x, y + direction * down / 2
                    line = ((x, y + direction * h / 2), end)
                side = "" if dimension > 1 else ("along" if dimension == 0 else "beside")
                made.nics.append(NicPlace(server, level, group, line, side, quiet=dimension > 1))
                if direction == 1 and (level, group) not in done:
                    done.add((level, group))
                    members = wiring.members(level, group)
                    made.switches.append(SwitchPlace(level, group, *end, members, (), dimension > 1))


# --- one switch, or a network that looks like one ------------------------------------------------


def _rows(made: Layout, fabric: Fabric) -> None:
    """Rows of servers, a bus above each, and a spine at their left from the one switch."""
    sizes = made.sizes
    (w, h), (_, sh), gap = sizes.tile, sizes.switch, sizes.bus
    columns = _columns(fabric.n_servers, sizes)

    def at(server: int) -> Point:
        return server % columns * (
            sizes.pitch[0] - (60 if sizes.full else 6)
        ), server // columns * sizes.pitch[1]

    _add_servers(made, fabric, at)
    spine = -w / 2 - 14
    top = -h / 2 - gap - sh / 2 - 16
    rows = range((fabric.n_servers - 1) // columns + 1)
    heights = [row * sizes.pitch[1] - h / 2 - gap for row in rows]
    widths = [at(min((row + 1) * columns, fabric.n_servers) - 1)[0] - w / 4 for row in rows]
    bus: list[Line] = [((spine, top + sh / 2), (spine, heights[-1]))]
    bus += [((spine, y), (x, y)) for x, y in zip(widths, heights, strict=True)]
    made.switches.append(SwitchPlace(0, 0, spine, top, fabric.members(0, 0), tuple(bus)))
    for server in range(fabric.n_servers):
        x, y = at(server)[0] - w / 4, at(server)[1]
        line = ((x, y - h / 2), (x, heights[server // columns]))
        made.nics.append(NicPlace(server, 0, 0, line, "top"))


def _two_rows(made: Layout, fabric: Fabric) -> None:
    """Any graph: servers above, in order, and below them the switches, in the order of their servers."""
    sizes = made.sizes
    columns = _columns(fabric.n_servers, sizes)
    _add_servers(
        made, fabric, lambda server: (server % columns * sizes.pitch[0], server // columns * sizes.pitch[1])
    )
    middle = {
        (level, group): mean(made.servers[server].x for server in fabric.members(level, group))
        for level in range(fabric.levels)
        for group in range(fabric.wiring.n_groups(level))
    }
    step = sizes.switch[0] + sizes.bus
    most = max(1, int(columns * sizes.pitch[0] / step))
    first = made.servers[-1].y + sizes.pitch[1]
    for number, (level, group) in enumerate(sorted(middle, key=lambda at: (middle[at], at))):
        # Downwards first: switches whose servers are near each other stand below one another.
        n_rows = -(-len(middle) // most)
        x, y = number // n_rows * step, first + number % n_rows * (sizes.switch[1] + sizes.bus + 8)
        made.switches.append(SwitchPlace(level, group, x, y, fabric.members(level, group)))
        for server in fabric.members(level, group):
            place = made.servers[server]
            foot = (place.x, place.y + sizes.tile[1] / 2)
            made.nics.append(NicPlace(server, level, group, (foot, (x, y - sizes.switch[1] / 2)), ""))


def _columns(n_servers: int, sizes: Sizes) -> int:
    """Servers in a row, so that the drawing is about twice as wide as high."""
    return max(1, min(n_servers, round(math.sqrt(2 * n_servers * sizes.pitch[1] / sizes.pitch[0]))))


def _fat_tree(made: Layout, fabric: Fabric, wiring: FatTree) -> None:
    """Pods beside and below each other; in each its aggregation and edge switches, and its servers."""
    sizes, half = made.sizes, wiring.switch_ports // 2
    (w, h), (sw, sh) = sizes.tile, sizes.switch
    column = max(w, sw) + (44 if sizes.full else 14)
    step = h + (30 if sizes.full else 8)
    layer = 56.0
    pod = half * column + 24, 2 * layer + half * step + 60
    pods = -(-fabric.n_servers // half**2)
    beside = max(1, min(pods, int(_WIDEST // pod[0])))

    def corner(number: int) -> Point:
        return number % beside * pod[0], number // beside * pod[1]

    def of(server: int) -> Point:
        place, edge, number = fabric.address(server)
        x, y = corner(number)
        return x + edge * column, y + 2 * layer + place * step

    _add_servers(made, fabric, of)
    rows = range((pods - 1) // beside + 1)
    spine, top = -max(w, sw) - 6, -2 * layer
    heights = [row * pod[1] - layer * 0.7 for row in rows]
    ends = [corner(min((row + 1) * beside, pods) - 1)[0] + (half - 1) * column / 2 for row in rows]
    bus: list[Line] = [((spine, top + sh / 2), (spine, heights[-1]))]
    bus += [((spine, y), (x, y)) for x, y in zip(ends, heights, strict=True)]
    made.switches.append(SwitchPlace(0, 0, spine, top, fabric.members(0, 0), tuple(bus)))
    made.labels.append(Label(spine + 90 + sw, top, f"{half**2} core switches"))
    for number in range(pods):
        _pod(made, corner(number), number, half, column, layer, heights[number // beside])
    for server in range(fabric.n_servers):
        x, y = of(server)
        foot = (x - w / 2 - 6, y)
        line: Line = ((x - w / 2, y), foot, (foot[0], corner(fabric.address(server)[2])[1] + layer + sh / 2))
        made.nics.append(NicPlace(server, 0, 0, line, "left"))


def _pod(
    made: Layout, corner: Point, number: int, half: int, column: float, layer: float, trunk: float
) -> None:
    """The switches of one pod, and the cables between them."""
    x, y = corner
    middle = x + (half - 1) * column / 2
    made.labels.append(Label(middle + 44, trunk + 12, f"pod {number}"))
    for up in range(half):
        above = x + up * column
        made.inner.append(Label(above, y, f"a{number * half + up}"))
        made.inner.append(Label(above, y + layer, f"e{number * half + up}"))
        made.inner_lines.append(((middle, trunk), (above, y - 8)))
        made.inner_lines += _fan((above, y + 8), ((x + down * column, y + layer - 8) for down in range(half)))


def _fan(start: Point, ends: Iterable[Point]) -> list[Line]:
    return [(start, end) for end in ends]
