"""Named histories: failures and their right outcome, on the clock of the simulation."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from planted_bugs import give_up_a_server_that_is_held

from bml.errors import Evicted, TooFewServers
from bml.schedule.select.model import DEFAULTS
from bml.sim import FOREVER, Mishap, Simulation, When
from bml.sim.check import Scenario, run
from bml.sim.judge.promises import PromiseBroken
from bml.sim.world.settings import Settings
from bml.topology import parse


def at(point: str, nth: int = 1, after_s: float = 0.0) -> When:
    return When(point, nth, after_s)


def simulate(fabric: str, *mishaps: Mishap, steps: int = 5, min_servers: int | None = None) -> Simulation:
    simulation = Simulation(
        parse(fabric), seed=1, settings=Settings(steps=steps, min_servers=min_servers), mishaps=mishaps
    )
    simulation.run()
    return simulation


def done(simulation: Simulation) -> list[int]:
    return [server for server, machine in simulation.machines.items() if machine.done]


@pytest.mark.parametrize(
    "fabric", ["bcube:2x1", "bcube:2x2", "bcube:3x1", "bcube:3x2", "bcube:2x3", "bcube:4x2"]
)
def test_without_trouble_all_steps_are_committed_by_all(fabric: str) -> None:
    simulation = simulate(fabric)
    servers = parse(fabric).servers
    assert done(simulation) == list(servers)
    assert simulation.history.commits == {step: dict.fromkeys(servers, servers) for step in range(1, 6)}
    assert all(len(machine.core.views) == 1 for machine in simulation.machines.values())


def test_servers_0_4_and_8_and_the_coordinator_in_one_run() -> None:
    simulation = simulate(
        "bcube:3x2",
        Mishap("crash", (0,), at("commit", 5)),
        Mishap("coordinator-crash", (), at("commit", 16)),
        Mishap("crash", (4,), at("commit", 24)),
        Mishap("crash", (8,), at("commit", 38)),
        steps=9,
    )
    assert done(simulation) == [1, 2, 3, 5, 6, 7]
    assert len(simulation.coordinators.started) == 2
    assert set(simulation.history.commits[9].values()) == {(1, 2, 3, 5, 6, 7)}


def test_a_crash_costs_far_less_than_the_time_to_notice_silence() -> None:
    simulation = simulate("bcube:3x2", Mishap("crash", (4,), at("submit", 20)))
    commits = simulation.history.commit_at_s
    gaps = [min(commits[step + 1]) - max(commits[step]) for step in range(1, 5)]
    assert max(gaps) < 0.1


def test_too_few_servers_stop_the_job_with_the_state_intact() -> None:
    simulation = simulate("bcube:2x2", *(Mishap("crash", (server,), at("commit", 6)) for server in (1, 2)))
    assert simulation.finished is not None
    assert simulation.finished.abort is not None
    assert simulation.finished.abort.kind == "too-few"
    assert {type(error) for error in simulation.history.errors.values()} == {TooFewServers}
    assert sorted(simulation.history.errors) == [0, 3]
    ledgers = {machine.ledger.digest() for machine in simulation.machines.values() if machine.process.alive}
    assert len(ledgers) <= 2, "a survivor may be one step behind when the job stops, no more"


def test_min_servers_allows_more() -> None:
    simulation = simulate(
        "bcube:2x2", *(Mishap("crash", (server,), at("commit", 6)) for server in (1, 3)), min_servers=2
    )
    assert done(simulation) == [0, 2]


@pytest.mark.parametrize("half", [(0, 1), (2, 3), (0, 2), (1, 3)])
def test_of_two_halves_the_one_that_lives_goes_on(half: tuple[int, ...]) -> None:
    """Broken cables between two halves explain best the evidence of a frozen half."""
    mishaps = [Mishap("freeze", (server,), at("commit", 26), 9.0) for server in half]
    simulation = simulate("bcube:2x2", *mishaps, steps=10, min_servers=2)
    assert done(simulation) == [server for server in range(4) if server not in half]
    assert _longest_step_s(simulation) < 0.8


def test_no_server_is_evicted_for_servers_that_do_not_answer() -> None:
    """Two thirds freeze. They would be the larger part, if they lived."""
    mishaps = [Mishap("freeze", (server,), at("commit", 50), 9.0) for server in range(6)]
    simulation = simulate("bcube:3x2", *mishaps, steps=10, min_servers=3)
    assert done(simulation) == [6, 7, 8]
    assert set(simulation.history.commits[10]) == {6, 7, 8}
    assert _longest_step_s(simulation) < 1.6


def _longest_step_s(simulation: Simulation) -> float:
    """Between the first commits of two steps."""
    firsts = [min(times) for _, times in sorted(simulation.history.commit_at_s.items())]
    return max(after - before for before, after in pairwise(firsts))


@pytest.mark.few(10)
@pytest.mark.parametrize("server", range(4))
@pytest.mark.parametrize(
    "when",
    [
        at("submit", 1),
        at("submit", 6),
        at("complete", 3),
        at("commit", 1),
        at("commit", 2),
        at("commit", 20),
        at("Ended", 2),
        at("Shutdown", 2),
    ],
    ids=str,
)
def test_any_server_may_die_in_any_phase_of_a_step(server: int, when: When) -> None:
    simulation = simulate("bcube:2x2", Mishap("crash", (server,), when))
    assert set(done(simulation)) >= {0, 1, 2, 3} - {server}


RECOVERY = [
    (point, nth)
    for point, first in (
        ("Freeze", 5),
        ("Status", 9),
        ("Propose", 5),
        ("Accepted", 5),
        ("Install", 5),
        ("installed", 5),
    )
    for nth in range(first, first + 3)
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("point", "nth"), RECOVERY)
@pytest.mark.parametrize("kind", ["coordinator-crash", "coordinator-freeze"])
def test_the_coordinator_may_fail_at_any_point_of_a_recovery(point: str, nth: int, kind: str) -> None:
    simulation = simulate(
        "bcube:2x2", Mishap("crash", (3,), at("commit", 6)), Mishap(kind, (), at(point, nth), 4.0)
    )
    assert done(simulation) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("point", "nth"), [(point, nth + 5 if point != "Status" else nth + 9) for point, nth in RECOVERY]
)
def test_a_second_server_may_die_at_any_point_of_a_recovery(point: str, nth: int) -> None:
    simulation = simulate(
        "bcube:3x2",
        Mishap("crash", (4,), at("commit", 10)),
        Mishap("crash", (5,), at(point, nth)),
    )
    assert set(done(simulation)) == set(range(9)) - {4, 5}


@pytest.mark.parametrize(
    "when", [at("takeover"), at("Status", 2), at("Freeze", 2), at("Accepted", 2), at("Install", 2)], ids=str
)
def test_a_coordinator_that_dies_at_start_up_is_replaced(when: When) -> None:
    assert done(simulate("bcube:2x2", Mishap("coordinator-crash", (), when))) == [0, 1, 2, 3]


def test_a_server_that_dies_before_the_first_view_is_named() -> None:
    simulation = simulate("bcube:2x2", Mishap("crash", (2,), at("Status", 1)))
    assert simulation.finished is not None
    assert simulation.finished.abort is not None
    assert simulation.finished.abort.text.startswith("cannot start: server 2")


def test_a_silent_nic_changes_the_way_but_not_the_members() -> None:
    simulation = simulate("bcube:3x2", Mishap("silent", (2, 0), at("commit", 10), FOREVER))
    assert done(simulation) == list(range(9))
    last = simulation.machines[0].core.views[-1].view
    assert (last.members, last.failures) == (tuple(range(9)), ("link:2/0",))
    assert last.reason == "NIC 2/0 is silent towards 0 and 1"


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.07])
@pytest.mark.parametrize(
    "mishap", [("silent", (2, 0), FOREVER), ("switch", (1, 2), FOREVER), ("freeze", (4,), 3.0)]
)
def test_silence_is_noticed_within_a_quarter_more_than_detect_s(
    mishap: tuple[str, tuple[int, ...], float], after_s: float
) -> None:
    """It begins anywhere between two heartbeats, and the gap between two commits has the view in it."""
    kind, target, for_s = mishap
    simulation = simulate("bcube:3x2", Mishap(kind, target, at("commit", 22, after_s), for_s), steps=16)
    noticed_s = 1.25 * Settings().detect_s
    assert simulation.machines[0].core.views[1].view.noticed_s <= noticed_s + 1e-6
    first = [min(times) for _, times in sorted(simulation.history.commit_at_s.items())]
    assert (
        Settings().detect_s / 2 < max(after - before for before, after in pairwise(first)) < noticed_s + 0.1
    )


def test_a_dead_switch_is_named() -> None:
    simulation = simulate("bcube:3x2", Mishap("switch", (1, 2), at("commit", 10), FOREVER))
    assert done(simulation) == list(range(9))
    assert simulation.machines[0].core.views[-1].view.failures == ("switch:1/2",)


def test_a_frozen_server_is_evicted_and_learns_it_when_it_thaws() -> None:
    simulation = simulate("bcube:3x2", Mishap("freeze", (4,), at("commit", 10), 3.0))
    assert done(simulation) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert isinstance(simulation.history.errors[4], Evicted)


def test_a_short_frost_goes_unnoticed() -> None:
    simulation = simulate("bcube:3x2", Mishap("freeze", (4,), at("commit", 10), 0.2))
    assert done(simulation) == list(range(9))
    assert all(len(machine.core.views) == 1 for machine in simulation.machines.values())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("held_s", [0.1, 2.0, 20.0])
def test_a_server_that_holds_the_lock_is_awaited_though_another_one_dies(held_s: float) -> None:
    """Its stand-in speaks for it, also to a coordinator that needs its answer, and to a new one."""
    mishaps = [
        Mishap("gil", (4,), at("commit", 60), held_s),
        Mishap("crash", (2,), at("commit", 60, 0.01)),
        Mishap("coordinator-crash", (), at("commit", 60, 0.5 * held_s)),
    ]
    simulation = simulate("bcube:3x2", *mishaps, steps=12)
    assert done(simulation) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert all("server:4" not in record.view.failures for record in simulation.machines[0].core.views)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("held_s", [2.0, 20.0])
def test_servers_that_all_hold_the_lock_are_awaited_though_one_dies_meanwhile(held_s: float) -> None:
    """Nobody's loop turns, so no server can say of another one that its stand-in speaks."""
    held = [Mishap("gil", (server,), at("commit", 60), held_s) for server in range(9) if server != 2]
    simulation = simulate("bcube:3x2", *held, Mishap("crash", (2,), at("commit", 60, 0.01)), steps=12)
    assert done(simulation) == [0, 1, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("connection", [(4, 1, 3), (3, 4, 0), (7, 4, 4)])
def test_a_server_that_holds_the_lock_may_be_suspected_meanwhile(connection: tuple[int, int, int]) -> None:
    """A connection of it stands still, and its neighbours say, too, that it lives."""
    mishaps = [
        Mishap("gil", (4,), at("commit", 45), 12.0),
        Mishap("stall", connection, at("commit", 45), 30.0),
        Mishap("crash", (0,), at("commit", 45, 0.5)),
    ]
    assert done(simulate("torus:3x2", *mishaps, steps=40)) == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.MonkeyPatch.context() as patch:
        give_up_a_server_that_is_held(patch)
        with pytest.raises(PromiseBroken, match="were lost though nothing"):
            simulate("torus:3x2", *mishaps, steps=40)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("spread_s", [0.1, 0.2, 0.4])
@pytest.mark.parametrize(("fabric", "dies"), [("bcube:3x2", 2), ("torus:6x1", 3)])
def test_servers_may_take_the_lock_one_after_the_other(fabric: str, dies: int, spread_s: float) -> None:
    """A server that has answered, and could tell of its neighbours, takes it then itself."""
    servers = [server for server in parse(fabric).servers if server != dies]
    for seed in range(3):
        chance = random.Random(seed)
        late = [chance.uniform(0, spread_s) for _ in servers]
        held = [
            Mishap("gil", (s,), at("commit", 50, after), 10.0) for s, after in zip(servers, late, strict=True)
        ]
        death = Mishap("crash", (dies,), at("commit", 50, 0.01 + spread_s / 2))
        assert done(simulate(fabric, *held, death, steps=60)) == servers


def test_a_new_coordinator_awaits_servers_that_all_hold_the_lock() -> None:
    """The one before died when they took it."""
    held = [Mishap("gil", (server,), at("commit", 24), 16.5) for server in (0, 1)]
    crashes = [
        Mishap("coordinator-crash", (), at("commit", 24)),
        Mishap("crash", (2,), at("commit", 24, 2.0)),
    ]
    assert done(simulate("bcube:2x2", *held, *crashes, steps=12)) == [0, 1, 3]


@pytest.mark.parametrize("when", [at("Freeze", 6), at("Accepted", 4)])
def test_a_machine_that_dies_while_a_server_of_it_joins_is_missed_as_fast_as_ever(when: When) -> None:
    """No member listens to the joiner yet, so nobody misses it."""
    frozen = [Mishap("freeze", (server,), when, 20.0) for server in (1, 3)]
    simulation = Simulation(
        parse("bcube:2x2"),
        seed=2,
        settings=Settings(steps=40, n_elements=17, absent=(3,)),
        mishaps=(Mishap("join", (3,), at("commit", 20)), *frozen),
    )
    simulation.run()
    assert done(simulation) == [0, 2]
    assert _longest_step_s(simulation) < 2


def test_a_server_that_holds_the_lock_for_too_long_is_evicted() -> None:
    """After hold_s, which is 30 s, and a silence."""
    simulation = simulate("bcube:3x2", Mishap("gil", (4,), at("commit", 60), 33.0), steps=12)
    assert done(simulation) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert isinstance(simulation.history.errors[4], Evicted)


def test_the_smaller_part_of_a_partition_is_evicted() -> None:
    simulation = simulate("bcube:3x2", Mishap("partition", (0, 1, 2), at("commit", 10), FOREVER))
    assert done(simulation) == [3, 4, 5, 6, 7, 8]


def test_a_server_that_can_leave_only_late_is_not_lost_needlessly() -> None:
    """A step that stands still keeps its user from hearing of it: only its message excuses its loss."""
    mute = Mishap("mute", (7, 1), at("submit", 1))
    simulation = simulate("bcube:2x3", mute, Mishap("leave", (5,), at("submit", 8), 0.05), steps=2)
    assert done(simulation) == [0, 1, 2, 3, 4, 6, 7]
    assert min(simulation.history.commit_at_s[2]) > 10.0


def test_a_thawed_coordinator_finds_its_successor_at_work() -> None:
    simulation = simulate(
        "bcube:2x2",
        Mishap("coordinator-freeze", (), at("commit", 6), 0.6),
        Mishap("freeze", (0,), at("fault", 1), 0.2),
        Mishap("crash", (3,), When("", 0, 0.5)),
        steps=3,
    )
    assert len(simulation.coordinators.started) == 2
    assert set(done(simulation)) >= {0, 1, 2}


def test_a_coordinator_that_is_stopped_for_good_is_killed_and_replaced() -> None:
    simulation = simulate(
        "bcube:2x2",
        Mishap("coordinator-freeze", (), at("commit", 6)),
        Mishap("crash", (3,), at("fault", 1)),
        steps=3,
    )
    assert simulation.history.counts["kill"] == 1
    assert set(done(simulation)) == {0, 1, 2}
    assert simulation.network.now < 3.0


def test_two_live_coordinators_do_not_depose_each_other_for_ever() -> None:
    """The launcher hears nothing of a healthy one, and cannot kill it: its successor deposes it, once."""
    simulation = Simulation(
        parse("bcube:2x2"),
        seed=1,
        settings=Settings(steps=3, reaches=False),
        mishaps=[
            Mishap("launcher-deaf", (), at("commit", 6), 0.8),
            Mishap("freeze", (1,), at("fault", 1), 2.2),
        ],
    )
    simulation.run()
    assert len(simulation.coordinators.started) == 2
    assert simulation.history.counts["deposed"] == 1
    assert set(done(simulation)) >= {0, 2, 3}


def test_without_a_launcher_and_a_coordinator_servers_end_with_an_error() -> None:
    simulation = simulate(
        "bcube:4x1",
        Mishap("launcher-freeze", (), When("", 0, 0.01)),
        Mishap("coordinator-crash", (), at("commit", 2)),
        Mishap("crash", (3,), at("commit", 3)),
        steps=3,
    )
    assert done(simulation) == []
    errors = simulation.history.errors
    assert sorted(errors) == [0, 1, 2]
    assert all("is there a coordinator?" in str(error) for error in errors.values())


def test_coordinators_that_cannot_start_end_the_job_with_the_cause() -> None:
    simulation = simulate(
        "bcube:2x2",
        Mishap("coordinator-fails", (12,), When("", 0, 0.0)),
        Mishap("coordinator-crash", (), at("commit", 2)),
        steps=3,
    )
    assert "10 coordinators in a row failed; the last crashed on its start" in simulation.gave_up
    assert simulation.network.now < 12.0


@pytest.mark.parametrize("steps", [1, 2])
def test_the_last_end_may_get_lost_with_its_connection(steps: int) -> None:
    simulation = simulate("bcube:2x2", Mishap("control-loss", (2,), at("Ended", 1)), steps=steps)
    assert done(simulation) == [0, 1, 2, 3]


# --- seeds that once broke a promise -----------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fabric", "mishaps"),
    [
        # Servers installed different views first and split the first batch differently: wrong sums.
        (
            "bcube:2x2",
            (
                Mishap("crash", (0,), When("", 0, 0.113364)),
                Mishap("coordinator-crash", (), at("installed", 2, 0.0004)),
            ),
        ),
        # Installs lost with the coordinator: servers without the view were called silent and evicted.
        (
            "bcube:2x3",
            (
                Mishap("freeze", (5,), When("", 0, 0.0154), 0.5),
                Mishap("coordinator-crash", (), at("installed", 6)),
            ),
        ),
        (
            "bcube:3x1",
            (
                Mishap("coordinator-crash", (), at("Accepted", 2, 0.003078)),
                Mishap("control-hold", (1,), at("Freeze", 4, 0.0026), 2.1),
            ),
        ),
        # A coordinator that failed between two Shutdowns: its successor found too few servers left.
        ("bcube:2x2", (Mishap("coordinator-freeze", (), at("Shutdown", 2), 3.5),)),
        # Thawed, it gave up, and went on taking the servers' connections from its successor, for ever.
        (
            "bcube:2x3",
            (
                Mishap("coordinator-freeze", (), at("Freeze", 2), 0.854),
                Mishap("isolate", (3,), at("Freeze", 7), 0.859),
            ),
        ),
    ],
)
def test_once_broken(fabric: str, mishaps: tuple[Mishap, ...]) -> None:
    for seed in range(6):
        for steps in (1, 3):
            outcome = run(
                Scenario(
                    seed=seed, fabric=fabric, steps=steps, n_elements=17, slice_nbytes=64, mishaps=mishaps
                )
            )
            assert outcome.broken is None


