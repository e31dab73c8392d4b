import pytest

from bml.faults.kinds import KINDS
from bml.faults.notation import AtOnce, AtPhase, AtStep, AtTime, Fault
from bml.faults.plan import FaultPlan, Moment, due
from bml.topology import LinkFailure, ServerFailure, SwitchFailure, UsageError, bcube

FABRIC = bcube(3, 2)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:4@step=20", Fault("kill", ServerFailure(4), AtStep(20))),
        ("node:4@step=20", Fault("node", ServerFailure(4), AtStep(20))),
        ("freeze:2@step=5,for=3s", Fault("freeze", ServerFailure(2), AtStep(5), {"for": 3.0})),
        ("freeze:2@t=0.25s", Fault("freeze", ServerFailure(2), AtTime(0.25))),
        ("cut:4/0@t=1.5s", Fault("cut", LinkFailure(4, 0), AtTime(1.5))),
        ("blackhole:4/0@step=9", Fault("blackhole", LinkFailure(4, 0), AtStep(9))),
        ("switch:0/2@step=9", Fault("switch", SwitchFailure(0, 2), AtStep(9))),
        ("coordinator@step=12", Fault("coordinator", None, AtStep(12))),
        ("freeze:coordinator@step=10,for=60s", Fault("freeze", None, AtStep(10), {"for": 60.0})),
        ("freeze:coordinator@t=2s", Fault("freeze", None, AtTime(2.0))),
        ("kill:4@step=9,phase=broadcast", Fault("kill", ServerFailure(4), AtStep(9, "broadcast"))),
        ("kill:4@step=9,phase=recovery", Fault("kill", ServerFailure(4), AtStep(9, "recovery"))),
        ("cut:4/0@phase=start", Fault("cut", LinkFailure(4, 0), AtPhase("start"))),
        ("exception:4@step=9", Fault("exception", ServerFailure(4), AtStep(9))),
        ("exit:4@phase=shutdown", Fault("exit", ServerFailure(4), AtPhase("shutdown"))),
        ("gil:4@step=9,for=2s", Fault("gil", ServerFailure(4), AtStep(9), {"for": 2.0})),
        (
            "flap:4/0@step=9,every=0.4s,for=4s",
            Fault("flap", LinkFailure(4, 0), AtStep(9), {"for": 4.0, "every": 0.4}),
        ),
        ("slow:4/1@step=8,rate=10mbit", Fault("slow", LinkFailure(4, 1), AtStep(8), {"rate": 10_000_000})),
        (
            "slow:4/1@step=8,rate=10mbit,direction=in",
            Fault("slow", LinkFailure(4, 1), AtStep(8), {"rate": 10_000_000, "direction": "in"}),
        ),
        (
            "loss:4/1@step=8,share=2.5%,for=1s",
            Fault("loss", LinkFailure(4, 1), AtStep(8), {"for": 1.0, "share": 0.025}),
        ),
    ],
)
def test_notation_round_trip(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault
    assert str(fault) == text


def test_times_in_milliseconds_and_order_of_settings() -> None:
    assert Fault.parse("cut:4/0@t=200ms").trigger == AtTime(0.2)
    assert Fault.parse("freeze:2@for=3s,step=5") == Fault.parse("freeze:2@step=5,for=3s")
    tiny = Fault("cut", LinkFailure(0, 0), AtTime(1e-05))
    assert Fault.parse(str(tiny)) == tiny


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:4", Fault("kill", ServerFailure(4), AtOnce())),
        ("coordinator", Fault("coordinator", None, AtOnce())),
        ("freeze:coordinator,for=3s", Fault("freeze", None, AtOnce(), {"for": 3.0})),
        ("switch:0/2", Fault("switch", SwitchFailure(0, 2), AtOnce())),
        ("freeze:2,for=3s", Fault("freeze", ServerFailure(2), AtOnce(), {"for": 3.0})),
        ("blackhole:4/0@t=2s", Fault("blackhole", LinkFailure(4, 0), AtTime(2.0))),
    ],
)
def test_faults_for_a_running_job(text: str, fault: Fault) -> None:
    assert Fault.parse(text, at_once=True) == fault
    assert str(fault) == text
    assert Fault.parse("freeze:2@for=3s", at_once=True) == Fault.parse("freeze:2,for=3s", at_once=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_is_right(kind: str) -> None:
    assert str(Fault.parse(KINDS[kind].example)) == KINDS[kind].example


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not have the form"),
        ("kill:4", "does not have the form"),
        ("explode:4@step=1", "there is no kind 'explode', only kill, freeze, cut"),
        ("kill@step=20", "does not say which server; write it like kill:4@step=20"),
        ("kill:4/0@step=20", "'4/0' is no server"),
        ("kill:x@step=20", "'x' is no server"),
        ("kill:-1@step=20", "'-1' is no server"),
        ("cut:4@step=20", "'4' is no server/level, with numbers counted from 0; write it like cut:4/0@"),
        ("switch:0@step=9", "'0' is no level/group"),
        ("coordinator:3@step=12", "the coordinator takes no target"),
        (
            "kill:coordinator@step=1",
            "to the coordinator happens one of coordinator, freeze:coordinator; write",
        ),
        (
            "cut:coordinator@step=1",
            "to the coordinator happens one of coordinator, freeze:coordinator; write",
        ),
        ("coordinator:coordinator@step=1", "the coordinator takes no target"),
        ("freeze@step=1", "does not say which server"),
        ("freeze:coordinators@step=1", "'coordinators' is no server"),
        ("freeze:coordinator@step=1,for=3", "'3' is no time"),
        ("freeze:coordinator@step=1,every=1s", "'every' is no setting of freeze"),
        ("kill:4@step", "'step' is no setting"),
        ("kill:4@step=", "'step=' is no setting"),
        ("kill:4@step=2.5", "'2.5' is no step"),
        ("kill:4@step=-2", "'-2' is no step"),
        ("kill:4@step=2,step=3", "'step' is given twice"),
        ("stall:4/0,peer=3@step=9,peer=5", "'peer' is given twice"),
        ("kill:4@step=2,t=3s", "exactly one of step=NUMBER and t=TIME"),
        ("freeze:4@for=3s", "exactly one of step=NUMBER and t=TIME"),
        ("kill:4@t=3", "'3' is no time; a time has a unit"),
        ("kill:4@when=3s", "'when' is no setting of kill"),
        ("kill:4@step=2,for=3s", "kill takes no for=TIME, it is for the rest of the job"),
        ("freeze:2,for=3s", "does not have the form kind:target@when"),
        ("gil:4@step=2", "gil needs for="),
        ("stall:4/0@step=2", "stall needs peer="),
        ("stall:4/0,peer=x@step=2", "'x' is no server"),
        ("cut:4/0,peer=3@step=2", "'peer' is no setting of cut"),
        ("slow:4/1@step=2", "slow needs rate="),
        ("slow:4/1@step=2,rate=fast", "'fast' is no rate, from 8kbit to 10gbit"),
        ("jitter:4/1@step=2,delay=0s", "'0s' is no delay, from 1ms to 1s"),
        ("degrade:4/1@step=2,over=1s", "degrade needs rate="),
        ("slow:4/1@step=2,rate=1mbit,direction=up", "'up' is no direction, one of out, in, both"),
        ("loss:4/1@step=2,share=0%", "'0%' is no share"),
        ("loss:4/1@step=2,share=120%", "'120%' is no share"),
        ("cut:4/1@step=2,rate=1mbit", "'rate' is no setting of cut"),
        ("flap:4/0@step=2,every=1ms", "'1ms' is too short for a period"),
        ("kill:4@step=2,phase=lunch", "'lunch' cannot be; a phase of a step is one of compute, reduce"),
        ("kill:4@step=2,phase=start", "'start' cannot be; a phase of a step is one of compute"),
        ("kill:4@phase=reduce", "'reduce' cannot be; phase=PHASE without step=NUMBER is one of start"),
        ("kill:4@t=2s,phase=start", "t=TIME and phase=PHASE do not go together"),
    ],
)
def test_errors_say_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        Fault.parse(text)
    assert reason in str(error.value)
    assert repr(text) in str(error.value)
    assert "write it like" in str(error.value)


