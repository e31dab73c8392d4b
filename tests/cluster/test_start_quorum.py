"""When a job begins, and with which servers; when servers that did not come are started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from bml.cluster.fleets.start_quorum import OTHERS_S, StartQuorum
from bml.cluster.launcher.launch import sizes
from bml.cluster.launcher.start_backoff import AGAIN_S, MOST_AGAIN_S, StartBackoff
from bml.cluster.spec.job import JobSpec
from bml.errors import FabricError, StartError, UsageError

GROWS = JobSpec("bcube:3x2", min_start=6, start_s=60.0)
WHOLE = JobSpec("bcube:2x2", start_s=60.0)


def of(spec: JobSpec, now: float) -> StartQuorum:
    return StartQuorum(spec.parsed_fabric(), spec.servers, spec.min_start, spec.start_s, now)


def comes(quorum: StartQuorum, servers: range, at: float) -> None:
    for server in servers:
        quorum.came(server, at)


def test_a_job_without_a_least_begins_when_all_are_there() -> None:
    quorum = of(WHOLE, 100.0)
    comes(quorum, range(3), 101.0)
    assert not quorum.begins(159.0)
    assert quorum.patience_s(101.0) == 59.0
    quorum.came(3, 159.5)
    assert quorum.begins(159.5)


def test_a_job_without_a_least_names_the_server_that_did_not_come() -> None:
    quorum = of(WHOLE, 0.0)
    comes(quorum, range(1, 4), 1.0)
    with pytest.raises(StartError, match="server 0 did not start in time"):
        quorum.begins(60.1)
    obstacle = StartError("server 0 cannot start: no address")
    with pytest.raises(StartError) as raised:
        quorum.failed(0, obstacle)
    assert raised.value is obstacle


def test_the_least_begin_after_a_second_for_the_others() -> None:
    quorum = of(GROWS, 0.0)
    comes(quorum, range(5), 1.0)
    assert not quorum.begins(50.0)
    assert quorum.patience_s(50.0) == 10.0
    quorum.came(5, 50.0)
    assert not quorum.begins(50.0)
    assert quorum.patience_s(50.0) == OTHERS_S
    quorum.came(7, 50.5)
    assert quorum.patience_s(50.5) == OTHERS_S - 0.5, "one more does not put off the beginning"
    assert quorum.begins(50.0 + OTHERS_S)
    assert quorum.here == {0, 1, 2, 3, 4, 5, 7}
    assert GROWS.beginning_with(quorum.here).absent == (6, 8)


def test_nobody_waits_for_servers_that_cannot_come() -> None:
    quorum = of(GROWS, 0.0)
    comes(quorum, range(6), 1.0)
    for server in (6, 7, 8):
        assert not quorum.begins(1.0)
        quorum.failed(server, StartError("no address"))
    assert quorum.begins(1.0)


def test_too_few_are_told_why() -> None:
    quorum = of(GROWS, 0.0)
    comes(quorum, range(3), 1.0)
    for server in (3, 4, 5):
        quorum.failed(server, StartError(f"server {server} cannot start: no address"))
    with pytest.raises(StartError, match=r"begins with 6 servers or more: of 9, 3 came .* server 8 cannot"):
        quorum.failed(8, StartError("server 8 cannot start: no address"))
    late = of(GROWS, 0.0)
    comes(late, range(5), 1.0)
    with pytest.raises(StartError, match=r"of 9, 5 came within 60 s$"):
        late.begins(60.1)


def test_servers_that_cannot_reach_each_other_are_not_enough() -> None:
    quorum = of(JobSpec("bcube:3x2", min_start=2, start_s=5.0), 0.0)
    quorum.came(0, 1.0)
    quorum.came(4, 1.0)  # another row, another column
    assert not quorum.begins(4.0)
    quorum.came(1, 4.5)
    assert quorum.begins(4.5 + OTHERS_S)
    apart = of(JobSpec("bcube:3x2", min_start=2, start_s=5.0), 0.0)
    apart.came(0, 1.0)
    apart.came(4, 1.0)
    with pytest.raises(StartError, match="2 came within 5 s, and these cannot reach each other"):
        apart.begins(5.1)


def test_the_most_leaves_out_the_last_servers() -> None:
    assert sizes("bcube:3x2", None, (4,)) == {"absent": (4,)}
    assert sizes("bcube:3x2", (6, 9), ()) == {"absent": (), "min_start": 6}
    assert sizes("bcube:3x2", (4, 6), (0,)) == {"absent": (0, 7, 8), "min_start": 4}


@pytest.mark.parametrize("servers", [(0, 9), (7, 6), (6, 10)])
def test_sizes_that_the_fabric_does_not_have(servers: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="there are 9"):
        sizes("bcube:3x2", servers, ())


@pytest.mark.parametrize("servers", [6, (6,), "6..9", (6.0, 9)])
def test_what_is_no_range_of_sizes(servers: object) -> None:
    with pytest.raises(UsageError, match=r"give the least and the most, like \(6, 9\)"):
        sizes("bcube:3x2", servers, ())  # type: ignore[arg-type]


def test_a_server_that_does_not_come_is_started_again_later_and_later() -> None:
    backoff = StartBackoff()
    backoff.begin([7, 8], 0.0)
    assert backoff.due(0.0) == [7, 8]
    assert backoff.due(100.0) == [], "each is being started"
    now, pauses = 0.0, []
    for _ in range(8):
        assert backoff.failed(8, now)
        pause = next(after for after in range(1, 100) if backoff.due(now + after) == [8])
        pauses.append(pause)
        now += pause
    assert pauses == [AGAIN_S, 4, 8, 16, 32, MOST_AGAIN_S, MOST_AGAIN_S, MOST_AGAIN_S]
    assert backoff.awaited == [7, 8]


def test_a_server_that_came_is_awaited_no_more() -> None:
    backoff = StartBackoff()
    backoff.begin([6, 7, 8], 0.0)
    backoff.due(0.0)
    backoff.came_in([0, 1, 7])
    backoff.give_up(6)
    assert backoff.awaited == [8]
    assert not backoff.failed(7, 1.0)
    assert not backoff.failed(6, 1.0)
    assert backoff.due(100.0) == []


@pytest.mark.parametrize("fabric", ["torus:4x2", "graph:0-1;0-2;0-3"])
def test_a_job_whose_algorithm_cannot_work_does_not_begin(fabric: str) -> None:
    with pytest.raises(FabricError, match="exchange cannot work on"):
        JobSpec(fabric, "exchange")


def test_the_name_of_a_graph_needs_no_file(tmp_path: Path) -> None:
    (tmp_path / "net").write_text("0 1\n1 2\n2 0 1/2\n")
    assert JobSpec(f"graph:{tmp_path / 'net'}").fabric == "graph:0-1;1-2;0*1/2-2*1/2"
