"""Finds the faults of a plan that struck in a job that is over, from reports of servers and losses of others.

A server that dies cannot report the faults that were applied to it. Those that were due by then count as
struck.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

from bml.faults.notation import AtOnce, AtPhase, AtStep, AtTime, Fault
from bml.faults.plan import FaultPlan, touches
from bml.topology import Fabric, LinkFailure, ServerFailure, SwitchFailure

CLOCKS_S = 1.0
"""Servers see the first view at different times; so much they may differ, on a loaded machine."""


class Stay(NamedTuple):
    """The stay of a server in a job that lost it without an account of its faults.

    `after`: the step after which it came, None if it was there from the beginning; `until`: the last step
    that was committed with it; `until_s`: when a view without it was in force, in seconds after the first.
    """

    server: int
    after: int | None
    until: float
    until_s: float = inf


def stays(views: Sequence[Mapping[str, Any]], dead: Collection[int], told: Collection[int]) -> list[Stay]:
    """The servers that were lost: from the views of the job (`members`, `commit`, `at_s`), oldest first.

    `dead`: those that did not reach the end; `told`: those that gave an account at the end of their last
    incarnation.
    """
    found: list[Stay] = []
    came: dict[int, int | None] = {}
    for at, view in enumerate(views):
        members, commit = set(view["members"]), view["commit"]
        at_s = inf if view.get("at_s") is None else view["at_s"]
        found += [Stay(server, came.pop(server), commit, at_s) for server in sorted(came.keys() - members)]
        came.update(dict.fromkeys(members - came.keys(), commit if at else None))
    seen = {stay.server for stay in found} | came.keys()
    found += [Stay(server, came.get(server), inf) for server in dead if server in came or server not in seen]
    ended = came.keys() - set(dead)  # of these the incarnation that has told is no stay here
    last = {stay.server: stay for stay in found if stay.server in told and stay.server not in ended}
    return [stay for stay in found if stay is not last.get(stay.server)]


def never_struck(
    plan: FaultPlan,
    fabric: Fabric,
    struck: Collection[str],
    lost: Iterable[Stay],
    begun: Collection[str] = (),
    not_injected: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The faults of a plan that did not strike, as texts, each with the reason.

    `struck`: those of which some server says that their time came; `begun`: the joins for which a server was
    started; `not_injected`: those that could not be done when their time came, and why.
    """
    gone = list(lost)
    found = {}
    for fault in plan:
        text = str(fault)
        came = text in struck or any(_was_due(fault, stay, fabric) for stay in gone)
        if text in not_injected:
            found[text] = f"it could not be injected: {not_injected[text]}"
        elif not came:
            found[text] = _why(fault)
        elif fault.kind == "join" and text not in begun:
            found[text] = f"{_target(fault)} was there already, or the job was over"
    return found


def _was_due(fault: Fault, stay: Stay, fabric: Fabric) -> bool:
    """Whether it may have been applied to the server before that was lost."""
    if fault.by_anybody or not touches(fault, stay.server, fabric):
        return False
    match fault.trigger:
        case AtStep(step):
            return (stay.after is None or step > stay.after) and step <= stay.until + 1
        case AtPhase(phase):
            return phase != "start" or stay.after is None
        case AtTime(t_s):  # it counts from a time that a joiner has not seen
            return stay.after is None and t_s <= stay.until_s + CLOCKS_S
        case AtOnce():
            return True


def _why(fault: Fault) -> str:
    match fault.trigger:
        case AtStep(step, phase):
            when = f"step {step}" + (f" with its phase {phase}" if phase else "")
        case AtPhase(phase):
            when = f"the phase {phase}"
        case AtTime(t_s):
            when = f"the time {t_s:g} s after the first view"
        case AtOnce():
            when = "its moment"
    there = "" if fault.by_anybody else f" while {_target(fault)} was in the job"
    return f"{when} never came{there}"


def _target(fault: Fault) -> str:
    match fault.target:
        case None:
            return "the coordinator"
        case ServerFailure(server):
            return f"server {server}"
        case LinkFailure() | SwitchFailure():
            return str(fault.target).replace(":", " ")