@pytest.mark.parametrize("text", ["join:4@step=40", "leave:4@step=9", "kill:4@phase=transfer"])
def test_what_is_no_fault_and_what_strikes_while_a_server_joins(text: str) -> None:
    assert str(Fault.parse(text)) == text
    assert Fault.parse(text).by_anybody == text.startswith("join")


@pytest.mark.parametrize("delay", ["5ms", "1.2345678901234567ms", "0.3333333333333333s", "1s", "12.5ms"])
def test_a_delay_is_written_as_it_was_read_however_many_digits_it_has(delay: str) -> None:
    fault = Fault.parse(f"jitter:4/1@step=2,delay={delay}")
    assert Fault.parse(str(fault)) == fault


def test_plan_round_trip_and_several_faults_in_one_text() -> None:
    plan = FaultPlan.parse(["kill:4@step=20", "cut:2/0@step=30 coordinator@step=12"])
    plan.validate(FABRIC)
    assert len(plan) == 3
    assert FaultPlan.parse(str(plan)) == plan
    assert FaultPlan.parse([]) == FaultPlan()


@pytest.mark.parametrize("content", ["- kill:4@step=20\n- freeze:2@step=5,for=3s\n", None])
def test_yaml(content: str | None) -> None:
    content = content or "faults:\n  - kill:4@step=20\n  - 'freeze:2@step=5,for=3s'\n"
    assert str(FaultPlan.load(content)) == "kill:4@step=20 freeze:2@step=5,for=3s"


