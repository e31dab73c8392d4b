"""HiPS on large tori: loads by symmetry are those of the whole forest, samples are trees of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bml.schedule import plan
from bml.schedule.algorithms.hips import hips
from bml.schedule.ir import cost
from bml.schedule.ir.drawing import check_room
from bml.schedule.ir.routing import Balance
from bml.schedule.ir.verify import verify
from bml.schedule.select.sample_torus import is_even_torus, load_of_torus, sample_of_torus, staged_of_torus
from bml.topology import UsageError, parse


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "shape", ["torus:4x1", "torus:4x2", "torus:6x2", "torus:12x2", "torus:4x3", "torus:4x4"]
)
def test_loads_by_symmetry_are_those_of_the_forest(shape: str) -> None:
    fabric = parse(shape)
    whole = hips(fabric)
    exact, found = cost.load(whole, fabric), load_of_torus(fabric)
    np.testing.assert_array_equal(found.sent, exact.sent)
    np.testing.assert_array_equal(found.received, exact.received)
    assert found.whole == exact.whole
    assert found.busiest == cost.gst(whole, fabric)
    assert staged_of_torus(fabric) == cost.gst_staged(whole, fabric)


def test_a_sample_has_trees_of_the_forest() -> None:
    fabric = parse("torus:6x2")
    whole, sample = hips(fabric), sample_of_torus(fabric, 24)
    assert sample.pieces == 24
    assert verify(sample, fabric) == []
    trees = {tree.tobytes() for tree in whole.parent}
    assert all(tree.tobytes() in trees for tree in sample.parent)


@pytest.mark.parametrize("text", ["torus:5x2", "torus:2x4", "bcube:4x2"])
def test_what_is_not_the_same_everywhere_is_not_taken(text: str) -> None:
    assert not is_even_torus(parse(text))
    assert not is_even_torus(parse("torus:4x2").without("server:1"))
    assert not is_even_torus(parse("torus:4x2").with_rates({(0, 0): 2}))


@pytest.mark.slow
def test_a_torus_of_4096_servers_is_planned_from_a_sample() -> None:
    made = plan(parse("torus:64x2"))
    assert (made.pieces, made.verified_pieces, made.detours) == (16384, 64, 0)
    assert made.violations() == []
    assert made.gst() == made.load().busiest
    assert float(made.gst()) == pytest.approx(0.5 * 4095 / 4096)
    with pytest.raises(UsageError, match="leave out the size of the vector"):
        made.counts()
    with pytest.raises(UsageError, match=r"32768 trees of 4096 servers would take 9 GB to build"):
        made.schedule  # noqa: B018


@pytest.mark.parametrize(
    ("shape", "failure", "algorithm"),
    [
        ("torus:63x2", None, "auto"),
        ("torus:64x2", "server:0", "auto"),
        ("bcube:32x3", "server:0", "auto"),
        ("torus:64x2", None, "ring"),
        ("torus:64x2", "server:0", "ring:both"),
    ],
)
def test_what_is_too_large_is_refused_at_once(shape: str, failure: str | None, algorithm: str) -> None:
    fabric = parse(shape)
    damaged = fabric.without(failure) if failure else fabric
    with pytest.raises(UsageError, match=r"GB to build, up to 4 GB are taken"):
        plan(damaged, algorithm).schedule  # noqa: B018


def test_the_largest_that_is_built() -> None:
    check_room(parse("bcube:16x3"), 3 * 4095)
    with pytest.raises(UsageError, match="--algorithm tree"):
        check_room(parse("bcube:16x3"), 4 * 4095)


def test_loads_are_counted_only_where_a_detour_is_to_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = Balance._count

    def noted(balance: Balance, *columns: Any) -> None:
        counted.append(len(columns[0]))
        count(balance, *columns)

    monkeypatch.setattr(Balance, "_count", noted)
    assert plan(parse("torus:8x2"), "ring:one").violations() == []
    assert counted == [], "on the largest rings it takes minutes, and 10 GB"
    assert plan(parse("torus:8x2").without("link:9/0"), "ring:one").violations() == []
    assert counted
