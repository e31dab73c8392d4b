"""A server that was cut off is started again: what was known of its NICs is of an earlier incarnation."""

from __future__ import annotations

import jobs
import pytest
from test_joining_processes import check, train

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]


def test_a_server_whose_only_way_was_a_dead_neighbour_joins_again() -> None:
    """Its other NIC was silent, and nobody has heard since that it works."""
    faults = ["blackhole:0/0@step=20", "kill:2@step=40", "join:0@step=60"]
    result = jobs.launch(lambda session: train(session, 3), "bcube:2x2", faults=faults, min_servers=1)
    check(result, (0,))
    _, silent, cut_off, came, _ = result.report["views"]
    assert silent["failures"] == ["link:0/0"]
    assert cut_off["members"] == [1, 3]
    assert came["members"] == [0, 1, 3]
    assert came["failures"] == ["server:2"]
