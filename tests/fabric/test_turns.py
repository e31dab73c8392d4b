"""The calculation of what turns of two jobs would gain, against cases that are known."""

from __future__ import annotations

import random

import pytest
from turns import cycles


def cycles_of(compute: float, share: float, later: float) -> list[float]:
    return cycles(compute, share, later, wander=0.0, rng=random.Random(0))


@pytest.mark.parametrize(("compute", "later"), [(1.0, 0.0), (1.0, 0.25), (2.0, 0.5)])
def test_equal_shares_keep_what_two_jobs_overlap(compute: float, later: float) -> None:
    assert cycles_of(compute, 0.5, later) == pytest.approx([compute + 2 - later] * 2)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_jobs_that_are_out_of_each_others_way_stay_so(share: float) -> None:
    assert cycles_of(1.0, share, 1.0) == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("later", [0.0, 0.3, 0.7])
def test_an_urgent_job_moves_the_other_out_of_its_way(later: float) -> None:
    assert cycles_of(2.0, 0.9, later) == pytest.approx([3.0, 3.0])
