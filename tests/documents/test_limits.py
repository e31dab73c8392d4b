"""docs/reference/limits.md has the limits that the code has."""

from __future__ import annotations

import re

import pytest
from reference_pages import rows

from bml.cluster.launcher import restarts
from bml.cluster.spec import ending
from bml.fabric import layout
from bml.protocol.coordinator import succession
from bml.protocol.server import learner
from bml.protocol.timeouts import Timeouts
from bml.schedule.select import candidates, cases
from bml.sharedmem import status_page
from bml.topology import UsageError, limits

SIZES = {row[0]: row[1] for row in rows("limits.md", "Sizes")}
LIMITS = {
    "servers of a fabric": limits.MAX_SERVERS,
    "servers with packed trees after damage": cases.MOST_SERVERS,
    "servers with a choice of several trees": candidates._MOST_COMPARED,
    "servers of an emulated fabric": layout.MAX_SERVERS,
    "steps whose results a joiner keeps": learner._KEPT_STEPS,
    "states that a joiner is given": learner._MOST_STATES,
    "shared results (shared=True) kept at once": status_page.N_HELD,
    "coordinators in a row that failed": succession._MOST_FAILURES,
    "starts of a lost server without being let in (rejoin)": restarts.MOST_STARTS,
    "Ki characters of an error or traceback that are kept": ending.MOST_TEXT >> 10,
}
#: Not a number of the code: what was tried; and a range, below.
OTHERS = {"servers of a job that was tried", "detect_s"}


@pytest.mark.parametrize("what", LIMITS)
def test_a_limit_is_that_of_the_code(what: str) -> None:
    number = re.match(r"[\d,]+", SIZES[what])
    assert number is not None
    assert int(number[0].replace(",", "")) == LIMITS[what]


def test_every_limit_is_compared() -> None:
    assert SIZES.keys() == LIMITS.keys() | OTHERS


def test_the_range_of_detect_s() -> None:
    low, high = map(float, re.findall(r"[\d.]+", SIZES["detect_s"]))
    assert Timeouts.of(low).detect_s == low
    assert Timeouts.of(high).detect_s == high
    for outside in (low * 0.99, high * 1.01):
        with pytest.raises(UsageError):
            Timeouts.of(outside)