@pytest.mark.parametrize("content", ["- [", "kill:4@step=20", "- {kill: 4}", "other: []", ""])
def test_yaml_of_another_shape(content: str) -> None:
    with pytest.raises(UsageError, match="fault plan"):
        FaultPlan.load(content)


def test_targets_must_exist() -> None:
    FaultPlan.parse("kill:8@step=1 cut:8/1@step=1 switch:1/2@step=1 coordinator@step=1").validate(FABRIC)
    with pytest.raises(UsageError, match=r"bcube:3x2 has servers 0-8, there is no server 12"):
        FaultPlan.parse("kill:12@step=1").validate(FABRIC)
    with pytest.raises(UsageError, match=r"fault 'cut:4/2@step=1': bcube:3x2 has levels 0-1"):
        FaultPlan.parse("cut:4/2@step=1").validate(FABRIC)
    with pytest.raises(UsageError, match=r"there is no switch 0/3"):
        FaultPlan.parse("switch:0/3@step=1").validate(FABRIC)


def test_each_server_reads_its_part() -> None:
    plan = FaultPlan.parse(
        "kill:4@step=20 blackhole:4/1@step=3 switch:0/2@step=9 coordinator@step=12 join:4@step=30"
    )
    assert [str(fault) for fault in plan.for_server(4, FABRIC)] == ["kill:4@step=20", "blackhole:4/1@step=3"]
    assert [fault.level for fault in plan.for_server(4, FABRIC)] == [None, 1]
    silenced = [
        server for server in FABRIC.servers if any(f.level == 0 for f in plan.for_server(server, FABRIC))
    ]
    assert silenced == [6, 7, 8]
    assert [str(fault) for fault in plan.for_anybody] == ["coordinator@step=12", "join:4@step=30"]


def test_a_step_fault_strikes_once_in_the_middle_of_its_step() -> None:
    pending = FaultPlan.parse("kill:4@step=20").faults
    struck = []
    for step in (19, 20, 21):
        for progress in (0.0, 0.29, 0.3, 0.9, 1.0):
            firings, pending = due(pending, Moment(step, progress, "reduce", 0.0))
            struck += [(step, progress, firing.why) for firing in firings]
    assert struck == [(20, 0.3, "30% of step 20 was handled")]


def test_a_step_fault_that_was_missed_strikes_late() -> None:
    firings, pending = due(FaultPlan.parse("kill:4@step=20").faults, Moment(21, now_s=0.0))
    assert firings[0].why == "step 20 has passed, this is step 21"
    assert pending == ()


@pytest.mark.parametrize(
    ("when", "phases"),
    [
        ("step=20,phase=compute", ["compute"]),
        ("step=20,phase=reduce", ["reduce"]),
        ("step=20,phase=broadcast", ["broadcast"]),
        ("step=20,phase=complete", ["complete"]),
        ("step=20,phase=recovery", []),
    ],
)
def test_a_phase_of_a_step(when: str, phases: list[str]) -> None:
    pending = FaultPlan.parse(f"kill:4@{when}").faults
    struck = []
    for step, phase in [
        (19, "complete"),
        *((20, each) for each in ("compute", "reduce", "broadcast", "complete")),
    ]:
        firings, pending = due(pending, Moment(step, 0.0, phase, 1.0))
        struck += [phase for _ in firings]
    assert struck == phases


