"""Cuts: slices tile their pieces, all of which advance side by side; the first and the last are short."""

import random
from itertools import pairwise

import pytest

from bml.protocol.step.cuts import Cuts
from bml.schedule import Program, plan
from bml.topology import parse

FABRICS = ("bcube:3x2", "bcube:2x3", "torus:3x2")
DAMAGED = ("server:4", "link:4/0", "switch:0/1")


def programs() -> list[Program]:
    healthy = [plan(parse(name)).program(1) for name in FABRICS]
    return healthy + [plan(parse("bcube:3x2").without(each)).program(1) for each in DAMAGED]


def slices_of(cuts: Cuts, program: Program) -> list[tuple[int, int]]:
    return [each for part in program.ranges for each in cuts.of(part)]


@pytest.mark.parametrize("program", programs(), ids=[*FABRICS, *DAMAGED])
def test_slices_tile_the_vector_and_none_is_longer_than_asked(program: Program) -> None:
    chance = random.Random(5)
    for n_elements in (0, 1, 7, 100, 5000, chance.randrange(10**6)):
        for longest in (1, 3, 64, 10**7):
            if n_elements // longest > 10**4:
                continue
            slices = slices_of(Cuts(program, n_elements, longest), program)
            assert all(start < stop <= start + longest for start, stop in slices)
            assert [0, *(stop for _, stop in slices)] == [*(start for start, _ in slices), n_elements]


def test_a_long_piece_is_cut_by_itself_and_short_ones_go_together() -> None:
    program = plan(parse("bcube:3x2")).program(0)
    merged = next(part for part in program.ranges if part.stop - part.start == 3)
    cuts = Cuts(program, 1800, 100)  # pieces of 100
    assert list(cuts.of(merged)) == [(start, start + 100) for start in range(300, 600, 100)]
    assert list(Cuts(program, 1800, 300).of(merged)) == [(300, 600)]
    assert list(Cuts(program, 1800, 299).of(merged)) == [(300, 500), (500, 600)]


def test_all_pieces_advance_side_by_side() -> None:
    """Also those that a server treats alike: by column, the first slices of all come first."""
    program = plan(parse("bcube:3x2")).program(0)
    cuts = Cuts(program, 18_000, 100)
    columns: dict[int, list[int]] = {}
    for start, _ in slices_of(cuts, program):
        columns.setdefault(start // 1000, []).append(cuts.column(start))
    assert len(columns) == 18
    assert all(one == columns[0] for one in columns.values())
    assert all(before < after for before, after in pairwise(columns[0]))


def test_pieces_of_unequal_length_end_together() -> None:
    program = plan(parse("bcube:3x2").without("link:4/0")).program(0)
    assert program.cumulative is not None
    cuts = Cuts(program, 10**6, 1000)
    last = [cuts.column(cuts.at(piece + 1) - 1) for piece in range(program.pieces)]
    first = [cuts.column(cuts.at(piece)) for piece in range(program.pieces)]
    assert set(first) == {0}
    assert len(set(last)) == 1


def test_a_long_piece_begins_and_ends_with_short_slices() -> None:
    program = plan(parse("bcube:3x2")).program(0)
    whole = next(part for part in program.ranges if part.stop - part.start == 1)
    lengths = [stop - start for start, stop in Cuts(program, 18 * 8000, 1000).of(whole)]
    assert lengths == [125, 125, 250, 500, *[1000] * 6, 500, 250, 125, 125]
    few = [stop - start for start, stop in Cuts(program, 18 * 7000, 1000).of(whole)]
    assert few == [1000] * 7
