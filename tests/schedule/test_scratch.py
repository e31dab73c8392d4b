"""What a step needs beside its input and its output, in vectors: at most two, mostly less than one."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from damage import damaged_by, random_sets, single_failures
from hypothesis import given
from hypothesis import strategies as st

from bml.protocol.step.dataflow import Buffer, Place, Stamp
from bml.protocol.step.engine import Engine
from bml.protocol.step.layout import Layout
from bml.protocol.step.spans import apart, size
from bml.protocol.wire.frame import Kind
from bml.schedule import Programs, Schedules, plan
from bml.topology import Fabric, parse

#: Any piece of any schedule here has many elements of these.
LARGE = 1 << 22

FABRICS = (
    *("bcube:2x2", "bcube:3x2", "bcube:2x3", "switch:9"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("torus:3x2", "torus:2x3")),
)


def scratch(fabric: Fabric, algorithm: str = "auto") -> Fraction:
    """SCRATCH of the server that needs the most, in vectors."""
    schedules = Schedules(fabric, algorithm)
    most = 0
    for server in fabric.servers:
        program = Programs(schedules, server).for_nbytes(4 * LARGE)
        most = max(most, Layout(program, LARGE, LARGE).scratch_elements)
    return Fraction(most, LARGE)


@pytest.mark.parametrize("name", ["bcube:2x2", "bcube:3x2", "bcube:2x3", "bcube:4x2"])
def test_on_a_healthy_bcube(name: str) -> None:
    """Of n ports and N servers: 1 - 1/N - 1/n."""
    fabric = parse(name)
    programs = {server: plan(fabric, "bml").program(server) for server in fabric.servers}
    for program in programs.values():
        n = 6 * program.pieces
        expected = n - n // len(programs) - n // fabric.ports
        assert Engine(program, Stamp(1, 1, 0, 4), n, 16).scratch_elements == expected
        for odd in (0, 1, 17, n + 3):  # pieces of unequal size: at most one more element of each
            assert Engine(program, Stamp(1, 1, 0, 4), odd, 16).scratch_elements <= odd + program.pieces


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FABRICS)
def test_any_one_failure(name: str) -> None:
    damaged = [damaged_by(name, failure) for failure in single_failures(name)]
    assert max(scratch(fabric) for fabric in [parse(name), *damaged] if fabric) <= 1


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", FABRICS)
def test_many_failures(name: str) -> None:
    assert max(scratch(fabric) for fabric in random_sets(name, 30, seed=11, most=7)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bcube:10x2", "bcube:3x4"])
def test_large_fabrics_which_take_detours(name: str) -> None:
    for failure in ("server:0", "link:0/0", "switch:0/0"):
        assert scratch(damaged_by(name, failure)) <= 1


def test_results_that_are_passed_on_lie_where_they_belong() -> None:
    """On its way down a detour carries the result itself: it needs no place beside OUT."""
    fabric = parse("bcube:3x2").without("link:0/0")
    passing = 0
    for server in fabric.servers:
        program = plan(fabric, "detour").program(server)
        layout = Layout(program, 3600, 10)
        for (kind, origin, dest), relays in layout.relays.items():
            for run, _ in relays:
                place = layout.place(Kind(kind), origin, dest, run.start, run.stop)
                if kind == Kind.BROADCAST:
                    assert place == Place(Buffer.OUT, run.start)
                    passing += 1
    assert passing


spans = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 6)).map(lambda at: (at[0], sum(at))), max_size=8
)


@pytest.mark.slow
@given(spans)
def test_spans_apart_are_the_longest_choice(given_spans: list[tuple[int, int]]) -> None:
    def fits(chosen: tuple[int, ...]) -> bool:
        pairs = combinations([given_spans[index] for index in chosen], 2)
        return all(a[1] <= b[0] or b[1] <= a[0] for a, b in pairs)

    numbers = range(len(given_spans))
    choices = [chosen for n in range(len(given_spans) + 1) for chosen in combinations(numbers, n)]
    best = max(size(given_spans[index] for index in chosen) for chosen in choices if fits(chosen))
    found = tuple(apart(given_spans))
    assert fits(found)
    assert size(given_spans[index] for index in found) == best
