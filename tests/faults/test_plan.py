import pytest

from faults.plan import AtStep, AtTime, Fault, FaultPlan, due
from topology import LinkFailure, ServerFailure, SwitchFailure, UsageError, bcube

FABRIC = bcube(3, 2)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:4@step=20", Fault("kill", ServerFailure(4), AtStep(20))),
        ("freeze:2@step=5,for=3s", Fault("freeze", ServerFailure(2), AtStep(5), 3.0)),
        ("freeze:2@t=0.25s", Fault("freeze", ServerFailure(2), AtTime(0.25))),
        ("cut:4/0@t=1.5s", Fault("cut", LinkFailure(4, 0), AtTime(1.5))),
        ("blackhole:4/0@step=9", Fault("blackhole", LinkFailure(4, 0), AtStep(9))),
        ("switch:0/2@step=9", Fault("switch", SwitchFailure(0, 2), AtStep(9))),
        ("coordinator@step=12", Fault("coordinator", None, AtStep(12))),
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
        ("kill:4@step", "'step' is no setting"),
        ("kill:4@step=", "'step=' is no setting"),
        ("kill:4@step=2.5", "'2.5' is no step"),
        ("kill:4@step=-2", "'-2' is no step"),
        ("kill:4@step=2,step=3", "'step' is given twice"),
        ("kill:4@step=2,t=3s", "exactly one of step=NUMBER and t=TIME"),
        ("freeze:4@for=3s", "exactly one of step=NUMBER and t=TIME"),
        ("kill:4@t=3", "'3' is no time; a time has a unit"),
        ("kill:4@when=3s", "'when' is no setting of it"),
        ("kill:4@step=2,for=3s", "only freeze takes for=TIME"),
    ],
)
def test_errors_say_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        Fault.parse(text)
    assert reason in str(error.value)
    assert repr(text) in str(error.value)
    assert "write it like" in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["flap:4/0@step=9", "slow:4/1@step=8,rate=10mbit", "heal:4/0@step=30", "join:4@step=40", "exit:4@step=1"],
)
def test_known_words_of_later_versions(text: str) -> None:
    with pytest.raises(UsageError, match="not available yet in this version; available: kill, freeze, cut"):
        Fault.parse(text)


def test_plan_round_trip_and_several_faults_in_one_text() -> None:
    plan = FaultPlan.parse(["kill:4@step=20", "cut:2/0@step=30 coordinator@step=12"])
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
    plan = FaultPlan.parse("kill:4@step=20 blackhole:4/1@step=3 switch:0/2@step=9 coordinator@step=12")
    assert [str(fault) for fault in plan.for_server(4, FABRIC)] == ["kill:4@step=20", "blackhole:4/1@step=3"]
    assert [fault.level for fault in plan.for_server(4, FABRIC)] == [None, 1]
    silenced = [
        server for server in FABRIC.servers if any(f.level == 0 for f in plan.for_server(server, FABRIC))
    ]
    assert silenced == [6, 7, 8]
    assert [str(fault) for fault in plan.for_coordinator] == ["coordinator@step=12"]


def test_a_step_fault_strikes_once_in_the_middle_of_its_step() -> None:
    pending = FaultPlan.parse("kill:4@step=20").faults
    struck = []
    for step in (19, 20, 21):
        for progress in (0.0, 0.29, 0.3, 0.9, 1.0):
            firings, pending = due(pending, step, progress, 0.0)
            struck += [(step, progress, firing.why) for firing in firings]
    assert struck == [(20, 0.3, "30% of step 20 was handled")]


def test_a_step_fault_that_was_missed_strikes_late() -> None:
    firings, pending = due(FaultPlan.parse("kill:4@step=20").faults, 21, 0.0, 0.0)
    assert firings[0].why == "step 20 has passed, this is step 21"
    assert pending == ()


def test_a_time_fault_strikes_when_it_is_time() -> None:
    faults = FaultPlan.parse("cut:4/0@t=1.5s kill:1@step=3").faults
    firings, pending = due(faults, 0, 0.9, 1.49)
    assert (firings, pending) == ((), faults)
    firings, pending = due(pending, 0, 0.9, 1.5)
    assert [str(firing.fault) for firing in firings] == ["cut:4/0@t=1.5s"]
    assert [str(fault) for fault in pending] == ["kill:1@step=3"]


def test_drawn_plans_repeat_and_can_be_survived() -> None:
    kinds = ("kill", "freeze", "cut", "blackhole", "switch", "coordinator")
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


def test_draws_that_cannot_be_survived_are_refused() -> None:
    with pytest.raises(UsageError, match="no further kill can be drawn"):
        FaultPlan.draw(0, bcube(2, 1), steps=10, count=1, kinds=["kill"])
    with pytest.raises(UsageError, match="cannot draw 'heal'"):
        FaultPlan.draw(0, FABRIC, steps=10, kinds=["heal"])
    with pytest.raises(UsageError, match="fewer faults than steps"):
        FaultPlan.draw(0, FABRIC, steps=2, count=2)
