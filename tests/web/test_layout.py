"""Where parts of a fabric stand: every part has one place, in view, and no two lie on each other."""

from __future__ import annotations

import pytest

from bml.topology import parse
from bml.web.layout import MOST_IN_FULL, Layout, layouts

NAMES = (
    *("bcube:3x2", "bcube:2x1", "bcube:4x3", "bcube:2x4", "bcube:16x2", "bcube:4x4"),
    *("torus:4x2", "torus:3x2", "torus:2x2", "torus:5x1", "torus:4x3", "torus:16x2"),
    *("graph:0-1,1-2,2-0,2-3", "graph:0-1-2,3-4-5;0-3,1-4,2-5"),
    *("switch:2", "switch:9", "switch:256", "fattree:4", "fattree:8", "fattree:10/250"),
)
DRAWN = [
    pytest.param(name, made, id=f"{name}-{made.sizes.tile}")
    for name in NAMES
    for made in layouts(parse(name))
]


@pytest.mark.parametrize(("name", "made"), DRAWN)
def test_every_part_is_drawn_once(name: str, made: Layout) -> None:
    fabric = parse(name)
    assert [each.server for each in made.servers] == list(range(fabric.n_servers))
    assert sorted((each.server, each.level) for each in made.nics) == sorted(fabric.links)
    assert sorted((each.level, each.group) for each in made.switches) == sorted(fabric.switches)
    assert all(each.group == fabric.group(each.server, each.level) for each in made.nics)
    assert all(each.members == fabric.members(each.level, each.group) for each in made.switches)


@pytest.mark.parametrize(("name", "made"), DRAWN)
def test_everything_is_in_view_and_no_boxes_touch(name: str, made: Layout) -> None:
    (w, h), (sw, sh) = made.sizes.tile, (0, 0) if made.is_cable else made.sizes.switch
    boxes = [(each.x, each.y, w, h) for each in made.servers]
    boxes += [(each.x, each.y, sw, sh) for each in made.switches if not made.is_cable]
    for x, y, across, down in boxes:
        assert across / 2 <= x <= made.width - across / 2
        assert down / 2 <= y <= made.height - down / 2
    boxes.sort()
    for at, (x, y, across, down) in enumerate(boxes):
        for x2, y2, across2, down2 in boxes[at + 1 :]:
            if x2 - x > w + sw:
                break
            assert abs(x2 - x) >= (across + across2) / 2 or abs(y2 - y) >= (down + down2) / 2
    lines = [nic.line for nic in made.nics] + [line for each in made.switches for line in each.bus]
    assert all(0 <= x <= made.width and 0 <= y <= made.height for line in lines for x, y in line)


@pytest.mark.parametrize(("name", "made"), DRAWN)
def test_a_nic_begins_at_its_server_and_ends_at_its_switch(name: str, made: Layout) -> None:
    (w, h), (sw, sh) = made.sizes.tile, made.sizes.switch
    buses = {(each.level, each.group): each for each in made.switches}
    for nic in made.nics:
        place = made.servers[nic.server]
        (x, y), end = nic.line[0], nic.line[-1]
        assert abs(x - place.x) <= w / 2 + 0.2
        assert abs(y - place.y) <= h / 2 + 0.2
        switch = buses[nic.level, nic.group]
        near = abs(end[0] - switch.x) <= sw / 2 + 0.2 and abs(end[1] - switch.y) <= sh / 2 + 0.2
        closes_ring = made.is_cable and not near
        in_pod = name.startswith("fattree")
        assert near or closes_ring or in_pod or any(_is_on(end, line) for line in switch.bus)


def _is_on(point: tuple[float, float], line: tuple[tuple[float, float], ...]) -> bool:
    """Whether a point is on a line that goes along an axis."""
    (x0, y0), (x1, y1) = line
    return (
        min(x0, x1) - 0.2 <= point[0] <= max(x0, x1) + 0.2
        and min(y0, y1) - 0.2 <= point[1] <= max(y0, y1) + 0.2
    )


def test_a_cable_of_a_torus_is_where_its_two_ends_meet() -> None:
    made = layouts(parse("torus:4x2"))[0]
    ends: dict[tuple[int, int], set[tuple[float, float]]] = {}
    for nic in made.nics:
        ends.setdefault((nic.level, nic.group), set()).add(nic.line[-1])
    assert sum(len(each) == 1 for each in ends.values()) == 2 * 4 * 3
    assert sum(len(each) == 2 for each in ends.values()) == 2 * 4, "the cables that close the eight rings"


def test_small_fabrics_are_drawn_in_two_sizes_and_large_ones_fit_a_screen() -> None:
    large, small = layouts(parse("bcube:3x2"))
    assert large.width > 500
    assert small.width < 360, "for a phone"
    assert parse("bcube:6x2").n_servers == MOST_IN_FULL
    for name in ("bcube:16x2", "torus:16x2", "switch:256", "fattree:10/250"):
        (made,) = layouts(parse(name))
        assert made.width < 1250
        assert made.height < 1500