def test_a_phase_that_was_missed_strikes_late_but_a_recovery_is_waited_for() -> None:
    firings, _ = due(FaultPlan.parse("kill:4@step=20,phase=reduce").faults, Moment(20, 1.0, "complete", 1.0))
    assert firings[0].why == "step 20 is in its phase complete"
    waiting = FaultPlan.parse("kill:4@step=20,phase=recovery").faults
    assert due(waiting, Moment(25, 0.5, "reduce", 1.0)) == ((), waiting)
    assert due(waiting, Moment(19, 0.5, "recovery", 1.0)) == ((), waiting)
    assert len(due(waiting, Moment(25, 0.5, "recovery", 1.0))[0]) == 1


def test_phases_of_the_job_come_without_a_view() -> None:
    faults = FaultPlan.parse("kill:4@phase=start kill:5@step=1 kill:6@t=0s").faults
    firings, pending = due(faults, Moment(1, 0.0, "start", None))
    assert [str(firing.fault) for firing in firings] == ["kill:4@phase=start"]
    assert pending == faults[1:]


def test_a_time_fault_strikes_when_it_is_time() -> None:
    faults = FaultPlan.parse("cut:4/0@t=1.5s kill:1@step=3").faults
    firings, pending = due(faults, Moment(0, 0.9, "reduce", 1.49))
    assert (firings, pending) == ((), faults)
    firings, pending = due(pending, Moment(0, 0.9, "reduce", 1.5))
    assert [str(firing.fault) for firing in firings] == ["cut:4/0@t=1.5s"]
    assert [str(fault) for fault in pending] == ["kill:1@step=3"]


@pytest.mark.slow
def test_drawn_plans_repeat_and_can_be_survived() -> None:
    kinds = ("kill", "freeze", "cut", "blackhole", "switch", "coordinator", "exit", "flap")
    seen = set()
    for seed in range(200):
        plan = FaultPlan.draw(seed, FABRIC, steps=40, count=3, kinds=kinds)
        assert plan == FaultPlan.draw(seed, FABRIC, steps=40, count=3, kinds=kinds)
        assert FaultPlan.parse(str(plan)) == plan
        plan.validate(FABRIC)
        left = FABRIC.without(*(fault.target for fault in plan if fault.target is not None))
        assert left.is_connected
        assert len(left.servers) >= 5
        assert len({fault.trigger for fault in plan}) == 3
        seen |= {fault.kind for fault in plan}
    assert seen == set(kinds)
    assert FaultPlan.draw(1, FABRIC, 40) != FaultPlan.draw(2, FABRIC, 40)


def test_draws_that_cannot_be_survived_are_refused() -> None:
    with pytest.raises(UsageError, match="no further kill can be drawn"):
        FaultPlan.draw(0, bcube(2, 1), steps=10, count=1, kinds=["kill"])
    with pytest.raises(UsageError, match="cannot draw 'heal'"):
        FaultPlan.draw(0, FABRIC, steps=10, kinds=["heal"])
    with pytest.raises(UsageError, match="fewer faults than steps"):
        FaultPlan.draw(0, FABRIC, steps=2, count=2)


def test_a_stall_strikes_both_ends_and_needs_neighbours() -> None:
    plan = FaultPlan.parse("stall:4/0,peer=3@step=9,for=3s")
    (fault,) = plan
    assert (fault.peer, fault.level, fault.duration_s) == (3, 0, 3.0)
    assert Fault.parse("stall:4/0@step=9,peer=3,for=3s") == fault
    assert str(Fault.parse("stall:4/0,peer=3,for=3s", at_once=True)) == "stall:4/0,peer=3,for=3s"
    plan.validate(FABRIC)
    assert [bool(plan.for_server(server, FABRIC)) for server in range(6)] == [*[False] * 3, True, True, False]
    with pytest.raises(UsageError, match="server 7 has no NIC on the other side of link:4/0"):
        FaultPlan.parse("stall:4/0,peer=7@step=9").validate(FABRIC)


def test_what_is_done_to_real_cables_or_machines_says_so() -> None:
    assert {name for name, kind in KINDS.items() if kind.emulated} == {"node", "loss", "degrade"}