@pytest.mark.slow
def test_a_step_goes_on_where_it_was_when_a_cable_fails() -> None:
    """No user is asked again, and elements that were final on all are not sent again."""
    cut = Mishap("silent", (4, 0), at("complete", 1))
    simulation = Simulation(
        parse("bcube:3x2"), seed=1, settings=Settings(steps=3, n_elements=400), mishaps=[cut]
    )
    simulation.run()
    assert done(simulation) == list(range(9))
    assert simulation.history.counts["resume"] == 9
    assert simulation.history.counts["retry"] == 0
    view = simulation.machines[0].core.views[1].view
    kept = sum(stop - start for start, stop in view.final)
    assert 0 < kept < 400
    assert (view.commit, view.failures) == (0, ("link:4/0",))


def test_members_that_missed_an_install_are_reminded_however_many_reconnect() -> None:
    """Found by seed 5955: the second server to come back undid the view that was due for the first."""
    mishaps = (
        Mishap("freeze", (1,), at("", 0, 0.110297), 0.274897),
        Mishap("coordinator-freeze", (), at("", 0, 0.009249), 0.410245),
    )
    assert (
        run(
            Scenario(
                seed=5955,
                fabric="bcube:3x2",
                steps=3,
                n_elements=0,
                slice_nbytes=8,
                mishaps=mishaps,
                constants=DEFAULTS,
            )
        ).broken
        is None
    )


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("server", range(4))
@pytest.mark.parametrize("when", [at("installed"), at("installed", 2, 0.001), at("submit")], ids=str)
def test_a_server_that_falls_silent_while_connections_are_made_is_blamed(server: int, when: When) -> None:
    """Found by seed 5315: one connection timed out while all were patient, and either end was taken."""
    for seed in range(10):
        scenario = Scenario(
            seed=seed,
            fabric="bcube:4x1",
            steps=1,
            n_elements=0,
            slice_nbytes=8,
            mishaps=(Mishap("silent", (server, 0), when),),
        )
        assert run(scenario).broken is None


def test_a_new_coordinator_decides_when_it_knows_all_suspicions() -> None:
    """Found by seed 54510: messages under way were left out."""
    mishaps = (
        Mishap("silent", (2, 0), at("complete", 4), 3.0),
        Mishap("coordinator-crash", (), at("Freeze", 5)),
        Mishap("isolate", (2,), at("fault", 2, 0.388817), 0.055111),
    )
    assert (
        run(
            Scenario(seed=54510, fabric="bcube:3x1", steps=2, n_elements=0, slice_nbytes=64, mishaps=mishaps)
        ).broken
        is None
    )


def test_heartbeats_do_not_excuse_a_connection_that_stays_broken() -> None:
    """Found by seed 43798: the silence ended, but the connection had been given up meanwhile."""
    mishaps = (
        Mishap("freeze", (1,), at("Suspect", 1, 0.002036), 2.289375),
        Mishap("coordinator-crash", (), at("Suspect", 2, 0.003030)),
        Mishap("partition", (0,), at("Status", 4), 0.723689),
    )
    assert (
        run(
            Scenario(
                seed=43798, fabric="bcube:3x1", steps=3, n_elements=0, slice_nbytes=1024, mishaps=mishaps
            )
        ).broken
        is None
    )
