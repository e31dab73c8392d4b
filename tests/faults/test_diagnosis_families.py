"""Diagnosis where cables are direct or all servers share one switch."""

import pytest

from bml.faults import Evidence, Suspicion, diagnose, settle
from bml.topology import InvariantError, parse


def silent(fabric, dead):
    """Suspicions of all neighbours of a server that fell silent."""
    return tuple(
        Suspicion(peer, dead, level, "silence", 1.0, "heard nothing")
        for level in range(fabric.levels)
        for peer in fabric.neighbours(dead, level)
    )


@pytest.mark.parametrize("name", ["torus:3x2", "torus:4x2", "torus:2x2", "switch:5", "fattree:4"])
def test_a_silent_server_is_named(name):
    fabric = parse(name)
    found = diagnose(fabric, Evidence(suspicions=silent(fabric, 3)))
    # With one NIC, the NIC and the server are the same fault; of both, the one that is left out goes.
    assert [str(failure) for failure in found.failures] == ["server:3"]
    assert settle(fabric, found.failures).members == tuple(s for s in fabric.servers if s != 3)


def test_a_cable_of_a_torus_is_a_link():
    fabric = parse("torus:4x2")
    both = tuple(
        Suspicion(observer, peer, 0, "silence", 1.0, "heard nothing") for observer, peer in ((0, 1), (1, 0))
    )
    (failure,) = diagnose(fabric, Evidence(suspicions=both)).failures
    assert str(failure) in ("link:0/0", "link:1/0", "switch:0/0")
    assert fabric.without(failure).is_connected


def test_servers_without_a_nic_of_a_level_are_no_neighbours_there():
    fabric = parse("torus:3x2")
    assert fabric.group(1, 2) == fabric.group(4, 2) == -1
    with pytest.raises(InvariantError, match="not neighbours"):
        diagnose(fabric, Evidence(suspicions=(Suspicion(1, 4, 2, "silence", 1.0, "x"),)))
